"""Ranks: one federation over real processes. The record does not depend on how many there are, and
a rank that is late, gone or wrong is named."""

import contextlib
import io
import json
import pickle
import re
import subprocess
import sys
import time

import psutil
import pytest
import tcs_lab as lab
import torch
import torch.distributed as dist
from common import config, numbers, tiny_command
from processes import start, until
from tcs_lab.__main__ import main

import tcs_core as tcs

# Ranks' clients take turns: so do those of the one process that they are compared with.
BRIEF = {"epochs": 2, "train_samples": 60, "device": "cpu", "side_by_side": False}


def configs(schemes, **changes):
    return [config(scheme, **(BRIEF | changes)) for scheme in schemes]


def records(ranks, folder, schemes, **changes):
    return lab.run_all(configs(schemes, **changes), folder / str(ranks.size), ranks=ranks)


# What does not depend on the number of ranks ──────────────────────────────────────────────────────

SCHEMES = ["TCS", "TCS-L4-Q5", "top-K", "TCS-L2-M2-E3-W5++", "FedAvg-Global Momentum"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_record_is_the_same_for_any_number_of_processes(tmp_path, size, small_synthetic):
    """Four ranks for three clients: one has none."""
    alone = [numbers(r) for r in records(lab.training.ranks.Ranks(), tmp_path, SCHEMES)]
    for made in start(size, tmp_path, records, SCHEMES):
        assert [numbers(r) for r in made] == alone
        assert all(r["provenance"]["ranks"] == size for r in made)
    assert len(list((tmp_path / str(size) / "ci" / "runs").iterdir())) == len(SCHEMES)


@pytest.fixture
def small_synthetic(monkeypatch):
    """The images of the ranks."""
    small = lab.synthetic_dataset(60, 40).resized(16)
    monkeypatch.setattr(lab.tasks.images, "synthetic_dataset", lambda: small)
    lab.load_dataset.cache_clear()
    yield
    lab.load_dataset.cache_clear()


def drawn(ranks, folder):
    return records(ranks, folder, ["TCS-Q5"], participation=0.4, clients=5)


def test_absent_clients_make_no_difference(tmp_path, small_synthetic):
    """Two of five clients a round: now and then all of them are one rank's."""
    (alone,) = drawn(lab.training.ranks.Ranks(), tmp_path)
    for (made,) in start(3, tmp_path, drawn):
        assert numbers(made) == numbers(alone)


class Stopped(Exception):
    pass


def stopped(ranks, folder, resumed=False):
    """A run that stops after its second epoch, or goes on after that, with how many epochs."""
    (one,) = configs(["TCS-Q5-Global Momentum"], epochs=3, clients=5, batch_size=2)
    epochs = []

    def stop(row):
        epochs.append(row["epoch"])
        if row["epoch"] == 2 and not resumed:
            raise Stopped

    try:
        return lab.run(one, folder / "resumed", stop, ranks), epochs
    except Stopped:
        return None, epochs


def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path, monkeypatch, small_synthetic):
    monkeypatch.setattr(lab.runs.checkpoints.Pace, "due", lambda self: True)
    undisturbed, _ = stopped(lab.training.ranks.Ranks(), tmp_path / "alone", True)
    assert stopped(lab.training.ranks.Ranks(), tmp_path) == (
        None,
        [1, 2],
    )  # one rank stops after two epochs,
    assert [a[0] for a in start(3, tmp_path, stopped)] == [None] * 3  # three after the next,
    (path,) = (tmp_path / "cache" / "checkpoints").iterdir()
    rows = json.loads(torch.load(path, weights_only=True)["rows"])
    assert len(rows) in (1, 2)
    made, epochs = stopped(lab.training.ranks.Ranks(), tmp_path, True)  # and one finishes
    assert epochs in ([2, 3], [3]) and numbers(made) == numbers(undisturbed)


def held(ranks, folder):
    (one,) = configs(["TCS"])
    training = lab.Training(one, lab.load_dataset("synthetic"), ranks, keep_deltas=True)
    training.epoch(0)
    rows = [len(t) for t in (training.deltas_ND, training.compressor.errors_ND,
                             training.statistics_NS, training.samples_NM)]  # fmt: skip
    return rows, len(training.feed.batches.padded)


