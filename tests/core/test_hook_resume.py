"""Section 9: the DDP hook, stopped and resumed; and ranks that begin with different things."""

import copy
import io
import itertools
import pickle
import shutil
import time

import pytest
import torch
from common import Alone, Bucket, alone_in_a_group
from hooked import SHARES, Recorded, flat, small_net
from processes import start
from torch import nn

import tcs_core as tcs

SMALL = 0.003  # bucket_cap_mb of several buckets


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


class Training:
    """SGD with momentum under DDP; all that a checkpoint needs."""

    def __init__(self, cap, saved=None, **settings):
        self.hooked = Recorded(tcs.TCSState(**(SHARES | settings)), bucket_cap_mb=cap)
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
    ("cap", "stop", "start_iter", "again"),
    [
        (25, 5, 2, 0),
        (SMALL, 5, 2, 0),
        (SMALL, 2, 3, 0),
        (SMALL, 3, 3, 0),
        (SMALL, 5, 1, 1),
    ],
)
def test_a_run_in_two_parts_ends_in_the_bits_of_one(tmp_path, cap, stop, start_iter, again):
    """Stopped among sparse steps, dense ones, and where they meet."""
    for answer in start(2, tmp_path, stopped_and_resumed, cap, stop, start_iter, again):
        assert answer[:5] == (True, True, True, True, 8) and (answer[5] > 1) == (cap < 1)


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


def test_a_collective_that_fails_in_the_first_step_of_a_loaded_state_ends_it(monkeypatch):
    """As in any other step: DDP would wait for its buckets for ever."""
    alone_in_a_group(monkeypatch)
    parameters = [torch.zeros(30), torch.zeros(70)]
    first, second = (tcs.TCSState(Alone(), start_iter=1) for _ in range(2))
    for _ in range(2):
        tcs.tcs_hook(first, Bucket(torch.randn(100), parameters)).wait()
    second.load_state_dict(first.state_dict())
    broken = torch.futures.Future()
    broken.set_exception(RuntimeError("the other end is gone"))
    monkeypatch.setattr(Alone, "get_future", lambda work: broken)
    future = tcs.tcs_hook(second, Bucket(torch.randn(100), parameters))
    assert future.done()
    with pytest.raises(RuntimeError, match="the other end is gone"):
        future.wait()


def another_model(ranks, folder, layers):
    hooked = Recorded(tcs.TCSState(start_iter=1, **SHARES))
    hooked.step(0)
    state = tcs.TCSState(start_iter=1, **SHARES)
    state.load_state_dict(hooked.state.state_dict())
    sizes = [20, *[4] * layers]
    other = [nn.Linear(*size) for size in itertools.pairwise(sizes)]
    Recorded(state, nn.Sequential(*other)).step(1)


@pytest.mark.parametrize(
    ("layers", "text"), [(3, "got a parameter of"), (2, "another model"), (4, "another model")]
)
def test_the_state_of_another_model_is_refused(tmp_path, layers, text):
    for said in start(2, tmp_path, another_model, layers):
        assert said.startswith("ValueError: TCSState: ") and text in said and "\n" not in said


# Ranks that begin with different things ───────────────────────────────────────────────────────────


def saves(ranks, folder):
    trained = Training(25, start_iter=2).train(range(4))
    torch.save(trained.state.state_dict(), folder / f"state{ranks.rank}")
    trained.train([4])
    torch.save(trained.state.state_dict(), folder / f"later{ranks.rank}")


def begins(ranks, folder, case):
    """What it says, in how many seconds."""
    rank, changed, name = ranks.rank, {}, f"state{ranks.rank}"
    if case in ("phi_global", "phi_local", "start_iter", "error_accumulation") and rank == 1:
        changed = {case: {"start_iter": 3, "error_accumulation": False}.get(case, 0.03)}
    if case == "step" and rank == 1:
        name = "later1"
    if case == "rank":
        name = "state0"
    saved = torch.load(folder / name, weights_only=True)
    if case == "mask" and rank == 1:
        saved["slots"][0]["mask"][:2].logical_not_()
    hooked = Recorded(tcs.TCSState(**(SHARES | {"start_iter": 2} | changed)))
    if not (case == "one has loaded nothing" and rank == 1):
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


SHARE = "another phi_global, phi_local or error_accumulation"


@pytest.mark.parametrize(
    ("case", "text"),
    [("step", "rank 1: another step"), ("mask", "rank 1: another shared mask"),
     ("one has loaded nothing", "rank 1: another step"),
     ("rank", "rank 1: another rank of the saved state, allowed: its own state_dict"),
     ("world size", "rank 0: another world size of the saved state"), ("phi_global", SHARE),
     ("phi_local", SHARE), ("error_accumulation", SHARE), ("start_iter", "rank 1: another start_iter")],
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


# Copies ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_module_that_holds_the_state_lets_go_of_it(copied):
    model = small_net()
    model.state = tcs.TCSState()
    with pytest.warns(UserWarning, match=r"TCSState: a copy lets go of it; .*state_dict"):
        twin = copied(model)
    assert twin.state is None and type(model.state) is tcs.TCSState
    assert torch.equal(flat(twin.parameters()), flat(model.parameters()))


def copied_under_ddp(ranks, folder):
    """The copy averages as DDP does; what it is of goes on."""
    hooked = Recorded(None)
    hooked.model.register_comm_hook(tcs.TCSState(start_iter=1, **SHARES), tcs.tcs_hook)
    hooked.step(0)
    with pytest.warns(UserWarning, match="TCSState: a copy"):
        twin = copy.deepcopy(hooked.model)
    hooked.step(1)
    x = torch.full((8, 20), 1.0 + ranks.rank)
    twin.zero_grad()
    twin(x).square().mean().backward()
    return flat(p.grad for p in twin.parameters()).numpy(), hooked.model._comm_hooks[0][1].iter


def test_a_copy_of_a_model_under_ddp_goes_on_without_the_hook(tmp_path):
    (one, steps), (two, same) = start(2, tmp_path, copied_under_ddp)
    assert (one == two).all() and (one != 0).mean() > 0.3 and steps == same == 2
