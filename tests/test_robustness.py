"""Nothing lost, nothing trusted: kills, two processes at once, bad input, bad numbers, hostile
clients, long and large runs.

Longer variants, each named by an environment variable:

    TCS_KILLS=50       kills of the kill-and-resume test (default 4), 3 s each; 50 also interrupts
                       papermill, and workers in every way
    TCS_ROUNDS=10000   rounds of the long runs (default 300), 1 minute
    TCS_LARGE=1        D = 100 million through the compressor: 5 GB of memory, 2 minutes
"""

import contextlib
import dataclasses
import functools
import gc
import io
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib

import psutil
import pytest
import tcs_lab as lab
import torch
from common import numbers
from processes import FORKSERVER

import tcs_core as tcs

ROUNDS = int(os.environ.get("TCS_ROUNDS", 300))
KILLS = int(os.environ.get("TCS_KILLS", 4))

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
EXIT = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}

TINY = {"model": "resnet8", "width": 2, "batch_size": 4, "clients": 3, "epochs": 3, "train_samples": 120,
        "test_samples": 40, "reference_batch": None, "threads": 1}  # fmt: skip


def config(scheme="TCS-L2-Q5", **changes):
    return lab.RunConfig(scheme, **(TINY | changes))


@pytest.fixture
def small(monkeypatch):
    """160 images instead of 10,000, in this process."""
    images = lab.synthetic_dataset(120, 40).resized(16)
    monkeypatch.setattr(lab.data, "synthetic_dataset", lambda: images)
    lab.load_dataset.cache_clear()
    yield
    lab.load_dataset.cache_clear()


# Processes to kill, all forked from one that has imported the core ────────────────────────────────


def command(words, folder, name, disturb=None):
    """In a new process and process group: the command line, with its output in folder/name."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if the tests run with nohup
    os.environ["TCS_CACHE"] = str(folder / "cache")
    out = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    torch.set_num_threads(1)
    images = lab.synthetic_dataset(120, 40).resized(16)
    lab.synthetic_dataset = lambda: images
    train = lab.runs._train

    def log(file, what):
        with (folder / file).open("a") as lines:
            lines.write(f"{name} {what}\n")

    def logged(config, data, on_epoch, *ranks):
        log("trained", config.scheme.name)
        return train(config, data, lambda row: (log("epochs", row["epoch"]), on_epoch(row)), *ranks)

    lab.runs._train = logged
    if disturb:
        disturb()
    sys.exit(lab.__main__.main(words))  # as the command ends: not before its threads do


def start(folder, name, words, disturb=None):
    process = FORKSERVER.Process(target=command, args=(words, folder, name, disturb))
    process.start()
    return process


@pytest.fixture
def params(tmp_path):
    """The words of a command that makes TINY runs under tmp_path."""
    path = tmp_path / "tiny.yaml"
    path.write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in TINY.items()))
    return ["run", "--params", str(path), "--results", str(tmp_path)]


def logged(path):
    """What the commands wrote down: pairs of the command's name and a scheme, or an epoch."""
    return [line.split() for line in path.read_text().splitlines()]


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


# Two at once ──────────────────────────────────────────────────────────────────────────────────────


def test_of_two_processes_that_want_one_run_one_works_and_the_other_waits(tmp_path, params):
    words = [*params, "--scheme", "TCS", "--set", "epochs=8"]
    both = [start(tmp_path, name, words) for name in ("one", "two")]
    for process in both:
        process.join(120)
    assert [p.exitcode for p in both] == [0, 0]
    assert len(logged(tmp_path / "trained")) == 1
    texts = [(tmp_path / name).read_text() for name in ("one", "two")]
    assert sum("waiting for another process, which works on TCS" in t for t in texts) == 1
    assert len({t.splitlines()[-1] for t in texts}) == 1  # the same row of the same table
    (path,) = (tmp_path / "ci" / "runs").iterdir()
    assert len(lab.read_record(path)["rows"]) == 8
    assert not list((tmp_path / "cache" / "locks").iterdir())


def test_two_processes_share_a_table(tmp_path, params):
    words = [*params, "--set", "epochs=5"]
    schemes = ["TCS", "top-K", "rand-K", "FedAvg", "TCS-Q5", "TCS-L2"]
    for scheme in schemes:
        words += ["--scheme", scheme]
    both = [start(tmp_path, name, words) for name in ("one", "two")]
    for process in both:
        process.join(120)
    assert [p.exitcode for p in both] == [0, 0]
    made = logged(tmp_path / "trained")
    assert sorted(scheme for _, scheme in made) == sorted(schemes)  # each once
    assert {name for name, _ in made} == {"one", "two"}
    tables = [(tmp_path / name).read_text().split("| Scheme")[1] for name in ("one", "two")]
    assert tables[0] == tables[1]


