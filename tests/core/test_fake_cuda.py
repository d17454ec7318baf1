"""Section 9 on a GPU that is not there: on fake tensors of a CUDA device nothing is computed, but two
devices in one operation raise, and so does every value that the host looks at.

Backward passes need a device that is there, so they are held to the second on a fake CPU."""

import pytest
import torch
from common import HeldFeed
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import tcs_core as tcs

CLIENTS, NAMES = 2, [
    "TCS", "TCS-Q5", "TCS-M3", "TCS-L4-Q5", "TCS-E3-K4", "TCS-Q5-Global Momentum", "TCS-L2-NW", "top-K",
    "top-K-Q5", "top-K-M2-L2", "TCS-LF", "TCS-D5", "TCS+", "TCS-GE", "TCS-WPLF", "rand-K", "FedAvg",
]  # fmt: skip
STATIC = [name for name in NAMES if tcs.StaticRounds.suits(tcs.Scheme.named(name), tcs.Link())]


def small_net():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    return nn.Sequential(*layers)


def play(name, loss=tcs.cross_entropy):
    """A federation on the default device that has made a static round."""
    steps = tcs.Scheme.named(name).local_steps
    labels = torch.zeros(4, dtype=torch.int64)
    feed = HeldFeed([[(torch.empty(4, 3, 8, 8), labels)] * 2 * steps] * CLIENTS, steps)
    federation = tcs.Federation(small_net(), feed, name, 0.1, loss=loss, weight_decay=1e-4)
    rounds = tcs.StaticRounds(federation, 2)
    federation.compressor.use(rounds.host)
    federation.compressor.rule.observe(federation.theta_D)  # a mask to start with
    assert rounds.ready(range(2))
    feed.hold(range(2))
    rounds._round()
    return federation, rounds


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)
    with FakeTensorMode(), torch.device("cuda"):
        yield


@pytest.fixture
def on_cpu():
    with FakeTensorMode():
        yield


def test_these_are_all_kinds_of_static_rounds():
    assert [name in STATIC for name in NAMES] == [True] * 10 + [False] * 7


@pytest.mark.parametrize("name", STATIC)
def test_a_static_round_stays_on_its_device(name, on_cuda):
    federation, rounds = play(name)
    state, rule = federation.state_dict() | rounds.compressor.state_dict(), rounds.compressor.rule
    tensors = [v for v in (*state.values(), *state["rule"].values()) if torch.is_tensor(v)]
    tensors += [rounds.finite_TN, rounds.explored_T, federation.losses_N]
    assert {t.device.type for t in tensors} == {"cuda"}
    assert len(rule.global_mask()) == rule.k_global


@pytest.mark.parametrize("name", STATIC)
def test_the_host_looks_at_no_value_of_a_static_round(name, on_cpu):
    """With its backward passes: to the end of the round, with values that nobody knows yet."""
    _, rounds = play(name)
    with pytest.raises(DataDependentOutputException):
        bool(rounds.finite_TN.all())
    assert rounds.host.explored is not None


# Each of these would be noticed ───────────────────────────────────────────────────────────────────


def looks(tensor):
    return tensor + tensor.flatten()[0].item()


def from_the_cpu(tensor):
    return tensor + torch.zeros(1, dtype=tensor.dtype, device="cpu")


SPOILED = [(looks, DataDependentOutputException, "_local_scalar_dense"),
           (from_the_cpu, RuntimeError, "devices")]  # fmt: skip


def spoil_masks(monkeypatch, spoiled):
    plain = tcs.static_top_k
    monkeypatch.setattr(tcs, "static_top_k", lambda *vector_and_k: spoiled(plain(*vector_and_k)))
    return tcs.cross_entropy


def spoil_values(monkeypatch, spoiled):
    plain = tcs.Message.of
    monkeypatch.setattr(tcs.Message, "of", lambda values_K, *how: plain(spoiled(values_K), *how))
    return tcs.cross_entropy


def spoil_passes(monkeypatch, spoiled):
    return lambda model, batch: tcs.cross_entropy(model, (spoiled(batch[0]), batch[1]))


def spoil_backward(monkeypatch, spoiled):
    def loss(model, batch):
        scores = model(batch[0])
        scores.register_hook(spoiled)
        return nn.functional.cross_entropy(scores, batch[1])

    return loss


PLACES = [(spoil_masks, name) for name in STATIC]
PLACES += [(spoil_values, "TCS-M3"), (spoil_passes, "top-K")]


@pytest.mark.parametrize(("spoil", "name"), PLACES)
@pytest.mark.parametrize(("how", "error", "says"), SPOILED)
def test_what_does_not_belong_on_a_gpu_raises(spoil, name, how, error, says, on_cuda, monkeypatch):
    loss = spoil(monkeypatch, how)
    with pytest.raises(error, match=says):
        play(name, loss)


@pytest.mark.parametrize("spoil", [spoil_masks, spoil_values, spoil_passes, spoil_backward])
def test_what_the_host_looks_at_raises(spoil, on_cpu, monkeypatch):
    loss = spoil(monkeypatch, looks)
    with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
        play("TCS-L2-Q5", loss)


def test_a_quantizer_of_ones_own_that_looks_at_a_value_raises(on_cuda, monkeypatch):
    for registry in ("SUFFIXES", "QUANTIZERS"):
        monkeypatch.setattr(tcs, registry, getattr(tcs, registry).copy())

    @tcs.register_quantizer("U", "uniform")
    def uniform_quantize(values_K, intervals):
        edge = float(values_K.abs().max()) / intervals
        codes_K = (values_K.abs() / edge).int().clamp(0, intervals - 1)
        return codes_K, edge * torch.arange(intervals, device=values_K.device)

    with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
        play("TCS-U5")
