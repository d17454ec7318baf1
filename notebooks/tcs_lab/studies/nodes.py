"""A federation's two sides, each in a process of its own, whatever carries bytes between them: a
client that is a file between two messages, and the server. `tcs_lab.studies.flower` is one carrier."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tcs_core as tcs
from tcs_lab.support.errors import to_python
from tcs_lab.support.files import write_whole


@dataclass(frozen=True)
class FederatedJob:
    """What server and nodes are told before the first message, the same on all of them.

    `model()` is a float32 module on the CPU, with the same numbers on every side; `train(model, n,
    t)` is client n's local training in round t, in place. The first `warmup` rounds are dense.
    `least` clients end a round once `patience` seconds are over; all of them end it at once.
    `done(model, rows)` is called on the server at the end: a row a round, with its bytes.
    """

    scheme: str
    model: Callable[[], nn.Module]
    train: Callable[[nn.Module, int, int], None]
    clients: int
    rounds: int
    warmup: int = 0
    weights: Sequence[float] | None = None
    seed: int = 0
    least: int | None = None
    patience: float = 0.0
    done: Callable[[nn.Module, list[dict[str, int]]], None] = lambda model, rows: None

    def __post_init__(self) -> None:
        for name in ("clients", "rounds", "warmup", "weights", "seed", "least", "patience"):
            object.__setattr__(self, name, to_python(getattr(self, name)))


class Standing(NamedTuple):
    """Where a side stands: the round that is next for it, and the checksum of its theta."""

    round: int
    checksum: int


def state_to_bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def state_from_bytes(data: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(data), weights_only=True)


def checksum(vector_D: Tensor | None) -> int:
    return 0 if vector_D is None else zlib.crc32(vector_D.numpy().data)


class Participant:
    """What both sides have: theta, and what is known without a word."""

    def __init__(self, job: FederatedJob):
        self.job, self.model = job, job.model()
        self.flat = tcs.FlatView(self.model)
        if self.flat.norms:
            advice = "running statistics are not sent: take GroupNorm or LayerNorm"
            raise ValueError(f"model: got a batch norm, allowed: none ({advice})")
        order = self.flat.order
        self.known = tcs.Known(job.scheme, self.flat.layer_sizes, job.seed, order=order)
        if self.known.scheme.warmup_masks != 1:
            raise ValueError(f"scheme: got {job.scheme}, allowed: none with a sparse warm-up")
        self.theta_D = torch.empty(self.flat.dimension)
        self.flat.read_(self.flat.views(self.theta_D))

    @property
    def stand(self) -> Standing:
        return Standing(self.known.round, checksum(self.theta_D))

    def difference(self, n: int, t: int) -> Tensor:
        """Client n's model difference in round t, (D,): Alg. 2, line 7."""
        self.flat.put(self.flat.views(self.theta_D))
        self.job.train(self.model, n, t)
        delta_D = torch.empty_like(self.theta_D)
        self.flat.read_(self.flat.views(delta_D))
        return delta_D.sub_(self.theta_D)


