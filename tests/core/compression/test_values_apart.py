"""Sections 5 and 6: no value is shared by accident, what was refused leaves nothing behind, and who
speaks is who it says it is."""

import dataclasses
import io

import numpy as np
import pytest
import tcs_lab.schemes.rivals  # noqa: F401  (DGC; and the variants)
import torch
from common import deltas_like_training, same_state, whole_state

import tcs_core as tcs

SIZES = [150, 50]
NAMES = ["TCS", "TCS-Q5", "top-K", "rand-K", "FedAvg", "FedAvg-Q5", "DGC"]


def scheme_of(name):
    return dataclasses.replace(tcs.Scheme.named(name), error_unit="difference")


def halves(name, rounds=2):
    """A server and two clients that share one `Known`, after some rounds."""
    known = tcs.Known(scheme_of(name), SIZES)
    client_type = known.rule.client_type or tcs.Client
    server, clients = tcs.Server(known), [client_type(known, n) for n in range(2)]
    for deltas_ND in deltas_like_training(rounds, 2, SIZES):
        known.begin()
        for n, client in enumerate(clients):
            server.add(n, client.send(deltas_ND[n]))
        update_D, _ = server.finish()
        for client in clients:
            client.arrived()
        known.observe(update_D)
    return known, server, clients


# Values that are shared by accident ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "TCS-D2"])
def test_the_update_and_the_reply_are_apart(name, dense):
    known, server, clients = halves(name)
    known.begin(dense)
    for n, client in enumerate(clients):
        server.add(n, client.send(torch.linspace(-1, 1, 200)))
    update_D, reply = server.finish()
    before = reply.values.clone(), update_D.clone()
    update_D.fill_(7.0)
    assert torch.equal(reply.values, before[0])
    reply.values.fill_(9.0)
    assert (update_D == 7.0).all()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K", "FedAvg"])
def test_what_a_client_received_and_the_reply_are_apart(name, dense):
    known, client = tcs.Known(name, SIZES), None
    client = tcs.Client(known, 0)
    known.begin(dense)
    sent = client.send(torch.linspace(-1, 1, 200))
    reply = dataclasses.replace(sent, sender=tcs.SERVER, codes=None, means=None)
    before = reply.values.clone()
    client.receive(reply).fill_(7.0)
    assert torch.equal(reply.values, before)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_becomes_of_a_message_changes_nothing_of_its_sender(name, dense):
    """A server may do with it what it likes."""
    left = []
    for is_changed in (False, True):
        known, _, clients = halves(name)
        known.begin(dense)
        message = clients[0].send(torch.linspace(-1, 1, 200))
        if is_changed:
            message.values.mul_(3.0)
            message.positions.zero_()
        clients[0].arrived()
        left.append(whole_state(*clients))
    assert same_state(*left)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_a_copy_of_all_that_it_holds(name):
    compressor = tcs.Compressor(scheme_of(name), SIZES, 2)
    for deltas_ND in deltas_like_training(3, 2, SIZES):
        compressor.step(deltas_ND)
    compressor.known.begin()
    compressor.clients[0].send(torch.ones(200))
    before = whole_state(compressor)

    def spoil(part):
        for one in part.values() if isinstance(part, dict) else part:
            if isinstance(one, torch.Tensor):
                one.zero_()
            elif isinstance(one, dict | list):
                spoil(one)
                if isinstance(one, list):
                    one.clear()

    spoil(compressor.state_dict())
    assert same_state(whole_state(compressor), before)


GRAPHS = {
    "a leaf": lambda: torch.linspace(-1, 1, 200, requires_grad=True),
    "a sum": lambda: torch.linspace(-1, 1, 200, requires_grad=True) + 1.0,
    "a product": lambda: 2.0 * torch.linspace(-1, 1, 200, requires_grad=True),
    "a view": lambda: torch.ones(3, 200, requires_grad=True)[1],
}


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_difference_with_a_graph_leaves_no_graph(name, graph, dense):
    known, server, clients = halves(name)
    for _ in range(2):
        delta_D = GRAPHS[graph]()
        before_D = delta_D.detach().clone()
        known.begin(dense)
        for n, client in enumerate(clients):
            server.add(n, client.send(delta_D))
        update_D, reply = server.finish()
        for client in clients:
            client.arrived()
        known.observe(update_D + 0.0 * delta_D)
        assert delta_D.requires_grad and torch.equal(delta_D, before_D)
        held = [update_D, reply.values, server.sum_D, *known.rule.state_dict().values()]
        for client in clients:
            held += [client.errors_D, *vars(client).values()]
        assert not any(isinstance(one, torch.Tensor) and one.requires_grad for one in held)


