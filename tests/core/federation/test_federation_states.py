"""Section 7: a federation's state is checked before anything changes, and is of plain things."""

import copy
import dataclasses
import io

import numpy as np
import pytest
import torch
from common import same_state
from torch import nn

import tcs_core as tcs

CLIENTS = 2
OPTIMIZERS = {
    "SGD": {"schedule": 0.1, "weight_decay": 1e-3},
    "AdamW": {"schedule": 0.01, "local_optimizer": torch.optim.AdamW},
    "momentum": {"local_optimizer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)},
    "server": {"schedule": 0.1, "server_optimizer": lambda p: torch.optim.Adam(p, 0.01)},
    "global momentum": {"schedule": 0.1},
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(4, 6, generator=generator)  # noqa: E731
    return [[(draw(), torch.arange(4) % 3) for _ in range(3)] for _ in range(CLIENTS)]


def federation(kind="SGD", scheme="TCS-L2", rounds=0, **more):
    scheme = "TCS-Global Momentum" if kind == "global momentum" else scheme
    made = tcs.Federation(
        net(), more.pop("feed", None) or batches(), scheme, **OPTIMIZERS[kind] | more
    )
    for _ in range(rounds):
        made.round()
    return made


def everything(made):
    """All that loading could change."""
    module = {key: value.clone() for key, value in made.model.state_dict().items()}
    objects = [id(made.compressor), *map(id, made.trainer.optimizers.values())]
    return [made.state_dict(), module, list(made.trainer.optimizers), objects]


def wrong(value):
    """What cannot stand in the place of this value."""
    if isinstance(value, torch.Tensor):
        longer = torch.zeros((*value.shape, 2), dtype=value.dtype)
        return [None, "x", longer, value.long() if value.is_floating_point() else value.double()]
    return [[], 1.5] if isinstance(value, str) else ["x", None]


def places(state, path=()):
    """The keys of a state and of the dictionaries in it, but for the compressor's, which checks
    its own."""
    for key, value in state.items():
        yield *path, key
        if isinstance(value, dict) and key != "compressor":
            yield from places(value, (*path, key))


def changed(state, path, change):
    state = copy.deepcopy(state)
    inside = state
    for key in path[:-1]:
        inside = inside[key]
    change(inside, path[-1])
    return state


def set_to(value):
    return lambda inside, key: inside.update({key: value})


def at(state, path):
    for key in path:
        state = state[key]
    return state


def broken_states(state):
    """This state with one thing in it wrong; where, and how."""
    for path in list(places(state)):
        value = at(state, path)
        one_of = {"optimizers": (2, 5), "server_optimizer": (4,)}  # clients, parameters: they
        may_lack = len(path) in one_of.get(path[0], ())  # begin anew
        may_lack |= path == ("layers",)  # states from before there were any have none
        if path[-1] in ("feed", "server_optimizer") and value is None:
            continue
        if not may_lack:
            yield (*path, "missing"), changed(state, path, lambda inside, key: inside.pop(key))
        if path == ("compressor",):
            continue
        for other in wrong(value):
            if other is value is None:
                continue
            yield (*path, other), changed(state, path, set_to(other))
        if isinstance(value, dict) and value:
            unknown = lambda inside, key: inside[key].update(unknown=1)  # noqa: E731
            yield (*path, "unknown"), changed(state, path, unknown)
    yield ("unknown",), state | {"unknown": 1}
    for version in (1, 3, "2"):
        yield ("version", version), state | {"version": version}
    for active in ([], [0, 5], [0.0], 1):
        yield ("active", active), state | {"active": active}
    yield ("t",), state | {"t": -1}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_broken_state_is_refused_with_nothing_changed(kind):
    given, made = federation(kind, rounds=3).state_dict(), federation(kind, rounds=2)
    before = everything(made)
    for where, state in broken_states(given):
        with pytest.raises(ValueError, match=r"^state: |^schedule"):
            made.load_state_dict(state)
            pytest.fail(f"accepted: {where}")
        assert same_state(everything(made), before), where
    made.load_state_dict(given)
    assert same_state(made.state_dict(), given)


@pytest.mark.parametrize(
    "other",
    [nn.Linear(2, 6, bias=False), nn.Sequential(nn.Linear(3, 4, bias=False)),
     nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))],
    ids=["another shape", "another name", "other layers"],
)  # fmt: skip
def test_a_state_of_another_model_with_as_many_entries_is_refused(other):
    given = tcs.Federation(nn.Linear(3, 4, bias=False), [[]], "TCS", 0.1).state_dict()
    made = tcs.Federation(other, [[]], "TCS", 0.1)
    before = made.state_dict()
    with pytest.raises(ValueError, match=r"^state: .*, allowed: "):
        made.load_state_dict(given)
    assert same_state(made.state_dict(), before)


