"""The command line: what it takes, what it prints, how it ends."""

import contextlib
import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tcs_lab as lab
from common import config, numbers, tiny_command
from processes import start_command, until
from tcs_lab.__main__ import main


def test_the_command_works_from_any_folder_and_prints_the_table(tmp_path):
    words = [*tiny_command(tmp_path, schemes=["TCS", "Baseline"], epochs=1, test_samples=None)]
    command = [sys.executable, "-m", "tcs_lab", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 4 and [line.split()[1] for line in lines[2:]] == ["TCS", "Baseline"]
    assert len(list((tmp_path / "ci" / "runs").iterdir())) == 2


def test_the_command_takes_scheme_seed_and_any_parameter(tmp_path, small):
    more = ["--scheme", "top-K-L2", "--seed", "3", "--set", "learning_rate=0.25"]
    assert main([*tiny_command(tmp_path, epochs=1), *more]) == 0
    (path,) = (tmp_path / "ci" / "runs").iterdir()
    assert path.name.startswith("top-K-L2-0.25-3-")


def test_a_run_that_diverges_ends_its_command_with_one(tmp_path, capsys, small):
    words = [
        *tiny_command(tmp_path, epochs=1),
        "--scheme",
        "TCS",
        "--set",
        "learning_rate=1000000.0",
    ]
    assert main(words) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("diverged: TCS, seed 0: ")


RECORD = lab.ROOT / "results/evidence/runs/TCS-0.5-1-8ad1d67393.json"


@pytest.mark.parametrize("command", ["run", "sensitivity", "again", "queue"])
def test_a_dry_run_makes_nothing(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr(lab.runs.runs, "_train", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr(
        lab.studies.optimizers.HookTraining, "make", lambda *_: pytest.fail("trained")
    )
    words = {
        "run": tiny_command(tmp_path, epochs=1, schemes=["TCS"]),
        "sensitivity": ["sensitivity", "--params", str(lab.ROOT / "params/small.yaml")],
        "again": ["again", str(RECORD)],
        "queue": ["queue", str(lab.ROOT / "params/optimizers.yaml")],
    }[command]
    folder = [] if "--results" in words else ["--results", str(tmp_path / "results")]
    before = sorted(tmp_path.rglob("*"))
    assert main([*words, *folder, "--dry-run"]) == 0
    assert "run" in capsys.readouterr().out and sorted(tmp_path.rglob("*")) == before


def test_a_queue_says_how_it_ended(tmp_path, capsys, small):
    tiny_command(tmp_path, epochs=2)  # writes tiny.yaml
    plan, stage = tmp_path / "plan.yaml", "{stage: a, seeds: [0], runs: [{schemes: [TCS]}]}"
    plan.write_text(f"{{profile: tiny.yaml, stages: [{stage}]}}", encoding="utf-8")
    queue = ["queue", str(plan), "--results", str(tmp_path)]
    assert main(queue) == 0
    assert capsys.readouterr().out == "1 runs are made\n"
    assert main([*queue, "--set", "learning_rate=1000000.0"]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("diverged: TCS, seed 0: ")


def test_a_queue_takes_several_plans_and_stages_of_them(tmp_path, capsys, small):
    tiny_command(tmp_path, epochs=1)  # writes tiny.yaml
    stage = "{stage: %s, seeds: [0], runs: [{schemes: [%s]}]}"
    for name, first, second in (("one", "TCS", "top-K"), ("two", "TCS-Q5", "FedAvg")):
        stages = f"[{stage % ('a', first)}, {stage % ('b', second)}]"
        text = f"{{profile: tiny.yaml, stages: {stages}}}"
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    two, one, to = (
        str(tmp_path / "two.yaml:b"),
        str(tmp_path / "one.yaml"),
        ["--results", str(tmp_path)],
    )
    assert main(["queue", two, f"{one}:a", *to]) == 0
    made = {path.name.split("-0.5")[0] for path in (tmp_path / "ci" / "runs").iterdir()}
    assert made == {"FedAvg", "TCS"}
    assert main(["queue", two, one, *to]) == 0
    assert capsys.readouterr().out.splitlines() == ["2 runs are made", "3 runs are made"]
    assert main(["queue", f"{one}:c", *to]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown stage in ") and "allowed: a, b" in error


@pytest.mark.parametrize(
    "more, says",
    [
        (["plan.yaml", "--minutes", "-3"], "--minutes: got -3, allowed: a finite number above 0"),
        (
            ["plan.yaml", "--pack", "x.tar"],
            "--pack: got x.tar, allowed: only together with --minutes",
        ),
        (["plan.yaml", "other.yaml", "--minutes", "3"], "PLAN: got plan.yaml, other.yaml, allowed"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_options_that_a_queue_cannot_carry_out_are_refused(
    tmp_path, capsys, monkeypatch, more, says, dry
):
    tiny_command(tmp_path, epochs=1)  # writes tiny.yaml
    stages = "[{stage: a, seeds: [0], runs: [{}]}, {stage: b, seeds: [1], runs: [{}]}]"
    for name in ("plan.yaml", "other.yaml"):
        text = f"{{profile: tiny.yaml, stages: {stages}}}"
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    dry_run = ["--dry-run"] if dry else []
    assert main(["queue", *more, *dry_run, "--results", str(tmp_path)]) == 2
    assert f"error: {says}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "queue", "status", "again", "sensitivity", "bench"])
def test_every_command_has_its_help(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: tcs {command} ") and "--results" in text


# A record's run again ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", ["TCS-L2-Q5", "TCS-L2-M2-E3-K2-W3++", "Baseline-Momentum"])
def test_a_record_is_all_it_takes_to_make_its_run_again(tmp_path, capsys, small, scheme):
    changes = {"epochs": 2, "threads": 1, "drops": (0.6,), "dirichlet_alpha": 0.5, "wire": True}
    wanted = config(scheme, **(changes if scheme != "Baseline-Momentum" else {}), reference_batch=9)
    record = lab.run(wanted, tmp_path)
    path = lab.record_path(wanted, tmp_path)
    assert lab.config_of(record).digest == wanted.digest
    words = ["again", str(path), "--results", str(tmp_path / "kept")]
    assert main(words) == 0
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert said == f"{path.name}: the same in all {wanted.epochs} epochs"
    (kept,) = (tmp_path / "kept" / "again" / "runs").iterdir()
    assert kept.name == path.name and numbers(lab.read_record(kept)) == numbers(record)
    assert main(words) == 2  # not over what is there
    assert f"{kept} exists" in capsys.readouterr().err


def test_a_stopped_command_says_whether_it_goes_on(tmp_path, capsys, monkeypatch):
    path = next((lab.ROOT / "results/small/runs").glob("TCS-0.5-0-*.json"))
    left = lab.runs.checkpoints.checkpoint_path(lab.config_of(lab.read_record(path)))

    def stop(*_, **__):
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_bytes(b"as far as it came")
        raise KeyboardInterrupt

    monkeypatch.setattr("tcs_lab.commands.run_all", stop)
    assert main(["again", str(path), "--set", "data_root=nowhere"]) == 130
    assert capsys.readouterr().err == "interrupted; nothing is kept\n" and not left.exists()
    assert main([*tiny_command(tmp_path), "--scheme", "TCS"]) == 130
    assert "the same command goes on where it stopped" in capsys.readouterr().err


def test_again_starts_from_nothing(tmp_path, capsys, monkeypatch, small):
    """Not from a checkpoint that other code may have left."""
    lab.run(config(), tmp_path)
    path = lab.record_path(config(), tmp_path)
    left = lab.runs.checkpoints.checkpoint_path(lab.config_of(lab.read_record(path)))
    left.parent.mkdir(parents=True, exist_ok=True)
    there = ["again", str(path), "--results", str(tmp_path / "there")]
    assert main(there) == 0
    left.write_bytes(b"of other code")
    assert main(there) == 2 and "exists, allowed: a folder that" in capsys.readouterr().err
    assert left.read_bytes() == b"of other code"
    assert main(["again", str(path)]) == 0
    assert "the same" in capsys.readouterr().out and not left.exists()


def test_a_record_that_is_not_repeated_is_said_to_differ(tmp_path, capsys, monkeypatch, small):
    record = lab.run(config(), tmp_path)
    other = copy.deepcopy(record)
    other["rows"][1] |= {"train_loss": 9.0, "accuracy": 0.5, "seconds": 1e9}
    other["provenance"]["fingerprint"] = "of others"
    del other["rows"][2]
    monkeypatch.setattr("tcs_lab.commands.run_all", lambda *_: [other])
    assert main(["again", str(lab.record_path(config(), tmp_path))]) == 1
    was = record["rows"][1]["train_loss"]
    assert f"epoch 2: train_loss 9.0, was {was!r} (made on other data)" in capsys.readouterr().out


def test_what_cannot_be_made_again_is_one_line(tmp_path, capsys, small):
    path = tmp_path / "notes.md"
    path.write_text("hello", encoding="utf-8")
    assert main(["again", str(path)]) == 2
    error = capsys.readouterr().err
    assert "notes.md: not a readable record" in error and "delete" not in error
    lab.run(config(), tmp_path)
    words = ["again", str(lab.record_path(config(), tmp_path)), "--set", "epochs=9"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: unknown ")
        and ": epochs; allowed: " in error
        and error.count("\n") == 1
    )


# How it ends ──────────────────────────────────────────────────────────────────────────────────────


def full_output():
    sys.stdout = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = os.fdopen(writer, "w")


def closed_stderr():
    sys.stderr = None


def latin_output():
    sys.stdout.reconfigure(encoding="latin-1")


@pytest.mark.parametrize(
    ("disturb", "code", "text"),
    [
        (full_output, 2, "error: [Errno 28] No space left on device"),
        (closed_pipe, 141, "run 2/2 is made"),
        (closed_stderr, 0, "| TCS | 1 |"),
        (latin_output, 0, "Ours \\u2212 Baseline"),
    ],
)
def test_output_that_nobody_can_read_or_write(tmp_path, disturb, code, text):
    words = [*tiny_command(tmp_path, epochs=1), "--scheme", "TCS", "--scheme", "Baseline"]
    process = start_command(words, tmp_path, disturb=disturb)
    process.join(60)
    said = (tmp_path / "output").read_text(encoding="utf-8")
    assert process.exitcode == code
    assert text in said and "Exception" not in said and "Traceback" not in said
    assert len(list((tmp_path / "ci" / "runs").iterdir())) == 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_several_quick_signals_end_it_once(tmp_path, jobs):
    schemes = ["--scheme", "TCS", "--scheme", "top-K", "--jobs", str(jobs)]
    process = start_command([*tiny_command(tmp_path, epochs=10000), *schemes], tmp_path)
    until(lambda: len(list((tmp_path / "cache" / "checkpoints").glob("[!.]*.pt"))) == jobs, 120)
    at_once = [signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT]
    for number in at_once + 30 * [signal.SIGINT]:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, number)
        time.sleep(0.01)
    process.join(20)
    # Of two signals that wait at once a system may deliver either first.
    said = (tmp_path / "output").read_text(encoding="utf-8")
    assert process.exitcode in (130, 143), said
    word = {130: "interrupted", 143: "terminated"}[process.exitcode]
    line = f"{word}; the same command goes on where it stopped\n"
    assert said == line


def test_ctrl_c_while_it_imports_ends_it_without_a_word(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "tcs_lab", "bench"], stderr=subprocess.PIPE, cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"))
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == (None, b"") and process.returncode == -signal.SIGINT


def test_a_table_alone_is_refused_and_params_may_be_repeated(tmp_path, capsys):
    """Without a profile, the runs would have the paper's size."""
    table, quick = (str(lab.ROOT / f"params/{name}.yaml") for name in ("table1", "quick"))
    folder = ["--results", str(tmp_path), "--dry-run"]
    assert main(["run", "--params", table, *folder]) == 2
    assert "without a `profile`, allowed: a table and a profile" in capsys.readouterr().err
    for params in (["--params", table, quick], ["--params", table, "--params", quick]):
        assert main(["run", *params, *folder]) == 0
        assert capsys.readouterr().out.startswith("8 runs, 0 of them made")
