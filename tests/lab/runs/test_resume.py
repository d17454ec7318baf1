"""Kill and resume: nothing half-written, nothing made twice, nothing trusted.

TCS_KILLS=50: so many kills instead of 4, 2 s each, and papermill interrupted as well.
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import tcs_lab as lab
import torch
from common import TINY, config, numbers, tiny_command
from processes import logged, start_command, until
from tcs_lab.runs.checkpoints import checkpoint_path

KILLS = int(os.environ.get("TCS_KILLS", 4))
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
EXIT = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}


# Files ────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_half_written_if_writing_fails(tmp_path):
    def fail(file):
        file.write(b"half")
        raise OSError("disk full")

    target = tmp_path / "record.json"
    target.write_text("before", encoding="utf-8")
    with pytest.raises(OSError, match="disk full"):
        lab.support.files.write_whole(target, fail)
    assert target.read_text(encoding="utf-8") == "before"
    assert os.listdir(tmp_path) == ["record.json"]


def test_what_killed_processes_left_is_removed_but_not_what_another_writes(tmp_path):
    names = ".record.json-0123abcd.part", ".other.json-4567abcd.part", ".film.mkv.part"
    dead, alive, foreign = (tmp_path / name for name in names)
    for part in (dead, alive, foreign):
        part.write_text("half", encoding="utf-8")
    for old in (dead, foreign):
        os.utime(old, (0, time.time() - 4000))
    lab.support.files.write_whole(tmp_path / "record.json", lambda file: file.write(b"{}"))
    assert sorted(os.listdir(tmp_path)) == sorted([alive.name, foreign.name, "record.json"])


def test_without_a_home_folder_the_cache_has_to_be_named(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(lab.support.files.Path, "home", nowhere)
    monkeypatch.setenv("TCS_CACHE", "")  # as good as none
    with pytest.raises(ValueError, match="TCS_CACHE"):
        lab.cache_folder()


def small_files():
    """No file of this process gets longer than this: as a full disk, but without one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path):
    words = [*tiny_command(tmp_path, epochs=10000), "--scheme", "TCS"]
    process = start_command(words, tmp_path, disturb=small_files)
    process.join(60)
    line = (tmp_path / "output").read_text(encoding="utf-8")
    assert process.exitcode == 2 and line.startswith("error: ") and line.count("\n") == 1
    assert ".pt" in line and not os.listdir(tmp_path / "cache" / "checkpoints")


# Kills ────────────────────────────────────────────────────────────────────────────────────────────

PLACES = (".pt", "training", ".json", "training")  # in a checkpoint, anywhere, in the record
EPOCHS = 12


def kill_in_write(suffix, stage, number, how):
    """This process gets the signal while it writes its `number`-th file with this suffix: when half
    of it is written, when all of it is but not under its name, or when it is done."""
    whole, replace, left = lab.support.files.write_whole, os.replace, [number]
    lab.runs.checkpoints.Pace.due = lambda _: True  # a slow disk would see too few checkpoints

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

    lab.support.files.write_whole = lab.runs.checkpoints.write_whole = disturbed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The record's numbers of a run that nobody kills, and how long it trains."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start_command([*tiny_command(folder, epochs=EPOCHS), "--scheme", "TCS-Q5"], folder)
    until(lambda: logged(folder / "trained"))
    begin = time.monotonic()
    process.join(60)
    assert process.exitcode == 0
    (path,) = (folder / "ci" / "runs").iterdir()
    return numbers(lab.read_record(path)), time.monotonic() - begin


def rows_in(checkpoint):
    return json.loads(torch.load(checkpoint, weights_only=True)["rows"])


