"""Section 9: the DDP hook, stopped and resumed; and ranks that begin with different things."""

import io
import itertools
import shutil
import time

import pytest
import torch
from hooked import SHARES, Recorded, flat
from processes import start
from torch import nn

SMALL = 0.003  # bucket_cap_mb of several buckets


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


class Training:
    """SGD with momentum under DDP; all that a checkpoint needs."""

    def __init__(self, cap, saved=None, named=False, **settings):
        self.hooked = Recorded(SHARES | settings, named=named, bucket_cap_mb=cap)
        self.model, self.state = self.hooked.model.module, self.hooked.state
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        if saved is not None:
            for part, one in zip((self.model, self.optimizer, self.state), saved, strict=True):
                part.load_state_dict(one)

    def saved(self):
        parts = self.model, self.optimizer, self.state
        return through_a_file([part.state_dict() for part in parts])

    def train(self, steps):
        for step in steps:
            self.hooked.step(step)
            self.optimizer.step()
        return self


def stopped_and_resumed(ranks, folder, cap, stop, start_iter, again):
    """Eight steps at a stretch; and in new objects after so many, and in new ones yet again before
    a step was made."""
    straight = Training(cap, start_iter=start_iter).train(range(8))
    first = Training(cap, start_iter=start_iter).train(range(stop))
    second = Training(cap, first.saved(), start_iter=start_iter)
    for _ in range(again):
        second = Training(cap, second.saved(), start_iter=start_iter)
    second.train(range(stop, 8))
    same = [torch.equal(*pair) for pair in zip(straight.model.parameters(), second.model.parameters(), strict=True)]  # fmt: skip
    errors = torch.equal(flat(straight.hooked.errors()), flat(second.hooked.errors()))
    masks = torch.equal(straight.hooked.masks(), second.hooked.masks())
    sent = straight.state.bytes_sent == second.state.bytes_sent
    return all(same), errors, masks, sent, second.state.iter, len(second.state._buckets)


@pytest.mark.parametrize(
    ("stop", "start_iter", "again"), [(5, 2, 0), (2, 3, 0), (3, 3, 0), (5, 1, 1)]
)
def test_a_run_in_two_parts_ends_in_the_bits_of_one(tmp_path, stop, start_iter, again):
    """With one bucket, stopped among sparse steps, dense ones, and where they meet."""
    for answer in start(2, tmp_path, stopped_and_resumed, 25, stop, start_iter, again):
        assert answer == (True, True, True, True, 8, 1)


def stopped(ranks, folder, caps, stop, start_iter, named):
    """Eight steps, stopped and resumed, each part with buckets of its own size: all that went in,
    that came out, and errors; this rank's. And whether errors and masks were the same after the
    stop, parameter by parameter."""
    into, out, before, training = 0, 0, None, None
    for step in range(8):
        if step in (0, stop):
            saved = training and training.saved()
            training = Training(caps[step > 0], saved, named, start_iter=start_iter)
            if before is not None:
                parts = training.state.state_dict()["parameters"]
                same = [same_tensors(*pair) for pair in zip(parts.values(), before, strict=True)]
        out = out + flat(training.hooked.step(step))
        into = into + flat(training.hooked.inputs())
        training.optimizer.step()
        before = list(training.state.state_dict()["parameters"].values())
    buckets = len(training.state._buckets)
    errors = flat(training.hooked.errors())
    return into.numpy(), out.numpy(), errors.numpy(), all(same), buckets


def same_tensors(one, two):
    pairs = [(one[key], two[key]) for key in ("errors", "mask")]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("caps", "named"), [((SMALL, SMALL), False), ((25, SMALL), False), ((SMALL, 25), True)]
)
@pytest.mark.parametrize(("stop", "start_iter"), [(5, 2), (2, 3), (3, 3), (1, 1)])
def test_a_stop_loses_nothing_whatever_the_buckets(tmp_path, caps, named, stop, start_iter):
    """In = 2 x the average out + errors, also where a model is named and resumes with buckets of
    another size."""
    one, two = start(2, tmp_path, stopped, caps, stop, start_iter, named)
    (in_one, out, errors_one, same_one, buckets), (in_two, same_out, errors_two, same_two, _) = (
        one,
        two,
    )
    assert same_one and same_two and (out == same_out).all() and (buckets > 1) == (caps[1] < 1)
    errors = errors_one + errors_two
    missing = in_one + in_two - 2 * out - errors
    assert errors.any() and (missing**2).sum() < 1e-12 * (errors**2).sum()