class Node(Participant):
    """A client between two messages is a file: theta, errors, what is known, its last message.

    The file is read memory-mapped and replaced whole, so that whoever is killed goes on with the
    old one or the new one. That of another run begins anew. `mark` is the checksum of the file that
    the node remembers, "" if it was restarted: ValueError if the file is not that one or a later.
    """

    def __init__(self, job: FederatedJob, number: int, path: Path, run: int = 0, mark: str = ""):
        super().__init__(job)
        self.path, self.run, self.message = path, run, b""
        self.marks: list[str] = []  # of the last files, the newest at the end
        state = torch.load(path, mmap=True, weights_only=True) if path.exists() else {}
        found = state.get("run") == run
        errors_D = state["client"]["errors_D"] if found else None  # mapped, and copied on write
        client_type = self.known.rule.client_type or tcs.Client
        self.client = client_type(self.known, number, errors_D)
        if found:
            self._take(state, mark)

    def _take(self, state: dict[str, Any], mark: str) -> None:
        self.theta_D, self.marks = state["theta_D"], state["marks"]
        if self.mark != self.marks[-1] or (mark and mark not in self.marks):
            allowed = f"{self.marks[-1]}, and known here {mark}"
            raise ValueError(f"{self.path}: checksum: got {self.mark}, allowed: {allowed}")
        self.known.load_state_dict(state["known"])
        self.client.load_state_dict(state["client"])
        self.message = state["message"].numpy().tobytes()

    @property
    def mark(self) -> str:
        return f"{checksum(self.theta_D):08x}{checksum(self.client.errors_D):08x}"

    def save(self) -> None:
        self.marks = [*self.marks[-7:], self.mark]
        message = torch.frombuffer(bytearray(self.message), dtype=torch.uint8)
        state = {
            "run": self.run, "marks": self.marks, "theta_D": self.theta_D, "message": message,
            "known": self.known.state_dict(), "client": self.client.state_dict(),
        }  # fmt: skip
        write_whole(self.path, lambda file: torch.save(state, file))

    def follow(self, order: Mapping[str, Any]) -> bool:
        """Comes to where the server stands, by its last message or by all that it knows. False if
        that does not lead there: the server is to send more."""
        heard = self.client.sent_in(order["heard"])
        if "theta" in order:  # rounds were missed
            if heard:
                self.client.arrived()
            self.theta_D = torch.frombuffer(bytearray(order["theta"]), dtype=torch.float32)
            self.known.load_state_dict(state_from_bytes(order["known"]))
        elif "reply" in order:
            if self.known.status == tcs.CLOSED:  # this object was made after the message was sent
                self.known.begin(order["reply_dense"], self.theta_D)
            reply = self.known.from_bytes(order["reply"], tcs.SERVER)
            self.theta_D.add_(self.client.receive(reply, heard))
        return tuple(self.stand) == (order["round"], order["checksum"])

    def train(self, order: Mapping[str, Any]) -> bytes | None:
        """The message of a round; None if rounds were missed. Asked again for the same round, the
        same message."""
        if order["round"] == self.known.round and self.client.sent_in(order["round"]):
            return self.message
        if not self.follow(order):
            return None
        self.known.begin(order["dense"], self.theta_D)
        delta_D = self.difference(self.client.number, self.known.round)
        self.message = self.known.to_bytes(self.client.send(delta_D))
        self.save()
        return self.message

    def end(self, order: Mapping[str, Any]) -> bytes | None:
        """After the last round: the server's last message, or all that it knows."""
        if not self.follow(order):
            return None
        self.save()
        return b""

    def answer(self, message: bytes | None) -> dict[str, Any]:
        """What it says to the server: the message, and where it stands now."""
        stand = {"client": self.client.number} | self.stand._asdict()
        return stand if message is None else stand | {"message": message}


class ServerRounds(Participant):
    """The server: `begin`, an `order` to each node and `take` of its answer, `finish`."""

    def __init__(self, job: FederatedJob):
        super().__init__(job)
        server_type = self.known.rule.server_type or tcs.Server
        self.server = server_type(self.known, job.weights)
        self.here = self.stand
        self.before = self.here  # in the round that `reply` ended
        self.reply, self.reply_dense = b"", False
        self.stands: dict[
            int, tuple[int, Standing]
        ] = {}  # by node: its client, and where it stands
        self.heard = [-1] * job.clients  # the round in which a client was heard last
        self.answers: dict[int, bytes] = {}  # of this round, by client

    def begin(self) -> None:
        self.answers.clear()
        self.known.begin(self.known.round < self.job.warmup, self.theta_D)

    def knows(self, node: int) -> bool:
        """Whether there is an order for it. In round 0 all stand where the job says."""
        return node in self.stands or self.here.round == 0

    def order(self, node: int) -> dict[str, Any]:
        """What brings a node to where the server stands, and opens the round there."""
        number, stand = self.stands.get(node, (None, self.here))
        order = self.here._asdict() | {"dense": self.known.dense}
        order["heard"] = -1 if number is None else self.heard[number]
        if stand == self.before != self.here:
            order |= {"reply": self.reply, "reply_dense": self.reply_dense}
        elif stand != self.here:
            theta = self.theta_D.numpy().tobytes()
            order |= {"theta": theta, "known": state_to_bytes(self.known.state_dict())}
        return order

    def take(self, node: int, answer: Mapping[str, Any]) -> None:
        """An answer: where the node stands and, if it came to this round, its message."""
        number, stand = answer["client"], Standing(answer["round"], answer["checksum"])
        if number not in range(self.job.clients):
            raise ValueError(f"client: got {number}, allowed: 0 to {self.job.clients - 1}")
        self.stands[node] = number, stand
        if "message" in answer and stand == self.here:
            first = self.answers.setdefault(number, answer["message"])
            if first != answer["message"]:
                raise ValueError(f"client {number}: two nodes say that they are it, allowed: one")

    def wants(self, node: int) -> bool:
        return node not in self.stands or self.stands[node][0] not in self.answers

    def finish(self) -> None:
        """Alg. 2, lines 15 and 16, and line 6 of the next round. Clients in their order, so that
        sums have the same bits, whoever was first."""
        known = self.known
        for number, data in sorted(self.answers.items()):
            self.server.add(number, known.from_bytes(data, number))
            self.heard[number] = known.round
        update_D, reply = self.server.finish()
        self.reply, self.reply_dense, self.before = known.to_bytes(reply), known.dense, self.here
        self.theta_D.add_(update_D)
        known.observe(update_D)
        self.here = self.stand
