"""Section 1: quantizers and schemes of one's own, and the one table of suffixes."""

import dataclasses
import inspect
import re
import textwrap

import pytest
import torch
from common import HeldFeed
from torch import nn

import tcs_core as tcs


@pytest.fixture
def registry():
    """What is registered in a test is taken out again."""
    tables = (tcs.RULES, tcs.FAMILIES, tcs.QUANTIZERS)
    before, suffixes = [dict(table) for table in tables], list(tcs.SUFFIXES)
    yield lambda: ([list(table) for table in tables], list(tcs.SUFFIXES))
    for table, entries in zip(tables, before, strict=True):
        table.clear(), table.update(entries)
    tcs.SUFFIXES[:] = suffixes


@pytest.fixture
def uniform(registry):
    """The quantizer in `register_quantizer`'s docstring."""
    lines = inspect.getdoc(tcs.register_quantizer).splitlines()
    example = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))
    names = {"torch": torch, "register_quantizer": tcs.register_quantizer}
    exec(example, names)
    return names["uniform_quantize"]


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


@pytest.mark.parametrize("name", ["TCS-U4", "TCS-U4+", "top-K-U2+", "TCS-U1"])
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


def test_it_works_in_static_rounds(uniform):
    def federation():
        inputs = torch.randn(2, 9, 4, 5, generator=torch.Generator().manual_seed(3))
        feed = HeldFeed([[(x, torch.arange(4) % 3) for x in row] for row in inputs])
        torch.manual_seed(0)
        return tcs.Federation(nn.Linear(5, 3), feed, "TCS-U4-W9", 0.1)

    eager, static = federation(), federation()
    for _ in range(9):
        eager.round()
    static.round(), static.round()
    rounds = tcs.StaticRounds(static, 7)
    assert rounds.suits(static.scheme, tcs.Link()) and rounds.ready(range(2, 9))
    rounds.play(range(2, 9))
    torch.testing.assert_close(static.theta_D, eager.theta_D, rtol=1e-5, atol=1e-7)
    assert len(static.theta_D.unique()) > 1


@pytest.mark.parametrize("letter", ["Q", "M", "l", "K", "E", "D", "W", "5", "", "-", "U-"])
def test_a_letter_that_is_taken_or_none(registry, letter):
    before = registry()
    with pytest.raises(ValueError, match=r"letter: got .*, allowed: letters that no suffix has"):
        tcs.register_quantizer(letter, "mine")
    assert registry() == before


@pytest.mark.parametrize("name", ["fractional", "lloyd"])
def test_the_cores_own_quantizers_stay(registry, name):
    before = registry()
    with pytest.raises(ValueError, match=f"quantizer '{name}' is one of the core's own"):
        tcs.register_quantizer("U", name)
    assert registry() == before


def test_a_quantizer_registered_twice_is_the_second(uniform):
    suffixes = len(tcs.SUFFIXES)

    @tcs.register_quantizer("U", "uniform")
    def other(values_K, intervals):
        return values_K.int(), torch.zeros(intervals)

    assert len(tcs.SUFFIXES) == suffixes and tcs.QUANTIZERS["uniform"] is other


def test_a_quantizer_of_ones_own_never_sees_an_empty_message(uniform):
    class Nothing(tcs.TopK):
        def own_count(self, shared_K):
            return None

        def local_mask(self, intended_D, shared_K):
            return torch.empty(0, dtype=torch.int64)

    tcs.register_scheme("Nothing", phi_global=None)(Nothing)
    compressor = tcs.Compressor("Nothing-U3", [4], 1, link=tcs.ByteLink())
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
    with pytest.raises(ValueError, match=r"quantizer uniform: got .*; allowed: .* \(4,\)"):
        compressor.step(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [("Mine", {"phi_global": 2.0}, "phi_global: got 2.0 .*allowed: a share"),
     ("Mine", {"local_steps": 0}, "local_steps: got 0"),
     ("Mine", {"quantizer": "none"}, "quantizer: got 'none' .*allowed: fractional, lloyd"),
     ("Mine", {"phi_global": None, "phi_local": None}, "nothing is sent"),
     ("Mine", {"phi": 0.1}, "unknown field: phi; allowed: centralized, code"),
     ("Mine", {"rule": "TCS"}, "unknown field: rule"), ("", {}, "name: got ''"),
     ("TCS", {}, "core's own"), ("top-K", {}, "core's own"), ("Baseline", {}, "core's own"),
     ("dense", {}, "core's own"), ("tcs", {}, "core's own"), ("TCS-L4", {}, "core's own"),
     ("TCS+", {}, "core's own"), ("Mine+", {}, "core's own")],
)  # fmt: skip
def test_a_scheme_with_something_wrong_leaves_nothing_behind(registry, name, fields, text):
    before = registry()
    with pytest.raises(ValueError, match=text):
        tcs.register_scheme(name, **fields)(type("Mine", (tcs.TCS,), {}))
    assert registry() == before


@pytest.mark.parametrize("suffix", tcs.SUFFIXES, ids=lambda s: s.form)
def test_every_suffix_can_be_asked_for_and_is_listed(suffix):
    name = "TCS" + re.sub(r"<\w+>", "2", suffix.form)
    asked, plain = tcs.Scheme.named(name), tcs.Scheme.named("TCS")
    assert asked.name == name and dataclasses.replace(asked, name="TCS") != plain
    with pytest.raises(ValueError, match="is unknown; known: ") as raised:
        tcs.Scheme.named("SignSGD")
    assert suffix.form in re.split(", | where", str(raised.value).split(", with ")[1])
