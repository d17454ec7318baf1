"""The lab: what the notebooks share. A room a file; see each one's first line."""

import signal
import sys

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while a command imports just ends it

from tcs_lab.bench import (
    bench_codecs,
    bench_compiled,
    bench_round,
    bench_step,
    bench_table,
    run_benches,
)
from tcs_lab.cells import (
    Claims,
    Count,
    Listening,
    Positive,
    Share,
    check_values,
    decided,
    paired_gain,
    show_code,
)
from tcs_lab.claims import (
    VERDICTS,
    claim_records,
    claims_beside,
    judged,
    read_claims,
    readable_claims,
    verdict,
)
from tcs_lab.data import (
    Batches,
    Draws,
    generator_for,
    load_dataset,
    partition,
    synthetic_dataset,
)
from tcs_lab.figures import (
    COLOURS,
    accuracy_figure,
    curve_style,
    draw_table,
    label_ends,
    megabytes_figure,
    plain_log,
    save_figure,
    series_style,
)
from tcs_lab.files import cache_folder
from tcs_lab.planned import planned_runs
from tcs_lab.ranks import joined_ranks
from tcs_lab.records import (
    config_of,
    core_sha256,
    differences,
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
    readable,
    recorded,
    save_table,
    summary,
    traffic,
    welch_interval,
    with_interval,
)
from tcs_lab.text import GPT, load_text
from tcs_lab.training import Training, Watch, load_data
