"""Arguments that would give a wrong result, or an error that helps nobody, are refused by a line that names
the value; and what is right but unusual works."""

import copy
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from common import same_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import tcs_core as tcs

VECTOR = torch.tensor([3.0, -1.0, 0.5, 2.0])


def small_federation(**settings):
    batch = torch.ones(2, 3), torch.tensor([0, 1])
    given = {"schedule": 0.1, "scheme": "TCS"} | settings
    return tcs.Federation(nn.Linear(3, 2), [[batch]] * 2, **given)


# Sections 1 and 2 ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("excluded, says", [
    ([0], "got a list"), (torch.zeros(4), "float32"), (torch.tensor([-1]), "-1 to -1"),
    (torch.tensor([4]), "4 to 4"), (torch.ones(5, dtype=torch.bool), r"shape \(5,\)"),
    (torch.ones(3, dtype=torch.bool), r"shape \(3,\)"),
])  # fmt: skip
def test_excluded_entries_that_do_not_fit_are_refused(excluded, says):
    with pytest.raises(ValueError, match=says):
        tcs.top_k_positions(VECTOR, 1, excluded)
    with pytest.raises(ValueError, match=says):
        tcs.layerwise_top_k_positions(VECTOR, 1, [2, 2], 0.1, excluded)


@pytest.mark.parametrize("k", [1.0, 2.5, -1, 5, "2", None])
def test_a_k_that_is_no_whole_number_of_entries_is_refused(k):
    for choose in (tcs.top_k_positions, tcs.top_k_mask):
        with pytest.raises(ValueError, match=r"^k: got"):
            choose(VECTOR, k)


def test_a_matrix_is_refused():
    for choose in (tcs.top_k_positions, tcs.top_k_mask):
        with pytest.raises(ValueError, match=r"got shape \(2, 2\)"):
            choose(VECTOR.view(2, 2), 1)
    with pytest.raises(ValueError, match=r"got shape \(2, 2\)"):
        tcs.layerwise_top_k_positions(VECTOR.view(2, 2), 1, [2], 0.1)


@pytest.mark.parametrize("sizes, phi_min, says", [
    ([4, 0], 0.1, "layer_sizes"), ([5, -1], 0.1, "layer_sizes"), ([3], 0.1, "layer_sizes"),
    ([2, 2], 1.5, "phi_min"), ([2, 2], 0.0, "phi_min"), ([2, 2], float("nan"), "phi_min"),
])  # fmt: skip
def test_layers_and_shares_that_do_not_fit_are_refused(sizes, phi_min, says):
    with pytest.raises(ValueError, match=f"^{says}: got"):
        tcs.layerwise_top_k_positions(VECTOR, 2, sizes, phi_min)


def test_a_field_that_no_scheme_has_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"unknown field: foo; allowed: .*phi_global"):
        tcs.Scheme.named("TCS", foo=1)


@pytest.mark.parametrize("rule", [object, tcs.Client, lambda: None, 3])
def test_only_mask_rules_are_schemes(rule):
    with pytest.raises(ValueError, match="a class derived from MaskRule"):
        tcs.register_scheme("Mine", phi_local=0.1)(rule)
    assert "Mine" not in tcs.RULES and "Mine" not in tcs.FAMILIES


def test_names_of_what_is_kept_are_a_tuple():
    class Forgot(tcs.TCS):
        keeps = "average_D"  # a comma is missing

    with pytest.raises(ValueError, match=r"keeps: got 'average_D', allowed: a tuple"):
        tcs.register_scheme("Mine", phi_global=0.1, phi_local=0.1)(Forgot)


# Sections 5 to 7 ──────────────────────────────────────────────────────────────────────────────────


def test_links_and_channels_are_checked_before_the_first_round():
    with pytest.raises(ValueError, match=r"^link: got"):
        small_federation(link=tcs.unchanged)
    with pytest.raises(ValueError, match=r"^channel: got 'foo'"):
        tcs.Link("foo")


