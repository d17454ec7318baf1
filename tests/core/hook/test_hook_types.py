"""Section 9: the DDP hook in types of 16 bits, and whatever torch's global defaults are."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from common import Alone, Bucket, alone_in_a_group, deltas_like_training

import tcs_core as tcs

SIZES, STEPS = [900, 100], 12
D = sum(SIZES)


class OneOf(Alone):
    """A group of so many ranks, of which all but this one have a gradient of 0."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    def size(self):
        return self.ranks


def as_one_of_many(monkeypatch):
    def gather(gathered, part, group, async_op=False):
        for other in gathered:
            other.copy_(part if not async_op else torch.zeros_like(part))
        gathered[0].copy_(part)
        return Alone(gathered)

    monkeypatch.setattr(dist, "all_reduce", lambda sent, group, async_op: Alone(sent))
    monkeypatch.setattr(dist, "all_gather", gather)


def steps_of(state, dtype=torch.float32):
    """Gradients in a type, and the averages that come out of them."""
    parameters = [torch.zeros(size) for size in SIZES]
    for deltas_ND in deltas_like_training(STEPS, 1, SIZES):
        gradient_D = deltas_ND[0].to(dtype)
        average_D = tcs.tcs_hook(state, Bucket(gradient_D.clone(), parameters)).wait()
        assert average_D.dtype == dtype
        yield gradient_D, average_D.clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "shares", [{}, {"phi_global": None, "phi_local": 0.1}, {"phi_global": 1.0, "phi_local": None}]
)
def test_what_rounding_takes_from_values_stays_in_the_errors(dtype, ranks, shares, monkeypatch):
    """What went in is what came out, times the number of ranks, and what is left, but for the first
    step, which is DDP's own."""
    as_one_of_many(monkeypatch)
    shares = {"phi_global": 0.1, "phi_local": 0.05} | shares
    state = tcs.TCSState(OneOf(ranks), start_iter=1, **shares)
    into_D = out_D = torch.zeros(D, dtype=torch.float64)
    for number, (gradient_D, average_D) in enumerate(steps_of(state, dtype)):
        if number:
            into_D, out_D = into_D + gradient_D, out_D + ranks * average_D.double()
    (client,) = state._buckets.values()
    missing_D = into_D - out_D - client.errors_D
    assert float(missing_D.norm()) < 1e-6 * float(into_D.norm())


@contextlib.contextmanager
def default(kind):
    """torch's default, a type or a device, for a while."""
    is_type = isinstance(kind, torch.dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind) if is_type else torch.set_default_device(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before) if is_type else torch.set_default_device(None)


def outcome(kind, monkeypatch, on_a_gpu, dtype):
    """Averages and what is kept, of steps of which one is void and one leaves a parameter unused."""
    if on_a_gpu:
        monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    parameters = [torch.zeros(size, device="cpu", dtype=torch.float32) for size in SIZES]
    gradients = [deltas_ND[0] for deltas_ND in deltas_like_training(8, 1, SIZES)]
    gradients[3][7], gradients[5][SIZES[0] :] = torch.inf, 0.0
    with default(kind) if kind else contextlib.nullcontext():
        state = tcs.TCSState(Alone(), start_iter=2, phi_global=0.1, phi_local=0.05)
        averages = []
        for number, gradient_D in enumerate(gradients):
            if number == 6:
                saved, state = state.state_dict(), tcs.TCSState(
                    Alone(), start_iter=2, phi_global=0.1, phi_local=0.05)  # fmt: skip
                state.load_state_dict(saved)
            averages.append(tcs.tcs_hook(state, Bucket(gradient_D.to(dtype), parameters)).wait())
        parts = state.state_dict()["parameters"].values()
    return [torch.stack(averages)] + [part[key] for part in parts for key in ("errors", "mask")]


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.float16, "meta"])
@pytest.mark.parametrize("on_a_gpu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_defaults_do_not_matter(kind, on_a_gpu, dtype, monkeypatch):
    alone_in_a_group(monkeypatch)
    expected = outcome(None, monkeypatch, on_a_gpu, dtype)
    found = outcome(kind, monkeypatch, on_a_gpu, dtype)
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == two.dtype and one.device == two.device
        assert torch.equal(one.nan_to_num(), two.nan_to_num()) and torch.equal(
            one.isnan(), two.isnan()
        )
