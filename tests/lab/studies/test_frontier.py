"""The plan of the hook's frontier: PowerSGD in one process is PyTorch's hook, rates are tuned on
validation text, the second stage follows from the first one's records, and all are judged as planned."""

import dataclasses
import math

import pytest
import torch
from processes import start
from tcs_lab.runs.index import find_records
from tcs_lab.runs.jobs import make_job, missing_jobs
from tcs_lab.runs.plans import Planning, plan_jobs, read_plan
from tcs_lab.runs.records import write_record
from tcs_lab.studies import frontier, optimizers
from tcs_lab.studies.power_sgd import PowerSGD
from tcs_lab.support.paths import ROOT
from tcs_lab.tasks.text import load_text
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

PLAN = ROOT / "params" / "hook_plan.yaml"
SMALL, MILLION, _ = read_plan(PLAN).stages
DENSE_STEPS = 3
SHORT = SMALL.model_copy(update={"dense_steps": DENSE_STEPS})
SGD = "momentum"


# PowerSGD ─────────────────────────────────────────────────────────────────────────────────────────


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def start_alike(monkeypatch):
    """The first Q of a matrix depends on its shape alone: the hook draws them in the order of DDP's
    buckets."""

    def randn(*shape, **_):
        return torch.rand(shape, generator=torch.Generator().manual_seed(5)) - 0.5

    monkeypatch.setattr(torch, "randn", randn)


