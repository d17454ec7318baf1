"""Many runs: in worker processes, and beside other processes.

TCS_KILLS=50 ends workers in every way, not only in two.
"""

import dataclasses
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
import tcs_lab as lab
import torch
from common import IMAGES, TINY, as_tar, config, numbers, tiny_command
from processes import logged, start_command, until
from tcs_lab.runs.checkpoints import checkpoint_path
from tcs_lab.runs.deadline import Deadline
from tcs_lab.runs.jobs import make_job
from tcs_lab.runs.runs import Run
from tcs_lab.support.files import hold_lock

import tcs_core as tcs

KILLS = int(os.environ.get("TCS_KILLS", 4))
BRIEF = {"epochs": 1, "train_samples": 60}


def configs(*schemes, **changes):
    return [config(name, **(BRIEF | changes)) for name in schemes]


def test_runs_are_shared_and_keep_their_order(tmp_path, monkeypatch, small):
    made, train = [], lab.runs.runs._train
    monkeypatch.setattr(
        lab.runs.runs, "_train", lambda c, *a: made.append(c.scheme.name) or train(c, *a)
    )
    records = lab.run_all(configs("TCS", "Baseline", "TCS"), tmp_path)
    assert made == ["TCS", "Baseline"]
    assert [r["config"]["scheme"]["name"] for r in records] == ["TCS", "Baseline", "TCS"]


def test_records_of_two_data_sets_are_never_one_table(tmp_path):
    more = IMAGES | {"train/cat/9.png": next(iter(IMAGES.values()))}
    roots = {"TCS": as_tar(tmp_path / "a.tar", IMAGES), "top-K": as_tar(tmp_path / "b.tar", more)}
    same = BRIEF | {"dataset": "folder", "train_samples": 2, "test_samples": 2, "batch_size": 1,
                    "clients": 1}  # fmt: skip
    one, two = (config(name, **same, data_root=str(root)) for name, root in roots.items())
    lab.run_all([one], tmp_path)
    for again in (lambda c: lab.run_all([c], tmp_path), lambda c: lab.run(c, tmp_path)):
        assert again(dataclasses.replace(one, data_root=str(tmp_path / "gone.tar")))  # not there
        with pytest.raises(
            ValueError, match=r"^data_root: got .*b\.tar, .*other data than that of"
        ):
            again(dataclasses.replace(one, data_root=two.data_root))
    hurried = Run(dataclasses.replace(one, data_root=two.data_root), 1.0)
    with pytest.raises(ValueError, match=r"^data_root: got .*b\.tar, .*other data than that of"):
        Deadline([hurried], [1.0], tmp_path)
    fewer = dataclasses.replace(two, train_samples=1)
    for other in (two, fewer):
        with pytest.raises(ValueError, match=r"ci.*runs: got records of different data"):
            lab.run_all([one, other], tmp_path)


def test_images_that_were_replaced_are_noticed_before_anything_is_trained(tmp_path, monkeypatch):
    more = IMAGES | {"train/cat/9.png": next(iter(IMAGES.values()))}
    same = BRIEF | {"dataset": "folder", "train_samples": 2, "test_samples": 2, "batch_size": 1,
                    "clients": 1, "data_root": str(as_tar(tmp_path / "a.tar", IMAGES))}  # fmt: skip
    lab.run_all([config("TCS", **same)], tmp_path)
    monkeypatch.delattr(lab.runs.runs, "_train")
    again = [config(n, **same | {"data_root": str(as_tar(tmp_path / "b.tar", more))})
             for n in ("TCS", "top-K")]  # fmt: skip
    with pytest.raises(ValueError, match=r"b\.tar, .*other data than that of"):
        lab.run_all(again, tmp_path)


