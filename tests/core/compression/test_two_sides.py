"""Section 6: what a client and a server that live apart refuse, and what stays when less arrives."""

import dataclasses

import pytest
import torch

import tcs_core as tcs

LAYERS = [120, 30, 100, 1, 49]


def test_a_dense_message_that_arrived_in_fewer_bits_leaves_the_rest_in_the_errors():
    known = tcs.Known("TCS", LAYERS)
    client = tcs.Client(known)
    known.begin(dense=True)
    delta_D = torch.randn(sum(LAYERS), generator=torch.Generator().manual_seed(0))
    message = client.send(delta_D)
    received = dataclasses.replace(message, values=message.values.bfloat16().float())
    client.arrived(received)
    assert torch.equal(client.errors_D, delta_D - received.values) and client.errors_D.any()


def test_a_client_without_a_weight_is_named():
    known = tcs.Known("TCS", LAYERS)
    server = tcs.Server(known, [1, 1])
    known.begin(dense=True)
    message = tcs.Message.dense_of(torch.ones(sum(LAYERS)), sender=2)
    with pytest.raises(
        tcs.MessageError, match=r"^client 2: add: has no weight, allowed: clients 0 to 1$"
    ):
        server.add(2, message)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
def test_a_difference_of_another_type_is_refused_before_anything_is_changed(kind):
    compressor = tcs.Compressor("FedAvg", LAYERS, 2)
    deltas_ND = torch.ones(2, sum(LAYERS), dtype=kind)
    with pytest.raises(ValueError, match=rf"^delta_D: got {kind}, allowed: torch.float32$"):
        compressor.step(deltas_ND)
    compressor.known.begin(dense=True)
    with pytest.raises(ValueError, match=rf"^delta_D: got {kind}, allowed: torch.float32$"):
        compressor.clients[0].send(deltas_ND[0])
    compressor.known.lose()
    assert compressor.step(deltas_ND.float()).any()


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "rand-K"])
def test_two_sides_that_mean_other_shared_masks_refuse_each_other(name):
    """A client that has lost a reply, or a seed that is not the server's."""
    known, other = tcs.Known(name, LAYERS), tcs.Known(name, LAYERS, seed=int(name == "rand-K"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        known.begin()
        other.begin()
        known.observe(torch.randn(sum(LAYERS), generator=generator))
        other.observe(torch.randn(sum(LAYERS), generator=generator))
    known.begin()
    other.begin()
    message = tcs.Client(other).send(torch.ones(sum(LAYERS)))
    with pytest.raises(
        tcs.MessageError, match=r"^client 0: message: tag: .*another scheme, shared"
    ):
        known.from_bytes(other.to_bytes(message), 0)
    assert torch.equal(other.from_bytes(other.to_bytes(message), 0).values, message.values)


class Stumbles(tcs.TCS):
    """A rule whose choice for the server fails at times."""

    fails = False

    def own_mask(self, intended_D, shared_D, k):
        if self.fails:
            raise MemoryError("no memory")
        return super().own_mask(intended_D, shared_D, k)


@pytest.mark.parametrize("again", [False, True])
def test_a_reply_that_fails_leaves_the_servers_errors_as_they_were(registry, again):
    """The round is lost, or finished in a second call: nothing is applied twice."""
    tcs.register_scheme("Stumbles", phi_down=0.05)(Stumbles)
    known = tcs.Known("Stumbles", [200])
    client, server = tcs.Client(known), tcs.Server(known)
    generator, sent_D, got_D = torch.Generator().manual_seed(4), torch.zeros(200), torch.zeros(200)
    for number in range(8):
        known.begin()
        delta_D = torch.randn(200, generator=generator)
        server.add(0, client.send(delta_D))
        sent_D += delta_D
        if number in (3, 6):
            known.rule.fails = True
            with pytest.raises(MemoryError):
                server.finish()
            known.rule.fails = False
            if not again:
                known.lose()
                server.drop()
                continue
        update_D, _ = server.finish()
        with pytest.raises(tcs.MessageError, match=rf"round {number} is averaged already"):
            server.finish()
        known.observe(update_D)
        client.arrived()
        got_D += update_D
    kept_D = client.errors_D + server.downlink.errors_D
    torch.testing.assert_close(got_D + kept_D, sent_D, atol=1e-4, rtol=0)


class AsksForTooMany(tcs.TCS):
    def own_count(self, shared):
        return self.dimension - shared + 1


def test_an_own_count_that_does_not_fit_is_refused_on_every_device(registry):
    tcs.register_scheme("Too many", phi_global=0.1, dense_warmup=False)(AsksForTooMany)
    known = tcs.Known("Too many", [100])
    with pytest.raises(ValueError, match=r"^own_count: got 101 .*from 0 to 100"):
        known.begin()
    assert known.status == tcs.CLOSED
