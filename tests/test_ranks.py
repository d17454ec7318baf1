"""Section 11: one federation over real processes. The record does not depend on how many there are,
and a rank that is late, gone or wrong is named."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tcs_lab as lab
import torch
from common import numbers
from processes import start

import tcs_core as tcs

TINY = {"model": "resnet8", "width": 2, "batch_size": 4, "clients": 3, "epochs": 2, "train_samples": 60,
        "test_samples": 40, "reference_batch": None, "threads": 1, "device": "cpu"}  # fmt: skip


def configs(schemes, **changes):
    return [lab.RunConfig(scheme, **(TINY | changes)) for scheme in schemes]


def records(ranks, folder, schemes, **changes):
    return lab.run_all(configs(schemes, **changes), folder / str(ranks.size), ranks=ranks)


# What does not depend on the number of ranks ──────────────────────────────────────────────────────

SCHEMES = ["TCS", "TCS-L4-Q5", "top-K", "TCS-L2-M2-E3-W5++", "FedAvg-Global Momentum"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_record_is_the_same_for_any_number_of_processes(tmp_path, size, small_synthetic):
    """Four ranks for three clients: one has none."""
    alone = [numbers(r) for r in records(tcs.Ranks(), tmp_path, SCHEMES)]
    for made in start(size, tmp_path, records, SCHEMES):
        assert [numbers(r) for r in made] == alone
        assert all(r["provenance"]["ranks"] == size for r in made)
    assert len(list((tmp_path / str(size) / "ci" / "runs").iterdir())) == len(SCHEMES)


@pytest.fixture
def small_synthetic(monkeypatch):
    small = lab.synthetic_dataset(60, 40).resized(16)
    monkeypatch.setattr(lab.data, "synthetic_dataset", lambda: small)
    lab.load_dataset.cache_clear()
    yield
    lab.load_dataset.cache_clear()


def drawn(ranks, folder):
    return records(ranks, folder, ["TCS-Q5"], participation=0.4, clients=5)


def test_absent_clients_make_no_difference(tmp_path, small_synthetic):
    """Two of five clients a round: now and then all of them are one rank's."""
    (alone,) = drawn(tcs.Ranks(), tmp_path)
    for (made,) in start(3, tmp_path, drawn):
        assert numbers(made) == numbers(alone)


class Stopped(Exception):
    pass


def stopped(ranks, folder, resumed=False):
    """A run that stops after its second epoch, or goes on after that, with how many epochs."""
    (config,) = configs(["TCS-Q5-Global Momentum"], epochs=3, clients=5, batch_size=2)
    epochs = []

    def stop(row):
        epochs.append(row["epoch"])
        if row["epoch"] == 2 and not resumed:
            raise Stopped

    try:
        return lab.run(config, folder / "resumed", stop, ranks), epochs
    except Stopped:
        return None, epochs


def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path, monkeypatch, small_synthetic):
    monkeypatch.setattr(lab.runs._Pace, "due", lambda self: True)
    undisturbed, _ = stopped(tcs.Ranks(), tmp_path / "alone", True)
    assert stopped(tcs.Ranks(), tmp_path) == (None, [1, 2])  # one rank stops after two epochs,
    assert [a[0] for a in start(3, tmp_path, stopped)] == [None] * 3  # three after the next,
    (path,) = (tmp_path / "cache" / "checkpoints").iterdir()
    rows = json.loads(torch.load(path, weights_only=True)["rows"])
    assert len(rows) in (1, 2)
    made, epochs = stopped(tcs.Ranks(), tmp_path, True)  # and one finishes
    assert epochs in ([2, 3], [3]) and numbers(made) == numbers(undisturbed)


def held(ranks, folder):
    (config,) = configs(["TCS"])
    federation = lab.Training(config, lab.load_dataset("synthetic"), ranks)
    federation.epoch(0)
    images = federation.batches.padded
    rows = [len(t) for t in (federation.deltas_ND, federation.compressor.errors_ND,
                             federation.statistics_NS, federation.samples_NM)]  # fmt: skip
    return rows, len(images)


def test_a_rank_holds_its_own_clients_only(tmp_path):
    assert start(2, tmp_path, held) == [([1] * 4, 20), ([2] * 4, 40)]


# What crosses ─────────────────────────────────────────────────────────────────────────────────────


def crossed(ranks, folder):
    """Every byte that this rank hands to a collective in one sparse round."""
    (config,) = configs(["TCS-Q5"], warmup_epochs=0)
    federation, sent = lab.Training(config, lab.load_dataset("synthetic"), ranks), []
    draws = federation._draws(0)
    federation.round(draws, 0, 0.1)
    gathered = ranks._all_gathered
    ranks._all_gathered = lambda data: sent.append(data) or gathered(data)
    federation.round(draws, 1, 0.1)
    return sum(map(len, sent)), federation.compressor.bytes_up


def test_ranks_exchange_the_encoded_bytes_and_little_else(tmp_path):
    """Beside the messages: 8 bytes a frame."""
    (one, counted), (two, _) = start(2, tmp_path, crossed)
    frames = 8 * (2 + 2 + 3)  # of a check and of messages, on two ranks; and one a message
    assert one + two == counted + frames


