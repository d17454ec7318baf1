"""Plans: which runs they name, how a learning rate is tuned, how a queue makes them."""

import json
import threading

import pytest
import tcs_lab as lab
import torch
from common import TINY, config, numbers
from processes import FORKSERVER
from tcs_lab.__main__ import main
from tcs_lab.runs.checkpoints import checkpoint_path, epochs_kept
from tcs_lab.runs.estimates import expect
from tcs_lab.runs.jobs import missing_jobs
from tcs_lab.runs.plans import jobs_to_follow, read_plan
from tcs_lab.runs.runs import Run
from tcs_lab.support.files import hold_lock, write_json
from tcs_lab.support.paths import ROOT
from tcs_lab.training.training import measure_accuracy, pack_flags

IMAGES = 40  # tested after the last epoch of a hand-made record

PLAN = """
profile: tiny.yaml
tuning:
  seed: 11
  learning_rate: 0.5
  centralized_learning_rate: 0.1
  factors: [0.5, 1.0, 2.0]
  further: [0.125, 0.25, 4.0, 8.0]
  choose_on: [[0, 10], [30, 40]]
  score_on: [[10, 30]]
stages:
- {stage: tuned, tune: [TCS, Baseline], seeds: [1, 2]}
- {stage: fixed, runs: [{schemes: [top-K]}], seeds: [3]}
"""


@pytest.fixture
def plan(tmp_path):
    """A plan's file, whose profile is tiny."""
    profile = "".join(f"{key}: {json.dumps(value)}\n" for key, value in TINY.items())
    (tmp_path / "tiny.yaml").write_text(profile, encoding="utf-8")
    file = tmp_path / "plan.yaml"
    file.write_text(PLAN, encoding="utf-8")
    return file


def made_record(wanted, right, status="finished"):
    """A record of this configuration, of which these images (M,) were right after its last epoch."""
    count = wanted.epochs if status == "finished" else 1
    counted = ("rounds", "dense_rounds", "bits_up", "bits_down", "bytes_up", "bytes_down")
    accuracy = int(right.sum()) / len(right)
    rows = [
        {"epoch": e + 1, "accuracy": accuracy} | dict.fromkeys(counted, 1) for e in range(count)
    ]
    rows[-1]["right"] = pack_flags(right)
    return {
        "version": 1, "digest": wanted.digest, "status": status, "reason": None,
        "config": wanted.identity(), "dimension": 1000, "rows": rows,
        "provenance": {"fingerprint": "images", "wall_seconds": 1.0},
    }  # fmt: skip


def tuned(plan, accuracies, seed=11):
    """Records of a seed: for each scheme how many of the 20 images that choose are right, by factor
    ("diverged" instead of a number). Of the images that score, all are right where those are few."""
    profile = lab.read_params([plan.parent / "tiny.yaml"])
    for scheme, by_factor in accuracies.items():
        for factor, count in by_factor.items():
            rates = {"learning_rate": 0.5 * factor, "centralized_learning_rate": 0.1 * factor}
            (wanted,) = lab.plan({**profile, **rates, "schemes": [scheme], "seeds": [seed]})
            diverged = count == "diverged"
            right = torch.zeros(IMAGES, dtype=torch.bool)
            right[[*range(10), *range(30, 40)][: 0 if diverged else count]] = True
            right[10:30] = not diverged and count < 10
            status = "diverged" if diverged else "finished"
            path = lab.record_path(wanted, plan.parent)
            write_json(path, made_record(wanted, right, status))


def asked(plan, stage="tuned"):
    """The runs of a stage, as far as it is known: scheme, factor and seed."""
    configs = lab.plan_runs(plan, results=plan.parent)[stage]
    usual = {True: 0.1, False: 0.5}
    return [(c.scheme.name, c.eta / usual[c.scheme.centralized], c.seed) for c in configs]


# Accuracy on named images ─────────────────────────────────────────────────────────────────────────


def test_the_accuracy_on_named_images_is_that_of_those_alone():
    right = torch.zeros(19, dtype=torch.bool)
    right[[0, 3, 4, 10, 18]] = True
    record = made_record(config(), right)
    assert measure_accuracy(record, [(0, 19)]) == 5 / 19
    assert measure_accuracy(record, [(3, 5)]) == 1
    assert measure_accuracy(record, [(0, 2), (17, 19)]) == 0.5
    assert measure_accuracy(record, [(5, 10)]) == 0


