"""Section 6 by halves: a client and a server in processes of their own, with only bytes between them."""

import dataclasses
import io

import pytest
import torch
from common import deltas_like_training, same_state
from processes import FORKSERVER

import tcs_core as tcs

LAYERS, ROUNDS, DENSE = [120, 30, 100, 1, 49], 8, 4
NAMES = ["TCS", "TCS-Q5", "TCS-LF-Q5", "top-K-Q5", "rand-K", "FedAvg"]


def saved(*sides):
    """Their states as a file would hold them."""
    file = io.BytesIO()
    torch.save([side.state_dict() for side in sides], file)
    return file.getvalue()


def loaded(data, *sides):
    for side, state in zip(sides, torch.load(io.BytesIO(data), weights_only=True), strict=True):
        side.load_state_dict(state)


def new_client(name, number):
    known = tcs.Known(name, LAYERS)
    return known, tcs.Client(known, number)


def client_process(name, number, pipe, killed):
    """A client alone: after round `killed`, and before its reply comes in the next, all that it was
    is gone but for its state."""
    torch.set_num_threads(1)
    known, client = new_client(name, number)
    for t, deltas_ND in enumerate(deltas_like_training(ROUNDS, 2, LAYERS)):
        known.begin(dense=t == DENSE)
        pipe.send(known.to_bytes(client.send(deltas_ND[number])))
        if t == killed:
            state = saved(known, client)
            known, client = new_client(name, number)
            loaded(state, known, client)
            known.begin(dense=t == DENSE)  # the round that it was in
        client.receive(known.from_bytes(pipe.recv(), tcs.SERVER))
        if t == killed + 1:
            state = saved(known, client)
            known, client = new_client(name, number)
            loaded(state, known, client)
    pipe.send(None if client.errors_D is None else client.errors_D.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_client_and_server_in_two_processes_end_in_the_bits_of_one(name):
    """The client is killed and resumed, with a message on its way and without."""
    whole = tcs.Compressor(name, LAYERS, 2)
    known = tcs.Known(name, LAYERS)
    server, near = tcs.Server(known), tcs.Client(known, 0)
    ours, theirs = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=client_process, args=(name, 1, theirs, 2))
    process.start()
    for t, deltas_ND in enumerate(deltas_like_training(ROUNDS, 2, LAYERS)):
        expected_D = whole.step(deltas_ND, dense=t == DENSE)
        known.begin(dense=t == DENSE)
        server.add(0, near.send(deltas_ND[0]))
        server.add(1, known.from_bytes(ours.recv(), 1))
        update_D, reply = server.finish()
        ours.send(known.to_bytes(reply))
        near.arrived()
        known.observe(update_D)
        assert torch.equal(update_D, expected_D)
    errors = [near.errors_D, ours.recv()]
    process.join(30)
    assert process.exitcode == 0
    if whole.scheme.keeps_errors:
        assert torch.equal(near.errors_D, whole.errors_ND[0])
        assert errors[1] == whole.errors_ND[1].tolist()
    else:
        assert errors == [None, None]


# What a network does ──────────────────────────────────────────────────────────────────────────────


