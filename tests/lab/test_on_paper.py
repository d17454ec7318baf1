"""What a GPU would have to do: operations, bytes and arithmetic, counted by hand and by PyTorch."""

import pytest
import tcs_lab as lab
import torch
from common import config
from tcs_lab.studies import on_paper
from torch.utils.flop_counter import FlopCounterMode

import tcs_core as tcs

FLOATS, ONE = torch.zeros(1000), torch.zeros(1)
PLACES = torch.arange(0, 1000, 100)


def traced(work):
    with on_paper.Trace() as trace:
        work()
    return trace.ops


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: FLOATS + FLOATS[:1], 4000 + 4 + 4000),
        (lambda: FLOATS.add_(1), 4000 + 4000),
        (lambda: FLOATS.zero_(), 4000),
        (lambda: torch.zeros(1000), 4000),
        (lambda: torch.add(FLOATS, 1, out=FLOATS), 4000 + 4000),
        (lambda: ONE.expand(1000).sum(), 4 + 4),
        (lambda: FLOATS.index_select(0, PLACES), 40 + 80 + 40),
        (lambda: FLOATS[PLACES], 40 + 80 + 40),
        (lambda: FLOATS.scatter_(0, PLACES, torch.empty(10)), 40 + 80 + 40 + 40),
        (lambda: FLOATS.index_fill_(0, PLACES, 1.0), 40 + 80 + 40),
    ],
)
def test_bytes_of_one_operation(work, expected):
    (op,) = traced(work)
    assert (op.bytes, op.flops, op.waits) == (expected, 0, False)


def test_views_and_empty_tensors_launch_nothing():
    assert not traced(lambda: (FLOATS.view(10, 100).t()[2:], torch.empty(9), FLOATS.detach()))


def test_products_are_counted_in_their_type():
    one, two = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(16, 4, dtype=torch.bfloat16)
    (op,) = traced(lambda: one @ two)
    assert op == on_paper.Op("mm", 2 * (8 * 16 + 16 * 4 + 8 * 4), 2 * 8 * 16 * 4, True, False)
    (plain,) = traced(lambda: one.float() @ two.float())[2:]
    gpu = on_paper.GPU("slow", 1e3, 2.0, 1.0)
    assert gpu.seconds(op) == 512 and gpu.seconds(plain) == 1024
    assert gpu._replace(bf16=1e9).seconds(op) == op.bytes / 1e3


@pytest.mark.parametrize(
    "work", [lambda: FLOATS.sum().item(), lambda: FLOATS.nonzero(), lambda: FLOATS[FLOATS > 0],
             lambda: FLOATS.sum().isfinite().all() or 0]
)  # fmt: skip
def test_what_the_host_waits_for_is_said(work):
    assert [op.waits for op in traced(work)].count(True) == 1


def paper_round(name):
    settings = config(name, precision="bf16", clients=3, batch_size=4)
    return on_paper.static_round(settings, lab.synthetic_dataset(24, 10).resized(16))


def test_the_arithmetic_of_a_clients_round_is_that_of_its_passes():
    client, server = paper_round("TCS")
    model, images = tcs.build_model("resnet8", 2), torch.zeros(4, 3, 16, 16)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    assert sum(op.flops for op in client) == counter.get_total_flops() > 0
    assert sum(op.flops for op in server) == 0
    assert all(op.half for op in client if op.flops)
    assert not any(op.waits for op in client + server)
    two, _ = paper_round("TCS-L2")
    assert sum(op.flops for op in two) == 2 * counter.get_total_flops()