def test_parts_of_one_data_set_may_stand_side_by_side(tmp_path):
    """A sweep over the size of the images, or over their number."""
    source = as_tar(tmp_path / "a.tar", IMAGES)
    same = {"dataset": "folder", "data_root": str(source), "test_samples": 2, "batch_size": 1,
            "clients": 1, "epochs": 1}  # fmt: skip
    parts = [{"train_samples": 2}, {"train_samples": 3}, {"train_samples": 2, "image_size": 4}]
    records = lab.run_all([config("Baseline", **same, **part) for part in parts], tmp_path)
    assert len({record["provenance"]["fingerprint"] for record in records}) == 2


@pytest.mark.parametrize("jobs", [0, -1, 1.5, True, "2"])
def test_a_number_of_jobs_that_is_none(tmp_path, jobs):
    with pytest.raises(ValueError, match="jobs: got "):
        lab.run_all(configs("TCS"), tmp_path, jobs)


@pytest.fixture
def few(tmp_path):
    """Settings of runs on twelve images that workers, too, can read."""
    path = as_tar(tmp_path / "images.tar", IMAGES)
    sizes = {"train_samples": None, "test_samples": None, "clients": 2, "batch_size": 2}
    return {"dataset": "folder", "data_root": str(path), "image_size": 8} | sizes


# Workers ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def own_scheme():
    @tcs.register_scheme("TCS-Mine", phi_global=1e-2, phi_local=1e-3)
    class Mine(tcs.TCS):
        pass

    yield "TCS-Mine-L2"
    del tcs.RULES["TCS-Mine"], tcs.FAMILIES["TCS-Mine"]


def test_worker_processes_make_the_same_records(tmp_path, few, own_scheme, monkeypatch):
    """Only a scheme of one's own is made in this process."""
    others = ["TCS-L2", "top-K", "Baseline", "QSGD", "DGC", "STC"]
    wanted, made_here = configs(own_scheme, *others, **few), []
    train = lab.runs.runs._train

    def noted(config, *arguments):
        made_here.append(config.scheme.name)
        return train(config, *arguments)

    with monkeypatch.context() as watched:
        watched.setattr(lab.runs.runs, "_train", noted)
        side_by_side = lab.run_all(wanted, tmp_path / "two", jobs=2)
    assert made_here == [own_scheme]
    assert not multiprocessing.active_children()
    in_turn = lab.run_all(wanted, tmp_path / "one")
    assert [numbers(r) for r in side_by_side] == [numbers(r) for r in in_turn]
    mine, other = side_by_side[:2]
    assert mine["config"]["rule_sha256"] and numbers(mine)[4] == numbers(other)[4]


class ThisProcess:
    """Stands in for a worker: this process makes the job, at once, on one thread."""

    begun: ClassVar = []

    def __init__(self, results, told):
        self.results, self.job = results, None
        self.connection, self.answers = multiprocessing.Pipe()
        self.process = SimpleNamespace(is_alive=lambda: False)

    def begin(self, job):
        self.job = job
        self.begun.append(job.config)
        make_job(Run(dataclasses.replace(job.config, threads=1)), self.results)
        self.answers.send(None)

    def finish(self):
        self.job = self.connection.recv()

    def close(self):
        pass


def test_a_run_that_is_left_over_has_the_threads_of_one_among_many(tmp_path, monkeypatch, small):
    """With 12 threads and four jobs: three, whether five runs are left or one."""
    monkeypatch.setattr(ThisProcess, "begun", [])
    monkeypatch.setattr(lab.runs.queue, "Worker", ThisProcess)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # would restore the twelve
    for seeds in range(5), [0]:
        wanted = [config(seed=seed, threads=None, **BRIEF) for seed in seeds]
        lab.run_all(wanted, tmp_path / str(len(wanted)), jobs=4)
    assert [one.threads for one in ThisProcess.begun] == [3] * 6


