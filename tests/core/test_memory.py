"""What a round needs beside the errors does not grow with the number of clients."""

import weakref

import pytest
import tcs_lab.variants  # noqa: F401  (-D)
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tcs_core as tcs

CLIENTS, WIDTH = 40, 100


class Peak(TorchDispatchMode):
    """The most bytes that tensors made within it held at one time."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self._made(tensor.untyped_storage())
        return result

    def _made(self, storage):
        if storage.data_ptr() not in self.known:
            size, place = storage.nbytes(), storage.data_ptr()
            self.known[place] = weakref.finalize(storage, self._freed, place, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _freed(self, place, size):
        del self.known[place]
        self.live -= size


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


@pytest.mark.parametrize("scheme", ["TCS", "TCS-L2-Q5-D5", "TCS-LF-Momentum", "top-K", "rand-K", "FedAvg", "FedAvg-L2"])
def test_a_round_makes_no_tensor_of_all_clients_differences(scheme):
    made = federation(scheme)
    flat = 4 * len(made.theta_D)
    for _ in range(2):  # with TCS the first is dense
        with Peak() as peak:
            made.round()
        assert flat / 2 < peak.peak < 8 * flat < CLIENTS * flat / 4
    keeps = made.scheme.keeps_errors
    assert made.compressor.errors_ND.nbytes == (CLIENTS * flat if keeps else 0)
