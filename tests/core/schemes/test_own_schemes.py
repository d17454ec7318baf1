"""Section 1: quantizers and schemes of one's own, and the one table of suffixes."""

import dataclasses
import re

import pytest
import torch

import tcs_core as tcs


def test_a_quantizer_of_ones_own_in_a_round(uniform):
    """Every value sent is the middle of one of eight equal parts of the largest magnitude."""
    scheme = tcs.Scheme.named("top-K-U4", phi_local=0.5)
    assert (scheme.quantizer, scheme.value_bits) == ("uniform", 4)
    delta_D = torch.linspace(-8, 8, 101)
    compressor = tcs.Compressor(scheme, [101], 1)
    update_D = compressor.step(delta_D[None])
    sent = update_D[update_D != 0]
    assert len(sent) == 51 and set(sent.abs().tolist()) == {3.5, 4.5, 5.5, 6.5, 7.5}
    assert float((sent - delta_D[update_D != 0]).abs().max()) <= 0.5 + 1e-6
    assert torch.equal(update_D + compressor.errors_ND[0], delta_D)
    assert compressor.bits_up == 4 * 51 + 32 * 8 + tcs.position_bits(51, 101, 1)


def test_it_is_not_the_papers(uniform):
    values_K = torch.randn(100, generator=torch.Generator().manual_seed(1))
    ours, papers = (tcs.Scheme.named(name) for name in ("TCS-U3", "TCS-Q3"))
    none = torch.empty(0, dtype=torch.int64)
    one, other = (tcs.Message.of(values_K, none, 3, quantizer=s.quantizer) for s in (ours, papers))
    assert torch.equal(one.codes, uniform(values_K, 4)[0])
    assert not torch.equal(one.means, other.means)


@pytest.mark.parametrize("name", ["TCS-U4", "top-K-U2", "TCS-U1", "FedAvg-U3"])
@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_its_messages_decode_to_what_was_encoded(uniform, name, scale):
    scheme = tcs.Scheme.named(name)
    values_K = scale * torch.randn(60, generator=torch.Generator().manual_seed(2)) ** 3
    shared_K, own_K = torch.arange(0, 100, 2), torch.arange(1, 20, 2)
    wire = tcs.Wire.up(scheme, [60, 60])
    message = tcs.Message.of(values_K, own_K, scheme.value_bits, 1, 2, scheme.quantizer)
    decoded = tcs.decode_message(
        tcs.encode_message(message, wire), wire, shared_K, 1, 2, len(own_K)
    )
    for key in ("values", "positions", "codes", "means"):
        assert torch.equal(getattr(decoded, key), getattr(message, key)), key


@pytest.mark.parametrize("letter", ["Q", "q", "l", "L", "5", "", "-", "U-"])
def test_a_letter_that_is_taken_or_none(registry, letter):
    before = registry()
    with pytest.raises(
        ValueError, match=r"letter: got .*, allowed: letters that begin no other suffix"
    ):
        tcs.register_quantizer(letter, "mine")
    assert registry() == before


def test_a_name_that_another_letter_has(registry, uniform):
    before = registry()
    with pytest.raises(ValueError, match=r"^name: got 'uniform', which another letter stands for"):
        tcs.register_quantizer("V", "uniform")
    assert registry() == before


def test_the_papers_quantizer_stays(registry):
    before = registry()
    with pytest.raises(ValueError, match=r"^quantizer 'fractional' is the paper's: choose another"):
        tcs.register_quantizer("U", "fractional")
    assert registry() == before


def test_a_quantizer_registered_twice_is_the_second(uniform):
    suffixes = len(tcs.SUFFIXES)

    @tcs.register_quantizer("U", "uniform")
    def other(values_K, intervals):
        return values_K.int(), torch.zeros(intervals)

    assert len(tcs.SUFFIXES) == suffixes and tcs.QUANTIZERS["uniform"] is other


def test_a_quantizer_of_ones_own_never_sees_an_empty_message(uniform):
    class Nothing(tcs.TopK):
        def own_count(self, shared):
            return None

        def own_mask(self, intended_D, shared_D, k):
            return torch.empty(0, dtype=torch.int64)

    tcs.register_scheme("Nothing", phi_global=None)(Nothing)
    compressor = tcs.Compressor("Nothing-U3", [4], 1, link=tcs.Link(tcs.unchanged))
    assert compressor.step(torch.ones(1, 4)).tolist() == [0.0] * 4
    assert compressor.errors_ND.tolist() == [[1.0] * 4] and compressor.bits_up == 4 * 32


