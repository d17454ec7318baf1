"""Section 9: what people do with gradients, groups and restarts that a hook with errors would make
go wrong in silence. Compared with plain DDP."""

import contextlib
import functools
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import Alone, Bucket, alone_in_a_group, deltas_like_training, same_state
from hooked import SHARES, Recorded, flat, small_net
from processes import start
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tcs_core as tcs

FULL = {"phi_global": 1.0, "phi_local": None, "start_iter": 1}


def under_ddp(net=None, hooked=True, cap=25, unused=False, **settings):
    """A model under DDP and its state, or None without the hook."""
    options = {"bucket_cap_mb": cap, "find_unused_parameters": unused}
    model = DistributedDataParallel(net or small_net(), **options)
    if not hooked:
        return model, None
    state = tcs.TCSState(**{"start_iter": 1, "model": model} | SHARES | settings)
    model.register_comm_hook(state, tcs.tcs_hook)
    return model, state


def data(number, rank=None):
    generator = torch.Generator().manual_seed(
        100 * number + (dist.get_rank() if rank is None else rank)
    )
    return torch.randn(8, 20, generator=generator)


def loss_of(model, number):
    return model(data(number)).square().mean()


@contextlib.contextmanager
def counting_warnings(found):
    """Adds the number of the hook's warnings to a list."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found.append(sum("two backward passes" in str(one.message) for one in caught))


# A backward pass is not a step ────────────────────────────────────────────────────────────────────


def discriminator_moved(way):
    """How far a discriminator moves whose own loss is nearly zero, while its opponent trains through it."""
    settings = {"can_undo": way == "undo"}
    model, state = under_ddp(hooked=way != "plain", **settings)
    before, optimizer = flat(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    for number in range(8):
        optimizer.zero_grad()
        (loss_of(model, number) * 1e-9).backward()
        optimizer.step()
        with model.no_sync() if way == "no_sync" else contextlib.nullcontext():
            loss_of(model, number).backward()  # the opponent's pass
        if way == "undo":
            state.undo()
    return float((flat(model.parameters()) - before).abs().max())


def opponents(ranks, folder):
    found, warned = {}, []
    for way in ("plain", "as it is", "no_sync", "undo"):
        with counting_warnings(warned):
            found[way] = discriminator_moved(way)
    return found, warned


def test_a_gans_discriminator_is_not_trained_by_its_opponent(tmp_path):
    for moved, warned in start(2, tmp_path, opponents):
        assert max(moved["plain"], moved["no_sync"], moved["undo"]) < 1e-6
        assert moved["as it is"] > 1e-3 and warned == [0, 1, 0, 0]


def steps_skipped(way, spikes):
    """Which steps are skipped by a loop that leaves out those whose gradient's norm is large, and
    the parameters at the end; `without`: the steps with a spike never come."""
    model, state = under_ddp(hooked=way != "plain", can_undo=way != "as it is", start_iter=2)
    optimizer, skipped = torch.optim.SGD(model.parameters(), 0.05), []
    for number in range(12):
        if way == "without" and number in spikes:
            continue
        optimizer.zero_grad()
        times = 1e4 if number in spikes and dist.get_rank() == 0 else 1.0
        (loss_of(model, number) * times).backward()
        if flat(p.grad for p in model.parameters()).norm() < 20:
            optimizer.step()
            continue
        skipped.append(number)
        if way == "undo":
            state.undo()
    return skipped, flat(model.parameters()).numpy()


def loops(ranks, folder, spikes):
    ways = ("plain", "as it is", "undo", "without")
    return {way: steps_skipped(way, spikes) for way in ways}


@pytest.mark.parametrize("spikes", [[5], [2], [4, 5, 9]])
def test_a_loop_that_skips_a_step_skips_only_that(tmp_path, spikes):
    """Taken back, it is as if the step had never been: to the bit."""
    for found in start(2, tmp_path, loops, spikes):
        assert found["plain"][0] == found["undo"][0] == spikes
        assert len(found["as it is"][0]) > 3 + len(spikes)
        assert (found["undo"][1] == found["without"][1]).all()


# Parameters that are frozen for a time ────────────────────────────────────────────────────────────


def thawed(ranks, folder, frozen, named):
    """Weights after ten steps, in some of which the first layer is frozen: without the hook, and with
    one that sends everything."""
    found = []
    for hooked in (False, True):
        settings = FULL | ({} if named else {"model": None})
        model, _ = under_ddp(small_net(), hooked, unused=True, **settings)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(10):
            model.module[0].requires_grad_(number not in frozen)
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
        found.append(flat(model.parameters()).numpy())
    return found


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("frozen", [range(4), range(3, 6), [0, 2, 3, 7]])
def test_a_layer_that_was_frozen_trains_again(tmp_path, frozen, named):
    for plain, hooked in start(2, tmp_path, thawed, list(frozen), named):
        assert hooked == pytest.approx(plain, abs=1e-6)


# When the state warns ─────────────────────────────────────────────────────────────────────────────


class Pair(nn.Module):
    """Two parts, of which a step may use one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.one, self.two = nn.Linear(20, 30), nn.Linear(20, 30)

    def forward(self, x, which=(True, True)):
        parts = [
            part(x) for part, is_used in zip((self.one, self.two), which, strict=True) if is_used
        ]
        return sum(parts)