def test_a_rank_holds_its_own_clients_only(tmp_path):
    assert start(2, tmp_path, held) == [([1] * 4, 20), ([2] * 4, 40)]


# What crosses ─────────────────────────────────────────────────────────────────────────────────────


def crossed(ranks, folder):
    """Every byte that this rank hands to a collective in one sparse round."""
    (one,) = configs(["TCS-Q5"], warmup_epochs=0)
    training, sent = lab.Training(one, lab.load_dataset("synthetic"), ranks), []
    training.federation.round()
    gather = dist.all_gather_object

    def noted(parts, value):
        sent.append(len(pickle.dumps(value)))
        gather(parts, value)

    dist.all_gather_object = noted
    training.federation.round()
    return sent, training.compressor.bytes_up


def test_ranks_exchange_the_encoded_bytes_and_little_else(tmp_path):
    """Beside the messages, what pickle needs for a list of bytes."""
    (one, counted), (two, _) = start(2, tmp_path, crossed)
    assert 0 < sum(one) + sum(two) - counted < 50 * (len(one) + len(two))


# What goes wrong ──────────────────────────────────────────────────────────────────────────────────


def poisoned(ranks, folder):
    """A NaN in the gradient of client 2 alone, once its first epoch is over."""
    (one,) = configs(["TCS"])
    train = tcs.LocalTrainer.local_training

    def poison(self, n, *arguments):
        gradient_D = train(self, n, *arguments)
        if n == 2 and arguments[0] == 6:
            gradient_D[5] = float("nan")
        return gradient_D

    tcs.LocalTrainer.local_training = poison
    try:
        return lab.run(one, folder / str(ranks.size), ranks=ranks)
    finally:
        tcs.LocalTrainer.local_training = train


def test_a_client_that_is_not_finite_ends_the_run_on_all_ranks(tmp_path, small_synthetic):
    alone = poisoned(lab.training.ranks.Ranks(), tmp_path)
    assert alone["reason"].startswith("client 2: ") and "epoch 2, round 2 of 5" in alone["reason"]
    for made in start(3, tmp_path, poisoned):
        assert numbers(made) == numbers(alone)


def link(ranks):
    return lab.training.ranks.ProcessLink(ranks.exchange, ranks.rank, ranks.size)


def overflowing(ranks, folder):
    """Clients 1 and 2 pile up errors that, with finite deltas, overflow."""
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), [50], 3, link=link(ranks))
    generator = torch.Generator().manual_seed(0)
    deltas_ND = torch.randn(3, 50, generator=generator)[compressor.own.start : compressor.own.stop]
    compressor.step(deltas_ND)
    for row, n in enumerate(compressor.own):
        compressor.errors_ND[row] = 3e38 if n else 0.0
    compressor.step(deltas_ND.sign() * 0 + 3e38)


def test_errors_that_overflow_name_the_first_client(tmp_path):
    told = start(3, tmp_path, overflowing)
    assert set(told) == {told[0]} and told[0].startswith("NotFiniteError: client 1: ")


def mistaken(ranks, folder, what):
    """Something is wrong on rank 1 only."""
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), [50], 2, link=link(ranks))
    if what == "message" and ranks.rank == 1:
        compressor.link.channel = lambda sender, data: data[::-1]
    elif what == "replica":
        ranks.check_same(torch.full((3,), float(ranks.rank)), "theta_D")
    elif what == "bug" and ranks.rank == 1:
        compressor.clients[1].message_of = lambda *_: [][1]
    compressor.step(torch.ones(len(compressor.own), 50))


@pytest.mark.parametrize(
    ("what", "texts"),
    [("message", ["MessageError: client 1: message: wrong checksum"] * 2),
     ("replica", ["theta_D: rank 1 got another", "theta_D: rank 1 got another"]),
     ("bug", ["RankError: rank 1: IndexError", "IndexError"])],
)  # fmt: skip
def test_what_goes_wrong_names_the_rank(tmp_path, what, texts):
    for said, text in zip(start(2, tmp_path, mistaken, what), texts, strict=True):
        assert text in said


