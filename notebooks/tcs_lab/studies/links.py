"""Seconds and memory of a DDP step over links of a given speed: plain, and by four hooks.

    uv run tcs queue params/links.yaml        what notebook 12 shows, as far as it is not measured yet
    uv run tcs links 2 10 1000 none 1000      ranks, layers, width, Mbit/s … [ways …]

measures in a network namespace of its own, which needs root on Linux: the loopback is limited, and
all ranks' traffic, in both directions, shares its rate. A record for each net goes to results/hook/links;
results/hook/links.json holds the rows of those that are older.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
from pydantic import AfterValidator, Field
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from tcs_core import TCSState, tcs_hook
from tcs_lab.runs.index import find_records
from tcs_lab.runs.jobs import Job, Tell
from tcs_lab.runs.plans import Planning, Stage
from tcs_lab.runs.records import Record, provenance, results_folder
from tcs_lab.studies.bench import memory_in_use, peak_memory, reset_peak_memory
from tcs_lab.support.errors import reject_unknown
from tcs_lab.support.places import ROOT
from tcs_lab.support.processes import run_within, torchrun_command
from tcs_lab.training.configuration import Positive, Whole

SHARES = {"TCS 1 %": (1e-2, 1e-3), "TCS 10 %": (1e-1, 1e-2)}  # phi_global, phi_local
# the first exchanges nothing
WAYS = ("passes", "plain", "bf16", "PowerSGD", *SHARES)
BATCH, WARM_UP, SECONDS = 16, 3, 15.0
_FRAME, _PAYLOAD = 1514, 1448  # bytes of a full packet, as the limit counts it
_SOON = 60.0  # seconds, within which what should take none is over


def count_parameters(layers: int, width: int) -> int:
    return layers * (width * width + width)


def choose_rank(layers: int, width: int, handed: float) -> int:
    """PowerSGD's rank for about so many bytes a step: (n + m) r for a matrix, biases as they are."""
    return max(1, round((handed / 4 - layers * width) / (2 * width * layers)))


def count_handed_bytes(way: str, layers: int, width: int) -> tuple[float, float]:
    """Bytes that a rank hands to all_reduce and to all_gather in a step."""
    dimension = count_parameters(layers, width)
    if way in SHARES:
        phi_global, phi_local = SHARES[way]
        return 4 * phi_global * dimension, 8 * phi_local * dimension
    if way == "PowerSGD":
        rank = choose_rank(layers, width, sum(count_handed_bytes("TCS 1 %", layers, width)))
        return 4 * (2 * width * rank + width) * layers, 0.0
    return {"passes": 0.0, "plain": 4.0 * dimension, "bf16": 2.0 * dimension}[way], 0.0


def count_wire_bytes(way: str, layers: int, width: int, ranks: int) -> float:
    """Bytes that one rank sends in a step, by rings, with their packets' heads."""
    summed, gathered = count_handed_bytes(way, layers, width)
    sent = 2 * (ranks - 1) / ranks * summed + (ranks - 1) * gathered
    return sent * _FRAME / _PAYLOAD


def calculate_step(
    way: str, layers: int, width: int, ranks: int, mbit: float, unlimited: float
) -> float:
    """Seconds a step where all ranks share the link: what it takes without a limit, and the wire."""
    return unlimited + 8 * ranks * count_wire_bytes(way, layers, width, ranks) / (1e6 * mbit)


# A rank ───────────────────────────────────────────────────────────────────────────────────────────


