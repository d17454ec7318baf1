"""Section 6: a round happens for all or for nobody, wherever Ctrl-C meets it.

An interruption is made before every line of the core that a round runs through, one after another:
either the round is one in which nobody was heard, or the compressor refuses every call until a
state is loaded, and says so."""

import dataclasses
import sys

import pytest
import tcs_lab.schemes.rivals  # noqa: F401  (DGC; and the variants)
import torch
from common import deltas_like_training, same_state, whole_state

import tcs_core as tcs

SIZES = [30, 10]
CODE = tcs.__file__
CALLS = {
    "step": lambda made: made.step(torch.ones(3, 40)),
    "round": lambda made: made.round(lambda n: torch.ones(40), [0]),
    "state_dict": lambda made: made.state_dict(),
    "scale_errors_": lambda made: made.scale_errors_(2.0),
}


class InterruptsBefore:
    """Raises an error before the line with this number that is run inside the core."""

    def __init__(self, line, error=KeyboardInterrupt):
        self.left, self.error = line, error
        self.before = sys.gettrace()

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, _):
        if self.left < 0 or frame.f_code.co_filename != CODE:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                raise self.error
        return self.trace


def made_of(name, link):
    scheme = dataclasses.replace(tcs.Scheme.named(name), error_unit="difference")
    return tcs.Compressor(scheme, SIZES, 3, link=link)


def links():
    return {
        "counted": lambda: tcs.Link(),
        "bytes": lambda: tcs.Link(tcs.unchanged),
        "skips": lambda: tcs.Link(lambda who, data: data[:-1] if who == 1 else data, "skip"),
    }


def shared(made):
    """What nobody's being heard leaves as it was: mask, rule, and what the server keeps."""
    rule = {key: value for key, value in vars(made.rule).items() if key not in ("round", "server")}
    kept = made.rule.state_dict(), made.server.state_dict(), whole_state(*rule.values())
    return kept, made.server.heard, made.server.explored_D.clone(), made.traffic


def nobody_was_heard(made, before, error, t):
    assert any(f"round {t}: nobody was heard in it" in note for note in error.__notes__)
    assert same_state(shared(made)[0][:2], before[0][:2])
    assert made.server.heard == [] and not made.server.explored_D.any()
    assert made.traffic == before[3]
    assert made.known.round == t + 1 and made.known.status == tcs.CLOSED
    update_D = made.step(torch.ones(3, 40))
    assert update_D.isfinite().all() and made.known.round == t + 2


def is_refused_until_a_state_is_loaded(made, saved, t):
    for name, call in CALLS.items():
        with pytest.raises(ValueError, match=r"load_state_dict of a saved state, or a new"):
            call(made)
        assert made.known.round in (t, t + 1), name
    with pytest.raises(ValueError, match=r"server is missing"):
        made.load_state_dict({key: value for key, value in saved.items() if key != "server"})
    with pytest.raises(ValueError, match="interrupted"):
        made.state_dict()  # a state that was refused does not count
    made.load_state_dict(saved)
    assert same_state(made.state_dict(), saved)
    made.step(torch.ones(3, 40))


# Scheme, link, whether the round is dense, and every how many lines it is interrupted.
CASES = [("TCS-Q5", "counted", False, 2), ("TCS-D2", "counted", False, 4),
         ("TCS-Q5", "bytes", False, 4), ("TCS", "counted", True, 3), ("TCS-Q5++", "bytes", False, 5),
         ("top-K", "skips", False, 4), ("rand-K", "counted", False, 3), ("DGC", "counted", False, 3),
         ("TCS-W10", "counted", False, 3)]  # fmt: skip