@pytest.mark.parametrize(
    "wrong",
    [lambda v, n: (v, torch.ones(n)), lambda v, n: (v.int(), torch.ones(n, dtype=torch.float64)),
     lambda v, n: (v.int()[None], torch.ones(n)), lambda v, n: (v.int(), torch.ones(n + 1)),
     lambda v, n: (v.int()[:1], torch.ones(n))],
)  # fmt: skip
def test_a_quantizer_that_gives_other_types_or_sizes_is_named(uniform, wrong):
    tcs.register_quantizer("U", "uniform")(wrong)
    compressor = tcs.Compressor("FedAvg-U3", [4], 1)
    allowed = r"codes \(4,\) torch.int32 and means \(4,\) torch.float32"
    with pytest.raises(ValueError, match=rf"quantizer uniform: got codes .*, allowed: {allowed}"):
        compressor.step(torch.ones(1, 4))


def test_a_rule_is_told_of_every_round_before_its_mask_is_asked_for(registry):
    told = []

    @tcs.register_scheme("Mine")
    class Mine(tcs.TCS):
        def begin(self, theta_D=None, masks=1):
            told.append((theta_D, masks))

        def shared_mask(self):
            told.append("mask")
            return super().shared_mask()

    known, theta_D = tcs.Known("Mine", [30]), torch.ones(30)
    known.begin(dense=True)
    known.observe(torch.arange(30.0))
    known.begin(theta_D=theta_D, mask_factor=3)
    (none, one), (theirs_D, three), mask = told
    assert (none, one, theirs_D is theta_D, three, mask) == (None, 1, True, 3, "mask")


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [("Mine", {"phi_global": 2.0}, "phi_global: got 2.0 .*allowed: a fraction"),
     ("Mine", {"local_steps": 0}, "local_steps: got 0"),
     ("Mine", {"quantizer": "none"}, "quantizer: got 'none' .*allowed: fractional"),
     ("Mine", {"phi_global": None, "phi_local": None}, "nothing is sent"),
     ("Mine", {"phi": 0.1}, "unknown field: phi; allowed: centralized, code"),
     ("Mine", {"rule": "TCS"}, "unknown field: rule"), ("", {}, "name: got ''"),
     ("TCS", {}, "is known already"), ("top-K", {}, "is known already"), ("Baseline", {}, "is known already"),
     ("dense", {}, "is known already"), ("tcs", {}, "is known already"), ("TCS-L4", {}, "is known already"),
     ("TCS+", {}, "is known already"), ("Mine+", {}, "is known already")],
)  # fmt: skip
def test_a_scheme_with_something_wrong_leaves_nothing_behind(registry, name, fields, text):
    before = registry()
    with pytest.raises(ValueError, match=text):
        tcs.register_scheme(name, **fields)(type("Mine", (tcs.TCS,), {}))
    assert registry() == before


@pytest.mark.parametrize("needs", [("shard",), ("own", "Shared"), "shared", (1,)])
def test_a_suffix_that_needs_what_no_scheme_has(registry, needs):
    before = registry()
    with pytest.raises(
        ValueError, match=r"^needs: got .*, allowed: (a list|own, shared, masks, S_top, )"
    ):
        tcs.register_suffix("-G<n>", r"g([1-9])", "says", needs)
    assert registry() == before


@pytest.mark.parametrize("suffix", tcs.SUFFIXES, ids=lambda s: s.form)
def test_every_suffix_can_be_asked_for_and_is_listed(suffix):
    name = "TCS" + re.sub(r"<\w+>", "2", suffix.form)
    asked, plain = tcs.Scheme.named(name), tcs.Scheme.named("TCS")
    assert asked.name == name and dataclasses.replace(asked, name="TCS") != plain
    with pytest.raises(ValueError, match="is unknown; known: ") as raised:
        tcs.Scheme.named("SignSGD")
    assert suffix.form in re.split(", | where", str(raised.value).split(", with ")[1])


def test_a_suffix_of_ones_own_is_spelt_as_it_was_registered(monkeypatch):
    monkeypatch.setattr(tcs, "SUFFIXES", [*tcs.SUFFIXES])
    tcs.register_suffix("-Gamma<n>", r"gamma(\d+)", "gamma")(
        lambda fields, number: {"phi_local": 0.1}
    )
    tcs.register_suffix("-Local Momentum", "local momentum", "of clients")(
        lambda fields, number: {"phi_global": 0.1}
    )
    assert tcs.Scheme.named("TCS-gamma05").name == "TCS-Gamma5"
    mine = tcs.Scheme.named("tcs-local momentum-l2")
    assert (mine.name, mine.momentum) == ("TCS-Local Momentum-L2", 0.0)
    assert tcs.Scheme.named("Baseline-Global Momentum").name == "Baseline-Momentum"
    assert tcs.Scheme.named("TCS-momentum").name == "TCS-Global Momentum"