def test_the_lock_of_a_dead_process_does_not_block(tmp_path, params):
    process = start(tmp_path, "one", [*params, "--scheme", "TCS", "--set", "epochs=10000"])
    locks = tmp_path / "cache" / "locks"
    until(lambda: list(locks.glob("*.lock")) and (tmp_path / "trained").exists())
    process.kill()
    process.join()
    assert list(locks.glob("*.lock"))
    (left,) = locks.glob("*.lock")
    file = lab.files._lock_file(left)
    assert file is not None and lab.files._lock_file(left) is None  # now this process has it
    file.close()


@pytest.mark.parametrize("jobs", [1] if KILLS < 50 else [1, 2])
def test_what_another_process_makes_comes_last(tmp_path, monkeypatch, small, jobs):
    """In this process, and in worker processes; a thread stands in for the other process."""
    configs = [config(s, epochs=1) for s in ("TCS", "top-K", "rand-K")]
    paths = [lab.record_path(c, tmp_path) for c in configs]
    locked, seen = threading.Event(), []

    def hold():
        with lab.files._alone(lab.runs._checkpoint_path(configs[0]), None) as held:
            assert held
            locked.set()
            until(lambda: paths[1].exists() and paths[2].exists())
            seen.append(paths[0].exists())

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait()
    records = lab.run_all(configs, tmp_path, jobs=jobs)
    holder.join()
    assert seen == [False]
    assert [r["config"]["scheme"]["name"] for r in records] == ["TCS", "top-K", "rand-K"]


ENDS = {
    "SIGKILL": (-9, ""),
    "SIGTERM": (143, "terminated; the same command goes on where it stopped"),
    "SIGINT": (130, "interrupted; the same command goes on where it stopped"),
    "a worker": (
        2,
        "error: a worker process was killed (out of memory?); the same command goes on",
    ),
}


@pytest.mark.parametrize("how", list(ENDS)[: 2 if KILLS < 50 else None])
def test_no_worker_outlives_its_parent(tmp_path, params, how):
    words = [*params, "--scheme", "TCS", "--scheme", "top-K", "--set", "epochs=10000", "--jobs", "2"]  # fmt: skip
    process = start(tmp_path, "one", words)
    checkpoints = tmp_path / "cache" / "checkpoints"
    until(lambda: len(list(checkpoints.glob("*.pt"))) == 2)
    family = psutil.Process(process.pid).children(recursive=True)
    workers = [p for p in family if "spawn_main" in " ".join(p.cmdline())]
    assert len(workers) == 2
    if how == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C on a terminal goes to all of them
    elif how == "a worker":
        workers[0].kill()
    else:
        os.kill(process.pid, getattr(signal, how))
    process.join(20)
    psutil.wait_procs(family, 20)
    assert not [p for p in family if p.is_running() and p.status() != "zombie"]
    code, line = ENDS[how]
    text = (tmp_path / "one").read_text()
    assert process.exitcode == code and text.strip() == line


# Kill and resume ──────────────────────────────────────────────────────────────────────────────────

PLACES = (".pt", "training", ".json", "training")  # in a checkpoint, anywhere, in the record
EPOCHS = 12