def through_data(parameters, rate):
    """An optimizer that writes to p.data."""
    for p in parameters:
        p.data.sub_(p.grad, alpha=rate)


def looks_at_gradients(model, state, optimizer, number):
    optimizer.zero_grad()
    loss_of(model, number).backward()
    if number == 4:  # for a plot, say
        optimizer.zero_grad()
        loss_of(model, 99).backward()
    optimizer.step()


def adds_up_without_no_sync(model, state, optimizer, number):
    optimizer.zero_grad()
    for part in range(2):
        loss_of(model, 10 * number + part).backward()
    optimizer.step()


def steps(model, state, optimizer, number):
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


def adds_up(model, state, optimizer, number):
    optimizer.zero_grad()
    with model.no_sync():
        loss_of(model, 10 * number).backward()
    loss_of(model, 10 * number + 1).backward()
    optimizer.step()


def is_void_at_times(model, state, optimizer, number):
    optimizer.zero_grad()
    (loss_of(model, number) * (torch.nan if number in (3, 4, 6) else 1.0)).backward()
    if number not in (3, 4, 6):
        optimizer.step()


def writes_to_data(model, state, optimizer, number):
    model.zero_grad()
    loss_of(model, number).backward()
    through_data(model.parameters(), 0.05)


def uses_one_part(model, state, optimizer, number):
    optimizer.zero_grad()
    model(data(number), (True, number < 3)).square().mean().backward()
    optimizer.step()


def takes_back(model, state, optimizer, number):
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        state.undo()
    steps(model, state, optimizer, number)


SGD = functools.partial(torch.optim.SGD, lr=0.05)
PARTS = {"net": Pair, "cap": 0.001}
LOOPS = {  # a loop, its optimizer, settings, warnings
    "looks at gradients": (looks_at_gradients, SGD, {}, 1),
    "adds up without no_sync": (adds_up_without_no_sync, SGD, {}, 1),
    "steps one part, though both get gradients": (steps, None, PARTS, 1),
    "SGD": (steps, SGD, {}, 0),
    "SGD at rate 0": (steps, functools.partial(torch.optim.SGD, lr=0.0), {}, 0),
    "AdamW": (steps, torch.optim.AdamW, {}, 0),
    "AdamW, foreach": (steps, functools.partial(torch.optim.AdamW, foreach=True), {}, 0),
    "AdamW, fused": (steps, functools.partial(torch.optim.AdamW, fused=True), {}, 0),
    "adds up": (adds_up, SGD, {}, 0),
    "is void at times": (is_void_at_times, SGD, {}, 0),
    "writes to data": (writes_to_data, SGD, {}, 0),
    "uses one part": (uses_one_part, SGD, PARTS | {"unused": True}, 0),
    "takes back": (takes_back, SGD, {"can_undo": True}, 0),
    "keeps no errors": (adds_up_without_no_sync, SGD, {"error_accumulation": False}, 0),
    "dense": (adds_up_without_no_sync, SGD, {"start_iter": 50}, 0),
}


def warned(ranks, folder):
    counts = {}
    for case, (loop, made, settings, _) in LOOPS.items():
        settings = dict(settings)
        model, state = under_ddp(settings.pop("net", small_net)(), **settings)
        parameters = model.module.one.parameters() if made is None else model.parameters()
        optimizer, found = (made or SGD)(parameters), []
        with counting_warnings(found):
            for number in range(9):
                loop(model, state, optimizer, number)
        counts[case] = found[0]
    return counts


def test_the_state_warns_once_where_gradients_are_thrown_away_and_nowhere_else(tmp_path):
    wanted = {case: count for case, (*_, count) in LOOPS.items()}
    for counts in start(2, tmp_path, warned):
        assert counts == wanted


def joins(ranks, folder):
    """A loop in which rank 0 has fewer batches. It joins, which is to say that it takes part with zeros."""
    model, state = under_ddp()
    optimizer, found = SGD(model.parameters()), []
    with counting_warnings(found), model.join():
        for number in range(3 + 3 * ranks.rank):
            steps(model, state, optimizer, number)
    return found[0], flat(model.parameters()).tolist()


