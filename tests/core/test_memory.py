"""What a round needs beside the errors does not grow with the number of clients."""

import pytest
import tcs_lab.schemes.variants  # noqa: F401  (-D)
import torch
from common import Peak
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
