"""Runs before a deadline: what is begun, what it makes, and what is left of the rest."""

import itertools
import json
import os
import signal
import tarfile
import time
from types import SimpleNamespace

import psutil
import pytest
import tcs_lab as lab
from common import IMAGES, TINY, as_tar, config, numbers
from processes import start_command, until
from tcs_lab.__main__ import main
from tcs_lab.runs import deadline
from tcs_lab.runs.checkpoints import checkpoint_path, epochs_kept
from tcs_lab.runs.deadline import Attempt, Deadline, most_at_once, next_to_start
from tcs_lab.runs.plans import plan_jobs
from tcs_lab.runs.runs import Run

SHARING = [1.0, 1.5, 2.0]  # two at once do as much as 1.33 alone, three as much as 1.5

# Which run is begun ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("running", "waiting", "seconds", "place"),
    [
        ([], [10, 20], 100, 0),
        ([], [101, 20], 100, 1),  # the first does not fit
        ([], [101, 102], 100, None),
        ([50], [50], 75, 0),  # both take 75 together
        ([50], [50], 74, None),
        ([60], [20], 80, 0),  # the second ends after 30, the first 40 seconds later
        ([60], [20], 69, None),
        ([20, 20], [60], 100, 0),  # 40 seconds with three, 40 alone
        ([10, 20, 30], [1], 1000, None),  # no factor for four
        ([60], [60, 10], 89, 1),  # the first does not fit beside what runs, and later even less
        ([60], [10], 0, None),
    ],
)
def test_what_is_begun_ends_in_time_with_all_that_run(running, waiting, seconds, place):
    assert next_to_start(running, waiting, seconds, SHARING) == place


def test_no_more_runs_share_a_machine_than_is_faster_in_all():
    assert most_at_once([1.0]) == 1
    assert most_at_once([1.0, 1.9, 3.0]) == 2
    assert most_at_once([1.0, 2.0, 3.0]) == most_at_once([1.0, 2.5, 2.9]) == 1
    assert next_to_start([5], [5], 1000, [1.0, 2.1]) is None


def test_a_run_is_expected_to_go_on_as_it_went():
    """Alone: what it took while others ran is divided by how much they slow it."""
    run = Attempt(Run(config(epochs=10), minutes=5))
    assert run.work == 300
    run.end_part({"epoch": 1, "seconds": 40.0}, 2.0)
    assert run.work == pytest.approx(1.05 * 9 * 20)
    for epoch in range(2, 8):
        run.end_part({"epoch": epoch, "seconds": 3.0}, 1.0)
    assert run.work == pytest.approx(1.05 * 3 * 3)  # the first, slow ones do not count any more
    assert Attempt(Run(config(epochs=10), minutes=5), done=9).work == 30


class Machine:
    """A machine whose clock is counted: so many epochs a second are made by all runs together."""

    def __init__(self, monkeypatch, sharing, alone, exitcodes=None):
        self.sharing, self.alone = sharing, alone  # seconds of a run's work, by scheme
        self.exitcodes = exitcodes or {}  # of those that leave no record
        self.now, self.left, self.begun, self.ended, self.stopped = 0.0, {}, [], {}, []
        monkeypatch.setattr(deadline, "time", self)
        monkeypatch.setattr(Deadline, "_begin", lambda *given: self.begin(*given))
        monkeypatch.setattr(
            Run,
            "is_made",
            lambda job, _: job.config.scheme.name in self.ended.keys() - self.exitcodes,
        )
        monkeypatch.setattr(Run, "read", lambda *_: {})

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for name in [*self.left]:
            self.left[name] -= seconds / self.sharing[len(self.left) - 1]
        for name in [name for name, left in self.left.items() if left <= 0]:
            del self.left[name]
            self.ended[name] = self.now

    def begin(self, owner, run, told):
        name = run.job.config.scheme.name
        self.begun.append((name, self.now))
        run.begun = self.now
        self.left[name] = self.alone[name]
        run.process = SimpleNamespace(
            is_alive=lambda: name in self.left, terminate=lambda: self.stop(name),
            join=lambda _: None, exitcode=self.exitcodes.get(name, 0),
        )  # fmt: skip
        owner.running.append(run)

    def stop(self, name):
        self.stopped.append(name)
        del self.left[name]