def test_a_rank_that_has_joined_is_not_warned(tmp_path):
    (first, ends), (second, others) = start(2, tmp_path, joins)
    assert first == second == 0 and ends == others


# A step is taken back ─────────────────────────────────────────────────────────────────────────────

SIZES = [600, 400, 100]
CUTS = [[(0, 3)], [(2, 3), (0, 2)]]  # the first step has one bucket


def fed(state, gradients, first=0, stop_after=None):
    """Steps of a single rank; its averages. In the last one only so many buckets come."""
    parameters, averages = PARAMETERS[id(state)], []
    for number, gradient_D in enumerate(gradients, first):
        cuts = CUTS[number > 0]
        parts = gradient_D.split(SIZES)
        for low, high in cuts[:stop_after]:
            bucket = Bucket(torch.cat(parts[low:high]), parameters[low:high], low == 0)
            averages.append(tcs.tcs_hook(state, bucket).wait())
    return averages


PARAMETERS = {}


def state_of(can_undo=True, **settings):
    state = tcs.TCSState(Alone(), **SHARES | {"start_iter": 2} | settings, can_undo=can_undo)
    PARAMETERS[id(state)] = [torch.zeros(size) for size in SIZES]
    return state


def gradients_of(steps):
    return [deltas_ND[0] for deltas_ND in deltas_like_training(steps, 1, SIZES)]


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("kind", ["finite", "void", "huge", "cut off"])
@pytest.mark.parametrize(
    "settings", [{}, {"phi_global": None}, {"error_accumulation": False}, {"momentum": 0.9}]
)
def test_a_step_that_was_taken_back_has_never_been(step, kind, settings, monkeypatch):
    """State and all that follows, to the bit; only bytes were sent."""
    alone_in_a_group(monkeypatch)
    one, two = state_of(**settings), state_of(False, **settings)
    *gradients, thrown_away = gradients_of(7)
    thrown_away = thrown_away * {"huge": 1e30}.get(kind, 1.0)
    if kind == "void":
        thrown_away[::100] = torch.inf
    for state in (one, two):
        fed(state, gradients[:step])
    before = one.state_dict()
    fed(one, [thrown_away], step, stop_after=1 if kind == "cut off" else None)
    one.undo()
    after = one.state_dict()
    assert same_state(after | {"bytes_sent": 0}, before | {"bytes_sent": 0})
    assert one.iter == step
    for found, wanted in zip(*(fed(s, gradients[step:], step) for s in (one, two)), strict=True):
        assert torch.equal(found, wanted)
    ends = [state.state_dict() | {"bytes_sent": 0} for state in (one, two)]
    assert same_state(*ends)


def test_there_must_be_a_step_to_take_back(monkeypatch):
    alone_in_a_group(monkeypatch)
    state, other = state_of(), state_of(False)
    fed(other, gradients_of(3))
    with pytest.raises(ValueError, match=r"^undo: got can_undo=False, allowed: TCSState\(can_undo"):
        other.undo()
    with pytest.raises(ValueError, match=r"^undo: got no step"):
        state.undo()
    fed(state, gradients_of(3))
    state.undo()
    with pytest.raises(ValueError, match=r"^undo: got no step"):
        state.undo()
    fed(state, gradients_of(3), 2)
    state.load_state_dict(state.state_dict())
    with pytest.raises(ValueError, match=r"^undo: got no step"):
        state.undo()


# Another number of ranks ──────────────────────────────────────────────────────────────────────────


