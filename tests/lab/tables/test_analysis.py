"""How differences are estimated: known answers, by hand and by simulation."""

import math

import numpy as np
import pytest
import tcs_lab as lab
from tcs_lab.tables.analysis import fit_additive, images_variance, minus

GAP = {"a": 1, "b": -1}


def table(**of_cells):
    """Accuracies by cell and seed, seeds from 0; None is a run that was not made."""
    return {
        (cell, seed): value
        for cell, values in of_cells.items()
        for seed, value in enumerate(values)
        if value is not None
    }


# Seeds ────────────────────────────────────────────────────────────────────────────────────────────


def test_of_two_schemes_it_is_the_paired_interval():
    """Differences 1, 2, 3: mean 2, deviation 1, so that half the interval is t(2) / sqrt(3)."""
    runs = table(a=[11, 22, 33], b=[10, 20, 30])
    found = lab.Comparison(runs, {}).estimate(GAP, 0.95)
    assert (found.value, found.n) == (pytest.approx(2), 3)
    assert found.freedom == pytest.approx(2) and math.isnan(found.images)
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.half_of(found.seeds) == pytest.approx(found.half)


def test_a_third_scheme_pools_the_deviation():
    """Scheme effects 0, 1, 5 and seeds 0, 10: residuals are ±1/2 in a and b, none in c. Their
    squares add up to 1 over 2 degrees of freedom: s^2 is 1/2, and a difference's variance is 1/2."""
    runs = table(a=[0.5, 9.5], b=[0.5, 11.5], c=[5, 15])
    found = lab.Comparison(runs, {}).estimate({"b": 1, "a": -1}, 0.95)
    assert found.value == pytest.approx(1)
    assert found.residual_freedom == 2 and found.seeds == pytest.approx(0.5)


def test_a_scheme_with_fewer_seeds_is_not_helped_by_lucky_ones():
    """c has only the seed on which all end ten points higher; it is a's equal."""
    runs = table(a=[50, 60, 50], b=[49, 59, 49], c=[None, 60, None])
    found = lab.Comparison(runs, {}).estimate({"c": 1, "a": -1}, 0.95)
    assert found.value == pytest.approx(0, abs=1e-9) and found.n == 1
    assert all(map(math.isnan, (found.half, found.p(0), found.bootstrap)))


@pytest.mark.parametrize(
    "runs",
    [
        table(a=[1], b=[0]),  # as many parameters as runs
        table(a=[1], b=[0], c=[2]),
        table(a=[1, None], b=[0, 3]),  # one seed in common
    ],
)
def test_too_few_runs_give_an_estimate_and_no_interval(runs):
    found = lab.Comparison(runs, {}).estimate(GAP, 0.95)
    assert found.value == pytest.approx(1)
    assert all(map(math.isnan, (found.half, found.low, found.high, found.p(0), found.bootstrap)))


def test_without_a_common_seed_there_is_no_estimate():
    found = lab.Comparison(table(a=[1, None], b=[None, 0]), {}).estimate(GAP, 0.95)
    assert math.isnan(found.value) and found.n == 0


def test_the_fit_is_that_of_least_squares_where_runs_are_missing():
    """An exact sum of effects is found again, whatever is missing, and nothing is left over."""
    schemes, seeds = {"a": 1.0, "b": 4.0, "c": -2.0}, [0.0, 7.0, -3.0, 5.0]
    missing = {("a", 0), ("b", 1), ("b", 2), ("c", 3)}
    runs = {
        (scheme, seed): level + shift
        for scheme, level in schemes.items()
        for seed, shift in enumerate(seeds)
        if (scheme, seed) not in missing
    }
    fit = fit_additive(list(runs.values()), *zip(*runs, strict=True))
    for one, other in (("a", "b"), ("c", "b")):
        weights = fit.weights({one: 1, other: -1})
        assert weights @ fit.values_R == pytest.approx(schemes[one] - schemes[other])
    assert np.abs(fit.residuals_R).max() < 1e-9
    assert fit.group_variance(None) == (pytest.approx(0), 8 - 6)


