"""Clients and server of a federation as separate processes, whatever carries the bytes between them.

A client is a file between two messages. `tcs_lab.studies.flower` is one way to carry the bytes.
"""

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
import tcs_lab.schemes  # noqa: F401  (registers schemes such as STC)
from tcs_lab.support.errors import to_python
from tcs_lab.support.files import write_whole


@dataclass(frozen=True)
class FederatedJob:
    """What server and nodes know before the first message. It is the same for all of them.

    `model()` makes a float32 module on the CPU, with the same numbers everywhere. `train(model, n, t)`
    is client n's local training in round t, in place. The first `warmup` rounds are dense. A round ends
    when all clients have answered, or after `patience` seconds when at least `least` of them have.
    `done(model, rows)` is called on the server at the end; it gets a row with the bytes of each round.
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
    """How far the server or a node is: its next round, and the checksum of its theta."""

    round: int
    checksum: int


def state_to_bytes(state: dict[str, Any]) -> bytes:
    """Return a state as bytes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def state_from_bytes(data: bytes) -> dict[str, Any]:
    """Return the state that `state_to_bytes` made bytes of."""
    return torch.load(io.BytesIO(data), weights_only=True)


def checksum(vector_D: Tensor | None) -> int:
    """Return the CRC-32 of a vector's bytes, and 0 for None."""
    return 0 if vector_D is None else zlib.crc32(vector_D.numpy().data)


class Participant:
    """What the server and a node have in common: the model theta, and what everybody knows."""

    def __init__(self, job: FederatedJob):
        self.job, self.model = job, job.model()
        self.flat = tcs.FlatView(self.model)
        if self.flat.norms:
            advice = "its running statistics are not sent; use GroupNorm or LayerNorm"
            raise ValueError(f"model: got a batch norm, allowed: none, since {advice}")
        order = self.flat.order
        self.known = tcs.Known(job.scheme, self.flat.layer_sizes, job.seed, order=order)
        if self.known.scheme.warmup_masks != 1:
            raise ValueError(f"scheme: got {job.scheme}, allowed: schemes without a sparse warm-up")
        # methods that compress each parameter separately have `set_model`
        if hasattr(self.known.rule, "set_model"):
            self.known.rule.set_model(self.flat)
        self.theta_D = torch.empty(self.flat.dimension)
        self.flat.read_(self.flat.views(self.theta_D))

    @property
    def stand(self) -> Standing:
        """How far this server or node is."""
        return Standing(self.known.round, checksum(self.theta_D))

    def difference(self, n: int, t: int) -> Tensor:
        """Return client n's model difference in round t, (D,) (Alg. 2, line 7)."""
        self.flat.put(self.flat.views(self.theta_D))
        self.job.train(self.model, n, t)
        delta_D = torch.empty_like(self.theta_D)
        self.flat.read_(self.flat.views(delta_D))
        return delta_D.sub_(self.theta_D)