def saves(ranks, folder, settings):
    model, state = under_ddp(**settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for number in range(4):
        steps(model, state, optimizer, number)
    saved = {"model": model.module.state_dict(), "hook": state.state_dict()}
    torch.save(saved, folder / f"{ranks.rank}.pt")


def goes_on(ranks, folder, settings, hooked=True, file="0", **how):
    """Parameters after three more steps, iter, the next step's masks, and the first one's errors."""
    saved = torch.load(folder / f"{file}.pt", weights_only=True)
    model, state = under_ddp(hooked=hooked, **settings)
    model.module.load_state_dict(saved["model"])
    if hooked:
        state.load_state_dict(saved["hook"], **how)
        loaded = state.state_dict()["parameters"]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for number in range(4, 7):
        steps(model, state, optimizer, number)
    ends = flat(model.parameters()).numpy()
    if not hooked:
        return ends
    same = [torch.equal(part["mask"], saved["hook"]["parameters"][name]["mask"])
            for name, part in loaded.items()]  # fmt: skip
    is_zero = all(part["errors"] is None or not part["errors"].any() for part in loaded.values())
    return ends, state.iter, all(same), is_zero


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 2), (2, 3)])
@pytest.mark.parametrize("settings", [{}, {"model": None}])
def test_other_ranks_go_on_with_the_masks_alone(tmp_path, before, after, settings):
    """After what the error says; all of them with the first rank's file."""
    start(before, tmp_path, saves, settings)
    for said in start(after, tmp_path, goes_on, settings):
        assert said.startswith("ValueError: TCSState: rank ") and "\n" not in said
        assert "load_state_dict(state, errors=False)" in said
    go_on = functools.partial(goes_on, errors=False)
    found = start(after, tmp_path, go_on, settings)
    for ends, iter, same_masks, no_errors in found:
        assert iter == 7 and same_masks and no_errors and (ends == found[0][0]).all()


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_with_all_kept_another_number_of_ranks_goes_on_as_plain_ddp(tmp_path, before, after):
    start(before, tmp_path, saves, FULL)
    plain = start(after, tmp_path, goes_on, FULL, False)
    go_on = functools.partial(goes_on, errors=False)
    for (ends, *_), wanted in zip(start(after, tmp_path, go_on, FULL), plain, strict=True):
        assert abs(ends - wanted).max() < 1e-6  # three ranks' sums have several orders


def test_without_errors_any_rank_goes_on_with_any_state(tmp_path):
    settings = {"error_accumulation": False}
    start(2, tmp_path, saves, settings)
    (one, *_), (two, *_) = start(2, tmp_path, goes_on, settings, True, "1")
    assert (one == two).all()


# A model on some of the ranks ─────────────────────────────────────────────────────────────────────


def on_some(ranks, folder, members, way):
    """Steps of a model on the group of this rank among some: plain, and through the hook."""
    groups = [dist.new_group(list(part)) for part in members]
    mine = [n for n, part in enumerate(members) if ranks.rank in part]
    if not mine:
        return None
    group = groups[mine[0]]
    plain = Recorded(None, process_group=group)
    model = DistributedDataParallel(small_net(), process_group=group)
    given = {"model": {"model": model}, "group": {"process_group": group}, "nothing": {}}[way]
    model.register_comm_hook(tcs.TCSState(**FULL, **given), tcs.tcs_hook)
    equal = []
    for number in range(3):
        out = flat(plain.step(number))
        model.zero_grad()
        loss_of(model, number).backward()
        equal.append(torch.equal(out, flat(p.grad for p in model.parameters())))
    return equal


@pytest.mark.parametrize("members", [[(0,), (1,)], [(0, 1)], [(1, 2)], [(0, 2), (1,)]])
@pytest.mark.parametrize("way", ["model", "group"])
def test_a_model_on_some_ranks_is_averaged_over_these(tmp_path, members, way):
    size = 3 if max(map(max, members)) == 2 else 2
    for rank, equal in enumerate(start(size, tmp_path, on_some, members, way)):
        is_in = any(rank in part for part in members)
        assert equal == ([True] * 3 if is_in else None)


def test_without_the_model_or_a_group_it_is_averaged_over_all(tmp_path):
    """As the first line of the docstring says; a dense first step, of the hook's, shows it."""
    for equal in start(2, tmp_path, on_some, [(0,), (1,)], "nothing"):
        assert equal == [False] * 3


def given_others_group(ranks, folder):
    groups = [dist.new_group([rank]) for rank in range(2)]
    with pytest.raises(ValueError, match=r"^process_group: got one without this rank"):
        tcs.TCSState(groups[1 - ranks.rank])
    return tcs.TCSState(groups[ranks.rank]).group.size()


def test_a_group_of_other_ranks_is_refused(tmp_path):
    assert start(2, tmp_path, given_others_group) == [1, 1]


# Who calls ────────────────────────────────────────────────────────────────────────────────────────


def under_fsdp(ranks, folder, strategy):
    model = FullyShardedDataParallel(
        small_net(), sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu")
    )
    model.register_comm_hook(tcs.TCSState(**SHARES), tcs.tcs_hook)
    loss_of(model, 0).backward()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_fsdp_is_refused_by_name(tmp_path, strategy):
    for said in start(2, tmp_path, under_fsdp, strategy):
        assert said.startswith("ValueError: tcs_hook: got gradients from FSDP")
        assert "DistributedDataParallel.register_comm_hook" in said