@pytest.mark.parametrize("call", ["withdraw", "arrived", "add", "receive"])
@pytest.mark.parametrize("dense", [False, True])
def test_no_other_call_takes_a_graph_over(call, dense):
    known, server, clients = halves("TCS")
    known.begin(dense)
    delta_D = torch.linspace(-1, 1, 200, requires_grad=True)
    message = clients[0].send(delta_D)
    with_graph = dataclasses.replace(message, values=message.values.requires_grad_() * 1.0)
    if call == "withdraw":
        clients[0].withdraw(delta_D)
    elif call == "arrived":
        clients[0].arrived(with_graph)
    elif call == "add":
        server.add(0, with_graph)
        assert not server.finish()[0].requires_grad
    else:
        assert (
            not clients[0].receive(dataclasses.replace(with_graph, sender=tcs.SERVER)).requires_grad
        )
    assert not clients[0].errors_D.requires_grad and not server.sum_D.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_a_compressor_takes_differences_with_a_graph(name):
    compressor = tcs.Compressor(scheme_of(name), SIZES, 2)
    for deltas_ND in deltas_like_training(3, 2, SIZES):
        deltas_ND.requires_grad_()
        before_ND = deltas_ND.detach().clone()
        assert not compressor.step(2.0 * deltas_ND).requires_grad
        assert not compressor.errors_ND.requires_grad and torch.equal(deltas_ND, before_ND)


# Errors that overflow ─────────────────────────────────────────────────────────────────────────────

HUGE = 3e38


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K", "TCS-Q5-L2", "DGC"])
@pytest.mark.parametrize("looks", [True, False])
def test_a_compressors_client_whose_errors_overflow_is_named_and_recovers(name, looks, monkeypatch):
    if not looks:
        monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    made, other = (tcs.Compressor(scheme_of(name), SIZES, 3) for _ in range(2))
    rounds = list(deltas_like_training(6, 3, SIZES))
    for one in (made, other):
        one.step(rounds[0], dense=name != "DGC"), one.step(rounds[1])
    spoiled = rounds[2].clone()
    spoiled[1] = HUGE
    made.clients[1].errors_D.fill_(HUGE)
    with pytest.raises(tcs.NotFiniteError, match=r"^client 1: ") as raised:
        made.step(spoiled)
    assert raised.value.client == 1 and raised.value.round == 2
    kept = [one for one in made.clients[1]._kept_tensors().values() if one is not None]
    assert all(one.isfinite().all() for one in kept)
    for deltas_ND in rounds[3:]:
        assert made.step(deltas_ND).isfinite().all()
    assert made.errors_ND.isfinite().all() and made.known.round == 6
    assert made.errors_ND[0].abs().max() < 1e3 and made.errors_ND[2].abs().max() < 1e3


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K", "DGC"])
@pytest.mark.parametrize("dense", [False, True])
def test_a_half_whose_errors_overflow_is_named_and_recovers(name, dense):
    known, server, clients = halves(name)
    known.begin(dense)
    clients[0].errors_D.fill_(HUGE)
    before = whole_state(clients[1], server)[1]
    with pytest.raises(tcs.NotFiniteError, match=r"^client 0: the update is not finite"):
        clients[0].send(torch.full((200,), HUGE))
    assert not clients[0].errors_D.any() and clients[0].in_flight is None
    assert same_state(whole_state(clients[1], server)[1], before)
    for _ in range(2):  # in the same round, and in the next one
        for n, client in enumerate(clients):
            server.add(n, client.send(torch.linspace(-1, 1, 200)))
        update_D, _ = server.finish()
        assert update_D.isfinite().all()
        for client in clients:
            client.arrived()
        known.observe(update_D)
        known.begin(dense)


