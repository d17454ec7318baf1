"""Section 9: momentum in the DDP hook (`TCSState(momentum=...)`). What accumulates, what is forgotten,
and what survives void steps, stops and parameters that are not used."""

import functools

import pytest
import torch
from common import Alone, Bucket, alone_in_a_group, deltas_like_training, same_state
from hooked import SHARES, Recorded, flat, kept
from processes import start
from test_hook_parts import Heads, each_its_own, in_turn
from test_hook_resume import SMALL, Training, through_a_file
from torch.nn.parallel import DistributedDataParallel

import tcs_core as tcs

SIZES, BETA = [600, 400], 0.9
D = sum(SIZES)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    alone_in_a_group(monkeypatch)


def state_of(**settings):
    return tcs.TCSState(Alone(), **{"start_iter": 2, "momentum": BETA} | SHARES | settings)


def steps_of(state, gradients, parameters=None):
    """Steps of a single rank; the averages, each (D,)."""
    parameters = parameters or [torch.zeros(size) for size in SIZES]
    for gradient_D in gradients:
        yield tcs.tcs_hook(state, Bucket(gradient_D.clone(), parameters)).wait().clone()


def gradients_of(steps, dtype=torch.float32):
    return [deltas_ND[0].to(dtype) for deltas_ND in deltas_like_training(steps, 1, SIZES)]


def of(state, what):
    """A state's "errors" or "momentum", (D,)."""
    return torch.cat([part[what] for part in state.state_dict()["parameters"].values()])


# What accumulates, and what is forgotten ──────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "settings", [{}, {"phi_global": None}, {"phi_local": None}, {"error_accumulation": False}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_is_forgotten_where_it_was_sent_and_nowhere_else(settings, dtype):
    """Bit for bit: as by hand, with the positions at which something came out."""
    state, keeps_errors = state_of(**settings), "error_accumulation" not in settings
    momentum_D, errors_D = torch.zeros(D), torch.zeros(D)
    gradients = gradients_of(8, dtype)
    for number, average_D in enumerate(steps_of(state, gradients)):
        momentum_D = momentum_D * BETA + gradients[number].float()
        if number < 2:
            assert torch.equal(average_D, momentum_D.to(dtype))
        else:
            intended_D, sent_D = momentum_D + errors_D, average_D != 0
            assert torch.equal(average_D, torch.where(sent_D, intended_D, 0.0).to(dtype))
            assert 0 < int(sent_D.sum()) < D
            momentum_D = torch.where(sent_D, 0.0, momentum_D)
            errors_D = intended_D - average_D.float() if keeps_errors else errors_D
        assert torch.equal(of(state, "momentum"), momentum_D)
        if keeps_errors:
            assert torch.equal(of(state, "errors"), errors_D)


@pytest.mark.parametrize(
    "shares",
    [{"phi_global": 1.0, "phi_local": None}, {"phi_global": None, "phi_local": 1.0}],
)
def test_if_all_is_sent_nothing_accumulates_after_the_dense_steps(shares):
    """Only the first sparse step still has the momentum of the dense ones."""
    state, gradients = state_of(**shares), gradients_of(6)
    averages = list(steps_of(state, gradients))
    assert torch.equal(averages[0], gradients[0])
    for number in (1, 2):
        torch.testing.assert_close(
            averages[number], averages[number - 1] * BETA + gradients[number]
        )
    for number in (3, 4, 5):
        assert torch.equal(averages[number], gradients[number])
    assert not of(state, "momentum").any() and not of(state, "errors").any()


def dense_beside_plain(ranks, folder, cap):
    """Six dense steps: momentum in the optimizer under plain DDP, and momentum in the hook."""
    plain = Recorded(None, bucket_cap_mb=cap)
    settings = SHARES | {"start_iter": 50, "momentum": BETA}
    hooked = Recorded(settings, named=True, bucket_cap_mb=cap)
    optimizers = [
        torch.optim.SGD(plain.model.parameters(), 0.05, momentum=BETA),
        torch.optim.SGD(hooked.model.parameters(), 0.05),
    ]
    first = flat(plain.model.parameters())
    for number in range(6):
        for training, optimizer in zip((plain, hooked), optimizers, strict=True):
            training.step(number)
            optimizer.step()
    ends = [flat(training.model.parameters()) for training in (plain, hooked)]
    distances = [float((end - other).norm()) for end, other in (ends, (ends[0], first))]
    return *distances, len(hooked.state._buckets)


