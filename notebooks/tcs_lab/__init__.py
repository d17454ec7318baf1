"""The lab: what the notebooks share. A room a file; see each one's first line."""

import importlib.util
import signal
import sys
from pathlib import Path

_NEEDED = ("torchvision", "pandas", "matplotlib", "yaml", "PIL", "tqdm", "scipy", "pydantic",
           "filelock", "joblib")  # fmt: skip
if _lacking := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    _line = f"tcs_lab needs {', '.join(_lacking)}: pip install 'tcs-core[lab]'"
    if sys.argv[:1] == ["-m"] or Path(sys.argv[0]).stem == "tcs":  # the command line
        sys.exit(f"error: {_line}")
    raise ModuleNotFoundError(_line)

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while a command imports just ends it

import tcs_lab.exercise_cases
from tcs_lab.analysis import Comparison, Estimate, holm
from tcs_lab.bench import (
    bench_codecs,
    bench_compiled,
    bench_round,
    bench_step,
    bench_table,
    run_benches,
)
from tcs_lab.cells import (
    Count,
    Listening,
    Positive,
    Share,
    Statements,
    bold,
    check_values,
    decided,
    paired_gain,
    show_code,
)
from tcs_lab.claims import (
    CLAIM_UNITS,
    VERDICTS,
    Gate,
    behind_gates,
    by_bootstrap,
    claim_records,
    decomposed,
    difference,
    difference_said,
    judged,
    not_measured,
    numbers,
    other_by_bootstrap,
    planned_gaps,
    planned_records,
    read_claims,
    readable_claims,
    recurring,
    said,
    supported_if,
    unequal,
    unequal_records,
    verdict,
)
from tcs_lab.coinciding import coinciding, explored_places
from tcs_lab.data import (
    Batches,
    Draws,
    generator_for,
    load_dataset,
    partition,
    synthetic_dataset,
)
from tcs_lab.exercises import check as check_exercise
from tcs_lab.fair import (
    control_answers,
    fair_counts,
    fair_differences,
    fair_progress,
    fair_table,
    predicted,
    readable_answers,
    readable_fair,
    readable_fair_differences,
    readable_predicted,
)
from tcs_lab.figures import (
    COLOURS,
    LOOK,
    accuracy_figure,
    curve_style,
    draw_table,
    label_ends,
    megabytes_figure,
    name_pair,
    plain_log,
    save_figure,
    series_style,
    text_colour,
)
from tcs_lab.files import cache_folder
from tcs_lab.planned import made_of, planned_runs, read_plan, searches_of
from tcs_lab.progress import followed
from tcs_lab.ranks import joined_ranks
from tcs_lab.records import (
    config_of,
    core_sha256,
    differences,
    made_with,
    read_record,
    record_path,
    results_folder,
)
from tcs_lab.runs import Progress, run, run_all
from tcs_lab.sensitivity import (
    best_values,
    read_sensitivity,
    readable_sensitivity,
    sensitivity_plan,
    sensitivity_table,
)
from tcs_lab.sentences import read_sentences, sentences_table
from tcs_lab.settings import (
    PARAMETERS,
    ROOT,
    RUN_KEYS,
    RunConfig,
    Seed,
    check_notebook_params,
    digest_of,
    given_notebook_params,
    notebook_params,
    plan,
    read_params,
)
from tcs_lab.tables import (
    bits_per_parameter,
    markdown,
    mean_interval,
    number,
    paper_factor,
    plain_markdown,
    readable,
    recorded,
    save_table,
    summary,
    times,
    traffic,
    turns,
    unbroken,
    welch_interval,
    with_every_seed,
    with_interval,
)
from tcs_lab.text import GPT, load_text
from tcs_lab.training import Training, load_data, outcomes
from tcs_lab.unequal_clients import unequal_by_seed, unequal_costs, unequal_masks
from tcs_lab.watching import UpdateWatch
