"""What a round needs beside the errors does not grow with the number of clients, and what the DDP
hook needs is little."""

import tracemalloc
import typing

import pytest
import tcs_lab.schemes.variants  # noqa: F401  (-D)
import torch
import torch.distributed as dist
from common import Alone, Bucket, Peak, alone_in_a_group
from torch import nn

import tcs_core as tcs

CLIENTS, WIDTH = 40, 100


def test_the_measure_sees_what_lives_and_what_is_gone():
    with Peak() as peak:
        one = torch.ones(1000)
        two = one + 1
        view = two[:10]
        del two
        three = one.add_(1).exp()
        del one, three
    assert peak.peak == 12_000 and peak.live == 4000 and len(view) == 10


def federation(scheme):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    feed = [[(torch.randn(4, WIDTH), torch.arange(4))] for _ in range(CLIENTS)]
    return tcs.Federation(model, feed, scheme, 0.1)


@pytest.mark.parametrize(
    "scheme", ["TCS", "TCS-L2-Q5-D5", "TCS-LF-Momentum", "top-K", "rand-K", "FedAvg", "FedAvg-L2"]
)
def test_a_round_makes_no_tensor_of_all_clients_differences(scheme):
    made = federation(scheme)
    flat = 4 * len(made.theta_D)
    for _ in range(2):  # with TCS the first is dense
        with Peak() as peak:
            made.round()
        assert flat / 2 < peak.peak < 8 * flat < CLIENTS * flat / 4
    keeps = made.scheme.keeps_errors
    assert made.compressor.errors_ND.nbytes == (CLIENTS * flat if keeps else 0)


# The DDP hook ─────────────────────────────────────────────────────────────────────────────────────

BUCKETS, ENTRIES = 4, 100_000


class Later(Alone):
    """Collectives that are done when somebody says so."""

    waiting: typing.ClassVar = []

    def get_future(self):
        future = torch.futures.Future()
        Later.waiting.append((future, self.sent))
        return future


def step_of(state, parameters, number):
    """A backward pass whose collectives end after it; and the bytes that it had held until then."""
    generator = torch.Generator().manual_seed(number)
    gradients = [torch.randn(ENTRIES, generator=generator) for _ in range(BUCKETS)]
    with Peak() as peak:
        futures = [
            tcs.tcs_hook(state, Bucket(gradient_D, [p], last=p is parameters[-1]))
            for gradient_D, p in zip(gradients, parameters, strict=True)
        ]
        held = peak.live
        while Later.waiting:
            future, sent = Later.waiting.pop(0)
            future.set_result(sent)
        torch.futures.wait_all(futures)
    return held, peak.peak


@pytest.mark.parametrize(("phi_global", "phi_local"), [(0.1, 0.01), (0.01, 0.001), (None, 0.05)])
def test_a_hook_holds_little_beside_errors_while_its_collectives_run(
    phi_global, phi_local, monkeypatch
):
    """What travels, and nothing else; a mask and copies of what is sent are one bucket's at most."""
    alone_in_a_group(monkeypatch)

    def gathers(gathered, part, group, async_op=False):
        gathered[0].copy_(part)
        return Later(gathered) if async_op else None

    monkeypatch.setattr(dist, "all_gather", gathers)
    monkeypatch.setattr(dist, "all_reduce", lambda sent, group, async_op: Later(sent))
    state = tcs.TCSState(Alone(), phi_global=phi_global, phi_local=phi_local, start_iter=2)
    parameters = [torch.zeros(ENTRIES) for _ in range(BUCKETS)]
    dense = [step_of(state, parameters, number) for number in range(2)]
    assert all(held < 1000 * BUCKETS for held, _ in dense)  # no errors yet
    step_of(state, parameters, 2)
    travels = 4 * (phi_global or 0) + 16 * phi_local  # what is gathered is there twice
    for number in range(3, 5):
        held, most = step_of(state, parameters, number)
        assert held < (travels + 0.1) * ENTRIES * BUCKETS
        assert most < (travels + 2.5) * ENTRIES * BUCKETS
    assert sum(state.bytes_sent.values()) > 3 * BUCKETS * ENTRIES * 4 * (phi_global or phi_local)


@pytest.mark.parametrize("excluded", [0, 1000, 20_000])
@pytest.mark.parametrize("k", [200, 2000, 50_000])
def test_a_selection_needs_no_memory_for_every_entry(k, excluded):
    vector_D = torch.randn(1 << 21, generator=torch.Generator().manual_seed(k)) ** 3
    mask_D = tcs.top_k_mask(vector_D, excluded)
    tcs.top_k_positions(vector_D, k, mask_D)  # what Python loads is not counted
    tracemalloc.start()
    found_K = tcs.top_k_positions(vector_D, k, mask_D)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found_K) == k and peak < vector_D.nbytes / 2


@pytest.mark.parametrize("kind", ["ordinary", "few that are not 0", "ties", "all 0"])
def test_where_all_else_is_0_only_what_may_be_chosen_is_looked_at(kind):
    """What comes out is what it would be without knowing that."""
    generator = torch.Generator().manual_seed(3)
    among_K = torch.randperm(10_000, generator=generator)[:900].sort().values
    vector_D = torch.zeros(10_000)
    values_K = torch.randn(900, generator=generator)
    values_K = {"ties": values_K.round(), "all 0": values_K * 0}.get(kind, values_K)
    vector_D[among_K] = (
        values_K.index_fill(0, torch.arange(850), 0.0) if kind[:3] == "few" else values_K
    )
    for k in (1, 100, 500, 899, 900, 1000):
        found_K = tcs.top_k_positions(vector_D, k, among_K=among_K)
        sorted_D = vector_D.abs().sort(descending=True, stable=True).indices
        assert torch.equal(found_K, sorted_D[:k].sort().values)