@pytest.mark.parametrize("cap", [25, SMALL])
def test_while_steps_are_dense_it_is_sgd_with_momentum(tmp_path, cap):
    """Up to rounding, also when DDP has rebuilt its buckets after the first step."""
    for apart, moved, buckets in start(2, tmp_path, dense_beside_plain, cap):
        assert apart < 1e-6 * moved and (buckets > 1) == (cap < 1)


# Steps that do not count ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("void", [0, 1, 4])
def test_a_gradient_that_is_not_finite_does_not_enter_the_momentum(void):
    """In a dense step or a sparse one."""
    state, gradients = state_of(), gradients_of(6)
    list(steps_of(state, gradients[:void]))
    before = of(state, "momentum") if void else torch.zeros(D)
    gradients[void][::100] = torch.inf
    spoiled_D, after_D = steps_of(state, gradients[void : void + 2], list(state._names))
    assert not spoiled_D.isfinite().all() and after_D.isfinite().all()
    after, wanted = of(state, "momentum"), before * BETA + gradients[void + 1]
    there = after != 0  # elsewhere it was sent
    assert torch.equal(after[there], wanted[there]) and there.sum() > D / 2


def spoiled(ranks, folder):
    """Rank 1's loss is not finite in the fifth step; how far errors moved on this rank, and whether
    momentum is the same."""
    hooked = Recorded(SHARES | {"start_iter": 2, "momentum": BETA})
    parameters = list(hooked.model.parameters())
    for number in range(4):
        hooked.step(number)
    errors = flat(hooked.errors())
    momentum = flat(kept(hooked.state, parameters, "momentum"))
    broken = flat(hooked.step(4, torch.nan if ranks.rank == 1 else 1.0))
    moved = float((flat(hooked.errors()) - errors).norm() / errors.norm())
    same = torch.equal(flat(kept(hooked.state, parameters, "momentum")), momentum)
    fine = flat(hooked.step(5)).isfinite().all()
    return bool(broken.isnan().all()), moved, same, bool(momentum.any()), bool(fine)


def test_a_void_step_leaves_the_momentum_of_all_ranks_as_it_was(tmp_path):
    """Exactly, and the errors up to rounding."""
    for broken, moved, *truths in start(2, tmp_path, spoiled):
        assert broken and moved < 1e-6 and truths == [True] * 3


@pytest.mark.parametrize("when", [0, 1, 3])
def test_an_abandoned_pass_leaves_momentum_as_it_was(when, monkeypatch):
    """Its collectives never end."""
    state, parameters = state_of(), [torch.zeros(size) for size in SIZES]
    gradients = gradients_of(5)
    list(steps_of(state, gradients[:when], parameters))
    before = of(state, "momentum") if when else torch.zeros(D)
    with monkeypatch.context() as cut_off:
        cut_off.setattr(Alone, "get_future", lambda work: torch.futures.Future())
        tcs.tcs_hook(state, Bucket(gradients[4].clone(), parameters, last=False))
    list(steps_of(state, [gradients[when]], parameters))
    after, wanted = of(state, "momentum"), before * BETA + gradients[when]
    there = after != 0
    assert torch.equal(after[there], wanted[there]) and there.sum() > D / 2


# Parameters that are not used ─────────────────────────────────────────────────────────────────────


