"""TCS in Flower: `tcs_core.Client` in a ClientApp and `tcs_core.Server` in a ServerApp, which exchange the
bytes of messages. This module needs Flower (`uv run --extra flower`); `import tcs_lab` does without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from tcs_lab.studies.nodes import FederatedJob, Node, ServerRounds

MakeJob = Callable[[Mapping[str, Any]], FederatedJob]  # from Flower's run configuration


def to_record(fields: Mapping[str, Any]) -> RecordDict:
    """Make a record of Flower: bytes become arrays of uint8, without numpy's header, and all other fields
    become configuration."""
    data = {key: value for key, value in fields.items() if isinstance(value, bytes)}
    arrays = {key: Array("uint8", (len(value),), "tcs", value) for key, value in data.items()}
    others = {key: value for key, value in fields.items() if key not in data}
    return RecordDict({"data": ArrayRecord(arrays), "others": ConfigRecord(others)})


def from_record(record: RecordDict) -> dict[str, Any]:
    """Return the fields of a record that `to_record` made."""
    return dict(record.config_records["others"]) | {
        key: array.data for key, array in record.array_records["data"].items()
    }


def size_of(record: RecordDict) -> int:
    """Count the bytes of a record as Flower does."""
    return sum(part.count_bytes() for part in record.values())


def client_app(make_job: MakeJob) -> ClientApp:
    """Make the app of a node.

    The node's file is partition-<id>.pt, in the folder `tcs-folder` of the node's configuration or of
    the run's. Flower's `context.state` has its name and checksum.
    """

    def make_node(context: Context) -> Node:
        job = make_job(context.run_config)
        number, folder = read_partition(context, job.clients), read_folder(context)
        kept = context.state.config_records.get("tcs")
        mark = str(kept["checksum"]) if kept else ""
        return Node(job, number, folder / f"partition-{number}.pt", context.run_id, mark)

    def answer(message: Message, context: Context, work: Any = None) -> Message:
        node = make_node(context)
        fields = node.answer(work(node, from_record(message.content)) if work else None)
        if node.marks:
            kept = {"file": node.path.name, "checksum": node.marks[-1]}
            context.state["tcs"] = ConfigRecord({**kept})
        return Message(to_record(fields), reply_to=message)

    app = ClientApp()
    app.query()(answer)
    app.train()(lambda message, context: answer(message, context, Node.train))
    app.evaluate()(lambda message, context: answer(message, context, Node.end))
    return app


def read_partition(context: Context, clients: int) -> int:
    """Read which client a node is: `partition-id` in its configuration. Raises ValueError that names it."""
    given = context.node_config.get("partition-id")
    text = str(given).strip()
    if isinstance(given, bool) or not text.isdecimal() or int(text) >= clients:
        call = "flower-supernode --node-config 'partition-id=0', with another number for each node"
        raise ValueError(f"partition-id: got {given!r}, allowed: 0 to {clients - 1}; call {call}")
    return int(text)


def read_folder(context: Context) -> Path:
    """Read where a node keeps its file: `tcs-folder` in its configuration or in the run's.

    Raises ValueError that names both.
    """
    given = context.node_config.get("tcs-folder") or context.run_config.get("tcs-folder")
    if not isinstance(given, str) or (Path(given).exists() and not Path(given).is_dir()):
        calls = """flwr run --run-config 'tcs-folder="FOLDER"', or flower-supernode --node-config"""
        raise ValueError(f"tcs-folder: got {given!r}, allowed: a folder; call {calls}")
    return Path(given)


def server_app(make_job: MakeJob) -> ServerApp:
    """Make the app of the server."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        job = make_job(context.run_config)
        rounds, rows = ServerRounds(job), []
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


def ask(grid: Grid, rounds: ServerRounds, kind: str) -> dict[str, int]:
    """Send orders to all nodes until enough of them have answered. A node that joins or fails meanwhile
    is first asked how far it is. Returns a row with the bytes of all messages, and with the bytes that
    Flower counts up and down."""
    job, start = rounds.job, time.monotonic()
    row = {"round": rounds.here.round, "Flower up": 0, "Flower down": 0}
    out: dict[str, int] = {}  # by message: the node that is asked
    while len(rounds.answers) < job.clients:
        enough = len(rounds.answers) >= (job.least or job.clients)
        if enough and time.monotonic() - start > job.patience:
            break
        for node in set(grid.get_node_ids()) - set(out.values()):
            if rounds.wants(node):
                content = to_record(rounds.order(node) if rounds.knows(node) else {})
                row["Flower down"] += size_of(content)
                message = Message(content, node, kind if rounds.knows(node) else "query")
                out |= dict.fromkeys(grid.push_messages([message]), node)
        for reply in grid.pull_messages(list(out)):
            node = out.pop(reply.metadata.reply_to_message_id)
            if not reply.has_error():
                row["Flower up"] += size_of(reply.content)
                rounds.take(node, from_record(reply.content))
            elif reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
                raise RuntimeError(f"round {rounds.here.round}: {reply.error.reason}")
            else:  # the node is gone, or its process was killed
                print(f"node {node}: {reply.error.reason}", flush=True)
                rounds.stands.pop(node, None)
        time.sleep(0.1)
    row["up"] = sum(map(len, rounds.answers.values()))
    return row
