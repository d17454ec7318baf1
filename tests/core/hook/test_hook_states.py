"""Section 9: what a state of the DDP hook refuses: other settings, broken states, copies, a second
model. Before anything is changed, and by name."""

import copy
import io
import math
import pickle

import pytest
import torch
from common import Alone, Bucket, alone_in_a_group
from hooked import SHARES, Recorded, small_net
from processes import start
from torch import nn

import tcs_core as tcs

SIZES = [30, 70]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    alone_in_a_group(monkeypatch)


def stepped(parameters=None, steps=3, state=None, **settings):
    """A state after so many steps of one bucket."""
    parameters = parameters or [torch.zeros(size) for size in SIZES]
    state = state or tcs.TCSState(Alone(), **({"start_iter": 1, "phi_global": 0.1} | settings))
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        gradient_D = torch.randn(sum(p.numel() for p in parameters), generator=generator)
        tcs.tcs_hook(state, Bucket(gradient_D, parameters)).wait()
    return state


def equal(one, two):
    """Whether two states are equal, whatever is in them."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    return type(one) is type(two) and one == two


# Other settings ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"phi_global": 0.2}, "phi_global"), ({"phi_global": None}, "phi_global"),
     ({"phi_local": 1e-2}, "phi_local"), ({"phi_local": None}, "phi_local"),
     ({"error_accumulation": False}, "error_accumulation"), ({"start_iter": 2}, "start_iter"),
     ({"start_iter": 100}, "start_iter")],
)  # fmt: skip
def test_a_state_with_other_settings_is_refused_by_name(settings, name):
    saved, other = stepped().state_dict(), stepped(steps=5, **settings)
    before = other.state_dict()
    with pytest.raises(ValueError, match=rf"^TCSState: state: (scheme: )?{name}: got "):
        other.load_state_dict(saved)
    assert equal(other.state_dict(), before)


def test_a_state_with_the_same_settings_is_taken():
    saved, other = stepped().state_dict(), stepped(steps=5)
    other.load_state_dict(saved)
    assert equal(other.state_dict(), saved) and saved["iter"] == 3


# Broken states ────────────────────────────────────────────────────────────────────────────────────


def changed(*path, to):
    def change(state):
        *places, last = path
        for place in places:
            state = state[place]
        state[last] = to

    return change


def without(*path):
    def change(state):
        *places, last = path
        for place in places:
            state = state[place]
        del state[last]

    return change


LAST = "parameters", 1
BROKEN = {
    "no version": without("version"),
    "another version": changed("version", to=1),
    "no iter": without("iter"),
    "iter of another type": changed("iter", to=3.0),
    "iter below 0": changed("iter", to=-1),
    "no step, but parameters": changed("iter", to=0),
    "no bytes_sent": without("bytes_sent"),
    "a kind of bytes is missing": without("bytes_sent", "shared"),
    "bytes of another type": changed("bytes_sent", "shared", to="many"),
    "no parameters": without("parameters"),
    "parameters are none": changed("parameters", to={}),
    "parameters are a list": changed("parameters", to=[1, 2]),
    "one parameter less": without(*LAST),
    "a parameter that is none": changed(*LAST, to=None),
    "no errors": without(*LAST, "errors"),
    "errors are none": changed(*LAST, "errors", to=None),
    "errors of another size": changed(*LAST, "errors", to=torch.zeros(71)),
    "errors of another type": changed(*LAST, "errors", to=torch.zeros(70, dtype=torch.float64)),
    "errors that are no numbers": changed(*LAST, "errors", to=torch.full((70,), math.nan)),
    "a mask of another size": changed(*LAST, "mask", to=torch.zeros(71, dtype=torch.bool)),
    "a mask of another type": changed(*LAST, "mask", to=torch.zeros(70)),
    "another shape": changed(*LAST, "shape", to=[7, 10]),
    "a shape that is none": changed(*LAST, "shape", to="70"),
    "a number below 0": changed(*LAST, "shape", to=[-70]),
    "another order": changed(*LAST, "order", to=[1, 0]),
    "another packing": changed("packing", to=[1, 1]),
    "a packing of fewer": changed("packing", to=[1]),
    "a packing that is none": changed("packing", to=None),
    "a rank of another type": changed("rank", to="0"),
    "something unknown": changed("momentum", to=1),
    "no scheme": changed("scheme", to=None),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_state_is_refused_and_nothing_is_changed(case):
    state = stepped(steps=5)
    broken, before = stepped().state_dict(), state.state_dict()
    BROKEN[case](broken)
    with pytest.raises(ValueError, match=r"^(TCSState: |state of TCSState)"):
        state.load_state_dict(broken)
    assert equal(state.state_dict(), before)
    assert all(map(torch.equal, *(next_gradients(s) for s in (state, stepped(steps=5)))))


def next_gradients(state):
    parameters = list(state._names)
    return [
        tcs.tcs_hook(state, Bucket(torch.linspace(-1, 1, 100) ** n, parameters)).wait()
        for n in (3, 4, 5)
    ]


def test_what_is_not_a_dictionary_is_refused():
    for given in (None, [], "state", torch.zeros(3)):
        with pytest.raises(ValueError, match="TCSState: state: got a "):
            tcs.TCSState(Alone()).load_state_dict(given)


def test_a_loaded_state_is_a_copy():
    saved = stepped().state_dict()
    state = stepped(steps=5)
    state.load_state_dict(saved)
    for part in saved["parameters"].values():
        part["errors"].fill_(1e9)
    assert all(
        part["errors"].abs().max() < 1e3 for part in state.state_dict()["parameters"].values()
    )


@pytest.mark.parametrize("sizes", [[70, 30], [50, 50], [30, 70, 1], [100]])
def test_a_second_load_before_a_step_is_compared_too(sizes):
    """The first load fits; in between no step was made."""
    state, other = stepped(), stepped([torch.zeros(size) for size in sizes])
    state.load_state_dict(stepped().state_dict())
    with pytest.raises(ValueError, match="the loaded state is of other parameters"):
        state.load_state_dict(other.state_dict())
        stepped(list(state._names), state=state)


@pytest.mark.parametrize("settled", [False, True])
def test_a_state_that_is_saved_again_before_a_step_is_the_same(settled):
    saved, state = stepped().state_dict() | {"rank": 3, "world_size": 4}, tcs.TCSState(
        Alone(), start_iter=1, phi_global=0.1)  # fmt: skip
    state = stepped() if settled else state
    state.load_state_dict(saved)
    assert equal(state.state_dict(), saved)


# Copies ───────────────────────────────────────────────────────────────────────────────────────────


def holding(state):
    model = small_net()
    model.state = state
    return model


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda state: torch.save(state, io.BytesIO()),
    "deepcopy of a module that holds it": lambda state: copy.deepcopy(holding(state)),
    "deepcopy of a list that holds it": lambda state: copy.deepcopy([state]),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_refused_and_says_what_to_save(how):
    for state in (tcs.TCSState(), stepped()):
        with pytest.raises(TypeError, match=r"process groups .* state_dict\(\)"):
            COPIES[how](state)


def copied_under_ddp(ranks, folder):
    """After the refused copy the model trains on; the module inside can be copied."""
    hooked = Recorded(None)
    hooked.model.register_comm_hook(tcs.TCSState(start_iter=1, **SHARES), tcs.tcs_hook)
    hooked.step(0)
    with pytest.raises(TypeError, match=r"model\.module"):
        copy.deepcopy(hooked.model)
    twin = copy.deepcopy(hooked.model.module)
    hooked.step(1)
    return hooked.model._comm_hooks[0][1].iter, sum(p.numel() for p in twin.parameters())


def test_a_copy_of_a_model_under_ddp_is_refused(tmp_path):
    assert start(2, tmp_path, copied_under_ddp) == [(2, 1509)] * 2


# A second model ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sizes", [[30, 70], [70, 30], [100], [5, 5, 5]])
def test_a_second_model_is_refused_by_name(sizes):
    state = stepped()
    before = state.state_dict()
    with pytest.raises(ValueError, match=r"of another model.*one state per model"):
        stepped([torch.zeros(size) for size in sizes], state=state)
    assert equal(state.state_dict(), before)
    stepped(list(state._names), state=state)
    assert state.iter == 6


def test_a_second_model_between_the_buckets_of_the_first_is_refused():
    state = tcs.TCSState(Alone(), start_iter=1)
    one, two = ([torch.zeros(size) for size in SIZES] for _ in range(2))
    for parameters, last in ((one[1:], False), (two[1:], False), (one[:1], True)):
        size = parameters[0].numel()
        tcs.tcs_hook(state, Bucket(torch.randn(size), parameters, last)).wait()
    with pytest.raises(ValueError, match=r"of another model.*one state per model"):
        tcs.tcs_hook(state, Bucket(torch.randn(30), two[:1], True))


def test_a_second_model_after_loading_is_refused():
    state = tcs.TCSState(Alone(), start_iter=1, phi_global=0.1)
    state.load_state_dict(stepped().state_dict())
    stepped(state=state)  # a loaded state goes on in new parameters
    with pytest.raises(ValueError, match=r"of another model.*one state per model"):
        stepped(state=state)


def two_models(ranks, folder, named):
    """Two of the same kind take a step each, by turns."""
    one, two = (Recorded(None) for _ in range(2))
    state = tcs.TCSState(start_iter=1, **SHARES, **({"model": one.model} if named else {}))
    for part in (one, two):
        part.model.register_comm_hook(state, tcs.tcs_hook)
    one.step(0)
    two.step(0)


@pytest.mark.parametrize("named", [False, True])
def test_one_state_on_two_models_under_ddp_is_refused(tmp_path, named):
    for said in start(2, tmp_path, two_models, named):
        assert (
            said.startswith("ValueError: TCSState: got a parameter (")
            and "of another model" in said
        )
        assert "one state per model" in said and "\n" not in said


@pytest.mark.parametrize("sizes", [[30, 70], [50, 50], [1, 2, 3]])
def test_a_loaded_state_goes_on_in_new_parameters_and_the_old_ones_are_another_model(sizes):
    old, new = ([torch.zeros(size) for size in sizes] for _ in range(2))
    state = stepped(old)
    state.load_state_dict(state.state_dict())
    stepped(new, state=state)
    assert state.iter == 6
    with pytest.raises(ValueError, match="of another model"):
        stepped(old, state=state)


# A pass that was abandoned ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("when", [0, 1, 3])
def test_after_an_abandoned_pass_the_next_one_goes_on(when, monkeypatch):
    """Its collectives never end, and its last bucket never comes. What it put into the errors of a
    sparse step stays there."""
    parameters = [torch.zeros(size) for size in SIZES]
    state, into_D, out_D = tcs.TCSState(Alone(), start_iter=1, phi_global=0.1), 0, 0
    for step in range(5):
        parts = torch.randn(100, generator=torch.Generator().manual_seed(step)).split(SIZES)
        if step == when:
            with monkeypatch.context() as cut_off:
                cut_off.setattr(Alone, "get_future", lambda work: torch.futures.Future())
                tcs.tcs_hook(state, Bucket(parts[0].clone(), parameters[:1], False))
            if step:
                into_D = into_D + torch.cat([parts[0], torch.zeros(SIZES[1])])
        for n, part_D in enumerate(parts):
            future = tcs.tcs_hook(state, Bucket(part_D.clone(), [parameters[n]], n == 1))
            out_D = out_D + torch.nn.functional.pad(future.wait(), [(0, 70), (30, 0)][n])
        into_D = into_D + torch.cat(parts)
    errors_D = torch.cat([part["errors"] for part in state.state_dict()["parameters"].values()])
    assert state.iter == 5
    torch.testing.assert_close(out_D + errors_D, into_D, rtol=0, atol=1e-5)


def test_errors_of_an_abandoned_first_sparse_pass_survive_a_resume():
    """The first bucket's collectives ended, so its errors are no longer 0. The counter still names
    the first sparse step, in which the resumed run builds its buckets anew."""
    parameters = [torch.zeros(size) for size in SIZES]
    state = tcs.TCSState(Alone(), start_iter=1, phi_global=0.1)
    parts = torch.randn(100, generator=torch.Generator().manual_seed(0)).split(SIZES)
    for n, part_D in enumerate(parts):
        tcs.tcs_hook(state, Bucket(part_D.clone(), [parameters[n]], n == 1)).wait()
    tcs.tcs_hook(state, Bucket(parts[0].clone(), parameters[:1], False)).wait()
    saved = state.state_dict()
    assert saved["iter"] == state.start_iter and saved["parameters"][0]["errors"].any()

    resumed = tcs.TCSState(Alone(), start_iter=1, phi_global=0.1)
    resumed.load_state_dict(saved)
    again = [torch.zeros(size) for size in SIZES]
    for part_D, n in [(parts[0], 0), (parts[1], 1)]:
        went_on = tcs.tcs_hook(state, Bucket(part_D.clone(), [parameters[n]], n == 1)).wait()
        resumed_D = tcs.tcs_hook(resumed, Bucket(part_D.clone(), [again[n]], n == 1)).wait()
        assert torch.equal(resumed_D, went_on)
    assert equal(resumed.state_dict()["parameters"], state.state_dict()["parameters"])


# A model that is given ────────────────────────────────────────────────────────────────────────────


def given_a_model(ranks, folder):
    """What is said of a model that is not under DDP, of another group; and of states of the wrong
    kind: with numbers, with other names, with another shape, with one name less."""
    group = torch.distributed.new_group([0, 1])
    hooked = Recorded({"start_iter": 1} | SHARES, named=True)
    numbered, smaller = Recorded({"start_iter": 1} | SHARES), net_of_three()
    other = Recorded({"start_iter": 1} | SHARES, smaller, named=True)
    for part in (hooked, numbered, other):
        part.step(0)
    saved = hooked.state.state_dict()
    less, shapes = copy.deepcopy(saved), copy.deepcopy(saved)
    del less["parameters"]["0.bias"]
    shapes["parameters"]["0.weight"]["shape"] = [20, 30]
    return [
        refused(lambda: tcs.TCSState(model=small_net())),
        refused(lambda: tcs.TCSState(group, model=hooked.model)),
        refused(lambda: hooked.state.load_state_dict(numbered.state.state_dict())),
        refused(lambda: numbered.state.load_state_dict(saved)),
        refused(lambda: hooked.state.load_state_dict(other.state.state_dict())),
        refused(lambda: hooked.state.load_state_dict(less)),
        refused(lambda: hooked.state.load_state_dict(shapes)),
        equal(hooked.state.state_dict(), saved),
        sorted(saved["parameters"]),
        hooked.state.group is hooked.model.process_group,
    ]


def compiled(kind):
    net = small_net()
    if kind == "the whole":
        return torch.compile(net, backend="eager")
    if kind == "a layer":
        net[2] = torch.compile(net[2], backend="eager")
    return net


def across_compilation(ranks, folder, kinds):
    """Whether the state of a model of one kind goes on with the same gradients in one of another."""
    found = []
    for saver, loader in kinds:
        one, other = (
            Recorded({"start_iter": 1} | SHARES, compiled(kind), named=True)
            for kind in (saver, loader)
        )
        one.step(0)
        one.step(1)
        other.state.load_state_dict(one.state.state_dict())
        pairs = zip(one.step(2), other.step(2), strict=True)
        found.append(all(torch.equal(mine, its) for mine, its in pairs))
    return found


def test_a_state_goes_from_a_compiled_model_into_a_plain_one_and_back(tmp_path):
    kinds = [("the whole", "none"), ("none", "a layer")]
    for found in start(2, tmp_path, across_compilation, kinds):
        assert found == [True] * 2


def net_of_three():
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 25), nn.Linear(25, 4))


def refused(act):
    try:
        act()
    except ValueError as error:
        return str(error)
    return None


def test_a_model_that_is_given_says_what_its_parameters_are_called(tmp_path):
    names = sorted(f"{layer}.{kind}" for layer in (0, 2, 3) for kind in ("weight", "bias"))
    for *said, same, found, group in start(2, tmp_path, given_a_model):
        texts = ["model: got a Sequential", "process_group: ", "got numbers, allowed: names",
                 "TCSState(model=...)", "1.weight: got", "0.bias: got None", "0.weight: got"]  # fmt: skip
        assert all(text in answer for text, answer in zip(texts, said, strict=True)), said
        assert same and found == names and group
