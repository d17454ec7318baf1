"""Jobs of different kinds: one plan, one queue, one way to write and find records."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass

import pytest
import tcs_lab as lab
from common import TINY, config, numbers
from processes import FORKSERVER, until
from tcs_lab.runs.index import find_records
from tcs_lab.runs.jobs import Job, make_job, missing_jobs
from tcs_lab.runs.plans import count_made, plan_jobs
from tcs_lab.runs.queue import run_queue
from tcs_lab.runs.records import results_folder
from tcs_lab.runs.runs import Run
from tcs_lab.studies import bench, links
from tcs_lab.studies.optimizers import HookTraining, final_loss
from tcs_lab.support.files import write_json

PLAN = """
profile: tiny.yaml
stages:
- {stage: fixed, runs: [{schemes: [top-K], epochs: 1}], seeds: [3]}
- stage: hook
  kind: studies.optimizers
  seeds: [1]
  ranks: 2
  width: 8
  context: 8
  batch_size: 1
  dense_steps: 1
  sparse_steps: 1
  test_every: 1
  weight_decay: 0.01
  momentum: 0.9
  beta_2: 0.999
  sweep: {seed: 0, steps: 2, rates: {SGD: [0.001, 0.1, 1.0e+5]}}
  schemes: {dense: null, TCS 10 %: {phi_global: 0.1, phi_local: 0.01}}
  optimizers: [SGD]
  corrected: {}