def kill_in_write(suffix, stage, number, how):
    """This process gets the signal while it writes its `number`-th file with this suffix: when half
    of it is written, when all of it is but not under its name, or when it is done."""
    whole, replace, left = lab.files._write_whole, os.replace, [number]

    def strike(*_):
        os.kill(os.getpid(), how)

    def disturbed(path, write):
        left[0] -= path.suffix == suffix
        if left[0] or path.suffix != suffix:
            return whole(path, write)

        def half(file):
            content = io.BytesIO()
            write(content)
            file.write(content.getvalue()[: len(content.getvalue()) // 2])
            file.flush()
            strike()

        os.replace = strike if stage == "unnamed" else replace
        whole(path, half if stage == "half" else write)
        strike()

    lab.files._write_whole = disturbed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The record's numbers of a run that nobody kills, and how long it trains."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = ["run", "--params", str(folder / "tiny.yaml"), "--results", str(folder)]
    (folder / "tiny.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in TINY.items()))
    process = start(folder, "one", [*words, "--scheme", "TCS-Q5", "--set", f"epochs={EPOCHS}"])
    until(lambda: (folder / "trained").exists())
    begin = time.monotonic()
    process.join(60)
    assert process.exitcode == 0
    (path,) = (folder / "ci" / "runs").iterdir()
    return numbers(lab.read_record(path)), time.monotonic() - begin


@pytest.mark.parametrize("case", range(KILLS))
def test_a_killed_run_goes_on_and_ends_in_the_same_record(tmp_path, params, undisturbed, case):
    rng, how, place = random.Random(case), SIGNALS[case % 3], PLACES[case % 4]
    expected, seconds = undisturbed
    words = [*params, "--scheme", "TCS-Q5", "--set", f"epochs={EPOCHS}"]
    disturb = None
    if place != "training":
        number = 1 if place == ".json" else rng.randint(1, 4)
        stage = rng.choice(["half", "unnamed", "done"])
        disturb = functools.partial(kill_in_write, place, stage, number, how)
    process = start(tmp_path, "one", words, disturb)
    if place == "training":
        until(lambda: (tmp_path / "trained").exists())
        epochs = tmp_path / "epochs"
        after = rng.randint(0, EPOCHS - 6)
        until(lambda: not after or (epochs.exists() and len(logged(epochs)) >= after))
        time.sleep(rng.uniform(0, 2 * seconds / EPOCHS))
        os.kill(process.pid, how)
    process.join(60)
    assert process.exitcode == EXIT[how]
    records = tmp_path / "ci" / "runs"
    for path in records.glob("[!.]*"):
        lab.read_record(path)  # whole, if it is there
    left = list((tmp_path / "cache" / "checkpoints").glob("[!.]*"))
    begun = [len(json.loads(torch.load(path, weights_only=True)["rows"])) for path in left]
    there = list(records.glob("[!.]*"))
    again = start(tmp_path, "two", words)
    again.join(60)
    assert again.exitcode == 0, (tmp_path / "two").read_text()
    (path,) = records.iterdir()
    assert numbers(lab.read_record(path)) == expected
    if not there:
        made = [int(epoch) for name, epoch in logged(tmp_path / "epochs") if name == "two"]
        assert made == list(range(sum(begun) + 1, EPOCHS + 1))
    assert not list((tmp_path / "cache" / "checkpoints").glob("*.part"))


@pytest.mark.skipif(KILLS < 50, reason="half a minute: set TCS_KILLS=50")
def test_papermill_interrupted_and_called_again_goes_on(tmp_path):
    """Ctrl-C, as a terminal sends it, in the middle of a table; then the same command."""
    (tmp_path / "notebooks").mkdir()
    for name in ("tcs_core.py", "notebooks/08_tables_and_curves.ipynb"):
        shutil.copy(lab.ROOT / name, tmp_path / name)
    fields = TINY | {
        "schemes": ["TCS"],
        "paper": {},
        "epochs": 60,
        "jobs": 1,
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(fields))
    words = [sys.executable, "-m", "papermill", "notebooks/08_tables_and_curves.ipynb", "out.ipynb",
             "-f", "tiny.yaml", "--no-progress-bar"]  # fmt: skip
    environment = dict(os.environ, TCS_CACHE=str(tmp_path / "cache"))
    settings = {"cwd": tmp_path, "env": environment, "start_new_session": True}
    settings["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    checkpoints = tmp_path / "cache" / "checkpoints"

    def saved():
        return list(checkpoints.glob("[!.]*.pt"))

    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, **settings)
    until(saved)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0 and saved()
    psutil.wait_procs(family, 20)
    assert not [p for p in family if p.is_running() and p.status() != "zombie"]
    begun = json.loads(torch.load(saved()[0], weights_only=True)["rows"])
    assert 0 < len(begun) < 60 and not (tmp_path / "results").exists()
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, **settings)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "results" / "ci" / "runs").iterdir()
    rows = lab.read_record(path)["rows"]
    assert len(rows) == 60 and not saved()
    assert rows[: len(begun)] == begun  # to the second that each took: not made again


# Numbers that go wrong ────────────────────────────────────────────────────────────────────────────

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
        compressor = tcs.Compressor(named(name, changes), sizes, 3, wire=wire)
        meant, sent = torch.zeros(sum(sizes)).double(), torch.zeros(sum(sizes)).double()
        for _ in range(4):
            deltas_ND = make((3, sum(sizes)))
            meant += deltas_ND.double().mean(0)
            sent += compressor.step(deltas_ND).double()
            left = compressor.errors_ND.double().sum(0) / 3
            if len(compressor.server_errors_D):
                left += compressor.server_errors_D.double()
            torch.testing.assert_close(sent + left, meant, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_client_whose_update_is_not_finite_is_named_and_nothing_changes(name, dense, bad):
    compressor = tcs.Compressor(tcs.Scheme.named(name), [30, 20], 3)
    compressor.step(torch.randn(3, 50))
    errors, round_ = compressor.errors_ND.clone(), compressor.round
    deltas_ND = torch.ones(3, 50)
    deltas_ND[1, 7] = bad
    with pytest.raises(tcs.NotFiniteError, match="client 1: the update is not finite") as raised:
        compressor.step(deltas_ND, dense)
    assert raised.value.client == 1
    assert torch.equal(errors, compressor.errors_ND) and round_ == compressor.round


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sum_that_overflows_at_the_server_is_no_silent_infinity(name, dense, wire):
    """Three clients with finite updates, whose sum is beyond float32."""
    compressor = tcs.Compressor(tcs.Scheme.named(name), [30, 20], 3, wire=wire)
    compressor.step(torch.ones(3, 50))
    with pytest.raises(tcs.NotFiniteError, match="server: the update is not finite"):
        compressor.step(torch.full((3, 50), 3e38), dense)


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_errors_that_overflow_name_their_client(wire, dense):
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), [300, 200], 2, wire=wire)
    compressor.step(torch.ones(2, 500))
    deltas_ND = torch.zeros(2, 500)
    deltas_ND[1] = 2e38 + torch.arange(500) * 1e34  # only six of them can be sent
    compressor.step(deltas_ND)
    with pytest.raises(tcs.NotFiniteError, match="client 1"):
        compressor.step(deltas_ND, dense)


