"""A hostile client: named, or left out, whatever bytes it sends."""

import dataclasses
import itertools
import tracemalloc
import zlib

import pytest
import tcs_lab.schemes.variants  # noqa: F401  (+, ++)
import torch

import tcs_core as tcs

SIZES = (700, 1, 250, 49)


def sealed(data):
    """With a right checksum, so that what is inside is looked at."""
    return data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")


def rewritten(compressor, data, **changes):
    """The message with other fields, encoded as its client would."""
    shared_K = compressor.rule.shared_mask()
    known = compressor.known
    message = tcs.decode_message(data, known.wire_up, shared_K, mask_tag=known.mask_tag)
    return tcs.encode_message(
        dataclasses.replace(message, **changes), known.wire_up, known.mask_tag
    )


def with_more_positions(compressor, data, more):
    """As many own positions as before and `more`, none of them shared, each with a value."""
    shared_K = compressor.rule.shared_mask()
    known = compressor.known
    message = tcs.decode_message(data, known.wire_up, shared_K, mask_tag=known.mask_tag)
    free = torch.ones(sum(SIZES), dtype=torch.bool)
    free[shared_K] = False
    own = free.nonzero().squeeze(1)[: len(message.positions) + more]
    values = torch.ones(len(shared_K) + len(own))
    forged = tcs.Message.of(values, own, compressor.scheme.value_bits, message.sender, message.round)  # fmt: skip
    return tcs.encode_message(forged, known.wire_up, known.mask_tag)


def expanding(compressor, data):
    """A few kilobytes of deflate stream that promise fifty megabytes of values."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = deflate.compress(bytes(50_000_000)) + deflate.flush()
    return sealed(data[:96] + b"\1" + bomb[:4000] + bytes(4))


OLD = {}  # a message of the round before, by sender
ATTACKS = {
    "no bytes": lambda c, data: b"",
    "cut off": lambda c, data: data[:-7],
    "one bit": lambda c, data: data[:20] + bytes([data[20] ^ 4]) + data[21:],
    "not bytes": lambda c, data: None,
    "version": lambda c, data: sealed(b"\x09" + data[1:]),
    "says it is dense": lambda c, data: sealed(data[:1] + b"\1" + data[2:]),
    "another scheme's tag": lambda c, data: sealed(data[:8] + b"abcd" + data[12:]),
    "four billion positions": lambda c, data: sealed(data[:12] + b"\xff" * 4 + data[16:]),
    "another client's name": lambda c, data: rewritten(c, data, sender=0),
    "the server's name": lambda c, data: rewritten(c, data, sender=tcs.SERVER),
    "a later round": lambda c, data: rewritten(c, data, round=c.known.round + 1),
    "replayed round": lambda c, data: OLD[1],
    "another client's message": lambda c, data: OLD["now"],
    "inside the shared mask": lambda c, data: rewritten(c, data, positions=c.rule.shared_mask()[:1]),
    "one position too many": lambda c, data: with_more_positions(c, data, 1),
    "one position too few": lambda c, data: with_more_positions(c, data, -1),
    "all positions": lambda c, data: with_more_positions(c, data, 10**6),
    "megabytes": lambda c, data: sealed(data[:-4] + bytes(20_000_000)),
    "expansion": expanding,
}  # fmt: skip


def attacked(name, attack, policy):
    """A compressor at its third round, in which client 1 sends something else."""
    compressor = tcs.Compressor(
        tcs.Scheme.named(name), SIZES, 3, link=tcs.Link(tcs.unchanged, policy)
    )

    def channel(sender, data):
        OLD["now"] = data if sender == 0 else OLD.get("now")
        if compressor.known.round < 2:
            OLD[sender] = data
        elif sender == 1:
            return ATTACKS[attack](compressor, data)
        return data

    compressor.link.channel = channel
    for seed in (0, 1):
        compressor.step(deltas(seed))
    return compressor


def deltas(seed):
    return torch.randn(3, sum(SIZES), generator=torch.Generator().manual_seed(seed)) ** 3


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", ["TCS", "TCS-LF-Q5++"])
def test_a_hostile_client_is_named_or_left_out(name, attack):
    compressor = attacked(name, attack, "stop")
    with pytest.raises(tcs.MessageError, match=r"^client 1: message: ") as raised:
        compressor.step(deltas(2))
    assert raised.value.client == 1

    compressor = attacked(name, attack, "skip")
    honest = attacked(name, attack, "skip")
    honest.link.channel = lambda sender, data: data
    intended_D = compressor.errors_ND[1] + deltas(2)[1]
    update_D, expected_D = compressor.step(deltas(2)), honest.step(deltas(2), clients=[0, 2])
    assert compressor.traffic.refused == (1,) and honest.traffic.refused == ()
    assert torch.equal(update_D, expected_D)  # as if client 1 had not taken part
    assert torch.equal(compressor.errors_ND[[0, 2]], honest.errors_ND[[0, 2]])
    torch.testing.assert_close(compressor.errors_ND[1], intended_D, rtol=1e-6, atol=0)
    assert (compressor.bits_up, compressor.bytes_up) == (honest.bits_up, honest.bytes_up)
    compressor.link.channel = honest.link.channel
    compressor.step(deltas(3))
    assert compressor.traffic.refused == () and compressor.traffic.heard == (0, 1, 2)


@pytest.mark.parametrize("name", ["TCS", "FedAvg"])
def test_a_round_in_which_all_are_hostile_stops(name):
    scheme = tcs.Scheme.named(name)
    compressor = tcs.Compressor(scheme, SIZES, 3, link=tcs.Link(tcs.unchanged, "skip"))
    compressor.link.channel = lambda sender, data: b"nonsense" * 9
    with pytest.raises(tcs.MessageError, match=r"^server: no message was accepted in round 0"):
        compressor.step(deltas(0))


def test_the_servers_memory_is_bounded_whatever_a_client_sends():
    """Beside the attacker's own bytes, which a transport stops at most_bytes."""
    attacks = ("megabytes", "expansion", "four billion positions", "all positions")
    for attack, name in itertools.product(attacks, ("TCS-Q5", "TCS-Q5+")):
        compressor = attacked(name, attack, "skip")
        data = ATTACKS[attack](compressor, good_message(compressor))
        wire, shared_K = compressor.known.wire_up, compressor.rule.shared_mask()
        tag = {"mask_tag": compressor.known.mask_tag}
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"message: (got|own positions)"):
            tcs.decode_message(data, wire, shared_K, 1, 2, 1, **tag)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 * compressor.known.dimension, attack


def good_message(compressor):
    """What client 1 would send in the next round."""
    sent = {}
    compressor.link.channel = lambda sender, data: sent.setdefault(sender, data)
    compressor.known.begin()
    compressor.link.to_server(compressor.known, 1, compressor.clients[1].send(deltas(2)[1]))
    return sent[1]


def test_a_kind_that_does_not_exist_is_named():
    wire = tcs.Wire.up(tcs.Scheme.named("TCS"), [12])
    data = bytearray(tcs.encode_message(tcs.Message.dense_of(torch.ones(12)), wire)[:-4])
    data[1] = 7
    data += zlib.crc32(data).to_bytes(4, "little")
    with pytest.raises(ValueError, match=r"^message: kind: got 7, allowed: 0 to 2$"):
        tcs.decode_message(bytes(data), wire, torch.arange(2))