def test_an_unused_parameter_keeps_its_momentum_and_errors():
    """And the step after it is as if it had been left out for this parameter."""
    state, gradients = state_of(), gradients_of(6)
    parameters = [torch.zeros(size) for size in SIZES]
    list(steps_of(state, gradients[:5], parameters))
    before = state.state_dict()["parameters"]
    gradients[5][SIZES[0] :] = 0.0
    (average_D,) = steps_of(state, gradients[5:], parameters)
    used, unused = state.state_dict()["parameters"].values()
    assert not average_D[SIZES[0] :].any() and average_D[: SIZES[0]].any()
    assert before[1]["momentum"].any() and torch.equal(unused["momentum"], before[1]["momentum"])
    torch.testing.assert_close(unused["errors"], before[1]["errors"], rtol=0, atol=1e-5)
    assert not torch.equal(used["momentum"], before[0]["momentum"])


def by_turns(ranks, folder, order, cap):
    """Sums over the sparse ones of 30 steps, by parameter in float64: what this rank has accumulated
    for parameters that some rank used, what comes out, and errors. And whether the momentum of the
    others was left alone."""
    plain, alone = Heads(), []
    model = DistributedDataParallel(Heads(), find_unused_parameters=True, bucket_cap_mb=cap)
    state = tcs.TCSState(start_iter=2, momentum=BETA, model=model, **SHARES)
    model.register_comm_hook(state, tcs.tcs_hook)
    names = [name for name, _ in plain.named_parameters()]
    into, out = ({name: 0.0 for name in names} for _ in range(2))
    for step in range(30):
        before = state.state_dict()["parameters"]
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + ranks.rank))
        for net in (plain, model):
            net.zero_grad()
            net(x, order(step, ranks.rank)).square().mean().backward()
        after = state.state_dict()["parameters"]
        heads = [("one", "two")[order(step, rank)] for rank in range(2)]
        for name in names if step >= 2 else ():
            if name.split(".")[0] not in ("body", *heads):
                alone.append(torch.equal(before[name]["momentum"], after[name]["momentum"]))
                assert model.module.get_parameter(name).grad is None
                continue
            own = plain.get_parameter(name).grad
            gradient = 0.0 if own is None else own.flatten()
            into[name] += (before[name]["momentum"] * BETA + gradient).double()
            out[name] += model.module.get_parameter(name).grad.flatten().double()
    errors = {name: part["errors"].double() for name, part in after.items()}
    flats = [torch.cat([sums[name] for name in names]).numpy() for sums in (into, out, errors)]
    return *flats, all(alone), len(alone), len(state._buckets)


@pytest.mark.parametrize("order", [in_turn, each_its_own])
@pytest.mark.parametrize("cap", [25, 0.002])
def test_heads_in_turn_lose_nothing_of_what_they_accumulate(tmp_path, order, cap):
    """In = out + errors, averaged over ranks; two parameters of the idle head in every step."""
    one, two = start(2, tmp_path, by_turns, order, cap)
    (in_one, out, errors_one, *alone, buckets), (in_two, same, errors_two, *_) = one, two
    assert (out == same).all() and (buckets > 1) == (cap < 1)
    assert alone == [True, 2 * 28 if order is in_turn else 0]
    into, errors = (in_one + in_two) / 2, (errors_one + errors_two) / 2
    lost = into - out - errors
    assert (lost**2).sum() ** 0.5 < 1e-6 * (into**2).sum() ** 0.5


# Stopped and resumed ──────────────────────────────────────────────────────────────────────────────


def two_parts(ranks, folder, caps, stop, start_iter, named):
    """Eight steps at a stretch, and in new objects after so many."""
    settings = {"momentum": BETA, "start_iter": start_iter, "named": named}
    straight = Training(caps[0], **settings).train(range(8))
    first = Training(caps[0], **settings).train(range(stop))
    second = Training(caps[1], first.saved(), **settings).train(range(stop, 8))
    same = torch.equal(flat(straight.model.parameters()), flat(second.model.parameters()))
    states = [through_a_file(training.state.state_dict()) for training in (straight, second)]
    return same, same_state(*states), len(straight.state._buckets), len(second.state._buckets)