def test_layers_are_named_as_in_the_model_and_may_be_missing_in_an_older_state():
    made = tcs.Federation(nn.Linear(3, 4), [[]], "TCS", 0.1)
    state = made.state_dict()
    assert state["layers"] == {"weight": [4, 3], "bias": [4]}
    del state["layers"]
    state["theta_D"] += 1
    made.load_state_dict(state)
    assert torch.equal(made.model.bias.detach(), state["theta_D"][12:])


def test_layers_in_another_order_are_refused():
    state = (made := tcs.Federation(nn.Linear(3, 4), [[]], "TCS", 0.1)).state_dict()
    state["layers"] = dict(reversed(state["layers"].items()))
    with pytest.raises(
        ValueError, match=r"^state: layers: got \('bias', \[4\]\), allowed: \('weight'"
    ):
        made.load_state_dict(state)


def groups_changed(state, change):
    state = copy.deepcopy(state)
    owners = [*state["optimizers"].values(), state["server_optimizer"]]
    for saved in filter(None, owners):
        change(saved["state"]["param_groups"])
    return state


@pytest.mark.parametrize("kind", ["AdamW", "momentum", "server"])
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize(
    "change",
    [lambda groups: groups.clear(), lambda groups: groups[0].pop("lr"),
     lambda groups: groups[0].update(lr="fast"), lambda groups: groups[0].pop("params"),
     lambda groups: groups[0].update(params=[0, 1, 2]), lambda groups: groups.append(dict(groups[0]))],
)  # fmt: skip
def test_groups_of_an_optimizer_that_do_not_fit_leave_no_optimizer_behind(kind, rounds, change):
    given, made = federation(kind, rounds=3).state_dict(), federation(kind, rounds=rounds)
    before, state = everything(made), groups_changed(given, change)
    with pytest.raises(ValueError, match=r"^state: (optimizer of client 0|server_optimizer)"):
        made.load_state_dict(state)
    assert same_state(everything(made), before)


class Stubborn(torch.optim.SGD):
    """Refuses what it is given, in its own words, if it is not the first that is asked."""

    asked = 0

    def load_state_dict(self, state_dict):
        if Stubborn.asked:
            Stubborn.asked += 1
            if Stubborn.asked == 3:
                raise RuntimeError("not this one")
        super().load_state_dict(state_dict)


def test_an_optimizer_that_refuses_in_its_own_words_leaves_all_as_before():
    own = {"schedule": None, "local_optimizer": lambda p: Stubborn(p, 0.1, momentum=0.9)}
    given, made = (
        federation(rounds=3, weight_decay=0.0, **own),
        federation(rounds=2, weight_decay=0.0, **own),
    )
    before, state = everything(made), given.state_dict()
    Stubborn.asked = 1
    with pytest.raises(RuntimeError, match="not this one"):
        made.load_state_dict(state)
    Stubborn.asked = 0
    assert same_state(everything(made), before)


class Fussy:
    """A feed of one's own that refuses states."""

    clients = CLIENTS

    def batch(self, n, t, tau):
        return batches()[n][tau]

    def state_dict(self):
        return {"place": 0}

    def load_state_dict(self, state):
        if state != {"place": 0}:
            raise RuntimeError("fussy")


def test_a_feed_that_refuses_leaves_all_as_before():
    made = federation("AdamW", feed=Fussy(), rounds=1)
    state = made.state_dict() | {"feed": {"place": 1}, "t": 7}
    before = everything(made)
    with pytest.raises(RuntimeError, match="fussy"):
        made.load_state_dict(state)
    assert same_state(everything(made), before)