@pytest.mark.parametrize("case", range(KILLS))
def test_a_killed_run_goes_on_and_ends_in_the_same_record(tmp_path, undisturbed, case):
    rng, how, place = random.Random(case), SIGNALS[case % 3], PLACES[case % 4]
    expected, seconds = undisturbed
    words, disturb = [*tiny_command(tmp_path, epochs=EPOCHS), "--scheme", "TCS-Q5"], None
    if place != "training":
        number = 1 if place == ".json" else rng.randint(1, 4)
        stage = rng.choice(["half", "unnamed", "done"])
        disturb = functools.partial(kill_in_write, place, stage, number, how)
    process = start_command(words, tmp_path, "one", disturb)
    if place == "training":
        after = rng.randint(0, EPOCHS - 6)
        until(lambda: logged(tmp_path / "trained"))
        until(lambda: len(logged(tmp_path / "epochs")) >= after)
        time.sleep(rng.uniform(0, seconds / EPOCHS))  # an epoch of the six that are left
        os.kill(process.pid, how)
    process.join(60)
    assert process.exitcode == EXIT[how]
    there = list((tmp_path / "ci" / "runs").glob("[!.]*"))
    for path in there:
        lab.read_record(path)  # whole, if it is there
    left = list((tmp_path / "cache" / "checkpoints").glob("[!.]*"))
    begun = sum(len(rows_in(path)) for path in left)
    again = start_command(words, tmp_path, "two")
    again.join(60)
    assert again.exitcode == 0, (tmp_path / "two").read_text(encoding="utf-8")
    (path,) = (tmp_path / "ci" / "runs").glob("[!.]*")
    assert numbers(lab.read_record(path)) == expected
    if not there:
        made = [int(epoch) for name, epoch in logged(tmp_path / "epochs") if name == "two"]
        assert made == list(range(begun + 1, EPOCHS + 1))


@pytest.mark.skipif(KILLS < 50, reason="half a minute: set TCS_KILLS=50")
def test_papermill_interrupted_and_called_again_goes_on(tmp_path):
    """Ctrl-C, as a terminal sends it, in the middle of a table; then the same command."""
    for name in ("tcs_core.py", "notebooks/tcs_lab", "notebooks/08_tables_and_curves.ipynb"):
        copy = shutil.copytree if (lab.ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy(lab.ROOT / name, tmp_path / name)
    fields = TINY | {
        "schemes": ["TCS"],
        "title": "Tiny",
        "figure": 1,
        "paper": {},
        "epochs": 60,
        "jobs": 1,
        "profile": "ci",
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(fields), encoding="utf-8")
    words = [sys.executable, "-m", "papermill", "notebooks/08_tables_and_curves.ipynb", "out.ipynb",
             "-f", "tiny.yaml", "--no-progress-bar"]  # fmt: skip
    folders = f"{tmp_path}{os.pathsep}{tmp_path / 'notebooks'}"
    environment = dict(os.environ, TCS_CACHE=str(tmp_path / "cache"), PYTHONPATH=folders)
    settings = {"cwd": tmp_path, "env": environment, "start_new_session": True}
    settings["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)

    def saved():
        return list((tmp_path / "cache" / "checkpoints").glob("[!.]*.pt"))

    process = subprocess.Popen(words, stderr=subprocess.PIPE, encoding="utf-8", **settings)
    until(saved, 200)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0 and saved()
    psutil.wait_procs(family, 20)
    assert not [p for p in family if p.is_running() and p.status() != "zombie"]
    begun = rows_in(saved()[0])
    assert 0 < len(begun) < 60 and not (tmp_path / "results").exists()
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=200, **settings)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "results" / "ci" / "runs").iterdir()
    rows = lab.read_record(path)["rows"]
    assert len(rows) == 60 and not saved()
    assert rows[: len(begun)] == begun  # to the second that each took: not made again


# Checkpoints ──────────────────────────────────────────────────────────────────────────────────────


def stopped(folder, wanted=None, epoch=3):
    """A run that was stopped in this epoch; its checkpoint."""
    wanted = wanted or config()

    def stop(row):
        if row["epoch"] == epoch:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.run(wanted, folder, stop)
    return checkpoint_path(wanted)


def resumed(folder, wanted=None):
    """The record of a run that goes on, and the epochs it made."""
    epochs = []
    record = lab.run(wanted or config(), folder, lambda row: epochs.append(row["epoch"]))
    return record, epochs


@pytest.fixture
def every_epoch(monkeypatch):
    monkeypatch.setattr(lab.runs.checkpoints.Pace, "due", lambda self: True)


FAMILIES = ("TCS", "TCS-L2-Q5", "top-K-Q5", "rand-K", "TCS-Global Momentum", "Baseline-Momentum")


@pytest.mark.parametrize("scheme", [*FAMILIES, "DGC"])
def test_a_run_that_was_stopped_ends_in_the_same_record(tmp_path, small, every_epoch, scheme):
    undisturbed = lab.run(config(scheme), tmp_path / "one")
    stopped(tmp_path / "two", config(scheme))
    record, epochs = resumed(tmp_path / "two", config(scheme))
    assert epochs == [3] and numbers(record) == numbers(undisturbed)
    assert record["provenance"]["repeats"].startswith("bit for bit")


