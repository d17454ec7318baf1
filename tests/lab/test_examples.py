"""The examples beside the notebooks, to be copied."""

import subprocess
import sys

import pytest
import tcs_lab as lab
import torch
from processes import start
from torch import nn

import tcs_core as tcs

FOLDER = lab.ROOT / "notebooks" / "examples"
sys.path.insert(0, str(FOLDER))

import federation  # noqa: E402


def federated(_, folder, scheme, rounds):
    return federation.train(rounds, scheme).tolist()


@pytest.mark.parametrize("scheme", ["TCS-Q5", "FedAvg"])
def test_a_federation_of_processes_ends_in_the_bits_of_one_process(tmp_path, scheme):
    model, rounds = federation.first_model(), federation.DENSE_ROUNDS + 3
    theta_D = nn.utils.parameters_to_vector(model.parameters()).detach()
    compressor = tcs.Compressor(scheme, tcs.layer_sizes(model), 2)
    start_D = theta_D
    for t in range(rounds):
        deltas_ND = torch.stack([federation.local_difference(theta_D, n, t) for n in range(2)])
        theta_D = theta_D + compressor.step(deltas_ND, dense=t < federation.DENSE_ROUNDS)
    assert (theta_D != start_D).any()
    assert start(2, tmp_path, federated, scheme, rounds) == [theta_D.tolist()] * 2


def test_it_starts_as_its_first_lines_say():
    words = ["--standalone", "--nproc-per-node", "2", str(FOLDER / "federation.py"), "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 2