@pytest.mark.parametrize(
    "feed", [None, {"passes": [0]}, {"version": 2, "passes": [1], "given": [1]},
             {"version": 2, "passes": [1, "1"], "given": [0, 0]}, {"version": 1, "passes": [1, 1], "given": [0, 0]},
             {"version": 2, "passes": [1, 1], "given": [0, -1]}]
)  # fmt: skip
def test_a_feeds_broken_state_is_refused_with_nothing_changed(feed):
    made = federation(rounds=2)
    before = everything(made)
    with pytest.raises(ValueError, match=r"^state: feed: "):
        made.load_state_dict(made.state_dict() | {"feed": feed, "t": 9})
    assert same_state(everything(made), before)
    with pytest.raises(ValueError, match=r"^state: feed: "):
        made.feed.load_state_dict(feed)
    assert same_state(everything(made), before)


def test_loading_puts_theta_and_statistics_into_the_module():
    given, made = federation(rounds=4), federation(rounds=1)
    made.load_state_dict(given.state_dict())
    for key, value in given.model.state_dict().items():
        assert torch.equal(made.model.state_dict()[key], value), key
    assert torch.equal(made.theta_D, nn.utils.parameters_to_vector(made.model.parameters()))


def test_what_is_written_into_theta_has_no_effect():
    made, other = federation(rounds=1), federation(rounds=1)
    made.theta_D.zero_()
    assert torch.equal(made.round(), other.round())


# Schemes of other versions ────────────────────────────────────────────────────────────────────────


def test_a_state_holds_what_differs_from_the_defaults_of_a_scheme():
    scheme = federation().state_dict()["scheme"]
    assert scheme == {"name": "TCS-L2", "local_steps": 2}


@pytest.mark.parametrize("scheme", ["TCS-L2", "TCS", "TCS-L4-Q5"])
def test_a_state_with_every_field_of_its_scheme_is_taken(scheme):
    given, made = federation(scheme=scheme, rounds=2), federation(scheme=scheme)
    state = given.state_dict()
    made.load_state_dict(state | {"scheme": dataclasses.asdict(given.scheme)})
    assert same_state(made.state_dict(), state)


@pytest.mark.parametrize("field", ["later", "phi_sideways", "server_steps"])
def test_a_field_that_this_version_does_not_know_is_refused_by_its_name(field):
    made = federation(rounds=1)
    before = everything(made)
    state = made.state_dict()
    with pytest.raises(ValueError, match=rf"^state: scheme: {field} is not known"):
        made.load_state_dict(state | {"scheme": state["scheme"] | {field: 1}})
    assert same_state(everything(made), before)


@pytest.mark.parametrize("field", ["local_steps", "name"])
def test_a_field_that_a_state_lacks_has_its_default(field):
    made = federation(rounds=1)
    state = made.state_dict()
    fewer = {key: value for key, value in state["scheme"].items() if key != field}
    with pytest.raises(
        ValueError, match=rf"^state: scheme: {field}: got (1|None), allowed: .*2'?$"
    ):
        made.load_state_dict(state | {"scheme": fewer})


# Plain numbers ────────────────────────────────────────────────────────────────────────────────────

NUMBERS = {
    "float32": lambda x: np.float32(x),
    "float64": lambda x: np.float64(x),
    "array": lambda x: np.array(x),
    "tensor": lambda x: torch.tensor(x),
    "of its own precision": lambda x: torch.tensor(x, dtype=torch.float64),
}


def reloaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("of", NUMBERS)
@pytest.mark.parametrize(
    "way", ["rate", "schedule", "phase", "weight decay", "weights", "seed", "own rate"]
)
def test_numbers_of_other_libraries_make_a_state_that_torch_load_takes(of, way):
    number = NUMBERS[of]
    more = {
        "rate": {"schedule": number(0.125), "local_optimizer": torch.optim.AdamW},
        "schedule": {"schedule": lambda t: number(0.125), "local_optimizer": torch.optim.AdamW},
        "phase": {"schedule": lambda t: tcs.Phase(number(0.125)), "local_optimizer": torch.optim.AdamW},
        "weight decay": {"schedule": 0.125, "weight_decay": number(0.5)},
        "weights": {"schedule": 0.125, "weights": [number(1.0), number(3.0)]},
        "seed": {"schedule": 0.125, "seed": {"float32": np.int32(3), "float64": np.int64(3),
                 "array": np.array(3), "tensor": torch.tensor(3)}.get(of, np.uint64(3))},
        "own rate": {"local_optimizer": lambda p: torch.optim.SGD(p, float(number(0.125)), momentum=number(0.5) if of.startswith("float") else 0.5)},
    }[way]  # fmt: skip
    made = tcs.Federation(net(), batches(), "TCS", **more)
    made.round()
    state = reloaded(made.state_dict())
    made.load_state_dict(state)
    plain = {
        "rate": {"schedule": 0.125, "local_optimizer": torch.optim.AdamW},
        "weight decay": {"schedule": 0.125, "weight_decay": 0.5},
        "weights": {"schedule": 0.125, "weights": [1.0, 3.0]},
        "seed": {"schedule": 0.125, "seed": 3},
        "own rate": {"local_optimizer": lambda p: torch.optim.SGD(p, 0.125, momentum=0.5)},
    }[way if way not in ("schedule", "phase") else "rate"]
    other = tcs.Federation(net(), batches(), "TCS", **plain)
    other.round()
    assert torch.equal(made.round(), other.round())


@pytest.mark.parametrize("rate", [np.array([0.1]), torch.tensor([0.1]), torch.tensor(-0.1), np.nan])
def test_a_rate_that_is_no_number_is_refused_as_it_was_given(rate):
    with pytest.raises(ValueError, match=r"^schedule: round 0: got .*, allowed: a learning rate"):
        federation(schedule=rate).round()


# Rates of an optimizer ────────────────────────────────────────────────────────────────────────────


def by_layer(*rates):
    def make(parameters):
        groups = zip(list(parameters), rates, strict=False)
        return torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in groups])

    return make


@pytest.mark.parametrize("rates", [(0.1, 0.01), (0.1, 0.1, 0.1, 0.2), (0.0, 1.0, 0.0)])
def test_rates_that_differ_by_layer_are_refused_beside_a_schedule_and_kept_without(rates):
    said = ", ".join(f"{rate:g}" for rate in sorted(set(rates)))
    with pytest.raises(ValueError, match=rf"^local_optimizer: got learning rates {said}, allowed"):
        federation(schedule=0.1, weight_decay=0.0, local_optimizer=by_layer(*rates)).round()
    kept = federation(schedule=None, weight_decay=0.0, local_optimizer=by_layer(*rates))
    kept.round()
    found = [group["lr"] for group in kept.trainer.optimizers[0].param_groups]
    assert found == list(rates)


def test_groups_of_one_rate_have_that_of_the_schedule():
    falling = lambda t: 0.3 / (1 + t)  # noqa: E731
    made = federation(schedule=falling, weight_decay=0.0, local_optimizer=by_layer(0.3, 0.3, 0.3))
    made.round(), made.round()
    assert {group["lr"] for group in made.trainer.optimizers[1].param_groups} == {0.15}


def sgd(rate):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


GIVEN = {
    "SGD": (sgd(0.01), 0.1),
    "AdamW, far too small": (lambda p: torch.optim.AdamW(p, lr=1e-5), 0.1),
    "in all groups": (by_layer(0.2, 0.2, 0.2), 0.1),
    "a tensor": (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.5)), 0.1),
    "beside a warm-up": (sgd(0.1), lambda t: tcs.Phase(0.1 * (t + 1) / 5)),
}


@pytest.mark.parametrize("case", GIVEN)
def test_a_rate_of_the_optimizer_beside_another_of_the_schedule_is_refused_every_time(case):
    optimizer, schedule = GIVEN[case]
    made = federation(schedule=schedule, weight_decay=0.0, local_optimizer=optimizer)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^local_optimizer: got the learning rate .*allowed"):
            made.round()
    assert not made.trainer.optimizers
    federation(schedule=None, weight_decay=0.0, local_optimizer=optimizer).round()


@pytest.mark.parametrize(
    "optimizer", [sgd(0.1), torch.optim.SGD, torch.optim.AdamW, lambda p: torch.optim.Adam(p)]
)
def test_the_schedules_own_rate_or_none_in_the_optimizer_is_taken(optimizer):
    made = federation(schedule=lambda t: 0.1 / (1 + t), weight_decay=0.0, local_optimizer=optimizer)
    made.round([0]), made.round()  # client 1's is made when the rate has fallen
    assert {made.trainer.optimizers[n].param_groups[0]["lr"] for n in (0, 1)} == {0.05}


