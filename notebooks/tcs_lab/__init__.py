"""The lab: what the notebooks share, in rooms. Each imports only from those on lower floors:

    6   compare
    5   evidence   studies   teaching
    4   runs   tables
    3   training
    2   tasks
    1   support   schemes

A room's first line says what is in it. `from tcs_lab import tables` brings a room; the names that most
notebooks need are here, too (`lab.RunConfig`). Each is imported when it is first asked for.

Above the rooms is the command line, `tcs` or `python -m tcs_lab`: `__main__` reads its words, and
`commands` carries them out. No room imports them.
"""

import importlib.util
import sys
from pathlib import Path

from tcs_lab.support.lazy import lazily

_NEEDED = ("torchvision", "pandas", "matplotlib", "yaml", "PIL", "tqdm", "scipy", "pydantic",
           "filelock", "joblib")  # fmt: skip
if _lacking := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    _line = f"tcs_lab needs {', '.join(_lacking)}: pip install 'tcs-core[lab]'"
    if sys.argv[:1] == ["-m"] or Path(sys.argv[0]).stem == "tcs":  # the command line
        sys.exit(f"error: {_line}")
    raise ModuleNotFoundError(_line)

__getattr__, __dir__ = lazily(
    __name__,
    {
        "support.files": "cache_folder",
        "support.places": "ROOT",
        "schemes": "",
        "tasks.images": "Batches Draws generator_for load_dataset partition synthetic_dataset",
        "tasks.text": "GPT load_text",
        "training.configuration": "RUN_KEYS RunConfig Seed digest_of",
        "training.training": "Training load_data outcomes",
        "training.watching": "UpdateWatch",
        "runs.parameters": (
            "PARAMETERS check_notebook_params given_notebook_params notebook_params params_file "
            "plan profile_params read_params"
        ),
        "runs.forecast": "forecast",
        "runs.index": "find_records",
        "runs.plans": "count_made find_searches plan_runs",
        "runs.progress": "Progress followed",
        "runs.records": (
            "config_of core_sha256 differences lacking load_records made_with read_record record_path "
            "results_folder"
        ),
        "runs.runs": "run run_all",
        "tables.tables": (
            "bits_per_parameter markdown mean_interval number paper_factor plain_markdown "
            "readable save_table summary times traffic turns unbroken welch_interval "
            "with_every_seed with_interval"
        ),
        "tables.figures": (
            "COLOURS LOOK accuracy_figure curve_style label_ends megabytes_figure name_pair "
            "plain_log save_figure series_style text_colour"
        ),
        "tables.analysis": "Comparison Estimate holm",
        "evidence.claims": (
            "CLAIM_UNITS Gate VERDICTS behind_gates claim_records decomposed difference "
            "difference_said judged not_measured numbers other_by_bootstrap planned_gaps "
            "planned_records read_claims readable_claims recurring said unequal unequal_records "
            "verdict"
        ),
        "evidence.fair": (
            "control_answers fair_counts fair_differences fair_progress fair_table predicted "
            "readable_answers readable_fair readable_fair_differences readable_predicted"
        ),
        "evidence.sensitivity": (
            "best_values read_sensitivity readable_sensitivity sensitivity_plan sensitivity_table"
        ),
        "evidence.sentences": "read_sentences sentences_table",
        "evidence.coincidence": "coinciding explored_places",
        "evidence.unequal_clients": "unequal_by_seed unequal_costs unequal_masks",
        "evidence.paper_tables": "draw_table",
        "studies.bench": "bench_codecs bench_compiled bench_round bench_step bench_table run_benches",
        "teaching.cells": (
            "Count Listening Positive Share Statements bold check_values decided paired_gain "
            "show_code show_figures"
        ),
        "teaching.exercises": "check_exercise",
        "compare": "",
    },
)