def _model(way: str, layers: int, width: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    one_bucket = 10_000  # gloo crosses PowerSGD's collectives where there are several
    cap = one_bucket if way == "PowerSGD" else 25
    model = DistributedDataParallel(
        nn.Sequential(*parts), bucket_cap_mb=cap, gradient_as_bucket_view=True
    )
    if way == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if way == "PowerSGD":
        rank = choose_rank(layers, width, sum(count_handed_bytes("TCS 1 %", layers, width)))
        settings = power_sgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
        model.register_comm_hook(settings, power_sgd.powerSGD_hook)
    if way in SHARES:
        model.register_comm_hook(TCSState(None, *SHARES[way], start_iter=2), tcs_hook)
    return model


def _limit(mbit: float | None) -> None:
    """Of the loopback of this network namespace; None: none."""
    no_limit = ["tc", "qdisc", "del", "dev", "lo", "root"]
    subprocess.run(no_limit, capture_output=True, timeout=_SOON)
    if mbit is not None:
        burst = f"{max(16, int(mbit / 2))}kb"  # what passes at once after a pause: little
        words = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst {burst} latency 100ms"
        run_within(_SOON, words.split())


def _measure(way: str, layers: int, width: int, links: list[float | None]) -> list[dict[str, Any]]:
    device = torch.device("cpu")
    gc.collect()
    reset_peak_memory(device)
    before = memory_in_use(device)
    model = _model(way, layers, width)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch, rank, ranks = torch.randn(BATCH, width), dist.get_rank(), dist.get_world_size()

    def step() -> float:
        dist.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        if way == "passes":
            with model.no_sync():
                model(batch).square().mean().backward()
        else:
            model(batch).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begun

    for _ in range(WARM_UP):
        step()
    rows = []
    for mbit in links:
        if rank == 0:
            _limit(mbit)
        dist.barrier()
        wire = calculate_step(way, layers, width, ranks, mbit, 0.0) if mbit else 0.0
        most = 9 if count_parameters(layers, width) < 10**8 else 5
        times = sorted(step() for _ in range(max(1, min(most, int(SECONDS / max(wire, 0.1))))))
        rows.append(
            {"way": way, "ranks": ranks, "layers": layers, "width": width, "mbit": mbit,
             "seconds": times[len(times) // 2], "low": times[0], "high": times[-1], "n": len(times)}
        )  # fmt: skip
    if rank == 0:
        _limit(None)
    peak = peak_memory(device)
    for row in rows:
        row["peak"] = peak - before if peak is not None and before is not None else None
    return rows


def _measure_as_rank(
    file: str, layers: int, width: int, links: list[float | None], ways: list[str]
) -> None:
    """One process of torchrun: measures, and adds a line for each row to the file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    nn.Linear(8, 8)(torch.randn(2, 8)).sum().backward()  # loads what no way shall count as its own
    for way in ways:
        rows = _measure(way, layers, width, links)
        if dist.get_rank() == 0:
            with Path(file).open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in rows)
    dist.barrier()
    os._exit(0)  # a thread of gloo may outlive Python and abort


# Measurements as jobs ─────────────────────────────────────────────────────────────────────────────


def _check_ways(ways: tuple[str, ...]) -> tuple[str, ...]:
    reject_unknown(ways, WAYS, "way to exchange")
    return ways


class LinkStage(Stage):
    """Nets, each measured on all links and in all ways, one net after the other."""

    kind: str = "studies.links"
    ranks: Whole
    layers: Whole
    width: Whole
    mbit: Annotated[list[Positive | None], Field(min_length=1)]  # None: no limit
    ways: Annotated[tuple[str, ...], AfterValidator(_check_ways)] = WAYS

    def plan_jobs(self, planning: Planning | None = None) -> list[LinkMeasurement]:
        net = self.ranks, self.layers, self.width
        return [LinkMeasurement(*net, tuple(self.mbit), self.ways)]


@dataclass(frozen=True)
class LinkMeasurement(Job):
    """Steps of one net on some links in some ways; its record has a row for each of both."""

    pattern = "hook/links/*.json"
    ranks: int
    layers: int
    width: int
    mbit: tuple[float | None, ...]
    ways: tuple[str, ...] = WAYS

    @property
    def identity(self) -> dict[str, Any]:
        fields = asdict(self)
        return fields | {"mbit": list(self.mbit), "ways": list(self.ways)}

    @property
    def name(self) -> str:
        return f"links: {self.ranks} ranks, {self.layers} layers of {self.width}"

    def path(self, results: str | Path | None = None) -> Path:
        name = f"{self.ranks}-{self.layers}-{self.width}-{self.digest}.json"
        return results_folder("hook", results) / "links" / name

    def is_made(self, results: str | Path | None = None) -> bool:
        """All rows of older measurements count, too."""
        return super().is_made(results) or all(self._find_old(results))

    def read(self, results: str | Path | None = None) -> Record:
        if super().is_made(results):
            return super().read(results)
        return self.identity | {"rows": self._find_old(results)}

    def _find_old(self, results: str | Path | None) -> list[dict[str, Any] | None]:
        old = Links(_read_old_rows(results))
        net = self.layers, self.width, self.ranks
        return [old.row(way, *net, mbit) for way in self.ways for mbit in self.mbit]

    @property
    def limit(self) -> float:
        """Seconds after which a measurement has certainly hung: ten times what it should take."""
        net, seconds = (self.layers, self.width, self.ranks), 0.0
        for way in self.ways:
            seconds += _SOON * (1 + count_parameters(self.layers, self.width) / 1e7)  # to warm up
            for mbit in self.mbit:
                wire = calculate_step(way, *net, mbit, 0.0) if mbit else 0.0
                seconds += SECONDS + wire
        return 10 * seconds

    def make(self, tell: Tell = None) -> Record:
        load, began = round(os.getloadavg()[0], 1), time.perf_counter()
        rates = ["none" if mbit is None else f"{mbit:g}" for mbit in self.mbit]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows"
            words = [str(file), str(self.layers), str(self.width), *rates, *self.ways]
            inside = torchrun_command(self.ranks, "-m", "tcs_lab.studies.links", *words)
            set_up = f"ip link set lo mtu 1500 up; {shlex.join(inside)}"
            command = ["unshare", "-n", "bash", "-c", set_up]
            try:
                run_within(self.limit, command, show=True, cwd=ROOT, OMP_NUM_THREADS="1")
            except RuntimeError as error:
                raise ChildProcessError(f"{self.name} (needs root on Linux): {error}") from error
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if tell:
            tell({"epoch": 1, "seconds": time.perf_counter() - began})
        made = {"cores": os.cpu_count(), "load": load, **provenance()}
        return self.identity | {"rows": rows, "provenance": made}


# The records, read ────────────────────────────────────────────────────────────────────────────────


def read_rows(results: str | Path | None = None) -> list[dict[str, Any]]:
    """All rows, the older ones first; of one case only the newest."""
    records = find_records(LinkMeasurement, results).values()
    rows = {_case_of(row): row for row in _read_old_rows(results)}
    for record in sorted(records, key=lambda record: record["provenance"]["finished"]):
        rows |= {_case_of(row): row for row in record["rows"]}
    return list(rows.values())


def _case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("way", "ranks", "layers", "width", "mbit"))


def _read_old_rows(results: str | Path | None) -> list[dict[str, Any]]:
    """Those that were measured before each net had a record of its own."""
    path = results_folder("hook", results) / "links.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


class Links:
    """The record of measurements, read."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows

    def row(
        self, way: str, layers: int, width: int, ranks: int = 2, mbit: float | None = None
    ) -> dict[str, Any] | None:
        wanted = {"way": way, "layers": layers, "width": width, "ranks": ranks, "mbit": mbit}
        found = [row for row in self.rows if wanted.items() <= row.items()]
        return found[0] if found else None

    def calculate(self, row: dict[str, Any]) -> float | None:
        """Of a limited row, from the same without a limit; None where that was not measured.

        An all-reduce of all gradients without a limit is as long as it takes to copy them; on a
        link that is hidden behind the wire.
        """
        case = row["layers"], row["width"], row["ranks"]
        free, passes = self.row(row["way"], *case), self.row("passes", *case)
        if free is None or passes is None:
            return None
        if row["way"] not in ("plain", "bf16"):
            return calculate_step(row["way"], *case, row["mbit"], free["seconds"])
        wired = calculate_step(row["way"], *case, row["mbit"], passes["seconds"])
        return max(free["seconds"], wired)

    def unlimited(self) -> pd.DataFrame:
        """Seconds a step, the share of it that is not passes and optimizer, memory of a rank."""
        table = []
        for row in self.rows:
            passes = self.row("passes", row["layers"], row["width"], row["ranks"])
            if row["mbit"] is not None or row["way"] == "passes" or passes is None:
                continue
            share = max(0.0, 1 - passes["seconds"] / row["seconds"])
            table.append(
                {"Parameters": f"{count_parameters(row['layers'], row['width']):,}",
                 "Ranks": row["ranks"], "Method": row["way"], "Seconds per step": f"{row['seconds']:.3f}",
                 "shortest – longest": f"{row['low']:.3f} – {row['high']:.3f}", "n": row["n"],
                 "Exchange": f"{share:.0%}", "Peak, MB": f"{row['peak'] / 1e6:.0f}"}
            )  # fmt: skip
        return pd.DataFrame(table)

    def limited(self) -> pd.DataFrame:
        """A line a link and net: measured seconds, measured over calculated, and n if it is small."""
        table = dict[tuple, dict[str, Any]]()
        for row in self.rows:
            if row["mbit"] is None or row["way"] == "passes":
                continue
            line = table.setdefault((row["layers"], row["width"], row["mbit"]), {})
            wanted = self.calculate(row)
            ratio = f" ({row['seconds'] / wanted:.2f})" if wanted else ""
            few = f", n = {row['n']}" if row["n"] < 5 else ""
            line[row["way"]] = f"{row['seconds']:.3g}{ratio}{few}"
        lines = [
            {"Parameters": f"{count_parameters(layers, width):,}", "Mbit/s": f"{mbit:,.0f}", **line}
            for (layers, width, mbit), line in sorted(table.items())
        ]
        return pd.DataFrame(lines).fillna("")

    def agreement(self, within: float) -> str:
        """How many measurements are as calculated, and which are not."""
        ratios = dict[str, float]()
        for row in self.rows:
            if row["mbit"] and row["way"] != "passes" and (wanted := self.calculate(row)):
                net = f"{count_parameters(row['layers'], row['width']):,} parameters"
                ratios[f"{row['way']} of {net} at {row['mbit']:,.0f}"] = row["seconds"] / wanted
        off = [f"{name} ({r:.2f})" for name, r in ratios.items() if abs(r - 1) > within]
        rest = f"; not: {', '.join(off)}" if off else ""
        return f"{len(ratios) - len(off)} of {len(ratios)} within {within:.0%}{rest}"

    def bytes_over_rate(self) -> str:
        """What a limit really added to a step, over bytes divided by the rate; from measurements in
        which that is longer than a step without a limit."""
        ratios = []
        for row in self.rows:
            case = row["layers"], row["width"], row["ranks"]
            free = self.row(row["way"], *case)
            if row["mbit"] is None or row["way"] == "passes" or free is None:
                continue
            wire = (
                calculate_step(row["way"], *case, row["mbit"], 0.0) * _PAYLOAD / _FRAME
            )  # no heads
            if wire > free["seconds"]:
                ratios.append((row["seconds"] - free["seconds"]) / wire)
        if not ratios:
            return "no link was measured here"
        return f"×{min(ratios):.2f} to ×{max(ratios):.2f} of that (n = {len(ratios)})"

    def pays_to(self, way: str, other: str, layers: int, width: int, ranks: int = 2) -> float:
        """The fastest measured link, Mbit/s, on which each step one way was shorter than each of
        the other way's; 0 if there is none."""
        rates = [0.0]
        for row in self.rows:
            case = row["layers"], row["width"], row["ranks"]
            if row["way"] != way or row["mbit"] is None or case != (layers, width, ranks):
                continue
            theirs = self.row(other, *case, row["mbit"])
            if theirs is not None and row["high"] < theirs["low"]:
                rates.append(row["mbit"])
        return max(rates)


if __name__ == "__main__":  # torchrun starts this module as each rank
    given = sys.argv[4:]
    rates = [None if word == "none" else float(word) for word in given if word not in WAYS]
    _measure_as_rank(
        sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), rates, [w for w in given if w in WAYS]
    )