def exchanged(ranks, folder):
    """What the link relies on: any values, in rank order; rows and turns."""

    def turn():
        assert ranks.rank == 0 or (folder / "first").exists()
        (folder / "first").touch()
        return ranks.rank

    rows = ranks.rows(torch.full((ranks.rank, 2), float(ranks.rank)))
    return (ranks.exchange(lambda: [bytes([ranks.rank])] * ranks.rank), ranks.first(lambda: 7),
            ranks.together(lambda: ranks.rank), ranks.in_turn(turn), rows.tolist())  # fmt: skip


def test_what_ranks_do_together(tmp_path):
    parts, rows = [[], [b"\1"], [b"\2"] * 2], [[1.0] * 2] + [[2.0] * 2] * 2
    assert start(3, tmp_path, exchanged) == [(parts, 7, r, r, rows) for r in range(3)]


def late(ranks, folder):
    if ranks.rank == 1:
        time.sleep(3)
    return ranks.first(lambda: 7)


def test_a_late_rank_is_named(tmp_path):
    """By rank 0; the others say that rank 0 does."""
    said = start(3, tmp_path, late, timeout=1)
    assert said[0] == "RankError: rank 0: rank 1 did not come within 1 s, or ended"
    for rank in (1, 2):
        assert said[rank] == f"RankError: rank {rank}: rank 0 has ended, or named another that did"


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_starts_is_named(tmp_path, absent):
    said = start(3, tmp_path, late, timeout=2, absent=[absent])
    for rank in {0, 1, 2} - {absent}:
        assert re.search(rf"rank {rank}: rank {absent} .*did not come within 2 s", said[rank])


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan"])
def test_a_timeout_that_is_none(monkeypatch, text):
    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("TCS_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"timeout: got '{text}'"), lab.joined_ranks():
        pass


def commanded(_, folder, *words):
    """The command line's result on this rank, and what it says."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main([*words])
    return code, said.getvalue()


def test_rank_0_speaks_for_all(tmp_path):
    words = tiny_command(tmp_path, schemes=["TCS"], epochs=1, train_samples=60)
    (code, said), other = start(2, tmp_path, commanded, *words, timeout=None)
    assert code == 0 and said.startswith("| Scheme ") and other == (0, "")


# torchrun ─────────────────────────────────────────────────────────────────────────────────────────


def torchrun(folder, *words, **changes):
    """The command line by two processes, begun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    own = ["-m", "tcs_lab", *tiny_command(folder, schemes=["TCS-Q5"], **changes), *words]
    return subprocess.Popen([*launch, *own], stderr=subprocess.PIPE, encoding="utf-8")


def test_bad_input_is_said_once(tmp_path):
    """However long one process takes to start: no other ends before it is said."""
    error = torchrun(tmp_path, "--set", "clients=0").communicate(timeout=120)[1]
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith("error: clients: got 0 ")


def test_a_killed_worker_leaves_a_run_that_goes_on_and_no_orphans(tmp_path, small_synthetic):
    """kill -9 of one of two workers in the middle; one process goes on where they stopped."""
    changes = {"epochs": 20, "train_samples": 60, "batch_size": 2, "device": "cpu"}
    process = torchrun(tmp_path, "--timeout", "60", **changes)
    checkpoints = tmp_path / "cache" / "checkpoints"
    until(lambda: list(checkpoints.glob("*.pt")))
    family = psutil.Process(process.pid).children(recursive=True)
    workers = [
        p for p in family if "tcs_lab" in p.cmdline() and "--nproc-per-node=2" not in p.cmdline()
    ]
    assert len(workers) == 2
    next(p for p in workers if p.environ()["RANK"] == "1").kill()
    error = process.communicate(timeout=60)[1]
    psutil.wait_procs(family, 20)
    assert process.returncode != 0
    assert not [p for p in family if p.is_running() and p.status() != "zombie"]
    assert re.search(r"rank\s*:? 1\b", error), error
    assert list(checkpoints.glob("*.pt")) and not (tmp_path / "ci").exists()