@pytest.mark.parametrize(("name", "link", "dense", "stride"), CASES)
def test_ctrl_c_before_any_line_of_a_round_leaves_it_done_for_all_or_nobody(
    name, link, dense, stride
):
    t, ends = 2, {"nobody": 0, "refused": 0}
    deltas = list(deltas_like_training(t + 1, 3, SIZES))
    made = made_of(name, links()[link]())
    for deltas_ND in deltas[:t]:
        made.step(deltas_ND)
    saved = made.state_dict()
    for line in range(0, 10_000, stride):
        made.load_state_dict(saved)
        made.traffic = tcs.Traffic()
        before = shared(made)
        try:
            with InterruptsBefore(line):
                made.step(deltas[t], dense=dense)
            break
        except KeyboardInterrupt as error:
            notes = getattr(error, "__notes__", [])
            if not notes:  # before the round, or after it
                continues(made, t)
            elif any("its end was interrupted" in note for note in notes):
                is_refused_until_a_state_is_loaded(made, saved, t)
                ends["refused"] += 1
            else:
                nobody_was_heard(made, before, error, t)
                ends["nobody"] += 1
    assert ends["nobody"] > 15 and ends["refused"] >= 1, ends


def continues(made, t):
    """Nothing had begun, or all was done but for saying so."""
    assert made.known.status == tcs.CLOSED and made.known.round in (t, t + 1)
    if made.known.round == t:
        made.step(torch.ones(3, 40))


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, SystemExit])
@pytest.mark.parametrize("where", [60, 90, 140, 400])
def test_other_errors_inside_the_core_end_a_round_like_ctrl_c(error, where):
    made = made_of("TCS-Q5", tcs.Link())
    for deltas_ND in deltas_like_training(2, 3, SIZES):
        made.step(deltas_ND)
    before = shared(made)
    with pytest.raises(error) as raised, InterruptsBefore(where, error):
        made.round(lambda n: torch.ones(40), [0, 1, 2])
    nobody_was_heard(made, before, raised.value, 2)


class Half(tcs.TCS):
    """A rule that is interrupted when it has changed."""

    keeps = ("seen",)
    seen = 0
    fails = False

    def observe(self, update_D):
        super().observe(update_D)
        self.seen += 1
        if Half.fails:
            raise KeyboardInterrupt


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("code", ["block", "entropy"])
@pytest.mark.parametrize("bits", [32, 5])
def test_a_rule_that_had_changed_already_is_as_before(dense, code, bits, monkeypatch):
    tcs.register_scheme("Half")(Half)
    scheme = tcs.Scheme.named("Half", code=code, value_bits=bits)
    made = tcs.Compressor(scheme, SIZES, 3, link=tcs.Link(tcs.unchanged))
    rounds = list(deltas_like_training(4, 3, SIZES))
    made.step(rounds[0]), made.step(rounds[1])
    before = shared(made)
    monkeypatch.setattr(Half, "fails", True)
    with pytest.raises(KeyboardInterrupt) as raised:
        made.step(rounds[2], dense=dense)
    monkeypatch.setattr(Half, "fails", False)
    assert made.rule.seen == 2
    nobody_was_heard(made, before, raised.value, 2)
    del tcs.RULES["Half"], tcs.FAMILIES["Half"]


@pytest.mark.parametrize("name", ["TCS-D2", "TCS-Q5++", "STC", "TCS-D1-L2"])
def test_a_reply_that_is_damaged_leaves_the_servers_errors(name):
    made = made_of(name, tcs.Link(tcs.unchanged))
    rounds = list(deltas_like_training(4, 3, SIZES))
    made.step(rounds[0]), made.step(rounds[1])
    before = made.server.state_dict()
    made.link.channel = lambda who, data: data[:-1] if who == tcs.SERVER else data
    with pytest.raises(tcs.MessageError, match=r"^server: message: "):
        made.step(rounds[2])
    assert same_state(made.server.state_dict(), before)
    made.link.channel = tcs.unchanged
    made.step(rounds[3])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_scaling_that_is_interrupted_makes_the_compressor_refuse(stage, monkeypatch):
    made = made_of("TCS", tcs.Link())
    made.step(torch.ones(3, 40))
    saved = made.state_dict()

    def interrupted(factor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(made.clients[stage], "scale_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.scale_errors_(2.0)
    is_refused_until_a_state_is_loaded(made, saved, 1)
