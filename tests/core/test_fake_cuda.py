"""Sections 6 and 7 on a GPU that is not there: on fake tensors of a CUDA device nothing is computed,
but two devices in one operation raise, and so does every value that the host looks at.

Backward passes need a device that is there, so they are held to the second on a fake CPU."""

import contextlib

import pytest
import torch
from common import Alone, Bucket, HeldFeed, alone_in_a_group
from tcs_lab.training.cuda_graph import DeferredLink
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import tcs_core as tcs

CLIENTS = 2
FREE = [
    "TCS",
    "TCS-Q5",
    "TCS-L4-Q5",
    "TCS-Q5-Global Momentum",
    "top-K",
    "top-K-Q5",
    "rand-K",
    "FedAvg",
]


def small_net():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    return nn.Sequential(*layers)


def play(name, loss=tcs.cross_entropy):
    """A federation on the default device that has made a round, up to the one look at its end."""
    steps = tcs.Scheme.named(name).local_steps
    labels = torch.zeros(4, dtype=torch.int64)
    feed = HeldFeed([[(torch.empty(4, 3, 8, 8), labels)] * 2 * steps] * CLIENTS, steps)
    federation = tcs.Federation(small_net(), feed, name, 0.1, loss=loss, weight_decay=1e-4)
    known = federation.compressor.known
    give_mask(known, federation.theta_D)
    federation.compressor.link = DeferredLink(known)
    federation.round()
    return federation


def give_mask(known, update_D):
    """The first mask, for which the host looks at one value."""
    with pytest.MonkeyPatch.context() as first:
        first.setattr(tcs, "_host_reads", lambda flag: True)
        known.rule.observe(update_D)


def leave_random_numbers(monkeypatch):
    """Only a device that is there has a random state, and a fake tensor holds none."""
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)
    monkeypatch.setattr(tcs.LocalTrainer, "_check_step", lambda *_: None)  # no gradients are there
    leave_random_numbers(monkeypatch)
    with FakeTensorMode(), torch.device("cuda"):
        yield


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    leave_random_numbers(monkeypatch)
    with FakeTensorMode():
        yield


def tensors_of(state):
    """All tensors in a state, however deep."""
    if torch.is_tensor(state):
        return [state]
    inside = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for value in inside for tensor in tensors_of(value)]


@pytest.mark.parametrize("name", FREE)
def test_a_round_stays_on_its_device(name, on_cuda):
    federation = play(name)
    compressor = federation.compressor
    link, tensors = compressor.link, tensors_of(compressor.state_dict())
    tensors += [federation.theta_D, federation.statistics_NS, federation.losses_N, link.explored]
    tensors += [flag for _, flag in link.flags] + [*compressor.rule.state_dict().values()]
    assert {sender for sender, _ in link.flags} == {*range(CLIENTS), tcs.SERVER}
    assert {t.device.type for t in tensors if torch.is_tensor(t)} == {"cuda"}
    assert compressor.known.dense == (name == "FedAvg")
    assert all(p.device.type == "cuda" for p in federation.model.parameters())


@pytest.mark.parametrize("name", FREE)
def test_the_host_looks_at_no_value_before_the_end_of_a_round(name, on_cpu):
    """With its backward passes: to the end of the round, with values that nobody knows yet."""
    compressor = play(name).compressor
    compressor.known.flags += compressor.link.flags
    with pytest.raises(DataDependentOutputException):
        compressor.known.check_flags()


@pytest.mark.parametrize("name", ["TCS-Q5", "top-K", "rand-K", "FedAvg"])
def test_client_and_server_by_halves_stay_on_their_device(name, on_cuda):
    """To the one look of `Server.finish`, which everything goes into."""
    known = tcs.Known(name, [60, 40], device="cuda")
    give_mask(known, torch.ones(100))
    clients, server = [tcs.Client(known, n) for n in range(2)], tcs.Server(known)
    known.begin()
    for client in clients:
        server.add(client.number, client.send(torch.ones(100)))
    with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
        server.finish()
    assert {sender for sender, _ in known.flags} == {0, 1, tcs.SERVER}
    assert {flag.device.type for _, flag in known.flags} == {"cuda"}


