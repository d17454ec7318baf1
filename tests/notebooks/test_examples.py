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

import ddp_training  # noqa: E402
import federation  # noqa: E402

TORN_DOWN = "terminate called without an active exception"  # gloo's threads, now and then, at exit


def torchrun(example, *words):
    """Two processes of an example, as its first lines say."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(FOLDER / example), *words]
    for _ in range(3):
        ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
        if TORN_DOWN not in ended.stderr:
            break
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# client_and_server.py ─────────────────────────────────────────────────────────────────────────────


def test_a_dense_round_of_the_server_is_the_mean(registry):
    import client_and_server

    assert client_and_server.FadingTopK
    compressor = tcs.Compressor("Fading-TopK", [400], 10)
    deltas_ND = torch.randn(10, 400)
    torch.testing.assert_close(compressor.step(deltas_ND, dense=True), deltas_ND.mean(0))


# federation.py ────────────────────────────────────────────────────────────────────────────────────


def federated(_, folder, scheme, rounds):
    return federation.train(rounds, scheme).tolist()


@pytest.mark.parametrize("scheme", ["TCS-Q5", "FedAvg"])
def test_a_federation_of_processes_ends_in_the_bits_of_one_process(tmp_path, scheme):
    model, rounds = federation.first_model(), federation.DENSE_ROUNDS + 3
    start_D = theta_D = nn.utils.parameters_to_vector(model.parameters()).detach()
    compressor = tcs.Compressor(scheme, tcs.layer_sizes(model), 2)
    for t in range(rounds):
        deltas_ND = torch.stack([federation.local_difference(theta_D, n, t) for n in range(2)])
        theta_D = theta_D + compressor.step(deltas_ND, dense=t < federation.DENSE_ROUNDS)
    assert (theta_D != start_D).any()
    assert start(2, tmp_path, federated, scheme, rounds) == [theta_D.tolist()] * 2


def test_the_federation_starts_as_its_first_lines_say():
    assert len(torchrun("federation.py", "2").splitlines()) == 2


# ddp_training.py ──────────────────────────────────────────────────────────────────────────────────


def trained(ranks, folder, stops):
    for steps in stops:
        model = ddp_training.main(steps, folder / "-".join(map(str, stops)))
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def test_the_ddp_training_resumes_to_the_bit(tmp_path):
    """Killed after 40 of 60 steps, ten of them sparse; and it has moved."""
    unbroken, same = start(2, tmp_path, trained, [60])
    resumed, too = start(2, tmp_path, trained, [40, 60])
    assert (unbroken == resumed).all() and (same == too).all() and (unbroken == same).all()
    assert (unbroken != start(2, tmp_path, trained, [50])[0]).any()


def test_the_ddp_training_starts_as_its_first_lines_say(tmp_path):
    torchrun("ddp_training.py", "10", str(tmp_path / "checkpoints"))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["rank0.pt", "rank1.pt"]
