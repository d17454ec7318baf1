"""Seconds and memory of a DDP step over links of a given speed, with no hook and with four hooks.

    uv run tcs queue params/links.yaml        measures what notebook 12 shows and has no record yet
    uv run tcs links 2 10 1000 none 1000      ranks, layers, width, Mbit/s … [exchanges …]

It measures in another network namespace, which needs root on Linux. There the loopback is limited, and
the traffic of all ranks, in both directions, shares its rate. A record for each net goes to
results/hook/links; results/hook/links.json has the rows of older measurements.
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
from tcs_lab.support.paths import ROOT
from tcs_lab.support.processes import run_within, torchrun_command
from tcs_lab.training.configuration import PositiveNumber, WholeNumber

SHARES = {"TCS 1 %": (1e-2, 1e-3), "TCS 10 %": (1e-1, 1e-2)}  # phi_global, phi_local
# How gradients are exchanged; the first exchanges nothing. Records and plans call these "ways".
EXCHANGES = ("passes", "plain", "bf16", "PowerSGD", *SHARES)
BATCH, WARM_UP, SECONDS = 16, 3, 15.0
# Bytes of a full packet, as the link's limit counts them, and of its content.
_FRAME, _PAYLOAD = 1514, 1448
_SOON = 60.0  # seconds that are enough for what should take no time


def count_parameters(layers: int, width: int) -> int:
    """Count the parameters of a net of square linear layers."""
    return layers * (width * width + width)


def choose_rank(layers: int, width: int, handed: float) -> int:
    """Choose PowerSGD's rank so that it hands about so many bytes per step to collectives: (n + m) r
    numbers for a matrix, and biases uncompressed."""
    return max(1, round((handed / 4 - layers * width) / (2 * width * layers)))


def count_handed_bytes(exchange: str, layers: int, width: int) -> tuple[float, float]:
    """Count the bytes that a rank hands to all_reduce and to all_gather in a step."""
    dimension = count_parameters(layers, width)
    if exchange in SHARES:
        phi_global, phi_local = SHARES[exchange]
        return 4 * phi_global * dimension, 8 * phi_local * dimension
    if exchange == "PowerSGD":
        rank = choose_rank(layers, width, sum(count_handed_bytes("TCS 1 %", layers, width)))
        return 4 * (2 * width * rank + width) * layers, 0.0
    return {"passes": 0.0, "plain": 4.0 * dimension, "bf16": 2.0 * dimension}[exchange], 0.0


def count_wire_bytes(exchange: str, layers: int, width: int, ranks: int) -> float:
    """Count the bytes that one rank sends in a step, in rings, with the headers of packets."""
    summed, gathered = count_handed_bytes(exchange, layers, width)
    sent = 2 * (ranks - 1) / ranks * summed + (ranks - 1) * gathered
    return sent * _FRAME / _PAYLOAD


def calculate_step(
    exchange: str, layers: int, width: int, ranks: int, mbit: float, unlimited: float
) -> float:
    """Calculate the seconds of a step where all ranks share the link: the time without a limit, plus the
    time on the wire."""
    return unlimited + 8 * ranks * count_wire_bytes(exchange, layers, width, ranks) / (1e6 * mbit)


# A rank ───────────────────────────────────────────────────────────────────────────────────────────


def _make_model(exchange: str, layers: int, width: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    one_bucket = 10_000  # with several buckets, gloo mixes up PowerSGD's collectives
    cap = one_bucket if exchange == "PowerSGD" else 25
    model = DistributedDataParallel(
        nn.Sequential(*parts), bucket_cap_mb=cap, gradient_as_bucket_view=True
    )
    if exchange == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if exchange == "PowerSGD":
        rank = choose_rank(layers, width, sum(count_handed_bytes("TCS 1 %", layers, width)))
        settings = power_sgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
        model.register_comm_hook(settings, power_sgd.powerSGD_hook)
    if exchange in SHARES:
        model.register_comm_hook(TCSState(None, *SHARES[exchange], start_iter=2), tcs_hook)
    return model


def _limit(mbit: float | None) -> None:
    """Limit the loopback of this network namespace, or remove the limit for None."""
    no_limit = ["tc", "qdisc", "del", "dev", "lo", "root"]
    subprocess.run(no_limit, capture_output=True, timeout=_SOON)
    if mbit is not None:
        burst = f"{max(16, int(mbit / 2))}kb"  # what may pass at once after a pause; it is little
        words = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst {burst} latency 100ms"
        run_within(_SOON, words.split())


def _measure(
    exchange: str, layers: int, width: int, links: list[float | None]
) -> list[dict[str, Any]]:
    device = torch.device("cpu")
    gc.collect()
    reset_peak_memory(device)
    before = memory_in_use(device)
    model = _make_model(exchange, layers, width)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch, rank, ranks = torch.randn(BATCH, width), dist.get_rank(), dist.get_world_size()

    def step() -> float:
        dist.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        if exchange == "passes":
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
        wire = calculate_step(exchange, layers, width, ranks, mbit, 0.0) if mbit else 0.0
        most = 9 if count_parameters(layers, width) < 10**8 else 5
        times = sorted(step() for _ in range(max(1, min(most, int(SECONDS / max(wire, 0.1))))))
        rows.append(
            {"way": exchange, "ranks": ranks, "layers": layers, "width": width, "mbit": mbit,
             "seconds": times[len(times) // 2], "low": times[0], "high": times[-1], "n": len(times)}
        )  # fmt: skip
    if rank == 0:
        _limit(None)
    peak = peak_memory(device)
    for row in rows:
        row["peak"] = peak - before if peak is not None and before is not None else None
    return rows


def _measure_as_rank(
    file: str, layers: int, width: int, links: list[float | None], exchanges: list[str]
) -> None:
    """Measure, as one process of torchrun. A line for each row is added to the file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    nn.Linear(8, 8)(torch.randn(2, 8)).sum().backward()  # loads what should count for none of them
    for exchange in exchanges:
        rows = _measure(exchange, layers, width, links)
        if dist.get_rank() == 0:
            with Path(file).open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in rows)
    dist.barrier()
    os._exit(0)  # a thread of gloo may outlive Python and abort


