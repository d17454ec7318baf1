"""Sections 6 and 7: sent + errors == intended, to the bit, whatever the link does to a message."""

import pickle

import pytest
import torch
from common import deltas_like_training

import tcs_core as tcs

LAYERS = [1200, 300, 1000, 10, 490]  # D = 3000
CLIENTS = 3


def rounds(compressor, count, dense=()):
    """Every round's open compressor, its messages as they arrived, and what was intended (N, D)."""
    for t, deltas_ND in enumerate(deltas_like_training(count, CLIENTS, LAYERS)):
        intended_ND = compressor.errors_ND + deltas_ND
        compressor.open(dense=t in dense)
        given_ND = deltas_ND.clone()
        yield [compressor.client(n, given_ND[n]) for n in range(CLIENTS)], intended_ND
        assert torch.equal(given_ND, deltas_ND)


def placed(message, shared_K):
    sent_D = torch.zeros(sum(LAYERS))
    message.add_to_(sent_D, shared_K)
    return sent_D


@pytest.mark.parametrize("link", [tcs.Link, tcs.ByteLink])
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "TCS-LF-Q5+", "top-K-Q5", "rand-K", "TCS-D5-NW"])
def test_what_a_client_does_not_send_it_keeps(name, link):
    compressor = tcs.Compressor(tcs.Scheme.named(name), LAYERS, CLIENTS, link=link())
    for messages, intended_ND in rounds(compressor, 12, dense=(6,)):
        sent_ND = torch.stack([placed(message, compressor.known.shared_K) for message in messages])
        dense = compressor.known.dense
        if not dense:
            assert torch.equal(sent_ND + compressor.errors_ND, intended_ND)
        update_D = compressor.server(messages)
        if dense:
            assert torch.equal(sent_ND, intended_ND) and not compressor.errors_ND.any()
        if name != "TCS-D5-NW":
            torch.testing.assert_close(update_D, sent_ND.mean(0), rtol=1e-6, atol=1e-7)


class Network:
    """A channel that flips a bit of one client's messages."""

    def __init__(self, victim):
        self.victim, self.broken = victim, 0

    def __call__(self, sender, data):
        if sender != self.victim:
            return data
        self.broken += 1
        place = 7 * self.broken % len(data)
        return data[:place] + bytes([data[place] ^ 1 << self.broken % 8]) + data[place + 1 :]


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "TCS-Q5++", "top-K-Q5", "rand-K"])
def test_a_refused_message_stays_with_its_client_whole(name):
    """And the server averages over the others; in dense rounds too."""
    network = Network(victim=1)
    link = tcs.ByteLink("skip", network)
    compressor = tcs.Compressor(tcs.Scheme.named(name), LAYERS, CLIENTS, link=link)
    kept_D = torch.zeros(sum(LAYERS))
    for t, (messages, intended_ND) in enumerate(rounds(compressor, 12, dense=(6,))):
        assert messages[1] is None and compressor.link.refused == [1] and len(link.up) == 2
        sent_ND = torch.stack([placed(messages[n], compressor.known.shared_K) for n in (0, 2)])
        assert torch.equal(compressor.errors_ND[1], intended_ND[1])
        update_D = compressor.server(messages)
        kept_D += list(deltas_like_training(t + 1, CLIENTS, LAYERS))[t][1]
        assert torch.equal(compressor.errors_ND[1], kept_D)  # all there ever was
        if not compressor.scheme.compresses_downlink:
            torch.testing.assert_close(update_D, sent_ND.mean(0), rtol=1e-6, atol=1e-7)
    assert network.broken == 12


def test_what_was_refused_goes_with_the_next_message():
    network = Network(victim=0)
    scheme = tcs.Scheme.named("top-K", phi_local=1.0)
    compressor = tcs.Compressor(scheme, [4], 1, link=tcs.ByteLink("skip", network))
    delta_D = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    with pytest.raises(
        tcs.MessageError, match=r"server: no message was accepted, of clients \[0\]"
    ):
        compressor.step(delta_D)
    network.victim = None
    assert torch.equal(compressor.step(delta_D), 2 * delta_D[0])
    assert not compressor.errors_ND.any()


def test_a_link_that_is_none():
    with pytest.raises(ValueError, match="on_bad: got 'ignore', allowed: stop or skip"):
        tcs.ByteLink(on_bad="ignore")


@pytest.mark.parametrize("error", [tcs.NotFiniteError(3), tcs.MessageError(tcs.SERVER, "late")])
def test_an_error_comes_back_from_another_process(error):
    error.round = 5
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)
