"""What notebook 12 shows: its optimizers' trainings are the hook's, its example resumes, its
calculation of links counts what the hook counts."""

import dataclasses
import math

import pytest
import tcs_lab as lab
import torch
from processes import start
from tcs_lab.runs.jobs import make_job, missing_jobs, read_jobs
from tcs_lab.runs.plans import Planning, plan_jobs, read_plan
from tcs_lab.runs.records import write_record
from tcs_lab.studies import links, optimizers
from tcs_lab.support.paths import ROOT
from torch.nn.parallel import DistributedDataParallel

import tcs_core as tcs

(STAGE,) = read_plan(optimizers.PLAN).stages
SHORT = STAGE.model_copy(update={"dense_steps": 2})


# Optimizers ───────────────────────────────────────────────────────────────────────────────────────


def through_the_hook(ranks, folder, setup, steps):
    """The same training under DDP; the model, and what was sent in the last step."""
    model, windows = optimizers.make_model(SHORT, 3), optimizers.Windows(SHORT, 3)
    hooked = DistributedDataParallel(model)
    momentum = STAGE.momentum if setup.corrected else 0.0
    shares = STAGE.schemes[setup.scheme].model_dump()
    state = tcs.TCSState(start_iter=2, momentum=momentum, **shares)
    hooked.register_comm_hook(state, tcs.tcs_hook)
    optimizer = optimizers.make_optimizer(SHORT, setup, model, 3e-3)
    for step in range(steps):
        before = sum(state.bytes_sent.values())
        optimizer.zero_grad()
        optimizers.measure_loss(hooked, windows.draw(step, ranks.rank)).backward()
        factor = optimizers.rate_factor(step, 2, steps)
        optimizer.param_groups[0]["lr"] = 3e-3 * factor
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return flat.numpy(), sum(state.bytes_sent.values()) - before


@pytest.mark.parametrize("scheme", ["TCS 1 %", "top-K 1 %"])
@pytest.mark.parametrize(("optimizer", "corrected"), [("AdamW", False), ("momentum", True)])
def test_clients_of_one_process_train_as_ranks_do_through_the_hook(
    tmp_path, optimizer, corrected, scheme
):
    """Bit for bit, and a step has the bytes that the table says."""
    setup, steps = optimizers.Setup(optimizer, scheme, corrected), 8
    model = optimizers.train(SHORT, setup, 3, 3e-3, steps)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    sizes = tcs.layer_sizes(model)
    for flat, sent in start(2, tmp_path, through_the_hook, setup, steps):
        assert torch.equal(torch.from_numpy(flat), expected)
        assert sent == optimizers.bytes_per_step(STAGE.schemes[scheme], sizes)


