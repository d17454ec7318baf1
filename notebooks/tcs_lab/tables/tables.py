"""Tables: records become rows of numbers, and rows become tables that a person reads."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit  # Student's quantile; scipy.stats takes seconds to import

from tcs_core import OVERHEAD_BYTES, Scheme, bit_budget, kept
from tcs_lab.support.files import write_if_possible
from tcs_lab.training.configuration import RunConfig, record_file_name
from tcs_lab.training.training import Row

Record = dict[str, Any]
CONFIDENCE = 0.95  # of every interval
PAPER_TRIALS = 5  # the trials behind the numbers that the paper prints
NONE = (math.nan,) * 3


def with_every_seed(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters that ask for all seeds that may have records, if they only say how many seeds. A list of
    seeds stays as it is, because other seeds do not belong to the table (they are those of a pilot,
    or have tuned a learning rate)."""
    return params if isinstance(params.get("seeds"), list) else params | {"seeds": 100}


# What was sent ────────────────────────────────────────────────────────────────────────────────────


def bits_per_parameter(record: dict[str, Any]) -> dict[str, float]:
    """Return the measured traffic of a run, in bits per parameter and local iteration.

    "uplink" and "downlink" leave the warm-up out, as the paper does; "... with warm-up" include it.
    All values are nan for centralized training, which sends nothing. The first two are nan for a run
    that ends with its warm-up.
    """
    scheme, dimension = record["config"]["scheme"], record["dimension"]
    names = ("uplink", "downlink")
    if scheme["centralized"] or not record["rows"]:
        return dict.fromkeys([n + w for n in names for w in ("", " with warm-up")], math.nan)
    after = [r for r in record["rows"] if not _wide_epoch(record["config"], r)]
    dense = 0 if _always_dense(scheme) else sum(r["dense_rounds"] for r in after)
    values, unit = {}, dimension * scheme["local_steps"]
    for name, key in zip(names, ("bits_up", "bits_down"), strict=True):
        sparse = sum(r[key] for r in after) - 32 * dimension * dense
        sparse_rounds = sum(r["rounds"] for r in after) - dense
        total, rounds = (sum(r[k] for r in record["rows"]) for k in (key, "rounds"))
        values[name] = sparse / (unit * sparse_rounds) if sparse_rounds else math.nan
        values[f"{name} with warm-up"] = total / (unit * rounds)
    return values


def count_sends(record: Record) -> int:
    """Count how often an entry is sent on average by a scheme with a shared mask: the rounds, times the
    share of this mask."""
    rounds = sum(row["rounds"] for row in record["rows"])
    return round(rounds * record["config"]["scheme"]["phi_global"])


def participants(record: Record) -> int:
    """Return the number of clients that take part in a round."""
    config = record["config"]
    return kept(config["participation"], config["clients"])


def traffic(record: dict[str, Any]) -> dict[str, float]:
    """Return the bytes of one client's messages in a whole run, with all overhead: "up", "down",
    and "warm-up", which is the part of both that dense rounds, or rounds with larger masks, took.

    All are zero for centralized training. Where only some clients take part in a round, the client
    is one that takes part in every round.
    """
    config, dimension = record["config"], record["dimension"]
    total = dict.fromkeys(("up", "down", "warm-up"), 0.0)
    if config["scheme"]["centralized"]:
        return total
    clients = participants(record)
    sparse = not _always_dense(config["scheme"])
    for row in record["rows"]:
        for way, share in (("up", clients), ("down", 1)):
            sent = row[f"bytes_{way}"] / share
            total[way] += sent
            total["warm-up"] += sent * _wide_epoch(config, row)
        if not _wide_epoch(config, row):  # all of whose rounds are counted above
            total["warm-up"] += sparse * row["dense_rounds"] * 2 * (4 * dimension + OVERHEAD_BYTES)
    return total


