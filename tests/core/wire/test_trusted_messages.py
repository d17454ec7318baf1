"""Sections 5 and 6: messages inside one process are looked at as those that come as bytes are."""

import dataclasses
import itertools

import pytest
import torch
from common import deltas_like_training, same_state, whole_state

import tcs_core as tcs

SIZES = [150, 50]
SCHEMES = ["TCS", "TCS-Q5", "top-K", "rand-K", "FedAvg-Q5"]


def sides(name, dense=False):
    """A server that has client 0's message of round 2, and what clients 1 and 2 sent."""
    known = tcs.Known(name, SIZES)
    server, clients = tcs.Server(known), [tcs.Client(known, n) for n in range(3)]
    for t, deltas_ND in enumerate(deltas_like_training(3, 3, SIZES)):
        known.begin(dense and t == 2)
        sent = [client.send(delta_D) for client, delta_D in zip(clients, deltas_ND, strict=True)]
        if t == 2:
            break
        for n, message in enumerate(sent):
            server.add(n, message)
        update_D, _ = server.finish()
        for client in clients:
            client.arrived()
        known.observe(update_D)
    server.add(0, sent[0])
    return server, sent


def free_and_taken(server):
    taken_D = server.known.shared_D
    return (~taken_D).nonzero().squeeze(1), taken_D.nonzero().squeeze(1)


def at(message, positions):
    """The message with other own positions, as many."""
    return dataclasses.replace(message, positions=positions)


def moved(message, server, kind):
    """Own positions that are wrong in one way."""
    free, taken = free_and_taken(server)
    own = message.positions
    if kind in ("shared", "first shared", "one of two shared"):
        if not len(taken):
            pytest.skip("the scheme shares no mask")
        place = {"shared": -1, "first shared": 0, "one of two shared": 1}[kind]
        return at(message, torch.cat([own[:-1], taken[place][None]]).sort().values)
    return at(message, {
        "too large": lambda: torch.cat([own[:-1], torch.tensor([200])]),
        "far too large": lambda: torch.cat([own[:-1], torch.tensor([2**40])]),
        "negative": lambda: torch.cat([torch.tensor([-1]), own[1:]]),
        "from the end": lambda: own - 200,
        "twice": lambda: torch.cat([own[:1], own[:1], own[2:]]) if len(own) > 1 else free[:2] * 0,
        "descending": lambda: torch.cat([own.flip(0)[: len(own)]]) if len(own) > 1 else free[:2].flip(0),
        "int32": lambda: own.int(),
        "float": lambda: own.float(),
        "mask": lambda: tcs.positions_to_mask(own, 200),
        "two dimensions": lambda: own[None],
        "a list": lambda: own.tolist(),
        "none": lambda: None,
        "one fewer": lambda: own[:-1],
        "one more": lambda: torch.cat([own, free[-1:]]).unique(),
    }[kind]())  # fmt: skip


POSITIONS = ["shared", "first shared", "one of two shared", "too large", "far too large", "negative",
             "from the end", "twice", "descending", "int32", "float", "mask", "two dimensions",
             "a list", "none", "one fewer", "one more"]  # fmt: skip
VALUES = {
    "float64": lambda v: v.double(), "float16": lambda v: v.half(), "whole numbers": lambda v: v.int(),
    "two dimensions": lambda v: v[None], "a column": lambda v: v[:, None], "none": lambda v: None,
    "no dimension": lambda v: v[0], "a list": lambda v: v.tolist(), "one fewer": lambda v: v[:-1],
    "one more": lambda v: torch.cat([v, v[:1]]), "NaN": lambda v: v.clone().fill_(torch.nan),
    "one infinite": lambda v: torch.cat([v[:-1], torch.tensor([torch.inf])]),
}  # fmt: skip
PARTS = {
    "sender": [0, 2, 3, tcs.SERVER, -1], "round": [0, 1, 3, -2, 2.5],
    "dense": [True, None], "codes": [torch.zeros(3, dtype=torch.int32)],
}  # fmt: skip


def is_refused(server, number, message):
    """Whether the message is refused by its client's name, in one line, with nothing changed."""
    before = whole_state(server)
    with pytest.raises(tcs.MessageError, match=rf"^client {number}: ") as raised:
        server.add(number, message)
    in_one_line = raised.value.client == number and "\n" not in str(raised.value)
    return in_one_line and same_state(whole_state(server), before)