def rolled_back(ranks, folder, cap):
    """To what was saved after five steps of eight, in the same objects."""
    training = Training(cap, start_iter=2).train(range(5))
    saved = training.saved()
    training.train(range(5, 8))
    ends = [flat(training.model.parameters())]
    for _ in range(2):
        for part, one in zip(
            (training.model, training.optimizer, training.state), through_a_file(saved), strict=True
        ):
            part.load_state_dict(one)
        training.train(range(5, 8))
        ends.append(flat(training.model.parameters()))
    return [torch.equal(ends[0], end) for end in ends], training.state.iter


@pytest.mark.parametrize("cap", [25, SMALL])
def test_a_run_can_go_back_to_what_it_saved(tmp_path, cap):
    """DDP has packed its buckets anew since the first step: parameters keep their numbers."""
    assert start(2, tmp_path, rolled_back, cap) == [([True] * 3, 8)] * 2


def spoiled_at_once(ranks, folder):
    """The first step of a loaded state is not finite on rank 1."""
    first = Training(SMALL, start_iter=2).train(range(4))
    second = Training(SMALL, first.saved(), start_iter=2)
    errors, masks = flat(first.hooked.errors()), first.hooked.masks()
    broken = flat(second.hooked.step(4, torch.nan if ranks.rank == 1 else 1.0))
    moved = float((flat(second.hooked.errors()) - errors).abs().max())
    same, fine = torch.equal(masks, second.hooked.masks()), flat(second.hooked.step(5))
    return bool(broken.isnan().all()), moved, same, bool(fine.isfinite().all())


def test_the_first_step_of_a_loaded_state_may_be_void(tmp_path):
    for nan, moved, same, fine in start(2, tmp_path, spoiled_at_once):
        assert nan and moved < 1e-6 and same and fine


# States of other parameters ───────────────────────────────────────────────────────────────────────


def net_of(*sizes):
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


def into_another_model(ranks, folder, sizes, cap, others, other_cap):
    unused = {"find_unused_parameters": cap != other_cap}  # else the first step has one bucket
    first = Recorded(SHARES | {"start_iter": 1}, net_of(*sizes), bucket_cap_mb=cap, **unused)
    first.step(0)
    first.step(1)
    second = Recorded(
        SHARES | {"start_iter": 1}, net_of(*others), bucket_cap_mb=other_cap, **unused
    )
    second.state.load_state_dict(first.state.state_dict())
    second.step(2)


SQUARE = (20, 20, 20, 20, 20)


@pytest.mark.parametrize(
    ("sizes", "cap", "others", "other_cap"),
    [
        ((20, 4, 4), 25, (20, 4, 4, 4), 25),  # a layer more
        ((20, 4, 4, 4), 25, (20, 4, 4), 25),  # a layer less
        ((20, 8, 4), 25, (20, 4, 8), 25),  # other shapes
        ((20, 8, 4, 8, 4), 25, (20, 4, 8, 4, 8), 25),  # another order
        (SQUARE, SMALL, SQUARE, 25),  # other buckets: which of the equal ones is it?
        (SQUARE, 25, SQUARE, 0.0001),
    ],
)
def test_a_state_whose_parameters_are_not_surely_the_same_is_refused(
    tmp_path, sizes, cap, others, other_cap
):
    for said in start(2, tmp_path, into_another_model, sizes, cap, others, other_cap):
        assert said.startswith("ValueError: TCSState: the loaded state is of other parameters: got")
        assert "TCSState(model=...)" in said and "\n" not in said


class Reordered(nn.Module):
    """The same parameters by name, in an order that one may choose; all have one shape."""

    def __init__(self, order):
        super().__init__()
        for name in order:
            torch.manual_seed(ord(name))
            self.add_module(name, nn.Linear(20, 20))

    def forward(self, x):
        for name in "abcd":
            x = getattr(self, name)(x).relu()
        return x


