"""What notebook 12 shows: its optimizers' trainings are the hook's, its example resumes, its
calculation of links counts what the hook counts."""

import pytest
import tcs_lab as lab
import torch
from processes import start
from tcs_lab.studies import links, optimizers
from torch.nn.parallel import DistributedDataParallel

import tcs_core as tcs

PLAN = optimizers.read_plan() | {"dense_steps": 2}


# Optimizers ───────────────────────────────────────────────────────────────────────────────────────


def through_the_hook(ranks, folder, cell, steps):
    """The same training under DDP; the model, and what was sent in the last step."""
    model, windows = optimizers.first_model(PLAN, 3), optimizers.Windows(PLAN, 3)
    hooked = DistributedDataParallel(model)
    state = tcs.TCSState(start_iter=PLAN["dense_steps"], **PLAN["schemes"][cell.scheme])
    hooked.register_comm_hook(state, tcs.tcs_hook)
    optimizer = optimizers.optimizer_of(PLAN, cell, model, 3e-3)
    for step in range(steps):
        before = sum(state.bytes_sent.values())
        optimizer.zero_grad()
        optimizers.loss_of(hooked, windows.of(step, ranks.rank)).backward()
        factor = optimizers.rate_factor(step, PLAN["dense_steps"], steps)
        optimizer.param_groups[0]["lr"] = 3e-3 * factor
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return flat.numpy(), sum(state.bytes_sent.values()) - before


@pytest.mark.parametrize("scheme", ["TCS 1 %", "top-K 1 %"])
def test_clients_of_one_process_train_as_ranks_do_through_the_hook(tmp_path, scheme):
    """Bit for bit, and a step has the bytes that the table says."""
    cell, steps = optimizers.Cell("AdamW", scheme), 8
    model = optimizers.train(PLAN, cell, 3, 3e-3, steps)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    sizes = tcs.layer_sizes(model)
    for flat, sent in start(2, tmp_path, through_the_hook, cell, steps):
        assert torch.equal(torch.from_numpy(flat), expected)
        assert sent == optimizers.bytes_a_step({"shares": PLAN["schemes"][scheme]}, sizes)