class Sides:
    """A server and clients, each with a `Known` of its own, and only bytes between them."""

    def __init__(self, name="TCS-Q5", clients=3, **of_client_2):
        self.known = tcs.Known(name, LAYERS)
        self.server = tcs.Server(self.known)
        settings = [{}] * (clients - 1) + [of_client_2]
        self.clients = [
            tcs.Client(tcs.Known(name, LAYERS, **own), n) for n, own in enumerate(settings)
        ]

    def begin(self, dense=False):
        for known in (self.known, *(client.known for client in self.clients)):
            known.begin(dense)

    def sent(self, deltas_ND):
        return [
            client.known.to_bytes(client.send(delta_D))
            for client, delta_D in zip(self.clients, deltas_ND, strict=True)
        ]

    def round(self, deltas_ND, lost=(), away=(), dense=False):
        """The update; messages of the `lost` do not arrive, replies do not reach the `away`."""
        self.begin(dense)
        for n, data in enumerate(self.sent(deltas_ND)):
            if n not in lost:
                self.server.add(n, self.known.from_bytes(data, n))
        heard = list(self.server.heard)
        update_D, reply = self.server.finish()
        data = self.known.to_bytes(reply)
        self.known.observe(update_D)
        for n, client in enumerate(self.clients):
            if n not in away:
                said = client.known.from_bytes(data, tcs.SERVER)
                assert torch.equal(client.receive(said, heard=n in heard), update_D)
        return update_D

    def errors(self):
        return torch.stack([client.errors_D for client in self.clients])


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K-Q5", "rand-K"])
def test_a_lost_upload_loses_nothing(name):
    """What was heard and what is in the errors is all that ever was; also in dense rounds."""
    sides, total_D = Sides(name), torch.zeros(sum(LAYERS)).double()
    sent_D = torch.zeros(sum(LAYERS)).double()
    for t, deltas_ND in enumerate(deltas_like_training(12, 3, LAYERS)):
        before_ND, lost = sides.errors(), [t % 3] if t % 2 else []
        update_D = sides.round(deltas_ND, lost, dense=t == 5)
        total_D += deltas_ND.double().sum(0)
        sent_D += (3 - len(lost)) * update_D.double()
        for n in lost:
            assert torch.equal(sides.errors()[n], before_ND[n] + deltas_ND[n])
    left_D = sides.errors().double().sum(0)
    torch.testing.assert_close(sent_D + left_D, total_D, rtol=0, atol=1e-4)
    assert left_D.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "rand-K", "FedAvg", "FedAvg-Q5"])
def test_what_is_not_finite_is_refused_before_anything_is_added(name, bad):
    sides = Sides(name)
    one_ND, two_ND = deltas_like_training(2, 3, LAYERS)
    sides.round(one_ND)
    client, delta_D = sides.clients[1], two_ND[1].clone()
    before = client.state_dict()
    delta_D[7] = bad
    sides.begin()
    with pytest.raises(tcs.NotFiniteError, match=r"^client 1: the update is not finite \(NaN"):
        client.send(delta_D)
    with pytest.raises(ValueError, match=r"^delta_D: got shape \(2,\), allowed: \(300,\)$"):
        client.send(delta_D[:2])
    assert same_state(client.state_dict(), before)
    assert len(client.send(two_ND[1]).values)  # the round is still its own


@pytest.mark.parametrize(
    ("changes", "text"),
    [(lambda _, known: {"round": 1}, "round: got 1, allowed: 2"),
     (lambda _, known: {"sender": 1}, "sender: got 1, allowed: 65535"),
     (lambda _, known: {"dense": True}, "dense: got True, allowed: False"),
     (lambda _, known: {"values": torch.ones(3)}, "values: got 3, allowed: "),
     (lambda reply, known: {"values": reply.values * torch.nan}, "a value is NaN"),
     (lambda reply, known: {"positions": known.shared_K[: len(reply.positions)]}, "own mask: got entries of"),
     (lambda reply, known: {"positions": reply.positions + 300}, "positions: got ")],
)  # fmt: skip
def test_a_reply_of_another_round_changes_nothing(changes, text):
    sides = Sides("TCS")
    *rounds, last_ND = deltas_like_training(3, 3, LAYERS)
    for deltas_ND in rounds:
        sides.round(deltas_ND)
    sides.begin()
    client = sides.clients[1]
    for n, delta_D in enumerate(last_ND):
        sides.server.add(n, sides.clients[n].send(delta_D))
    _, reply = sides.server.finish()
    before, known = client.state_dict(), client.known.state_dict()
    with pytest.raises(tcs.MessageError, match=f"^server: message: {text}"):
        client.receive(dataclasses.replace(reply, **changes(reply, client.known)))
    assert same_state(client.state_dict(), before)
    assert client.known.round == known["round"] and client.known.status == tcs.OPEN
    assert client.receive(reply).any()


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K", "rand-K"])
def test_a_client_that_missed_rounds_is_told_what_is_known_and_goes_on(name):
    sides = Sides(name)
    rounds = list(deltas_like_training(7, 3, LAYERS))
    for deltas_ND in rounds[:3]:
        sides.round(deltas_ND)
    late = sides.clients[2]
    errors_D, everybody = late.errors_D.clone(), list(sides.clients)
    sides.clients = everybody[:2]
    for deltas_ND in rounds[3:5]:  # it is away
        sides.round(deltas_ND[:2])
    assert late.known.round == 3
    late.known.load_state_dict(sides.known.state_dict())
    sides.clients = everybody
    assert torch.equal(late.errors_D, errors_D)
    for deltas_ND in rounds[5:]:
        sides.round(deltas_ND)  # it says and understands the same as all
    assert late.known.round == sides.known.round == 7