def reordered(ranks, folder, order, cap):
    first = Recorded(SHARES | {"start_iter": 1}, Reordered("abcd"), True, bucket_cap_mb=SMALL)
    for number in range(3):
        first.step(number)
    second = Recorded(SHARES | {"start_iter": 1}, Reordered(order), True, bucket_cap_mb=cap)
    second.state.load_state_dict(through_a_file(first.state.state_dict()))
    named = {}
    for hooked in (first, second):
        out = hooked.step(3)
        into, errors = hooked.inputs(), hooked.errors()
        for (name, _), *tensors in zip(
            hooked.model.module.named_parameters(), into, out, errors, strict=True
        ):
            named.setdefault(name, []).append([t.flatten().numpy() for t in tensors])
    return named


@pytest.mark.parametrize(("order", "cap"), [("dcba", SMALL), ("bdac", 25), ("abcd", 0.0001)])
def test_a_state_with_names_finds_parameters_in_another_order(tmp_path, order, cap):
    """What a step adds to 2 x out + errors is what went in, for each name, as without a stop."""
    one, two = start(2, tmp_path, reordered, order, cap)
    for name in one:
        (in_one, out, left_one), (other_in, other_out, other_left) = one[name]
        (in_two, _, left_two), (_, _, other_left_two) = two[name]
        assert (in_one == other_in).all() and in_two.any()
        kept, other = 2 * out + left_one + left_two, 2 * other_out + other_left + other_left_two
        assert abs(kept - other).max() < 1e-6 * abs(kept).max()


# Ranks that begin with different things ───────────────────────────────────────────────────────────


def saves(ranks, folder):
    trained = Training(25, start_iter=2).train(range(4))
    torch.save(trained.state.state_dict(), folder / f"state{ranks.rank}")
    trained.train([4])
    torch.save(trained.state.state_dict(), folder / f"later{ranks.rank}")


SETTINGS = ("phi_global", "phi_local", "start_iter", "error_accumulation", "momentum")


def begins(ranks, folder, case):
    """What it says, in how many seconds."""
    rank, changed, name = ranks.rank, {}, f"state{ranks.rank}"
    if case in SETTINGS and rank == 1:
        changed = {case: {"start_iter": 3, "error_accumulation": False}.get(case, 0.03)}
    if case == "step" and rank == 1:
        name = "later1"
    if case == "rank":
        name = "state0"
    saved = torch.load(folder / name, weights_only=True)
    if case == "mask" and rank == 1:
        saved["parameters"][0]["mask"][:2].logical_not_()
    hooked = Recorded(SHARES | {"start_iter": 2} | changed)
    loads_nothing = case in SETTINGS or (case == "one has loaded nothing" and rank == 1)
    if not loads_nothing:  # with other settings a state would be refused before
        hooked.state.load_state_dict(saved)
    begun = time.monotonic()
    try:
        hooked.step(5)
    except ValueError as error:
        return str(error), time.monotonic() - begun
    return None


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Of three ranks, and of two."""
    folder = tmp_path_factory.mktemp("files")
    for size in (2, 3):
        (folder / str(size)).mkdir()
        assert start(size, folder / str(size), saves) == [None] * size
    return folder


SHARE = "another phi_global, phi_local, error_accumulation or momentum"


@pytest.mark.parametrize(
    ("case", "text"),
    [("step", "rank 1 begins with another step"), ("mask", "rank 1 begins with another shared mask"),
     ("one has loaded nothing", "rank 1 begins with another step"),
     ("rank", "rank 1 has loaded the state of another rank"),
     ("world size", "rank 0 has loaded a state of another world size"), ("phi_global", SHARE),
     ("phi_local", SHARE), ("error_accumulation", SHARE), ("momentum", SHARE),
     ("start_iter", "rank 1 begins with another start_iter")],
)  # fmt: skip
def test_ranks_that_begin_with_different_things_all_end_with_one_line(tmp_path, files, case, text):
    shutil.copytree(files / ("3" if case == "world size" else "2"), tmp_path, dirs_exist_ok=True)
    answers = start(2, tmp_path, begins, case)
    (said, _), (same, _) = answers
    assert said == same and said.startswith("TCSState: ") and text in said and "\n" not in said
    assert max(seconds for _, seconds in answers) < 5


def test_ranks_that_begin_with_the_same_go_on(tmp_path, files):
    shutil.copytree(files / "2", tmp_path, dirs_exist_ok=True)
    assert start(2, tmp_path, begins, "nothing") == [None] * 2
