"""The command line as a user meets it: in a process of its own, by its exit code and its output."""

import signal
import subprocess
import sys

import psutil
import pytest
import tcs_lab.__main__ as command_line
import torch
from common import tiny_command
from processes import until

TCS = [sys.executable, "-m", "tcs_lab"]


def ended(*words, program=TCS, **more):
    return subprocess.run([*program, *words], capture_output=True, encoding="utf-8", **more)


HEAVY = {"torch", "numpy", "pandas", "pydantic", "yaml", "matplotlib"}


def test_help_imports_nothing_that_takes_long():
    ask = "import sys; from tcs_lab.__main__ import main\ntry: main(['run', '--help'])\nfinally: "
    done = ended("-c", ask + "print(*sys.modules, file=sys.stderr)", program=[sys.executable])
    assert done.returncode == 0 and "tcs run --params" in done.stdout
    assert "tcs_lab.__main__" in done.stderr and not HEAVY & set(done.stderr.split())


def test_a_bare_call_prints_the_help():
    done = ended()
    assert done.returncode == 2 and done.stderr == ""
    assert done.stdout == ended("--help").stdout
    assert all(f"\n    {name} " in done.stdout for name in ("run", "queue", "status", "bench"))
    assert all(f"\n  {code} " in done.stdout for code in (0, 1, 2, 130, 141, 143))


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    done = ended("--version")
    assert (done.returncode, done.stdout) == (0, f"tcs {version('tcs-core')}\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["made"], "'made'"),
        (["run"], "--params"),
        (["run", "--params", "x.yaml", "--seed", "one"], "'one'"),
        (["bench", "--part", "all"], "'all'"),
    ],
)
def test_words_that_are_no_command_line_get_one_line(words, named):
    done = ended(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert named in done.stderr and "--help" in done.stderr


def test_what_the_parser_lists_is_what_there_is():
    """It stands there once more, so that help need not import where it comes from."""
    from tcs_lab import commands
    from tcs_lab.studies.bench import BENCHES
    from tcs_lab.training.configuration import WHERE_KEYS

    assert tuple(BENCHES) == command_line.BENCH_PARTS
    assert WHERE_KEYS - {"profile"} == set(command_line.WHERE_OPTIONS)
    parser = command_line.command_line()
    (named,) = [a.choices for a in parser._actions if a.dest == "command"]
    assert set(named) == commands.COMMANDS.keys()


def plan_of(folder, **stages):
    """A file with these stages, each of some schemes for so many epochs."""
    tiny_command(folder)  # writes tiny.yaml
    lines = [
        f"- {{stage: {name}, seeds: [0], runs: [{{schemes: [{', '.join(schemes)}], epochs: {epochs}}}]}}\n"
        for name, (schemes, epochs) in stages.items()
    ]
    file = folder / "plan.yaml"
    file.write_text("profile: tiny.yaml\nstages:\n" + "".join(lines), encoding="utf-8")
    return str(file)


def test_a_queue_that_is_terminated_leaves_whole_files_and_no_process(tmp_path):
    """Two runs at once: the first two end, so that the others begin; these are in the middle."""
    plan = plan_of(tmp_path, short=(["TCS", "top-K"], 1), long=(["TCS", "Baseline"], 10_000))
    words = ["queue", plan, "--jobs", "2", "--results", str(tmp_path / "results")]
    process = subprocess.Popen([*TCS, *words], stderr=subprocess.PIPE, encoding="utf-8")
    checkpoints = tmp_path / "cache" / "checkpoints"
    until(lambda: len(list(checkpoints.glob("[!.]*.pt"))) == 2, 240)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 143, said
    *made, end = said.splitlines()
    assert end == "terminated; the same command goes on where it stopped"
    assert [line.partition(":")[0] for line in made] == ["run 1/4 is made", "run 2/4 is made"]
    psutil.wait_procs(family, 20)
    assert not [p for p in family if p.is_running() and p.status() != "zombie"]
    records = tmp_path / "results" / "ci" / "runs"
    assert sorted(path.name.split("-0.5-")[0] for path in records.iterdir()) == ["TCS", "top-K"]
    for path in checkpoints.iterdir():
        assert torch.load(path, weights_only=True)["rows"]


def test_a_dry_run_makes_nothing(tmp_path, capsys):
    plan = plan_of(tmp_path, only=(["TCS", "top-K"], 3))
    results = tmp_path / "results"
    words = ["queue", plan, "--dry-run", "--jobs", "2", "--results", str(results)]
    assert command_line.main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("2 runs, 0 of them made, 2 left") and err == ""
    assert not results.exists() and not (tmp_path / "cache").exists()