def goes_on(server, sent):
    """Whether the right messages are still heard, and their average is that of three."""
    full_ND = torch.stack([server.known.expand_message(message) for message in sent])
    server.add(1, sent[1]), server.add(2, sent[2])
    heard = server.heard
    return heard == [0, 1, 2] and torch.allclose(server.finish()[0], full_ND.mean(0), 1.3e-6, 1e-5)


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K"])
def test_a_server_refuses_wrong_positions_with_nothing_changed(name, kind):
    server, sent = sides(name)
    assert is_refused(server, 1, moved(sent[1], server, kind))
    assert goes_on(server, sent)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_server_refuses_wrong_values_with_nothing_changed(name, kind):
    server, sent = sides(name)
    assert is_refused(server, 1, dataclasses.replace(sent[1], values=VALUES[kind](sent[1].values)))
    assert goes_on(server, sent)


@pytest.mark.parametrize(("part", "value"), [(p, v) for p, values in PARTS.items() for v in values])
@pytest.mark.parametrize("dense", [False, True])
def test_a_server_refuses_another_clients_rounds_or_kinds_message(part, value, dense):
    server, sent = sides("TCS", dense)
    if dense and value is True:
        value = False
    assert is_refused(server, 1, dataclasses.replace(sent[1], **{part: value}))
    assert goes_on(server, sent)


@pytest.mark.parametrize("kind", ["positions", "taken", "fewer", "more", "float64", "quantized"])
def test_a_server_refuses_a_wrong_dense_message(kind):
    server, sent = sides("TCS-Q5", dense=True)
    message, ones = sent[1], torch.ones(200)
    bad = {
        "positions": dataclasses.replace(message, positions=torch.tensor([3])),
        "taken": dataclasses.replace(message, positions=torch.tensor([0, 1, 2])),
        "fewer": dataclasses.replace(message, values=ones[1:]),
        "more": dataclasses.replace(message, values=torch.ones(201)),
        "float64": dataclasses.replace(message, values=ones.double()),
        "quantized": dataclasses.replace(message, codes=ones.int(), means=torch.ones(16)),
    }[kind]
    assert is_refused(server, 1, bad)
    assert not server.explored_D.any()
    assert goes_on(server, sent)


@pytest.mark.parametrize("message", [None, 3, "message", b"bytes", torch.ones(200), {"values": 1}])
def test_a_server_refuses_what_is_no_message(message):
    server, sent = sides("TCS")
    assert is_refused(server, 1, message)
    assert goes_on(server, sent)


@pytest.mark.parametrize("name", ["TCS-Q5", "top-K-Q5", "rand-K-Q1", "FedAvg-Q5"])
def test_a_server_refuses_values_in_other_bits_than_the_schemes(name):
    server, sent = sides(name)
    assert is_refused(server, 1, dataclasses.replace(sent[1], codes=None, means=None))
    assert goes_on(server, sent)


@pytest.mark.parametrize("number", [tcs.SERVER, -1, 70_000])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 1.0]])
def test_a_server_hears_clients_alone(number, weights):
    server, sent = sides("TCS")
    server.weights = weights
    before = whole_state(server)
    with pytest.raises(tcs.MessageError, match="allowed: clients 0 to"):
        server.add(number, dataclasses.replace(sent[1], sender=number))
    assert same_state(whole_state(server), before)


# Bytes ────────────────────────────────────────────────────────────────────────────────────────────


def wire(name):
    return tcs.Wire.up(tcs.Scheme.named(name), SIZES)


def quantized(bits, count=4):
    values = torch.linspace(-1, 2, count)
    return tcs.Message.of(values, torch.arange(0, 2 * count, 2), bits)


@pytest.mark.parametrize("pair", list(itertools.permutations([32, 5, 2, 1], 2)))
def test_values_of_other_bits_than_the_wires_are_not_encoded(pair):
    """A float message on a wire of few bits, and the other way round."""
    bits, wire_bits = pair
    here = wire("TCS" if wire_bits == 32 else f"TCS-Q{wire_bits}")
    with pytest.raises(ValueError, match=r"^(values|quantizer of the message): got "):
        tcs.encode_message(quantized(bits), here)


