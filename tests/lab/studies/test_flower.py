"""TCS in Flower: its apps without the engine, and (slow) with its processes on loopback."""

import dataclasses
import json
import os
import signal
import sys
import time
import uuid

import pytest

pytest.importorskip("flwr", reason="needs Flower: uv run --extra flower pytest")

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity
from tcs_lab.studies import flower, loopback
from test_nodes import in_one_process, job
from torch import nn


@pytest.fixture(autouse=True)
def _in_a_task(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):  # as in a process that Flower starts
        monkeypatch.setattr(TaskIdentity, name, 7)


class Engine:
    """Flower's grid as far as `server_app` uses it: every node's app is called at once, unless
    `fate(engine, node, message)` returns the code of an error instead."""

    def __init__(self, folder, fate=lambda engine, node, message: None, **changes):
        self.plan, self.folder, self.fate = job(**changes), str(folder), fate
        self.app = flower.client_app(lambda config: self.plan)
        self.replies, self.kinds, self.contexts = {}, [], {}
        self.join(10, 0)
        self.join(11, 1)

    def join(self, node, partition):
        settings = {"partition-id": partition}, RecordDict(), {"tcs-folder": self.folder}
        self.contexts[node] = Context(7, node, *settings)

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        (message,) = messages
        node, message_id = message.metadata.dst_node_id, uuid.uuid4().hex
        vars(message.metadata)["_message_id"] = message_id  # the SuperLink gives it
        self.kinds.append(message.metadata.message_type)
        code = self.fate(self, node, message)
        if code is None:
            reply = self.app(message, self.contexts[node])
        else:
            reply = Message(Error(code, "killed"), reply_to=message)
        self.replies[message_id] = reply
        return [message_id]

    def pull_messages(self, ids):
        return [self.replies.pop(one) for one in ids if one in self.replies]

    def theta_and_rows(self):
        """What the server has in the end: theta (D,), and its rows of bytes."""
        found = []
        plan = dataclasses.replace(self.plan, done=lambda net, rows: found.extend((net, rows)))
        flower.server_app(lambda config: plan)(self, Context(7, 0, {}, RecordDict(), {}))
        return nn.utils.parameters_to_vector(found[0].parameters()).detach(), found[1]


def test_the_apps_have_the_bits_of_one_process_and_count_their_bytes(tmp_path):
    engine = Engine(tmp_path)
    theta_D, rows = engine.theta_and_rows()
    assert torch.equal(theta_D, in_one_process(job())[0])
    assert engine.kinds == ["train"] * 10 + ["evaluate"] * 2
    for row in rows[:-1]:
        assert 0 < row["up"] < row["Flower up"] < row["up"] + 2 * 300
    for context in engine.contexts.values():
        state = context.state["tcs"]
        assert set(state) == {"file", "checksum"} and flower.size_of(context.state) < 1000


def test_a_killed_node_is_asked_again_and_a_restarted_one_where_it_stands(tmp_path):
    def fate(engine, node, message):
        if node == 11 and len(engine.kinds) == 6:  # in round 2: it trains, and its answer is lost
            engine.app(message, engine.contexts.pop(11))
            engine.join(99, 1)
            return ErrorCode.NODE_UNAVAILABLE

    engine = Engine(tmp_path, fate)
    theta_D, _ = engine.theta_and_rows()
    assert torch.equal(theta_D, in_one_process(job())[0])
    assert engine.kinds.count("query") == 1 and engine.kinds.count("train") == 11


def test_an_app_that_raises_ends_the_run_with_its_reason(tmp_path):
    fate = lambda engine, node, message: ErrorCode.CLIENT_APP_RAISED_EXCEPTION  # noqa: E731
    with pytest.raises(RuntimeError, match="round 0: killed"):
        Engine(tmp_path, fate).theta_and_rows()