@pytest.mark.parametrize(("stop", "start_iter"), [(5, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("named", [False, True])
def test_a_run_in_two_parts_ends_in_the_bits_of_one(tmp_path, stop, start_iter, named):
    for answer in start(2, tmp_path, two_parts, (25, 25), stop, start_iter, named):
        assert answer == (True, True, 1, 1)


@pytest.mark.parametrize("caps", [(SMALL, 25), (25, SMALL), (SMALL, SMALL)])
def test_by_name_a_run_goes_on_in_other_buckets(tmp_path, caps):
    """While its steps are dense, with the same bits."""
    for same, same_states, *buckets in start(2, tmp_path, two_parts, caps, 3, 50, True):
        assert same and same_states and [n > 1 for n in buckets] == [cap < 1 for cap in caps]


# States ───────────────────────────────────────────────────────────────────────────────────────────


def stepped(steps=4, **settings):
    state = state_of(**settings)
    list(steps_of(state, gradients_of(steps)))
    return state


def test_a_state_without_momentum_is_what_it_was_before_there_was_momentum():
    saved = stepped(momentum=0.0).state_dict()
    assert set(saved) == {"version", "scheme", "start_iter", "iter", "bytes_sent", "parameters",
                          "packing", "rank", "world_size"}  # fmt: skip
    for part in saved["parameters"].values():
        assert set(part) == {"shape", "order", "errors", "mask"}
    state = stepped(6, momentum=0)
    state.load_state_dict(saved)
    assert same_state(state.state_dict(), saved)


@pytest.mark.parametrize(("saver", "loader"), [(0.9, 0.0), (0.0, 0.9), (0.9, 0.5)])
def test_a_state_of_another_momentum_is_refused_in_one_line(saver, loader):
    saved, state = stepped(momentum=saver).state_dict(), stepped(5, momentum=loader)
    before = state.state_dict()
    with pytest.raises(ValueError, match=rf"^TCSState: state: momentum: got {saver} .*{loader}$"):
        state.load_state_dict(saved)
    assert same_state(state.state_dict(), before)


BROKEN = {
    "no momentum": lambda part: part.pop("momentum"),
    "momentum is none": lambda part: part.update(momentum=None),
    "momentum of another size": lambda part: part.update(momentum=torch.zeros(3)),
    "momentum of another type": lambda part: part.update(momentum=part["momentum"].double()),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_state_is_refused_and_nothing_is_changed(case):
    state, broken = stepped(5), stepped().state_dict()
    BROKEN[case](broken["parameters"][1])
    before = state.state_dict()
    with pytest.raises(ValueError, match=r"^TCSState: state: parameters: 1: .*momentum"):
        state.load_state_dict(broken)
    assert same_state(state.state_dict(), before)


def test_without_errors_a_state_begins_with_no_momentum():
    saved, state = stepped().state_dict(), state_of()
    state.load_state_dict(saved | {"rank": 3, "world_size": 4}, errors=False)
    after = state.state_dict()["parameters"]
    for name, part in saved["parameters"].items():
        assert part["momentum"].any() and not after[name]["momentum"].any()
        assert not after[name]["errors"].any() and torch.equal(after[name]["mask"], part["mask"])
    list(steps_of(state, gradients_of(1)))


@pytest.mark.parametrize("settings", [{}, {"error_accumulation": False}])
def test_the_momentum_of_another_rank_is_refused(settings):
    state = state_of(**settings)
    state.load_state_dict(stepped(**settings).state_dict() | {"rank": 1, "world_size": 2})
    with pytest.raises(ValueError, match=r"of another .*load_state_dict\(state, errors=False\)"):
        list(steps_of(state, gradients_of(1)))


# Settings ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "given", [1, 1.0, -0.1, 1.5, True, False, torch.nan, torch.inf, "0.9", None, [0.9]]
)
def test_a_momentum_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match=r"^momentum: got .*, allowed: a number in \[0, 1\)$"):
        tcs.TCSState(momentum=given)


@pytest.mark.parametrize(
    "make", [float, torch.tensor, functools.partial(torch.tensor, dtype=torch.float64)]
)
def test_numbers_of_other_libraries_are_taken(make):
    assert tcs.TCSState(momentum=make(0.5)).momentum == 0.5
