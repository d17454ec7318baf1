"""The exercises of notebooks 01 to 07: inputs, the results of the core, and typical mistakes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import tcs_core as tcs
from tcs_lab.teaching.exercises import Case, exercise, shown_value


def _copy(vector_D: Tensor | None) -> Tensor:
    """Return a copy of a vector that a client or a server of the core keeps."""
    assert vector_D is not None
    return vector_D.clone()


def _draw(seed: int, *shape: int) -> Tensor:
    """Draw seeded numbers from -5 to 5 with one decimal, so that a learner can follow them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 51, shape, generator=generator) / 10


class _Valley(nn.Module):
    """A model of one vector of parameters, for a loss of slope / 2 times its squared distance from the
    bottom."""

    def __init__(self, theta_D: Tensor):
        super().__init__()
        self.theta_D = nn.Parameter(theta_D.clone())


def _valley_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    slope_D, bottom_D = batch
    return (slope_D * (model.theta_D - bottom_D).square()).sum() / 2


def _make_federation(
    theta_D: Tensor, batches: list, scheme: tcs.Scheme, eta: float
) -> tcs.Federation:
    """Return the core's federation of one client, with a batch for every local step."""
    return tcs.Federation(_Valley(theta_D), [batches], scheme, eta, loss=_valley_loss)


# 01: federated averaging ──────────────────────────────────────────────────────────────────────────


def _without_weights(theta_D: Tensor, differences_ND: Tensor, weights_N: list[float]) -> Tensor:
    return theta_D + differences_ND.mean(0)


def _undivided(theta_D: Tensor, differences_ND: Tensor, weights_N: list[float]) -> Tensor:
    return theta_D + torch.tensor(weights_N) @ differences_ND


@exercise(
    "fedavg_round",
    "theta_D",
    mistakes=(
        (_without_weights, "This is the plain mean: weigh each client's difference."),
        (_undivided, "Divide by the sum of the weights."),
    ),
)
def _fedavg_round() -> Iterator[Case]:
    for seed, weights in enumerate(([1.0, 1.0], [1.0, 3.0], [2.0, 1.0, 5.0])):
        theta_D, deltas_ND = _draw(seed, 4), _draw(seed + 10, len(weights), 4)
        known = tcs.Known("FedAvg", [4])
        server = tcs.Server(known, weights)
        known.begin()
        for n, delta_D in enumerate(deltas_ND):
            server.add(n, tcs.Client(known, n).send(delta_D))
        update_D, _ = server.finish()
        given = {"theta_D": theta_D, "differences_ND": deltas_ND, "weights_N": weights}
        yield Case(given, theta_D + update_D)


def _one_long_step(theta_D: Tensor, gradient: Callable, eta: float, steps: int) -> Tensor:
    return -eta * steps * gradient(theta_D)


def _stepped(theta_D: Tensor, gradient: Callable, eta: float, steps: int) -> Tensor:
    for _ in range(steps):
        theta_D = theta_D - eta * gradient(theta_D)
    return theta_D


def _turned(theta_D: Tensor, gradient: Callable, eta: float, steps: int) -> Tensor:
    return theta_D - _stepped(theta_D, gradient, eta, steps)


@exercise(
    "local_difference",
    "difference_D",
    mistakes=(
        (_one_long_step, "Every step takes its gradient where the step before has led."),
        (_stepped, "This is the client's model: subtract the theta_D that it began with."),
        (_turned, "The sign: what training changed is the new model minus the old one."),
    ),
)
def _local_difference() -> Iterator[Case]:
    for seed, steps in enumerate((1, 2, 4)):
        theta_D, bottom_D = _draw(seed, 3), _draw(seed + 20, 3)
        slope_D, eta = torch.tensor([1.0, 0.5, 2.0]), 0.1

        def gradient(theta_D: Tensor, slope_D: Tensor = slope_D, bottom_D: Tensor = bottom_D):
            return slope_D * (theta_D - bottom_D)

        gradient.__doc__ = f"{shown_value(slope_D)} · (theta_D − {shown_value(bottom_D)})"
        scheme = tcs.Scheme.named("FedAvg", local_steps=steps)
        update_D = _make_federation(theta_D, [(slope_D, bottom_D)] * steps, scheme, eta).round()
        yield Case({"theta_D": theta_D, "gradient": gradient, "eta": eta, "steps": steps}, update_D)


# 02: sparsification ───────────────────────────────────────────────────────────────────────────────


