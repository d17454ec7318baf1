"""Sections 1 and 6: a state that is broken in any place is refused in one line, with nothing changed.

Each place of each state in turn is left out, is of another type, shape, dtype or value; and states
of another scheme, seed, model or version are handed in."""

import dataclasses

import pytest
import tcs_lab.schemes.rivals  # noqa: F401  (DGC, CocktailSGD; and the variants)
import torch
from common import deltas_like_training, same_state, whole_state

import tcs_core as tcs

SIZES = [150, 50]
NAMES = ["TCS", "TCS-Q5", "TCS-L2-Q5++", "top-K", "rand-K", "FedAvg", "DGC", "CocktailSGD",
         "TCS-Stale", "TCS-Random", "TCS-W10", "STC"]  # fmt: skip


def scheme_of(name):
    return dataclasses.replace(tcs.Scheme.named(name), error_unit="difference")


def compressor(name, rounds=3, seed=0, sizes=SIZES, masks=1, clients=2):
    made = tcs.Compressor(scheme_of(name), sizes, clients, seed=seed)
    for deltas_ND in deltas_like_training(rounds, clients, sizes):
        made.round(deltas_ND.__getitem__, range(clients), mask_factor=masks)
    return made


def with_a_message_in_flight(name, dense=False):
    made = compressor(name)
    made.known.begin(dense)
    made.clients[1].send(torch.linspace(-1, 1, 200))
    return made.clients[1]


OBJECTS = {
    **{f"compressor: {name}": lambda name=name: compressor(name) for name in NAMES},
    "compressor: large masks": lambda: compressor("TCS-W10", masks=5),
    "compressor: fresh": lambda: compressor("TCS", 0),
    "known: TCS": lambda: compressor("TCS").known,
    "known: TCS-W10": lambda: compressor("TCS-W10", masks=5).known,
    "known: with an order": lambda: tcs.Known("TCS", SIZES, order=[(0, 1), (0,)]),
    "client: in flight": lambda: with_a_message_in_flight("TCS-Q5"),
    "client: dense in flight": lambda: with_a_message_in_flight("TCS", True),
    "client: DGC in flight": lambda: with_a_message_in_flight("DGC"),
    "client: without errors": lambda: with_a_message_in_flight("FedAvg"),
    "server: compressed downlink": lambda: compressor("TCS-D2").server,
    "server: plain": lambda: compressor("TCS").server,
}


def places(state, path=()):
    """All places in a state, with what stands there."""
    items = state.items() if isinstance(state, dict) else ()
    items = enumerate(state) if isinstance(state, list) else items
    for key, value in items:
        yield (*path, key), value
        yield from places(value, (*path, key))


def changed(state, path, value):
    """A copy in which something else stands at one place; `value` makes it of what stood there."""
    if not path:
        return value(state)
    copied = dict(state) if isinstance(state, dict) else list(state)
    copied[path[0]] = changed(state[path[0]], path[1:], value)
    return copied


def without(state, path):
    return changed(state, path[:-1], lambda one: {k: v for k, v in one.items() if k != path[-1]})


def others(path, value):
    """What may not stand in this place, by what is wrong with it."""
    is_kept = "rule" in path[:-1]  # what a rule keeps may be None or a number at first
    if isinstance(value, dict):
        yield "unknown key", value | {"more": 1}
        yield "no dictionary", [1, 2]
        yield "a number", 3
    elif isinstance(value, torch.Tensor):
        if value.dim() == 1:  # a history of masks has as many rows as there were rounds
            more = value[:1] if len(value) else torch.zeros(1, dtype=value.dtype)
            yield "longer", torch.cat([value, more])
        yield "dimensions", value[None]
        yield "dtype", value.double() if value.dtype == torch.int64 else value.long()
        yield "a list", value.tolist()
        yield "text", "tensor"
        if value.dtype == torch.int64 and len(value):
            yield "out of range", value + 10**6
            yield "negative", value - 10**6
            yield "twice", value.clone().fill_(3) if value.numel() > 1 else value - 10**6
        if not is_kept:
            yield "None", None
    elif isinstance(value, bool):
        yield "another", not value if "scheme" in path else "yes"
        yield "number", 7
    elif isinstance(value, int | float):
        yield "text", "1"
        yield "tensor", torch.tensor([1, 2])
        yield "negative", -5
        yield "bool", True
        yield "None", None
    elif isinstance(value, str):
        yield "another", value + "x"
        yield "number", 5
    elif isinstance(value, list | tuple):
        yield "longer", [*value, 1]
        yield "number", 5
    elif value is None and not is_kept and path[-1] != "in_flight":
        yield "a number", 0.25
        yield "a tensor", torch.ones(3)