@pytest.mark.parametrize("left", [2, 4, 5.5, 7, 9, 12])
def test_nothing_is_begun_that_does_not_end(monkeypatch, left):
    """If the runs take as long as the plan says."""
    monkeypatch.setattr(deadline, "_POLL_SECONDS", 1.0)
    expected = {"FedAvg": 1.3, "TCS": 1.3, "TCS-Q5": 6.6, "top-K": 5.7, "Baseline": 11, "rand-K": 2}
    machine = Machine(monkeypatch, SHARING, {name: 60 * t for name, t in expected.items()})
    made = Deadline([Run(config(name), minutes) for name, minutes in expected.items()], SHARING)
    records = made.make(left)
    assert not machine.stopped and len(records) == len(machine.begun) == len(machine.ended)
    assert max(machine.ended.values()) <= 60 * left + 6  # of rounding up to a poll
    assert [name for name, _ in machine.begun][:2] == ["FedAvg", "TCS"]
    outcomes = dict(zip(expected, made.table().outcome, strict=True))
    assert {name for name, became in outcomes.items() if became.startswith("made in ")} == set(
        machine.ended
    )
    left = {name for name, became in outcomes.items() if became.startswith("not begun: ")}
    assert left == set(expected) - set(machine.ended) and ("Baseline" in left or left == 12)


def test_what_is_too_slow_is_stopped_when_time_is_up(monkeypatch):
    """It takes three times as long as the plan says."""
    monkeypatch.setattr(deadline, "_POLL_SECONDS", 1.0)
    machine = Machine(monkeypatch, [1.0], {"TCS": 180, "top-K": 30})
    made = Deadline([Run(config("TCS"), 1.0), Run(config("top-K"), 1.0)], [1.0])
    assert made.make(2.0) == []
    assert machine.stopped == ["TCS"] and machine.now == pytest.approx(120, abs=1)
    assert list(made.table().outcome) == [
        "stopped after epoch 0; goes on after epoch 0", "not begun: 1.0 minutes alone",
    ]  # fmt: skip


def test_a_run_that_fails_or_is_made_elsewhere_keeps_no_other_back(monkeypatch):
    monkeypatch.setattr(deadline, "_POLL_SECONDS", 1.0)
    seconds = {"TCS": 30, "top-K": 20, "FedAvg": 40, "rand-K": 60}
    Machine(monkeypatch, SHARING, seconds, exitcodes={"TCS": 1, "FedAvg": 0})
    made = Deadline([Run(config(name), 1.0) for name in seconds], SHARING)
    assert len(made.make(12)) == 2 and made.failed
    assert list(made.table().outcome) == [
        "failed (exit code 1)", "made in 0.7 minutes",
        "left to another process, which is making it", "made in 1.3 minutes",
    ]  # fmt: skip


def test_no_more_than_so_many_jobs(monkeypatch):
    monkeypatch.setattr(deadline, "_POLL_SECONDS", 1.0)
    names = ["TCS", "top-K", "rand-K", "FedAvg"]
    for jobs in (1, 2, 3, 9):
        machine = Machine(monkeypatch, SHARING, dict.fromkeys(names, 60.0))
        planned = [Run(config(name), 1.0) for name in names]
        Deadline(planned, SHARING, most=jobs).make(12)
        at_once = [len(list(same)) for _, same in itertools.groupby(t for _, t in machine.begun)]
        assert at_once[0] == min(jobs, 3) and sum(at_once) == 4


# The plan ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def plan(tmp_path):
    """A plan of tiny runs on twelve images that other processes can read; the words that make it."""
    images = as_tar(tmp_path / "images.tar", IMAGES)
    profile = TINY | {"dataset": "folder", "data_root": str(images), "image_size": 8, "clients": 2,
                      "train_samples": None, "test_samples": None, "batch_size": 2, "epochs": 2}  # fmt: skip
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in profile.items())
    (tmp_path / "tiny.yaml").write_text(text, encoding="utf-8")

    def written(*runs, sharing="[1.0, 1.2]"):
        file = tmp_path / "plan.yaml"
        stages = f"[{{stage: a, seeds: [3], runs: [{', '.join(runs)}]}}]"
        text = f"{{profile: tiny.yaml, sharing: {sharing}, stages: {stages}}}"
        file.write_text(text, encoding="utf-8")
        return ["queue", str(file), "--results", str(tmp_path / "results")]

    return written