def test_each_group_of_runs_has_its_own_deviation():
    """Residuals of a and b are ±1 in each run, those of c and d ±3, and no seed has an effect. The four
    differences a and b have 2 x (4 - 1) of the degrees of freedom, less their half of the seeds' three."""
    signs = {"a": (1, -1, 1, -1), "b": (-1, 1, -1, 1), "c": (3, -3, -3, 3), "d": (-3, 3, 3, -3)}
    runs = {(c, s): x for c, of_seed in signs.items() for s, x in enumerate(of_seed)}
    groups = {"a": "calm", "b": "calm", "c": "wild", "d": "wild"}
    model = lab.Comparison(runs, {}, groups)
    freedom = 6 - 3 / 2
    assert model.fit.group_variance("calm") == (pytest.approx(8 / freedom), freedom)
    assert model.fit.group_variance("wild") == (pytest.approx(72 / freedom), freedom)
    for one, other, variance, at in (
        ("a", "b", 8 / freedom / 2, freedom),
        ("c", "d", 72 / freedom / 2, freedom),
        ("a", "c", 80 / freedom / 4, freedom * 80**2 / (8**2 + 72**2)),
    ):
        found = model.estimate({one: 1, other: -1}, 0.95)
        assert (found.value, found.n) == (pytest.approx(0), 4)
        assert found.seeds == pytest.approx(variance) and found.freedom == pytest.approx(at)
        # as a normal distribution of this variance, but for the few values that residuals have
        assert found.bootstrap == pytest.approx(1.96 * math.sqrt(found.seeds), rel=0.1)
    pooled = lab.Comparison(runs, {}).estimate({"a": 1, "b": -1}, 0.95)
    assert pooled.seeds == pytest.approx(80 / 9 / 2) and pooled.freedom == pytest.approx(9)


def test_a_group_with_a_single_run_has_no_interval():
    runs = {(c, s): float(s) for c in "ab" for s in range(3)} | {("c", 0): 5.0}
    model = lab.Comparison(runs, {}, {"c": "alone"})
    assert math.isnan(model.estimate({"a": 1, "c": -1}, 0.95).half)
    assert math.isnan(model.estimate({"a": 1, "c": -1}, 0.95).bootstrap)
    assert model.estimate({"a": 1, "b": -1}, 0.95).half == pytest.approx(0)


# Images ───────────────────────────────────────────────────────────────────────────────────────────


def test_images_that_always_differ_count():
    """Gaps 100, 0, 0, -100 in every seed: variance 20,000 / 3 over images, a quarter of it for four."""
    gaps = np.array([[100, 0, 0, -100]] * 3)
    assert images_variance(gaps) == pytest.approx(20_000 / 3 / 4)
    assert math.isnan(images_variance(gaps[:1]))  # one seed can't tell


def test_what_differs_from_seed_to_seed_is_not_counted_twice():
    assert images_variance(np.array([[100, -100, 100, -100], [-100, 100, -100, 100]])) == 0


def test_both_parts_make_the_interval():
    """Equal parts and four degrees of freedom of one: (1 + 1)^2 / (1 / 4) = 16 of both."""
    both = lab.Estimate(value=3, n=5, seeds=1, images=1, residual_freedom=4)
    assert both.freedom == 16
    assert both.half == pytest.approx(2.119905 * math.sqrt(2), rel=1e-6)  # t of 16
    assert both.half**2 == pytest.approx(
        both.half_of(both.seeds) ** 2 + both.half_of(both.images) ** 2
    )
    assert both.p(both.low) == pytest.approx(0.05) and both.p(3) == 1


def test_images_alone_are_as_the_normal_distribution_has_it():
    exact = lab.Estimate(value=1, n=3, seeds=0, images=1, residual_freedom=4)
    assert exact.half == pytest.approx(1.959964, rel=1e-6)
    same = lab.Estimate(value=1, n=3, seeds=0, images=0, residual_freedom=4)
    assert (same.half, same.p(1), same.p(0)) == (0, 1, 0)


def test_of_two_models_each_keeps_its_own_deviation():
    """Variances 1 with 2 degrees of freedom and 3 with 6: together 4, with 16 / (1/2 + 9/6) = 8."""
    one = lab.Estimate(value=5, n=3, seeds=1, images=0.5, residual_freedom=2)
    other = lab.Estimate(value=2, n=8, seeds=3, images=0.5, residual_freedom=6)
    gap = minus(one, other, images=0)
    assert (gap.value, gap.n, gap.seeds) == (3, 3, 4) and gap.freedom == pytest.approx(8)
    assert gap.half == pytest.approx(2.306004 * 2, rel=1e-6)  # t of 8
    wide = minus(lab.Estimate(value=5, n=3, seeds=100, residual_freedom=2), other, 0)
    assert wide.half == pytest.approx(4.302653 * 10, rel=0.08)  # as good as its wider part alone


