"""Section 6: what a side holds, saves and takes up; whom it refuses."""

import copy

import pytest
import torch
from common import deltas_like_training, same_state
from torch import nn

import tcs_core as tcs

LAYERS = [1200, 300, 1000, 10, 490]


def played(name, seed=0, clients=2, sizes=LAYERS, rounds=3):
    compressor = tcs.Compressor(name, sizes, clients, seed=seed)
    for deltas_ND in deltas_like_training(rounds, clients, sizes):
        compressor.step(deltas_ND)
    return compressor


def test_a_state_loads_whatever_the_size_of_the_mask_is_now():
    """In a sparse warm-up, a mask can have all entries."""
    scheme = tcs.Scheme.named("TCS", phi_global=0.1, phi_local=0.01, warmup_masks=10)
    compressor, states = tcs.Compressor(scheme, [100], 2), []
    for factor in (10, 1, 1):
        compressor.round(lambda n: torch.randn(100), [0, 1], mask_factor=factor)
        states.append(compressor.state_dict())
    for state in (states[0], states[2], states[0]):
        compressor.load_state_dict(state)
        assert same_state(compressor.state_dict(), state)


@pytest.mark.parametrize("name", ["FedAvg", "FedSGD", "Baseline", "top-K"])
def test_a_scheme_without_errors_holds_no_memory_for_them(name):
    changes = {"error_accumulation": False} if name == "top-K" else {}
    clients = 1 if name == "Baseline" else 1000
    compressor = tcs.Compressor(tcs.Scheme.named(name, **changes), LAYERS, clients)
    assert compressor.errors_ND.shape == (0, 3000)
    assert all(client.errors_D is None for client in compressor.clients.values())
    assert tcs.Client(compressor.known).errors_D is None
    assert tcs.Compressor("TCS", LAYERS, 3).errors_ND.shape == (3, 3000)


def test_the_rows_of_all_errors_are_the_clients_own():
    compressor = played("TCS")
    for row_D, client in zip(compressor.errors_ND, compressor.clients.values(), strict=True):
        assert row_D.data_ptr() == client.errors_D.data_ptr() and row_D.any()


@pytest.mark.parametrize(
    ("other", "text"),
    [(lambda: played("TCS-Q5"), "scheme: "), (lambda: played("top-K"), "scheme: "),
     (lambda: played(tcs.Scheme.named("TCS", phi_local=2e-3)), "scheme: "),
     (lambda: played("TCS", seed=1), "seed: got 1, allowed: 0$"),
     (lambda: played("TCS", sizes=[3000]), r"layer_sizes: got \[3000\], allowed: \[1200, "),
     (lambda: played("TCS", sizes=[300, 1200, 1000, 10, 490]), r"layer_sizes: got \[300, 1200")],
)  # fmt: skip
def test_the_state_of_another_scheme_seed_or_model_is_refused_with_nothing_changed(other, text):
    state, one = other().state_dict(), played("TCS", rounds=5)
    before = one.state_dict()
    with pytest.raises(ValueError, match=f"^state: {text}"):
        one.load_state_dict(state)
    with pytest.raises(ValueError, match=f"^state: {text}"):
        one.known.load_state_dict(state["known"])
    assert same_state(one.state_dict(), before)