class Node(Participant):
    """A client, which between two messages is a file with theta, errors, what is known and the last message.

    The file is read memory-mapped and replaced whole, so that a node that was killed goes on with the
    old one or with the new one. With the file of another run, it begins anew. `mark` is the checksum of
    the file that the node remembers, "" if it was restarted. Raises ValueError if the file cannot be read,
    or is neither that one nor a later one.
    """

    def __init__(self, job: FederatedJob, number: int, path: Path, run: int = 0, mark: str = ""):
        super().__init__(job)
        self.path, self.run, self.message = path, run, b""
        self.marks: list[str] = []  # of the last files, the newest at the end
        try:
            state = torch.load(path, mmap=True, weights_only=True) if path.exists() else {}
            goes_on = state.get("run") == run
            errors_D = (
                state["client"]["errors_D"] if goes_on else None
            )  # mapped, and copied on write
        except (PermissionError, MemoryError):
            raise
        except Exception as error:  # torch and pickle raise many kinds for a damaged file
            what = f"{path}: is not a usable file of a client ({type(error).__name__})"
            raise ValueError(f"{what}; delete it to begin this client anew") from error
        client_type = self.known.rule.client_type or tcs.Client
        self.client = client_type(self.known, number, errors_D)
        if goes_on:
            self._load(state, mark)

    def _load(self, state: dict[str, Any], mark: str) -> None:
        self.theta_D, self.marks = state["theta_D"], state["marks"]
        if self.mark != self.marks[-1] or (mark and mark not in self.marks):
            allowed = f"{self.marks[-1]}, as it was saved, and not older than {mark or 'that'}"
            what_to_do = "put the right file back, or delete it to begin this client anew"
            raise ValueError(
                f"{self.path}: checksum: got {self.mark}, allowed: {allowed}; {what_to_do}"
            )
        self.known.load_state_dict(state["known"])
        self.client.load_state_dict(state["client"])
        self.message = state["message"].numpy().tobytes()

    @property
    def mark(self) -> str:
        """The checksum of theta and errors, which names the file."""
        return f"{checksum(self.theta_D):08x}{checksum(self.client.errors_D):08x}"

    def save(self) -> None:
        """Write the file."""
        self.marks = [*self.marks[-7:], self.mark]
        message = torch.empty(0, dtype=torch.uint8)  # frombuffer refuses to make an empty one
        if self.message:
            message = torch.frombuffer(bytearray(self.message), dtype=torch.uint8)
        state = {
            "run": self.run, "marks": self.marks, "theta_D": self.theta_D, "message": message,
            "known": self.known.state_dict(), "client": self.client.state_dict(),
        }  # fmt: skip
        write_whole(self.path, lambda file: torch.save(state, file))

    def follow(self, order: Mapping[str, Any]) -> bool:
        """Catch up with the server, by its last message or by all that it knows. Return False if this
        does not succeed, so that the server has to send more."""
        heard = self.client.sent_in(order["heard"])
        if "theta" in order:  # rounds were missed
            if heard:
                self.client.arrived()
            self.theta_D = torch.frombuffer(bytearray(order["theta"]), dtype=torch.float32)
            self.known.load_state_dict(state_from_bytes(order["known"]))
        elif "reply" in order:
            # The round is not open if this object was made after the client sent its message.
            if self.known.status == tcs.CLOSED:
                self.known.begin(order["reply_dense"], self.theta_D)
            reply = self.known.from_bytes(order["reply"], tcs.SERVER)
            self.theta_D.add_(self.client.receive(reply, heard))
        return tuple(self.stand) == (order["round"], order["checksum"])

    def train(self, order: Mapping[str, Any]) -> bytes | None:
        """Train, and return the message of a round, or None if rounds were missed. If the node is asked
        again for the same round, it returns the same message."""
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
        """Catch up after the last round. Return b"", or None if rounds were missed."""
        if not self.follow(order):
            return None
        self.save()
        return b""

    def answer(self, message: bytes | None) -> dict[str, Any]:
        """Return what it says to the server: the message, and how far it is."""
        stand = {"client": self.client.number} | self.stand._asdict()
        return stand if message is None else stand | {"message": message}


class ServerRounds(Participant):
    """The server. A round is `begin`, an `order` for each node and `take` for its answer, and `finish`."""

    def __init__(self, job: FederatedJob):
        super().__init__(job)
        server_type = self.known.rule.server_type or tcs.Server
        self.server = server_type(self.known, job.weights)
        self.here = self.stand
        self.before = self.here  # before the round that `reply` ended
        self.reply, self.reply_dense = b"", False
        self.stands: dict[int, tuple[int, Standing]] = {}  # by node: its client, and how far it is
        self.heard = [-1] * job.clients  # by client: the last round in which it was heard
        self.answers: dict[int, bytes] = {}  # of this round, by client

    def begin(self) -> None:
        self.answers.clear()
        self.known.begin(self.known.round < self.job.warmup, self.theta_D)

    def knows(self, node: int) -> bool:
        """Return whether there is an order for a node. In round 0, all nodes are equally far."""
        return node in self.stands or self.here.round == 0

    def order(self, node: int) -> dict[str, Any]:
        """Return what a node needs to catch up with the server and to open the round."""
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
        """Accept an answer: how far the node is and, if it has reached this round, its message."""
        number, stand = answer["client"], Standing(answer["round"], answer["checksum"])
        if number not in range(self.job.clients):
            raise ValueError(
                f"client: got {number} from a node, allowed: 0 to {self.job.clients - 1}"
            )
        self.stands[node] = number, stand
        if "message" in answer and stand == self.here:
            first = self.answers.setdefault(number, answer["message"])
            if first != answer["message"]:
                raise ValueError(
                    f"client {number}: got messages of two nodes, allowed: one node; give each node another number"
                )

    def wants(self, node: int) -> bool:
        """Return whether a node has yet to be asked in this round."""
        return node not in self.stands or self.stands[node][0] not in self.answers

    def finish(self) -> None:
        """End the round (Alg. 2, lines 15 and 16, and line 6 of the next round). Messages are added in the
        clients' order, so that sums have the same bits, whoever was first."""
        known = self.known
        for number, data in sorted(self.answers.items()):
            self.server.add(number, known.from_bytes(data, number))
            self.heard[number] = known.round
        update_D, reply = self.server.finish()
        self.reply, self.reply_dense, self.before = known.to_bytes(reply), known.dense, self.here
        self.theta_D.add_(update_D)
        known.observe(update_D)
        self.here = self.stand