def test_each_worker_has_one_job_at_a_time_and_all_of_them_work(tmp_path, monkeypatch, small):
    workers, busy = [], []

    class WorkerHere:
        """A worker that makes its job in this process, when one waits for it."""

        def __init__(self, results, told):
            self.results, self.job = results, None
            workers.append(self)

        def begin(self, job):
            assert self.job is None
            self.job = job
            busy.append(sum(worker.job is not None for worker in workers))

        def finish(self):
            make_job(self.job, self.results)
            self.job = None

        def close(self):
            assert self.job is None

    monkeypatch.setattr(lab.runs.queue, "Worker", WorkerHere)
    monkeypatch.setattr(lab.runs.queue, "wait_for_any", lambda busy, seconds: busy[:1])
    ended, end = [], lab.runs.queue.Progress.end
    monkeypatch.setattr(
        lab.runs.queue.Progress,
        "end",
        lambda bar, digest, *made: ended.append(digest) or end(bar, digest, *made),
    )
    jobs = [Run(config) for config in configs("TCS", "top-K", "FedAvg", epochs=1)]
    records = lab.runs.run_queue(lambda: jobs, tmp_path, progress=False, jobs=2)
    assert sorted(ended) == sorted(job.digest for job in jobs)
    assert [record["digest"] for record in records] == [job.digest for job in jobs]
    assert busy == [1, 2, 2] and len(workers) == 2


def test_the_progress_counts_runs_that_a_plan_names_later(tmp_path, monkeypatch, small):
    added, add = [], lab.runs.queue.Progress.add
    monkeypatch.setattr(
        lab.runs.queue.Progress,
        "add",
        lambda bar, jobs: added.append({job.digest for job in jobs}) or add(bar, jobs),
    )
    first, second = (Run(config) for config in configs("TCS", "top-K"))

    def planned():
        return [first, second] if first.is_made(tmp_path) else [first]

    lab.runs.run_queue(planned, tmp_path, progress=False)
    assert {second.digest} in added