@pytest.mark.parametrize("scheme", ["TCS", "TCS-Q5++", "TCS-L2", "TCS-Momentum", "FedAvg", "Baseline-Momentum"])  # fmt: skip
def test_a_run_that_diverges_keeps_its_record_and_says_where(tmp_path, small, scheme, monkeypatch):
    """A learning rate beyond reason; a table and a figure of it can still be drawn."""
    monkeypatch.setattr(lab.RunConfig, "eta", property(lambda self: 1e25))
    wild = config(scheme, warmup_epochs=0)
    record = lab.run(wild, tmp_path)
    assert record["status"] == "diverged"
    assert re.search(r"client \d|server|loss", record["reason"])
    assert re.search(r"epoch 1(, round \d+ of \d+)?$", record["reason"])
    assert lab.read_record(lab.record_path(wild, tmp_path), wild) == record
    text = lab.readable(lab.summary([record])).iloc[0]["Ours: accuracy %"]
    assert text == "diverged (1 of 1)"
    assert lab.accuracy_figure([record], "x").axes


def test_a_training_loss_that_is_not_finite_is_a_diverged_run(tmp_path, small, monkeypatch):
    epoch = lab.Training.epoch

    def overflowed(self, number):
        return epoch(self, number) | {"train_loss": math.inf if number else 1.0}

    monkeypatch.setattr(lab.Training, "epoch", overflowed)
    record = lab.run(config(), tmp_path)
    assert record["status"] == "diverged" and len(record["rows"]) == 1
    assert record["reason"] == "the training loss is not finite; epoch 2"


# A hostile client ─────────────────────────────────────────────────────────────────────────────────

SIZES = (700, 1, 250, 49)


def sealed(data):
    """With a right checksum, so that what is inside is looked at."""
    return data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")


def rewritten(compressor, data, **changes):
    """The message with other fields, encoded as its client would."""
    shared_K = compressor.rule.global_mask()
    message = tcs.decode_message(data, compressor.up, shared_K)
    return tcs.encode_message(dataclasses.replace(message, **changes), compressor.up)


def with_more_positions(compressor, data, more):
    """As many own positions as before and `more`, none of them shared, each with a value."""
    shared_K = compressor.rule.global_mask()
    message = tcs.decode_message(data, compressor.up, shared_K)
    free = torch.ones(sum(SIZES), dtype=torch.bool)
    free[shared_K] = False
    own = free.nonzero().squeeze(1)[: len(message.positions) + more]
    values = torch.ones(len(shared_K) + len(own))
    forged = tcs.Message.of(values, own, compressor.scheme.value_bits, message.sender, message.round)  # fmt: skip
    return tcs.encode_message(forged, compressor.up)