@pytest.mark.parametrize("name", ["DGC"])
@pytest.mark.parametrize("value", [HUGE, -HUGE, 2.9e38])
def test_all_that_a_client_keeps_begins_anew_if_it_overflows(name, value):
    known, _, clients = halves(name)
    known.begin()
    clients[0].momentum_D.fill_(value)
    with pytest.raises(tcs.NotFiniteError):
        clients[0].send(torch.full((200,), value))
    assert clients[0].momentum_D.isfinite().all()
    assert clients[0].send(torch.ones(200)).values.isfinite().all()


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("name", ["TCS-D2", "TCS-D1", "STC"])
def test_a_server_whose_errors_overflow_is_named_and_recovers(name, looks, monkeypatch):
    if not looks:
        monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    made = tcs.Compressor(name, SIZES, 2)
    made.step(torch.ones(2, 200)), made.step(torch.ones(2, 200))
    made.server.downlink.errors_D.fill_(HUGE)
    failed = 0
    for _ in range(6):
        try:
            made.step(torch.full((2, 200), 1.5e38 if not failed else 1.0))
        except tcs.NotFiniteError as error:
            assert error.client == tcs.SERVER
            failed += 1
    assert failed == 1 and made.server.downlink.errors_D.isfinite().all()


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K", "FedAvg", "TCS-D2", "DGC"])
def test_after_a_sum_that_overflowed_the_rounds_go_on(name, dense, looks, monkeypatch):
    """Each of two clients' messages is finite. Only the errors of those who sent are given up."""
    if not looks:
        monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    made = tcs.Compressor(scheme_of(name), SIZES, 3)
    rounds = list(deltas_like_training(6, 3, SIZES))
    for deltas_ND in rounds[:3]:
        made.step(deltas_ND)
    errors_ND = made.errors_ND.clone()
    with pytest.raises(tcs.NotFiniteError, match=r"^server: the update is not finite"):
        made.step(torch.full((3, sum(SIZES)), HUGE), dense, clients=[0, 2])
    for n in (0, 2):
        kept = [one for one in made.clients[n]._kept_tensors().values() if one is not None]
        assert not any(one.any() for one in kept)
    assert torch.equal(made.errors_ND[1:2], errors_ND[1:2])
    for deltas_ND in rounds[3:]:
        assert made.step(deltas_ND).isfinite().all()


def test_a_client_that_was_not_heard_keeps_its_errors_when_the_others_sum_overflows():
    channel = lambda sender, data: data[:-1] if sender == 1 else data  # noqa: E731
    made = tcs.Compressor("TCS", SIZES, 3, link=tcs.Link(channel, on_bad="skip"))
    deltas_ND = torch.full((3, sum(SIZES)), HUGE)
    deltas_ND[1] = 1.0
    with pytest.raises(tcs.NotFiniteError, match=r"^server: "):
        made.step(deltas_ND)
    assert torch.equal(made.errors_ND[1], deltas_ND[1]) and not made.errors_ND[::2].any()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_average_that_was_not_finite_is_not_given_a_second_time(times, monkeypatch):
    """On a GPU what is not finite counts as 0 until the end of the round, which is then lost."""
    monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    known, server, clients = halves("TCS")
    known.begin()
    bad_D = torch.ones(200)
    bad_D[:times] = torch.nan
    server.add(0, clients[0].send(bad_D)), server.add(1, clients[1].send(torch.ones(200)))
    with pytest.raises(tcs.NotFiniteError, match=r"^client 0: "):
        server.finish()
    for _ in range(times):
        with pytest.raises(tcs.MessageError, match=r"is averaged already, .* or Known\.lose"):
            server.finish()
    known.lose()


# Who speaks, and what a class keeps ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [tcs.SERVER, tcs.SERVER + 1, -1, 1.0, True, "1", None])
def test_no_client_has_the_servers_number_or_none(number):
    with pytest.raises(ValueError, match=r"^number: got .*allowed: a whole number from 0 to 65534"):
        tcs.Client(tcs.Known("TCS", SIZES), number)


@pytest.mark.parametrize("rule", [tcs.TCS, tcs.RandK, tcs.TopK, tcs.RULES["dense"]])
@pytest.mark.parametrize("more", [{"seed": 3}, {"seed": 3, "device": "cpu"}, {"device": "cpu"}])
def test_a_rule_is_made_with_names(rule, more):
    scheme = tcs.Scheme.named("rand-K" if rule is tcs.RandK else "TCS")
    made = rule(scheme, SIZES, **more)
    assert made.seed == more.get("seed", 0) and made.device == "cpu"
    made.shared_mask()


class Counting(tcs.TCS):
    keeps = ("count",)
    count = 0

    def observe(self, update_D):
        super().observe(update_D)
        self.count += 1


class Twice(Counting):
    keeps = ("last",)
    last = None


class Both(Twice):
    keeps = ("count", *Twice.keeps)


