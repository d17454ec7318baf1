"""Tables: the records that are there, as rows; rows as tables that a person reads."""

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
from tcs_lab.support.files import write_shown
from tcs_lab.training.configuration import RunConfig, _record_file
from tcs_lab.training.training import Row

Record = dict[str, Any]
CONFIDENCE, PAPER_TRIALS = 0.95, 5  # of every interval; the trials behind the paper's figures
NONE = (math.nan,) * 3


def with_every_seed(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of runs whose records are drawn: with all seeds that may be there, where the
    parameters only say how many. A list of seeds stays: other seeds are not the table's (those of a
    pilot, or those that tuned a learning rate)."""
    return params if isinstance(params.get("seeds"), list) else params | {"seeds": 100}


# What was sent ────────────────────────────────────────────────────────────────────────────────────


def bits_per_parameter(record: dict[str, Any]) -> dict[str, float]:
    """Measured traffic of a run, in bits per parameter per local iteration.

    "uplink" and "downlink" leave the warm-up out, as the paper does; "... with warm-up" do not. nan
    for centralized training, which sends nothing, or where nothing comes after the warm-up.
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


def turns(record: Record) -> int:
    """How often an entry gets to be sent: rounds x the share of the shared mask."""
    rounds = sum(row["rounds"] for row in record["rows"])
    return round(rounds * record["config"]["scheme"]["phi_global"])


def participants(record: Record) -> int:
    """Clients that take part in a round."""
    config = record["config"]
    return kept(config["participation"], config["clients"])


def traffic(record: dict[str, Any]) -> dict[str, float]:
    """Bytes of one client's messages in a whole run, all overhead in: "up", "down", and "warm-up",
    the part of both that its dense rounds, or those of larger masks, took. Zeros for centralized
    training. Where only some clients take part, it is one that does in every round.
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
        total["warm-up"] += sparse * row["dense_rounds"] * 2 * (4 * dimension + OVERHEAD_BYTES)
    return total


def _wide_epoch(config: dict[str, Any], row: Row) -> bool:
    """Whether an epoch belongs to a sparse warm-up, with larger masks."""
    wide = config["scheme"].get("warmup_masks", 1) > 1
    return wide and row["epoch"] <= config["warmup_epochs"]


def _always_dense(scheme: dict[str, Any]) -> bool:
    plain = scheme["value_bits"] == scheme.get("down_value_bits", 32) == 32
    return scheme["rule"] == "dense" and plain and scheme.get("phi_down") is None


# Intervals ────────────────────────────────────────────────────────────────────────────────────────


def mean_interval(
    values: Iterable[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Mean of the values and Student's interval for it; of one value, no interval (infinite)."""
    values = np.asarray(list(values), dtype=float)
    if not len(values):
        return NONE
    mean, half = float(values.mean()), half_interval(values, confidence)
    return mean, mean - half, mean + half


def half_interval(values: np.ndarray, confidence: float) -> float:
    """Half of Student's interval for the mean; of fewer than two values it is infinite."""
    if len(values) < 2:
        return math.inf
    deviation = values.std(ddof=1) / math.sqrt(len(values))
    return float(stdtrit(len(values) - 1, (1 + confidence) / 2) * deviation)


def welch_interval(
    one: tuple[float, float], other: tuple[float, float]
) -> tuple[float, float, float]:
    """Difference of two means, each (mean, standard deviation) over PAPER_TRIALS, and Welch's
    interval for it: all that can be said of figures in print, which are not paired."""
    a, b = one[1] ** 2 / PAPER_TRIALS, other[1] ** 2 / PAPER_TRIALS
    freedom = (a + b) ** 2 * (PAPER_TRIALS - 1) / (a**2 + b**2) if a + b else math.nan
    half = stdtrit(freedom, (1 + CONFIDENCE) / 2) * math.sqrt(a + b) if a + b else 0.0
    return one[0] - other[0], float(one[0] - other[0] - half), float(one[0] - other[0] + half)


# One row a scheme ─────────────────────────────────────────────────────────────────────────────────


