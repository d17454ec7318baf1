"""Loss and seconds of the hook's settings are joined by name, and compared with PowerSGD in both."""

import math
from types import SimpleNamespace

import pytest
from tcs_lab.studies import hook_choice, links, optimizers
from tcs_lab.tables.analysis import Estimate

NET = links.Net(10, 1000)
LOSSES = {"dense": 1.8, "PowerSGD rank 1": 1.9, "top-K 0.5 %": 1.85, "TCS 0.5 and 0.25 %": 1.91}


def estimate(value, half):
    """An estimate whose interval has about this half."""
    return Estimate(value=value, n=3, seeds=(half / 1.96) ** 2, residual_freedom=10**6)


@pytest.fixture
def frontier():
    setups = {name: optimizers.Setup("AdamW", name) for name in LOSSES}
    schemes = {n: None if n == "dense" else links.setting_of(n) for n in LOSSES}
    return SimpleNamespace(
        known=list(setups.values()), as_good=0.02,
        stage=SimpleNamespace(schemes=schemes, optimizers=["AdamW"]),
        mean_loss=lambda setup: LOSSES[setup.scheme],
        cost=lambda setup: estimate(LOSSES[setup.scheme] - 1.8, 0.005),
        against_power_sgd=lambda setup: estimate(LOSSES[setup.scheme] - 1.9, 0.005),
        bytes_per_step=lambda setup: 4000 if setup.scheme == "dense" else 40,
        is_as_good=lambda setup: setup.scheme == "top-K 0.5 %",
    )  # fmt: skip


@pytest.fixture
def measured():
    """Two ranks: without a limit, and with links of 10 Mbit/s for each of them."""
    case = {"layers": 10, "width": 1000, "ranks": 2}
    free = {"passes": 0.1, "plain": 0.2, "PowerSGD rank 1": 0.2, "top-K 0.5 %": 0.15}
    slow = {"plain": 33.0, "PowerSGD rank 1": 0.5, "top-K 0.5 %": 0.6, "TCS 0.5 and 0.25 %": 0.5}
    rows = [case | {"way": way, "mbit": None, "seconds": s} for way, s in free.items()]
    return links.Links(
        rows + [case | {"way": w, "mbit": 20.0, "seconds": s} for w, s in slow.items()]
    )


def test_loss_and_seconds_are_joined_by_name(frontier, measured):
    choices = hook_choice.list_choices(frontier, measured, NET, 2, 10.0)
    found = {c.setup.scheme: (c.kind, c.loss, c.seconds, c.measured) for c in choices}
    assert found["dense"] == ("dense", 1.8, 33.0, True)
    assert found["TCS 0.5 and 0.25 %"] == ("TCS", 1.91, 0.5, True)
    faster = hook_choice.list_choices(frontier, measured, NET, 2, 1000.0)
    assert {c.setup.scheme: c.measured for c in faster} == dict.fromkeys(list(LOSSES)[:3], False)


def test_as_good_as_power_sgd_means_in_both(frontier, measured):
    def good(ranks, rate):
        choices = hook_choice.list_choices(frontier, measured, NET, ranks, rate)
        return [c.setup.scheme for c in hook_choice.find_as_good(choices, frontier.as_good)]

    assert good(2, 10.0) == ["TCS 0.5 and 0.25 %"]  # +0.01 with an interval up to +0.015
    assert good(2, 1000.0) == ["top-K 0.5 %"]
    assert good(16, 10.0) == []  # what is gathered grows with the number of ranks
    frontier.against_power_sgd = lambda setup: estimate(LOSSES[setup.scheme] - 1.9, 0.015)
    assert good(2, 10.0) == []
    assert hook_choice.find_as_good([], 0.02) == []


def test_tables_say_what_is_calculated(frontier, measured):
    table = hook_choice.tabulate_seconds(frontier, measured, NET, 2, [10.0, 1000.0])
    good = hook_choice.tabulate_as_good(
        {2: frontier, 16: frontier}, measured, {"wide": NET}, [10.0, 1000.0]
    )
    assert good["10 Mbit/s"].tolist() == ["TCS 0.5 and 0.25 %", "none"]
    assert good["1,000 Mbit/s"].tolist()[0] == "top-K 0.5 %" and good["Processes"].tolist() == [
        "2",
        "16",
    ]
    assert table.loc[0, "dense"] == "33" and table.loc[1, "dense"].startswith("≈ 0.")
    assert table.loc[1, "TCS 0.5 and 0.25 %"] == ""
    losses = hook_choice.tabulate_losses(frontier).set_index("Setting")
    assert losses.at["top-K 0.5 %", "minus PowerSGD"] == "−0.050 (−0.055 to −0.045)"
    assert losses.at["dense", "Bytes per step"] == "100.0%"
    assert losses["As good as PowerSGD"].tolist() == ["–", "–", "yes", "no"]


def test_the_picture_has_a_point_for_each_choice(frontier, measured):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    choices = hook_choice.list_choices(frontier, measured, NET, 2, 10.0)
    hook_choice.draw_choices(axes, choices)
    points = [(c.lines[0].get_xdata()[0], c.lines[0].get_ydata()[0]) for c in axes.containers]
    assert points == [(c.seconds, c.loss) for c in choices] and len(points) == 4
    assert not math.isnan(axes.get_xlim()[0])
    plt.close(figure)