def test_a_state_of_other_clients_or_errors_is_refused_with_nothing_changed():
    one, state = played("TCS", rounds=5), played("TCS").state_dict()
    before = one.state_dict()
    fewer = state | {"clients": state["clients"][:1]}
    short = [state["clients"][0], state["clients"][1] | {"errors_D": torch.zeros(7)}]
    none = [state["clients"][0] | {"errors_D": None}, state["clients"][1]]
    rule = {key: v for key, v in state["known"]["rule"].items() if key != "positions"}
    for wrong, text in (
        (fewer, r"state: clients: got 1, allowed: 2$"),
        (
            state | {"clients": short},
            r"state: errors_D: got shape \(7,\) torch.float32, allowed: \(3000,\)",
        ),
        (state | {"clients": none}, r"state: errors_D: got None, allowed: a tensor \(3000,\)"),
        (state | {"known": state["known"] | {"rule": rule}}, "state: rule: positions is missing$"),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            one.load_state_dict(wrong)
        assert same_state(one.state_dict(), before)


@pytest.mark.parametrize("name", ["TCS-Q5", "rand-K", "top-K"])
def test_a_state_is_by_value(name):
    """The best round's can be taken up again, as often as one likes."""
    one = played(name)
    state, kept = one.state_dict(), copy.deepcopy(one.state_dict())
    *_, next_ND, last_ND = deltas_like_training(5, 2, LAYERS)
    expected = [one.step(next_ND), one.step(last_ND)]
    assert same_state(state, kept) and not same_state(one.state_dict(), kept)
    for _ in range(2):
        one.load_state_dict(state)
        assert same_state(one.state_dict(), kept)
        assert all(
            torch.equal(one.step(d), e) for d, e in zip((next_ND, last_ND), expected, strict=True)
        )
        assert same_state(state, kept)


def test_a_client_saves_a_message_that_nobody_has_acknowledged():
    compressor = played("TCS-Q5")
    known, client = compressor.known, compressor.clients[1]
    known.begin()
    message = client.send(torch.ones(3000))
    state = client.state_dict()
    other = tcs.Client(known, 1)
    other.load_state_dict(state)
    client.arrived(), other.arrived()
    assert torch.equal(client.errors_D, other.errors_D)
    assert torch.equal(state["in_flight"]["values_K"], message.values)
    with pytest.raises(
        ValueError, match=r"^client 1: send: has sent in round 3 already, allowed: once per round$"
    ):
        other.send(torch.ones(3000))


# Two sides whose parameters lie in another order ──────────────────────────────────────────────────


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))


def of_layout(model):
    parameters = tcs.trained_parameters(model).values()
    return tcs.Known("TCS", tcs.layer_sizes(model), order=[tcs.layout_of(p) for p in parameters])


def test_a_message_of_the_first_round_is_saved_and_loaded():
    known = tcs.Known("TCS", [200])
    client, other = (tcs.Client(known, 0) for _ in range(2))
    known.begin(dense=True)
    client.send(torch.linspace(-1, 1, 200))
    state = client.state_dict()
    assert state["in_flight"]["round"] == 0
    other.load_state_dict(state)
    assert same_state(other.state_dict(), state)


def test_two_sides_whose_parameters_lie_in_another_order_refuse_each_other():
    plain, last = of_layout(net()), of_layout(net().to(memory_format=torch.channels_last))
    again, client = of_layout(net()), tcs.Client(last)
    for known in (plain, last, again):
        known.begin()
    server, delta_D = tcs.Server(plain), torch.ones(plain.dimension)
    with pytest.raises(
        tcs.MessageError, match=r"^client 0: message: tag: .*, shared mask or order in memory"
    ):
        plain.from_bytes(last.to_bytes(client.send(delta_D)), 0)
    message = plain.from_bytes(again.to_bytes(tcs.Client(again).send(delta_D)), 0)
    server.add(0, message)
    update_D, reply = server.finish()
    data = plain.to_bytes(reply)
    with pytest.raises(
        tcs.MessageError, match=r"^server: message: tag: .*, shared mask or order in memory"
    ):
        last.from_bytes(data, tcs.SERVER)
    assert torch.equal(again.expand_message(again.from_bytes(data, tcs.SERVER)), update_D)


def test_the_order_of_a_federations_model_is_in_its_messages():
    models = net(), net().to(memory_format=torch.channels_last)
    batch = torch.ones(2, 3, 4, 4), torch.tensor([0, 1])
    made = [tcs.Federation(model, [[batch]], "TCS", 0.1) for model in models]
    orders = [one.compressor.known.wire_up.order for one in made]
    assert orders == [((0, 1, 2, 3), (0,), (0, 1), (0,)), ((0, 2, 3, 1), (0,), (0, 1), (0,))]
    assert len({one.compressor.known.wire_up.tag for one in made}) == 2


