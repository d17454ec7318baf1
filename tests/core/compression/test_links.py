"""Section 6: sent + errors == intended, to the bit, whatever the link does to a message."""

import copy
import pickle

import pytest
import torch
from common import deltas_like_training

import tcs_core as tcs

LAYERS = [1200, 300, 1000, 10, 490]  # D = 3000
CLIENTS = 3


class Watched(tcs.Link):
    """Bytes, and what came of them."""

    def to_server(self, known, n, message):
        self.came[n], bits = super().to_server(known, n, message)
        return self.came[n], bits


def placed(message, known):
    sent_D = torch.zeros(sum(LAYERS))
    message.add_to_(sent_D, None if known.dense else known.shared_K)
    return sent_D


LINKS = [tcs.Link(), tcs.Link(tcs.unchanged)]


@pytest.mark.parametrize("link", LINKS, ids=["counted", "bytes"])
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "TCS-LF-Q5", "top-K-Q5", "rand-K"])
def test_what_a_client_does_not_send_it_keeps(name, link):
    """Line by line, with the same objects as the compressor has."""
    compressor = tcs.Compressor(tcs.Scheme.named(name), LAYERS, CLIENTS, link=link)
    known, server, clients = compressor.known, compressor.server, compressor.clients
    for t, deltas_ND in enumerate(deltas_like_training(12, CLIENTS, LAYERS)):
        intended_ND, given_ND = compressor.errors_ND + deltas_ND, deltas_ND.clone()
        known.begin(dense=t == 6)
        messages = [
            link.to_server(known, n, clients[n].send(given_ND[n]))[0] for n in range(CLIENTS)
        ]
        assert torch.equal(given_ND, deltas_ND)
        assert torch.equal(compressor.errors_ND, intended_ND)  # till the round is finished
        sent_ND = torch.stack([placed(message, known) for message in messages])
        for n, message in enumerate(messages):
            server.add(n, message)
        update_D, _ = server.finish()
        for client in clients.values():
            client.arrived()
        assert torch.equal(sent_ND + compressor.errors_ND, intended_ND)
        if known.dense:
            assert not compressor.errors_ND.any()
        known.observe(update_D)
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


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "TCS-LF-Q5", "top-K-Q5", "rand-K"])
def test_a_refused_message_stays_with_its_client_whole(name):
    """And the server averages over the others; in dense rounds too."""
    network = Network(victim=1)
    link = Watched(network, "skip")
    compressor = tcs.Compressor(tcs.Scheme.named(name), LAYERS, CLIENTS, link=link)
    kept_D = torch.zeros(sum(LAYERS))
    for t, deltas_ND in enumerate(deltas_like_training(12, CLIENTS, LAYERS)):
        link.came = {}
        update_D = compressor.step(deltas_ND, dense=t == 6)
        kept_D += deltas_ND[1]
        assert link.came[1] is None and compressor.traffic.refused == (1,)
        assert compressor.traffic.heard == (0, 2)
        assert torch.equal(compressor.errors_ND[1], kept_D)  # all there ever was
        sent_ND = torch.stack([placed(link.came[n], compressor.known) for n in (0, 2)])
        torch.testing.assert_close(update_D, sent_ND.mean(0), rtol=1e-6, atol=1e-7)
    assert network.broken == 12


def test_what_was_refused_goes_with_the_next_message():
    network = Network(victim=0)
    scheme = tcs.Scheme.named("top-K", phi_local=1.0)
    compressor = tcs.Compressor(scheme, [4], 1, link=tcs.Link(network, "skip"))
    delta_D = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    with pytest.raises(tcs.MessageError, match=r"^server: no message was accepted in round 0"):
        compressor.step(delta_D)
    network.victim = None
    assert torch.equal(compressor.step(delta_D), 2 * delta_D[0])
    assert not compressor.errors_ND.any()


def test_a_link_that_is_none():
    with pytest.raises(ValueError, match="on_bad: got 'ignore', allowed: stop or skip"):
        tcs.Link(on_bad="ignore")


@pytest.mark.parametrize("error", [tcs.NotFiniteError(3), tcs.MessageError(tcs.SERVER, "late")])
def test_an_error_comes_back_from_another_process(error):
    error.round = 5
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)


def test_errors_stay_if_a_link_spoils_the_update():
    """Nothing has overflowed, so all clients keep what they meant to send."""

    class Spoils(tcs.Link):
        def to_clients(self, server):
            update_D, bits = super().to_clients(server)
            return update_D / 0, bits

    made = tcs.Compressor("TCS", [100], 2, link=Spoils())
    with pytest.raises(tcs.MessageError, match=r"^server: update_D: got NaN or infinity"):
        made.step(torch.ones(2, 100))
    assert torch.equal(made.errors_ND, torch.ones(2, 100))


def test_a_server_that_leaves_a_message_out_counts_the_others_alone(monkeypatch, registry):
    class Picks(tcs.Server):
        def add(self, number, message):
            if number != 1:
                super().add(number, message)

    tcs.register_scheme("Picks", phi_global=None, phi_local=0.1)(
        type("PicksRule", (tcs.TopK,), {"server_type": Picks})
    )
    made, plain = tcs.Compressor("Picks", [100], 3), tcs.Compressor("top-K", [100], 1)
    plain.known.rule.k_local = made.rule.k_local
    made.step(torch.randn(3, 100))
    assert made.traffic.heard == (0, 2) and made.traffic.refused == (1,)
    length = tcs.block_code_bits(32, 10, 10, 100)
    assert made.bits_up == length and made.bytes_up == 2 * tcs.bytes_of(length)


def test_a_reply_of_a_derived_server_is_what_clients_receive(registry):
    class Halves(tcs.Server):
        def reply(self, update_D):
            return super().reply(update_D.mul_(0.5))

    tcs.register_scheme("Halves", phi_global=None, phi_local=0.1)(
        type("HalvesRule", (tcs.TopK,), {"server_type": Halves})
    )
    links = tcs.Link(), tcs.Link(tcs.unchanged)
    one, two = (tcs.Compressor("Halves", [100], 3, link=link) for link in links)
    deltas_ND = torch.randn(3, 100)
    assert torch.equal(one.step(deltas_ND), two.step(deltas_ND))
    assert one.traffic == two.traffic


@pytest.mark.parametrize("copied_by", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_copied_compressor_has_the_errors_once(copied_by):
    made = tcs.Compressor("TCS", [50_000], 8)
    for _ in range(2):
        made.step(torch.randn(8, 50_000))
    copied, deltas_ND = copied_by(made), torch.randn(8, 50_000)
    if isinstance(copied, bytes):
        assert len(copied) < 1.2 * 4 * 8 * 50_000
        copied = pickle.loads(copied)
    assert all(
        client.errors_D.data_ptr() == copied.errors_ND[n].data_ptr()
        for n, client in copied.clients.items()
    )
    assert made.clients[3].errors_D.data_ptr() == made.errors_ND[3].data_ptr()
    assert torch.equal(copied.step(deltas_ND), made.step(deltas_ND))
    assert torch.equal(copied.errors_ND, made.errors_ND)


def test_errors_may_lie_in_a_file(tmp_path):
    mapped = torch.from_file(str(tmp_path / "errors"), True, 3 * 100).view(3, 100)
    made, plain = tcs.Compressor("TCS", [100], 3), tcs.Compressor("TCS", [100], 3)
    made.keep_errors_in(mapped)
    for deltas_ND in deltas_like_training(4, 3, [100]):
        assert torch.equal(made.step(deltas_ND), plain.step(deltas_ND))
    assert torch.equal(mapped, plain.errors_ND) and mapped.any()