def _by_sign(vector_D: Tensor, k: int) -> Tensor:
    return tcs.top_k_positions(vector_D - vector_D.min(), k)


def _higher_index(vector_D: Tensor, k: int) -> Tensor:
    return (len(vector_D) - 1 - tcs.top_k_positions(vector_D.flip(0), k)).sort().values


@exercise(
    "s_top",
    "positions",
    mistakes=(
        (_by_sign, "Negative entries count by their size: take magnitudes."),
        (_higher_index, "Of equal magnitudes the lower position wins."),
    ),
)
def _s_top() -> Iterator[Case]:
    tied = [[1.0, -3, 2, 0], [3.0, -3, 1, 3], [0.0, 2, -2, 2, 5, -2]]
    vectors = [*map(torch.tensor, tied), *(_draw(seed, 8) for seed in range(3))]
    for vector_D, k in zip(vectors, (1, 2, 3, 1, 4, 8), strict=True):
        yield Case({"vector_D": vector_D, "k": k}, tcs.top_k_positions(vector_D, k))


def _forgetful(errors_D: Tensor, delta_D: Tensor, k: int) -> tuple[Tensor, Tensor]:
    sent_D = delta_D * tcs.top_k_mask(delta_D, k)
    return sent_D, delta_D - sent_D


def _chosen_too_early(errors_D: Tensor, delta_D: Tensor, k: int) -> tuple[Tensor, Tensor]:
    sent_D = (delta_D + errors_D) * tcs.top_k_mask(delta_D, k)
    return sent_D, delta_D + errors_D - sent_D


def _old_errors_lost(errors_D: Tensor, delta_D: Tensor, k: int) -> tuple[Tensor, Tensor]:
    intended_D = errors_D + delta_D
    sent_D = intended_D * tcs.top_k_mask(intended_D, k)
    return sent_D, delta_D - sent_D


OLD_ERRORS = "The old errors are lost: the new ones are errors_D + delta_D minus what is sent."


@exercise(
    "accumulate",
    "sent_D",
    "errors_D",
    mistakes=(
        (_old_errors_lost, OLD_ERRORS),
        (_forgetful, "What waited in errors_D never gets its turn: add it first."),
        (_chosen_too_early, "Choose among what is meant to be sent, not among delta_D."),
    ),
)
def _accumulate() -> Iterator[Case]:
    known = tcs.Known(tcs.Scheme.named("top-K", phi_local=0.4), [5])
    client = tcs.Client(known)
    for number in range(1, 5):
        delta_D, errors_D = _draw(number + 30, 5), _copy(client.errors_D)
        known.begin()
        sent_D = known.expand_message(client.send(delta_D))
        client.arrived()
        given = {"errors_D": errors_D, "delta_D": delta_D, "k": 2}
        yield Case(given, (sent_D, _copy(client.errors_D)), f"round {number},")
        known.observe(sent_D)


# 03: a client of TCS ──────────────────────────────────────────────────────────────────────────────


def _client_round(errors_D: Tensor, delta_D: Tensor, own_K: Tensor, shared_K: Tensor) -> tuple:
    intended_D, places_K = errors_D + delta_D, torch.cat([shared_K, own_K])
    sent_D = torch.zeros_like(delta_D)
    sent_D[places_K] = intended_D[places_K]
    return own_K, sent_D, intended_D - sent_D


def _inside_too(errors_D: Tensor, delta_D: Tensor, shared_K: Tensor, k: int) -> tuple:
    own_K = tcs.top_k_positions(errors_D + delta_D, k)
    return _client_round(errors_D, delta_D, own_K, shared_K)


def _of_delta(errors_D: Tensor, delta_D: Tensor, shared_K: Tensor, k: int) -> tuple:
    own_K = tcs.top_k_positions(delta_D, k, shared_K)
    return _client_round(errors_D, delta_D, own_K, shared_K)


def _errors_of_delta(errors_D: Tensor, delta_D: Tensor, shared_K: Tensor, k: int) -> tuple:
    own_K = tcs.top_k_positions(errors_D + delta_D, k, shared_K)
    own_K, sent_D, new_D = _client_round(errors_D, delta_D, own_K, shared_K)
    return own_K, sent_D, new_D - errors_D