"""


@pytest.fixture
def plan(tmp_path):
    profile = "".join(f"{key}: {json.dumps(value)}\n" for key, value in TINY.items())
    (tmp_path / "tiny.yaml").write_text(profile, encoding="utf-8")
    file = tmp_path / "plan.yaml"
    file.write_text(PLAN, encoding="utf-8")
    return file


@dataclass(frozen=True)
class Wait(Job):
    """Waits so many seconds, after it has written down that it was begun."""

    pattern = "waits/*.json"
    number: int
    seconds: float = 0.0

    @property
    def identity(self):
        return {"number": self.number}

    @property
    def name(self):
        return f"wait {self.number}"

    def path(self, results=None):
        return results_folder("waits", results) / f"{self.number}.json"

    def make(self, tell=None):
        with open(os.environ["TCS_WAITS"], "a", encoding="utf-8") as file:
            file.write(f"{self.number} {os.getpid()}\n")
        time.sleep(self.seconds)
        return {"number": self.number, "process": os.getpid()}


def work_on_queue(folder, jobs):
    os.environ["TCS_WAITS"] = str(folder / "begun")
    os.environ["TCS_CACHE"] = str(folder / "cache")
    run_queue(lambda: jobs, folder, progress=False)


def begun(folder):
    file = folder / "begun"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [int(line.split()[0]) for line in lines]


# One queue ────────────────────────────────────────────────────────────────────────────────────────


def test_a_plan_of_two_kinds_goes_through_one_queue(plan, tmp_path, small):
    """What the second kind makes in the end follows from its own sweep."""
    known = plan_jobs(plan, results=tmp_path)
    assert [len(jobs) for jobs in known.values()] == [1, 3]

    def jobs():
        return [job for stage in plan_jobs(plan, results=tmp_path).values() for job in stage]

    records = run_queue(jobs, tmp_path, progress=False)
    made = plan_jobs(plan, results=tmp_path)
    assert not missing_jobs([job for stage in made.values() for job in stage], tmp_path)
    (run,) = made["fixed"]
    assert numbers(records[0]) == numbers(lab.run(run.config, tmp_path / "alone"))
    sweeps = [job for job in made["hook"] if job.is_sweep]
    trainings = [job for job in made["hook"] if not job.is_sweep]
    losses = {job.rate: final_loss(job.read(tmp_path)) for job in sweeps}
    assert {job.rate for job in trainings} == {min(losses, key=losses.get)}
    assert [job.setup.scheme for job in trainings] == ["dense", "TCS 10 %"]
    counted = count_made(made, tmp_path).set_index("stage")
    assert counted["made"].tolist() == counted["planned"].tolist() == [1, len(made["hook"])]
    assert {record["provenance"]["core_sha256"] for record in records} == {
        records[0]["provenance"]["core_sha256"]
    }
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert run_queue(jobs, tmp_path, progress=False) == records
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_a_queue_that_was_killed_goes_on(tmp_path):
    jobs = [Wait(0), Wait(1, seconds=100.0), Wait(2)]
    process = FORKSERVER.Process(target=work_on_queue, args=(tmp_path, jobs))
    process.start()
    until(lambda: begun(tmp_path) == [0, 1])
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    assert [job.number for job in missing_jobs(jobs, tmp_path)] == [1, 2]
    first = jobs[0].path(tmp_path).read_bytes()
    process = FORKSERVER.Process(
        target=work_on_queue, args=(tmp_path, [Wait(number) for number in range(3)])
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0 and begun(tmp_path) == [0, 1, 1, 2]
    assert jobs[0].path(tmp_path).read_bytes() == first


def test_two_processes_share_a_queue(tmp_path):
    jobs = [Wait(number, seconds=0.5) for number in range(6)]
    both = [FORKSERVER.Process(target=work_on_queue, args=(tmp_path, jobs)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert sorted(begun(tmp_path)) == list(range(6))
    makers = {record["process"] for record in find_records(Wait, tmp_path).values()}
    assert makers == {process.pid for process in both}


def test_workers_make_one_job_after_another(tmp_path, monkeypatch, forked_workers):
    """Two processes for five jobs, which end with the queue."""
    monkeypatch.setenv("TCS_WAITS", str(tmp_path / "begun"))
    jobs = [Wait(number, seconds=0.1) for number in range(5)]
    records = run_queue(lambda: jobs, tmp_path, progress=False, jobs=2)
    makers = {record["process"] for record in records}
    assert [record["number"] for record in records] == sorted(begun(tmp_path)) == list(range(5))
    assert len(makers) <= 2 and os.getpid() not in makers
    assert not multiprocessing.active_children()


def test_a_run_of_a_subclass_is_made_in_its_own_way(tmp_path, small):
    """As a method from a file may be, which is registered around each of its runs."""
    around = []

    class Noted(Run):
        def make(self, tell=None):
            around.append("before")
            record = super().make(tell)
            around.append("after")
            return record

    one = Noted(config(epochs=1))
    (record,) = lab.run_all([one], tmp_path)
    assert around == ["before", "after"] and one.path(tmp_path).exists()
    assert (
        run_queue(lambda: [one], tmp_path, progress=False)
        == [record]
        == [lab.run(one.config, tmp_path)]
    )
    assert len(around) == 2


# Records ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_broken_record_is_named_whatever_its_kind(plan, tmp_path, small):
    ((run,), (sweep, *_)) = plan_jobs(plan, results=tmp_path).values()
    for job in (run, sweep):
        path = job.path(tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"rows": [', encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{path.name}: not a readable record.*delete it"):
            run_queue(lambda job=job: [job], tmp_path, progress=False)
        path.write_text("{}", encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{path.name}: .*delete it"):
            run_queue(lambda job=job: [job], tmp_path, progress=False)
        path.unlink()
        record = make_job(job, tmp_path)
        write_json(path, record | {"provenance": record["provenance"] | {"python": "2.7"}})
        with pytest.raises(ValueError, match=rf"{path.name}: its content is not what was written"):
            run_queue(lambda job=job: [job], tmp_path, progress=False)


def test_the_index_finds_records_by_what_they_are(tmp_path, small):
    """Not by the names of their files."""
    wanted = [config(name, epochs=1, seed=seed) for name in ("TCS", "top-K") for seed in (1, 2)]
    for number, one in enumerate(wanted):
        lab.run(one, tmp_path)
        path = lab.record_path(one, tmp_path)
        path.rename(path.with_name(f"{number}.json"))
    found = find_records(Run, tmp_path, scheme="top-K", profile="ci", epochs=1)
    assert [path.name for path in found] == ["2.json", "3.json"]
    assert [record["config"]["seed"] for record in found.values()] == [1, 2]
    (one,) = find_records(results=tmp_path, scheme="TCS", seed=2)
    assert one.name == "1.json"
    assert not find_records(Run, tmp_path, profile="c*") and not find_records(
        HookTraining, tmp_path
    )
    assert find_records(Run, tmp_path, drops=(0.5, 0.75)) == find_records(Run, tmp_path)
    with pytest.raises(ValueError, match=r"unknown fact of a record: colour; allowed: .*scheme"):
        find_records(Run, tmp_path, colour="red")
    one.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"1\.json"):
        find_records(Run, tmp_path, scheme="TCS")


def test_every_committed_record_has_its_kind():
    """And the plan of the links is measured."""
    count = {kind: len(find_records(kind)) for kind in (HookTraining, bench.BenchRun)}
    assert count == {HookTraining: 61, bench.BenchRun: 5}
    jobs = [job for stage in plan_jobs(lab.ROOT / "params/links.yaml").values() for job in stage]
    assert not missing_jobs(jobs)
    assert set(find_records(links.LinkMeasurement)) == {job.path() for job in jobs}
    assert len(links.read_stages("GPT", "10 million, settings").rows) == 2 * 8 * 6


# Plans ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("kind: studies.optimizers", "kind: studies.nothing", "value 2: kind: got .*nothing"),
        ("kind: studies.optimizers", "kind: os", "value 2: kind: got 'os'"),
        ("kind: studies.optimizers", "kind: studies.nodes", "value 2: kind: got .*nodes"),
        ("ranks: 2", "ranks: 0", "value 2: stage: ranks: got 0"),
        ("ranks: 2", "rank: 2", "value 2: stage: .*rank"),
        ("profile: tiny.yaml", "", "profile: missing.*fixed"),
    ],
)
def test_a_stage_is_checked_by_its_kind(plan, was, now, says):
    assert was in PLAN
    plan.write_text(PLAN.replace(was, now, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"(?s)plan\.yaml.*{says}"):
        plan_jobs(plan)


def test_a_plan_without_a_profile_takes_no_parameters_of_runs():
    with pytest.raises(ValueError, match=r"^width: .*links\.yaml"):
        plan_jobs(lab.ROOT / "params" / "links.yaml", {"width": 3})
