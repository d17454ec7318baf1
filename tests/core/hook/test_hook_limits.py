"""Section 9: the DDP hook with small buckets, numbers near the largest of their type, and odd parameters."""

import pytest
import torch
import torch.distributed as dist
from common import Alone, Bucket, alone_in_a_group
from processes import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tcs_core as tcs


def in_small_buckets(ranks, folder):
    """The mask comes from one bucket; of those after it, the smallest lies in it whole."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 3))
    layers[1].weight.data.mul_(0.01)
    state, full = tcs.TCSState(phi_global=0.2, start_iter=1), []
    model = DistributedDataParallel(layers, bucket_cap_mb=0.001)
    model.register_comm_hook(state, _noting_full_masks(full))
    for _ in range(4):
        model(100 * torch.randn(8, 100)).square().mean().backward()
    return any(full), state.iter


def _noting_full_masks(full):
    def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        size, future = bucket.buffer().numel(), tcs.tcs_hook(state, bucket)
        names = tuple(state._names[p] for p in bucket.parameters())
        known = state._buckets[names].known
        full.append(not known.dense and len(known.shared_K) == size)
        return future

    return hook


def test_a_bucket_that_lies_in_the_shared_mask_whole_has_nothing_to_explore(tmp_path):
    assert start(2, tmp_path, in_small_buckets) == [(True, 4)] * 2


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000, dtype=torch.float16))

    def forward(self, x):
        return (self.weight * x).sum()


def near_the_largest(ranks, folder):
    """Gradients of float16 whose accumulated errors are beyond it, explored ones too."""
    model = DistributedDataParallel(Scaled())
    model.register_comm_hook(tcs.TCSState(start_iter=1), tcs.tcs_hook)
    x = torch.full((1000,), 20000.0, dtype=torch.float16)
    x[:10] = 40000.0
    finite = []
    for _ in range(8):
        model.zero_grad()
        model(x).backward()
        finite.append(bool(model.module.weight.grad.isfinite().all()))
    return finite


@pytest.mark.parametrize("ranks", [2, 3])
def test_finite_gradients_of_float16_stay_finite(tmp_path, ranks):
    """Three thirds of the largest number, rounded to float16, are beyond it."""
    assert start(ranks, tmp_path, near_the_largest) == [[True] * 8] * ranks


def test_what_a_shorter_type_cannot_hold_stays_behind():
    known = tcs.Known("TCS", [1000])
    known.rule.load_state_dict(known.rule.state_dict() | {"positions": torch.arange(10)})
    client, gradient_D = tcs.Client(known), torch.full((1000,), 5e4, dtype=torch.float16)
    client.errors_D.fill_(3e4)
    intended_D = client.errors_D + gradient_D.float()
    known.begin()
    message, finite = tcs._message_of(client, gradient_D)
    shares_K = tcs._shares(message.values, 1, torch.float16)
    assert finite and shares_K.tolist() == [torch.finfo(torch.float16).max] * 11
    sent = tcs.Message(shares_K.float(), message.positions)
    client.arrived(sent)
    sent_D = torch.zeros(1000)
    sent.add_to_(sent_D, known.shared_K)
    assert torch.equal(sent_D + client.errors_D, intended_D)


def test_an_empty_parameter_under_the_hook(monkeypatch):
    alone_in_a_group(monkeypatch)
    states = [tcs.TCSState(Alone(), start_iter=1, phi_global=0.1, phi_local=0.05) for _ in "ab"]
    plain = [torch.zeros(30), torch.zeros(70)]
    with_empty = [plain[0], torch.zeros(0), plain[1]]
    for _ in range(3):
        gradient_D = torch.randn(100)
        one, other = (
            tcs.tcs_hook(state, Bucket(gradient_D.clone(), parameters)).wait()
            for state, parameters in zip(states, (plain, with_empty), strict=True)
        )
        assert torch.equal(one, other)


def test_a_complex_parameter_under_the_hook(monkeypatch):
    alone_in_a_group(monkeypatch)
    state = tcs.TCSState(Alone(), start_iter=5)
    parameters = [torch.zeros(30, dtype=torch.complex64)]  # a bucket has its numbers as pairs
    with pytest.raises(ValueError, match=r"^gradients: got 60 entries for parameters of 30"):
        tcs.tcs_hook(state, Bucket(torch.zeros(60), parameters))
    assert state.iter == 0
