"""Nothing lost, nothing trusted: kills, two processes at once, bad input, bad numbers, hostile
clients, long and large runs.

Longer variants, each named by an environment variable:

    TCS_KILLS=50       kills of the kill-and-resume test (default 4), 3 s each; 50 also interrupts
                       papermill and ends parents of workers by SIGTERM
"""

import functools
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import tcs_core as tcs

KILLS = int(os.environ.get("TCS_KILLS", 4))

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
EXIT = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}

TINY = {"model": "resnet8", "width": 2, "batch_size": 4, "clients": 3, "epochs": 3, "train_samples": 120,
        "test_samples": 40, "reference_batch": None, "threads": 1}  # fmt: skip


def config(scheme="TCS-L2-Q5", **changes):
    return tcs.RunConfig(scheme, **(TINY | changes))


def numbers(record):
    """All of a record that a rerun must repeat bit for bit."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in record["rows"]]
    return record["config"], record["status"], record["reason"], record["dimension"], rows


@pytest.fixture
def small(monkeypatch):
    """160 images instead of 10,000, in this process."""
    images = tcs.synthetic_dataset(120, 40)
    monkeypatch.setattr(tcs, "synthetic_dataset", lambda: images)
    tcs.load_dataset.cache_clear()
    yield
    tcs.load_dataset.cache_clear()


# Processes to kill, all forked from one that has imported the core ────────────────────────────────

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tcs_core", Path(__file__).stem])


def command(words, folder, name, disturb=None):
    """In a new process and process group: the command line, with its output in folder/name."""
    os.setsid()
    os.environ["TCS_CACHE"] = str(folder / "cache")
    out = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    torch.set_num_threads(1)
    images = tcs.synthetic_dataset(120, 40)
    tcs.synthetic_dataset = lambda: images
    train = tcs._train

    def log(file, what):
        with (folder / file).open("a") as lines:
            lines.write(f"{name} {what}\n")

    def logged(config, data, on_epoch):
        log("trained", config.scheme.name)
        return train(config, data, lambda row: (log("epochs", row["epoch"]), on_epoch(row)))

    tcs._train = logged
    if disturb:
        disturb()
    code = tcs.main(words)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def start(folder, name, words, disturb=None):
    process = PROCESSES.Process(target=command, args=(words, folder, name, disturb))
    process.start()
    return process


@pytest.fixture
def params(tmp_path):
    """The words of a command that makes TINY runs under tmp_path."""
    path = tmp_path / "tiny.yaml"
    path.write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in TINY.items()))
    return ["run", "--params", str(path), "--results", str(tmp_path)]


def logged(path):
    """What the commands wrote down: pairs of the command's name and a scheme, or an epoch."""
    return [line.split() for line in path.read_text().splitlines()]


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


# Two at once ──────────────────────────────────────────────────────────────────────────────────────


def test_of_two_processes_that_want_one_run_one_works_and_the_other_waits(tmp_path, params):
    words = [*params, "--scheme", "TCS", "--set", "epochs=30"]
    both = [start(tmp_path, name, words) for name in ("one", "two")]
    for process in both:
        process.join(120)
    assert [p.exitcode for p in both] == [0, 0]
    assert len(logged(tmp_path / "trained")) == 1
    texts = [(tmp_path / name).read_text() for name in ("one", "two")]
    assert sum("waiting for another process, which works on TCS" in t for t in texts) == 1
    assert len({t.splitlines()[-1] for t in texts}) == 1  # the same row of the same table
    (path,) = (tmp_path / "ci" / "runs").iterdir()
    assert len(tcs.read_record(path)["rows"]) == 30
    assert not list((tmp_path / "cache" / "locks").iterdir())