def test_a_plan_says_how_long_its_runs_take(plan):
    file = plan("{schemes: [TCS, top-K], minutes: 2}", "{schemes: [Baseline]}")[1]
    (runs,) = plan_jobs(file).values()
    assert [run.minutes for run in runs] == [2, 2, None]
    (plain,) = plan_jobs(plan("{schemes: [TCS, top-K]}", "{schemes: [Baseline]}")[1]).values()
    assert [run.config for run in plain] == [run.config for run in runs]
    assert [run.minutes for run in plain] == [None, None, None]


def test_the_plan_for_a_gpu_says_it_of_all_its_runs():
    file = lab.ROOT / "params" / "gpu_plan.yaml"
    configs = [c for runs in lab.plan_runs(file).values() for c in runs]
    assert all(job.minutes for jobs in plan_jobs(file).values() for job in jobs)
    assert {c.epochs for c in configs} == {60, 300}
    papers = lab.read_params([lab.ROOT / "params" / "paper.yaml"]) | {
        "schemes": ["TCS"],
        "seeds": [0],
    }
    assert lab.plan(papers)[0].digest in {c.digest for c in configs}  # at the paper's own settings


@pytest.mark.parametrize("sharing", ["[]", "[1.2]", "[1.0, 0.9]", "[1.0, 2.0, 1.5]", "[1.0, x]"])
def test_factors_that_mean_nothing_are_refused(plan, sharing):
    with pytest.raises(ValueError, match=r"plan\.yaml: sharing: "):
        lab.plan_runs(plan("{schemes: [TCS]}", sharing=sharing)[1])


@pytest.mark.parametrize("minutes", ["0", "-1.0", "soon"])
def test_minutes_that_are_none_are_refused(plan, minutes):
    with pytest.raises(ValueError, match=r"plan\.yaml: .*minutes: "):
        lab.plan_runs(plan(f"{{schemes: [TCS], minutes: {minutes}}}")[1])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--minutes", "1"], "minutes: got none for TCS, seed 3"),
        (["--minutes", "0"], "--minutes: got 0, allowed: a finite number above 0"),
        (["--minutes", "nan"], "--minutes: got nan"),
        (["--minutes", "1", "--jobs", "0"], "--jobs: got 0"),
        (["--jobs", "0"], "--jobs: got 0, allowed: a whole number >= 1"),
        (["--pack", "x.tar"], "--pack: got x.tar, allowed: only"),
    ],
)
def test_a_command_that_means_nothing_makes_nothing(plan, tmp_path, capsys, more, says):
    assert main([*plan("{schemes: [TCS]}"), *more]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "results").exists()


