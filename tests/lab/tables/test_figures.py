"""Figures: what they show, and the same bytes every time."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import tcs_lab as lab
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from tcs_lab.tables import figures
from tcs_lab.teaching.pictures import draw_round
from test_tables import fake


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def names(figure):
    """Of the schemes, beside their last points, the best at the top."""
    return [label.get_text() for label in figure.axes[1].get_yticklabels()][::-1]


def test_the_same_bytes_every_time(tmp_path):
    records = [fake("TCS", 0.8, 0), fake("Baseline", 0.9, 0)]
    figures = {
        "curves": lambda: lab.draw_accuracy_figure(records, "A title"),
        "megabytes": lambda: lab.draw_megabytes_figure(lab.summary(records), "A title"),
    }
    for name, make in figures.items():
        for copy in "ab":
            lab.save_figure(make(), tmp_path / f"{name}-{copy}")
        for suffix in (".png", ".svg"):
            one, two = ((tmp_path / f"{name}-{c}").with_suffix(suffix).read_bytes() for c in "ab")
            assert one == two and len(one) > 5000


def test_curves_show_mean_and_band_and_their_names():
    records = [fake("TCS", a, s) for s, a in enumerate((0.6, 0.8))] + [fake("top-K", 0.71, 0)]
    figure = lab.draw_accuracy_figure(records, "x")
    left, right = figure.axes
    np.testing.assert_allclose(left.lines[0].get_ydata(), 70.0)
    assert left.get_xlabel() == "epoch" and left.get_ylabel() == "test accuracy (%)"
    assert len(left.collections) == 2 and names(figure) == ["top-K (1)", "TCS (2)"]
    assert not figure.legends and not left.get_legend()
    assert [bar.get_xdata()[0] for bar in right.containers[0].lines[:1]] == [70.0]


def test_a_run_that_ended_at_once_has_no_curve():
    lost = fake("TCS", 0.5, 0, status="diverged") | {"rows": []}
    assert names(lab.draw_accuracy_figure([lost, fake("top-K", 0.7, 0)], "x")) == ["top-K (1)"]


def test_a_mean_stops_where_one_seed_does():
    lost = fake("TCS", 0.5, 0, status="diverged")
    lost["rows"] = lost["rows"][:2]
    axes = lab.draw_accuracy_figure([lost, fake("TCS", 0.7, 1)], "x").axes[0]
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[1, 60], [2, 60]])


def test_a_scheme_of_which_a_run_diverged_has_no_last_point():
    """Its curve ends early, at an epoch that is not the last one."""
    lost = fake("TCS", 0.5, 0, status="diverged")
    lost["rows"] = lost["rows"][:2]
    figure = lab.draw_accuracy_figure([lost, fake("TCS", 0.7, 1), fake("top-K", 0.6, 0)], "x")
    assert len(figure.axes[0].lines) == 2 and names(figure) == ["top-K (1)"]


EIGHT = ["Baseline", "TCS", "top-K", "TCS-L4", "TCS-L4-Q5", "TCS-LF", "TCS-PLF", "TCS-L2"]


@pytest.mark.parametrize("finals", [[0.5] * 8, [0.1 * i for i in range(8)], [0.7, 0.71, 0.2]])
def test_names_at_curves_do_not_lie_on_each_other(finals):
    axes = Figure().subplots()
    colours = [lab.curve_style(name)["color"] for name in EIGHT]
    axes.plot([0, 1], [0, 1])
    lab.label_ends(axes, [(n, 1, a, c) for n, a, c in zip(EIGHT, finals, colours, strict=False)])
    places = sorted(text.xyann[1] for text in axes.texts)
    assert len(places) == len(finals)
    assert all(b - a > 0.05 for a, b in itertools.pairwise(places))
    written = [text.get_color() for text in axes.texts]
    assert len(set(written)) == len(written)


def test_last_points_are_enlarged_and_named():
    records = [fake(n, 0.9 + i / 1000, 0) for i, n in enumerate(EIGHT)]
    figure = lab.draw_accuracy_figure(records, "x")
    left, right = figure.axes
    (low, high), (first, last) = right.get_xlim(), left.get_ylim()
    assert high - low < 1 < last - first + 1 and names(figure)[0] == "TCS-L2 (1)"
    assert len({label.get_color() for label in right.get_yticklabels()}) == 8


def test_megabytes_are_written_at_the_points():
    records = [fake("TCS", 0.6, 0), fake("FedAvg", 0.7, 0, warmup=3), fake("Baseline", 0.8, 0)]
    table = lab.summary(records)
    figure = lab.draw_megabytes_figure(table, "A title")
    (axes,) = figure.axes
    both = float(table["megabytes_up"][0] + table["megabytes_down"][0])
    assert f"TCS\n{both:.2g} MB" in texts(figure) and "Baseline" in texts(figure)
    assert axes.get_xscale() == "log" and "log" in axes.get_xlabel()
    assert not lab.draw_megabytes_figure(table.iloc[:0], "None").axes[0].lines


def test_traffic_is_in_gigabytes_where_it_is_large_and_schemes_have_the_given_names():
    table = lab.summary([fake("TCS", 0.6, 0), fake("Baseline", 0.8, 0)])
    table[["megabytes_up", "megabytes_down"]] *= 1e5
    both = float(table["megabytes_up"][0] + table["megabytes_down"][0]) / 1000
    names = {"TCS": "shared mask", "Baseline": "centralized training"}
    figure = lab.draw_megabytes_figure(table, "A title", names)
    number = f"{both:,.0f}" if both >= 100 else f"{both:.2g}"
    assert f"shared mask\n{number} GB" in texts(figure)
    assert "centralized training" in texts(figure) and "Baseline" not in texts(figure)


@pytest.mark.parametrize("accuracy", [0.7, 0.805])  # far from the line, and just above it
def test_labels_are_beside_their_points_and_off_the_baselines_line(accuracy):
    records = [fake("TCS", accuracy, 0), fake("FedAvg", 0.6, 0, warmup=3), fake("Baseline", 0.8, 0)]
    (axes,) = lab.draw_megabytes_figure(lab.summary(records), "A title").axes
    line = next(line for line in axes.lines if len(line.get_ydata()) == 2).get_window_extent()
    labels = [text for text in axes.texts if "MB" in text.get_text()]
    assert len(labels) == 2 and all(abs(label.xyann[1]) <= 20 for label in labels)
    assert not any(label.get_window_extent().overlaps(line) for label in labels)


def test_labels_are_off_the_curves():
    """As in 10b: curves that end side by side, each with its name at its end."""
    axes = Figure().subplots()
    xs = np.linspace(0, 10, 30)
    curves = {"FedAvg-L4": (xs, 6 * xs), "FedAvg": (xs + 2, 7 * xs), "top-K": (xs + 1, 9 * xs)}
    points = []
    for name, (x, y) in curves.items():
        axes.plot(x, y)
        points.append((name, x[-1], y[-1], lab.curve_style(name)["color"]))
    axes.margins(0.2)
    lab.tables.figures.label_points(axes, points)
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert len(boxes) == 3
    for line in axes.lines:
        at = axes.transData.transform(np.column_stack([line.get_xdata(), line.get_ydata()]))
        fine = np.concatenate([np.linspace(a, b, 20) for a, b in itertools.pairwise(at)])
        inside = [box.contains(*point) for box in boxes for point in fine]
        assert not any(inside)


def test_a_line_joins_a_point_and_words_that_are_not_beside_it():
    """One point is alone, and its name stands beside it. Others lie so near each other that some of their
    names do not."""
    axes = Figure().subplots()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    crowd = [(f"at {x}, {y}", x, y, "#000000") for x in (4.7, 5.0, 5.3) for y in (4.7, 5.0, 5.3)]
    lab.tables.figures.label_points(axes, [("alone", 2, 2, "#000000"), *crowd])
    names = [text for text in axes.texts if text.get_text()]
    joined = [text.xy for text in axes.texts if text.arrow_patch is not None]
    apart = [text.xy for text in names if abs(text.xyann[1]) > 5]
    assert len(names) == 10 and joined == apart
    assert len(apart) > 1 and (2, 2) not in apart


def test_another_schemes_curve_has_a_colour_of_its_own():
    names = ["TCS", "Mine", "Yours"]
    colours = {lab.curve_style(name, names)["color"] for name in names}
    assert len(colours) == 3
    assert lab.curve_style("TCS") == lab.curve_style("TCS", names)
    not_named = lab.curve_style("Mine", ["TCS", "Yours"])["color"]
    assert not_named != lab.curve_style("Yours", ["TCS", "Yours"])["color"]
    baseline = lab.curve_style("Baseline")["color"]
    assert baseline not in {lab.curve_style(f"Mine{i}", [f"Mine{i}"])["color"] for i in range(9)}
    assert pd.Series(lab.COLOURS).is_unique


def test_a_scheme_has_one_look_and_no_other_has_it():
    drawn = {
        n: look
        for n, look in lab.tables.figures._DRAWN.items()
        if n not in lab.tables.figures._ALSO
    }
    looks = [look[:2] for look in drawn.values()]
    assert len(set(looks)) == len(looks), "colour and marker"
    paper = lab.read_params([lab.ROOT / f"params/table{t}.yaml" for t in (1, 2)])["schemes"]
    for together in (paper, EIGHT, list(drawn)[:1] + ["FedAvg", "FedAvg-L4", *EIGHT[1:5]]):
        assert len({lab.curve_style(name)["color"] for name in together}) == len(together)
    alone = lab.curve_style("Mine")
    assert alone == lab.curve_style("Mine", ["Baseline", "Mine"]) == lab.curve_style("Mine")


def test_text_can_be_read_on_white():
    """By WCAG 2: black has 21, white 1, and text needs 4.5."""
    figures = lab.tables.figures
    assert figures.contrast("#000000") == pytest.approx(21)
    assert figures.contrast("#FFFFFF") == pytest.approx(1)
    colours = {look[0] for look in figures._DRAWN.values()} | set(lab.COLOURS)
    dark = {colour: lab.text_colour(colour) for colour in colours}
    assert all(figures.contrast(colour) >= 4.5 for colour in dark.values())
    assert dark["#0072B2"] == "#0072B2" and dark["#E69F00"] != "#E69F00"
    assert len(set(dark.values())) == len(colours)


@pytest.mark.parametrize("name", ["TCS", "TCS-Global Momentum"])
def test_a_long_title_lies_inside_the_figure(name):
    title = "Fig. 5: profile cpu, CIFAR-10 (JPEG copy), 16 x 16, 150 epochs\nbars: ± one std"
    figure = lab.draw_accuracy_figure([fake(name, 0.8, 0)], title)
    figure.draw_without_rendering()
    (text,) = figure.findobj(lambda artist: getattr(artist, "get_text", str)() == title)
    box = text.get_window_extent()
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_the_picture_of_a_round_shows_what_is_sent():
    """Each client sends its values on the shared mask and as many of its own; the average is zero
    elsewhere; the triangles mark its largest entries."""
    figure = draw_round()
    before, *clients, after = figure.axes

    def bars(axes, *colours):
        shown = [(to_hex(bar.get_facecolor()).upper(), bar.get_height()) for bar in axes.patches]
        return {i for i, (colour, height) in enumerate(shown) if colour in colours and height}

    shared = bars(before, figures.BLUE)
    own = [bars(axes, figures.ORANGE) for axes in clients]
    assert len(shared) == 5 and all(bars(axes, figures.BLUE) == shared for axes in clients)
    assert all(len(one) == 2 and not one & shared for one in own)
    assert bars(after, figures.BLUE, figures.ORANGE) == shared | own[0] | own[1]
    heights = [bar.get_height() for bar in after.patches]
    largest = sorted(range(len(heights)), key=heights.__getitem__)[-5:]
    assert {text.xy[0] for text in after.texts} == set(largest)
    plt.close(figure)
