"""TCS in Flower: `tcs_core.Client` in a ClientApp, `tcs_core.Server` in a ServerApp; what travels is
the messages' bytes. It needs Flower (`uv run --extra flower`), so that `import tcs_lab` leaves it out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from tcs_lab.nodes import Job, Node, Rounds

MakeJob = Callable[[Mapping[str, Any]], Job]  # from Flower's run configuration


def to_record(fields: Mapping[str, Any]) -> RecordDict:
    """Bytes as arrays of uint8, without numpy's header; all else as Flower's configuration."""
    data = {key: value for key, value in fields.items() if isinstance(value, bytes)}
    arrays = {key: Array("uint8", (len(value),), "tcs", value) for key, value in data.items()}
    said = {key: value for key, value in fields.items() if key not in data}
    return RecordDict({"data": ArrayRecord(arrays), "said": ConfigRecord(said)})


def of_record(record: RecordDict) -> dict[str, Any]:
    return dict(record["said"]) | {key: array.data for key, array in record["data"].items()}


def size_of(record: RecordDict) -> int:
    """As Flower counts it."""
    return sum(part.count_bytes() for part in record.values())


def client_app(make_job: MakeJob) -> ClientApp:
    """The node's file is partition-<id>.pt in the folder `tcs-folder` of the node's configuration,
    or of the run's. Flower's `context.state` has its name and checksum."""

    def node_of(context: Context) -> Node:
        number = int(context.node_config["partition-id"])
        folder = context.node_config.get("tcs-folder") or context.run_config["tcs-folder"]
        known = context.state.get("tcs", {"checksum": ""})
        job, path = make_job(context.run_config), Path(str(folder)) / f"partition-{number}.pt"
        return Node(job, number, path, context.run_id, known["checksum"])

    def answer(message: Message, context: Context, work: Callable[..., bytes] | None) -> Message:
        node = node_of(context)
        data = {"message": work(node, of_record(message.content))} if work else {}
        if node.marks:
            key = {"file": node.path.name, "checksum": node.marks[-1]}
            context.state["tcs"] = ConfigRecord(key)
        stand = {"round": node.stand.round, "checksum": node.stand.theta}
        fields = stand | {"client": node.client.number} | data
        return Message(to_record(fields), reply_to=message)

    app = ClientApp()
    app.query()(lambda message, context: answer(message, context, None))
    app.train()(lambda message, context: answer(message, context, Node.train))
    app.evaluate()(lambda message, context: answer(message, context, Node.end))
    return app


def server_app(make_job: MakeJob) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        job = make_job(context.run_config)
        rounds, rows = Rounds(job), []
        for _ in range(job.rounds):
            rounds.begin()
            rows.append(ask(grid, rounds, "train"))
            rounds.finish()
            rows[-1]["down"] = len(rounds.reply)
        rounds.answers.clear()
        rows.append(ask(grid, rounds, "evaluate"))
        rounds.flat.put(rounds.flat.views(rounds.theta_D))
        job.done(rounds.model, rows)

    return app


def ask(grid: Grid, rounds: Rounds, kind: str) -> dict[str, int]:
    """Orders to all nodes till enough have answered. A node that is new, or failed, is first asked
    where it stands; one that comes back meanwhile is asked, too. Bytes both ways, Flower's count."""
    job, out, start = rounds.job, {}, time.monotonic()
    row = {"round": rounds.here.round, "flower up": 0, "flower down": 0}
    while len(rounds.answers) < job.clients:
        enough = len(rounds.answers) >= (job.least or job.clients)
        if enough and time.monotonic() - start > job.patience:
            break
        for node in set(grid.get_node_ids()) - set(out.values()):
            if rounds.wants(node):
                known = node in rounds.stands
                content = to_record(rounds.order(node) if known else {})
                row["flower down"] += size_of(content)
                message = Message(content, node, kind if known else "query")
                out |= dict.fromkeys(grid.push_messages([message]), node)
        for reply in grid.pull_messages(list(out)):
            node = out.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                print(f"node {node}: {reply.error.reason}", flush=True)
                rounds.stands.pop(node, None)
                continue
            row["flower up"] += size_of(reply.content)
            rounds.take(node, of_record(reply.content))
        time.sleep(0.1)
    row["up"] = sum(map(len, rounds.answers.values()))
    return row


# Flower's processes on one machine ────────────────────────────────────────────────────────────────


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Loopback:
    """A SuperLink and its SuperNodes on this machine, in `folder`, ended with the `with` block.

    `simulated` nodes live in Flower's simulation (ray) instead. Each process has a log there.
    """

    def __init__(self, folder: Path, simulated: int = 0):
        self.folder, self.simulated, self.port = folder.resolve(), simulated, free_port()
        bin_folder = Path(sys.executable).parent
        self.environment = os.environ | {
            "FLWR_HOME": str(self.folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1", "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Loopback:
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        address = f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n{address}')
        words = [
            "--insecure",
            "--port",
            str(self.port),
            "--disable-runtime-dependency-installation",
        ]
        more = ["--simulation"] if self.simulated else []
        self.start("link", "flower-superlink", *words, *more)
        self._wait_for_link()
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
        """Ends a process and those that it started: all are of one group."""
        process = self.processes.pop(name)
        for ask_by in (with_signal, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, ask_by)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        process.wait()

    def node(self, partition: int, link_port: int | None = None) -> None:
        """A SuperNode joins; `link_port` is where it finds the SuperLink, if not there."""
        link = f"127.0.0.1:{link_port or self.port}"
        words = ["--insecure", "--superlink", link, "--port", str(free_port())]
        config = ["--node-config", f"partition-id={partition}"]
        self.start(f"node{partition}", "flower-supernode", *words, *config)

    def run(self, app: Path, **config: str | int) -> subprocess.Popen[bytes]:
        """`flwr run`, begun: it ends when the run has ended."""
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
        raise TimeoutError(f"no SuperLink on port {self.port}: see {self.folder / 'link.log'}")