@pytest.mark.parametrize("decay", [0.1, 1e-4, np.float64(0.5)])
def test_weight_decay_of_clients_and_of_the_server_at_once_is_refused(decay):
    both = {"weight_decay": decay}
    with pytest.raises(ValueError, match=r"^weight_decay: got .*allowed: one of the two$"):
        federation(server_optimizer=lambda p: torch.optim.SGD(p, 1.0, **both), **both)
    federation(server_optimizer=lambda p: torch.optim.SGD(p, 1.0), **both)
    federation(server_optimizer=lambda p: torch.optim.AdamW(p, **both), weight_decay=0.0)


# Seeds ────────────────────────────────────────────────────────────────────────────────────────────


def drawn_with(seed):
    """The numbers that a feed's passes and a client's steps draw, as two sets."""
    drawn = []

    class Source:
        def __iter__(self):
            drawn.append(("pass", torch.rand(3).tolist()))
            return iter(batches()[0][:1])

    def loss(model, batch):
        drawn.append(("round", torch.rand(3).tolist()))
        return tcs.cross_entropy(model, batch)

    made = tcs.Federation(net(), [Source(), Source()], "FedAvg", 0.1, loss=loss, seed=seed)
    for _ in range(5):
        made.round()
    return [{tuple(numbers) for kind, numbers in drawn if kind == of} for of in ("pass", "round")]


def test_passes_rounds_and_seeds_draw_different_numbers():
    sets = [numbers for seed in (0, 1, 77) for numbers in drawn_with(seed)]
    assert [len(numbers) for numbers in sets] == [10] * 6
    assert len(set().union(*sets)) == 60


@pytest.mark.parametrize("row", [None, 1])
def test_a_copy_that_was_made_inside_evaluated_goes_on_like_the_original(row):
    made = federation(rounds=2)
    with made.evaluated(None if row is None else made.statistics_NS[row]):
        copied = copy.deepcopy(made)
    assert torch.equal(copied.round(), made.round())
    assert same_state(copied.averaged_state_dict(), made.averaged_state_dict())
    copied.load_state_dict(made.state_dict())


def test_an_error_on_the_way_into_eval_mode_leaves_the_federation_usable():
    class Fails(nn.Sequential):
        fails = False

        def train(self, mode=True):
            if self.fails and not mode:
                raise MemoryError
            return super().train(mode)

    made, other = federation(), federation()
    made.model.__class__ = Fails
    for one in (made, other):
        one.round()
    made.model.fails = True
    with pytest.raises(MemoryError), made.evaluated(made.statistics_NS[1]):
        pass
    made.model.fails = False
    assert torch.equal(made.round(), other.round())
    assert same_state(made.averaged_state_dict(), other.averaged_state_dict())


def test_no_round_begins_while_the_compressor_needs_a_state(monkeypatch):
    made = federation(rounds=2)
    saved = made.state_dict()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tcs.Client, "arrived", interrupt)
        made.round()
    t, given = made.t, list(made.feed.given)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^Compressor: a round is under way, or its end was"):
            made.round()
    assert made.t == t and made.feed.given == given
    made.load_state_dict(saved)
    assert torch.equal(made.round(), federation(rounds=2).round())


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_the_number_of_rounds_is_a_plain_one_after_loading(kind):
    made, other = federation(rounds=2), federation(rounds=2)
    number = kind(2)
    made.load_state_dict(made.state_dict() | {"t": number})
    assert torch.equal(made.round(), other.round())
    assert type(made.t) is int and int(number) == 2


def test_what_a_module_says_of_its_extra_state_is_not_saved():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return torch.arange(self.count)

        def set_extra_state(self, state):
            self.count = len(state)

        count = 3

    model = nn.Sequential(Extra(6, 3))
    made = tcs.Federation(model, batches(), "TCS", 0.1)
    made.round()
    state = made.state_dict()
    model[0].count = 4
    made.load_state_dict(state)
    assert model[0].count == 4 and not state["buffers"]