class Silent(Both):
    pass


@pytest.mark.parametrize("rule", [Counting, Twice, Both, Silent])
def test_a_subclass_keeps_what_its_parents_keep(rule):
    scheme = tcs.Scheme.named("TCS", phi_global=0.1)
    made, other = rule(scheme, SIZES), rule(scheme, SIZES)
    for number in (1.0, 2.0):
        made.observe(torch.linspace(-number, 1, 200))
    state = made.state_dict()
    assert {"positions", "magnitudes_K", "count"} <= state.keys() and state["count"] == 2
    other.load_state_dict(state)
    assert torch.equal(other.shared_mask(), made.shared_mask()) and other.count == 2


def test_a_rule_does_not_load_text_for_a_number():
    rule = Counting(tcs.Scheme.named("TCS", phi_global=0.1), SIZES)
    before = rule.state_dict()
    with pytest.raises(ValueError, match="count: got 'two'"):
        rule.load_state_dict(before | {"count": "two"})
    assert same_state(rule.state_dict(), before)


class Averaging(tcs.TCS):
    """Keeps a vector with an entry per parameter, and one of any length."""

    keeps = ("average_D", "history")

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.average_D, self.history = torch.zeros(self.dimension), torch.zeros(3)


def test_only_a_vector_with_an_entry_per_parameter_has_a_fixed_length():
    rule = Averaging(tcs.Scheme.named("TCS", phi_global=0.1), SIZES)
    state = rule.state_dict()
    with pytest.raises(ValueError, match="average_D: got shape"):
        rule.load_state_dict(state | {"average_D": torch.zeros(199)})
    assert same_state(rule.state_dict(), state)
    rule.load_state_dict(state | {"history": torch.ones(5)})
    assert torch.equal(rule.history, torch.ones(5))


# A step at rate 0 ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("masks", [1, 4])
@pytest.mark.parametrize("name", ["TCS", "TCS-W10", "TCS-LF", "TCS-Stale"])
def test_an_update_of_zeros_keeps_the_mask(name, masks, looks, monkeypatch):
    if not looks:
        monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    known = tcs.Known(name, [150, 50])
    for update_D in (torch.linspace(-1, 1, 200), torch.linspace(3, 1, 200)):
        known.begin(mask_factor=masks)
        known.observe(update_D)
    before = known.rule.positions.clone(), known.rule.magnitudes_K
    for zero_D in (torch.zeros(200), -torch.zeros(200)):
        known.begin(mask_factor=masks)
        known.observe(zero_D)
        assert torch.equal(known.rule.positions, before[0])
        assert same_state(known.rule.magnitudes_K, before[1])
    known.begin()
    assert len(known.shared_K) == known.rule.k_global


@pytest.mark.parametrize("factors", [[10, 4, 1], [4, 10, 1], [10, 10, 3, 2, 1], [5, 1, 5, 1]])
def test_masks_shrink_to_the_largest_entries_of_the_last_update(factors):
    known, generator = tcs.Known("TCS-W10", [200]), torch.Generator().manual_seed(0)
    last_D = None
    for factor in factors:
        known.begin(mask_factor=factor)
        if last_D is not None and factor <= before:  # noqa: F821
            wanted_K = tcs.top_k_positions(last_D, 2 * factor)
            assert torch.equal(known.shared_K, wanted_K)
        last_D, before = torch.randn(200, generator=generator), factor  # noqa: F841
        known.observe(last_D)


def test_masks_shrink_again_if_the_updates_in_between_were_zero():
    known, last_D = tcs.Known("TCS-W10", [200]), torch.linspace(-1, 2, 200)
    known.begin(mask_factor=10)
    known.observe(last_D)
    for factor in (6, 3, 1):
        known.begin(mask_factor=factor)
        assert torch.equal(known.shared_K, tcs.top_k_positions(last_D, 2 * factor))
        known.observe(torch.zeros(200))


@pytest.mark.parametrize("clients_decide", [False, True])
def test_the_two_masks_of_a_sparse_warm_up_never_exceed_the_model(clients_decide, monkeypatch):
    """80 % and 80 % of the entries: the clients' own masks get the 20 % that are left, whether both
    sides work out the size or only the clients know it."""
    if clients_decide:
        monkeypatch.setattr(tcs.TCS, "own_count", lambda rule, shared: None)
    scheme = tcs.Scheme.named("TCS-W10", phi_global=0.2, phi_local=0.2)
    known = tcs.Known(scheme, [20])
    client = tcs.Client(known, 0)
    known.begin(dense=True, mask_factor=4)
    known.observe(torch.linspace(-1, 2, 20))
    known.begin(mask_factor=4)
    message = client.send(torch.linspace(1, 2, 20))
    assert len(known.shared_K) == 16 and len(message.positions) == 4
    assert len(message.values) == 20