@pytest.mark.parametrize("errors_D", [
    torch.zeros(2, 30), torch.zeros(29), torch.zeros(30, dtype=torch.float64), [0.0] * 30
])  # fmt: skip
def test_errors_of_another_shape_or_type_are_refused(errors_D):
    with pytest.raises(ValueError, match=r"^errors_D: got"):
        tcs.Client(tcs.Known("TCS", [30]), 0, errors_D)


def used_compressor():
    compressor = tcs.Compressor("TCS", [30, 20], 2)
    for _ in range(2):
        compressor.step(torch.randn(2, 50, generator=torch.Generator().manual_seed(0)))
    return compressor


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), "2", None])
def test_errors_are_not_multiplied_by_what_is_not_finite(factor):
    compressor = used_compressor()
    before = compressor.state_dict()
    with pytest.raises(ValueError, match=r"^factor: got"):
        compressor.scale_errors_(factor)
    assert same_state(compressor.state_dict(), before)


def test_errors_are_not_lost_to_other_memory():
    compressor = used_compressor()
    before = compressor.state_dict()
    with pytest.raises(ValueError, match="before the first round"):
        compressor.keep_errors_in(torch.zeros(2, 50))
    assert same_state(compressor.state_dict(), before)


def test_a_state_with_errors_that_are_not_finite_is_refused():
    compressor = used_compressor()
    state = compressor.state_dict()
    state["clients"][1]["errors_D"][3] = float("nan")
    before = compressor.state_dict()
    with pytest.raises(ValueError, match="errors_D: got NaN"):
        compressor.load_state_dict(state)
    assert same_state(compressor.state_dict(), before)


def test_weights_of_a_model_are_no_state():
    federation = small_federation()
    with pytest.raises(ValueError, match=r"without `version`, with the keys .*weight"):
        federation.load_state_dict(federation.averaged_state_dict())


@pytest.mark.parametrize("name", ["TCS", "TCS-W10"])
def test_a_first_update_that_is_all_zero_makes_no_mask_on_any_device(name, monkeypatch):
    """A learning rate that rises from 0 has one. The next round is then dense, too."""
    made = []
    for on_cpu in (True, False):
        monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor, on_cpu=on_cpu: on_cpu)
        compressor = tcs.Compressor(name, [30, 20], 2)
        generator = torch.Generator().manual_seed(0)
        updates = []
        for number in range(4):
            deltas_ND = torch.randn(2, 50, generator=generator) * (number > 0)
            updates.append(compressor.step(deltas_ND, dense=number == 0))
        made.append((torch.stack(updates), compressor.bits_up))
    assert torch.equal(made[0][0], made[1][0]) and made[0][1] == made[1][1]


# Section 8 ────────────────────────────────────────────────────────────────────────────────────────


class Samples(list):
    """A data set that is a list, and says who goes through it."""

    def __iter__(self):
        raise AssertionError("somebody goes through all samples")


def test_a_data_set_that_is_a_list_is_not_gone_through():
    samples = Samples((torch.tensor([float(i)]), i) for i in range(20))
    halves = random_split(samples, [10, 10], torch.Generator().manual_seed(0))
    loaders = [DataLoader(samples, 5, shuffle=True), DataLoader(halves[0], 5),
               DataLoader(samples, 5, sampler=list(range(20)))]  # fmt: skip
    feed = tcs.Feed(loaders)
    seen = [feed.batch(n, 0, tau)[1].tolist() for n in range(3) for tau in range(2)]
    assert seen[4:] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] and len({*seen[0], *seen[1]}) == 10


def test_an_iterator_that_has_begun_cannot_go_back():
    feed = tcs.Feed([iter(range(100))])
    assert [feed.batch(0, 0, tau) for tau in range(3)] == [0, 1, 2]
    state = feed.state_dict()
    assert [feed.batch(0, 0, tau) for tau in range(3)] == [3, 4, 5]
    with pytest.raises(ValueError, match=r"client 0: got an iterator .* cannot go back"):
        feed.load_state_dict(state)
    assert feed.batch(0, 0, 0) == 6
    again = tcs.Feed([iter(range(100))])  # a fresh one, as after a restart
    again.load_state_dict(state)
    assert again.batch(0, 0, 0) == 3


