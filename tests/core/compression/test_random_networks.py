"""Section 6: three sides apart, on a network that loses, changes and replays what it carries, have
the bits of one process on the same network."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import tcs_core as tcs

NAMES = ["TCS", "TCS-Q5", "TCS-LF", "TCS-PLF-Q2", "top-K", "top-K-Q5", "rand-K-Q3", "FedAvg-Q4"]
SHARES = {"phi_global": [0.05, 0.3, 0.9, 1.0], "phi_local": [0.02, 0.2]}


class Network:
    """What becomes of a client's message: nothing, or a bit is turned, it is cut, or an older one
    comes in its place."""

    def __init__(self, draw):
        self.draw, self.before, self.sent, self.arrived = draw, {}, {}, {}

    def carry(self, sender, data):
        """The same for the same message, whichever of the two trainings it is of."""
        if sender == tcs.SERVER:
            return data
        if sender not in self.arrived:
            fate = self.draw(st.sampled_from(["arrives", "arrives", "turned", "cut", "replayed"]))
            place = self.draw(st.integers(0, len(data) - 1))
            turned = data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]
            arrived = {"arrives": data, "turned": turned, "cut": data[:place]}
            self.arrived[sender] = arrived.get(fate, self.before.get(sender, b""))
            self.sent[sender] = data
        assert self.sent[sender] == data  # both have sent the same bytes
        return self.arrived[sender]

    def next_round(self):
        self.before |= self.sent
        self.sent, self.arrived = {}, {}


class Apart:
    """A server and clients that have nothing in common but messages."""

    def __init__(self, scheme, sizes, clients, weights):
        self.new_known = lambda: tcs.Known(scheme, sizes, seed=4)
        self.server = tcs.Server(self.new_known(), weights)
        self.clients = [tcs.Client(self.new_known(), n) for n in range(clients)]

    def round(self, deltas_ND, chosen, dense, network):
        """The update, or None if nobody was heard; the reply; and who was heard."""
        known = self.server.known
        known.begin(dense)
        for n in chosen:
            client = self.clients[n]
            client.known.begin(dense)
            data = network.carry(n, client.known.to_bytes(client.send(deltas_ND[n])))
            try:
                self.server.add(n, known.from_bytes(data, n))
            except tcs.MessageError:
                continue
        heard = list(self.server.heard)
        if not heard:
            known.lose()
            return None, b"", heard
        update_D, reply = self.server.finish()
        data = known.to_bytes(reply)
        known.observe(update_D)
        return update_D, data, heard

    def receive(self, n, data, heard, took_part, dense):
        client = self.clients[n]
        if not took_part:
            client.known.begin(dense)  # it listens
        return client.receive(client.known.from_bytes(data, tcs.SERVER), heard)

    def told(self, n):
        """It has missed rounds."""
        self.clients[n].known.load_state_dict(self.server.known.state_dict())

    def go_on_in_new_objects(self):
        known, clients = self.server.known.state_dict(), self.clients
        self.server = tcs.Server(self.new_known(), self.server.weights)
        self.server.known.load_state_dict(known)
        self.clients = [tcs.Client(self.new_known(), client.number) for client in clients]
        for new, old in zip(self.clients, clients, strict=True):
            new.known.load_state_dict(old.known.state_dict())
            new.load_state_dict(old.state_dict())


def drawn_scheme(draw):
    scheme = tcs.Scheme.named(draw(st.sampled_from(NAMES)))
    if scheme.rule == "dense":
        return scheme
    changes = {
        key: draw(st.sampled_from(of_key))
        for key, of_key in SHARES.items()
        if getattr(scheme, key) is not None
    }
    keeps = draw(st.booleans())
    return tcs.Scheme.named(scheme.name, error_accumulation=keeps, **changes)


@given(data=st.data())
def test_any_network_any_clients_any_order(data):
    draw = data.draw
    clients = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    weights = [1.0 + n for n in range(clients)] if draw(st.booleans()) else None
    scheme, network = drawn_scheme(draw), Network(draw)
    link = tcs.Link(network.carry, "skip")
    one = tcs.Compressor(scheme, sizes, clients, seed=4, link=link, weights=weights)
    apart = Apart(scheme, sizes, clients, weights)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    everyone = list(range(clients))
    for _ in range(draw(st.integers(2, 6))):
        deltas_ND = torch.randn(clients, sum(sizes), generator=generator)
        chosen = sorted(draw(st.sets(st.sampled_from(everyone), min_size=1)))
        dense = draw(st.booleans())
        update_D, reply, heard = apart.round(deltas_ND, chosen, dense, network)
        try:
            theirs_D = one.step(deltas_ND, dense, chosen)
        except tcs.MessageError:
            assert not heard
            for n in everyone:
                apart.told(n)
            network.next_round()
            continue
        assert torch.equal(update_D, theirs_D) and list(one.traffic.heard) == heard
        for n in everyone:
            if n in chosen or draw(st.booleans()):
                got_D = apart.receive(n, reply, n in heard, n in chosen, dense)
                assert torch.equal(got_D, update_D)
            else:
                apart.told(n)
            if scheme.keeps_errors:
                assert torch.equal(apart.clients[n].errors_D, one.errors_ND[n])
        if draw(st.booleans()):
            apart.go_on_in_new_objects()
        network.next_round()