def _wide_epoch(config: dict[str, Any], row: Row) -> bool:
    """Return whether an epoch belongs to a sparse warm-up, with larger masks."""
    wide = config["scheme"].get("warmup_masks", 1) > 1
    return wide and row["epoch"] <= config["warmup_epochs"]


def _always_dense(scheme: dict[str, Any]) -> bool:
    plain = scheme["value_bits"] == scheme.get("down_value_bits", 32) == 32
    return scheme["rule"] == "dense" and plain and scheme.get("phi_down") is None


# Intervals ────────────────────────────────────────────────────────────────────────────────────────


def mean_interval(
    values: Iterable[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Return the mean of the values with Student's interval, (mean, low, high). The interval of a
    single value is infinite."""
    values = np.asarray(list(values), dtype=float)
    if not len(values):
        return NONE
    mean, half = float(values.mean()), half_interval(values, confidence)
    return mean, mean - half, mean + half


def half_interval(values: np.ndarray, confidence: float) -> float:
    """Half of Student's interval for the mean of the values; infinite for fewer than two of them."""
    if len(values) < 2:
        return math.inf
    deviation = values.std(ddof=1) / math.sqrt(len(values))
    return float(stdtrit(len(values) - 1, (1 + confidence) / 2) * deviation)


def welch_interval(
    one: tuple[float, float], other: tuple[float, float]
) -> tuple[float, float, float]:
    """Return the difference of two printed means with Welch's interval. Both are given as (mean,
    standard deviation) over PAPER_TRIALS trials. Printed numbers are not paired, so nothing better
    is possible."""
    a, b = one[1] ** 2 / PAPER_TRIALS, other[1] ** 2 / PAPER_TRIALS
    freedom = (a + b) ** 2 * (PAPER_TRIALS - 1) / (a**2 + b**2) if a + b else math.nan
    half = stdtrit(freedom, (1 + CONFIDENCE) / 2) * math.sqrt(a + b) if a + b else 0.0
    return one[0] - other[0], float(one[0] - other[0] - half), float(one[0] - other[0] + half)


# One row for each scheme ─────────────────────────────────────────────────────────────────────────────────


def summary(
    records: Iterable[Record], paper: dict[str, list] | None = None,
    planned: Iterable[RunConfig] = (), gaps: Mapping[str, dict[str, float]] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Summarize records in a row for each scheme: its accuracy over seeds (0..1), the difference to the
    Baseline, and bits, beside the paper's numbers. A scheme that is `planned` and has no record has
    a row with n = 0.

    `paper` maps a scheme's name to its accuracy in percent, standard deviation and bit budget (None
    where the paper has none). A scheme with diverged seeds has no mean; `diverged` counts them.
    Differences are paired by seed, over `difference_n` common seeds, with Student's interval, unless
    `gaps` has them by scheme (what `evidence.planned_model.estimate_gaps` gives); the paper's have Welch's interval.
    Raises ValueError for two runs of one scheme and seed, since these have different settings.
    """
    configs = {config.scheme.name: config.identity() for config in planned}
    groups: dict[str, list[Record]] = {name: [] for name in configs}
    for record in records:
        groups.setdefault(record["config"]["scheme"]["name"], []).append(record)
        configs[record["config"]["scheme"]["name"]] = record["config"]
    base, paper = _finals(groups.get("Baseline", [])), paper or {}
    rows = []
    for name, group in groups.items():
        if len({record["config"]["seed"] for record in group}) < len(group):
            raise ValueError(
                f"{name}: got two runs of one seed, allowed: one, so draw a table for each setting"
            )
        gap = NO_GAP
        if name != "Baseline":
            gap = _gaps(group, base) if gaps is None else gaps.get(name, NO_GAP)
        rows.append(_describe_records(configs[name], group) | gap | _read_paper_row(name, paper))
    return pd.DataFrame(rows)


def _finals(records: list[Record]) -> dict[int, float]:
    """Final accuracies by seed; {} if a seed diverged."""
    if any(record["status"] != "finished" for record in records):
        return {}
    return {r["config"]["seed"]: r["rows"][-1]["accuracy"] for r in records}


def _describe_records(config: dict[str, Any], records: list[Record]) -> dict[str, Any]:
    """Return the columns that the records of one scheme fill."""
    finished = [r for r in records if r["status"] == "finished"]
    final = pd.Series(_finals(records), dtype=float)
    losses = [r["rows"][-1].get("train_loss", math.nan) for r in finished]
    sent = pd.DataFrame([_sent(record) for record in finished], columns=SENT).mean()
    return {
        "scheme": config["scheme"]["name"],
        "eta": config["learning_rate"],
        "n": len(finished),
        "diverged": len(records) - len(finished),
        "accuracy": float(final.mean()),
        "accuracy_std": float(final.std()),
        "train_loss": float(np.mean(losses)) if len(final) else math.nan,
        "formula_bits": bit_budget(Scheme(**config["scheme"])),
        **sent,
        "records": " ".join(record_file_name(record) for record in records),
    }


SENT = (
    "uplink_bits", "uplink_bits_with_warmup", "downlink_bits", "downlink_bits_with_warmup",
    "megabytes_up", "megabytes_down", "megabytes_warmup",
)  # fmt: skip


def _sent(record: Record) -> dict[str, float]:
    """Return a run's bits per parameter and iteration, and its megabytes in all; nan where nothing
    is sent."""
    bits = bits_per_parameter(record)
    unit = math.nan if record["config"]["scheme"]["centralized"] else 1e6
    flow = [number / unit for number in traffic(record).values()]
    ways = ("uplink", "uplink with warm-up", "downlink", "downlink with warm-up")
    return dict(zip(SENT, [*(bits[way] for way in ways), *flow], strict=True))


_GAP = ("difference", "difference_low", "difference_high")
NO_GAP = dict(zip(_GAP, NONE, strict=True)) | {"difference_n": 0}


def _gaps(records: list[Record], base: dict[int, float]) -> dict[str, float]:
    """Return the accuracy minus the Baseline's of the same seed, with mean and interval over the
    seeds of both."""
    ours = _finals(records)
    pairs = [ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())]
    return dict(zip(_GAP, mean_interval(pairs), strict=True)) | {"difference_n": len(pairs)}


def _read_paper_row(name: str, paper: dict[str, list]) -> dict[str, float]:
    """Return the paper's numbers for a scheme, accuracies 0..1, and the difference to its Baseline."""
    (mean, deviation, bits), base = (
        [math.nan if v is None else v for v in paper.get(n, NONE)] for n in (name, "Baseline")
    )
    gap = NONE if name == "Baseline" else welch_interval((mean, deviation), (base[0], base[1]))
    return {
        "paper_accuracy": mean / 100,
        "paper_accuracy_std": deviation / 100,
        "paper_bits": bits,
        **{f"paper_{key}": value / 100 for key, value in zip(_GAP, gap, strict=True)},
    }


# For a person ─────────────────────────────────────────────────────────────────────────────────────


OURS, PAPERS = "Ours − Baseline, points", "Paper − Baseline, points"
COLUMNS = (
    "Scheme", "n", "Ours: accuracy %", OURS, "Paper: accuracy %", PAPERS,
    "Bits up: formula / sent", "MB both ways",
)  # fmt: skip
_NOTE = (
    "Accuracies are means ± one standard deviation over n seeds. Differences have 95 % intervals. Ours {}. The paper's are "
    "calculated from the means and standard deviations that it prints. Bits are per parameter and local "
    "step, without the dense start (warm-up). MB are those of one client in the whole run, dense start included. The csv file "
    "of the same name has further columns."
)
NOTE = _NOTE.format(
    "are Student's over the seeds that a scheme and the Baseline have in common, because this profile "
    "has no planned model"
)
NOTE_PLANNED = _NOTE.format(
    "come from a statistical model that was planned before the first run (params/claims.yaml), so they can deviate a little from "
    "the differences of the printed means"
)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Return the measured rows of a summary, as a person reads them: accuracies in percent, mean ±
    standard deviation; differences in points with 95 % intervals; bits per parameter and local
    iteration; megabytes. The paper's columns are left out where it says nothing.
    """
    rows = [_readable_row(row) for row in keep_measured(table).itertuples()]
    text = pd.DataFrame(rows, columns=COLUMNS)
    empty = [c for c in (OURS, "Paper: accuracy %", PAPERS) if (text[c] == "–").all()]
    return text.drop(columns=empty)


def keep_measured(table: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows of a table that have a run, also if it diverged."""
    return table[(table["n"] > 0) | (table["diverged"] > 0)]


def _name_unmeasured(table: pd.DataFrame) -> str:
    """Say in a line which schemes have no run; "" if there are none."""
    names = table.drop(keep_measured(table).index)["scheme"]
    return f"Not measured yet: {', '.join(names)}." if len(names) else ""


def _readable_row(r: Any) -> tuple[str, ...]:
    gap = format_interval(*(100 * v for v in (r.difference, r.difference_low, r.difference_high)))
    theirs = (r.paper_difference, r.paper_difference_low, r.paper_difference_high)
    sent = f"{format_four_digits(r.formula_bits)} / {format_four_digits(r.uplink_bits)}"
    return (
        r.scheme,
        str(r.n),
        format_accuracy(r),
        gap + (f", n = {r.difference_n}" if r.difference_n not in (0, r.n) else ""),
        _percent(r.paper_accuracy, r.paper_accuracy_std, ".5g"),
        format_interval(*(100 * v for v in theirs)),
        "–" if sent == "– / –" else sent,
        format_four_digits(r.megabytes_up + r.megabytes_down),
    )


def format_accuracy(row: Any) -> str:
    """Return the accuracy of a row of a table, over its seeds, as a person writes it."""
    if row.diverged:
        return f"diverged ({row.diverged} of {row.n + row.diverged})"
    return _percent(row.accuracy, row.accuracy_std, ".2f") if row.n else "not measured"


def _percent(mean: float, deviation: float, form: str) -> str:
    if math.isnan(mean):
        return "–"
    spread = "" if math.isnan(deviation) else f" ± {100 * deviation:{form}}"
    return f"{100 * mean:{form}}{spread}"


def format_four_digits(value: float) -> str:
    """Return a number with at most four digits."""
    return f"{value:.4g}" if abs(value) < 9999.5 else format_number(value, 4)


def format_number(value: float, digits: int = 3) -> str:
    """Return a number as a person writes it, with so many digits: 0.0123, 1,870, 4 × 10⁻⁷; – for
    nan."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    rounded = float(f"{value:.{digits - 1}e}")
    if 0 < abs(rounded) < 1e-4 or abs(rounded) >= 1e9:
        factor, power = f"{rounded:.{digits - 1}e}".split("e")
        factor = f"{float(factor):g}".replace("-", "−")
        return f"{factor}\u00a0×\u00a010{str(int(power)).translate(RAISED)}"
    return f"{rounded:,.8f}".rstrip("0").rstrip(".").replace("-", "−")


RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_times(ratio: float) -> str:
    """Return a factor as a person writes it, with three digits at most: 8.8, 88, 1,910."""
    return f"{ratio:.1f}" if ratio < 10 else f"{float(f'{ratio:.3g}'):,.0f}"


def paper_factor(name: str) -> float:
    """Return how many times fewer bits a scheme sends than dense training, on the uplink and after
    the warm-up, by the paper's formula. (The paper's tables print the formula's bits with four
    digits at most.)"""
    return 32 / bit_budget(name)


def format_interval(mean: float, low: float, high: float, form: str = "{:+.2f}") -> str:
    """Return a number with its interval, as in "+0.21 (−0.08 to +0.50)", or without one where there
    is none; – for nan. A number that rounds to zero has no sign."""
    if math.isnan(mean):
        return "–"
    texts = (form.format(value).replace("-", "−") for value in (mean, low, high))
    mean_, low_, high_ = (
        text if re.search("[1-9inf]", text) else text.lstrip("+−") for text in texts
    )
    return f"{mean_} ({low_} to {high_})" if math.isfinite(low) and low_ != high_ else mean_


def save_table(
    table: pd.DataFrame, path: str | Path | None, title: str,
    reader: Callable[[pd.DataFrame], pd.DataFrame] = readable, note: str | None = None,
) -> str:  # fmt: skip
    """Save a table as .csv and .md, and return the text of the .md, also where nothing can be written.
    Without a path nothing is written.

    The .csv has all numbers. The .md has the table as a person reads it, by `reader`, a line that
    says what is not measured, and a note; the note of a summary says what its columns mean.
    """
    csv = table.to_csv(index=False, lineterminator="\n")
    shown = reader(table)
    missing = _name_unmeasured(table) if reader is readable else ""
    parts = [f"**{title}**", plain_markdown(shown) if len(shown) else "", missing]
    parts.append(NOTE if note is None and reader is readable and len(shown) else note or "")
    text = "\n\n".join(part for part in parts if part) + "\n"
    for suffix, content in ((".csv", csv), (".md", text)) if path is not None else ():
        data = content.encode()
        write_if_possible(Path(f"{path}{suffix}"), lambda file: file.write(data))  # noqa: B023
    return text


def plain_markdown(table: pd.DataFrame) -> str:
    """Return a table of texts as Markdown, for files and terminals. Words stand on the left of
    their column, numbers on the right."""
    marks = ["---:" if _is_numeric(table.iloc[:, i]) else ":---" for i in range(table.shape[1])]
    lines = [list(table.columns), marks, *table.values]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


_EMPTY = ("", "–", "-", "nan", "not made", "not measured")
_NUMBER = re.compile(r"[\s*]*[+−\-×~±<>≤≥= ]*[\d∞]")  # how a cell with a number begins
_WORD = re.compile(r"[^\W\d_]{4,}")


def _is_numeric(column: pd.Series) -> bool:
    """Return whether most cells that are not empty are numbers, perhaps with an interval or a unit."""
    cells = [text for text in map(str, column) if text not in _EMPTY]
    numbers = sum(bool(_NUMBER.match(text)) and not _WORD.search(text) for text in cells)
    return 2 * numbers > len(cells) or (not cells and len(column) > 0)


def markdown(table: pd.DataFrame) -> str:
    """Return a table of texts as Markdown, for a page: names and numbers stay on one line."""
    return prevent_line_breaks(plain_markdown(table))


def prevent_line_breaks(text: str) -> str:
    """Prevent that the tables of a Markdown text break a scheme's name, "n = 5", an interval or a number
    with its unit over two lines. (Hyphens stay hyphens, so that a name can be copied.)"""
    return "\n".join(
        _unbroken_row(line) if line.startswith("| ") else line for line in text.split("\n")
    )


_NAME = re.compile(r"(?<![\w`/.-])[A-Za-z]+(?:-[A-Z][\w+]*)+(?![\w`/.-])")
_OF_NUMBERS = "0-9=±×%−+≤≥/"  # a space beside one of these holds, but before "(" and after ","
_HOLDS = re.compile(rf"(?<=[{_OF_NUMBERS}]) (?![(|])|(?<![|,;:.]) (?=[{_OF_NUMBERS}])")


def _unbroken_row(line: str) -> str:
    return _NAME.sub(r"<nobr>\g<0></nobr>", _HOLDS.sub("\u00a0", line))
