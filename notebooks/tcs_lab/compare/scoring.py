"""Scores: what a method reached, what it sent, and what others reach with as many bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from scipy.special import stdtrit

from tcs_lab.compare.track import Track
from tcs_lab.evidence.fair import TunedMethod as Tuned
from tcs_lab.evidence.fair import fair_model
from tcs_lab.tables.analysis import Comparison, Estimate
from tcs_lab.tables.tables import traffic


@dataclass(frozen=True)
class Point:
    """One scheme at its chosen rate: whole runs over all seeds. Accuracies are in percent on the
    images that score, megabytes those of one client's whole run."""

    scheme: str
    rate: float
    accuracy: float
    half: float  # of its interval
    n: int
    up: float
    down: float
    start: float  # of both, what the dense rounds at the start took
    accuracies: tuple[float, ...] = ()

    @property
    def both(self) -> float:
        """Megabytes both ways."""
        return self.up + self.down

    def without_start(self) -> Point:
        """The same point as if its dense start had cost nothing."""
        share = 1 - self.start / self.both if self.both else 1.0
        return replace(self, up=self.up * share, down=self.down * share, start=0.0)


def points_of(tuned: Iterable[Tuned], model: Comparison, confidence: float) -> list[Point]:
    """Those schemes of which all runs are made and none diverged, the one that sends least first."""
    found = []
    for one in tuned:
        if not one.is_complete or one.diverged:
            continue
        values = list(one.accuracies.values())
        flows = [traffic(record) for record in one.scored.values()]
        up, down, start = (fmean(f[k] for f in flows) / 1e6 for k in ("up", "down", "warm-up"))
        rate = one.search.config(one.chosen or math.nan, one.seeds[0]).identity()["learning_rate"]
        images = sum(end - first for first, end in one.search.tuning.score_on)
        half = half_of(values, model, images, confidence)
        found.append(
            Point(one.name, rate, fmean(values), half, len(values), up, down, start, tuple(values))
        )
    return sorted(found, key=lambda point: point.both)


def half_of(values: Sequence[float], model: Comparison, images: int, confidence: float) -> float:
    """Half of the interval of a mean accuracy, for other seeds and other images: the deviation of a
    run is that of all methods in the model, pooled, and images are drawn. nan if no method has two
    runs."""
    groups: dict[Any, list[float]] = {}
    for (cell, _), value in model.accuracies.items():
        groups.setdefault(cell, []).append(value)
    freedom = sum(len(group) - 1 for group in groups.values())
    if not freedom:
        return math.nan
    means = {cell: fmean(group) for cell, group in groups.items()}
    squares = sum((value - means[cell]) ** 2 for (cell, _), value in model.accuracies.items())
    mean = fmean(values)
    variance = squares / freedom / len(values) + mean * (100 - mean) / images
    return float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance)


# Between the points of a method ───────────────────────────────────────────────────────────────────


def at_bytes(points: Sequence[Point], megabytes: float) -> dict[str, float] | None:
    """The weights of a method's two points between which so many bytes lie, by scheme: on a line over
    the logarithm of the bytes. None outside; nothing is extrapolated."""
    for few, many in pairwise(points):
        if 0 < few.both <= megabytes <= many.both:
            if few.both == many.both:
                return {few.scheme: 1.0}
            share = math.log(megabytes / few.both) / math.log(many.both / few.both)
            return {few.scheme: 1 - share, many.scheme: share}
    return {points[0].scheme: 1.0} if points and points[0].both == megabytes else None


def bytes_for(points: Sequence[Point], accuracy: float) -> float:
    """The fewest megabytes with which a method reaches an accuracy, on the same lines; nan if none
    of its points reaches it, or if the one that sends least already does."""
    if not points or points[0].accuracy >= accuracy:
        return math.nan
    for few, many in pairwise(points):
        if few.accuracy < accuracy <= many.accuracy and few.both > 0:
            share = (accuracy - few.accuracy) / (many.accuracy - few.accuracy)
            return few.both * (many.both / few.both) ** share
    return math.nan


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats: none sends less and reaches as much."""
    best, kept = -math.inf, []
    for point in sorted(points, key=lambda point: (point.both, -point.accuracy)):
        if point.accuracy > best:
            best = point.accuracy
            kept.append(point)
    return kept


# A method beside the stored ones ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Beside:
    """One point of a method beside a stored method: `equal_bytes` is the difference in accuracy at
    the point's own bytes, `later` the same with the dense start of both left out, and `megabytes`
    what the stored method needs for the point's accuracy. Where one of them is not defined, `said`
    says why."""

    method: str
    equal_bytes: Estimate
    later: Estimate
    megabytes: float
    said: str


class Scores:
    """All points on a track: the stored methods', and those of a method that is looked at."""

    def __init__(self, track: Track, tuned: Sequence[Tuned] = ()):
        stored, confidence = track.stored(), track.analysis.confidence
        known = {one.name for group in stored.values() for one in group}
        self.confidence = confidence
        self.own = list(tuned)
        whole = [one for group in stored.values() for one in group if one.is_complete]
        others = [one for one in self.own if one.is_complete and one.name not in known]
        self.model = fair_model([*whole, *others])
        self.points = points_of(self.own, self.model, confidence)
        self.stored: Mapping[str, list[Point]] = {
            name: points_of(group, self.model, confidence) for name, group in stored.items()
        }

    def beside(self, point: Point, method: str) -> list[Beside]:
        """A point beside each stored method but its own that sends something and has a point."""
        others = {n: p for n, p in self.stored.items() if p and n != method and p[-1].both > 0}
        return [self._beside(point, name, points) for name, points in others.items()]

    def _beside(self, point: Point, name: str, points: list[Point]) -> Beside:
        best = max(points, key=lambda p: p.accuracy)
        words = []
        if point.both > points[-1].both:
            words.append(f"sends at most {points[-1].both:.3g} MB")
        elif point.both < points[0].both:
            words.append(f"sends at least {points[0].both:.3g} MB")
        megabytes = bytes_for(points, point.accuracy)
        if points[0].accuracy >= point.accuracy:
            words.append(f"reached with {points[0].both:.3g} MB or less")
        elif math.isnan(megabytes):
            words.append(f"not reached: best {best.accuracy:.1f} at {best.both:.3g} MB")
        later = self._difference(point.without_start(), [p.without_start() for p in points])
        return Beside(name, self._difference(point, points), later, megabytes, "; ".join(words))

    def _difference(self, point: Point, points: list[Point]) -> Estimate:
        """Of the accuracies at the point's bytes; nan where the method has no points around it."""
        weights = at_bytes(sorted(points, key=lambda p: p.both), point.both)
        if weights is None:
            return Estimate()
        signs = {scheme: -weight for scheme, weight in weights.items() if weight}
        return self.model.estimate({point.scheme: 1.0} | signs, self.confidence)
