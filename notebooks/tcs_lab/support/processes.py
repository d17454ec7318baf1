"""Processes: run a command within a time limit, and start torchrun on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

_LAST_LINES = 30  # of the output, which an error shows
_GRACE = 10.0  # seconds between asking a process to end and killing it


def torchrun_command(ranks: int, *words: str) -> list[str]:
    """Return the command that starts so many ranks of a script on this machine.

    torchrun gives its ranks this machine's name to meet at. Where that name does not resolve, they
    would wait for each other until they time out; the local address always works.
    """
    here = ["--standalone", "--local-addr", "127.0.0.1", f"--nproc-per-node={ranks}"]
    return [sys.executable, "-m", "torch.distributed.run", *here, *words]


def run_within(
    seconds: float, command: Sequence[str], show: bool = False, cwd: Path | None = None,
    **variables: str,
) -> None:  # fmt: skip
    """Run a command to its end. `show` prints its output as it comes.

    `variables` are environment variables beside those of this process. Raises TimeoutError if the
    command takes longer than `seconds`; it is then ended with all processes of its group. Raises
    RuntimeError if it fails. Both errors contain the last lines of its output.
    """
    process = subprocess.Popen(
        command, cwd=cwd, env=os.environ | variables, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        start_new_session=True,
    )  # fmt: skip
    lines = deque[str](maxlen=_LAST_LINES)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if show:
                print(line, end="", flush=True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        _end(process)
        reader.join(_GRACE)
        raise TimeoutError(
            _describe_failure(f"did not finish within {seconds:g} s", command, lines)
        ) from error
    except BaseException:  # Ctrl-C
        _end(process)
        raise
    reader.join(_GRACE)  # a process that it left behind may keep the output open
    if process.returncode:
        raise RuntimeError(
            _describe_failure(f"ended with exit status {process.returncode}", command, lines)
        )


def _end(process: subprocess.Popen[str]) -> None:
    """Ask a process and its group to end, and kill what is left of them after a while."""
    for by in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, by)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE)


def _describe_failure(what: str, command: Sequence[str], lines: deque[str]) -> str:
    name = " ".join(command[:3])
    return f"{name} … {what}; the last lines of its output:\n{''.join(lines)}"
