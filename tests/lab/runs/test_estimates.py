"""What is said before runs are made: which lack a record, how many epochs, about how long."""

import re
import time

import nbformat
import pytest
import tcs_lab as lab
import torch

TINY = {"epochs": 3, "train_samples": 80, "test_samples": 20, "image_size": 8, "crop_padding": 0,
        "model": "conv3", "width": 4, "clients": 2, "batch_size": 8, "threads": 1}  # fmt: skip


def plan(seeds=3, schemes=("TCS", "FedAvg"), **changes):
    return lab.plan({"schemes": list(schemes), "seeds": seeds, **TINY, **changes})


def test_the_seeds_without_a_record_are_named():
    runs = plan()
    records = [{"digest": config.digest} for config in runs]
    assert lab.list_missing(runs, records) == "none"
    assert lab.list_missing(runs, records[1:]) == "TCS (seed 0)"
    assert lab.list_missing(runs, records[2:5]) == "TCS (seeds 0, 1), FedAvg (seed 2)"
    assert lab.list_missing(runs, records[3:]) == "TCS (all 3 seeds)"
    assert lab.list_missing(plan(1), []) == "TCS, FedAvg"


def test_a_forecast_counts_the_runs_without_a_record_and_changes_nothing(tmp_path):
    runs = plan(2, schemes=["TCS"])
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    said = lab.forecast(runs, results=tmp_path)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    assert re.match(r"2 of 2 runs .* 3 epochs: about ", said)
    lab.run_all(runs[:1], tmp_path)
    assert lab.forecast(runs, results=tmp_path).startswith("1 of 2 runs")
    assert "nothing is trained" in lab.forecast(runs[:1], results=tmp_path)


SECONDS = {"second": 1, "seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}


def told(**changes):
    said = lab.forecast(plan(1, schemes=["TCS"], **changes)).split("about ")[1].split()
    return (2 if said[0] == "a" else float(said[0].replace(",", ""))) * SECONDS[said[1]]


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"side_by_side": False}, {"participation": 0.5},
                                     {"dataset": "text", "model": "gpt", "width": 16, "image_size": None, "train_samples": None,
                                      "test_samples": None, "crop_padding": 4, "context": 16}])  # fmt: skip
def test_every_kind_of_run_has_a_forecast(changes):
    assert told(**changes) > 0


def test_images_that_are_larger_than_synthetic_ones_have_a_forecast():
    assert told(dataset="folder", image_size=40, width=2) > 0


def test_a_run_whose_epochs_have_a_single_round_has_a_forecast(small):
    assert told(batch_size=20, train_samples=60, clients=3, image_size=8, width=2) > 0


def test_a_run_of_three_hundred_epochs_is_told_to_be_long():
    """Roughly: the time of a pass is measured beside all else that the machine does."""
    assert told(epochs=300_000) > 10 * told(epochs=300)
    assert told(epochs=300, model="resnet18", width=64, image_size=None, train_samples=None) > 3600


def test_trainings_of_a_notebooks_own_and_steps_are_told_with_their_number():
    runs = plan(1)
    assert re.match(
        r"this page makes 2 trainings of 3 epochs: about ", lab.forecast_trainings(runs)
    )
    assert "1 training of 3 epochs" in lab.forecast_trainings(runs[:1])
    longer = [*runs, *plan(1, epochs=5)]
    assert "4 trainings of 3 or 5 epochs" in lab.forecast_trainings(longer)
    calls = []
    said = lab.forecast_steps(2_000, "rounds", lambda: (calls.append(0), time.sleep(0.03)))
    assert len(calls) == 2
    assert re.match(r"this page makes 2,000 rounds: about (\d+ seconds|[1-9] minutes)", said)


TRAINS = ("lab.run_all(", "lab.Training(", ".round()", "torchrun_command(", "subprocess.Popen(")


@pytest.mark.parametrize(
    "path", sorted((lab.ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem
)
def test_every_notebook_that_trains_says_how_long_before_it_does(path):
    cells = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    trains = [cell for cell in cells if any(word in cell for word in TRAINS)]
    says = [cell for cell in cells if "lab.forecast" in cell]
    assert bool(trains) == bool(says)
    if trains and "lab.run_all(" in "".join(trains[:1]):
        assert cells.index(says[0]) <= cells.index(trains[0])