def expanding(compressor, data):
    """A few kilobytes of deflate stream that promise fifty megabytes of values."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = deflate.compress(bytes(50_000_000)) + deflate.flush()
    return sealed(data[:96] + b"\1" + bomb[:4000] + bytes(4))


OLD = {}  # a message of the round before, by sender
ATTACKS = {
    "no bytes": lambda c, data: b"",
    "cut off": lambda c, data: data[:-7],
    "one bit": lambda c, data: data[:20] + bytes([data[20] ^ 4]) + data[21:],
    "not bytes": lambda c, data: None,
    "version": lambda c, data: sealed(b"\x09" + data[1:]),
    "says it is dense": lambda c, data: sealed(data[:1] + b"\1" + data[2:]),
    "another scheme's tag": lambda c, data: sealed(data[:8] + b"abcd" + data[12:]),
    "four billion positions": lambda c, data: sealed(data[:12] + b"\xff" * 4 + data[16:]),
    "another client's name": lambda c, data: rewritten(c, data, sender=0),
    "the server's name": lambda c, data: rewritten(c, data, sender=tcs.SERVER),
    "a later round": lambda c, data: rewritten(c, data, round=c.round + 1),
    "replayed round": lambda c, data: OLD[1],
    "another client's message": lambda c, data: OLD["now"],
    "inside the shared mask": lambda c, data: rewritten(c, data, positions=c.rule.global_mask()[:1]),
    "one position too many": lambda c, data: with_more_positions(c, data, 1),
    "one position too few": lambda c, data: with_more_positions(c, data, -1),
    "all positions": lambda c, data: with_more_positions(c, data, 10**6),
    "megabytes": lambda c, data: sealed(data[:-4] + bytes(20_000_000)),
    "expansion": expanding,
}  # fmt: skip


def attacked(name, attack, policy):
    """A compressor at its third round, in which client 1 sends something else."""
    compressor = tcs.Compressor(tcs.Scheme.named(name), SIZES, 3, wire=True, bad_message=policy)

    def channel(sender, data):
        OLD["now"] = data if sender == 0 else OLD.get("now")
        if compressor.round < 2:
            OLD[sender] = data
        elif sender == 1:
            return ATTACKS[attack](compressor, data)
        return data

    compressor.channel = channel
    for seed in (0, 1):
        compressor.step(deltas(seed))
    return compressor


def deltas(seed):
    return torch.randn(3, sum(SIZES), generator=torch.Generator().manual_seed(seed)) ** 3


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", ["TCS", "TCS-LF-Q5++"])
def test_a_hostile_client_is_named_or_left_out(name, attack):
    compressor = attacked(name, attack, "stop")
    with pytest.raises(tcs.MessageError, match=r"^client 1: message: ") as raised:
        compressor.step(deltas(2))
    assert raised.value.client == 1

    compressor = attacked(name, attack, "skip")
    honest = attacked(name, attack, "skip")
    honest.channel = lambda sender, data: data
    intended_D = compressor.errors_ND[1] + deltas(2)[1]
    update_D, expected_D = compressor.step(deltas(2)), honest.step(deltas(2), clients=[0, 2])
    assert compressor.refused == [1] and honest.refused == []
    assert torch.equal(update_D, expected_D)  # as if client 1 had not taken part
    assert torch.equal(compressor.errors_ND[[0, 2]], honest.errors_ND[[0, 2]])
    torch.testing.assert_close(compressor.errors_ND[1], intended_D, rtol=1e-6, atol=0)
    assert (compressor.bits_up, compressor.bytes_up) == (honest.bits_up, honest.bytes_up)
    compressor.channel = honest.channel
    compressor.step(deltas(3))
    assert compressor.refused == []


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_dense_round_without_a_hostile_client(policy):
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), SIZES, 3, wire=True, bad_message=policy)
    compressor.channel = lambda sender, data: data[:-1] if sender == 1 else data
    if policy == "stop":
        with pytest.raises(tcs.MessageError, match="client 1: message: wrong checksum"):
            compressor.step(deltas(0))
        return
    update_D = compressor.step(deltas(0))
    assert compressor.refused == [1]
    torch.testing.assert_close(update_D, deltas(0)[[0, 2]].mean(0))
    assert torch.equal(compressor.errors_ND[1], deltas(0)[1])
    assert not compressor.errors_ND[[0, 2]].any()


@pytest.mark.parametrize("name", ["TCS", "FedAvg"])
def test_a_round_in_which_all_are_hostile_stops(name):
    scheme = tcs.Scheme.named(name)
    compressor = tcs.Compressor(scheme, SIZES, 3, wire=True, bad_message="skip")
    compressor.channel = lambda sender, data: b"nonsense" * 9
    with pytest.raises(tcs.MessageError, match=r"no message was accepted, of clients \[0, 1, 2\]"):
        compressor.step(deltas(0))


def test_the_servers_memory_is_bounded_whatever_a_client_sends():
    """Beside the attacker's own bytes, which a transport stops at most_bytes."""
    for attack in ("megabytes", "expansion", "four billion positions", "all positions"):
        compressor = attacked("TCS-Q5+", attack, "skip")
        data = ATTACKS[attack](compressor, good_message(compressor))
        tracemalloc.start()
        with pytest.raises(ValueError, match="message"):
            tcs.decode_message(data, compressor.up, compressor.rule.global_mask(), 1, 2, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 * compressor.dimension, attack


def good_message(compressor):
    """What client 1 would send in the next round."""
    shared_K = compressor.rule.global_mask()
    return tcs.encode_message(compressor._client(1, deltas(2)[1], shared_K), compressor.up)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_hostile_client_in_a_run(tmp_path, small, monkeypatch, policy):
    """stop: no record, the client and the round named. skip: the row counts what was left out."""
    made = tcs.Compressor.__init__

    def hostile(self, *arguments, **more):
        made(self, *arguments, **more)
        self.channel = lambda sender, data: data[::-1] if (sender, self.round) == (2, 7) else data

    monkeypatch.setattr(tcs.Compressor, "__init__", hostile)
    bad = config("TCS", wire=True, bad_message=policy)
    if policy == "stop":
        with pytest.raises(tcs.MessageError, match=r"client 2: .*epoch 1, round 8 of 10"):
            lab.run(bad, tmp_path)
        assert not (tmp_path / "ci").exists()
        return
    record = lab.run(bad, tmp_path)
    assert [row["refused"] for row in record["rows"]] == [1, 0, 0]
    assert record["config"]["bad_message"] == "skip"


def test_bad_message_needs_wire_and_leaves_older_names_alone():
    with pytest.raises(ValueError, match="bad_message: got 'skip', allowed without wire"):
        config("TCS", bad_message="skip")
    assert config("TCS", wire=True).digest == config("TCS", wire=True, bad_message="stop").digest
    assert config("TCS", wire=True).digest != config("TCS", wire=True, bad_message="skip").digest


# Bad input: records and checkpoints ───────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One record's text, made once."""
    folder = tmp_path_factory.mktemp("finished")
    images = lab.synthetic_dataset(120, 40).resized(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TCS_CACHE", str(folder / "cache"))
        patch.setattr(lab.data, "synthetic_dataset", lambda: images)
        lab.load_dataset.cache_clear()
        lab.run(config(), folder)
        lab.load_dataset.cache_clear()
    return lab.record_path(config(), folder).read_text()


def leaves(value, path=()):
    """The places of all numbers, texts and lists in a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from leaves(inner, (*path, key))


def refused(path, text, capsys, words):
    """read_record and the command both name the file; nothing is changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(path.name)) as raised:
        lab.read_record(path, config())
    assert lab.__main__.main(words) == 2
    assert capsys.readouterr().err == f"error: {raised.value}\n"
    assert path.read_text() == text
    return str(raised.value)


EDITS = {
    "removed": None, "NaN": math.nan, "infinity": math.inf, "another number": 0.123456789, "minus": -1, "null": None,
    "text": "x", "list": [], "true": True, "huge": 10**400,
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_every_value_of_a_record_changed_by_hand_is_noticed(tmp_path, params, capsys, finished, edit):  # fmt: skip
    """Each in turn: the configuration, every number of every row, the provenance."""
    path = lab.record_path(config(), tmp_path)
    path.parent.mkdir(parents=True)
    places = list(leaves(json.loads(finished)))
    assert len(places) >= 100
    for place in places:
        record = json.loads(finished)
        holder = functools.reduce(lambda inner, key: inner[key], place[:-1], record)
        if edit == "removed":
            del holder[place[-1]]
        elif holder[place[-1]] is EDITS[edit]:
            continue
        else:
            holder[place[-1]] = EDITS[edit]
        if edit == "removed" and place == ("sha256",):
            continue  # as in records of before there was one
        path.write_text(json.dumps(record))
        with pytest.raises(ValueError, match=re.escape(path.name)):
            lab.read_record(path, config())
    refused(path, path.read_text(), capsys, [*params, "--scheme", "TCS-L2-Q5"])


@pytest.mark.parametrize("seed", range(10))
def test_a_record_cut_off_anywhere(tmp_path, params, capsys, finished, seed):
    at = random.Random(seed).randrange(len(finished) - 2)
    path = lab.record_path(config(), tmp_path)
    error = refused(path, finished[:at], capsys, [*params, "--scheme", "TCS-L2-Q5"])
    assert "not a readable record" in error


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "3", '"x"', "[" * 100_000, '{"version": 1}', "\0", "NaN"]
)
def test_a_record_that_is_something_else(tmp_path, params, capsys, text):
    path = lab.record_path(config(), tmp_path)
    error = refused(path, text, capsys, [*params, "--scheme", "TCS-L2-Q5"])
    assert "not a" in error and error.endswith("delete it to run again")