def test_a_run_that_went_on_with_other_threads_promises_no_bits(tmp_path, small):
    stopped(tmp_path, config(train_samples=24))
    made = resumed(tmp_path, config(train_samples=24, threads=2))[0]["provenance"]
    assert made["repeats"].startswith("not exactly")
    assert [way["threads"] for way in made["ways"]] == [1, 2]


def other_data(patch):
    data = lab.tasks.images.synthetic_dataset()
    patch.setattr(
        lab.tasks.images,
        "synthetic_dataset",
        lambda: dataclasses.replace(data, fingerprint="another"),
    )


UNUSED = {
    "state version": lambda patch: patch.setattr(lab.runs.checkpoints, "STATE_VERSION", 10**6),
    "data": other_data,
}


@pytest.mark.parametrize("what", UNUSED)
def test_a_checkpoint_that_is_not_used_is_said_aloud(
    tmp_path, small, every_epoch, what, monkeypatch, capsys
):
    path = stopped(tmp_path)
    UNUSED[what](monkeypatch)
    lab.load_dataset.cache_clear()
    _, epochs = resumed(tmp_path)
    assert epochs == [1, 2, 3]
    said = capsys.readouterr().err
    assert said.startswith(f"{path}: ") and f"its {what} is " in said and said.count("\n") == 1


def test_a_checkpoint_of_another_run_is_not_used(tmp_path, small, every_epoch, capsys):
    stopped(tmp_path).rename(checkpoint_path(config(seed=1)))
    assert resumed(tmp_path, config(seed=1))[1] == [1, 2, 3]
    assert "its settings is " in capsys.readouterr().err


def test_an_edit_of_the_code_does_not_lose_a_checkpoint(tmp_path, small, every_epoch, monkeypatch):
    stopped(tmp_path)
    monkeypatch.setattr(lab.runs.records, "_CORE_SHA256", "another")
    assert resumed(tmp_path)[1] == [3]


def test_a_damaged_checkpoint_is_named_or_does_no_harm(tmp_path, small):
    """A cut, or a flipped bit anywhere: an error that names the file, or the same record."""
    expected, named = numbers(lab.run(config(), tmp_path / "undisturbed")), 0
    path = stopped(tmp_path)
    whole = path.read_bytes()
    for seed in range(12):
        rng, content, folder = random.Random(seed), bytearray(whole), tmp_path / str(seed)
        if seed % 5:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        else:
            del content[rng.randrange(len(content)) :]
        path.write_bytes(content)
        try:
            record = lab.run(config(), folder)
        except ValueError as error:
            assert str(path) in str(error) and "delete it" in str(error)
            assert path.read_bytes() == content and not folder.exists()
            named += 1
        else:
            assert numbers(record) == expected
    assert named
    path.unlink()
    assert numbers(lab.run(config(), tmp_path / "anew")) == expected


def test_a_lack_of_memory_is_no_reason_to_delete_a_checkpoint(tmp_path, small, monkeypatch):
    def load(*arguments, **more):
        raise MemoryError("no room")

    path = stopped(tmp_path)
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError, match="no room"):
        lab.run(config(), tmp_path)
    assert path.exists()


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


CHECKPOINTS = {
    "pickle": lambda state, marker: pickle.dumps(Hostile(marker)),
    "pickle inside": lambda state, marker: state | {"rows": Hostile(marker)},
    "a list": lambda state, marker: [state],
    "nothing": lambda state, marker: b"",
    "text": lambda state, marker: b"hello",
    "a row less": lambda state, marker: state | {"rows": json.dumps(json.loads(state["rows"])[:-1])},
    "wrong shape": lambda state, marker: state | {"training": state["training"] | {"theta_D": torch.zeros(1)}},
    "no training": lambda state, marker: {k: v for k, v in state.items() if k != "training"},
    "rows of text": lambda state, marker: state | {"rows": "text"},
    "no rows": lambda state, marker: state | {"rows": "[]"},
    "rows that are none": lambda state, marker: state | {"rows": '[{"epoch": 7}]'},
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_hostile_checkpoint_is_named_and_runs_nothing(tmp_path, small, every_epoch, case):
    path = stopped(tmp_path)
    content = CHECKPOINTS[case](torch.load(path, weights_only=True), tmp_path / "marker")
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=re.escape(str(path))) as raised:
        lab.run(config(), tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "marker").exists() and not (tmp_path / "ci").exists()
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    lab.run(config(), tmp_path)