@pytest.mark.parametrize("name", ["TCS", "top-K", "TCS-WLF", "TCS-Q5"])
@pytest.mark.parametrize("masks", [2, 10])
def test_a_scheme_without_a_sparse_warm_up_has_masks_of_one_size(name, masks):
    known = tcs.Known(name, SIZES)
    sizes = known.rule.k_global, known.rule.k_local
    known.begin(mask_factor=masks)
    assert (known.rule.k_global, known.rule.k_local) == sizes


# Numbers as people have them ──────────────────────────────────────────────────────────────────────

KINDS = {"numpy": np.int64, "small numpy": np.int16, "tensor": torch.tensor, "array": np.array}
REALS = {"numpy": np.float64, "tensor": lambda n: torch.tensor(n, dtype=torch.float64),
         "array": np.array}  # fmt: skip


def saved(state):
    """Through a file, as torch.load reads it by default."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("real", REALS)
def test_numbers_of_numpy_and_torch_are_plain_numbers(kind, real):
    whole, number = KINDS[kind], REALS[real]
    scheme = tcs.Scheme.named(
        "TCS", local_steps=whole(2), value_bits=whole(5), phi_global=number(0.1), phi_local=number(0.05),
    )  # fmt: skip
    plain = tcs.Scheme.named("TCS", local_steps=2, value_bits=5, phi_global=0.1, phi_local=0.05)
    assert scheme == plain and hash(scheme) == hash(plain)
    assert all(type(v) in (int, float, bool, str, type(None)) for v in vars(scheme).values())
    sizes = [whole(150), whole(50)]
    weights = [number(0.25), number(0.5), number(0.25)]
    made = tcs.Compressor(scheme, sizes, whole(3), seed=whole(7), weights=weights)
    other = tcs.Compressor(plain, SIZES, 3, seed=7, weights=[0.25, 0.5, 0.25])
    for deltas_ND in deltas_like_training(2, 3, SIZES):
        chosen = [whole(0), whole(2)]
        assert torch.equal(
            made.step(deltas_ND, clients=chosen), other.step(deltas_ND, clients=[0, 2])
        )
    assert made.traffic == other.traffic and type(made.traffic.heard[0]) is int
    other.load_state_dict(saved(made.state_dict()))
    known = tcs.Known(scheme, sizes, whole(7))
    client = tcs.Client(known, whole(2))
    assert type(client.number) is int and type(known.seed) is int
    tcs.Client(tcs.Known(plain, SIZES, 7), 2).load_state_dict(saved(client.state_dict()))
    tcs.Known(plain, SIZES, 7).load_state_dict(saved(known.state_dict()))
    assert all(type(weight) is float for weight in made.server.weights)
    checked = made.check_clients([whole(1), whole(0)])
    assert checked == [1, 0] and all(type(n) is int for n in checked)
    assert made.round(deltas_ND.__getitem__, [whole(1)]).any()


WRONG = [True, 2.0, np.float64(2.0), torch.tensor(2.0), np.bool_(True), torch.tensor(True), "2", None,
         np.array([2]), torch.tensor([2])]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_bools_and_floats_are_no_whole_numbers(wrong):
    makes = {
        "local_steps": lambda: tcs.Scheme.named("TCS", local_steps=wrong),
        "value_bits": lambda: tcs.Scheme.named("TCS", value_bits=wrong),
        "clients": lambda: tcs.Compressor("TCS", SIZES, wrong),
        "seed": lambda: tcs.Known("TCS", SIZES, wrong),
        "seed ": lambda: tcs.Compressor("TCS", SIZES, 2, seed=wrong),
        "layer_sizes": lambda: tcs.Known("TCS", [150, wrong]),
        "number": lambda: tcs.Client(tcs.Known("TCS", SIZES), wrong),
        "clients ": lambda: tcs.Compressor("TCS", SIZES, 3).check_clients([0, wrong]),
    }
    for key, make in makes.items():
        with pytest.raises(ValueError, match=rf"^{key.strip()}: got .*allowed: "):
            make()


@pytest.mark.parametrize("wrong", [True, np.bool_(True), "1", None, float("nan"), 0, -1, 1e19])
def test_weights_are_positive_numbers(wrong):
    for make in (
        lambda: tcs.Compressor("TCS", SIZES, 2, weights=[1.0, wrong]),
        lambda: tcs.Server(tcs.Known("TCS", SIZES), [wrong]),
    ):
        with pytest.raises(ValueError, match=r"^weights: got "):
            make()


@pytest.mark.parametrize("chosen", [[3], [0, 0], [-1], [], [True, 0], [0.0], ["0"]])
def test_a_compressors_round_asks_only_clients_that_it_has(chosen):
    made = tcs.Compressor("TCS", SIZES, 3)
    before = whole_state(made)
    with pytest.raises(ValueError, match=r"^clients: got "):
        made.round(lambda n: torch.ones(200), chosen)
    assert same_state(whole_state(made), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("real", REALS)
def test_numbers_of_numpy_and_torch_are_taken_by_the_functions_of_every_section(kind, real):
    whole, number = KINDS[kind], REALS[real]
    values = torch.randn(50, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([1, 5, 40])
    same = [
        lambda i, r: tcs.fractional_quantize(values, i(4))[0],
        lambda i, r: tcs.top_k_positions(values, i(4)),
        lambda i, r: tcs.layerwise_top_k_positions(values, i(9), [i(20), i(30)], r(0.1)),
        lambda i, r: tcs.random_positions(i(3), i(50), i(7)),
        lambda i, r: tcs.positions_to_mask(positions, i(50)),
        lambda i, r: tcs.encode_positions(positions, i(50), i(8)),
        lambda i, r: tcs.decode_positions(tcs.encode_positions(positions, 50, 8), i(50), i(8)),
        lambda i, r: torch.tensor([tcs.bit_budget("TCS-Q5", i(5000)), tcs.kept(r(0.1), i(50))]),
        lambda i, r: tcs.Message.of(values[:3], positions, i(5), i(2), i(4)).codes,
    ]  # fmt: skip
    for function in same:
        assert torch.equal(function(whole, number), function(int, float))
    sent = [tcs.Message.dense_of(values, whole(1), whole(2)), tcs.Message.dense_of(values, 1, 2)]
    assert sent[0] == sent[1] and type(sent[0].round) is type(sent[0].sender) is int
    sums = torch.zeros(2, 50)
    sent[0].add_to_(sums[0], None, number(0.5)), sent[1].add_to_(sums[1], None, 0.5)
    assert torch.equal(*sums)
    made = tcs.Compressor("TCS", SIZES, 2)
    made.step(torch.ones(2, 200))
    made.scale_errors_(number(0.5))
    state = tcs.TCSState(None, number(0.25), number(0.125), whole(3))
    assert type(state.start_iter) is int
    tcs.TCSState(None, 0.25, 0.125, 3).load_state_dict(saved(state.state_dict()))


class Kept(tcs.TCS):
    keeps = ("count", "share", "seen", "history")
    count, share, seen = np.int64(3), np.array(0.5), [np.float32(1.5), {"n": np.array(2)}]
    history = np.zeros(3)


def test_what_a_rule_or_an_optimizer_keeps_is_saved_as_plain_numbers(registry):
    tcs.register_scheme("Kept")(Kept)
    made = tcs.Compressor("Kept", SIZES, 2)
    made.load_state_dict(made.state_dict())
    state = made.state_dict()
    with pytest.raises(ValueError, match=r"^state: rule: seen: got 3 .* allowed: a list"):
        made.known.rule.check_state(state["known"]["rule"] | {"seen": 3})
    state["known"]["rule"]["history"] = None  # torch.load would refuse an array
    state = saved(state)
    state["known"]["rule"]["history"] = np.ones(3)
    assert state["known"]["rule"]["count"] == 3 and state["known"]["rule"]["seen"] == [
        1.5,
        {"n": 2},
    ]
    made.load_state_dict(state)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=np.array(0.1))  # noqa: E731
    batches = [[torch.ones(2, 3)]] * 2
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    for more in ({"local_optimizer": sgd}, {"schedule": 0.1, "server_optimizer": sgd}):
        federation = tcs.Federation(torch.nn.Linear(3, 1), batches, "TCS", loss=loss, **more)
        federation.round()
        federation.load_state_dict(saved(federation.state_dict()))