def test_two_processes_share_a_table(tmp_path, params):
    words = [*params, "--set", "epochs=10"]
    schemes = ["TCS", "top-K", "rand-K", "FedAvg", "TCS-Q5", "TCS-L2"]
    for scheme in schemes:
        words += ["--scheme", scheme]
    both = [start(tmp_path, name, words) for name in ("one", "two")]
    for process in both:
        process.join(120)
    assert [p.exitcode for p in both] == [0, 0]
    made = logged(tmp_path / "trained")
    assert sorted(scheme for _, scheme in made) == sorted(schemes)  # each once
    assert {name for name, _ in made} == {"one", "two"}
    tables = [(tmp_path / name).read_text().split("| Scheme")[1] for name in ("one", "two")]
    assert tables[0] == tables[1]


def test_the_lock_of_a_dead_process_does_not_block(tmp_path, params):
    process = start(tmp_path, "one", [*params, "--scheme", "TCS", "--set", "epochs=10000"])
    locks = tmp_path / "cache" / "locks"
    until(lambda: list(locks.glob("*.lock")) and (tmp_path / "trained").exists())
    process.kill()
    process.join()
    assert list(locks.glob("*.lock"))
    (left,) = locks.glob("*.lock")
    file = tcs._lock_file(left)
    assert file is not None and tcs._lock_file(left) is None  # now this process has it
    file.close()


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_another_process_makes_comes_last(tmp_path, monkeypatch, small, jobs):
    """In this process, and in worker processes; a thread stands in for the other process."""
    configs = [config(s, epochs=1) for s in ("TCS", "top-K", "rand-K")]
    paths = [tcs.record_path(c, tmp_path) for c in configs]
    locked, seen = threading.Event(), []

    def hold():
        with tcs._alone(tcs._checkpoint_path(configs[0]), None) as held:
            assert held
            locked.set()
            until(lambda: paths[1].exists() and paths[2].exists())
            seen.append(paths[0].exists())

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait()
    records = tcs.run_all(configs, tmp_path, jobs=jobs)
    holder.join()
    assert seen == [False]
    assert [r["config"]["scheme"]["name"] for r in records] == ["TCS", "top-K", "rand-K"]