def test_random_numbers_are_those_of_the_models_own_gpu(monkeypatch):
    """torch.cuda.manual_seed means the current GPU, which may be another one than the model's."""
    current, seeded = [], []

    class Current:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *raised):
            current.pop()

    federation = small_federation()
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeded.append(list(current)))
    monkeypatch.setattr(federation.trainer.flat, "device", torch.device("cuda:1"))
    next(federation.trainer._steps(0, 0))
    assert seeded == [[torch.device("cuda:1")]]


# Section 9 ────────────────────────────────────────────────────────────────────────────────────────


def test_a_torch_without_distributed_can_use_all_but_the_hook():
    code = (
        "import torch.distributed as dist; dist.is_available = lambda: False; del dist.GradBucket\n"
        "import tcs_core; print(tcs_core.Compressor('TCS', [30], 2).known.round)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("group", [0.02, 2, "gloo", nn.Linear(2, 2)])
def test_a_first_argument_that_is_no_process_group_is_refused(group):
    with pytest.raises(ValueError, match=r"^process_group: got"):
        tcs.TCSState(group)


def test_the_hook_needs_a_state():
    with pytest.raises(ValueError, match=r"^tcs_hook: state: got None, allowed: a TCSState"):
        tcs.tcs_hook(None, object())


def test_the_code_of_many_positions_needs_little_memory():
    """Positions that a stranger sends, at most some dozen bytes for each byte of the code."""
    tracemalloc = pytest.importorskip("tracemalloc")
    dimension, block = 2**20, 64
    chosen = sorted(random.Random(0).sample(range(dimension), 20_000))
    bits = tcs.encode_positions(torch.tensor(chosen), dimension, block)
    tracemalloc.start()
    found = tcs.decode_positions(bits, dimension, block)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tolist() == chosen
    assert peak < 8 * len(bits)  # what numpy and Python allocate; a list of numbers takes more


# Wrong kinds of values, all over ──────────────────────────────────────────────────────────────────

POSITIONS = torch.tensor([3, 50])
ARRAY = np.ones(3, np.float32)
SCHEME = tcs.Scheme.named("TCS-Q5")

REFUSED = {
    "top_k of an array": (lambda: tcs.top_k_positions(ARRAY, 1), "vector_D: got a ndarray"),
    "layers of an array": (
        lambda: tcs.layerwise_top_k_positions(ARRAY, 1, [3], 0.1), "vector_D: got a ndarray"),
    "phi_min None": (
        lambda: tcs.layerwise_top_k_positions(VECTOR, 1, [4], None), "phi_min: got None"),
    "mask of an array": (lambda: tcs.positions_to_mask(ARRAY, 10), "positions: got a ndarray"),
    "mask of int32": (
        lambda: tcs.positions_to_mask(POSITIONS.int(), 100), r"positions: got shape \(\d+,\) torch\.int32"),
    "k above D": (lambda: tcs.random_positions(101, 100, 0), r"k: got 101 .* from 0 to 100"),
    "k below 0": (lambda: tcs.random_positions(-1, 100, 0), "k: got -1"),
    "seed below 0": (lambda: tcs.random_positions(5, 100, -1), "seed: got -1 .* >= 0"),
    "codes of an array": (lambda: tcs.encode_positions(ARRAY, 16, 4), "positions: got a ndarray"),
    "a block of 1/phi": (
        lambda: tcs.encode_positions(POSITIONS, 100, 1 / 0.01), "block: got 100.0"),
    "bits of a list": (lambda: tcs.decode_positions([1, 0], 16, 4), "bits: got a list"),
    "block for a float": (lambda: tcs.block_for(3, 333.5), r"dimension: got 333\.5"),
    "block for too many": (lambda: tcs.block_for(400, 336), "count: got 400 .* from 0 to 336"),
    "block for -3": (lambda: tcs.block_for(-3, 100), "count: got -3"),
    "block of nothing": (lambda: tcs.block_for(0, 0), "dimension: got 0"),
    "sign of a list": (lambda: tcs.scaled_sign([1.0]), "values: got a list"),
    "quantized matrix": (
        lambda: tcs.fractional_quantize(torch.ones(2, 2), 4), r"values: got shape \(2, 2\)"),
    "intervals of a float": (
        lambda: tcs.fractional_quantize(VECTOR, 2**5 / 2), r"intervals: got 16\.0"),
    "dequantized list": (
        lambda: tcs.fractional_dequantize([1], VECTOR), "codes: got a list"),
    "budget of a list": (lambda: tcs.bit_budget("TCS", [60, 40]), r"dimension: got \[60, 40\]"),
    "budget of nothing": (lambda: tcs.bit_budget("TCS", 0), "dimension: got 0"),
    "17 bits": (lambda: tcs.Message.of(VECTOR, POSITIONS, 17), "value_bits: got 17"),
    "no quantizer": (
        lambda: tcs.Message.of(VECTOR, POSITIONS, 5, quantizer="nope"), "quantizer: got 'nope'"),
    "width as text": (lambda: tcs.build_model("resnet8", "64"), "width: got '64'"),
    "no classes": (lambda: tcs.resnet18(4, classes=0), "classes: got 0"),
    "sizes of floats": (lambda: tcs.Wire.up(SCHEME, [60.9, 40.9]), r"layer_sizes: got \[60\.9"),
    "sizes below 0": (lambda: tcs.Wire.up("TCS", [-5]), "layer_sizes: got"),
    "sizes of floats for a fair mask": (
        lambda: tcs.layerwise_top_k_positions(torch.ones(4), 2, [2.0, 2.0], 0.1),
        r"layer_sizes: got \[2\.0, 2\.0\], allowed: one or more whole numbers"),
    "no sizes for a fair mask": (
        lambda: tcs.layerwise_top_k_positions(torch.ones(0), 0, [], 0.1), r"layer_sizes: got \[\]"),
    "sizes in a tensor of one number": (
        lambda: tcs.Known("TCS", torch.tensor(100)), "layer_sizes: got 100 .* a list"),
    "a position without a dimension": (
        lambda: tcs.positions_to_mask(torch.tensor(3), 10), r"positions: got shape \(\) torch\.int64"),
    "a tag below 0": (
        lambda: tcs.encode_message(tcs.Message.dense_of(torch.ones(5)), tcs.Wire(32, "block", (5,)), -1),
        "mask_tag: got -1"),
    "a difference on another device": (
        lambda: tcs.Compressor("TCS", [100], 2).step(torch.ones(2, 100, device="meta")),
        "delta_D: got one on meta, allowed: one on cpu"),
    "errors on another device": (
        lambda: tcs.Client(tcs.Known("TCS", [100]), 0, torch.ones(100, device="meta")),
        "errors_D: got one on meta, allowed: one on cpu"),
    "keeps without a comma": (
        lambda: type("Mine", (tcs.Client,), {"keeps": "momentum_D"})(tcs.Known("TCS", [9])).state_dict(),
        r"Mine: keeps: got 'momentum_D' .* a tuple, such as \('momentum_D',\)"),
    "sizes of a number": (lambda: tcs.Known("TCS", 100), "layer_sizes: got 100 .* a list"),
    "20 bits": (lambda: tcs.Wire(20, "block", (5,)), "value_bits: got 20"),
    "no code": (lambda: tcs.Wire(32, "zip", (5,)), "code: got 'zip'"),
    "one order for two": (
        lambda: tcs.Known("FedAvg", [60, 6], order=[(0, 1)]), r"order: got .* layout_of"),
    "order of parameters": (
        lambda: tcs.Known("FedAvg", [6, 2], order=nn.Linear(3, 2).parameters()), "order: got"),
    "a client of a name": (lambda: tcs.Client("TCS"), "known: got 'TCS'"),
    "a server of a name": (lambda: tcs.Server("TCS"), "known: got 'TCS'"),
    "no weights": (lambda: tcs.Server(tcs.Known("TCS", [4]), []), r"weights: got \[\]"),
    "errors of none": (
        lambda: tcs.Client(tcs.Known("FedAvg", [4]), 0, torch.zeros(4)), "errors_D: got some, but FedAvg"),
    "a centralized FedAvg": (
        lambda: tcs.Scheme.named("FedAvg", centralized=True), "FedAvg: centralized: got True"),
    "a name with a blank": (lambda: tcs.register_scheme("My Rule "), "scheme: name: got 'My Rule '"),
    "a blank after a dash": (lambda: tcs.register_scheme("My - Rule"), "scheme: name: got 'My - Rule'"),
    "a mask that is shared from elsewhere": (
        lambda: tcs.register_scheme("Mine", shared_from="weights"),
        "shared_from: got 'weights' .*'update' with a rule of your own"),
    "weights by client": (
        lambda: tcs.Compressor("FedAvg", [4], 2, weights={1: 100, 2: 300}), r"weights: got \{"),
    "one weight": (lambda: tcs.Compressor("FedAvg", [4], 2, weights=3), "weights: got 3"),
    "a model's name": (
        lambda: tcs.Federation("resnet18", [[1]], "TCS", 0.1), "model: got 'resnet18'"),
    "torch's loss": (
        lambda: small_federation(loss=nn.CrossEntropyLoss()), "loss: got .* a function of the model"),
    "no loss": (lambda: small_federation(loss=None), "loss: got None"),
    "ranks for a group": (lambda: tcs.TCSState([0]), r"process_group: got \[0\]"),
    "a scheme without a name": (lambda: tcs.register_scheme(None), "scheme: name: got None"),
    "a broken pattern": (
        lambda: tcs.register_suffix("-G<n>", r"g([1-9]", "x"), r"suffix -G<n>: pattern: got .*\("),
    "a suffix without words": (lambda: tcs.register_suffix("-G", "g", ""), "suffix: says: got ''"),
    "a suffix that is text": (
        lambda: tcs.register_suffix("-G", "g", "x")("change"), "suffix -G: got 'change'"),
    "a quantizer's number": (lambda: tcs.register_quantizer("U", 5), "quantizer: name: got 5"),
    "a quantizer that is text": (
        lambda: tcs.register_quantizer("U", "uniform")("text"), "quantizer uniform: got 'text'"),
}  # fmt: skip


@pytest.mark.parametrize("call, says", REFUSED.values(), ids=REFUSED)
def test_a_wrong_kind_of_value_is_named(call, says):
    tables = tcs.SUFFIXES, tcs.QUANTIZERS, tcs.FAMILIES, tcs.RULES
    before = [copy.copy(table) for table in tables]
    with pytest.raises(ValueError, match=f"^{says}"):
        call()
    assert [*tables] == before


def test_a_suffix_whose_group_is_no_whole_number(monkeypatch):
    monkeypatch.setattr(tcs, "SUFFIXES", [*tcs.SUFFIXES])
    tcs.register_suffix("-G<x>", r"g(\d\.\d)", "half", ("any scheme",))(lambda fields, number: {})
    with pytest.raises(ValueError, match=r"^suffix -G<x>: the part '0\.5' of 'G0\.5' matches"):
        tcs.Scheme.named("TCS-G0.5")


def test_positions_of_a_list_of_clients_do_not_make_a_round_dense():
    """`step(deltas, [0, 2])` once made a dense round of everybody."""
    compressor, deltas_ND = tcs.Compressor("TCS", [100], 3), torch.randn(3, 100)
    compressor.step(deltas_ND)
    before = compressor.state_dict()
    for wrong in ([0, 2], 2, "no", torch.tensor([0, 2])):
        with pytest.raises(ValueError, match=r"^dense: got .* allowed: True or False; .* clients="):
            compressor.step(deltas_ND, wrong)
        with pytest.raises(ValueError, match=r"^dense: got "):
            compressor.round(lambda n: deltas_ND[n], [0], wrong)
        with pytest.raises(ValueError, match=r"^dense: got "):
            compressor.known.begin(wrong)
    assert same_state(compressor.state_dict(), before)
    compressor.step(deltas_ND, np.bool_(True))
    assert compressor.bits_up == 3200
    for wrong in (0, 2):
        with pytest.raises(ValueError, match=f"^clients: got {wrong} .* a list"):
            compressor.step(deltas_ND, clients=wrong)
    federation = small_federation(schedule=lambda t: tcs.Phase(0.1, 3))
    with pytest.raises(ValueError, match=r"^schedule: round 0: dense: got 3 "):
        federation.round()
    assert federation.t == 0
    phase, wide = lambda t: tcs.Phase(0.1, mask_factor=0), tcs.Scheme.named("TCS", warmup_masks=10)
    federation = small_federation(schedule=phase, scheme=wide)
    with pytest.raises(ValueError, match=r"^schedule: round 0: mask_factor: got 0 .* 1 to 1000"):
        federation.round()
    assert federation.t == 0


@pytest.mark.parametrize("name", ["to_server", "to_clients"])
@pytest.mark.parametrize("wrong", ["message", "pair of nothing", "length", "negative", "other"])
def test_what_a_link_returns_is_checked_before_a_round_closes(name, wrong):
    class Mine(tcs.Link):
        def to_server(self, known, n, message):
            return changed(super().to_server(known, n, message), name == "to_server")

        def to_clients(self, server):
            return changed(super().to_clients(server), name == "to_clients")

    def changed(pair, is_wrong):
        if not is_wrong or not on:
            return pair
        return {"message": pair[0], "pair of nothing": ("text", pair[1]), "length": (pair[0], 3.0),
                "negative": (pair[0], -8), "other": [*pair]}[wrong]  # fmt: skip

    on = []
    compressor, deltas_ND = tcs.Compressor("TCS", [100], 2, link=Mine()), torch.randn(2, 100)
    compressor.step(deltas_ND)
    positions_K = compressor.rule.positions.clone()
    on.append(True)
    with pytest.raises(ValueError, match=rf"^Mine\.{name}: got .* allowed: a pair of"):
        compressor.step(deltas_ND)
    assert torch.equal(compressor.rule.positions, positions_K)
    on.clear()
    compressor.step(deltas_ND)


@pytest.mark.parametrize("update, says", [
    (lambda update_D: update_D.double(), r"update_D: got torch\.float64"),
    (lambda update_D: update_D[:5], r"update_D: got shape \(5,\)"),
    (lambda update_D: update_D / 0, "server"),
])  # fmt: skip
def test_an_update_that_a_link_has_spoilt_does_not_arrive(update, says):
    class Mine(tcs.Link):
        def to_clients(self, server):
            update_D, bits = super().to_clients(server)
            return update(update_D), bits

    batch = torch.randn(8, 3), torch.randint(2, (8,))
    made = tcs.Federation(nn.Linear(3, 2), [[batch]] * 2, "FedAvg", 0.1, link=Mine())
    theta_D = made.theta_D.clone()
    with pytest.raises(ValueError, match=says):
        made.round()
    assert torch.equal(made.theta_D, theta_D) and made.is_whole


def test_whether_a_client_was_heard_is_no_list():
    """The list of the clients that were heard is not empty, so it once counted as True."""
    known = tcs.Known("top-K", [100])
    known.begin()
    client, server = tcs.Client(known), tcs.Server(known)
    server.add(0, client.send(torch.randn(100)))
    heard = [*server.heard]
    _, reply = server.finish()
    with pytest.raises(ValueError, match=r"^heard: got \[0\] .* True or False"):
        client.receive(reply, heard)
    assert client.in_flight is not None and known.round == 0


def test_a_server_names_a_number_of_another_type():
    known = tcs.Known("top-K", [100])
    known.begin()
    message = tcs.Client(known).send(torch.randn(100))
    server = tcs.Server(known)
    with pytest.raises(ValueError, match=r"^number: got '0' \(str\), allowed: a client's number"):
        server.add("0", message)
    server.add(np.int64(0), message)
    assert server.heard == [0]


@pytest.mark.parametrize(
    "wrong", [torch.ones(99), torch.ones(1), [1.0] * 100, torch.ones(100).double()]
)
def test_a_wrong_vector_is_not_withdrawn(wrong):
    known = tcs.Known("top-K", [100])
    known.begin()
    client = tcs.Client(known)
    client.send(torch.ones(100))
    with pytest.raises(ValueError, match=r"^delta_D: got "):
        client.withdraw(wrong)
    assert client.sent_in(0) and torch.equal(client.errors_D, torch.ones(100))
    client.withdraw(torch.ones(100))
    assert not client.errors_D.any()


@pytest.mark.parametrize("wrong", [3.0, -5, "1", torch.tensor([4]), True])
def test_a_round_that_is_given_up_is_a_number(wrong):
    known = tcs.Known("TCS", [100])
    with pytest.raises(ValueError, match=r"^round: got "):
        known.lose(wrong)
    assert known.round == 0
    known.lose(torch.tensor(4))
    tcs.Known("TCS", [100]).load_state_dict(known.state_dict())
    assert known.round == 5 and type(known.round) is int


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "2"])
def test_errors_are_not_scaled_by_what_is_no_number(wrong):
    client = tcs.Client(tcs.Known("top-K", [10]), 0, torch.ones(10))
    with pytest.raises(ValueError, match=r"^factor: got "):
        client.scale_(wrong)
    assert torch.equal(client.errors_D, torch.ones(10))