def broken(state):
    """Broken states, by what is wrong with them."""
    yield ("unknown key",), state | {"more": 1}
    yield ("no dictionary",), [state]
    for version in (1, 3, "2", None, 2.0, torch.tensor(2)):
        yield ("version", version), state | {"version": version}
    for path, value in places(state):
        defaults = {f.name: f.default for f in dataclasses.fields(tcs.Scheme)}
        is_default = "scheme" in path[:-1] and defaults[path[-1]] == value
        if isinstance(path[-1], str) and not is_default:
            yield (*path, "missing"), without(state, path)
        for what, other in others(path, value):
            yield (*path, what), changed(state, path, lambda _, other=other: other)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_broken_state_is_refused_in_one_line_with_nothing_changed(name):
    one = OBJECTS[name]()
    state = one.state_dict()
    before, count = whole_state(one), 0
    for what, bad in broken(state):
        with pytest.raises(ValueError) as raised:
            one.load_state_dict(bad)
            pytest.fail(f"accepted: {what}")
        text = str(raised.value)
        assert "\n" not in text and len(text) < 400, what
        assert (
            "allowed" in text or "missing" in text or "not known" in text or "positions" in text
        ), text
        assert same_state(whole_state(one), before), what
        count += 1
    assert count > 10
    one.load_state_dict(state)
    assert same_state(one.state_dict(), state)


OTHERS = {
    "another scheme": lambda name: compressor("TCS-L4" if name != "TCS-L4" else "TCS"),
    "another seed": lambda name: compressor(name, seed=1),
    "other sizes": lambda name: compressor(name, sizes=[50, 150]),
    "one layer": lambda name: compressor(name, sizes=[200]),
    "more clients": lambda name: compressor(name, clients=3),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_another_compressor_is_refused_with_nothing_changed(name, other):
    one, state = compressor(name), OTHERS[other](name).state_dict()
    before = whole_state(one)
    with pytest.raises(ValueError, match=r"^state: .*allowed: "):
        one.load_state_dict(state)
    assert same_state(whole_state(one), before)


@pytest.mark.parametrize("what", ["errors_D", "number", "in_flight", "version"])
@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "DGC"])
def test_where_the_last_clients_state_is_broken_known_and_the_first_clients_stay(name, what):
    one, state = compressor(name), compressor(name, rounds=6).state_dict()
    before = whole_state(one)
    del state["clients"][-1][what]
    with pytest.raises(ValueError, match=what):
        one.load_state_dict(state)
    assert same_state(whole_state(one), before)


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "rand-K", "DGC"])
def test_a_state_from_before_there_were_versions_is_refused_by_a_line_that_says_so(name):
    one = compressor(name)
    old = {key: value for key, value in one.state_dict().items() if key != "version"}
    with pytest.raises(
        ValueError, match=r"^state of Compressor: got a dictionary without `version`"
    ):
        one.load_state_dict(old)


@pytest.mark.parametrize("field", ["shared_from", "error_unit", "warmup_masks", "phi_down", "code"])
@pytest.mark.parametrize("said", [False, True])
def test_a_field_that_was_added_later_and_is_at_its_default_is_not_missed(field, said):
    one, other = compressor("TCS"), compressor("TCS", rounds=0)
    state = one.state_dict()
    assert field not in state["known"]["scheme"]
    if said:
        state["known"]["scheme"][field] = getattr(tcs.Scheme, field)
    other.load_state_dict(state)
    assert same_state(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("field", ["later", "phi_sideways", "Rule", ""])
def test_a_field_that_is_not_known_is_refused_by_name(field):
    one = compressor("TCS")
    state = one.state_dict()
    state["known"]["scheme"][field] = 1
    with pytest.raises(ValueError, match=rf"^state: scheme: {field} is not known"):
        one.load_state_dict(state)


@pytest.mark.parametrize(
    "orders", [((), [(0, 1), (0,)]), ([(0, 1), (0,)], ()), ([(0, 1), (0,)], [(1, 0), (0,)])]
)
def test_a_state_of_another_order_in_memory_is_refused(orders):
    one, other = (tcs.Known("TCS", SIZES, order=order) for order in orders)
    before = whole_state(other)
    with pytest.raises(ValueError, match=r"^state: order: got "):
        other.load_state_dict(one.state_dict())
    assert same_state(whole_state(other), before)


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "TCS-D2", "DGC", "TCS-W10"])
def test_the_state_of_a_later_round_goes_into_a_fresh_object_and_back(name):
    fresh, late = compressor(name, 0), compressor(name, 4)
    states = fresh.state_dict(), late.state_dict()
    fresh.load_state_dict(states[1]), late.load_state_dict(states[0])
    assert same_state(fresh.state_dict(), states[1]) and same_state(late.state_dict(), states[0])