def test_a_pack_that_cannot_be_written_is_refused_before_the_first_run(plan, tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    words = [*plan("{schemes: [TCS], minutes: 1}"), "--minutes", "1", "--pack"]
    for pack in (tmp_path, tmp_path / "file" / "new.tar"):
        assert main([*words, str(pack)]) == 2
        assert capsys.readouterr().err.startswith("error: --pack: got ")
    assert not (tmp_path / "results").exists()


def test_two_plans_have_no_time_in_common(plan, tmp_path, capsys):
    queue, file, *more = plan("{schemes: [TCS], minutes: 1}")
    assert main([queue, file, str(tmp_path / "tiny.yaml"), *more, "--minutes", "1"]) == 2
    text = (tmp_path / "plan.yaml").read_text(encoding="utf-8")
    (tmp_path / "other.yaml").write_text(text, encoding="utf-8")
    assert main([queue, file, str(tmp_path / "other.yaml"), *more, "--minutes", "1"]) == 2
    assert "other.yaml, allowed with --minutes: " in capsys.readouterr().err


# From end to end ──────────────────────────────────────────────────────────────────────────────────


def test_what_fits_is_made_as_by_run_and_brought_back_in_one_file(plan, tmp_path, capfd):
    words = plan(
        "{schemes: [TCS-L2], minutes: 0.5}", "{schemes: [top-K], minutes: 500}",
        "{schemes: [TCS], batch_size: 90, minutes: 0.5}", "{schemes: [Baseline], minutes: 0.5}",
    )  # fmt: skip
    pack = tmp_path / "records.tar"
    assert main([*words, "--minutes", "10", "--pack", str(pack)]) == 1
    said = capfd.readouterr()
    lines = [line.strip("| ").split(" | ") for line in said.out.splitlines()[2:]]
    assert [(line[0], line[-1].split(" in ")[0]) for line in lines] == [
        ("TCS-L2", "made"), ("top-K", "not begun: 500.0 minutes alone"),
        ("TCS", "failed (exit code 1)"), ("Baseline", "made"),
    ]  # fmt: skip
    assert "error: TCS, seed 3: batch_size: got 90" in said.err and "Traceback" not in said.err
    (runs,) = lab.plan_runs(words[1]).values()
    made = {c.record_name: c for c in (runs[0], runs[3])}
    folder = tmp_path / "results" / "ci" / "runs"
    assert {path.name for path in folder.iterdir()} == set(made)
    for name, wanted in made.items():
        there, here = lab.read_record(folder / name), lab.run(wanted, tmp_path / "elsewhere")
        assert numbers(there) == numbers(here) and there.keys() == here.keys()
        same = there["provenance"].keys() - {"finished", "wall_seconds"}
        assert {k: there["provenance"][k] for k in same} == {k: here["provenance"][k] for k in same}
        assert not checkpoint_path(wanted).exists()
    with tarfile.open(pack) as archive:
        assert set(archive.getnames()) == {f"ci/runs/{name}" for name in made}
        archive.extractall(tmp_path / "unpacked", filter="data")
    for name in made:
        unpacked = tmp_path / "unpacked" / "ci" / "runs" / name
        assert unpacked.read_bytes() == (folder / name).read_bytes()
    again = Deadline(plan_jobs(words[1])["a"], [1.0], tmp_path / "results")
    outcomes = [attempt.outcome for attempt in again.attempts.values()]
    assert outcomes == ["was there", "", "", "was there"]
    assert [attempt.job.config for attempt in again.waiting] == runs[1:3]


def test_a_run_that_is_stopped_keeps_its_checkpoint_and_a_second_call_goes_on(
    plan, tmp_path, capsys, monkeypatch, forked_workers
):
    words = plan("{schemes: [TCS-Q5], epochs: 80, minutes: 1}")
    ((wanted,),) = lab.plan_runs(words[1]).values()

    def until_it_has_a_checkpoint():
        return 1e9 if checkpoint_path(wanted).exists() else 0.0

    with monkeypatch.context() as hurried:
        clock = SimpleNamespace(monotonic=until_it_has_a_checkpoint, sleep=time.sleep)
        hurried.setattr(deadline, "time", clock)
        assert main([*words, "--minutes", "2"]) == 0
    kept = epochs_kept(wanted)
    outcome = capsys.readouterr().out.splitlines()[-1]
    assert 0 < kept < 80 and outcome.endswith(f"goes on after epoch {kept} |")
    assert not (tmp_path / "results" / "ci").exists()
    rows = json.loads(lab.runs.checkpoints.torch.load(checkpoint_path(wanted))["rows"])
    (attempt,) = Deadline(plan_jobs(words[1])["a"], [1.0]).waiting
    assert attempt.work == pytest.approx(60 * (1 - kept / 80))
    assert main([*words, "--minutes", "2"]) == 0
    record = lab.read_record(lab.record_path(wanted, tmp_path / "results"))
    assert record["rows"][:kept] == rows  # also the seconds that they took
    assert numbers(record) == numbers(lab.run(wanted, tmp_path / "elsewhere"))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_run_outlives_the_command(plan, tmp_path, how):
    words = plan("{schemes: [TCS-Q5], epochs: 100000, minutes: 1}")
    ((wanted,),) = lab.plan_runs(words[1]).values()
    (tmp_path / "cache").mkdir(exist_ok=True)
    process = start_command([*words, "--minutes", "100"], tmp_path)
    until(checkpoint_path(wanted).exists, 120)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, how)
    process.join(60)
    assert process.exitcode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
    _, alive = psutil.wait_procs(children, timeout=30)
    assert children and not alive
    assert epochs_kept(wanted) and not (tmp_path / "results" / "ci").exists()
    if how == signal.SIGTERM:
        said = (tmp_path / "output").read_text(encoding="utf-8")
        assert said == "terminated; the same command goes on where it stopped\n"
