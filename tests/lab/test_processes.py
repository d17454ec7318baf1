"""Commands end in time, and say what went wrong; ranks meet where the machine's name does not resolve."""

import shlex
import subprocess
import sys
import time

import pytest
from tcs_lab.studies import links
from tcs_lab.support import processes
from tcs_lab.support.processes import run_within, torchrun_command


def python(text):
    return [sys.executable, "-c", text]


def test_a_command_that_ends_well_says_nothing(capfd):
    run_within(60, python("print('as it comes')"))
    assert capfd.readouterr().out == ""
    run_within(60, python("import os; print(os.environ['OWN'])"), show=True, OWN="shown")
    assert capfd.readouterr().out == "shown\n"


@pytest.mark.parametrize("last", ["raise SystemExit('the reason')", "import os; os.abort()",
                                  "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])  # fmt: skip
def test_a_command_that_fails_says_its_last_lines(last):
    text = f"for n in range(1000): print('line', n, flush=True)\n{last}"
    with pytest.raises(RuntimeError, match="exit status") as raised:
        run_within(60, python(text))
    said = str(raised.value)
    assert "line 999\n" in said and "line 100\n" not in said
    assert "the reason" in said or "SystemExit" not in last


def is_alive(pid):
    told = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, encoding="utf-8"
    )
    return told.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_command_that_hangs_is_ended_with_what_it_has_started(tmp_path, stubborn, monkeypatch):
    """Also where it does not end when it is asked to; its last lines are in the error."""
    child = "import time; time.sleep(600)"
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
    text = f"""{ignores}
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", {child!r}])
Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
print("waits for", "nobody", flush=True)
time.sleep(600)"""
    monkeypatch.setattr(processes, "_GRACE", 2.0)
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"3 s(.|\n)*waits for nobody"):
        run_within(3, python(text))
    assert time.monotonic() - begun < 60
    assert not is_alive(int((tmp_path / "child").read_text(encoding="utf-8")))


RANKS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
one = [None] * dist.get_world_size()
dist.all_gather_object(one, dist.get_rank())
print("met", one, flush=True)
os._exit(0)
"""


def test_ranks_meet_on_a_machine_whose_name_does_not_resolve(tmp_path):
    """In a namespace of its own, which needs root on Linux."""
    renamed = ["unshare", "--uts", "bash", "-c", "hostname nowhere.invalid && exec true"]
    try:
        subprocess.run(renamed, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("cannot give a name to a namespace of its own")
    script = tmp_path / "script.py"
    script.write_text(RANKS, encoding="utf-8")
    inside = shlex.join(torchrun_command(2, str(script)))
    renamed[-1] = f"hostname nowhere.invalid && exec {inside} > {tmp_path / 'said'} 2>&1"
    run_within(120, renamed, OMP_NUM_THREADS="1")
    said = (tmp_path / "said").read_text(encoding="utf-8")  # ranks may print at once
    assert said.count("met") == said.count("[0, 1]") == 2


def measurement(mbit=(10.0,), ways=("plain",)):
    return links.LinkMeasurement(2, links.Net(10, 1000), mbit, ways)


def test_a_measurement_of_links_has_a_limit_beyond_what_it_takes():
    """At least ten times the wire's part of it, and never none."""
    wire = links.calculate_wire("plain", links.Net(10, 1000), 2, 10.0)
    assert measurement().limit > 10 * wire
    assert measurement((None,)).limit > 0


def test_a_measurement_that_fails_says_its_last_lines(monkeypatch):
    def failing(seconds, command, **rest):
        run_within(seconds, python("print('no link'); raise SystemExit(3)"))

    monkeypatch.setattr(links, "run_within", failing)
    with pytest.raises(ChildProcessError, match=r"(?s)exit status 3.*no link"):
        measurement().make()
