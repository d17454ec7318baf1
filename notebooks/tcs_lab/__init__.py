"""The lab: the code that the notebooks share, in rooms. A room imports only from rooms on lower floors:

    6   compare
    5   evidence   studies   teaching
    4   runs   tables
    3   training
    2   tasks
    1   support   schemes

The first line of a room says what is in it. `from tcs_lab import tables` imports a room, and the names
that notebooks need most are here, too (`lab.RunConfig`). A name is imported when it is first used.

Where to look, for example: a record is written in `runs/records.py`, and figures 3 to 5 are drawn in
`tables/figures.py`.

Above the rooms is the command line, `tcs` or `python -m tcs_lab`: `__main__` reads it, and `commands`
carries it out. No room imports these two.
"""

import importlib.util
import sys
from pathlib import Path

from tcs_lab.support.lazy import lazily

_NEEDED = ("torchvision", "pandas", "matplotlib", "yaml", "PIL", "tqdm", "scipy", "pydantic",
           "filelock")  # fmt: skip
if _missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    _line = f"tcs_lab needs {', '.join(_missing)}: pip install 'tcs-core[lab]'"
    if sys.argv[:1] == ["-m"] or Path(sys.argv[0]).stem == "tcs":  # the command line
        sys.exit(f"error: {_line}")
    raise ModuleNotFoundError(_line)

__getattr__, __dir__ = lazily(
    __name__,
    {
        "support.files": "cache_folder",
        "support.paths": "ROOT",
        "schemes": "",
        "tasks.images": "Batches Draws generator_for load_dataset partition synthetic_dataset",
        "tasks.text": "GPT load_text",
        "training.configuration": (
            "RUN_KEYS Fraction PositiveNumber RunConfig Seed WholeNumber digest_of"
        ),
        "training.training": "Training load_data read_outcomes",
        "training.watching": "UpdateWatch",
        "runs.parameters": (
            "PARAMETERS check_notebook_params given_notebook_params notebook_params params_file "
            "plan profile_params read_params"
        ),
        "runs.estimates": "forecast forecast_steps forecast_trainings",
        "runs.index": "find_records",
        "runs.plans": "count_made find_searches keep_planned plan_runs",
        "runs.progress": "Progress follow",
        "runs.records": (
            "compare_records config_of core_sha256 describe_core describe_provenance list_missing load_records "
            "read_record record_path results_folder"
        ),
        "runs.runs": "run run_all",
        "tables.tables": (
            "bits_per_parameter count_sends format_interval format_number format_times markdown "
            "mean_interval paper_factor plain_markdown prevent_line_breaks readable save_table summary "
            "traffic welch_interval with_every_seed"
        ),
        "tables.figures": (
            "COLOURS LOOK curve_style draw_accuracy_figure draw_megabytes_figure label_ends name_pair "
            "plain_log save_figure series_style text_colour"
        ),
        "tables.analysis": "Comparison Estimate holm",
        "evidence.claims": (
            "load_claim_records load_planned_records load_unequal_records read_claims"
        ),
        "evidence.planned_model": (
            "compare_unequal_clients decompose estimate_difference estimate_gaps"
        ),
        "evidence.judging": (
            "CLAIM_UNITS VERDICTS differing_bootstrap_verdict format_difference "
            "format_estimate format_verdict judge_claims judge_interval list_unmeasured "
            "readable_claims"
        ),
        "evidence.measures": "count_explored measure_coincidence measure_recurrence",
        "evidence.fair": (
            "compare_prediction control_answers fair_counts fair_differences fair_progress fair_table gains_of_tuning "
            "readable_answers readable_fair readable_fair_differences readable_prediction"
        ),
        "evidence.sensitivity": (
            "best_values read_sensitivity readable_sensitivity sensitivity_plan sensitivity_table"
        ),
        "evidence.sentences": "read_sentences sentences_table",
        "evidence.unequal_clients": "unequal_by_seed unequal_costs unequal_masks",
        "evidence.paper_tables": "draw_table",
        "studies.bench": "bench_codecs bench_round bench_step bench_table run_benches",
        "teaching.cells": (
            "ListeningLink Statements bold check_values judge_mean paired_gain "
            "show_code show_figures"
        ),
        "teaching.exercises": "check_exercise",
        "compare": "",
    },
)
