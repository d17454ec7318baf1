"""Scores: what a method reached, what it sent, and what other methods reach with as many bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, variance
from typing import Any

import numpy as np

from tcs_lab.compare.track import Track
from tcs_lab.evidence.fair import TunedScheme, fair_model
from tcs_lab.tables.analysis import Comparison, Estimate, Run, images_variance
from tcs_lab.tables.tables import format_number, traffic


@dataclass(frozen=True)
class Point:
    """One scheme at its chosen rate, over the runs of all seeds. Accuracies are in percent, on the images
    that score. Megabytes are those of one client in the whole run."""

    scheme: str
    rate: float
    accuracy: float
    half: float  # half the width of its interval
    n: int
    up: float
    down: float
    start: float  # the part of both that dense rounds, or larger masks, took at the start
    accuracies: tuple[float, ...] = ()

    @property
    def both(self) -> float:
        """Megabytes up and down together."""
        return self.up + self.down

    def without_start(self) -> Point:
        """Return the same point as if its dense start had cost nothing. Only `both` has a meaning there,
        since `up` and `down` are reduced in proportion."""
        share = 1 - self.start / self.both if self.both else 1.0
        return replace(self, up=self.up * share, down=self.down * share, start=0.0)


def make_points(tuned: Iterable[TunedScheme], model: Comparison, confidence: float) -> list[Point]:
    """Make the points of the schemes of which all runs are made and none diverged. The one that sends
    least comes first."""
    points = []
    for one in tuned:
        if not one.is_complete or one.diverged:
            continue
        values = list(one.accuracies.values())
        flows = [traffic(record) for record in one.scored.values()]
        up, down, start = (fmean(f[k] for f in flows) / 1e6 for k in ("up", "down", "warm-up"))
        half = compute_half_width([(one.name, seed) for seed in one.accuracies], model, confidence)
        points.append(
            Point(
                one.name, one.rate, fmean(values), half, len(values), up, down, start, tuple(values)
            )
        )
    return sorted(points, key=lambda point: point.both)


def compute_half_width(runs: Sequence[Run], model: Comparison, confidence: float) -> float:
    """Return half the width of the interval of a method's mean accuracy over its runs, for other seeds and
    other images.

    The deviation of a run is pooled over all methods that scatter like this one, and images are taken as
    drawn at random, as in differences. It is nan if none of these methods has two runs.
    """
    alike = model.groups.get(runs[0][0])
    by_cell: dict[Any, list[float]] = {}
    for (cell, _), value in model.accuracies.items():
        if model.groups.get(cell) == alike:
            by_cell.setdefault(cell, []).append(value)
    freedom = sum(len(values) - 1 for values in by_cell.values())
    if not freedom:
        return math.nan
    squares = sum((len(values) - 1) * variance(values) for values in by_cell.values() if values[1:])
    right_SI = np.stack([100.0 * model.right[run] for run in runs])
    return Estimate(
        n=len(runs), seeds=squares / freedom / len(runs), images=images_variance(right_SI),
        residual_freedom=freedom, confidence=confidence,
    ).half  # fmt: skip


# Between the points of a method ───────────────────────────────────────────────────────────────────


EQUAL = 0.01  # bytes that differ by at most this part count as equal


def are_equal_bytes(one: float, other: float) -> bool:
    """Return whether two numbers of bytes differ by at most 1 % of the larger one, so that they count as
    equal."""
    return math.isclose(one, other, rel_tol=EQUAL)


def weigh_points(points: Sequence[Point], megabytes: float) -> dict[str, float] | None:
    """Return the weights of the two points of a method between which so many megabytes lie, by scheme.

    They interpolate on a line over the logarithm of the bytes. Outside of the points nothing is
    extrapolated: there, only the nearest point counts, if its bytes are equal up to 1 %
    (`are_equal_bytes`), and else None is returned.
    """
    for few, many in pairwise(points):
        if 0 < few.both <= megabytes <= many.both:
            if few.both == many.both:
                return {few.scheme: 1.0}
            share = math.log(megabytes / few.both) / math.log(many.both / few.both)
            return {few.scheme: 1 - share, many.scheme: share}
    equal = [point for point in points if are_equal_bytes(point.both, megabytes)]
    nearest = min(equal, key=lambda point: abs(point.both - megabytes), default=None)
    return None if nearest is None else {nearest.scheme: 1.0}


def find_bytes(points: Sequence[Point], accuracy: float) -> float:
    """Return the fewest megabytes with which a method reaches an accuracy, on the same lines.

    It is nan if none of its points reaches it, or if already the one that sends least does.
    """
    if not points or points[0].accuracy >= accuracy:
        return math.nan
    for few, many in pairwise(points):
        if few.accuracy < accuracy <= many.accuracy and few.both > 0:
            share = (accuracy - few.accuracy) / (many.accuracy - few.accuracy)
            return few.both * (many.both / few.both) ** share
    return math.nan


def find_front(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other point beats by sending less and reaching as much."""
    best, kept = -math.inf, []
    for point in sorted(points, key=lambda point: (point.both, -point.accuracy)):
        if point.accuracy > best:
            best = point.accuracy
            kept.append(point)
    return kept