def test_a_record_from_before_there_was_a_sum_is_read(tmp_path, finished):
    record = json.loads(finished)
    del record["sha256"]
    path = tmp_path / "older.json"
    path.write_text(json.dumps(record))
    assert lab.read_record(path, config()) == record
    for known in (lab.ROOT / "results").glob("*/runs/*.json"):
        assert lab.read_record(known)


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def stopped(tmp_path):
    """A run that was stopped in its third epoch; its checkpoint."""

    def stop(row):
        if row["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.run(config(), tmp_path, stop)
    return lab.runs._checkpoint_path(config())


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_checkpoint_is_named_or_does_no_harm(tmp_path, small, finished, seed):
    """A cut, or a flipped bit anywhere: an error that names the file, or the same record."""
    rng, path = random.Random(seed), stopped(tmp_path)
    content = bytearray(path.read_bytes())
    if seed % 5:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) :]
    path.write_bytes(content)
    try:
        record = lab.run(config(), tmp_path)
    except ValueError as error:
        assert str(path) in str(error) and "delete it" in str(error)
        assert path.read_bytes() == content and not (tmp_path / "ci").exists()
        path.unlink()
        record = lab.run(config(), tmp_path)
    assert numbers(record) == numbers(json.loads(finished))


CHECKPOINTS = {
    "pickle": lambda state, marker: pickle.dumps(Hostile(marker)),
    "pickle inside": lambda state, marker: state | {"rows": Hostile(marker)},
    "a list": lambda state, marker: [state],
    "nothing": lambda state, marker: b"",
    "text": lambda state, marker: b"hello",
    "no sum": lambda state, marker: {k: v for k, v in state.items() if k != "sha256"},
    "a row less": lambda state, marker: state | {"rows": json.dumps(json.loads(state["rows"])[:-1])},
    "other numbers": lambda state, marker: state | {"federation": state["federation"] | {"theta_D": state["federation"]["theta_D"] * 2}},
    "wrong shape": lambda state, marker: summed(state | {"federation": state["federation"] | {"theta_D": torch.zeros(1)}}),
    "no federation": lambda state, marker: summed({k: v for k, v in state.items() if k != "federation"}),
    "rows of text": lambda state, marker: summed(state | {"rows": "text"}),
    "no rows": lambda state, marker: summed(state | {"rows": "[]"}),
    "rows that are none": lambda state, marker: summed(state | {"rows": '[{"epoch": 7}]'}),
}  # fmt: skip