def summary(
    records: Iterable[Record], paper: dict[str, list] | None = None,
    planned: Iterable[RunConfig] = (), gaps: Mapping[str, dict[str, float]] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """One row a scheme: accuracy over seeds (0..1), its difference to Baseline, and bits, beside
    the paper's figures. A scheme that is `planned` and has no record has a row with n = 0.

    `paper` maps a scheme's name to its accuracy in percent, standard deviation and bit budget (None
    where the paper has none). A scheme with a diverged seed has no mean: `diverged` counts them.
    Differences are paired by seed, over `difference_n` common seeds, with Student's interval, unless
    `gaps` has them by scheme (what `claims.planned_gaps` gives); the paper's are Welch's.
    Raises ValueError for two runs of one scheme and seed: they are of different settings.
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
            raise ValueError(f"{name}: got two runs of one seed, allowed: one (a table a setting)")
        gap = NO_GAP
        if name != "Baseline":
            gap = _gaps(group, base) if gaps is None else gaps.get(name, NO_GAP)
        rows.append(_measured(configs[name], group) | gap | _printed(name, paper))
    return pd.DataFrame(rows)


def _finals(records: list[Record]) -> dict[int, float]:
    """Final accuracies by seed; none if a seed diverged."""
    if any(record["status"] != "finished" for record in records):
        return {}
    return {r["config"]["seed"]: r["rows"][-1]["accuracy"] for r in records}


def _measured(config: dict[str, Any], records: list[Record]) -> dict[str, Any]:
    """What the records of one scheme say."""
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
        "records": " ".join(_record_file(record) for record in records),
    }


SENT = (
    "uplink_bits", "uplink_bits_with_warmup", "downlink_bits", "downlink_bits_with_warmup",
    "megabytes_up", "megabytes_down", "megabytes_warmup",
)  # fmt: skip


def _sent(record: Record) -> dict[str, float]:
    """Bits per parameter and iteration, and megabytes of a whole run; nan where nothing is sent."""
    bits = bits_per_parameter(record)
    unit = math.nan if record["config"]["scheme"]["centralized"] else 1e6
    flow = [number / unit for number in traffic(record).values()]
    ways = ("uplink", "uplink with warm-up", "downlink", "downlink with warm-up")
    return dict(zip(SENT, [*(bits[way] for way in ways), *flow], strict=True))


_GAP = ("difference", "difference_low", "difference_high")
NO_GAP = dict(zip(_GAP, NONE, strict=True)) | {"difference_n": 0}


def _gaps(records: list[Record], base: dict[int, float]) -> dict[str, float]:
    """Accuracy minus the Baseline's of the same seed, mean and interval over the seeds of both."""
    ours = _finals(records)
    pairs = [ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())]
    return dict(zip(_GAP, mean_interval(pairs), strict=True)) | {"difference_n": len(pairs)}


def _printed(name: str, paper: dict[str, list]) -> dict[str, float]:
    """The paper's figures for a scheme, accuracies 0..1, and their difference to its Baseline."""
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
    "Accuracies are means ± one standard deviation over n seeds. Differences have 95 % intervals: ours "
    "{}, the paper's from the means and deviations that it prints. Bits are per parameter and local "
    "iteration, after the warm-up. MB is one client's whole run, warm-up included. The csv beside this "
    "has all other numbers."
)
NOTE = _NOTE.format(
    "are Student's over the seeds that a scheme and the Baseline have in common, because this profile "
    "has no planned model"
)
NOTE_PLANNED = _NOTE.format(
    "are those of the planned model (params/claims.yaml), as everywhere else"
)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The summary as a person reads it, of what is measured: levels in percent, mean ± std, and
    differences in points with 95 % intervals; bits per parameter and local iteration; megabytes.

    Eight columns at most; those of the paper are left out where it says nothing.
    """
    rows = [_readable_row(row) for row in measured(table).itertuples()]
    text = pd.DataFrame(rows, columns=COLUMNS)
    empty = [c for c in (OURS, "Paper: accuracy %", PAPERS) if (text[c] == "–").all()]
    return text.drop(columns=empty)


def measured(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table that have a run, also if it diverged."""
    return table[(table["n"] > 0) | (table["diverged"] > 0)]


def unmeasured(table: pd.DataFrame) -> str:
    """One line that lists the schemes without a run; "" if there are none."""
    names = table.drop(measured(table).index)["scheme"]
    return f"Not measured yet: {', '.join(names)}." if len(names) else ""


def _readable_row(r: Any) -> tuple[str, ...]:
    gap = with_interval(*(100 * v for v in (r.difference, r.difference_low, r.difference_high)))
    theirs = (r.paper_difference, r.paper_difference_low, r.paper_difference_high)
    sent = f"{_digits(r.formula_bits)} / {_digits(r.uplink_bits)}"
    return (
        r.scheme,
        str(r.n),
        _ours(r),
        gap + (f", n = {r.difference_n}" if 0 < r.difference_n < r.n else ""),
        _percent(r.paper_accuracy, r.paper_accuracy_std, ".5g"),
        with_interval(*(100 * v for v in theirs)),
        "–" if sent == "– / –" else sent,
        _digits(r.megabytes_up + r.megabytes_down),
    )


