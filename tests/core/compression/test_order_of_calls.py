"""Section 6: a call in the wrong order is refused by name and changes nothing; the right one works.

Halves with a `Known` each, and halves that share one."""

import pytest
import torch
from common import deltas_like_training, same_state, whole_state

import tcs_core as tcs

SIZES = [150, 50]
SCHEMES = ["TCS", "TCS-Q5", "top-K", "rand-K", "FedAvg"]
STEPS = ["begin", "send 0", "send 1", "add 0", "add 1", "finish", "end"]


class Sides:
    """Two clients and a server, of which each call is one step of a round."""

    def __init__(self, name, shared):
        self.shared = shared
        self.known = tcs.Known(name, SIZES)
        knowns = [self.known if shared else tcs.Known(name, SIZES) for _ in range(2)]
        self.clients = [tcs.Client(known, n) for n, known in enumerate(knowns)]
        self.server = tcs.Server(self.known)
        self.rounds = deltas_like_training(9, 2, SIZES)
        self.deltas_ND, self.sent, self.update_D, self.reply = next(self.rounds), {}, None, None

    def knowns(self):
        return [self.known] if self.shared else [self.known, *(c.known for c in self.clients)]

    def call(self, what):
        name, n = what.split()[0], int(what.split()[-1]) if " " in what else 0
        if name == "begin":
            for known in self.knowns()[:1] if n else self.knowns():
                known.begin()
        elif name == "send":
            message = self.clients[n].send(self.deltas_ND[n])
            self.sent[n] = message
        elif name == "add":
            self.server.add(n, self.sent[n])
        elif name == "finish":
            self.update_D, self.reply = self.server.finish()
        elif name == "arrived":
            self.clients[n].arrived()
        elif name == "receive":
            self.clients[n].receive(self.reply)
        elif name == "observe":
            self.known.observe(self.update_D)
        else:
            self.end()

    def end(self):
        self.known.observe(self.update_D)
        for client in self.clients:
            if self.shared:
                client.arrived()
            else:
                client.receive(self.reply)

    def round(self):
        for step in STEPS:
            self.call(step)
        self.deltas_ND = next(self.rounds)

    def held(self):
        return whole_state(self.known, self.server, *self.clients)


# By how many steps of round 2 are done, what may not be called, and what of the error names it.
WRONG = {
    0: {"send 0": "send", "add 0": "add", "finish": "finish", "arrived 0": "arrived",
        "observe": "observe", "receive 0": "receive"},
    1: {"begin": "begin", "finish": "finish", "arrived 0": "arrived", "add 0": "round",
        "receive 0": "round"},
    2: {"begin": "begin", "send 0": "send", "finish": "finish", "arrived 1": "arrived",
        "add 1": "round"},
    4: {"begin": "begin", "send 0": "send", "send 1": "send", "add 0": "add"},
    5: {"begin": "begin", "add 0": "add", "add 1": "add", "send 1": "send"},
    6: {"begin 1": "begin", "add 0": "add", "add 1": "add", "finish": "finish", "send 0": "send"},
    7: {"send 0": "send", "add 1": "add", "finish": "finish", "arrived 1": "arrived",
        "observe": "observe", "receive 0": "receive"},
}  # fmt: skip


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    ("done", "call"), [(done, call) for done, calls in WRONG.items() for call in calls]
)
def test_a_wrong_call_is_refused_by_name_and_changes_nothing(done, call, name, shared):
    sides, right = Sides(name, shared), Sides(name, shared)
    for one in (sides, right):
        one.round(), one.round()
        for step in STEPS[:done]:
            one.call(step)
    before = sides.held()
    with pytest.raises(ValueError, match=rf"(?=.*\b{WRONG[done][call]}\b).*\b[23]\b"):
        sides.call(call)
    assert same_state(sides.held(), before)
    for one in (sides, right):
        for step in STEPS[done:]:
            one.call(step)
        one.deltas_ND = next(one.rounds)
        one.round()
    assert same_state(sides.held(), right.held()) and torch.equal(sides.update_D, right.update_D)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_round_begins_once_and_a_late_message_is_in_no_average(name, count):
    sides = Sides(name, shared=True)
    for step in ("begin", "send 0", "send 1", "add 0"):
        sides.call(step)
    average_D = sides.server.average()
    before_D = average_D.clone()
    for _ in range(count):
        with pytest.raises(ValueError, match=r"^begin: round 0 is averaged"):
            sides.known.begin()
        with pytest.raises(
            tcs.MessageError, match=r"^client 1: add: too late, round 0 has been averaged"
        ):
            sides.server.add(1, sides.sent[1])
    assert torch.equal(average_D, before_D)
    update_D, _ = sides.server.finish()
    assert torch.equal(update_D, before_D)