def test_corrected_sgd_is_sgd_with_momentum_while_all_is_dense():
    """And forgets, once sparse, the momentum of what it sent."""
    stage = STAGE.model_copy(update={"dense_steps": 5})
    plain, corrected = (
        optimizers.train(stage, optimizers.Setup("momentum", "TCS 10 %", moved), 3, 0.1, 5)
        for moved in (False, True)
    )
    start_of = optimizers.make_model(stage, 3)
    for p, q, first in zip(*(m.parameters() for m in (plain, corrected, start_of)), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert not torch.equal(p, first)
    known = tcs.Known("TCS", [100])
    known.rule.observe(torch.arange(100.0))
    client = optimizers.MomentumCorrection(known, 0, momentum=0.5, share=1.0)
    client.momentum_D.fill_(4.0)
    known.begin()
    sent = client.send(torch.ones(100))
    assert sent.values.tolist() == [3.0] * len(sent.values)  # 0.5 * 4 + 1
    places_K = torch.cat([known.shared_K, sent.positions])
    client.arrived()
    left = torch.full((100,), 3.0).index_fill_(0, places_K, 0.0)
    assert torch.equal(client.momentum_D, left) and torch.equal(client.errors_D, left)


def test_rates_go_on_until_the_best_is_inside(tmp_path):
    """The stage names what is tried next, and the trainings once all rates stand."""
    planning, tried = Planning(read_plan(optimizers.PLAN), {}, {}, tmp_path), []
    best = {"SGD": 9, "AdamW": 3e-3, "momentum": 0.1}
    while jobs := missing_jobs(STAGE.plan_jobs(planning), tmp_path):
        if not all(job.is_sweep for job in jobs):
            break
        assert len(STAGE.jobs_to_follow(planning)) == 51
        for job in jobs:
            optimizer, rate = job.setup.optimizer, job.rate
            tried += [rate] if optimizer == "SGD" else []
            loss = abs(math.log(rate / best[optimizer]))
            end = {"diverged": "it is" if rate > 20 else None, "losses": [[1000, loss]]}
            write_record(job.path(tmp_path), job.identity | end)
    assert tried == [0.3, 1.0, 3.0, 9.0, 30.0]
    assert len(jobs) == 51 and not STAGE.jobs_to_follow(planning)
    assert {job.setup.optimizer: job.rate for job in jobs} == best


def test_a_record_of_other_settings_is_refused_and_one_that_is_there_is_taken(tmp_path):
    stage = STAGE.model_copy(update={"test_every": 2})
    job = optimizers.HookTraining(stage, optimizers.Setup("SGD", "dense"), 0, 0.1, 4)
    rows = []
    record = make_job(job, tmp_path, rows.append)
    assert [step for step, _ in record["losses"]] == [2, 4]
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 2), (2, 4)] and job.length == 2
    usual = {"core_sha256", "lab_sha256", "commit", "python", "torch", "device", "fingerprint"}
    assert usual < record["provenance"].keys() and record["provenance"]["threads"] == 1
    assert make_job(job, tmp_path, rows.append) == record and len(rows) == 2
    wide = dataclasses.replace(job, stage=stage.model_copy(update={"width": 64}))
    with pytest.raises(
        ValueError, match=r"SGD-dense-0\.json: settings: got .*'width': 32.*allowed: .*'width': 64"
    ):
        make_job(wide, tmp_path)
    for change in {"rate": 0.3}, {"steps": 5}:
        with pytest.raises(ValueError, match=rf"SGD-dense-0\.json: {next(iter(change))}: got"):
            make_job(dataclasses.replace(job, **change), tmp_path)


def test_a_cost_is_judged_as_planned(monkeypatch):
    """Known differences from dense, of three seeds with effects of their own."""
    costs = optimizers.Costs()
    seeds, cost = {1: 0.0, 2: 0.3, 3: -0.2}, {"dense": 0.0, "TCS 1 %": 0.2, "TCS 10 %": 0.05}
    losses = {
        (optimizers.Setup("SGD", scheme), seed): 2.0 + gap + effect + 0.001 * (seed == 1)
        for scheme, gap in cost.items()
        for seed, effect in seeds.items()
    }
    losses[optimizers.Setup("SGD", "TCS 10 %"), 2] += 0.01
    monkeypatch.setattr(costs, "losses", losses)
    monkeypatch.setattr(costs, "comparison", lab.Comparison(losses, {}))
    words = [costs.judge(costs.cost(optimizers.Setup("SGD", s))) for s in ("TCS 1 %", "TCS 10 %")]
    assert words == ["costs", "open"]
    assert costs.cost(optimizers.Setup("SGD", "TCS 1 %")).value == pytest.approx(0.2)
    assert costs.advise("TCS 1 %").startswith("TCS 1 %: don't, in a training of this length; best")
    assert costs.advise("TCS 10 %").startswith("TCS 10 %: SGD, TCS 10 % (+0.053")


def test_the_records_that_are_there_are_those_of_the_plan():
    """Settings, rates and lengths; no training diverged unsaid."""
    jobs = plan_jobs(optimizers.PLAN)["optimizers"]
    there = {job.path(): record for job, record in zip(jobs, read_jobs(jobs), strict=True)}
    assert there == lab.find_records(optimizers.HookTraining, stage="optimizers")
    assert len(there) == 61
    costs = optimizers.Costs()
    assert len(costs.records) == costs.planned == 51
    for record in costs.records.values():
        assert record["diverged"] or record["losses"][-1][0] == record["steps"] == 5100


# Links ────────────────────────────────────────────────────────────────────────────────────────────