# Measurements as jobs ─────────────────────────────────────────────────────────────────────────────


def _check_exchanges(names: tuple[str, ...]) -> tuple[str, ...]:
    reject_unknown(names, EXCHANGES, "exchange")
    return names


class LinkStage(Stage):
    """A net, measured on all links and with all exchanges (`ways`)."""

    kind: str = "studies.links"
    ranks: WholeNumber
    layers: WholeNumber
    width: WholeNumber
    mbit: Annotated[list[PositiveNumber | None], Field(min_length=1)]  # None stands for no limit
    ways: Annotated[tuple[str, ...], AfterValidator(_check_exchanges)] = EXCHANGES

    def plan_jobs(self, planning: Planning | None = None) -> list[LinkMeasurement]:
        net = self.ranks, self.layers, self.width
        return [LinkMeasurement(*net, tuple(self.mbit), self.ways)]


@dataclass(frozen=True)
class LinkMeasurement(Job):
    """Measures steps of one net. Its record has a row for each link and each exchange (`ways`)."""

    pattern = "hook/links/*.json"
    ranks: int
    layers: int
    width: int
    mbit: tuple[float | None, ...]
    ways: tuple[str, ...] = EXCHANGES

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
        """Return whether there is a record, or older rows for all cases."""
        return super().is_made(results) or all(self._find_old(results))

    def read(self, results: str | Path | None = None) -> Record:
        if super().is_made(results):
            return super().read(results)
        return self.identity | {"rows": self._find_old(results)}

    def _find_old(self, results: str | Path | None) -> list[dict[str, Any] | None]:
        old = Links(_read_old_rows(results))
        net = self.layers, self.width, self.ranks
        return [old.row(exchange, *net, mbit) for exchange in self.ways for mbit in self.mbit]

    @property
    def limit(self) -> float:
        """Seconds after which a measurement has certainly got stuck: ten times what it should take."""
        net, seconds = (self.layers, self.width, self.ranks), 0.0
        for exchange in self.ways:
            seconds += _SOON * (1 + count_parameters(self.layers, self.width) / 1e7)  # to warm up
            for mbit in self.mbit:
                wire = calculate_step(exchange, *net, mbit, 0.0) if mbit else 0.0
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
                raise ChildProcessError(f"{self.name}: it needs root on Linux; {error}") from error
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if tell:
            tell({"epoch": 1, "seconds": time.perf_counter() - began})
        made = {"cores": os.cpu_count(), "load": load, **provenance()}
        return self.identity | {"rows": rows, "provenance": made}


# The records, read ────────────────────────────────────────────────────────────────────────────────