def test_images_that_were_not_tested_have_no_accuracy():
    record = made_record(config(), torch.ones(19, dtype=torch.bool))
    with pytest.raises(ValueError, match=rf"^record {config().digest}: .* up to 20 .* but 19 were"):
        measure_accuracy(record, [(0, 5), (18, 20)])
    del record["rows"][-1]["right"]
    with pytest.raises(ValueError, match=rf"^record {config().digest}: .* up to 5 "):
        measure_accuracy(record, [(0, 5)])


# A tuned stage ────────────────────────────────────────────────────────────────────────────────────

FIRST = [(name, factor, 11) for factor in (0.5, 1, 2) for name in ("TCS", "Baseline")]


def test_a_tuned_stage_tries_all_factors_first_and_factor_by_factor(plan):
    assert asked(plan) == FIRST
    tuned(plan, {"TCS": {0.5: 5, 1: 9}, "Baseline": {0.5: 5, 1: 9}})
    assert asked(plan) == FIRST  # a best that is not yet known chooses nothing
    assert asked(plan, "fixed") == [("top-K", 1, 3)]


def test_a_choice_is_scored_once_it_stands_and_seed_by_seed(plan):
    tuned(plan, {"TCS": {0.5: 5, 1: 9, 2: 8}})
    assert asked(plan) == [*FIRST, ("TCS", 1, 1), ("TCS", 1, 2)]
    tuned(plan, {"Baseline": {0.5: 9, 1: 12, 2: 11}})
    scored = [(name, 1, seed) for seed in (1, 2) for name in ("TCS", "Baseline")]
    assert asked(plan) == [*FIRST, *scored]
    baseline = lab.plan_runs(plan, results=plan.parent)["tuned"][-1]
    assert baseline.eta == 0.1 and baseline.learning_rate_at(0) == 0.1


def test_only_the_images_that_choose_choose(plan):
    """`tuned` makes all scoring images right where fewer than ten of the others are."""
    tuned(plan, {"TCS": {0.5: 9, 1: 12, 2: 9}, "Baseline": {0.5: 0, 1: 10, 2: 0}})
    (searches,) = lab.find_searches(plan, results=plan.parent).values()
    assert [search.chosen for search in searches] == [1, 1]
    assert searches[0].tried() == {0.5: 9 / 20, 1: 12 / 20, 2: 9 / 20}


def test_the_grid_goes_on_at_both_ends_while_the_best_is_there(plan):
    tuned(plan, {"TCS": {0.5: 12, 1: 11, 2: 10}, "Baseline": {0.5: 10, 1: 11, 2: 12}})
    assert asked(plan) == [*FIRST, ("TCS", 0.25, 11), ("Baseline", 4, 11)]
    tuned(plan, {"TCS": {0.25: 13}, "Baseline": {4: 11}})
    beyond = [("TCS", 0.125, 11), ("TCS", 0.25, 11), ("Baseline", 4, 11)]
    assert asked(plan) == [*FIRST, *beyond, ("Baseline", 2, 1), ("Baseline", 2, 2)]
    tuned(plan, {"TCS": {0.125: 14}})  # the grid ends here: its end is taken
    scored = [("TCS", 0.125, 1), ("Baseline", 2, 1), ("TCS", 0.125, 2), ("Baseline", 2, 2)]
    assert asked(plan) == [*FIRST, *beyond, *scored]


def test_of_two_rates_that_are_equally_good_the_smaller_one_is_taken(plan):
    tuned(plan, {"TCS": {0.5: 9, 1: 12, 2: 12}})
    (tcs, _) = lab.find_searches(plan, results=plan.parent)["tuned"]
    assert tcs.chosen == 1 and list(tcs.tried()) == [0.5, 1, 2]


def test_a_run_that_diverged_is_the_worst(plan):
    tuned(plan, {"TCS": {0.5: 0, 1: "diverged", 2: "diverged"}})
    (tcs, _) = lab.find_searches(plan, results=plan.parent)["tuned"]
    assert list(tcs.tried()) == [0.25, 0.5, 1, 2] and tcs.chosen is None  # none right is better
    tuned(plan, {"TCS": {0.25: "diverged"}})
    assert tcs.chosen == 0.5