@pytest.mark.parametrize("first", ["observe", "observe twice", "observe in between"])
def test_observing_without_a_round_does_not_advance_it(first):
    known = tcs.Known("TCS", SIZES)
    if first == "observe in between":
        known.begin()
        known.observe(torch.ones(200))
    before = whole_state(known)
    for _ in range(2 if first == "observe twice" else 1):
        with pytest.raises(ValueError, match=rf"^observe: round {known.round} is not open"):
            known.observe(torch.ones(200))
    assert same_state(whole_state(known), before)


@pytest.mark.parametrize("how", ["taken up", "lost"])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_came_in_a_round_that_was_forgotten_is_in_no_later_average(name, how):
    """Of a round with the same number, too, after a state was loaded."""
    sides = Sides(name, shared=True)
    sides.round(), sides.round()
    saved = sides.known.state_dict()
    for step in ("begin", "send 0", "send 1", "add 1"):
        sides.call(step)
    if how == "taken up":
        sides.server.average()
        sides.known.load_state_dict(saved)
    else:
        sides.known.lose()
    sides.clients = [tcs.Client(sides.known, n) for n in range(2)]
    with pytest.raises(tcs.MessageError, match="no message was accepted in round"):
        sides.server.finish()
    sides.known.begin()
    sides.call("send 0"), sides.call("add 0")
    update_D, _ = sides.server.finish()
    assert sides.known.expand_message(sides.sent[0]).equal(update_D)


@pytest.mark.parametrize("received", ["fewer values", "dense", "two dimensions"])
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K"])
def test_what_arrived_has_the_shape_of_what_was_sent(name, received):
    sides = Sides(name, shared=True)
    sides.round(), sides.round()
    sides.call("begin"), sides.call("send 0")
    sent = sides.sent[0]
    other = {
        "fewer values": tcs.Message(sent.values[1:], sent.positions),
        "dense": tcs.Message.dense_of(torch.ones(200)),
        "two dimensions": tcs.Message(sent.values[None], sent.positions),
    }[received]
    before = sides.held()
    with pytest.raises(ValueError, match=r"^client 0: arrived: got "):
        sides.clients[0].arrived(other)
    assert same_state(sides.held(), before)
    sides.clients[0].arrived()


def test_a_compressor_whose_known_is_in_a_round_says_so_and_leaves_it():
    compressor, deltas_ND = tcs.Compressor("TCS", SIZES, 2), torch.ones(2, 200)
    compressor.known.begin()
    before = whole_state(compressor)
    for call in (
        lambda: compressor.step(deltas_ND),
        lambda: compressor.round(deltas_ND.__getitem__, [0, 1]),
        lambda: compressor.step(deltas_ND, clients=[1]),
    ):
        with pytest.raises(ValueError, match=r"^Compressor: round 0 is open, allowed: "):
            call()
    assert same_state(whole_state(compressor), before)
    compressor.known.lose()
    compressor.step(deltas_ND)


def test_a_round_inside_a_round_is_refused_and_ends_neither():
    compressor, deltas_ND = tcs.Compressor("TCS", SIZES, 2), torch.ones(2, 200)

    def difference(n):
        for call in (lambda: compressor.step(deltas_ND), compressor.state_dict):
            with pytest.raises(ValueError, match=r"^Compressor: a round is under way"):
                call()
        return deltas_ND[n]

    assert compressor.round(difference, [0, 1]).equal(deltas_ND[0])
    assert compressor.known.round == 1


def test_bytes_that_are_read_before_the_round_is_open():
    """The server still has the last round's mask, so that the bytes do not fit."""
    sides = Sides("TCS", shared=False)
    for _ in range(2):
        sides.round()
    client, server = sides.clients[0], sides.server
    client.known.begin()
    data = client.known.to_bytes(client.send(next(sides.rounds)[0]))
    with pytest.raises(tcs.MessageError, match=r"no round is open here: call begin first$"):
        server.known.from_bytes(data, 0)
    server.known.begin()
    server.add(0, server.known.from_bytes(data, 0))
