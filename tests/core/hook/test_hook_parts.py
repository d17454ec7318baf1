"""Section 9: the DDP hook on models of which a step uses a part, and on ranks one of which fails."""

import pytest
import torch
from hooked import SHARES, Recorded, flat, kept, small_net
from processes import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tcs_core as tcs


class Heads(nn.Module):
    """A body and two heads, of which a step uses one, or neither."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.one, self.two = nn.Linear(20, 32), nn.Linear(32, 10), nn.Linear(32, 10)

    def forward(self, x, which):
        hidden = self.body(x).relu()
        return (self.one, self.two)[which](hidden) if which < 2 else hidden


def by_turns(ranks, folder, order, cap, zeroed):
    """Sums over 30 steps, by parameter in float64: this rank's gradients, as it would have them
    without DDP, and what comes out; and its errors. Before a pass, the gradients of all parameters are
    zeroed, or of those that the pass will use."""
    plain, state = Heads(), tcs.TCSState(start_iter=2, **SHARES)
    model = DistributedDataParallel(Heads(), find_unused_parameters=True, bucket_cap_mb=cap)
    model.register_comm_hook(state, tcs.tcs_hook)
    sums = {m: [torch.zeros_like(p, dtype=torch.float64) for p in plain.parameters()] for m in (plain, model)}  # fmt: skip
    for step in range(30):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + ranks.rank))
        which, *others = (order(step, rank) for rank in (ranks.rank, 1 - ranks.rank))
        for of, summed in sums.items():
            inner = getattr(of, "module", of)
            heads = [inner.one, inner.two]
            for part in (
                [of] if zeroed == "all" or of is plain else [inner.body, *heads[which:][:1]]
            ):
                part.zero_grad()
            of(x, which).square().mean().backward()
            unused = [h for n, h in enumerate(heads) if n not in (which, *others)]
            kept_back = {p for head in unused for p in head.parameters()}
            for total, p in zip(summed, of.parameters(), strict=True):
                total += 0.0 if p.grad is None or p in kept_back else p.grad
    errors = [part.double() for part in kept(state, model.parameters(), "errors")]
    flats = [torch.cat([t.reshape(-1) for t in ts]).numpy() for ts in (*sums.values(), errors)]
    return *flats, len(state._buckets)


def in_turn(step, rank):
    return step % 2


def each_its_own(step, rank):
    return (step + rank) % 2


def one_of_them_none(step, rank):
    return (step + rank) % 3


@pytest.mark.parametrize("order", [in_turn, each_its_own, one_of_them_none])
@pytest.mark.parametrize("zeroed", ["all", "used"])
@pytest.mark.parametrize("cap", [25, 0.002])
def test_heads_in_turn_lose_nothing(tmp_path, order, cap, zeroed):
    """In = out + errors, averaged over ranks; DDP throws away what it gets for a parameter that no
    rank has used."""
    (in_one, out, errors_one, buckets), (in_two, same, errors_two, _) = start(
        2, tmp_path, by_turns, order, cap, zeroed
    )
    into, errors = (in_one + in_two) / 2, (errors_one + errors_two) / 2
    assert (out == same).all() and errors.any() and (buckets > 1) == (cap < 1)
    lost = into - out - errors
    assert (lost**2).sum() ** 0.5 < 1e-6 * (into**2).sum() ** 0.5


# One rank's gradients are not finite ──────────────────────────────────────────────────────────────


def spoiled(ranks, folder, dtype, times, options):
    """Rank 1's loss is so many times as large in the fourth step."""
    hooked = Recorded(tcs.TCSState(start_iter=2, **SHARES), small_net(dtype), **options)
    for number in range(3):
        hooked.step(number)
    before, masks = flat(hooked.errors()), hooked.masks()
    broken = flat(hooked.step(3, times if ranks.rank == 1 else 1.0))
    own = flat(hooked.inputs()).isfinite().all()
    moved = float((before - flat(hooked.errors())).abs().max())
    same, fine = torch.equal(hooked.masks(), masks), flat(hooked.step(4)).isfinite().all()
    return bool(own), bool(broken.isnan().all()), same, bool(fine), moved


@pytest.mark.parametrize(
    ("dtype", "times"),
    [(torch.float32, torch.nan), (torch.float32, torch.inf), (torch.bfloat16, torch.nan),
     (torch.float16, 1e9)],
)  # fmt: skip
@pytest.mark.parametrize("cap", [25, 0.002])
def test_a_gradient_that_is_not_finite_voids_the_step_on_all_ranks(tmp_path, dtype, times, cap):
    """As a GradScaler wants it; errors and mask stay, on the rank at fault to the bit."""
    one, two = start(2, tmp_path, spoiled, dtype, times, {"bucket_cap_mb": cap})
    assert one[0] and not two[0]  # of their own gradients
    assert one[1:4] == two[1:4] == (True, True, True)
    assert one[4] < 1e-6 and two[4] == 0


# What it can't do ─────────────────────────────────────────────────────────────────────────────────


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.words(x))


def of_sparse_gradients(ranks, folder):
    model = DistributedDataParallel(Words())
    model.register_comm_hook(tcs.TCSState(start_iter=1), tcs.tcs_hook)
    for _ in range(3):
        model(torch.arange(4) + ranks.rank).square().mean().backward()


def test_sparse_gradients_are_refused_in_one_line(tmp_path):
    for said in start(2, tmp_path, of_sparse_gradients):
        assert said.startswith("ValueError: gradients: got sparse ones") and "\n" not in said