@exercise(
    "client_lines",
    "own_K",
    "sent_D",
    "errors_D",
    mistakes=(
        (_inside_too, "Line 10: the own mask lies outside the shared one."),
        (_of_delta, "Line 10 chooses among what line 9 makes, errors included."),
        (_errors_of_delta, OLD_ERRORS),
    ),
)
def _client_lines() -> Iterator[Case]:
    known = tcs.Known(tcs.Scheme.named("TCS", phi_global=0.25, phi_local=0.25), [8])
    client = tcs.Client(known)
    known.begin()  # dense: there is no update yet to take a mask from
    for number in range(1, 6):
        delta_D, errors_D = _draw(number + 40, 8), _copy(client.errors_D)
        message = client.send(delta_D)
        client.arrived()
        if not known.dense:
            k, shared_K = known.rule.k_local, known.shared_K
            given = {"errors_D": errors_D, "delta_D": delta_D, "shared_K": shared_K, "k_local": k}
            result = message.positions, known.expand_message(message), _copy(client.errors_D)
            yield Case(given, result, f"round {number},")
        known.observe(known.expand_message(message))
        known.begin()


def _from_weights(theta_D: Tensor, delta_D: Tensor, update_D: Tensor, k: int) -> Tensor:
    return tcs.top_k_positions(theta_D, k)


def _from_own(theta_D: Tensor, delta_D: Tensor, update_D: Tensor, k: int) -> Tensor:
    return tcs.top_k_positions(delta_D, k)


@exercise(
    "shared_mask",
    "shared_K",
    mistakes=(
        (_from_weights, "Not the model itself: what the last round changed in it."),
        (_from_own, "Only this client knows its own difference; all have received update_D."),
    ),
)
def _shared_mask() -> Iterator[Case]:
    for seed in range(3):
        theta_D, deltas_ND = _draw(seed + 50, 8), _draw(seed + 60, 2, 8)
        known = tcs.Known(tcs.Scheme.named("TCS", phi_global=0.25, phi_local=0.25), [8])
        update_D = deltas_ND.mean(0)
        known.begin()
        known.observe(update_D)
        known.begin()
        given = {"theta_D": theta_D, "delta_D": deltas_ND[0], "update_D": update_D}
        yield Case(given | {"k_global": known.rule.k_global}, known.shared_K)


# 04: layer-wise fairness ──────────────────────────────────────────────────────────────────────────


def _rounded_once(layer_sizes: list[int], k: int, phi_min: float) -> int:
    return max(0, k - math.ceil(phi_min * sum(layer_sizes)))


def _share_of_k(layer_sizes: list[int], k: int, phi_min: float) -> int:
    return max(0, k - len(layer_sizes) * math.ceil(phi_min * k))


def _share_of_k_once(layer_sizes: list[int], k: int, phi_min: float) -> int:
    return max(0, k - math.ceil(phi_min * k))


OF_SIZE = "phi_min is a share of the layer's own size, not of k."


def _below_zero(layer_sizes: list[int], k: int, phi_min: float) -> int:
    return k - sum(tcs.kept(phi_min, size) for size in layer_sizes)


@exercise(
    "free_places",
    "places",
    mistakes=(
        (_share_of_k, OF_SIZE),
        (_share_of_k_once, OF_SIZE),
        (_rounded_once, "Round up, and do it in every layer by itself."),
        (
            _below_zero,
            "If the minimum shares alone exceed k, no entry is left: return 0, not a negative number.",
        ),
    ),
)
def _free_places() -> Iterator[Case]:
    for sizes, k, phi_min in (
        ([4, 6, 10], 5, 0.2),
        ([4, 6, 10], 5, 0.1),
        ([100, 3, 50], 20, 0.05),
        ([2, 2, 2, 2], 3, 0.25),
    ):
        fair = sum(tcs.kept(phi_min, size) for size in sizes)
        yield Case({"layer_sizes": sizes, "k": k, "phi_min": phi_min}, max(0, k - fair))


def _plain_top_k(vector_D: Tensor, k: int, layer_sizes: list[int], phi_min: float) -> Tensor:
    return tcs.top_k_positions(vector_D, k)


def _shares_alone(vector_D: Tensor, k: int, layer_sizes: list[int], phi_min: float) -> Tensor:
    least = sum(tcs.kept(phi_min, size) for size in layer_sizes)
    return tcs.layerwise_top_k_positions(vector_D, least, layer_sizes, phi_min)


def _without_offsets(vector_D: Tensor, k: int, layer_sizes: list[int], phi_min: float) -> Tensor:
    layers = zip(vector_D.split(layer_sizes), layer_sizes, strict=True)
    own = [tcs.top_k_positions(layer, tcs.kept(phi_min, size)) for layer, size in layers]
    return _with_the_rest(torch.cat(own), vector_D, k)