def summed(state):
    state = {k: v for k, v in state.items() if k != "sha256"}
    return state | {"sha256": lab.runs._state_sha256(state)}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_hostile_checkpoint_is_named_and_runs_nothing(tmp_path, small, case):
    path = stopped(tmp_path)
    content = CHECKPOINTS[case](torch.load(path, weights_only=True), tmp_path / "marker")
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        lab.run(config(), tmp_path)
    assert not (tmp_path / "marker").exists() and not (tmp_path / "ci").exists()


def test_a_checkpoint_of_another_run_is_not_continued(tmp_path, small, finished):
    path = stopped(tmp_path)
    other = lab.runs._checkpoint_path(config(seed=1))
    path.rename(other)
    epochs = []
    lab.run(config(seed=1), tmp_path, lambda row: epochs.append(row["epoch"]))
    assert epochs == [1, 2, 3]


# The same seed, the same record ───────────────────────────────────────────────────────────────────

REPEATED = ["Baseline-Momentum", "FedAvg", "FedAvg-Q3++", "TCS", "TCS-L2-Q5", "TCS-Q5+", "TCS-L2-M2-E3++", "TCS-M2-W3++", "TCS-LF", "TCS-PLF-Q5+",
            "TCS-Global Momentum++", "TCS-D5", "TCS-Q5-NW", "top-K", "top-K-Q5++", "rand-K", "rand-K-Q5-D5"]  # fmt: skip
BRIEF = {"epochs": 2, "train_samples": 60, "participation": 0.6}


def repeated(name, **changes):
    participation = 1.0 if name.startswith("Baseline") else BRIEF["participation"]
    return config(name, **(BRIEF | {"participation": participation} | changes))


def make_repeated(folder):
    """In a new process: all of them, in another order."""
    os.environ["TCS_CACHE"] = str(folder / "cache")
    torch.set_num_threads(1)
    images = lab.synthetic_dataset(120, 40).resized(16)
    lab.synthetic_dataset = lambda: images
    for name in reversed(REPEATED):
        lab.run(repeated(name), folder)


def test_the_same_seed_is_the_same_record_in_any_process_order_and_with_real_messages(tmp_path, small):  # fmt: skip
    other = FORKSERVER.Process(target=make_repeated, args=(tmp_path / "other",))
    other.start()
    first = {name: lab.run(repeated(name), tmp_path / "first") for name in REPEATED}
    again = {name: lab.run(repeated(name), tmp_path / "again") for name in sorted(REPEATED)}
    real = {n: lab.run(repeated(n, wire=True), tmp_path / "real") for n in REPEATED}
    other.join()
    assert other.exitcode == 0
    for name in REPEATED:
        expected = numbers(first[name])
        apart = lab.read_record(lab.record_path(repeated(name), tmp_path / "other"))
        assert numbers(again[name]) == numbers(apart) == expected, name
        assert numbers(real[name])[1:] == expected[1:], name
    different = {json.dumps(numbers(record)[4]) for record in first.values()}
    assert len(different) == len(REPEATED)


def test_a_record_says_what_a_rerun_repeats(finished):
    assert json.loads(finished)["provenance"]["repeats"].startswith("bit for bit")


def test_a_run_that_went_on_with_other_threads_promises_no_bits(tmp_path, small):
    """The same threads again: bit for bit. Others: both ways stand in the record."""
    for changes, repeats in ({}, "bit for bit"), ({"threads": 2}, "within rounding"):
        path = stopped(tmp_path)
        assert path.exists()
        made = lab.run(config(**changes), tmp_path)["provenance"]
        assert made["repeats"].startswith(repeats)
        assert [way["threads"] for way in made.get("ways", [])] == ([1, 2] if changes else [])
        lab.record_path(config(), tmp_path).unlink()


class Pool(contextlib.nullcontext):
    """Stands in for a pool of processes; writes down the threads of each run."""

    asked = ()

    def __init__(self, workers, *_):
        super().__init__(self)
        assert workers in (4, 1)

    def submit(self, work, own, *_):
        Pool.asked += (own.threads,)


