"""On a GPU, the own masks of all clients are chosen in one batch of calls. Counted on fake tensors of a
CUDA device, and compared on a CPU with one client after the other."""

import collections

import pytest
import torch
from common import deltas_like_training
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tcs_core as tcs

SIZES, CLIENTS = [900, 100], 4


class Calls(TorchDispatchMode):
    """Counts the operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def without_reading(server):
    """The update and a length, without a look at any value or flag."""
    update_D = server.average()
    server.known.flags.clear()
    return update_D, 0


def calls_of_a_round(name, clients):
    """Of a sparse round on a GPU that is not there, up to the server's reply."""
    with FakeTensorMode(), torch.device("cuda"):
        compressor = tcs.Compressor(name, SIZES, clients, device="cuda")
        with pytest.MonkeyPatch.context() as first:  # a mask to start with
            first.setattr(tcs, "_host_reads", lambda flag: True)
            compressor.rule.observe(torch.ones(1000))
        compressor.link.to_clients = without_reading
        with Calls() as calls:
            compressor.step(torch.ones(clients, 1000))
        assert not compressor.known.dense
        return calls.counts


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K", "TCS-Random"])
def test_the_number_of_calls_that_choose_masks_does_not_grow_with_the_clients(name):
    few, many = calls_of_a_round(name, 2), calls_of_a_round(name, 10)
    for call in ("topk", "sort", "cumsum", "amin", "gather"):
        assert 1 <= few[call] == many[call]
    assert many["nonzero_static"] - few["nonzero_static"] == 8  # one for each client's ties


def without_looks(monkeypatch):
    monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)


def both(monkeypatch, scheme, steps, **settings):
    """Do the same rounds on a CPU and as on a GPU; return both compressors after each round."""
    plain = tcs.Compressor(scheme, SIZES, CLIENTS, **settings)
    with monkeypatch.context() as patch:
        without_looks(patch)
        together = tcs.Compressor(scheme, SIZES, CLIENTS, **settings)
    for deltas_ND, chosen in steps:
        expected_D = plain.step(deltas_ND, clients=chosen)
        with monkeypatch.context() as patch:
            without_looks(patch)
            update_D = together.step(deltas_ND, clients=chosen)
        assert torch.equal(update_D, expected_D)
        assert torch.equal(together.errors_ND, plain.errors_ND)
        assert together.traffic == plain.traffic
    return plain, together


@pytest.mark.parametrize(
    "name", ["TCS", "TCS-Q5", "top-K", "TCS-LF", "TCS-PLF", "top-K-Q5", "rand-K", "rand-K-Q3"]
)
def test_masks_chosen_together_are_those_chosen_one_by_one(name, monkeypatch):
    chosen = [None, None, [2, 0], [3], None, [1, 3, 0, 2]]
    steps = zip(deltas_like_training(len(chosen), CLIENTS, SIZES), chosen, strict=True)
    plain, together = both(monkeypatch, name, steps)  # which compares them after each round
    shared_K, masks_K = plain.known.shared_K, together.known.shared_K
    assert torch.equal(shared_K, masks_K) and plain.known.round == together.known.round == len(
        chosen
    )


def test_of_tied_entries_every_client_sends_the_first(monkeypatch):
    """Few different magnitudes, so that the last place of a mask is always contested."""
    generator = torch.Generator().manual_seed(0)
    steps = [
        (torch.randint(-2, 3, (CLIENTS, 1000), generator=generator).float(), None) for _ in range(5)
    ]
    plain, together = both(monkeypatch, "TCS", steps)
    assert torch.equal(plain.rule.positions, together.rule.positions)


class EverySecond(tcs.TCS):
    """A rule with an `own_mask` of its own, which looks at each client's vector."""

    def own_mask(self, intended_D, shared_D, k):
        hidden_D = shared_D.clone()
        hidden_D[1::2] = True
        return super().own_mask(intended_D, hidden_D, k)


def test_a_rule_with_its_own_choice_is_asked_for_each_client(monkeypatch):
    monkeypatch.setitem(tcs.RULES, "every second", EverySecond)
    scheme = tcs.Scheme("every second", rule="every second")
    steps = [(deltas_ND, None) for deltas_ND in deltas_like_training(4, CLIENTS, SIZES)]
    plain, together = both(monkeypatch, scheme, steps)  # which compares them after each round
    assert together.known.round == len(steps) and not together.known.dense
    assert torch.equal(plain.known.shared_K, together.known.shared_K)


def test_several_vectors_in_groups_are_chosen_like_each_alone(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randint(-3, 4, (50,), generator=generator).float() for _ in range(7)]
    hidden_K = tcs.random_positions(15, 50, 0)
    alone = [tcs.top_k_positions(vector_D, 9, hidden_K) for vector_D in vectors]
    for together in (1, 49, 50, 150, 10_000):
        monkeypatch.setattr(tcs, "_TOGETHER", together)
        assert torch.equal(tcs.top_k_of_each(vectors, 9, hidden_K), torch.stack(alone))


def test_a_client_that_fails_is_named_and_the_others_keep_what_they_meant_to_send(monkeypatch):
    without_looks(monkeypatch)
    compressor = tcs.Compressor("TCS", SIZES, CLIENTS)
    first_ND, second_ND = deltas_like_training(2, CLIENTS, SIZES)
    compressor.step(first_ND)
    before_ND = compressor.errors_ND.clone()

    def difference(n):
        if n == 2:
            raise RuntimeError("the feed has ended")
        return second_ND[n]

    with pytest.raises(RuntimeError, match="the feed has ended") as raised:
        compressor.round(difference, [0, 1, 2, 3])
    assert any("client 2, round 1" in note for note in raised.value.__notes__)
    assert torch.equal(compressor.errors_ND[:2], before_ND[:2] + second_ND[:2])
    assert torch.equal(compressor.errors_ND[2:], before_ND[2:])
    assert compressor.round(second_ND.__getitem__, [0, 1, 2, 3]).isfinite().all()
