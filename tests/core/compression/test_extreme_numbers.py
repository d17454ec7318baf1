"""Numbers that go wrong, dimensions at their edges, and large ones.

TCS_LARGE=1: D = 100 million through the compressor, 5 GB of memory, 2 minutes.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tcs_lab.schemes.variants  # noqa: F401  (-D, +, ++)
import torch

import tcs_core as tcs

FAMILIES = ["TCS", "TCS-Q5", "TCS-LF-Q1", "TCS-Q5++", "top-K", "top-K-Q5+", "rand-K-D5", "FedAvg", "FedAvg-Q3"]  # fmt: skip
EDGES = {
    "D is 1": ((1,), {}),
    "K is 1": ((5, 1, 3), {"phi_global": 1e-6, "phi_local": 1e-6}),
    "K is D": ((5, 1, 3), {"phi_global": 1.0, "phi_local": 1.0}),
    "layers below their share": ((1, 1, 1, 40), {"phi_min_global": 0.9, "phi_min_local": 0.9}),
    "many layers of one": ((1,) * 30, {"phi_min_global": 1.0}),
}
DELTAS = {
    "random": lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(1)),
    "zero": torch.zeros,
    "equal": torch.ones,
    "one client zero": lambda shape: torch.arange(shape[0])[:, None] * torch.ones(shape),
    "denormal": lambda shape: torch.full(shape, 1e-42),
}


def named(name, changes):
    scheme = tcs.Scheme.named(name)
    fits = {k: v for k, v in changes.items() if getattr(scheme, k) is not None}
    fits |= {k: v for k, v in changes.items() if "min" in k and scheme.rule == "TCS"}
    return dataclasses.replace(scheme, **fits)


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", FAMILIES)
def test_at_the_edges_nothing_is_lost(name, edge, wire):
    """All that was meant to be sent has been sent or stands in the errors, after every round."""
    sizes, changes = EDGES[edge]
    for make in DELTAS.values():
        compressor = tcs.Compressor(
            named(name, changes), sizes, 3, link=tcs.Link(tcs.unchanged) if wire else None
        )
        meant, sent = torch.zeros(sum(sizes)).double(), torch.zeros(sum(sizes)).double()
        for _ in range(4):
            deltas_ND = make((3, sum(sizes)))
            meant += deltas_ND.double().mean(0)
            sent += compressor.step(deltas_ND).double()
            left = compressor.errors_ND.double().sum(0) / 3  # zeros where none are kept
            if compressor.server.downlink is not None:
                left += compressor.server.downlink.errors_D.double()
            near = 1e-5 * float(meant.abs().max()) + 1e-44
            torch.testing.assert_close(sent + left, meant, rtol=1e-5, atol=near)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_client_whose_update_is_not_finite_is_named_and_nothing_changes(name, dense, bad):
    compressor = tcs.Compressor(tcs.Scheme.named(name), [30, 20], 3)
    compressor.step(torch.randn(3, 50))
    errors, round_ = compressor.errors_ND.clone(), compressor.known.round
    deltas_ND = torch.ones(3, 50)
    deltas_ND[1, 7] = bad
    with pytest.raises(tcs.NotFiniteError, match="client 1: the update is not finite") as raised:
        compressor.step(deltas_ND, dense)
    assert raised.value.client == 1
    assert torch.equal(errors, compressor.errors_ND) and round_ == compressor.known.round


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sum_that_overflows_at_the_server_is_no_silent_infinity(name, dense, wire):
    """Three clients with finite updates, whose sum is beyond float32."""
    compressor = tcs.Compressor(
        tcs.Scheme.named(name), [30, 20], 3, link=tcs.Link(tcs.unchanged) if wire else None
    )
    compressor.step(torch.ones(3, 50))
    with pytest.raises(tcs.NotFiniteError, match="server: the update is not finite"):
        compressor.step(torch.full((3, 50), 3e38), dense)


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_errors_that_overflow_name_their_client(wire, dense):
    compressor = tcs.Compressor(
        tcs.Scheme.named("TCS"), [300, 200], 2, link=tcs.Link(tcs.unchanged) if wire else None
    )
    compressor.step(torch.ones(2, 500))
    deltas_ND = torch.zeros(2, 500)
    deltas_ND[1] = 2e38 + torch.arange(500) * 1e34  # only six of them can be sent
    compressor.step(deltas_ND)
    with pytest.raises(tcs.NotFiniteError, match="client 1"):
        compressor.step(deltas_ND, dense)


# Large ────────────────────────────────────────────────────────────────────────────────────────────

LARGE = """
import json, re, sys
from pathlib import Path
import torch, tcs_core as tcs, tcs_lab.schemes

def kilobytes(key):
    return int(re.search(key + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

name, clients, dimension, wire = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "wire"
before = kilobytes("VmRSS")
deltas_ND = torch.randn(clients, dimension)
compressor = tcs.Compressor(tcs.Scheme.named(name), [dimension // 2, dimension - dimension // 2], clients, link=tcs.Link(tcs.unchanged) if wire else None)
for _ in range(3):
    update_D = compressor.step(deltas_ND)
assert update_D.isfinite().all() and compressor.known.round == 3
print(json.dumps(1024 * (kilobytes("VmHWM") - before)))
"""


@pytest.mark.skipif("TCS_LARGE" not in os.environ, reason="5 GB of memory: set TCS_LARGE=1")
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "TCS-Q5++", "top-K"])
def test_a_hundred_million_parameters_within_the_memory_formula(name, clients):
    dimension = 10**8
    words = [sys.executable, "-c", LARGE, name, str(clients), str(dimension), "counted"]
    done = subprocess.run(
        words, cwd=Path(tcs.__file__).parent, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    used, allowed = json.loads(done.stdout), (2 * clients + 8) * 4 * dimension
    print(f"{name}, N = {clients}: {used:,} of {allowed:,} bytes")
    assert used <= allowed
