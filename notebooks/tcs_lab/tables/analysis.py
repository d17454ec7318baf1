"""How accuracies are compared: by least squares over scheme and seed, with seeds and images both drawn.

The rules, and why, stand at the head of params/claims.yaml. Accuracies are in percent, differences
and half-widths in percentage points, variances in squared points.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit  # scipy.stats takes seconds to import

DRAWS = 4000  # of the bootstrap
NO_WEIGHT = 1e-18  # a sum of squared weights up to this is nothing but rounding errors
Cell = (
    Any  # that which runs of several seeds have in common, such as a scheme at its rate; hashable
)
Run = tuple[Cell, int]  # a cell and a seed


# Least squares ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Fit:
    """value = cell + block + residual over R runs, by least squares."""

    cells: tuple[Cell, ...]  # the first columns of the design
    solver_PR: np.ndarray  # the design's pseudo-inverse
    values_R: np.ndarray
    residuals_R: np.ndarray
    leverages_R: np.ndarray  # the part of each value in its own fitted value
    groups: tuple[Hashable, ...]  # of each run; the residuals of a group have one variance

    def group_variance(self, group: Hashable) -> tuple[float, float]:
        """Return the variance of one residual of a group and its degrees of freedom, which add up
        to R minus the design's rank over all groups. The variance is nan without degrees of
        freedom."""
        its_R = self.group_mask(group)
        squares = float(self.residuals_R[its_R] @ self.residuals_R[its_R])
        freedom = round(float(np.sum(1 - self.leverages_R[its_R])), 9)
        return squares / freedom if freedom else math.nan, freedom

    def group_mask(self, group: Hashable) -> np.ndarray:
        """Which of the runs (R,) are those of a group."""
        return np.array([one == group for one in self.groups])

    def variance_of(self, weights_R: np.ndarray) -> tuple[float, float]:
        """Return the variance of the sum of weighted values, and its degrees of freedom."""
        variances, freedoms = [], []
        for group in dict.fromkeys(self.groups):
            its_R = self.group_mask(group)
            if (squares := float(weights_R[its_R] @ weights_R[its_R])) > NO_WEIGHT:
                variance, freedom = self.group_variance(group)
                variances.append(variance * squares)
                freedoms.append(freedom)
        return add_variances(variances, freedoms)

    def weights(self, signs: Mapping[Cell, float]) -> np.ndarray:
        """Return the weights (R,) with which the values add up to the estimate of sum(sign x cell).
        The signs have to add up to zero."""
        places = {cell: place for place, cell in enumerate(self.cells)}
        contrast_P = np.zeros(len(self.solver_PR))
        for cell, sign in signs.items():
            contrast_P[places[cell]] = sign
        return contrast_P @ self.solver_PR


def fit_additive(
    values: Sequence[float],
    cells: Sequence[Cell],
    blocks: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
) -> Fit:
    """Fit R values, each of which belongs to a cell (scheme) and a block (seed). All weigh alike in the fit.

    Without `groups`, all residuals have one variance; with them, those of each group have their own.
    """
    columns = [*dict.fromkeys(cells)], [*dict.fromkeys(blocks)]
    halves = [
        np.array([[one == column for column in names] for one in of_runs], dtype=float)
        for of_runs, names in zip((cells, blocks), columns, strict=True)
    ]
    design_RP = np.hstack(halves)
    values_R = np.asarray(values, dtype=float)
    solver_PR = np.linalg.pinv(design_RP)
    residuals_R = values_R - design_RP @ (solver_PR @ values_R)
    leverages_R = np.einsum("rp,pr->r", design_RP, solver_PR)
    groups = tuple(groups or [None] * len(values_R))
    return Fit(tuple(columns[0]), solver_PR, values_R, residuals_R, leverages_R, groups)


def add_variances(variances: Sequence[float], freedoms: Sequence[float]) -> tuple[float, float]:
    """Add variances of independent estimates, and give the sum's degrees of freedom by Satterthwaite's
    formula: 0 if one of them has none."""
    total, freedom = math.fsum(variances), min(freedoms, default=0)
    if freedom and total:
        pairs = zip(variances, freedoms, strict=True)
        freedom = total**2 / math.fsum(one**2 / of_one for one, of_one in pairs)
    return total, freedom


# Images ───────────────────────────────────────────────────────────────────────────────────────────


def images_variance(gaps_SI: np.ndarray) -> float:
    """Return the part of a difference's variance that comes from drawing images, by gaps (seeds,
    images) in points, 100 x (right minus right).

    The interaction of images and seeds is taken out, because it is in the seeds' part already. nan
    for one seed, which cannot tell the two apart.
    """
    seeds, images = gaps_SI.shape
    if seeds < 2:
        return math.nan
    mean_I = gaps_SI.mean(0)
    rest_SI = gaps_SI - mean_I - gaps_SI.mean(1, keepdims=True) + gaps_SI.mean()
    rest = float((rest_SI**2).sum()) / ((seeds - 1) * (images - 1))
    return max(0.0, (float(mean_I.var(ddof=1)) - rest / seeds) / images)


# Estimates ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Estimate:
    """A difference in points, over n seeds, and the parts of its variance."""

    value: float = math.nan
    n: int = 0
    seeds: float = math.nan  # variance that comes from seeds
    images: float = math.nan  # and from images; nan where outcomes were not kept
    residual_freedom: float = (
        0  # a whole number, except where two deviations or estimates are combined
    )
    confidence: float = 0.95
    bootstrap: float = math.nan  # half-width

    @property
    def variance(self) -> float:
        return self.seeds + (0.0 if math.isnan(self.images) else self.images)

    @property
    def freedom(self) -> float:
        """Satterthwaite's degrees of freedom, where the images' part of the variance counts as exact."""
        if not self.seeds:
            return math.inf
        return self.residual_freedom * (self.variance / self.seeds) ** 2

    def half_of(self, variance: float) -> float:
        """Student's half-width for a variance or a part of it; parts add up by their squares."""
        if not self.residual_freedom or self.n < 2:
            return math.nan
        return float(stdtrit(self.freedom, (1 + self.confidence) / 2)) * math.sqrt(variance)

    @property
    def half(self) -> float:
        """Half the width of the interval; nan for fewer than two seeds or no degrees of freedom."""
        return self.half_of(self.variance)

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half

    def p(self, bound: float) -> float:
        """Return the two-sided p of the difference from a bound; nan where there is no interval."""
        if math.isnan(self.half):
            return math.nan
        if not self.variance:
            return float(self.value == bound)
        return float(2 * stdtr(self.freedom, -abs(self.value - bound) / math.sqrt(self.variance)))