def test_a_run_that_cannot_travel_has_all_threads_and_one_that_can_has_its_share(
    tmp_path, monkeypatch, small
):
    """Both are made in this process, because another one works on the second until that is looked at."""

    class Staying(Run):
        can_travel = False

    threads, train = {}, lab.runs.runs._train
    monkeypatch.setattr(
        lab.runs.runs, "_train", lambda c, *a: threads.update({c.seed: c.threads}) or train(c, *a)
    )
    monkeypatch.setattr(lab.runs.queue, "_is_free", lambda job, results: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    jobs = [kind(config(seed=n, threads=None, **BRIEF)) for n, kind in enumerate((Staying, Run))]
    lab.runs.run_queue(lambda: jobs, tmp_path, progress=False, jobs=4)
    assert threads == {0: None, 1: 3}


def test_the_longest_runs_are_begun_first(tmp_path, monkeypatch, small):
    """Those of one local step have the most rounds; at the end no core should wait for one."""
    monkeypatch.setattr(ThisProcess, "begun", [])
    monkeypatch.setattr(lab.runs.queue, "Worker", ThisProcess)
    names = ["TCS-L4", "TCS-L2", "TCS", "Baseline"]
    records = lab.run_all(configs(*names, train_samples=60, epochs=1), tmp_path, jobs=2)
    assert [one.scheme.name for one in ThisProcess.begun] == names[::-1]
    assert [record["config"]["scheme"]["name"] for record in records] == names


def test_the_error_of_a_worker_is_raised_here(tmp_path, few, forked_workers):
    wanted = configs("TCS", "top-K", **few | {"batch_size": 900})
    with pytest.raises(ValueError, match="batch_size: got 900") as caught:
        lab.run_all(wanted, tmp_path, jobs=2)
    assert "Traceback" in caught.value.__notes__[0]  # of the worker
    assert not multiprocessing.active_children() and not list(tmp_path.rglob("*.json"))


class Odd(Exception):
    """Takes other arguments than it keeps, so that it cannot be unpickled."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def test_an_error_that_cannot_be_sent_is_sent_as_text():
    sent = lab.runs.workers._portable(Odd(1, 2))
    assert type(sent) is RuntimeError and "Odd" in str(sent) and "1 and 2" in str(sent)
    assert sent.__notes__[0].startswith("in a worker process:") and "Odd" in sent.__notes__[0]
    kept = lab.runs.workers._portable(FileNotFoundError(2, "is gone", "x.tar"))
    assert type(kept) is FileNotFoundError and kept.filename == "x.tar"


def test_a_script_is_not_run_again_by_its_workers(tmp_path, few):
    """It has no `if __name__ == "__main__"`."""
    script = tmp_path / "script.py"
    lines = ["import tcs_lab as lab", "print('once')"]
    lines += [f"given = {TINY | BRIEF | few!r}"]
    lines += ["runs = [lab.RunConfig(name, **given) for name in ('TCS', 'top-K')]"]
    lines += [f"print(len(lab.run_all(runs, {str(tmp_path)!r}, jobs=2)))"]
    script.write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.split() == ["once", "2"]
    assert re.fullmatch(r"run 1/2 is made: .*\nrun 2/2 is made: .*\n", done.stderr)


ENDS = {
    "SIGKILL": (-9, None),
    "SIGTERM": (143, "terminated; the same command goes on where it stopped"),
    "SIGINT": (130, "interrupted; the same command goes on where it stopped"),
    "a worker": (2, "error: a worker process was killed (out of memory?); the same command goes on"),
}  # fmt: skip


def alive(processes):
    return [p for p in processes if p.is_running() and p.status() != "zombie"]


@pytest.mark.parametrize("how", list(ENDS)[: 1 if KILLS < 50 else None])
def test_no_worker_outlives_its_parent(tmp_path, few, how):
    words = tiny_command(tmp_path, epochs=10000, jobs=2, schemes=["TCS", "top-K"], **few)
    process = start_command(words, tmp_path)
    checkpoints = tmp_path / "cache" / "checkpoints"
    until(lambda: len(list(checkpoints.glob("[!.]*.pt"))) == 2)
    family = psutil.Process(process.pid).children(recursive=True)
    workers = [p for p in family if "spawn_main" in " ".join(p.cmdline())]
    assert len(workers) == 2
    if how == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C on a terminal goes to all of them
    elif how == "a worker":
        workers[0].kill()
    else:
        os.kill(process.pid, getattr(signal, how))
    process.join(20)
    psutil.wait_procs(family, 20)
    assert not alive(family)
    code, line = ENDS[how]
    assert process.exitcode == code
    assert (tmp_path / "output").read_text(encoding="utf-8").strip() == (line or "")


def test_a_worker_that_gets_to_work_too_late_ends_at_once(tmp_path):
    """Its parent was killed while it imported: it has another one, so to say process 1."""
    here, there = multiprocessing.Pipe()
    late = lab.runs.workers._start(
        lab.runs.workers._make_jobs, there, tmp_path, tmp_path / "rows", 1
    )
    there.close()
    late.join(60)
    assert late.exitcode == 1
    here.close()


# The bar ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_that_arrives_after_its_run_was_counted_is_ignored():
    one = config(epochs=2)
    row = {"epoch": 2, "accuracy": 0.5, "bits_up": 10, "rounds": 1}
    with lab.Progress([Run(one)]) as bar:
        bar.show_row(one.digest, row)
        bar.end(one.digest)
        bar.show_row(one.digest, row)
        assert bar.left == {} and bar.bar.total == 1


def test_without_a_terminal_each_run_that_is_made_gets_a_line(tmp_path, few, capsys):
    wanted = configs("TCS", "top-K", epochs=1, **few)
    lab.run_all(wanted, tmp_path)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"run 1/2 is made: scheme TCS, eta 0.5, seed {wanted[0].seed}, epochs 1"
    assert second.startswith("run 2/2 is made: scheme top-K")
    lab.run_all([*wanted, *configs("FedAvg", epochs=1, **few)], tmp_path, progress=False)
    assert not capsys.readouterr().err


def test_a_row_that_is_written_in_two_parts_reaches_the_bar(monkeypatch):
    """As one does that crosses a page of its file; of a row whose worker was killed, nothing."""
    seen, failed = [], []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with lab.runs.progress.show_rows(
        SimpleNamespace(show_row=lambda *row: seen.append(row))
    ) as told:
        for part in '["a", {"epoch": 1', '}]\n["b", {"ep', '["c", {}]\n["d", {"epoch": 2}]\n':
            with told.open("a", encoding="utf-8") as file:
                file.write(part)
            time.sleep(0.5)  # the thread looks five times a second
    assert seen == [("a", {"epoch": 1}), ("d", {"epoch": 2})] and not failed


def test_rows_of_workers_reach_the_bar(tmp_path, monkeypatch, few, forked_workers):
    seen, epoch = [], lab.Progress.show_row
    monkeypatch.setattr(
        lab.Progress, "show_row", lambda bar, *a: seen.append(a[0]) or epoch(bar, *a)
    )
    wanted = configs("TCS", "top-K", epochs=3, **few)
    lab.run_all(wanted, tmp_path, jobs=2)
    assert sorted(seen) == sorted(3 * [c.digest for c in wanted])


# Other processes ──────────────────────────────────────────────────────────────────────────────────


def both(folder, words):
    """Two commands at once; what each said."""
    processes = [start_command(words, folder, name) for name in ("one", "two")]
    for process in processes:
        process.join(120)
    assert [p.exitcode for p in processes] == [0, 0]
    return [(folder / name).read_text(encoding="utf-8") for name in ("one", "two")]


def test_of_two_processes_that_want_one_run_one_works_and_the_other_waits(tmp_path):
    texts = both(tmp_path, [*tiny_command(tmp_path, epochs=8), "--scheme", "TCS"])
    assert len(logged(tmp_path / "trained")) == 1
    assert sum("waiting for another process, which works on TCS" in t for t in texts) == 1
    assert len({t.splitlines()[-1] for t in texts}) == 1  # the same row of the same table
    (path,) = (tmp_path / "ci" / "runs").iterdir()
    assert len(lab.read_record(path)["rows"]) == 8


def test_two_processes_share_a_table(tmp_path):
    schemes = ["TCS", "top-K", "rand-K", "FedAvg", "TCS-Q5", "TCS-L2"]
    texts = both(tmp_path, tiny_command(tmp_path, epochs=5, schemes=schemes))
    made = logged(tmp_path / "trained")
    assert sorted(scheme for _, scheme in made) == sorted(schemes)  # each once
    assert {name for name, _ in made} == {"one", "two"}
    tables = [text.split("| Scheme")[1] for text in texts]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_another_process_makes_comes_last(tmp_path, few, jobs, forked_workers):
    """A thread stands in for the other process."""
    wanted = configs("TCS", "top-K", "rand-K", **few)
    paths = [lab.record_path(c, tmp_path) for c in wanted]
    locked, seen = threading.Event(), []

    def hold():
        with hold_lock(checkpoint_path(wanted[0])) as held:
            assert held
            locked.set()
            until(lambda: paths[1].exists() and paths[2].exists())
            seen.append(paths[0].exists())

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait()
    records = lab.run_all(wanted, tmp_path, jobs=jobs)
    holder.join()
    assert seen == [False]
    assert [r["config"]["scheme"]["name"] for r in records] == ["TCS", "top-K", "rand-K"]


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path):
    words = [*tiny_command(tmp_path, epochs=10000), "--scheme", "TCS"]
    process = start_command(words, tmp_path)
    until(lambda: logged(tmp_path / "epochs"))
    wanted = checkpoint_path(config("TCS", epochs=10000))
    with hold_lock(wanted) as free:
        assert not free
    process.kill()
    process.join()
    with hold_lock(wanted) as free:
        assert free