BAD = {
    "a code too large": {"codes": torch.tensor([0, 1, 2, 32], dtype=torch.int32)},
    "a negative code": {"codes": torch.tensor([-1, 1, 2, 3], dtype=torch.int32)},
    "all codes too large": {"codes": torch.full((4,), 1000, dtype=torch.int32)},
    "long codes": {"codes": torch.zeros(4, dtype=torch.int64)},
    "fewer codes": {"codes": torch.zeros(3, dtype=torch.int32)},
    "a negative mean": {"means": torch.full((16,), -0.5)},
    "one negative mean": {"means": torch.tensor([-1.0] + [1.0] * 15)},
    "infinite means": {"means": torch.full((16,), torch.inf)},
    "NaN among the means": {"means": torch.tensor([1.0] * 15 + [torch.nan])},
    "fewer means": {"means": torch.ones(15)},
    "double means": {"means": torch.ones(16).double()},
    "no means": {"means": None},
    "other values": {"values": torch.ones(4)},
    "one value is another": {"values": torch.tensor([9.0, 0.0, 0.0, 0.0])},
}


@pytest.mark.parametrize("bad", BAD)
def test_codes_and_means_that_say_something_else_are_not_encoded(bad):
    message = quantized(5)
    with pytest.raises(ValueError, match="got"):
        tcs.encode_message(dataclasses.replace(message, **BAD[bad]), wire("TCS-Q5"))
    data = tcs.encode_message(message, wire("TCS-Q5"))
    empty = torch.empty(0, dtype=torch.int64)
    assert tcs.decode_message(data, wire("TCS-Q5"), empty) == message


@pytest.mark.parametrize(
    "changes",
    [{"values": torch.ones(4).double()}, {"values": torch.ones(4, 1)}, {"values": torch.ones(3)},
     {"values": torch.ones(4).half()}, {"positions": torch.tensor([0, 1, 2, 200])},
     {"positions": torch.tensor([0, 2, 1, 3])}, {"positions": torch.tensor([0, 0, 1, 2])},
     {"positions": torch.empty(0)}, {"positions": torch.empty(0, 2, dtype=torch.int64)},
     {"dense": True}, {"dense": True, "positions": torch.empty(0, dtype=torch.int64)}],
)  # fmt: skip
def test_what_nobody_could_decode_as_it_is_is_not_encoded(changes):
    with pytest.raises(ValueError, match=r"^(values|positions): "):
        tcs.encode_message(dataclasses.replace(quantized(32), **changes), wire("TCS"))


@pytest.mark.parametrize("changes", [{"round": 2**32}, {"round": -1}, {"sender": tcs.SERVER + 1}])
def test_rounds_and_senders_that_the_header_cannot_hold_are_not_encoded(changes):
    message = dataclasses.replace(quantized(32), **changes)
    with pytest.raises(ValueError, match=str(next(iter(changes.values())))):
        tcs.encode_message(message, wire("TCS"))


@pytest.mark.parametrize("name", SCHEMES + ["TCS-Q1", "FedAvg"])
@pytest.mark.parametrize("dense", [False, True])
def test_what_clients_send_is_encoded_as_before(name, dense):
    server, sent = sides(name, dense)
    known = server.known
    for n, message in enumerate(sent):
        assert known.from_bytes(known.to_bytes(message), n) == message


# Equal messages ───────────────────────────────────────────────────────────────────────────────────


def test_messages_are_equal_if_all_that_they_say_is():
    message = quantized(5)
    again = dataclasses.replace(message, values=message.values.clone())
    assert message == again and (message != again) is False
    assert message != "message" and (message == None) is False  # noqa: E711
    assert message in [again]


@pytest.mark.parametrize(
    "changes",
    [{"values": torch.ones(4)}, {"values": torch.ones(5)}, {"positions": torch.arange(4)},
     {"positions": torch.arange(3)}, {"sender": 1}, {"round": 1}, {"codes": None}, {"means": None},
     {"codes": torch.ones(4, dtype=torch.int32)}, {"means": torch.ones(16)}, {"dense": True}],
)  # fmt: skip
def test_a_message_that_differs_in_any_part_is_another(changes):
    message = quantized(5)
    assert message != dataclasses.replace(message, **changes)
    assert dataclasses.replace(message, **changes) != message