def overlapped(ranks, folder, wrapper, interleaved):
    """PyTorch refuses gloo by itself; it is told that this is another one."""
    model = DistributedDataParallel(small_net())
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    name = "hook_with_zero_step_interleaved" if interleaved else "hook_with_zero_step"
    hook = tcs.tcs_hook if wrapper is None else getattr(default_hooks, wrapper)(tcs.tcs_hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group: "nccl")
        hook = getattr(ddp_zero_hook, name)(hook, model, zero)
    model.register_comm_hook(tcs.TCSState(**SHARES), hook)
    loss_of(model, 0).backward()


@pytest.mark.parametrize(
    ("wrapper", "interleaved"), [(None, False), ("bf16_compress_wrapper", True)]
)
def test_an_optimizer_within_the_backward_pass_is_refused_by_name(tmp_path, wrapper, interleaved):
    for said in start(2, tmp_path, overlapped, wrapper, interleaved):
        assert said.startswith("ValueError: tcs_hook: got a call from hook_with_zero_step")
        assert "ZeroRedundancyOptimizer(overlap_with_ddp=False)" in said


def with_a_sharded_optimizer(ranks, folder):
    ends = []
    for sharded in (False, True):
        model, state = under_ddp()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if sharded:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        for number in range(5):
            steps(model, state, optimizer, number)
        ends.append(flat(model.parameters()))
    return torch.equal(*ends), state.iter


def test_a_sharded_optimizer_after_the_backward_pass_is_as_one_of_torch(tmp_path):
    assert start(2, tmp_path, with_a_sharded_optimizer) == [(True, 5)] * 2


# Recomputed layers and static graphs ──────────────────────────────────────────────────────────────


class Recomputing(nn.Module):
    """A layer that is used twice, within a part that is computed again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = nn.Linear(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def inside(self, x):
        return self.twice(torch.relu(self.twice(x)))

    def forward(self, x):
        x = checkpoint(self.inside, self.first(x), use_reentrant=self.reentrant)
        return self.last(x)


def recomputed(ranks, folder, reentrant, static):
    """Parameters after some steps without the hook, and with one that keeps everything."""
    ends, options = [], {"static_graph": static, "gradient_as_bucket_view": True}
    for hooked in (False, True):
        model = DistributedDataParallel(Recomputing(reentrant), **options)
        if hooked:
            model.register_comm_hook(tcs.TCSState(**FULL, model=model), tcs.tcs_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
        # As numbers: a tensor would be read from this process, which may have ended by then.
        ends.append(flat(model.parameters()).tolist())
    return ends


@pytest.mark.parametrize(("reentrant", "static"), [(False, False), (False, True), (True, True)])
def test_layers_that_are_computed_again_are_averaged_as_by_plain_ddp(tmp_path, reentrant, static):
    for plain, hooked in start(2, tmp_path, recomputed, reentrant, static):
        assert hooked == pytest.approx(plain, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("step", [0, 1, 4])  # dense, the one that gives the mask, sparse
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}])
def test_an_average_that_comes_after_undo_changes_nothing(step, settings, monkeypatch):
    """As after an exception in a backward pass, when another rank joins an all-reduce late."""
    alone_in_a_group(monkeypatch)
    state, late = state_of(**settings), []
    fed(state, gradients_of(6)[:step])
    before = state.state_dict() | {"bytes_sent": 0}
    averages = {"_average": tcs._average, "_dense_average": tcs._dense_average}
    with monkeypatch.context() as patch:
        for name in averages:
            noted = lambda *given, name=name: late.append((name, given)) or torch.zeros(1)  # noqa: E731
            patch.setattr(tcs, name, noted)
        fed(state, gradients_of(6)[step : step + 1], step, stop_after=1)
    state.undo()
    ((name, given),) = late
    averages[name](*given)
    assert name == ("_average" if step == 4 else "_dense_average")
    assert same_state(state.state_dict() | {"bytes_sent": 0}, before)


@pytest.mark.parametrize("key", ["iter", "rank", "world_size"])
@pytest.mark.parametrize("number", [np.int64(3), torch.tensor(3), True, -1, 1.0, "1"], ids=str)
def test_counters_of_a_state_are_plain_numbers(key, number, monkeypatch):
    alone_in_a_group(monkeypatch)
    state = state_of()
    fed(state, gradients_of(3))
    before = state.state_dict()
    with pytest.raises(ValueError, match=rf"^TCSState: state: {key}: got .*a whole number from 0"):
        state.load_state_dict(before | {key: number})
    assert same_state(state.state_dict(), before)


def test_can_undo_is_true_or_false(monkeypatch):
    alone_in_a_group(monkeypatch)
    with pytest.raises(ValueError, match=r"^can_undo: got 'no' .*allowed: True or False"):
        tcs.TCSState(Alone(), can_undo="no")
