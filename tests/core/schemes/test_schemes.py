"""Schemes by name, and what their suffixes mean."""

import subprocess
import sys

import pytest
import torch

import tcs_core as tcs

# Every scheme of the paper's tables and text, with what its name means there (Sec. III-B).
NAMES = {
    "TCS": ("TCS", 1, 32, None, None, 0.0),
    "TCS-L2": ("TCS", 2, 32, None, None, 0.0),
    "TCS-L4": ("TCS", 4, 32, None, None, 0.0),
    "TCS-L4-Q5": ("TCS", 4, 5, None, None, 0.0),
    "TCS-PLF": ("TCS", 1, 32, 1e-3, None, 0.0),
    "TCS-LF": ("TCS", 1, 32, 1e-3, 4e-4, 0.0),
    "TCS-LF-Q5": ("TCS", 1, 5, 1e-3, 4e-4, 0.0),
    "TCS-Q5": ("TCS", 1, 5, None, None, 0.0),
    "TCS-Global Momentum": ("TCS", 1, 32, None, None, 0.9),
    "TCS- Global Momentum": ("TCS", 1, 32, None, None, 0.9),
    "top-K": ("top-K", 1, 32, None, None, 0.0),
    "top-K-Q5": ("top-K", 1, 5, None, None, 0.0),
    "rand-K": ("rand-K", 1, 32, None, None, 0.0),
    "FedAvg": ("dense", 1, 32, None, None, 0.0),
    "FedAvg-L4": ("dense", 4, 32, None, None, 0.0),
    "Baseline": ("dense", 1, 32, None, None, 0.0),
    "Baseline-Momentum": ("dense", 1, 32, None, None, 0.9),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    s = tcs.Scheme.named(name)
    found = s.rule, s.local_steps, s.value_bits, s.phi_min_global, s.phi_min_local, s.momentum
    assert found == NAMES[name]
    assert s.centralized == name.startswith("Baseline")
    if s.rule == "TCS":
        assert (s.phi_global, s.phi_local) == (1e-2, 1e-3)


def test_a_name_is_read_in_any_case_and_kept_in_one_form():
    assert tcs.Scheme.named("TOP-K").name == "top-K"
    forms = {"tcs- global momentum": "TCS-Global Momentum", "TCS-momentum": "TCS-Global Momentum",
             "tcs-l4-q5": "TCS-L4-Q5", "baseline-MOMENTUM": "Baseline-Momentum",
             "tcs-pfl": "TCS-PLF"}  # fmt: skip
    for typed, kept in forms.items():
        assert tcs.Scheme.named(typed) == tcs.Scheme.named(kept)
        assert tcs.Scheme.named(typed).name == kept


def test_q5_is_a_sign_and_sixteen_intervals():
    assert tcs.Scheme.named("TCS-Q5").intervals == 16
    assert tcs.Scheme.named("TCS").intervals == 0


@pytest.mark.parametrize(
    "name", ["", 5, None, "TC", "TCS-", "TCSL4", "TCS-L0", "TCS-X", "rand-K-LF", "top-K-PLF", "Baseline-L4", "Baseline-Q5", "TCS-L2-L4", "TCS-LF-PLF",
             "TCS-L4-", "TCS-Q5-Q4", "TCS-Q0"]
)  # fmt: skip
def test_names_that_mean_nothing_are_refused_with_what_exists(name):
    with pytest.raises(ValueError, match="scheme") as raised:
        tcs.Scheme.named(name)
    assert repr(name) in str(raised.value)


def test_the_unknown_scheme_error_lists_the_known_ones():
    with pytest.raises(ValueError, match="'SignSGD' is unknown; known: ") as raised:
        tcs.Scheme.named("SignSGD")
    assert all(name in str(raised.value) for name in tcs.FAMILIES)


def test_what_only_a_variant_can_do_is_refused_where_none_is_registered(monkeypatch):
    """A field that nobody has given a meaning, and a scheme that asks a compressor for more."""
    monkeypatch.setattr(tcs, "SHARED_FROM", {})
    for source in ("weights", "random", "stale"):
        scheme = tcs.Scheme.named("TCS", shared_from=source)
        with pytest.raises(ValueError, match=rf"^TCS: shared_from '{source}' is not known: import"):
            tcs.Compressor(scheme, [10], 2)
    with pytest.raises(ValueError, match=r"^shared_from: got 'weights'"):
        tcs.Scheme.named("rand-K", shared_from="weights")


def test_a_source_of_the_shared_mask_of_ones_own(monkeypatch):
    """What is registered can be asked for; what is not is refused, and the error lists it."""

    class FirstEntries(tcs.TCS):
        def shared_mask(self):
            return torch.arange(self.k_global)

    with pytest.raises(ValueError, match=r"^shared_from: got 'first' .*allowed: update, stale"):
        tcs.Scheme.named("TCS", shared_from="first")
    monkeypatch.setitem(tcs.SHARED_FROM, "first", FirstEntries)
    compressor = tcs.Compressor(tcs.Scheme.named("TCS", shared_from="first"), [300], 1)
    compressor.step(torch.ones(1, 300))
    assert compressor.known.shared_K.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"^shared_from: got 'last' .*allowed: .*, first$"):
        tcs.Scheme.named("TCS", shared_from="last")


@pytest.mark.parametrize("changes", [{"momentum": 0.9}, {"error_unit": "gradient"}])
def test_a_compressor_refuses_what_only_a_federation_can_do(changes):
    with pytest.raises(
        ValueError, match=r"^TCS: .* needs more than compression: use tcs_core\.Federation$"
    ):
        tcs.Compressor(tcs.Scheme.named("TCS", **changes), [10], 2)


CONTRADICTIONS = [
    ("TCS-L4", "local_steps", 2), ("TCS-L4-Q5", "value_bits", 3), ("top-K-Q5", "quantizer", "sign"),
    ("FedAvg-L2-Global Momentum", "local_steps", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "field", "value"), CONTRADICTIONS)
def test_a_change_that_contradicts_the_name_is_refused(name, field, value):
    with pytest.raises(ValueError, match=rf"^scheme '{name}': {field}: got .*allowed: one of"):
        tcs.Scheme.named(name, **{field: value})
    same = getattr(tcs.Scheme.named(name), field)
    assert tcs.Scheme.named(name, **{field: same}) == tcs.Scheme.named(name)


def test_a_change_of_what_a_suffix_leaves_open_is_taken():
    assert tcs.Scheme.named("TCS-Global Momentum", momentum=0.5).momentum == 0.5
    assert tcs.Scheme.named("TCS-LF", phi_min_global=0.01).phi_min_global == 0.01


@pytest.mark.parametrize(
    ("name", "key", "other"),
    [("top-K", "phi_global", "phi_local"), ("rand-K", "phi_local", "phi_global")],
)
def test_a_fraction_of_the_mask_that_a_scheme_does_not_have_is_refused_with_the_other(
    name, key, other
):
    with pytest.raises(
        ValueError, match=rf"since another value has no meaning there \(set {other}\)$"
    ):
        tcs.Scheme.named(name, **{key: 0.0025})
    assert getattr(tcs.Scheme.named(name, **{other: 0.0025}), other) == 0.0025


def test_an_unknown_name_says_where_other_schemes_are():
    code = "import tcs_core as tcs\ntry:\n    tcs.Scheme.named('STC')\nexcept ValueError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.rstrip().endswith(
        "; import tcs_lab.schemes adds others, such as STC and DGC"
    )