class Comparison:
    """The additive model over all judged runs, with the images that each run got right.

    `accuracies` are in percent, by cell and seed. `right` has the outcomes (images,) bool of those runs
    that kept them. All runs of one seed share its effect. All runs have one deviation, except where
    `groups` puts cells that scatter alike into groups of their own, by cell; then each group has its own.
    """

    def __init__(
        self,
        accuracies: Mapping[Run, float],
        right: Mapping[Run, np.ndarray],
        groups: Mapping[Cell, Hashable] | None = None,
    ):
        self.accuracies, self.right = dict(accuracies), dict(right)
        self.groups = dict(groups or {})

    @cached_property
    def fit(self) -> Fit:
        cells, seeds = zip(*self.accuracies, strict=True)
        groups = [self.groups.get(cell) for cell in cells]
        return fit_additive(list(self.accuracies.values()), cells, seeds, groups)

    def seeds(self, *cells: Cell) -> list[int]:
        """Return the seeds that all of the cells have."""
        of_each = [{seed for c, seed in self.accuracies if c == cell} for cell in cells]
        return sorted(set.intersection(*of_each))

    def estimate(self, signs: Mapping[Cell, float], confidence: float) -> Estimate:
        """Estimate sum(sign x cell), such as {"TCS": 1, "Baseline": -1}; nan if no seed has all of them."""
        seeds = self.seeds(*signs)
        if not seeds:
            return Estimate(confidence=confidence)
        weights_R, gaps_SI = self.fit.weights(signs), self.gaps(signs, seeds)
        half = math.nan
        if len(seeds) > 1:
            half = bootstrap_half(self.fit, weights_R, gaps_SI, confidence)
        of_seeds, freedom = self.fit.variance_of(weights_R)
        return Estimate(
            value=float(weights_R @ self.fit.values_R),
            n=len(seeds),
            seeds=of_seeds,
            images=math.nan if gaps_SI is None else images_variance(gaps_SI),
            residual_freedom=freedom,
            confidence=confidence,
            bootstrap=half,
        )

    def gaps(self, signs: Mapping[Cell, float], seeds: Sequence[int]) -> np.ndarray | None:
        """Return the gaps (seeds, images) in points of sum(sign x cell); None if a run did not keep
        its outcomes."""
        if any((cell, seed) not in self.right for cell in signs for seed in seeds):
            return None
        rows = [
            sum(sign * self.right[cell, seed].astype(float) for cell, sign in signs.items())
            for seed in seeds
        ]
        return 100 * np.array(rows)