def test_without_an_interval_of_one_there_is_none_of_the_difference():
    one = lab.Estimate(value=5, n=1, seeds=math.nan, residual_freedom=0)
    other = lab.Estimate(value=2, n=8, seeds=3, residual_freedom=6)
    assert minus(one, other, 0).value == 3 and math.isnan(minus(one, other, 0).half)


def test_the_gaps_of_images_can_be_asked_for_alone():
    right = {(c, s): np.array(bits, bool) for s in range(3)
             for c, bits in (("a", [1, 0, 0, 0]), ("b", [0, 0, 0, 1]))}  # fmt: skip
    model = lab.Comparison({run: 25.0 for run in right}, right)
    assert model.gaps(GAP, [0, 2]).tolist() == [[100, 0, 0, -100]] * 2
    del right["a", 1]
    some = lab.Comparison({run: 25.0 for run in model.right}, right)
    assert some.gaps(GAP, [0, 1, 2]) is None and some.gaps(GAP, [0, 2]) is not None


# Many worlds ──────────────────────────────────────────────────────────────────────────────────────

# Deviations in a run's score: of its seed, of scheme and seed, of the image, of scheme and image,
# and of all else. An image is right where the score is above zero.
SEED, RUN, IMAGE, BOTH, REST = 0.1, 0.02, 1.0, 0.35, 0.5
LEVELS = {"a": 0.9, "b": 0.85, "c": 0.8}
SPREAD = math.sqrt(SEED**2 + RUN**2 + IMAGE**2 + BOTH**2 + REST**2)
TRUE = {name: 50 * (1 + math.erf(x / SPREAD / math.sqrt(2))) for name, x in LEVELS.items()}


def world(generator, seeds=4, images=500):
    """Runs of three schemes over the same images, drawn from endless seeds and images."""
    image_I, seed_S = (
        IMAGE * generator.standard_normal(images),
        SEED * generator.standard_normal(seeds),
    )
    right = {}
    for scheme, level in LEVELS.items():
        both_I = BOTH * generator.standard_normal(images)
        for seed in range(seeds):
            run = seed_S[seed] + RUN * generator.standard_normal()
            rest_I = REST * generator.standard_normal(images)
            right[scheme, seed] = level + run + image_I + both_I + rest_I > 0
    return right


def test_the_interval_covers_as_often_as_it_says():
    """300 worlds: 95 % ± 2.5 standard deviations of a count of 300; without the images' part far
    fewer. The estimate is right on average. The bootstrap counts a run's own images twice, so that
    it is wider, by less than a fifth."""
    generator, true = np.random.default_rng(1), TRUE["a"] - TRUE["c"]
    found = []
    for _ in range(300):
        right = world(generator)
        accuracies = {run: 100 * bits.mean() for run, bits in right.items()}
        found.append(lab.Comparison(accuracies, right).estimate({"a": 1, "c": -1}, 0.95))
    off = np.array([abs(one.value - true) for one in found])
    half, by_seeds = (
        np.array(x) for x in zip(*((f.half, f.half_of(f.seeds)) for f in found), strict=True)
    )
    assert 0.915 <= (off <= half).mean() <= 0.982
    assert (off <= by_seeds).mean() < 0.88
    values = [one.value for one in found]
    assert np.mean(values) == pytest.approx(true, abs=2.5 * np.std(values) / math.sqrt(300))
    assert 1 < np.median([one.bootstrap / one.half for one in found]) < 1.2


# Several claims ───────────────────────────────────────────────────────────────────────────────────


def test_holms_correction():
    """Of three: 0.01 x 3; 0.03 x 2; 0.04 x 1 is less than the one before."""
    found = lab.holm({"a": 0.04, "b": 0.01, "c": 0.03})
    assert found == pytest.approx({"a": 0.06, "b": 0.03, "c": 0.06})
    assert lab.holm({"a": 0.8, "b": 0.7}) == {"a": 1, "b": 1}


def test_a_claim_that_is_not_measured_yet_counts_among_them():
    found = lab.holm({"a": math.nan, "b": 0.01, "c": 0.03})
    assert found["b"] == pytest.approx(0.03) and found["c"] == pytest.approx(0.06)
    assert math.isnan(found["a"])