def _layers_of_k(vector_D: Tensor, k: int, layer_sizes: list[int], phi_min: float) -> Tensor:
    own, start = [], 0
    for layer, size in zip(vector_D.split(layer_sizes), layer_sizes, strict=True):
        own.append(start + tcs.top_k_positions(layer, min(size, tcs.kept(phi_min, k))))
        start += size
    return _with_the_rest(torch.cat(own), vector_D, k)


def _with_the_rest(own_K: Tensor, vector_D: Tensor, k: int) -> Tensor:
    rest_K = tcs.top_k_positions(vector_D, max(0, k - len(own_K)), own_K)
    return torch.cat([own_K, rest_K]).sort().values


@exercise(
    "fair_top_k",
    "positions",
    mistakes=(
        (_plain_top_k, "This is plain top-K: a layer may get nothing."),
        (_without_offsets, "Positions in a layer count from its start: add the layers before it."),
        (_layers_of_k, OF_SIZE),
        (_shares_alone, "These are the shares alone: the rest of k goes by magnitude."),
    ),
)
def _fair_top_k() -> Iterator[Case]:
    sizes = [2, 3, 5]
    for seed, (k, phi_min) in enumerate(((4, 0.2), (6, 0.4), (5, 0.2), (5, 0.1), (5, 0.25))):
        vector_D = _draw(seed + 70, 10) * torch.tensor([8.0] * 2 + [2] * 3 + [0.5] * 5)
        wanted = tcs.layerwise_top_k_positions(vector_D, k, sizes, phi_min)
        given = {"vector_D": vector_D, "k": k, "layer_sizes": sizes, "phi_min": phi_min}
        yield Case(given, wanted)


# 05: global momentum ──────────────────────────────────────────────────────────────────────────────


def _momentum_rounds(seed: int, rounds: int, eta: float, beta: float) -> Iterator[tuple]:
    """Return the core's theta and momentum before a round, its update, and both after it."""
    batches = [(torch.tensor([1.0, 0.5, 2.0]), _draw(seed + t, 3)) for t in range(1, rounds + 1)]
    scheme = tcs.Scheme.named("FedSGD", momentum=beta)
    federation = _make_federation(_draw(seed, 3), batches, scheme, eta)
    for _ in range(rounds):
        before = federation.theta_D.clone(), _copy(federation.momentum_D)
        update_D = federation.round().clone()
        yield before, update_D, (federation.theta_D.clone(), _copy(federation.momentum_D))


def _beta_elsewhere(theta_D: Tensor, w_D: Tensor, g_D: Tensor, eta: float, beta: float) -> tuple:
    w_D = w_D + beta * g_D
    return theta_D - eta * w_D, w_D


def _uphill(theta_D: Tensor, w_D: Tensor, g_D: Tensor, eta: float, beta: float) -> tuple:
    w_D = beta * w_D + g_D
    return theta_D + eta * w_D, w_D


@exercise(
    "momentum_step",
    "theta_D",
    "w_D",
    mistakes=(
        (_beta_elsewhere, "This is the box's misprint: beta belongs to the old w_D."),
        (_uphill, "This is the text's misprint: the step goes against w_D."),
    ),
)
def _momentum_step() -> Iterator[Case]:
    eta, beta = 0.1, 0.9
    for t, (before, update_D, after) in enumerate(_momentum_rounds(80, 3, eta, beta), 1):
        given = {"theta_D": before[0], "w_D": before[1], "g_D": update_D}
        yield Case(given | {"eta": eta, "beta": beta}, after, f"round {t},")


def _swapped(gradient_D: Tensor, eta: float) -> tuple[float, float]:
    square = float(gradient_D.square().sum())
    return -eta * square, eta * square


@exercise(
    "loss_changes",
    "printed",
    "meant",
    mistakes=((_swapped, "The other way round: first what is printed, with its plus."),),
)
def _loss_changes() -> Iterator[Case]:
    for seed, eta in enumerate((0.1, 0.5, 0.2)):
        before, gradient_D, after = next(_momentum_rounds(seed + 90, 1, eta, 0.9))
        meant = float(gradient_D @ (after[0] - before[0]))
        printed = float(gradient_D @ (eta * after[1]))
        yield Case({"gradient_D": gradient_D, "eta": eta}, (printed, meant))


# 06: the position code ────────────────────────────────────────────────────────────────────────────