def test_a_client_whose_reply_was_lost_has_not_been_heard_of_and_may_be_told():
    """It holds its message until it knows; told what is known, it says itself that it arrived."""
    sides = Sides("TCS")
    rounds = list(deltas_like_training(4, 3, LAYERS))
    for deltas_ND in rounds[:2]:
        sides.round(deltas_ND)
    expected, client = Sides("TCS"), sides.clients[1]
    for deltas_ND in rounds[:3]:
        expected.round(deltas_ND)
    sides.round(rounds[2], away=[1])
    assert client.state_dict()["in_flight"] is not None
    client.known.load_state_dict(sides.known.state_dict())
    client.arrived()
    assert torch.equal(client.errors_D, expected.clients[1].errors_D)
    assert torch.equal(sides.round(rounds[3]), expected.round(rounds[3]))


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "rand-K"])
@pytest.mark.parametrize("dense", [False, True])
def test_a_step_that_is_withdrawn_leaves_errors_as_they_were(name, dense):
    sides = Sides(name)
    one_ND, two_ND, three_ND = deltas_like_training(3, 3, LAYERS)
    sides.round(one_ND), sides.round(two_ND)
    client = sides.clients[0]
    before_D = client.errors_D.clone()
    sides.begin(dense)
    client.send(three_ND[0])
    client.withdraw(three_ND[0])
    torch.testing.assert_close(client.errors_D, before_D, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="nothing that could have arrived"):
        client.arrived()


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K", "rand-K", "FedAvg", "FedAvg-Q5"])
@pytest.mark.parametrize("dense", [False, True])
def test_what_a_message_holds_is_no_view_of_errors_or_differences(name, dense):
    known, client = new_client(name, 0)
    one_ND, two_ND = deltas_like_training(2, 1, LAYERS)
    known.begin()
    sent = client.send(one_ND[0])
    client.receive(dataclasses.replace(sent, sender=tcs.SERVER, codes=None, means=None))
    delta_D = two_ND[0].clone()
    known.begin(dense)
    message = client.send(delta_D)
    held = [t for t in (client.errors_D, delta_D) if t is not None]
    places = {t.untyped_storage().data_ptr() for t in held}
    assert message.values.untyped_storage().data_ptr() not in places
    before = message.values.clone()
    for tensor in held:
        tensor.fill_(7.0)
    assert torch.equal(message.values, before)


def test_a_server_that_takes_up_a_state_forgets_what_had_come():
    sides, (deltas_ND,) = Sides("TCS"), deltas_like_training(1, 3, LAYERS)
    sides.begin()
    messages = [c.send(delta_D) for c, delta_D in zip(sides.clients, deltas_ND, strict=True)]
    sides.server.add(0, messages[0])
    sides.server.load_state_dict(sides.server.state_dict())
    for n, message in enumerate(messages):
        sides.server.add(n, message)
    torch.testing.assert_close(sides.server.finish()[0], deltas_ND.mean(0))


def test_a_servers_sending_side_is_saved_and_scaled_with_it():
    scheme = tcs.Scheme.named("TCS", down_value_bits=5)
    one, other = (tcs.Server(tcs.Known(scheme, LAYERS)) for _ in range(2))
    one.downlink.errors_D.fill_(3.0)
    loaded(saved(one), other)
    other.scale_(0.5)
    assert one.downlink.errors_D.eq(3.0).all() and other.downlink.errors_D.eq(1.5).all()