def test_a_scheme_that_always_diverges_is_not_scored(plan):
    tuned(plan, {"TCS": dict.fromkeys((0.5, 1, 2, 0.25, 0.125), "diverged")})
    (tcs, _) = lab.find_searches(plan, results=plan.parent)["tuned"]
    assert tcs.chosen is None
    assert {seed for name, _, seed in asked(plan) if name == "TCS"} == {11}


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("seeds: [1, 2]", "seeds: [1, 11]", "stage tuned: seeds: got 11"),
        ("score_on: [[10, 30]]", "score_on: [[5, 6], [8, 30]]", "score_on: got image 5"),
        ("score_on: [[10, 30]]", "score_on: [[30, 10]]", r"score_on.* got \[30, 10\]"),
        ("tune: [TCS, Baseline], ", "", "got neither of runs and tune"),
        ("tune: [TCS", "runs: [{schemes: [TCS]}], tune: [TCS", "got both of runs and tune"),
        ("tuning:", "analysis:", "tuning: missing.*stage tuned"),
        ("[0.5, 1.0, 2.0]", "[1.0, 0.5]", "factors.*"),
        ("factors: ", "factor: ", "factor"),
        (
            "tune: [TCS, Baseline]",
            "runs: [{schemes: [TCS], seeds: 3}]",
            "seeds: got 3, allowed: none here",
        ),
        ("tune: [TCS,", "tune: [Nope,", "stage tuned: scheme 'Nope' is unknown"),
    ],
)
def test_a_plan_that_would_not_be_fair_is_refused(plan, was, now, says):
    assert was in PLAN
    plan.write_text(PLAN.replace(was, now, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"(?s)plan\.yaml.*{says}"):
        lab.plan_runs(plan, results=plan.parent)


def test_the_plans_that_are_there_can_be_read():
    for name in ("fair_plan", "controls_plan", "evidence_plan"):
        planned = lab.plan_runs(lab.ROOT / "params" / f"{name}.yaml")
        assert planned and all(configs for configs in planned.values())
    (main, _) = lab.find_searches(lab.ROOT / "params" / "fair_plan.yaml").values()
    assert [search.scheme for search in main] == ["Baseline", "FedAvg", "TCS", "top-K"]


# A queue ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_queue_asks_its_plan_anew_after_each_run(tmp_path, small):
    """The second run follows from the first one's record."""
    asked_for = []

    def planned():
        first, second = config(epochs=1), config("top-K", epochs=1)
        asked_for.append(lab.record_path(first, tmp_path).exists())
        return [Run(first), Run(second)] if asked_for[-1] else [Run(first)]

    records = lab.runs.run_queue(planned, tmp_path)
    assert [record["config"]["scheme"]["name"] for record in records] == ["TCS-L2-Q5", "top-K"]
    assert asked_for == [False, True, True, True]  # once more, when nothing seems to be left
    assert [numbers(r) for r in records] == [
        numbers(lab.run(run.config, tmp_path / "x")) for run in planned()
    ]


def test_a_record_that_comes_while_the_plan_is_read_does_not_end_a_queue(tmp_path, small):
    """Another process writes it after the plan has looked for it."""
    first, second = (Run(config(name, epochs=1)) for name in ("TCS", "top-K"))
    elsewhere = lab.run(first.config, tmp_path / "elsewhere")

    def planned():
        is_there = first.is_made(tmp_path)
        if not is_there:
            first.path(tmp_path).parent.mkdir(parents=True, exist_ok=True)
            write_json(first.path(tmp_path), elsewhere)
        return [first, second] if is_there else [first]

    records = lab.runs.run_queue(planned, tmp_path, progress=False)
    assert [record["config"]["scheme"]["name"] for record in records] == ["TCS", "top-K"]


def test_a_queue_leaves_a_run_to_the_process_that_makes_it(tmp_path, small, monkeypatch):
    """The second one comes first, and the first one's record is taken when it is there."""
    monkeypatch.setattr(lab.runs.queue, "_LOOK_SECONDS", 0.1)
    first, second = config(epochs=1), config("top-K", epochs=1)
    elsewhere = lab.run(first, tmp_path / "elsewhere")
    order, train = [], lab.runs.runs._train
    monkeypatch.setattr(
        lab.runs.runs, "_train", lambda c, *a: order.append(c.scheme.name) or train(c, *a)
    )
    begun, made = threading.Event(), threading.Event()

    def another():
        with hold_lock(checkpoint_path(first)) as mine:
            assert mine
            begun.set()
            assert made.wait(60)
            write_json(lab.record_path(first, tmp_path), elsewhere)

    thread = threading.Thread(target=another)
    thread.start()
    begun.wait(60)

    def planned():
        if lab.record_path(second, tmp_path).exists():
            made.set()
        return [Run(first), Run(second)]

    records = lab.runs.run_queue(planned, tmp_path)
    thread.join()
    assert order == ["top-K"] and records[0] == elsewhere


def test_a_queue_that_waits_for_another_process_says_so_once(tmp_path, small, monkeypatch, capsys):
    """It does not ask for its jobs again before a record has come."""
    monkeypatch.setattr(lab.runs.queue, "_LOOK_SECONDS", 0.05)
    run, asked = config(epochs=1), []
    elsewhere = lab.run(run, tmp_path / "elsewhere")
    path = lab.record_path(run, tmp_path)

    def planned():
        asked.append(path.exists())
        return [Run(run)]

    with hold_lock(checkpoint_path(run)) as mine:
        assert mine
        later = threading.Timer(0.3, write_json, (path, elsewhere))
        later.start()
        assert lab.runs.run_queue(planned, tmp_path, progress=False) == [elsewhere]
        later.join()
    assert asked == [False, True, True]
    assert capsys.readouterr().err.count(path.stem) == 1


def fails():
    raise SystemExit(3)


def test_a_worker_that_ends_before_its_job_ends_the_queue(tmp_path, small, monkeypatch):
    def start(target, *arguments):
        process = FORKSERVER.Process(target=fails)
        process.start()
        return process

    monkeypatch.setattr(lab.runs.workers, "_start", start)
    with pytest.raises(ChildProcessError, match="the same command goes on"):
        lab.runs.run_queue(lambda: [Run(config()), Run(config("top-K"))], tmp_path, jobs=2)


# What is left ─────────────────────────────────────────────────────────────────────────────────────


def status(capsys, *words):
    """The table's rows, and the line below it."""
    assert main(["status", *words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [row[1:] for row in rows if len(row) > 1], [line for line in lines if line[0] != "|"]


def test_scored_runs_that_are_unknown_yet_have_stand_ins_at_the_first_rate(plan):
    def follow():
        jobs = jobs_to_follow(plan, results=plan.parent)
        assert jobs["fixed"] == []
        return [(j.config.scheme.name, j.config.eta, j.config.seed) for j in jobs["tuned"]]

    baseline = [("Baseline", pytest.approx(0.05), 1), ("Baseline", pytest.approx(0.05), 2)]
    assert follow() == [("TCS", 0.25, 1), ("TCS", 0.25, 2), *baseline]
    tuned(plan, {"TCS": {0.5: 3, 1.0: 9, 2.0: 5}})
    assert follow() == baseline  # the rate of TCS is chosen


def test_the_status_of_a_plan_says_what_is_made_and_what_is_left(plan, tmp_path, capsys):
    """Runs that wait for a rate are counted from the start: three rates and two seeds a scheme."""
    where = [str(plan), "--results", str(tmp_path)]
    rows, (line, _) = status(capsys, *where)
    assert [row[:5] for row in rows] == [
        ["tuned", "10", "0", "0", "10"],
        ["fixed", "1", "0", "0", "1"],
    ]
    assert line.startswith("11 runs, 0 of them made, 11 left")
    tuned(plan, {"TCS": {0.5: 3, 1.0: 9, 2.0: 5}})
    rows, (line, _) = status(capsys, *where)
    assert rows[0][:5] == ["tuned", "10", "3", "0", "7"]
    rows, lines = status(capsys, f"{plan}:fixed", *where[1:])
    assert [row[0] for row in rows] == ["fixed"] and len(lines) == 1


def test_a_run_that_is_planned_twice_counts_once(plan, tmp_path, capsys):
    other = tmp_path / "other.yaml"
    other.write_text(PLAN.replace("stage: fixed", "stage: again"), encoding="utf-8")
    where = ["--results", str(tmp_path)]
    for plans in ([str(plan)] * 2, [str(plan), f"{plan}:fixed"], [str(plan), str(other)]):
        assert main(["queue", *plans, "--dry-run", *where]) == 0
        assert capsys.readouterr().out.startswith("11 runs, 0 of them made, 11 left")
    rows, (line, _) = status(capsys, str(plan), str(plan), *where)
    assert [row[0] for row in rows] == ["tuned", "fixed"] and line.startswith("11 runs, ")


@pytest.mark.parametrize("key", ["learning_rate", "centralized_learning_rate"])
def test_a_rate_that_the_plan_tunes_cannot_be_set(plan, tmp_path, capsys, key):
    words = [str(plan), "--results", str(tmp_path), "--set", f"{key}=0.3"]
    for command in (["queue", *words, "--dry-run"], ["queue", *words], ["status", *words]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {key}: got 0.3, allowed: none with {plan}")


HOUR = 3600.0


def made_in(seconds, folder, scheme, provenance=(), **changes):
    """A record that took so long on this machine."""
    one = config(scheme, **changes)
    record = made_record(one, torch.ones(IMAGES, dtype=torch.bool))
    device = lab.runs.records.device_name(one.torch_device)
    record["provenance"] |= {"wall_seconds": seconds, "device": device, **dict(provenance)}
    write_json(lab.record_path(one, folder), record)
    return one


def test_how_long_runs_take_is_what_such_runs_took(tmp_path):
    """A scheme's own records first, by epochs; then those with as many local steps."""
    there = [made_in(s * HOUR, tmp_path, "TCS", seed=n) for n, s in enumerate([3, 6, 30])]
    made_in(60 * HOUR, tmp_path, "TCS", width=4)  # of another size
    made_in(12 * HOUR, tmp_path, "TCS-L4")
    same, twice = config("TCS", seed=8), config("TCS", seed=8, epochs=6)
    for wanted, hours in (([same], 6), ([twice], 12), ([config("TCS-L4-Q5")], 12), (there, 0)):
        left = expect(missing_jobs(map(Run, wanted), tmp_path), tmp_path)
        assert left == (1 if hours else 0, pytest.approx(hours), 0)
    assert expect([Run(same, 90.0)], tmp_path) == (1, pytest.approx(1.5), 0)


def test_what_another_machine_took_says_nothing_about_this_one(tmp_path):
    made_in(5000 * HOUR, tmp_path, "TCS", [("device", "an abacus")])
    assert expect([Run(config("TCS", seed=8))], tmp_path).hours < 1


def test_of_runs_like_no_other_rounds_are_timed(tmp_path):
    short, long = (expect([Run(config("TCS-L2", epochs=n))], tmp_path) for n in (10, 30))
    assert long == (1, pytest.approx(3 * short.hours), 0) and 0 < short.hours < 1
    assert not (tmp_path / "ci").exists()
    large = {"model": "resnet18", "width": 64, "batch_size": 4, "epochs": 300}
    slow = [config(**large), config(dataset="folder", train_samples=None, epochs=300)]
    hours = [expect([Run(one)], tmp_path).hours for one in slow]
    assert all(one > 10 * short.hours for one in hours)


def test_of_a_run_that_was_stopped_the_rest_is_left(tmp_path, small):
    made_in(6 * HOUR, tmp_path, "TCS")
    one = config("TCS", seed=5)

    def stop(row):
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.run(one, tmp_path, stop)
    assert epochs_kept(one) == 1
    assert expect([Run(one)], tmp_path).hours == pytest.approx(4)


def test_a_file_of_another_kind_is_told_what_it_lacks():
    with pytest.raises(ValueError) as raised:
        read_plan(ROOT / "params" / "evidence.yaml")
    said = str(raised.value)
    assert "evidence.yaml: stages: got none, but it is needed; there is profile, dataset, " in said
    assert len(said) < 600


@pytest.mark.parametrize(
    ("choose", "score", "image"),
    [("[[0, 10], [30, 40]]", "[[5, 30]]", 5), ("[[0, 100000000000]]", "[[7, 8], [3, 5]]", 3),
     ("[[0, 3], [9, 12]]", "[[3, 9], [11, 20]]", 11)],
)  # fmt: skip
def test_images_that_choose_do_not_score(plan, choose, score, image):
    text = PLAN.replace("[[0, 10], [30, 40]]", choose).replace("[[10, 30]]", score)
    plan.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"score_on: got image {image}, which is in choose_on"):
        read_plan(plan)