# A method beside the stored ones ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PointComparison:
    """One point of a method compared with a stored method.

    `difference` is that of the accuracies of the point and of `usual`, the stored method at its usual
    density, whatever the two send; `relative_bytes` are the bytes of `usual` divided by those of the
    point. `equal_bytes` is the difference in accuracy at the bytes of the point, which count as equal to those
    of a stored point up to 1 %, and `without_start` the same with the dense start of both left out.
    `megabytes` is what the stored method needs for the accuracy of the point. Where one of them is not
    defined, `reason` says why.
    """

    method: str
    usual: str
    difference: Estimate
    relative_bytes: float
    equal_bytes: Estimate
    without_start: Estimate
    megabytes: float
    reason: str


class Scores:
    """All points on a track: those of the stored methods, and those of the method that is compared."""

    def __init__(self, track: Track, tuned: Sequence[TunedScheme] = ()):
        stored, confidence = track.find_stored(), track.analysis.confidence
        known = {one.name for group in stored.values() for one in group}
        self.confidence = confidence
        whole = [one for group in stored.values() for one in group if one.is_complete]
        others = [one for one in tuned if one.is_complete and one.name not in known]
        self.model = fair_model([*whole, *others], track.group_alike([*whole, *others]))
        self.points = make_points(tuned, self.model, confidence)
        self.stored: Mapping[str, list[Point]] = {
            name: make_points(group, self.model, confidence) for name, group in stored.items()
        }

    def compare(self, point: Point) -> list[PointComparison]:
        """Compare a point with each stored method that sends something and has a point, except with the
        one to which the point itself belongs."""
        return [
            self._compare_with(point, name, points)
            for name, points in self.stored.items()
            if points and points[-1].both > 0 and point.scheme not in [p.scheme for p in points]
        ]

    def _compare_with(self, point: Point, name: str, points: list[Point]) -> PointComparison:
        best = max(points, key=lambda p: p.accuracy)
        words = []
        if weigh_points(points, point.both) is None:
            few, many = points[0].both, points[-1].both
            bound, end = ("most", many) if point.both > many else ("least", few)
            words.append(f"sends at {bound} {format_number(end)} MB")
        megabytes = find_bytes(points, point.accuracy)
        if points[0].accuracy >= point.accuracy:
            words.append(f"reached with {format_number(points[0].both)} MB or less")
        elif math.isnan(megabytes):
            words.append(f"not reached: best {best.accuracy:.1f} at {format_number(best.both)} MB")
        without = self._difference(point.without_start(), [p.without_start() for p in points])
        equal = self._difference(point, points)
        if math.isnan(without.value) and not math.isnan(equal.value):
            words.append("without dense starts: no run with as few or as many MB")
        usual = next((p for p in points if p.scheme == name), points[-1])
        signs = {point.scheme: 1.0, usual.scheme: -1.0}
        difference = self.model.estimate(signs, self.confidence)
        ratio = usual.both / point.both
        return PointComparison(
            name, usual.scheme, difference, ratio, equal, without, megabytes, "; ".join(words)
        )

    def _difference(self, point: Point, points: list[Point]) -> Estimate:
        """Estimate the difference of the accuracies at the point's bytes; nan where the method has no points
        on both sides of it."""
        weights = weigh_points(sorted(points, key=lambda p: p.both), point.both)
        if weights is None:
            return Estimate()
        signs = {scheme: -weight for scheme, weight in weights.items() if weight}
        return self.model.estimate({point.scheme: 1.0} | signs, self.confidence)