def counted(ranks, folder, way, net):
    """All bytes that a rank hands over in a step after the first three."""
    handed = {"sum": 0, "gather": 0}
    originals = torch.distributed.all_reduce, torch.distributed.all_gather

    def reduced(tensor, *rest, **more):
        handed["sum"] += tensor.nbytes
        return originals[0](tensor, *rest, **more)

    def gathered(tensors, tensor, *rest, **more):
        handed["gather"] += tensor.nbytes
        return originals[1](tensors, tensor, *rest, **more)

    model = links._make_model(way, net)
    for step in range(4):
        if step == 3:
            torch.distributed.all_reduce, torch.distributed.all_gather = reduced, gathered
        net.loss(model, net.draw_batch()).backward()
    torch.distributed.all_reduce, torch.distributed.all_gather = originals
    return handed


LINEAR, GPT = links.Net(3, 100), links.Net(2, 32, "GPT")
SETTINGS = ["PowerSGD rank 2", "top-K 0.5 %", "TCS 2 and 0.25 %"]


@pytest.mark.parametrize(
    ("way", "net"), [(w, LINEAR) for w in ["bf16", *SETTINGS]] + [(w, GPT) for w in SETTINGS]
)
def test_what_is_calculated_is_what_is_handed_over(tmp_path, way, net):
    """Within the few flags of the hook (one of each parameter and bucket) and whole entries."""
    summed, gathered = links.count_handed_bytes(way, net)
    for handed in start(2, tmp_path, counted, way, net):
        assert summed <= handed["sum"] <= summed + 4 * (len(net.shapes) + 2)
        assert gathered <= handed["gather"] <= gathered + 8


def test_an_exchange_is_called_as_the_setting_in_the_plan_of_the_hook():
    """So that loss and seconds of a setting find each other."""
    small, million, _ = read_plan(ROOT / "params" / "hook_plan.yaml").stages
    for name, setting in small.schemes.items():
        assert name == "dense" or links.setting_of(name) == setting
    net = links.Net(2, million.width, "GPT")
    assert net.parameters == sum(p.numel() for p in optimizers.make_model(million, 0).parameters())
    assert net.draw_batch().shape == optimizers.Windows(million, 0).draw(0, 0).shape
    for wrong in ("dense", "TCS", "TCS 1 and 0.5", "top-K 100 %", "PowerSGD rank 0"):
        with pytest.raises(ValueError, match=f"exchange: got .{wrong}., allowed: passes, "):
            links.setting_of(wrong)


def test_seconds_on_a_link_by_hand():
    """Two ranks of 1,010,000 parameters, 4.04 MB each, over a shared link of 8 Mbit/s, 1 MB/s: 8.08
    s, and 1514/1448 of that for packets' heads; nothing without a limit."""
    seconds = links.calculate_wire("plain", links.Net(100, 100), 2, 8.0)
    assert seconds == pytest.approx(8.08 * 1514 / 1448)
    assert links.calculate_wire("plain", links.Net(100, 100), 2, None) == 0.0


def test_the_median_of_two_steps_lies_in_the_middle():
    row = {"layers": 1, "width": 9, "ranks": 2, "way": "plain", "mbit": 8.0, "n": 2, "seconds": 3.0}
    read = links.Links([row | {"low": 2.0, "high": 3.0}])
    assert read.rows[0]["seconds"] == read.row("plain", links.Net(1, 9), 2, 8.0)["seconds"] == 2.5


def test_each_rank_with_a_link_of_its_own():
    """Two links of 4 Mbit/s are measured as one of 8, which all ranks share. With four ranks, top-K's
    entries go to three others: 4.04 MB a rank if that were all entries, so at 1 MB/s about 4 s."""
    net = links.Net(100, 100)
    case = {"layers": 100, "width": 100, "ranks": 2}
    rows = [("top-K 10 %", 8.0, 5.0), ("top-K 10 %", None, 0.5), ("passes", None, 0.25)]
    read = links.Links([case | {"way": w, "mbit": m, "seconds": s} for w, m, s in rows])
    assert read.seconds("top-K 10 %", net, 2, 4.0) == (5.0, True)
    seconds, measured = read.seconds("top-K 10 %", net, 4, 8.0)
    assert not measured
    assert seconds == pytest.approx(0.5 + 3 * 0.1 * 8 * 1.01 * 1514 / 1448)
    assert read.seconds("plain", net, 2, 4.0) is None