def test_a_run_that_is_left_over_has_the_threads_of_one_among_many(tmp_path, monkeypatch, small):
    monkeypatch.setattr(lab.runs, "_work", None)
    monkeypatch.setattr(tcs, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(lab.runs, "_follow", lambda *_: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    for left in (5, 1):
        configs = [config(seed=seed, threads=None) for seed in range(left)]
        lab.runs._run_apart(configs, tmp_path, 4, None)
    assert Pool.asked == (3,) * 6


# What the machine cannot hold or show ────────────────────────────────────────────────────────────


def small_files():
    """No file of this process gets longer than this: as a full disk, but without one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path, params):
    process = start(
        tmp_path, "one", [*params, "--scheme", "TCS", "--set", "epochs=10000"], small_files
    )
    process.join(60)
    line = (tmp_path / "one").read_text()
    assert process.exitcode == 2 and line.startswith("error: ") and line.count("\n") == 1
    assert ".pt" in line and not os.listdir(tmp_path / "cache" / "checkpoints")


def test_without_a_home_folder_the_cache_has_to_be_named(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tcs.Path, "home", nowhere)
    monkeypatch.setenv("TCS_CACHE", "")  # as good as none
    with pytest.raises(ValueError, match="TCS_CACHE"):
        lab.cache_folder()


# Long and large ───────────────────────────────────────────────────────────────────────────────────


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def long_run(folder, rounds, sizes):
    """In a new process: `rounds` rounds of a tiny run; memory in use after every epoch of 50."""
    os.environ["TCS_CACHE"] = str(folder / "cache")
    torch.set_num_threads(1)
    images = lab.synthetic_dataset(400, 4).resized(16)
    lab.synthetic_dataset = lambda: images
    tiny = {"clients": 2, "epochs": rounds // 50, "train_samples": 400, "test_samples": 4}
    lab.run(config("TCS-Q5++", wire=True, **tiny), folder, lambda row: sizes.append(resident()))


def long_compression(folder, rounds, sizes):
    """In a new process: `rounds` rounds of messages, client and server; memory every 50."""
    compressor = tcs.Compressor(tcs.Scheme.named("TCS-LF-Q5++"), [90_000, 10_000], 3, wire=True)
    deltas_ND = torch.randn(3, 100_000)
    for round_ in range(rounds):
        compressor.step(deltas_ND.roll(round_, 1))
        if round_ % 50 == 49:
            sizes.append(resident())


def measured(work, folder, rounds):
    sizes = []
    work(folder, rounds, sizes)
    (folder / "sizes").write_text(json.dumps(sizes))


@pytest.mark.parametrize("work", [long_run, long_compression])
def test_memory_does_not_grow_with_the_rounds(tmp_path, work):
    """After the first fifth, by less than ten megabytes, which the allocator may move: in 300 rounds
    one lost tensor of D entries a round is 120 MB, in 10,000 a lost kilobyte a round shows."""
    process = FORKSERVER.Process(target=measured, args=(work, tmp_path, ROUNDS))
    process.start()
    process.join()
    assert process.exitcode == 0
    sizes = json.loads((tmp_path / "sizes").read_text())
    growth = sizes[-1] - sizes[len(sizes) // 5]
    print(f"{ROUNDS} rounds: {sizes[0]:,} bytes at first, {growth:,} more in the last four fifths")
    assert len(sizes) == ROUNDS // 50 and growth < 10_000_000


def test_two_hundred_clients(tmp_path, monkeypatch):
    images = lab.synthetic_dataset(400, 40).resized(16)
    monkeypatch.setattr(lab.data, "synthetic_dataset", lambda: images)
    lab.load_dataset.cache_clear()
    many = {"clients": 200, "batch_size": 1, "train_samples": 400, "epochs": 2, "wire": True}
    record = lab.run(config("TCS-Q5++", **many), tmp_path)
    lab.load_dataset.cache_clear()
    assert record["status"] == "finished" and record["rows"][-1]["rounds"] == 2
    assert record["rows"][-1]["bytes_up"] > 200 * tcs.OVERHEAD_BYTES


LARGE = """
import json, re, sys
from pathlib import Path
import torch, tcs_core as tcs

def kilobytes(key):
    return int(re.search(key + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

name, clients, dimension, wire = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "wire"
before = kilobytes("VmRSS")
deltas_ND = torch.randn(clients, dimension)
compressor = tcs.Compressor(tcs.Scheme.named(name), [dimension // 2, dimension - dimension // 2], clients, wire=wire)
for _ in range(3):
    update_D = compressor.step(deltas_ND)
assert update_D.isfinite().all() and compressor.round == 3
print(json.dumps(1024 * (kilobytes("VmHWM") - before)))
"""


@pytest.mark.skipif("TCS_LARGE" not in os.environ, reason="5 GB of memory: set TCS_LARGE=1")
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "TCS-Q5++", "top-K"])
def test_a_hundred_million_parameters_within_the_memory_formula(name, clients):
    dimension = 10**8
    words = [sys.executable, "-c", LARGE, name, str(clients), str(dimension), "counted"]
    done = subprocess.run(words, cwd=lab.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    used, allowed = json.loads(done.stdout), (2 * clients + 8) * 4 * dimension
    print(f"{name}, N = {clients}: {used:,} of {allowed:,} bytes")
    assert used <= allowed