def test_enough_clients_end_a_round_when_patience_is_over_and_who_comes_back_catches_up(tmp_path):
    def fate(engine, node, message):
        if node == 11 and len(engine.kinds) == 4:  # gone in round 1
            del engine.contexts[11]
            return ErrorCode.NODE_UNAVAILABLE
        if node == 10 and len(engine.kinds) == 6:  # there again in round 3
            engine.join(11, 1)
        return None

    theta_D, _ = Engine(tmp_path, fate, least=1, patience=0.5).theta_and_rows()
    heard = lambda t: [0] if t in (1, 2) else [0, 1]  # noqa: E731
    assert torch.equal(theta_D, in_one_process(job(), heard)[0])


def test_bytes_and_settings_pass_through_records():
    fields = {"message": b"\x00\x01", "round": 3, "dense": True, "name": "x", "empty": b""}
    assert flower.from_record(flower.to_record(fields)) == fields
    assert flower.from_record(flower.to_record({})) == {}


APP = """
import json
from pathlib import Path

import torch

torch.set_num_threads(1)
from tcs_lab.studies import flower, loopback
from test_nodes import job as plan


def job(config):
    folder = Path(config["tcs-folder"])

    def done(net, rows):
        torch.save(torch.nn.utils.parameters_to_vector(net.parameters()).detach(), folder / "theta.pt")
        (folder / "rows.json").write_text(json.dumps(rows))

    return plan(rounds=4, done=done)


client = flower.client_app(job)
server = flower.server_app(job)
"""


@pytest.mark.slow
def test_superlink_and_supernodes_on_loopback_one_of_them_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    app, state = loopback.app_folder(tmp_path / "app", APP), tmp_path / "state"
    state.mkdir()
    with loopback.Loopback(tmp_path) as link:
        link.node(0)
        link.node(1)
        run = link.run(app, tcs_folder=str(state))
        deadline = time.monotonic() + 300
        file = state / "partition-1.pt"
        while (
            not file.exists() or torch.load(file)["known"]["round"] < 2
        ):  # errors are kept by then
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.2)
        link.stop("node1", signal.SIGKILL)
        link.node(1)
        assert run.wait(timeout=500) == 0, (tmp_path / "run.log").read_text(encoding="utf-8")
    expected = in_one_process(job(rounds=4))[0]
    assert torch.equal(torch.load(state / "theta.pt"), expected)
    for n in (0, 1):
        kept = torch.load(state / f"partition-{n}.pt")
        assert torch.equal(kept["theta_D"], expected)
    assert len(json.loads((state / "rows.json").read_text(encoding="utf-8"))) == 5


# What a person leaves out ─────────────────────────────────────────────────────────────────────────


def without(engine, node=(), run=(), **given):
    """The engine's second node with another configuration, and a run without some settings."""
    old = engine.contexts[11]
    settings = {"partition-id": 1} | given
    own = {key.replace("_", "-"): value for key, value in settings.items() if key not in node}
    kept = {key: value for key, value in old.run_config.items() if key not in run}
    engine.contexts[11] = Context(7, 11, own, RecordDict(), kept)


LEFT_OUT = {
    "no configuration": ({"node": ["partition-id"]}, r"partition-id: got None, allowed: 0 to 1.*--node-config"),
    "no number": ({"partition-id": "first"}, r"partition-id: got 'first', allowed: 0 to 1"),
    "a client too many": ({"partition-id": 2}, r"partition-id: got 2, allowed: 0 to 1"),
    "below zero": ({"partition-id": "-1"}, r"partition-id: got '-1', allowed: 0 to 1"),
    "no folder": ({"run": ["tcs-folder"]}, r"tcs-folder: got None, allowed: a folder.*--run-config"),
    "a number as folder": ({"tcs-folder": 3}, r"tcs-folder: got 3, allowed: a folder"),
    "a file as folder": ({"tcs-folder": __file__}, r"tcs-folder: got '.*', allowed: a folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_a_node_lacks_is_named_with_its_option(tmp_path, case):
    given, says = LEFT_OUT[case]
    engine = Engine(tmp_path)
    without(engine, **given)
    with pytest.raises(ValueError, match=f"^{says}"):
        engine.theta_and_rows()


def test_a_number_as_text_is_a_number(tmp_path):
    engine = Engine(tmp_path)
    without(engine, **{"partition-id": " 1 "})
    engine.theta_and_rows()
    assert (tmp_path / "partition-1.pt").exists()