@pytest.mark.parametrize(
    ("tensor", "order"),
    [(torch.zeros(2, 3, 4), (0, 1, 2)), (torch.zeros(2, 3, 4).permute(2, 0, 1), (1, 2, 0)),
     (torch.zeros(3, 2).t(), (1, 0)), (torch.zeros(5), (0,)), (torch.zeros(()), ()),
     (torch.zeros(1, 7, 1), (1,)), (torch.zeros(1, 3, 1, 1).to(memory_format=torch.channels_last), (1,)),
     (torch.zeros(4, 6)[:, ::2], (0, 1)), (torch.zeros(1, 3).expand(4, 3), (0, 1))],
)  # fmt: skip
def test_how_a_tensor_lies_in_memory(tensor, order):
    """One with gaps, or that shares entries, as it is read."""
    assert tcs.layout_of(tensor) == order


def test_a_state_of_another_momentum_is_refused_by_name():
    def made(beta):
        scheme = tcs.Scheme.named("TCS-Global Momentum", momentum=beta)
        model = torch.nn.Linear(6, 3)
        return tcs.Federation(model, [[(torch.randn(4, 6), torch.arange(4) % 3)]], scheme, 0.1)

    one, other = made(0.9), made(0.5)
    one.round()
    before_D = other.theta_D.clone()
    with pytest.raises(ValueError, match=r"^state: scheme: momentum: got 0.9, allowed: 0.5$"):
        other.load_state_dict(one.state_dict())
    assert other.t == 0 and torch.equal(other.theta_D, before_D)


def conv(memory_format):
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3).to(memory_format=memory_format)


def test_a_state_of_another_order_in_memory_is_refused():
    images = [[(torch.randn(2, 3, 5, 5), torch.randn(2, 4, 3, 3))] for _ in range(2)]
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()  # noqa: E731
    one, other = (
        tcs.Federation(conv(kind), images, "TCS", 0.1, loss=loss)
        for kind in (torch.channels_last, torch.contiguous_format)
    )
    one.round()
    theta_D = other.theta_D.clone()
    with pytest.raises(ValueError, match=r"^state: order: got \(\(0, 2, 3, 1\)"):
        other.load_state_dict(one.state_dict())
    assert torch.equal(other.theta_D, theta_D)


def test_sides_that_refuse_each_others_messages_refuse_each_others_states():
    """One that says how parameters lie in memory, and one that does not."""
    plain, ordered = tcs.Known("TCS", [12]), tcs.Known("TCS", [12], order=[(0, 1)])
    for one, other in ((plain, ordered), (ordered, plain)):
        for known in (one, other):
            known.begin(dense=True)
        data = one.to_bytes(tcs.Client(one).send(torch.ones(12)))
        with pytest.raises(tcs.MessageError, match="another scheme, shared mask or order"):
            other.from_bytes(data, 0)
        with pytest.raises(ValueError, match=r"^state: order: got "):
            other.load_state_dict(one.state_dict())
        assert other.round == 0 and other.status == tcs.OPEN
        for known in (one, other):
            known.lose()
            known.round = 0


def test_an_order_from_a_file_is_the_same_order():
    asked, listed = (tcs.Known("TCS", [12], order=order) for order in ([(0, 1)], [[0, 1]]))
    assert asked.wire_up.tag == listed.wire_up.tag and asked.wire_down.tag == listed.wire_down.tag


def test_an_optimizer_with_other_groups_is_refused_with_nothing_changed():
    def made(groups):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        split = lambda p: [{"params": [one]} for one in p] if groups == 2 else p  # noqa: E731
        adam = lambda p: torch.optim.AdamW(split(list(p)))  # noqa: E731
        batch = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
        return tcs.Federation(model, [[batch], [batch]], "TCS", local_optimizer=adam)

    one, other = made(2), made(1)
    one.round()
    other.round()
    other.round()
    before = other.state_dict()
    with pytest.raises(ValueError, match=r"got groups of \[1, 1\] parameters, allowed: \[2\]"):
        other.load_state_dict(one.state_dict())
    after = other.state_dict()
    assert other.t == 2 and torch.equal(after["theta_D"], before["theta_D"])