def _ours(row: Any) -> str:
    """Accuracy over the seeds of one row of a table."""
    if row.diverged:
        return f"diverged ({row.diverged} of {row.n + row.diverged})"
    return _percent(row.accuracy, row.accuracy_std, ".2f") if row.n else "not measured"


def _percent(mean: float, deviation: float, form: str) -> str:
    if math.isnan(mean):
        return "–"
    spread = "" if math.isnan(deviation) else f" ± {100 * deviation:{form}}"
    return f"{100 * mean:{form}}{spread}"


def _digits(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 9999.5 else number(value, 4)


def number(value: float, digits: int = 3) -> str:
    """A number as a person writes it, of so many digits: 0.0123, 1,870, 4 × 10⁻⁷; – where is none."""
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


def times(ratio: float) -> str:
    """How many times fewer: 8.8, 88, 1,910; three digits at most."""
    return f"{ratio:.1f}" if ratio < 10 else f"{float(f'{ratio:.3g}'):,.0f}"


def paper_factor(name: str) -> float:
    """Times fewer bits than dense training, on the way up and after the warm-up, that the paper's
    formula promises for a scheme. (Its tables print the formula's bits with four digits at most.)"""
    return 32 / bit_budget(name)


def with_interval(mean: float, low: float, high: float, form: str = "{:+.2f}") -> str:
    """Like "+0.21 (−0.08 to +0.50)"; no interval where there is none, – where there is nothing. What
    rounds to zero has no sign."""
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
    """The summary as .csv (numbers) and .md (as a person reads it, by `reader`; a line about what is
    not measured; a note: of a summary, what its columns mean). Returns the text of the .md, also
    where neither can be written. Without a path, neither is."""
    csv = table.to_csv(index=False, lineterminator="\n")
    shown = reader(table)
    missing = unmeasured(table) if reader is readable else ""
    parts = [f"**{title}**", plain_markdown(shown) if len(shown) else "", missing]
    parts.append(NOTE if note is None and reader is readable and len(shown) else note or "")
    text = "\n\n".join(part for part in parts if part) + "\n"
    for suffix, content in ((".csv", csv), (".md", text)) if path is not None else ():
        data = content.encode()
        write_shown(Path(f"{path}{suffix}"), lambda file: file.write(data))  # noqa: B023
    return text


def plain_markdown(table: pd.DataFrame) -> str:
    """A table of text as a Markdown table, for files and terminals: words on the left of their
    column, numbers on the right."""
    marks = ["---:" if _is_numeric(table.iloc[:, i]) else ":---" for i in range(table.shape[1])]
    lines = [list(table.columns), marks, *table.values]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


_EMPTY = ("", "–", "-", "nan", "not made", "not measured")
_NUMBER = re.compile(r"[\s*]*[+−\-×~±<>≤≥= ]*[\d∞]")  # how a cell with a number begins
_WORD = re.compile(r"[^\W\d_]{4,}")


def _is_numeric(column: pd.Series) -> bool:
    """Whether most cells that are not empty are numbers, perhaps with an interval or a unit."""
    cells = [text for text in map(str, column) if text not in _EMPTY]
    numbers = sum(bool(_NUMBER.match(text)) and not _WORD.search(text) for text in cells)
    return 2 * numbers > len(cells) or (not cells and len(column) > 0)


def markdown(table: pd.DataFrame) -> str:
    """The same for a page: names and numbers stay on one line."""
    return unbroken(plain_markdown(table))


def unbroken(text: str) -> str:
    """A Markdown text in whose tables no scheme's name, "n = 5", interval or number with its unit
    is broken over two lines. (Hyphens stay hyphens, so that a name can be copied.)"""
    return "\n".join(
        _unbroken_row(line) if line.startswith("| ") else line for line in text.split("\n")
    )


_NAME = re.compile(r"(?<![\w`/.-])[A-Za-z]+(?:-[A-Z][\w+]*)+(?![\w`/.-])")
_OF_NUMBERS = "0-9=±×%−+≤≥/"  # a space beside one of these holds, but before "(" and after ","
_HOLDS = re.compile(rf"(?<=[{_OF_NUMBERS}]) (?![(|])|(?<![|,;:.]) (?=[{_OF_NUMBERS}])")


def _unbroken_row(line: str) -> str:
    return _NAME.sub(r"<nobr>\g<0></nobr>", _HOLDS.sub("\u00a0", line))