def with_loader(data):
    return DataLoader(TensorDataset(*data), batch_size=2)


@pytest.mark.parametrize("make, says", [
    (lambda x, y: [[(x, y)], [(x[:0], y[:0])]], r"batch: labels of shape \(0,\), allowed: one or"),
    (lambda x, y: [TensorDataset(x, y)] * 2, r"batch: labels of shape \(\), .* a DataLoader"),
    (lambda x, y: (x, y), "batch: got Tensor, allowed: a pair"),
    (lambda x, y: [[(x, y, y)]] * 2, "batch: got 3 parts"),
])  # fmt: skip
def test_batches_that_are_none_are_refused(make, says):
    data = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    tcs.Federation(nn.Linear(3, 2), [with_loader(data)] * 2, "TCS", 0.1).round()
    with pytest.raises(ValueError, match=f"^{says}"):
        tcs.Federation(nn.Linear(3, 2), make(*data), "TCS", 0.1).round()


def test_a_loss_without_a_gradient_is_named():
    made = small_federation(loss=lambda model, batch: tcs.cross_entropy(model, batch).detach())
    with pytest.raises(ValueError, match=r"^loss: got one without a gradient, .* torch\.no_grad"):
        made.round()
    made = small_federation()
    with torch.no_grad(), pytest.raises(ValueError, match=r"^loss: got one without a gradient"):
        made.round()
    made.round()


def test_a_feed_with_a_wrong_number_of_clients():
    class Mine:
        clients = "2"

        def batch(self, n, t, tau):
            return torch.ones(2, 3), torch.tensor([0, 1])

    with pytest.raises(ValueError, match=r"^feed: clients: got '2' \(str\)"):
        tcs.Federation(nn.Linear(3, 2), Mine(), "TCS", 0.1)


def test_statistics_of_all_clients_are_not_those_of_one():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    batch = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    made = tcs.Federation(net, [[batch]] * 2, "TCS", 0.1)
    made.round()
    with pytest.raises(ValueError, match=r"^statistics_S: got"), made.evaluated(made.statistics_NS):
        pass
    with made.evaluated(made.statistics_NS[1]) as model:
        assert not model.training