# Each of these would be noticed ───────────────────────────────────────────────────────────────────


def looks(tensor):
    return tensor + tensor.flatten()[0].item()


def from_the_cpu(tensor):
    return tensor + torch.zeros(1, dtype=tensor.dtype, device="cpu")


SPOILED = [(looks, DataDependentOutputException, "_local_scalar_dense"),
           (from_the_cpu, RuntimeError, "devices")]  # fmt: skip


def spoil_masks(monkeypatch, spoiled):
    plain = tcs._largest_by_topk
    monkeypatch.setattr(
        tcs, "_largest_by_topk", lambda *vector_and_k: spoiled(plain(*vector_and_k))
    )
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


def spoil_updates(monkeypatch, spoiled):
    plain = tcs.Server.average
    monkeypatch.setattr(tcs.Server, "average", lambda server: spoiled(plain(server)))
    return tcs.cross_entropy


PLACES = [
    (spoil_masks, "TCS-Q5"), (spoil_updates, "FedAvg"), (spoil_values, "TCS-Q5"), (spoil_passes, "top-K"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "name"), PLACES)
@pytest.mark.parametrize(("how", "error", "says"), SPOILED)
def test_what_does_not_belong_on_a_gpu_raises(spoil, name, how, error, says, on_cuda, monkeypatch):
    loss = spoil(monkeypatch, how)
    with pytest.raises(error, match=says):
        play(name, loss)


@pytest.mark.parametrize(
    "spoil", [spoil_masks, spoil_values, spoil_passes, spoil_backward, spoil_updates]
)
def test_what_the_host_looks_at_raises(spoil, on_cpu, monkeypatch):
    loss = spoil(monkeypatch, looks)
    with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
        play("TCS-L2-Q5", loss)


def test_a_quantizer_of_ones_own_that_looks_at_a_value_raises(registry, on_cuda):
    @tcs.register_quantizer("U", "uniform")
    def uniform_quantize(values_K, intervals):
        edge = float(values_K.abs().max()) / intervals
        codes_K = (values_K.abs() / edge).int().clamp(0, intervals - 1)
        return codes_K, edge * torch.arange(intervals, device=values_K.device)

    with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
        play("TCS-U5")


# The hook ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_of_the_hook_stays_on_its_device_and_looks_at_no_value(
    dtype, momentum, on_cuda, monkeypatch
):
    """Of two buckets, dense steps and sparse ones; the one look is at whether the average that gives
    the first mask is finite."""
    alone_in_a_group(monkeypatch)
    monkeypatch.setattr(Alone, "get_future", lambda work: Done(work.sent))
    monkeypatch.setattr(torch.futures, "collect_all", Done)
    shares = {"phi_global": 0.05, "phi_local": 0.02}
    state = tcs.TCSState(Alone(), **shares, start_iter=2, momentum=momentum)
    state._agreed = True  # else it reads what the other ranks say
    parameters = [torch.zeros(600), torch.zeros(400)]
    monkeypatch.setattr(tcs, "_host_reads", lambda flag: True)
    for _ in range(5):
        for p in parameters:
            bucket = Bucket(torch.ones(len(p), dtype=dtype), [p], last=p is parameters[-1])
            out = tcs.tcs_hook(state, bucket).wait()
            assert out.device.type == "cuda" and out.dtype == dtype
    assert state.iter == 5 and not next(iter(state._buckets.values())).known.dense
    found = tensors_of(state.state_dict()["parameters"])
    assert len(found) == (6 if momentum else 4) and {t.device.type for t in found} == {"cuda"}


def test_whether_the_hooks_first_mask_is_of_a_finite_average_is_looked_at(on_cuda, monkeypatch):
    alone_in_a_group(monkeypatch)
    monkeypatch.setattr(Alone, "get_future", lambda work: Done(work.sent))
    state = tcs.TCSState(Alone(), start_iter=1)
    state._agreed = True
    with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
        tcs.tcs_hook(state, Bucket(torch.ones(1000), [torch.zeros(1000)]))


class Done:
    """A future of what is there; torch's own can't hold fake tensors of a GPU."""

    def __init__(self, found):
        self.found = found

    def value(self):
        return self.found

    wait = value

    def then(self, work):
        return Done(work(self))