@pytest.mark.parametrize(
    "how", ["SIGKILL", "SIGINT"] if KILLS < 50 else ["SIGKILL", "SIGTERM", "SIGINT"]
)
def test_no_worker_outlives_its_parent(tmp_path, params, how):
    words = [*params, "--scheme", "TCS", "--scheme", "top-K", "--set", "epochs=10000", "--jobs", "2"]  # fmt: skip
    process = start(tmp_path, "one", words)
    checkpoints = tmp_path / "cache" / "checkpoints"
    until(lambda: len(list(checkpoints.glob("*.pt"))) == 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    if how == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C on a terminal goes to all of them
    else:
        os.kill(process.pid, getattr(signal, how))
    process.join(20)
    psutil.wait_procs(family, 20)
    assert not [p for p in family if p.is_running() and p.status() != "zombie"]
    assert process.exitcode == EXIT[getattr(signal, how)]
    text = (tmp_path / "one").read_text()
    assert "Traceback" not in text
    assert how == "SIGKILL" or "the same command goes on where it stopped" in text


# Kill and resume ──────────────────────────────────────────────────────────────────────────────────

PLACES = (".pt", "training", ".json", "training")  # in a checkpoint, anywhere, in the record
EPOCHS = 20


def kill_in_write(suffix, stage, number, how):
    """This process gets the signal while it writes its `number`-th file with this suffix: when half
    of it is written, when all of it is but not under its name, or when it is done."""
    whole, replace, left = tcs._write_whole, os.replace, [number]

    def strike(*_):
        os.kill(os.getpid(), how)

    def disturbed(path, write):
        left[0] -= path.suffix == suffix
        if left[0] or path.suffix != suffix:
            return whole(path, write)

        def half(file):
            content = io.BytesIO()
            write(content)
            file.write(content.getvalue()[: len(content.getvalue()) // 2])
            file.flush()
            strike()

        os.replace = strike if stage == "unnamed" else replace
        whole(path, half if stage == "half" else write)
        strike()

    tcs._write_whole = disturbed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The record's numbers of a run that nobody kills, and how long it trains."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = ["run", "--params", str(folder / "tiny.yaml"), "--results", str(folder)]
    (folder / "tiny.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in TINY.items()))
    process = start(folder, "one", [*words, "--scheme", "TCS-Q5", "--set", f"epochs={EPOCHS}"])
    until(lambda: (folder / "trained").exists())
    begin = time.monotonic()
    process.join(60)
    assert process.exitcode == 0
    (path,) = (folder / "ci" / "runs").iterdir()
    return numbers(tcs.read_record(path)), time.monotonic() - begin


@pytest.mark.parametrize("case", range(KILLS))
def test_a_killed_run_goes_on_and_ends_in_the_same_record(tmp_path, params, undisturbed, case):
    rng, how, place = random.Random(case), SIGNALS[case % 3], PLACES[case % 4]
    expected, seconds = undisturbed
    words = [*params, "--scheme", "TCS-Q5", "--set", f"epochs={EPOCHS}"]
    disturb = None
    if place != "training":
        number = 1 if place == ".json" else rng.randint(1, 4)
        stage = rng.choice(["half", "unnamed", "done"])
        disturb = functools.partial(kill_in_write, place, stage, number, how)
    process = start(tmp_path, "one", words, disturb)
    if place == "training":
        until(lambda: (tmp_path / "trained").exists())
        time.sleep(rng.uniform(0, 0.9 * seconds))
        os.kill(process.pid, how)
    process.join(60)
    assert process.exitcode == EXIT[how]
    records = tmp_path / "ci" / "runs"
    for path in records.glob("[!.]*"):
        tcs.read_record(path)  # whole, if it is there
    left = list((tmp_path / "cache" / "checkpoints").glob("[!.]*"))
    begun = [len(json.loads(torch.load(path, weights_only=True)["rows"])) for path in left]
    there = list(records.glob("[!.]*"))
    again = start(tmp_path, "two", words)
    again.join(60)
    assert again.exitcode == 0, (tmp_path / "two").read_text()
    (path,) = records.iterdir()
    assert numbers(tcs.read_record(path)) == expected
    if not there:
        made = [int(epoch) for name, epoch in logged(tmp_path / "epochs") if name == "two"]
        assert made == list(range(sum(begun) + 1, EPOCHS + 1))
    assert not list((tmp_path / "cache" / "checkpoints").glob("*.part"))


@pytest.mark.skipif(KILLS < 50, reason="half a minute: set TCS_KILLS=50")
def test_papermill_interrupted_and_called_again_goes_on(tmp_path):
    """Ctrl-C, as a terminal sends it, in the middle of a table; then the same command."""
    (tmp_path / "notebooks").mkdir()
    for name in ("tcs_core.py", "notebooks/08_tables_and_curves.ipynb"):
        shutil.copy(tcs.ROOT / name, tmp_path / name)
    fields = TINY | {
        "schemes": ["TCS"],
        "paper": {},
        "epochs": 60,
        "jobs": 1,
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(fields))
    words = [sys.executable, "-m", "papermill", "notebooks/08_tables_and_curves.ipynb", "out.ipynb",
             "-f", "tiny.yaml", "--no-progress-bar"]  # fmt: skip
    environment = dict(os.environ, TCS_CACHE=str(tmp_path / "cache"))
    settings = {"cwd": tmp_path, "env": environment, "start_new_session": True}
    checkpoints = tmp_path / "cache" / "checkpoints"

    def saved():
        return list(checkpoints.glob("[!.]*.pt"))

    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, **settings)
    until(saved)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0 and saved()
    psutil.wait_procs(family, 20)
    assert not [p for p in family if p.is_running() and p.status() != "zombie"]
    begun = json.loads(torch.load(saved()[0], weights_only=True)["rows"])
    assert 0 < len(begun) < 60 and not (tmp_path / "results").exists()
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, **settings)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "results" / "ci" / "runs").iterdir()
    rows = tcs.read_record(path)["rows"]
    assert len(rows) == 60 and not saved()
    assert rows[: len(begun)] == begun  # to the second that each took: not made again