def _inside_only(bits: str, block: int) -> Tensor:
    """Alg. 4 without its block index."""
    found, pointer, width = [], 0, tcs.intra_block_bits(block)
    while pointer < len(bits):
        if bits[pointer] == "1":
            found.append(int("0" + bits[pointer + 1 : pointer + 1 + width], 2))
            pointer += width
        pointer += 1
    return torch.tensor(found, dtype=torch.int64)


@exercise(
    "decode",
    "positions",
    mistakes=((_inside_only, "These are positions inside blocks: add block index × block."),),
)
def _decode() -> Iterator[Case]:
    for positions, dimension, block in (
        ([0, 2, 9], 12, 4),
        ([], 6, 2),
        ([3, 5, 6, 19], 20, 5),
        ([0, 1, 15], 16, 8),
        ([1, 4], 5, 1),
    ):
        positions_K = torch.tensor(positions, dtype=torch.int64)
        stream = tcs.encode_positions(positions_K, dimension, block).tolist()
        yield Case({"bits": "".join(map(str, stream)), "block": block}, positions_K)


def _floored(count: int, dimension: int, block: int) -> int:
    return count * (1 + int(math.log2(block))) + math.ceil(dimension / block)


def _without_flags(count: int, dimension: int, block: int) -> int:
    return count * tcs.intra_block_bits(block) + math.ceil(dimension / block)


def _without_ends(count: int, dimension: int, block: int) -> int:
    return count * (1 + tcs.intra_block_bits(block))


@exercise(
    "code_bits",
    "bits",
    mistakes=(
        (_floored, "A position inside a block takes whole bits: round log2(block) up."),
        (_without_flags, "Every entry has a flag of one bit, too."),
        (_without_ends, "Every block ends with one bit."),
    ),
)
def _code_bits() -> Iterator[Case]:
    for count, dimension, block in ((3, 20, 4), (10, 100, 10), (4, 21, 5), (0, 9, 4), (2, 7, 1)):
        stream = tcs.encode_positions(torch.arange(count), dimension, block)
        yield Case({"count": count, "dimension": dimension, "block": block}, len(stream))


# 07: fractional quantization ──────────────────────────────────────────────────────────────────────


def _from_zero(value: float, u_max: float, u_min: float, intervals: int) -> int:
    sigma = (u_min / u_max) ** (1 / intervals)
    inside = (p for p in range(1, intervals) if abs(value) > sigma**p * u_max)
    return next(inside, intervals) - 1


def _lower_end_in(value: float, u_max: float, u_min: float, intervals: int) -> int:
    sigma = (u_min / u_max) ** (1 / intervals)
    inside = (p for p in range(1, intervals) if abs(value) >= sigma**p * u_max)
    return next(inside, intervals)


def _equal_widths(value: float, u_max: float, u_min: float, intervals: int) -> int:
    width = (u_max - u_min) / intervals
    return min(intervals, 1 + int((u_max - abs(value)) / width))


@exercise(
    "interval_of",
    "p",
    mistakes=(
        (_from_zero, "Intervals are counted from 1, the largest values first."),
        (_lower_end_in, "An interval's lower end is not in it; its upper end is."),
        (_equal_widths, "Intervals have equal ratios, not equal widths."),
    ),
)
def _interval_of() -> Iterator[Case]:
    ends = 16.0, 1.0  # sigma = 1/2 with four intervals
    values = [16.0, 9.5, -9.5, 8.0, -3.0, 2.5, 1.0, 0.0]
    cases = [(value, *ends, 4) for value in values] + [(2.0, 10.0, 0.1, 8), (-0.7, 5.0, 0.2, 16)]
    for value, u_max, u_min, intervals in cases:
        codes, _ = tcs.fractional_quantize(torch.tensor([u_max, u_min, value]), intervals)
        given = {"value": value, "u_max": u_max, "u_min": u_min, "intervals": intervals}
        yield Case(given, int(codes[2]) % intervals + 1)


def _signless(codes: list[int], means: list[float]) -> Tensor:
    return torch.tensor([means[code % len(means)] for code in codes])


@exercise(
    "dequantize",
    "values",
    mistakes=((_signless, "A code of P or more means a negative value."),),
)
def _dequantize() -> Iterator[Case]:
    for seed, intervals in itertools.product(range(2), (1, 2, 4)):
        codes_K, means_P = tcs.fractional_quantize(_draw(seed + 100, 6), intervals)
        wanted = tcs.fractional_dequantize(codes_K, means_P)
        yield Case({"codes": codes_K.tolist(), "means": means_P.tolist()}, wanted)