def test_suffixes_that_set_the_same_or_what_no_scheme_has(monkeypatch):
    monkeypatch.setattr(tcs, "SUFFIXES", [*tcs.SUFFIXES])
    for letter in "XY":
        tcs.register_suffix(f"-{letter}<n>", rf"{letter.lower()}(\d)", "smaller", last=True)(
            lambda fields, number: {"phi_global": 0.1 / number}
        )
    assert tcs.Scheme.named("TCS-X2").phi_global == 0.05
    for name in ("TCS-X2-Y2", "TCS-X2-X4"):
        with pytest.raises(ValueError, match="sets what another suffix sets"):
            tcs.Scheme.named(name)
    tcs.register_suffix("-Typo", "typo", "wrong")(lambda fields, number: {"phi_locl": 0.1})
    with pytest.raises(ValueError, match=r"^suffix -Typo: unknown field: phi_locl; allowed: "):
        tcs.Scheme.named("TCS-Typo")
    tcs.register_suffix("-GU", "gu", "unit")(lambda fields, number: {"error_unit": "gradient"})
    with pytest.raises(ValueError, match="error_unit: got 'difference' beside 'GU', which says"):
        tcs.Scheme.named("TCS-GU", error_unit="difference")


class CutsWhatIsMeant(tcs.TCS):
    def own_mask(self, intended_D, shared_D, k):
        intended_D[shared_D] = 0.0
        return super().own_mask(intended_D, shared_D, k)


class HidesSomeShared(tcs.TCS):
    def own_mask(self, intended_D, shared_D, k):
        shared_D.logical_not_()
        return super().own_mask(intended_D, ~shared_D, k)


class LosesSigns(tcs.TCS):
    def observe(self, update_D):
        super().observe(update_D.abs_())


@pytest.mark.parametrize("rule", [CutsWhatIsMeant, HidesSomeShared, LosesSigns])
def test_a_rule_that_changes_what_it_is_given_is_named(registry, rule):
    tcs.register_scheme("Mine")(rule)
    compressor = tcs.Compressor("Mine", [100], 1)
    method = "observe: update_D" if rule is LosesSigns else "own_mask: one of its tensors"
    said = f"^scheme Mine: {method} was changed in place, .*allowed: a changed copy"
    with pytest.raises(ValueError, match=said):
        for _ in range(2):
            compressor.step(torch.linspace(-1, 1, 100)[None])


def test_rounds_in_inference_mode_whose_tensors_do_not_count_changes():
    updates = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            compressor = tcs.Compressor("TCS", [100], 1)
            deltas_ND = torch.linspace(-1, 1, 100)[None]
            updates.append([compressor.step(deltas_ND).tolist() for _ in range(3)])
    assert updates[0] == updates[1]


class Overlaps(tcs.TCS):
    def own_mask(self, intended_D, shared_D, k):
        return intended_D.abs().topk(k).indices.sort().values


@pytest.mark.parametrize("as_bool", [False, True])
@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_an_own_mask_inside_the_shared_mask_is_refused_on_every_device(
    registry, monkeypatch, as_bool, on_a_gpu
):
    class Mine(Overlaps):
        def own_mask(self, intended_D, shared_D, k):
            positions_K = super().own_mask(intended_D, shared_D, k)
            return tcs.positions_to_mask(positions_K, 100) if as_bool else positions_K

    tcs.register_scheme("Mine")(Mine)
    if on_a_gpu:
        monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    compressor = tcs.Compressor("Mine", [100], 2)
    deltas_ND = torch.linspace(-1, 1, 100).expand(2, 100)
    compressor.step(deltas_ND)
    said = r"^scheme Mine: .*own mask: got entries of the shared mask, allowed: only others"
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            compressor.step(deltas_ND)
    assert compressor.known.round == 3


def test_a_suffix_gets_a_copy_of_the_fields_and_returns_a_dictionary(monkeypatch):
    monkeypatch.setattr(tcs, "SUFFIXES", [*tcs.SUFFIXES])
    tcs.register_suffix("-Silent", "silent", "changes what it is given")(
        lambda fields, number: fields.update(local_steps=4)
    )
    with pytest.raises(ValueError, match=r"^suffix -Silent: got None .*allowed: a dictionary"):
        tcs.Scheme.named("TCS-Silent")
    tcs.register_suffix("-Both", "both", "changes what it is given, too")(
        lambda fields, number: fields.update(local_steps=4) or {"momentum": 0.5}
    )
    made = tcs.Scheme.named("TCS-Both")
    assert (made.local_steps, made.momentum) == (1, 0.5)


def test_needs_may_be_any_iterable_and_last_is_a_flag(monkeypatch):
    monkeypatch.setattr(tcs, "SUFFIXES", [*tcs.SUFFIXES])
    tcs.register_suffix("-H<n>", r"h(\d)", "of the shared mask", iter(("shared",)))(
        lambda fields, number: {"phi_global": number / 100}
    )
    with pytest.raises(ValueError, match="makes no sense without a shared mask"):
        tcs.Scheme.named("top-K-H2")
    with pytest.raises(ValueError, match=r"^last: got 2 .*allowed: True or False"):
        tcs.register_suffix("-I", "i", "says", last=2)