def through_the_hook(ranks, folder, rank, steps):
    """A training under DDP with PyTorch's hook; the model, and the bytes of the last step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        start_alike(monkeypatch)
        model, windows = optimizers.make_model(SHORT, 3), optimizers.Windows(SHORT, 3)
        hooked = DistributedDataParallel(model)
        state = power_sgd.PowerSGDState(None, rank, start_powerSGD_iter=DENSE_STEPS)
        hooked.register_comm_hook(state, power_sgd.powerSGD_hook)
        optimizer = optimizers.make_optimizer(SHORT, optimizers.Setup(SGD, "dense"), model, 0.1)
        for step in range(steps):
            before = state.total_numel_after_compression
            optimizer.zero_grad()
            optimizers.measure_loss(hooked, windows.draw(step, ranks.rank)).backward()
            factor = optimizers.rate_factor(step, DENSE_STEPS, steps)
            optimizer.param_groups[0]["lr"] = 0.1 * factor
            optimizer.step()
    return flat(model).numpy(), 4 * (state.total_numel_after_compression - before)


@pytest.mark.slow  # gloo now and then crosses the collectives of PyTorch's hook, and then waits
@pytest.mark.parametrize("rank", [1, 4])  # by Gram-Schmidt, and by QR
def test_power_sgd_in_one_process_trains_as_ranks_do_through_the_hook(tmp_path, monkeypatch, rank):
    """Up to rounding; the difference from dense training is a thousand times as large."""
    start_alike(monkeypatch)
    setup, steps = optimizers.Setup(SGD, f"PowerSGD rank {rank}"), 10
    model = optimizers.train(SHORT, setup, 3, 0.1, steps)
    dense = optimizers.train(SHORT, optimizers.Setup(SGD, "dense"), 3, 0.1, steps)
    for hooked, sent in start(2, tmp_path, through_the_hook, rank, steps):
        apart = (torch.from_numpy(hooked) - flat(model)).norm()
        assert 1000 * apart < (flat(dense) - flat(model)).norm()
        assert sent == frontier.count_bytes(SHORT.schemes[setup.scheme], model)


def test_power_sgd_loses_nothing():
    """What is not sent stays as the error, and comes with the next step."""
    average = PowerSGD(1, [torch.Size([8, 12]), torch.Size([8])], dense_steps=1)
    gradients = [torch.randn(104, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    mean = sum(gradients) / 2
    assert torch.equal(average(gradients), mean) and not average.error_D.any()
    out = average(gradients)
    torch.testing.assert_close(out + average.error_D, mean)
    assert torch.equal(out[96:], mean[96:]) and not average.error_D[96:].any()
    assert torch.linalg.matrix_rank(out[:96].view(8, 12)) == 1
    error = average.error_D
    torch.testing.assert_close(average(gradients) + average.error_D, mean + error)


# Trainings ────────────────────────────────────────────────────────────────────────────────────────


def test_no_text_is_in_two_of_the_three_parts():
    train, validation = frontier.split_text()
    text = load_text()
    for whole, first, last in zip(text.train, train, validation, strict=True):
        assert torch.equal(torch.cat([first, last]), whole)
    assert sum(map(len, validation)) == pytest.approx(sum(map(len, text.test)), rel=0.02)
    tuning, scoring = (
        job.make_windows()
        for job in (
            SMALL.make_tuning_job(optimizers.Setup(SGD, "dense"), 0.1),
            SMALL.make_scoring_job(optimizers.Setup(SGD, "dense"), 1, 0.1),
        )
    )
    assert torch.equal(tuning.train, torch.cat(train))
    assert torch.equal(scoring.train, torch.cat(train))
    assert torch.equal(tuning.tests[0], torch.cat(validation)[:33])
    assert torch.equal(scoring.tests[0], torch.cat(text.test)[:33])


@pytest.mark.parametrize("scheme", ["dense", "PowerSGD rank 1", "TCS 1 and 0.5 %"])
def test_a_training_is_a_record_and_one_that_diverges_says_so(tmp_path, scheme):
    tiny = {"width": 8, "dense_steps": 1, "sparse_steps": 3, "test_every": 2}
    stage = SMALL.model_copy(update=tiny)
    job = stage.make_scoring_job(optimizers.Setup(SGD, scheme), 5, 0.1)
    record = make_job(job, tmp_path)
    assert [step for step, _ in record["losses"]] == [2, 4] and not record["diverged"]
    assert record["tested_on"] == "test"
    assert make_job(dataclasses.replace(job, rate=1e30, seed=6), tmp_path)["diverged"]
    with pytest.raises(ValueError, match=r"rate: got 0\.1, allowed: 0\.2"):
        make_job(dataclasses.replace(job, rate=0.2), tmp_path)


# The plan ─────────────────────────────────────────────────────────────────────────────────────────


def pretend(job, results, loss):
    """A record as if the job had been made."""
    end = {"diverged": None, "losses": [[job.steps, loss]]}
    write_record(job.path(results), job.identity | end)


def few():
    """The first stage with few settings of one optimizer, and the second one."""
    names = ["dense", "PowerSGD rank 1", "PowerSGD rank 2", "top-K 1 %"]
    schemes = {n: s for n, s in SMALL.schemes.items() if n in names or n.startswith("TCS")}
    corrected = {"AdamW": ["TCS 0.5 and 0.1 %", "TCS 1 and 0.1 %"]}
    changes = {"schemes": schemes, "optimizers": ["AdamW"], "corrected": corrected}
    first = SMALL.model_copy(update={**changes, "seeds": [21]})
    plan = read_plan(PLAN)
    return first, plan.model_copy(update={"stages": [first, MILLION]})


LOSSES = {  # all others: 2.0
    "AdamW, dense": 1.8,
    "AdamW, PowerSGD rank 1": 1.7,
    "AdamW, PowerSGD rank 2": 1.9,
    "AdamW, TCS 2 and 0.5 %": 1.6,  # better than all, but with more bytes than PowerSGD
    "AdamW, TCS 0.5 and 0.1 %": 1.97,
    "AdamW corrected, TCS 0.5 and 0.1 %": 1.96,
    "AdamW, TCS 1 and 0.1 %": 1.98,
    "AdamW corrected, TCS 1 and 0.1 %": 1.99,
}


def test_the_second_stage_follows_from_the_first_ones_records(tmp_path):
    first, plan = few()
    planning = Planning(plan, {}, {}, tmp_path)
    follow = MILLION.jobs_to_follow(planning)
    assert len({job.path(tmp_path) for job in follow}) == len(follow) == 6 * (3 + 3)
    while missing := missing_jobs(first.plan_jobs(planning), tmp_path):
        assert not MILLION.plan_jobs(planning)
        job = missing[0]
        best = 0.016 if job.setup.scheme == "dense" else 0.004
        loss = abs(job.rate - best) if job.is_sweep else LOSSES.get(str(job.setup), 2.0)
        pretend(job, tmp_path, loss)
    assert not first.jobs_to_follow(planning)
    made = {job.setup: job.rate for job in first.plan_jobs(planning) if not job.is_sweep}
    assert {str(setup) for setup, rate in made.items() if rate == 0.016} == {"AdamW, dense"}
    tried = first.try_rates(optimizers.Setup("AdamW", "dense"), tmp_path)
    assert list(tried) == [0.002, 0.004, 0.008, 0.016, 0.032]
    jobs = MILLION.plan_jobs(planning)
    assert all(job.is_sweep for job in jobs) and len(jobs) == 6 * 3
    assert list(dict.fromkeys(str(job.setup) for job in jobs)) == [
        "AdamW, dense",
        "AdamW, PowerSGD rank 1",
        "AdamW, top-K 1 %",
        "AdamW corrected, TCS 0.5 and 0.1 %",
        "AdamW, TCS 1 and 0.1 %",
        "AdamW, TCS 0.5 and 0.25 %",
    ]
    assert len(MILLION.jobs_to_follow(planning)) == 6 * 3
    assert jobs[-1].identity["shares"] == {"phi_global": 0.005, "phi_local": 0.0025}
    assert jobs[-1].identity["settings"]["width"] == 208


def test_every_training_of_the_plan_has_a_record_of_its_own(tmp_path):
    stages = plan_jobs(PLAN, results=tmp_path)
    jobs = [job for jobs in stages.values() for job in jobs]
    assert len({job.path() for job in jobs}) == len({job.digest for job in jobs}) == len(jobs)
    assert len(jobs) == 3 * 56  # rates of setups, of the first stage
    later = read_plan(PLAN).stages[1:]
    for stage in later:
        model = optimizers.make_model(stage, 0)
        assert sum(p.numel() for p in model.parameters()) >= 1_000_000
        limit = frontier.count_bytes(SMALL.schemes["PowerSGD rank 1"], model)
        tcs = [s for s in SMALL.schemes.values() if frontier.kind_of(s) == "TCS"]
        assert sum(frontier.count_bytes(s, model) <= limit for s in tcs) >= 3


@pytest.mark.parametrize(
    "old, new, match",
    [
        ("seeds: [21, 22, 23]", "seeds: [20, 22]", "seeds: got 20, .*allowed: other"),
        ("chosen_from: small\n  minutes: 3.0", "minutes: 3.0", "schemes, chosen_from: got neither"),
        ("chosen_from: small", "chosen_from: big", "chosen_from: got big, allowed: a stage"),
        ("momentum: [0.05, 0.1, 0.2]", "SGD: [0.1]", "rates: got none for momentum, allowed"),
        ("top-K 0.25 %, top-K 0.5 %,", "dense,", "corrected: got dense, allowed: a scheme with"),
        (
            "optimizers: [AdamW, momentum]",
            "optimizers: [Adam, momentum]",
            "optimizers: value 1: got 'Adam'",
        ),
        ("dense: null", "plain: null", "schemes: got no `dense` that is null, allowed"),
        ("    AdamW: &shares [", "    Adamw: &shares [", "unknown optimizer in corrected: Adamw"),
        (
            "      AdamW: [0.0005, 0.001, 0.002]\n  optimizers: [AdamW]\n",
            "      AdamW: [0.001]\n      SGD: [0.1]\n  optimizers: [AdamW, SGD]\n",
            "stage million: optimizers: got AdamW, SGD, allowed with chosen_from: one of AdamW, mom",
        ),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(tmp_path, old, new, match):
    text = PLAN.read_text(encoding="utf-8")
    assert old in text
    file = tmp_path / "plan.yaml"
    file.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=match):
        read_plan(file)


# Judgement ────────────────────────────────────────────────────────────────────────────────────────

RANDOM = {21: 0.01, 22: -0.02, 23: 0.01}  # the effect of a seed on all losses
NOISE = {21: 0.001, 22: 0.0, 23: -0.001}  # and on those of dense training alone


def pretend_all(results, plan_file, losses, seeds=(21, 22, 23)):
    """Records of the stages `small` and `million`: all rates tried, and these losses by setup."""
    plan = read_plan(plan_file)
    planning = Planning(plan, {}, {}, results)
    for stage in plan.stages:
        while missing := missing_jobs(stage.plan_jobs(planning), results):
            for job in missing:
                if job.is_sweep:
                    pretend(job, results, abs(job.rate - stage.tuning.rates["AdamW"][1]))
                elif (loss := losses.get(str(job.setup), 2.0)) is None:
                    end = {"diverged": "it did", "losses": [[100, None]]}
                    write_record(job.path(results), job.identity | end)
                else:
                    off = list(RANDOM)[stage.seeds.index(job.seed)]
                    loss += RANDOM[off] + (NOISE[off] if job.setup.scheme == "dense" else 0.0)
                    pretend(job, results, loss)


@pytest.fixture
def small_plan(tmp_path):
    """A plan with few settings of AdamW, and of its later stages only `million`."""
    text = PLAN.read_text(encoding="utf-8")
    for gone in ("TCS 1 and 0.25 %, ", "top-K 0.25 %, top-K 0.5 %, top-K 1 %,"):
        assert gone in text
        text = text.replace(gone, "", 1)
    text = text.replace("optimizers: [AdamW, momentum]", "optimizers: [AdamW]")
    text = text.replace("    momentum: *shares\n", "")
    start, end = text.index("- stage: eight"), text.index("analysis:")
    file = tmp_path / "plan.yaml"
    file.write_text(text[:start] + text[end:], encoding="utf-8")
    return file


def test_settings_are_judged_as_planned(tmp_path, small_plan):
    losses = LOSSES | {"AdamW, TCS 2 and 0.1 %": None, "AdamW, top-K 1 %": 1.71}
    pretend_all(tmp_path, small_plan, losses)
    small = frontier.Frontier("small", small_plan, tmp_path)
    assert small.made == small.planned == 3 * (16 + 8)
    assert {str(setup) for setup in small.diverged} == {"AdamW, TCS 2 and 0.1 %"}
    cost = small.cost(optimizers.Setup("AdamW", "PowerSGD rank 1"))
    assert cost.value == pytest.approx(-0.1) and 0 < cost.half < 0.01
    change, pairs = small.effect_of_correction("AdamW")  # of 7 pairs, three differ
    assert pairs == 7 and change.value == pytest.approx((-0.01 + 0.01 + 0.4) / 7)
    table = small.tabulate("AdamW").set_index("Setting")
    assert table.at["dense", "Loss"] == "1.800" and not table.at["dense", "Rise"]
    assert table.at["PowerSGD rank 1", "Rise"] == "−0.100"
    assert "TCS 2 and 0.1 %" in table.index  # with correction, it did not diverge
    assert not table.at["TCS 2 and 0.1 %", "Loss"]


def test_a_setting_is_as_good_as_power_sgd_at_no_more_bytes(tmp_path, small_plan):
    """In the second stage: the interval has to end at 0.02 or below it."""
    pretend_all(tmp_path, small_plan, LOSSES | {"AdamW, top-K 1 %": 1.71})
    million = frontier.Frontier("million", small_plan, tmp_path)
    assert million.made == million.planned == 3 * 6
    assert str(million.power_sgd) == "AdamW, PowerSGD rank 1"
    top_k, *tcs = million.setups[2:]
    assert million.against_power_sgd(top_k).value == pytest.approx(0.01)
    assert str(million.against_power_sgd(million.power_sgd).value) == "nan"
    dense = million.setups[0]
    assert str(million.cost(dense).value) == "nan"
    assert million.against_power_sgd(dense).value == pytest.approx(
        -million.cost(million.power_sgd).value
    )
    assert million.bytes_per_step(top_k) > million.bytes_per_step(million.power_sgd)
    assert [million.is_as_good(setup) for setup in (top_k, *tcs)] == [False] * 4  # bytes; losses
    for seed in million.losses:
        if seed[0] == tcs[0]:
            million.losses[seed] = million.losses[million.power_sgd, seed[1]] + 0.015
    million.comparison = optimizers.Comparison(million.losses, {})
    assert million.against_power_sgd(tcs[0]).high < 0.02 and million.is_as_good(tcs[0])


def test_how_early_dense_training_has_the_loss_of_a_setting(tmp_path, small_plan):
    """On the mean curve of dense training, which here falls over steps 100, 200 and 400."""
    losses = {"AdamW, top-K 1 %": 1.9, "AdamW, TCS 2 and 0.5 %": 1.7, "AdamW, TCS 2 and 0.1 %": 3.5}
    pretend_all(tmp_path, small_plan, LOSSES | losses)
    small = frontier.Frontier("small", small_plan, tmp_path)
    for setup, seed in small.curves:
        if setup.scheme == "dense":
            low = 1.8 + {21: 0.1, 22: -0.1, 23: 0.0}[seed]
            small.curves[setup, seed] = [[100, 3.0], [200, 2.0], [400, low]]
    for scheme, fraction in {
        "top-K 1 %": 0.75,  # halfway between 2.0 and 1.8, so halfway between 200 and 400 of 400
        "TCS 2 and 0.5 %": 1.0,  # it ends lower than dense training
        "TCS 2 and 0.1 %": 0.25,  # dense training is there at the first test
        "dense": 1.0,
        "no such setting": math.nan,
    }.items():
        found = small.dense_fraction(optimizers.Setup("AdamW", scheme))
        assert found == pytest.approx(fraction, nan_ok=True), scheme


def test_what_is_not_made_is_said(tmp_path, small_plan):
    small = frontier.Frontier("small", small_plan, tmp_path)
    assert small.made == 0 and small.planned == 3 * (16 + 8) and small.power_sgd is None
    assert small.tabulate("AdamW").empty and small.effect_of_correction("AdamW")[1] == 0
    setup = optimizers.Setup("AdamW", "top-K 1 %")
    assert not small.is_as_good(setup) and str(small.cost(setup).value) == "nan"
    with pytest.raises(KeyError, match="AdamW, top-K 1 %"):
        small.mean_loss(setup)
    million = frontier.Frontier("million", small_plan, tmp_path)
    assert million.planned == 18 and million.setups == []
    with pytest.raises(ValueError, match="stage: got large, allowed: small, million"):
        frontier.Frontier("large", small_plan, tmp_path)


def test_the_records_that_are_there_are_those_of_the_plan():
    """Settings, rates and lengths; no training diverged unsaid."""
    made = [job for jobs in plan_jobs(PLAN).values() for job in jobs if job.is_made()]
    there = {job.path(): job.read() for job in made}
    assert there == find_records(frontier.FrontierTraining) and len(there) >= 196
    for record in there.values():
        assert record["diverged"] or record["losses"][-1][0] == record["steps"] == 5100


def test_a_deadline_knows_how_long_a_training_takes():
    jobs = read_plan(PLAN).stages[0].plan_jobs(Planning(read_plan(PLAN), {}, {}, None))
    assert {job.minutes for job in jobs} == {read_plan(PLAN).stages[0].minutes}
    assert {job.seconds_alone() for job in jobs} == {60 * read_plan(PLAN).stages[0].minutes}
