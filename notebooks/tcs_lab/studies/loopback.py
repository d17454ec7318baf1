"""The processes of Flower on one machine: a SuperLink, real or simulated SuperNodes, and a run."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def free_port() -> int:
    """Find a free port below those that the system gives to connections, since such a port could be in
    use again before anybody listens at it."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "tcs-app"
version = "0.1.0"
description = "TCS in Flower"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "tcs"
[tool.flwr.app.components]
serverapp = "tcs_app.apps:server"
clientapp = "tcs_app.apps:client"
[tool.flwr.app.config]
tcs-folder = "."
"""


def app_folder(folder: Path, source: str) -> Path:
    """Write a Flower app into a folder. `source` defines `client` and `server`."""
    (folder / "tcs_app").mkdir(parents=True, exist_ok=True)
    (folder / "tcs_app" / "__init__.py").touch()
    (folder / "tcs_app" / "apps.py").write_text(source, encoding="utf-8")
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    return folder


class Loopback:
    """A SuperLink and its SuperNodes on this machine, which end with the `with` block.

    With `simulated`, so many nodes run in Flower's simulation (ray) instead. Each process writes a log
    into `folder`.
    """

    def __init__(self, folder: Path, simulated: int = 0):
        self.folder, self.simulated, self.port = folder.resolve(), simulated, free_port()
        bin_folder = Path(sys.executable).parent
        self.environment = os.environ | {
            "FLWR_HOME": str(self.folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1", "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        # Without bytecode, each message would compile torch's modules.
        if os.environ.get("PYTHONDONTWRITEBYTECODE"):
            del self.environment["PYTHONDONTWRITEBYTECODE"]
            self.environment["PYTHONPYCACHEPREFIX"] = str(self.folder / "bytecode")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Loopback:
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        address = f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        text = f'[superlink]\ndefault = "here"\n{address}'
        (home / "config.toml").write_text(text, encoding="utf-8")
        words = [
            "--insecure",
            "--port",
            str(self.port),
            "--disable-runtime-dependency-installation",
        ]
        more = ["--simulation"] if self.simulated else []
        self.start("link", "flower-superlink", *words, *more)
        try:
            self._wait_for_link()
        except BaseException:  # Python does not call __exit__ then
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        for name in reversed(list(self.processes)):  # nodes first
            self.stop(name)

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return self.processes[name]

    def stop(self, name: str, with_signal: int = signal.SIGINT) -> None:
        """End a process and those that it started, which are in the same group."""
        process = self.processes.pop(name)
        for ask_by in (with_signal, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # the group may have ended
                os.killpg(process.pid, ask_by)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        process.wait()

    def node(self, partition: int) -> None:
        """Start a SuperNode."""
        link = f"127.0.0.1:{self.port}"
        words = ["--insecure", "--superlink", link, "--port", str(free_port())]
        config = ["--node-config", f"partition-id={partition}"]
        self.start(f"node{partition}", "flower-supernode", *words, *config)

    def run(self, app: Path, **config: str | int) -> subprocess.Popen[bytes]:
        """Start `flwr run`. It ends with the run; its exit status is 0 even if the run failed."""
        given = " ".join(f"{key.replace('_', '-')}={value!r}" for key, value in config.items())
        words = [str(app), "here", "--stream", *(["--run-config", given] if given else [])]
        if self.simulated:
            sizes = f"num-supernodes={self.simulated} client-resources-num-cpus=1"
            words += ["--federation-config", sizes]
        return self.start("run", "flwr", "run", *words)

    def _wait_for_link(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.2)
        log = self.folder / "link.log"
        raise TimeoutError(f"no SuperLink listens on port {self.port} after 60 s; see {log}")