def minus(one: Estimate, other: Estimate, images: float) -> Estimate:
    """Subtract the second estimate from the first, if their runs have only the images in common.

    Each has a residual deviation of its own: the seeds' parts of both variances add up, with the
    degrees of freedom that Satterthwaite's formula gives for the sum. `images` is the images' part
    of the variance of the whole (`images_variance`). No bootstrap.
    """
    seeds, freedom = add_variances(
        [one.seeds, other.seeds], [one.residual_freedom, other.residual_freedom]
    )
    return Estimate(
        value=one.value - other.value,
        n=min(one.n, other.n),
        seeds=seeds,
        images=images,
        residual_freedom=freedom,
        confidence=one.confidence,
    )


# Beside the interval ──────────────────────────────────────────────────────────────────────────────


def bootstrap_half(
    fit: Fit, weights_R: np.ndarray, gaps_SI: np.ndarray | None, confidence: float
) -> float:
    """Half the width of the interval by the bootstrap: of the middle `confidence` of DRAWS differences, for
    which residuals are drawn from all runs of the same group and images from all images. nan without
    degrees of freedom.

    It is a little wider than Student's interval: the images that are drawn also carry each run's own
    chance, which the residuals contain already.
    """
    generator, drawn = np.random.default_rng(0), np.zeros(DRAWS)
    for group in dict.fromkeys(fit.groups):
        its_R = fit.group_mask(group)
        count, (_, freedom) = int(its_R.sum()), fit.group_variance(group)
        if weights_R[its_R] @ weights_R[its_R] > NO_WEIGHT and not freedom:
            return math.nan
        if freedom:
            inflated = fit.residuals_R[its_R] * math.sqrt(count / freedom)
            drawn += generator.choice(inflated, (DRAWS, count)) @ weights_R[its_R]
    if gaps_SI is not None:
        images = gaps_SI.shape[1]
        values, counts = np.unique(gaps_SI.mean(0).round(9), return_counts=True)
        drawn = drawn + generator.multinomial(images, counts / images, DRAWS) @ values / images
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(high - low) / 2


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Correct p values by Holm's method, over all claims; a claim without a p yet counts as 1."""
    ranked = sorted(
        p_values, key=lambda name: math.inf if math.isnan(p_values[name]) else p_values[name]
    )
    corrected, largest = {}, 0.0
    for rank, name in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - rank) * p_values[name]))
        corrected[name] = math.nan if math.isnan(p_values[name]) else largest
    return corrected