# What goes wrong ──────────────────────────────────────────────────────────────────────────────────


def poisoned(ranks, folder):
    """A NaN in the first pixel row that client 2 alone sees, once its first epoch is over."""
    (config,) = configs(["TCS"])
    original = lab.Training._local_training_

    def local_training(self, row, draws, index, eta):
        original(self, row, draws, index, eta)
        if self.own[row] == 2 and self.compressor.round == 6:
            self.flat.gradient_D[5] = float("nan")

    lab.Training._local_training_ = local_training
    try:
        return lab.run(config, folder / str(ranks.size), ranks=ranks)
    finally:
        lab.Training._local_training_ = original


def test_a_client_that_is_not_finite_ends_the_run_on_all_ranks(tmp_path, small_synthetic):
    alone = poisoned(tcs.Ranks(), tmp_path)
    assert alone["reason"].startswith("client 2: ") and "epoch 2, round 2 of 5" in alone["reason"]
    for made in start(3, tmp_path, poisoned):
        assert numbers(made) == numbers(alone)


def overflowing(ranks, folder):
    """Clients 1 and 2 pile up errors that, with finite deltas, overflow."""
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), [50], 3, ranks=ranks)
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
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), [50], 2, ranks=ranks)
    if what == "message" and ranks.rank == 0:
        compressor.up = tcs.Wire(5, False, (50,))
    elif what == "replica":
        ranks.check_same(torch.full((3,), float(ranks.rank)), "theta_D")
    elif what == "bug" and ranks.rank == 1:
        compressor._check_deltas = lambda *_: [][1]
    compressor.step(torch.ones(len(compressor.own), 50))


@pytest.mark.parametrize(
    ("what", "texts"),
    [("message", ["rank 1, client 1: message: tag", "rank 0, client 0: message: tag"]),
     ("replica", ["theta_D: rank 1 got another", "theta_D: rank 1 got another"]),
     ("bug", ["rank 1: IndexError", "IndexError"])],
)  # fmt: skip
def test_what_goes_wrong_names_the_rank(tmp_path, what, texts):
    for said, text in zip(start(2, tmp_path, mistaken, what), texts, strict=True):
        assert text in said


def late(ranks, folder):
    if ranks.rank == 1:
        time.sleep(3)
    return ranks.first(lambda: 7)


def test_a_late_rank_is_named(tmp_path):
    said = start(3, tmp_path, late, timeout=1)
    for rank in (0, 2):
        assert re.match(rf"RankError: rank {rank}: rank 1 did not come within 1 s", said[rank])
    assert said[1].startswith("RankError: rank 1: ")


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
    path, said = folder / "tiny.yaml", io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = lab.__main__.main(["run", "--params", str(path), "--results", str(folder), *words])
    return code, said.getvalue()


def test_rank_0_speaks_for_all(tmp_path):
    fields = TINY | {"schemes": ["TCS"], "epochs": 1}
    (tmp_path / "tiny.yaml").write_text(json.dumps(fields))
    (code, said), other = start(2, tmp_path, commanded, timeout=None)
    assert code == 0 and said.startswith("| Scheme ") and other == (0, "")
    (code, said), other = start(2, tmp_path, commanded, "--set", "clients=61", timeout=None)
    assert code == 2 and said.startswith("error: clients: got 61") and said.count("\n") == 1
    assert other[0] != 0 and other[1] == ""


# torchrun ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command line for two processes, and a run of 20 epochs."""
    path = tmp_path / "tiny.yaml"
    fields = TINY | {"schemes": ["TCS-Q5"], "epochs": 20, "batch_size": 2}
    path.write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in fields.items()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    own = ["run", "--params", str(path), "--timeout", "60", "--results", str(tmp_path / "killed")]
    return [*torchrun, tcs.__file__, *own]


def children(pid):
    """Process ids of all below this one, from /proc."""
    own = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [below for child in own for below in children(child)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_leaves_a_run_that_goes_on_and_no_orphans(tmp_path, command):
    """kill -9 of one of two workers in the middle; one process goes on where they stopped."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    checkpoints, deadline = tmp_path / "cache" / "checkpoints", time.monotonic() + 60
    while not list(checkpoints.glob("*.pt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = [
        p for p in children(process.pid) if b"tcs_core" in Path(f"/proc/{p}/cmdline").read_bytes()
    ]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    error = process.communicate(timeout=60)[1]
    assert process.returncode != 0 and not any(map(alive, workers))
    assert re.search(r"rank\s*:? 1\b", error), error
    assert list(checkpoints.glob("*.pt")) and not (tmp_path / "killed" / "ci").exists()
    (config,), epochs = configs(["TCS-Q5"], epochs=20, batch_size=2), []
    made = lab.run(config, tmp_path / "killed", lambda row: epochs.append(row["epoch"]))
    assert epochs[0] > 1 and numbers(made) == numbers(lab.run(config, tmp_path / "undisturbed"))
