"""Every notebook with two other settings runs to its end, and says of each claim what became of it.

Minutes: `uv run pytest -m slow`.
"""

import papermill
import pytest
import tcs_lab as lab
from tcs_lab.tables.verdicts import WORDS

NOTEBOOKS = lab.ROOT / "notebooks"
UNTESTED = {"epochs": 3, "train_samples": 400}
SHORT = UNTESTED | {"test_samples": 100}
TINY = {"dataset": "synthetic", "train_samples": 120, "test_samples": 60, "model": "resnet8", "width": 2,
        "clients": 2, "batch_size": 8, "epochs": 2, "seeds": 1, "threads": 1, "profile": "ci"}  # fmt: skip
SETTINGS = {
    "00": [{"tables": [2], "points": ["TCS"]}, TINY | {"tables": [3]}],
    "01": [SHORT | {"clients": 2, "local_steps": [1]},
           SHORT | {"clients": 1, "batch_size": 16, "local_steps": [2, 3], "seed": 3}],
    "02": [SHORT | {"phi": 0.2, "clients": 2, "federation_sizes": [1, 3]},
           SHORT | {"local_steps": 2, "drawn_clients": 2, "drawn_k": 5, "federation_sizes": [2]}],
    "03": [SHORT | {"phi_global": 0.1, "clients": 4},
           SHORT | {"phi_global": 0.3, "local_steps": 2, "value_bits": 5, "clients": 2, "warmup_epochs": 0}],
    "04": [UNTESTED | {"schemes": ["TCS", "TCS-Q5-LF"], "learning_rates": [0.3], "seeds": 1},
           UNTESTED | {"schemes": ["TCS-L2-LF", "TCS-PLF"], "learning_rates": [0.5, 0.8], "seeds": 2,
                       "phi_min_global": 0.02}],
    "05": [UNTESTED | {"momentum": 0.5, "value_bits": 5, "clients": 10, "batch_size": 4},
           UNTESTED | {"momentum": 0.05, "phi_global": 0.2}],
    "06": [{"dimension": 40, "phi": 0.1, "positions": [40, 2, 7], "measured_dimension": 10007},
           {"dimension": 3, "phi": 1.0, "positions": [1, 2, 3], "measured_dimension": 1000}],
    "07": [SHORT | {"value_bits": 1, "compared_bits": [1, 2], "clients": 2},
           SHORT | {"value_bits": 8, "compared_bits": [8]}],
    "08": [{"table": 3}, TINY | {"table": 2}],
    "09": [{"own": ["Threshold"], "beside": ["TCS"]},
           {"own": ["TCS-Average-L4"], "beside": ["Baseline"], "jobs": 2}],
    "10": [{"clients": 2, "schemes": ["TCS-L4-Q5++", "Baseline"], "paper_warmup": 30},
           {"schemes": ["TCS"], "seeds": 2, "batch_size": 1, "message_width": 2}],
    "10b": [{"clients": 2, "width": 2}, {"paper_warmup": 15, "epochs": 3}],
    "11": [{"clients": 2, "step_dimension": 20_000, "round_width": 2},
           {"batch_size": 4, "step_dimension": 20_000, "round_width": 2, "repeat": 2}],
    "12": [{"processes": 1, "steps": 20, "start_iter": 3},
           {"phi_global": 0.5, "phi_local": 0.3, "steps": 30, "start_iter": 25, "compared_ranks": 8}],
    "13": [{"evidence": "quick"}, {"results": "nothing"}],
    "14": [{"evidence": "quick"}],
    "15": [{"clients": 2, "rounds": 60, "warmup": 5,
            "schemes": ["FedAvg", "TCS-L2", "TCS-W10++"]},
           {"schemes": ["FedAvg", "TCS"], "rounds": 30, "warmup": 2, "seed": 3}],
    "16": [{"rounds": 5, "seed": 1}, {"rounds": 8, "phi_global": 0.1}],
    "17": [{"below": 0.3}, {"below": 10, "links": [5], "latency": 20}],
    "18": [{"rounds": 3, "local_steps": 1, "seed": 2}],
}  # fmt: skip
CASES = [(number, i) for number, settings in SETTINGS.items() for i in range(len(settings))]


def test_every_notebook_has_its_settings():
    assert list(SETTINGS) == [p.stem.split("_")[0] for p in sorted(NOTEBOOKS.glob("*.ipynb"))]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "i"), CASES)
def test_other_settings(number, i, tmp_path):
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    settings = {
        "progress_bar": False,
        "cwd": str(tmp_path),
        "extra_arguments": ["--log-level=CRITICAL"],
    }
    made = papermill.execute_notebook(str(path), None, SETTINGS[number][i], **settings)
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    for cell in code:
        if "\nclaim(" in "\n" + cell.source:
            said = "".join(o.text for o in cell.outputs if o.output_type == "stream").splitlines()
            words = [line for line in said if line.startswith(tuple(map(lab.bold, WORDS)))]
            assert len(words) >= cell.source.count("\nclaim("), said