def test_corrected_sgd_is_sgd_with_momentum_while_all_is_dense():
    """And forgets, once sparse, the momentum of what it sent."""
    plan = PLAN | {"dense_steps": 5}
    plain, corrected = (
        optimizers.train(plan, optimizers.Cell("momentum", "TCS 10 %", moved), 3, 0.1, 5)
        for moved in (False, True)
    )
    start_of = optimizers.first_model(plan, 3)
    for p, q, first in zip(*(m.parameters() for m in (plain, corrected, start_of)), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert not torch.equal(p, first)
    known = tcs.Known("TCS", [100])
    known.rule.observe(torch.arange(100.0))
    client = optimizers.Corrected(known, 0, momentum=0.5, share=1.0)
    client.momentum_D.fill_(4.0)
    known.begin()
    sent = client.send(torch.ones(100))
    assert sent.values.tolist() == [3.0] * len(sent.values)  # 0.5 * 4 + 1
    places_K = torch.cat([known.shared_K, sent.positions])
    client.arrived()
    left = torch.full((100,), 3.0).index_fill_(0, places_K, 0.0)
    assert torch.equal(client.momentum_D, left) and torch.equal(client.errors_D, left)


def test_rates_go_on_until_the_best_is_inside(tmp_path, monkeypatch):
    tried = []

    def made(path, plan, cell, seed, rate, steps):
        tried.append(rate)
        return {"diverged": rate > 20 or None, "losses": [[steps, abs(rate - 9)]]}

    monkeypatch.setattr(optimizers, "made", made)
    assert optimizers.best_rate(PLAN, "SGD", tmp_path) == 9.0
    assert tried == [0.3, 1.0, 3.0, 9.0, 30.0]


def test_a_record_of_other_settings_is_refused_and_one_that_is_there_is_taken(tmp_path):
    plan, cell = PLAN | {"test_every": 2}, optimizers.Cell("SGD", "dense")
    path = tmp_path / "one.json"
    record = optimizers.made(path, plan, cell, 0, 0.1, 4)
    assert [step for step, _ in record["losses"]] == [2, 4]
    assert optimizers.made(path, plan, cell, 0, 0.1, 4) == record
    with pytest.raises(
        ValueError, match=r"one\.json: settings: got .*'width': 32.*allowed: .*'width': 64"
    ):
        optimizers.made(path, plan | {"width": 64}, cell, 0, 0.1, 4)
    for rate, steps, key in ((0.3, 4, "rate"), (0.1, 5, "steps")):
        with pytest.raises(ValueError, match=rf"one\.json: {key}: got"):
            optimizers.made(path, plan, cell, 0, rate, steps)


def test_a_cost_is_judged_as_planned(monkeypatch):
    """Known differences from dense, of three seeds with effects of their own."""
    judged = optimizers.Judged(optimizers.read_plan())
    seeds, cost = {1: 0.0, 2: 0.3, 3: -0.2}, {"dense": 0.0, "TCS 1 %": 0.2, "TCS 10 %": 0.05}
    losses = {
        (optimizers.Cell("SGD", scheme), seed): 2.0 + gap + effect + 0.001 * (seed == 1)
        for scheme, gap in cost.items()
        for seed, effect in seeds.items()
    }
    losses[optimizers.Cell("SGD", "TCS 10 %"), 2] += 0.01
    monkeypatch.setattr(judged, "losses", losses)
    monkeypatch.setattr(judged, "compared", lab.Comparison(losses, {}))
    words = [judged.word(judged.cost(optimizers.Cell("SGD", s))) for s in ("TCS 1 %", "TCS 10 %")]
    assert words == ["costs", "open"]
    assert judged.cost(optimizers.Cell("SGD", "TCS 1 %")).value == pytest.approx(0.2)
    assert judged.advice("TCS 1 %").startswith("TCS 1 %: don't, in a training of this length; best")
    assert judged.advice("TCS 10 %").startswith("TCS 10 %: SGD, TCS 10 % (+0.053")


def test_the_records_that_are_there_are_those_of_the_plan():
    """Settings, rates and lengths; no run diverged unsaid."""
    judged, folder = optimizers.Judged(optimizers.read_plan()), optimizers.folder_of()
    names = {path.name for _, _, path in optimizers.runs(judged.plan)}
    there = {path.name for path in folder.glob("*.json") if not path.name.startswith("sweep")}
    assert there and there <= names
    for (cell, seed), record in judged.records.items():
        assert record["rate"] == optimizers.best_rate(judged.plan, cell.optimizer, folder)
        assert record["steps"] == 5100 and record["seed"] == seed
        assert record["diverged"] or record["losses"][-1][0] == 5100


# Links ────────────────────────────────────────────────────────────────────────────────────────────


def counted(ranks, folder, way):
    """All bytes that a rank hands over in a step after the first three."""
    handed = {"sum": 0, "gather": 0}
    originals = torch.distributed.all_reduce, torch.distributed.all_gather

    def reduced(tensor, *rest, **more):
        handed["sum"] += tensor.nbytes
        return originals[0](tensor, *rest, **more)

    def gathered(tensors, tensor, *rest, **more):
        handed["gather"] += tensor.nbytes
        return originals[1](tensors, tensor, *rest, **more)

    model = links._model(way, 3, 100)
    for step in range(4):
        if step == 3:
            torch.distributed.all_reduce, torch.distributed.all_gather = reduced, gathered
        model(torch.randn(4, 100)).square().mean().backward()
    torch.distributed.all_reduce, torch.distributed.all_gather = originals
    return handed


@pytest.mark.parametrize("way", ["bf16", "PowerSGD", "TCS 1 %", "TCS 10 %"])
def test_what_is_calculated_is_what_is_handed_over(tmp_path, way):
    """Within the few flags of the hook (of six parameters in a bucket) and whole entries."""
    summed, gathered = links.handed_over(way, 3, 100)
    for handed in start(2, tmp_path, counted, way):
        assert summed <= handed["sum"] <= summed + 4 * (6 + 2)
        assert gathered <= handed["gather"] <= gathered + 8


def test_powersgd_has_about_the_bytes_of_tcs():
    for net in ((10, 1000), (4, 5000)):
        ours, theirs = (sum(links.handed_over(way, *net)) for way in ("TCS 1 %", "PowerSGD"))
        assert 0.9 < theirs / ours < 1.12


def test_seconds_on_a_link_by_hand():
    """Two ranks of 1,010,000 parameters, 4.04 MB each, over a shared link of 8 Mbit/s, 1 MB/s: 8.08
    s, and 1514/1448 of that for packets' heads; half a second without a limit."""
    seconds = links.calculated("plain", 100, 100, 2, 8.0, 0.5)
    assert seconds == pytest.approx(0.5 + 8.08 * 1514 / 1448)


def test_what_a_link_adds_over_bytes_by_rate():
    """Both ranks of a plain step hand 4.04 MB to a link of 1 MB/s: 8.08 s. At 100 MB/s they take
    less than a step without a limit, so nothing can be read off that."""
    case = {"layers": 100, "width": 100, "ranks": 2, "way": "plain"}
    took = {None: 0.5, 8.0: 0.5 + 1.1 * 8.08, 800.0: 9.9}
    read = links.Links([case | {"mbit": mbit, "seconds": s} for mbit, s in took.items()])
    assert read.bytes_over_rate() == "×1.10 to ×1.10 of that (n = 1)"
    assert links.Links([]).bytes_over_rate() == "no link was measured here"


@pytest.mark.parametrize(("low", "rate"), [(0.4, 200.0), (0.3, 50.0), (0.1, 50.0)])
def test_tcs_pays_where_all_its_steps_were_shorter(low, rate):
    case = {"layers": 10, "width": 1000, "ranks": 2}
    slow = [("TCS", 50.0, 0.2, 0.3), ("plain", 50.0, 5.0, 6.0)]
    fast = [("TCS", 200.0, 0.2, 0.3), ("plain", 200.0, low, 2.0), ("TCS", 1000.0, 0.2, 0.3)]
    names = ("way", "mbit", "low", "high")
    read = links.Links([case | dict(zip(names, row, strict=True)) for row in slow + fast])
    assert read.pays_to("TCS", "plain", 10, 1000) == rate
    assert read.pays_to("TCS", "bf16", 10, 1000) == read.pays_to("TCS", "plain", 4, 5000) == 0
