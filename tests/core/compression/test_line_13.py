"""Line 13 of Alg. 2 stands in one place, which every way of sending goes through."""

import pytest
import torch
from common import Alone, Bucket, alone_in_a_group, deltas_like_training

import tcs_core as tcs

SIZES, CLIENTS, ROUNDS = [40, 160], 2, 6
D = sum(SIZES)


class Given(torch.nn.Module):
    """Parameters whose gradient is what the batch says."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.zeros(size) for size in SIZES])

    def forward(self, gradient_D):
        return torch.cat(list(self.layers)) @ gradient_D


def with_a_compressor(name, monkeypatch, link=None):
    """What was meant in all, what was sent in all, and what is left in errors: (D,) each."""
    compressor = tcs.Compressor(name, SIZES, CLIENTS, link=link)
    meant_D = sent_D = torch.zeros(D)
    for deltas_ND in deltas_like_training(ROUNDS, CLIENTS, SIZES):
        meant_D = meant_D + deltas_ND.sum(0)
        sent_D = sent_D + CLIENTS * compressor.step(deltas_ND)
    return meant_D, sent_D, compressor.errors_ND.sum(0)


def with_bytes(name, monkeypatch):
    return with_a_compressor(name, monkeypatch, tcs.Link(tcs.unchanged))


def with_a_federation(name, monkeypatch):
    feed = list(zip(*deltas_like_training(ROUNDS, CLIENTS, SIZES), strict=True))
    made = tcs.Federation(Given(), feed, name, 1.0, loss=lambda model, batch: model(batch))
    meant, sent_D = [], torch.zeros(D)
    made.on_delta = lambda n, delta_D: meant.append(delta_D.clone())
    for _ in range(ROUNDS):
        sent_D = sent_D + CLIENTS * made.round()
    return torch.stack(meant).sum(0), sent_D, made.compressor.errors_ND.sum(0)


def with_the_hook(name, monkeypatch):
    """One rank; its values are not quantized."""
    alone_in_a_group(monkeypatch)
    state = tcs.TCSState(Alone(), phi_global=0.05, phi_local=0.02, start_iter=1)
    parameters = [torch.zeros(size) for size in SIZES]
    meant_D = sent_D = torch.zeros(D)
    for deltas_ND in deltas_like_training(ROUNDS, 1, SIZES):
        meant_D = meant_D + deltas_ND[0]
        sent_D = sent_D + tcs.tcs_hook(state, Bucket(deltas_ND[0].clone(), parameters)).wait()
    parts = state.state_dict()["parameters"].values()
    return meant_D, sent_D, torch.cat([part["errors"] for part in parts])


def by_halves(name, monkeypatch):
    """A server and clients that have a `Known` each."""
    server = tcs.Server(tcs.Known(name, SIZES))
    clients = [tcs.Client(tcs.Known(name, SIZES), n) for n in range(CLIENTS)]
    meant_D = sent_D = torch.zeros(D)
    for deltas_ND in deltas_like_training(ROUNDS, CLIENTS, SIZES):
        for known in (server.known, *(client.known for client in clients)):
            known.begin()
        for client, delta_D in zip(clients, deltas_ND, strict=True):
            server.add(client.number, client.send(delta_D))
        update_D, reply = server.finish()
        server.known.observe(update_D)
        for client in clients:
            client.receive(reply)
        meant_D, sent_D = meant_D + deltas_ND.sum(0), sent_D + CLIENTS * update_D
    return meant_D, sent_D, torch.stack([client.errors_D for client in clients]).sum(0)


WAYS = [with_a_compressor, with_bytes, with_a_federation, with_the_hook, by_halves]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5"])
def test_what_was_sent_and_what_is_left_is_what_was_meant(way, name, monkeypatch):
    meant_D, sent_D, left_D = way(name, monkeypatch)
    torch.testing.assert_close(sent_D + left_D, meant_D, rtol=0, atol=1e-4)
    assert left_D.any()