def read_rows(results: str | Path | None = None) -> list[dict[str, Any]]:
    """Read all rows, the older ones first. Of rows for the same case, only the newest is kept."""
    records = find_records(LinkMeasurement, results).values()
    rows = {_case_of(row): row for row in _read_old_rows(results)}
    for record in sorted(records, key=lambda record: record["provenance"]["finished"]):
        rows |= {_case_of(row): row for row in record["rows"]}
    return list(rows.values())


def _case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("way", "ranks", "layers", "width", "mbit"))


def _read_old_rows(results: str | Path | None) -> list[dict[str, Any]]:
    """Read the rows that were measured before there was a record for each net."""
    path = results_folder("hook", results) / "links.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


class Links:
    """Tables and sentences about the rows of measurements."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows

    def row(
        self, exchange: str, layers: int, width: int, ranks: int = 2, mbit: float | None = None
    ) -> dict[str, Any] | None:
        wanted = {"way": exchange, "layers": layers, "width": width, "ranks": ranks, "mbit": mbit}
        return next((row for row in self.rows if wanted.items() <= row.items()), None)

    def calculate(self, row: dict[str, Any]) -> float | None:
        """Calculate the seconds of a limited row from the same case without a limit.

        Returns None where that was not measured. Without a limit, an all-reduce of all gradients takes
        as long as copying them; on a slow link, copying is hidden behind the wire.
        """
        case = row["layers"], row["width"], row["ranks"]
        free, passes = self.row(row["way"], *case), self.row("passes", *case)
        if free is None or passes is None:
            return None
        if row["way"] not in ("plain", "bf16"):
            return calculate_step(row["way"], *case, row["mbit"], free["seconds"])
        wired = calculate_step(row["way"], *case, row["mbit"], passes["seconds"])
        return max(free["seconds"], wired)

    def tabulate_unlimited(self) -> pd.DataFrame:
        """Make the table of steps without a limit: their seconds, the fraction of them that is not passes and
        optimizer, and the memory of a rank."""
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

    def tabulate_limited(self) -> pd.DataFrame:
        """Make the table of limited steps, a line per link and net: the measured seconds, their ratio to the
        calculated ones, and n where it is small."""
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
        """Say how many measurements agree with the calculation, and which do not."""
        ratios = dict[str, float]()
        for row in self.rows:
            if row["mbit"] and row["way"] != "passes" and (wanted := self.calculate(row)):
                net = f"{count_parameters(row['layers'], row['width']):,} parameters"
                ratios[f"{row['way']} of {net} at {row['mbit']:,.0f}"] = row["seconds"] / wanted
        off = [f"{name} ({r:.2f})" for name, r in ratios.items() if abs(r - 1) > within]
        rest = f"; not: {', '.join(off)}" if off else ""
        return f"{len(ratios) - len(off)} of {len(ratios)} within {within:.0%}{rest}"

    def bytes_over_rate(self) -> str:
        """Say what a limit added to a step, relative to the bytes divided by the rate.

        Only cases count in which that takes longer than a step without a limit.
        """
        ratios = []
        for row in self.rows:
            case = row["layers"], row["width"], row["ranks"]
            free = self.row(row["way"], *case)
            if row["mbit"] is None or row["way"] == "passes" or free is None:
                continue
            with_headers = calculate_step(row["way"], *case, row["mbit"], 0.0)
            wire = with_headers * _PAYLOAD / _FRAME
            if wire > free["seconds"]:
                ratios.append((row["seconds"] - free["seconds"]) / wire)
        if not ratios:
            return "no link was measured here"
        return f"×{min(ratios):.2f} to ×{max(ratios):.2f} of that (n = {len(ratios)})"

    def pays_to(self, exchange: str, other: str, layers: int, width: int, ranks: int = 2) -> float:
        """Return the fastest measured link, in Mbit/s, on which every step with this exchange was shorter
        than every step with the other one, or 0 if there is none."""
        rates = [0.0]
        for row in self.rows:
            case = row["layers"], row["width"], row["ranks"]
            if row["way"] != exchange or row["mbit"] is None or case != (layers, width, ranks):
                continue
            theirs = self.row(other, *case, row["mbit"])
            if theirs is not None and row["high"] < theirs["low"]:
                rates.append(row["mbit"])
        return max(rates)


if __name__ == "__main__":  # torchrun starts this module as each rank
    given = sys.argv[4:]
    rates = [None if word == "none" else float(word) for word in given if word not in EXCHANGES]
    _measure_as_rank(
        sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), rates, [w for w in given if w in EXCHANGES]
    )