def test_what_is_in_flight_is_scaled_with_the_errors():
    scheme = tcs.Scheme.named("TCS-Q3", phi_global=0.2, phi_local=0.2, dense_warmup=False)
    known = tcs.Known(scheme, [20])
    client, delta_D = tcs.Client(known), torch.randn(20)
    known.begin()
    message = client.send(delta_D)
    client.scale_(2.0)
    client.arrived()
    torch.testing.assert_close(client.errors_D, 2.0 * (delta_D - known.expand_message(message)))


def test_a_server_forgets_what_came_in_a_round_that_was_never_finished():
    sides, (one_ND, two_ND) = Sides("TCS"), deltas_like_training(2, 3, LAYERS)
    sides.begin()
    sides.server.add(0, sides.clients[0].send(one_ND[0]))
    for known in (sides.known, *(c.known for c in sides.clients)):
        known.lose()
    sides.begin()
    meant_ND = two_ND.clone()
    meant_ND[0] += one_ND[0]  # its message was lost
    for n, client in enumerate(sides.clients):
        sides.server.add(n, client.send(two_ND[n]))
    torch.testing.assert_close(sides.server.finish()[0], meant_ND.mean(0))


def test_a_client_is_not_heard_in_a_round_in_which_it_has_not_sent():
    """Its message of a round that failed is still on its way: nothing of it has arrived."""
    sides, (one_ND, two_ND) = Sides("TCS"), list(deltas_like_training(2, 3, LAYERS))
    sides.round(one_ND)
    client = sides.clients[1]
    sides.begin()
    client.send(two_ND[1])
    for known in (sides.known, *(c.known for c in sides.clients)):
        known.lose()
    sides.begin()
    sides.server.add(0, sides.clients[0].send(two_ND[0]))
    _, reply = sides.server.finish()
    before = client.state_dict()
    with pytest.raises(
        ValueError,
        match=r"^client 1: receive: heard: got True, but it has sent nothing in round 2, allowed: heard=False$",
    ):
        client.receive(reply)
    assert same_state(client.state_dict(), before)
    assert client.receive(reply, heard=False).any()


def test_bytes_of_another_round_name_the_round_though_the_mask_differs_too():
    """A client that has missed rounds has another mask, so the tag of its messages is another one."""
    sides = Sides("TCS")
    rounds = list(deltas_like_training(4, 3, LAYERS))
    sides.round(rounds[0])
    late = sides.clients[2]
    sides.round(rounds[1])
    ahead, _ = new_client("TCS", 1)
    loaded(saved(sides.clients[1].known), ahead)
    sides.begin()
    data = late.known.to_bytes(late.send(rounds[2][2]))
    ahead.lose(), ahead.begin()
    with pytest.raises(
        tcs.MessageError, match=r"round: got 2, allowed: 3 \(a client that has missed rounds"
    ):
        ahead.from_bytes(data, 2)


class OwnClient(tcs.Client):
    pass


class OwnServer(tcs.Server):
    pass


class OwnSides(tcs.TCS):
    client_type, server_type = OwnClient, OwnServer


def test_a_scheme_with_classes_of_its_own_is_refused_by_the_plain_ones(monkeypatch):
    """Otherwise the plain client would compress in its own way, in silence."""
    for name in ("RULES", "FAMILIES"):
        monkeypatch.setattr(tcs, name, dict(getattr(tcs, name)))
    tcs.register_scheme("Own sides")(OwnSides)
    known = tcs.Known("Own sides", LAYERS)
    with pytest.raises(
        ValueError,
        match=r"^Own sides: got a Client, allowed: a OwnClient \(make it by known\.rule\.client_type",
    ):
        tcs.Client(known, 0)
    with pytest.raises(
        ValueError,
        match=r"^Own sides: got a Server, allowed: a OwnServer \(make it by known\.rule\.server_type",
    ):
        tcs.Server(known)
    client, server = known.rule.client_type(known, 0), known.rule.server_type(known)
    known.begin()
    server.add(0, client.send(torch.ones(sum(LAYERS))))
    assert torch.equal(server.finish()[0], torch.ones(sum(LAYERS)))
    compressor = tcs.Compressor("Own sides", LAYERS, 2)
    assert type(compressor.clients[0]) is OwnClient and type(compressor.server) is OwnServer
