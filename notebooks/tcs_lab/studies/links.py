"""Seconds and memory of a DDP step over links of a given speed, without a hook and with several hooks.

    uv run tcs queue params/links.yaml

measures what notebook 12 shows and has no record yet, in another network namespace, which needs root on
Linux. There the loopback is limited, and the traffic of all ranks, in both directions, shares its rate. A
record for each stage of the plan goes to results/links.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import pandas as pd
import torch
import torch.distributed as dist
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from tcs_core import TCSState, tcs_hook
from tcs_lab.runs.jobs import Job, Tell
from tcs_lab.runs.plans import Planning, Stage, plan_jobs
from tcs_lab.runs.records import Record, git_state, provenance, results_folder
from tcs_lab.studies.optimizers import HookScheme, PowerSGDScheme, measure_loss
from tcs_lab.studies.power_sgd import count_entries
from tcs_lab.support.errors import format_value
from tcs_lab.support.paths import ROOT
from tcs_lab.support.processes import run_within, torchrun_command
from tcs_lab.tasks.text import GPT, load_text
from tcs_lab.training.configuration import PositiveNumber, WholeNumber

PLAN = ROOT / "params" / "links.yaml"
# How gradients are exchanged; the first exchanges nothing. Records and plans call these "ways".
# `setting_of` reads further names, which are those of params/hook_plan.yaml.
EXCHANGES = ("passes", "plain", "bf16")
BATCH, WARM_UP, SECONDS = 16, 3, 15.0
_CONTEXT, _WINDOWS = 32, 4  # of a rank's step with the GPT, as in params/hook_plan.yaml
# Bytes of a full packet, as the link's limit counts them, and of its content.
_FRAME, _PAYLOAD = 1514, 1448
_SOON = 60.0  # seconds that are enough for what should take no time


# Networks and exchanges ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Net:
    """A network whose steps are measured.

    `linear` has square layers of this width, with a ReLU after each. `GPT` is that of the later stages
    of params/hook_plan.yaml, which always has two layers.
    """

    layers: int
    width: int
    kind: str = "linear"

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Net:
        """Return the net of a row. Rows of linear nets do not name the kind."""
        return cls(row["layers"], row["width"], row.get("net", "linear"))

    @property
    def fields(self) -> dict[str, Any]:
        """The net as it stands in a row."""
        kind = {} if self.kind == "linear" else {"net": self.kind}
        return {"layers": self.layers, "width": self.width} | kind

    def make(self) -> nn.Module:
        if self.kind == "GPT":
            return GPT(load_text().classes, self.width, _CONTEXT)
        layers = [(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.layers)]
        return nn.Sequential(*(part for layer in layers for part in layer))

    def draw_batch(self) -> Tensor:
        if self.kind == "GPT":
            return torch.randint(load_text().classes, (_WINDOWS, _CONTEXT + 1))
        return torch.randn(BATCH, self.width)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return measure_loss(model, batch) if self.kind == "GPT" else model(batch).square().mean()

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of all parameters."""
        return _shapes_of(self)

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return sum(shape.numel() for shape in self.shapes)


@cache
def _shapes_of(net: Net) -> tuple[torch.Size, ...]:
    with torch.device("meta"):
        return tuple(p.shape for p in net.make().parameters())


def setting_of(exchange: str) -> HookScheme | PowerSGDScheme | None:
    """Return the setting that an exchange's name stands for. None: PyTorch's DDP, or a hook without a setting.

    Raises ValueError for an unknown name.
    """
    if exchange in EXCHANGES:
        return None
    if found := re.fullmatch(rf"TCS {_PERCENT} and {_PERCENT} %", exchange):
        shared, own = (float(word) / 100 for word in found.groups())
        return HookScheme(phi_global=shared, phi_local=own)
    if found := re.fullmatch(rf"top-K {_PERCENT} %", exchange):
        return HookScheme(phi_global=None, phi_local=float(found[1]) / 100)
    if found := re.fullmatch(r"PowerSGD rank ([1-9]\d*)", exchange):
        return PowerSGDScheme(rank=int(found[1]))
    names = ", ".join((*EXCHANGES, "TCS 1 and 0.5 %", "top-K 1 %", "PowerSGD rank 1"))
    got = f"exchange: got {format_value(exchange)}"
    raise ValueError(f"{got}, allowed: {names} (the last three also with other numbers)")


_PERCENT = r"(\d{1,2}(?:\.\d+)?)"


def count_handed_bytes(exchange: str, net: Net) -> tuple[float, float]:
    """Count the bytes that a rank hands to all_reduce and to all_gather in a step."""
    setting = setting_of(exchange)
    if isinstance(setting, HookScheme):
        shared, own = setting.phi_global or 0.0, setting.phi_local
        return 4 * shared * net.parameters, 8 * own * net.parameters
    if isinstance(setting, PowerSGDScheme):
        return 4.0 * sum(count_entries(shape, setting.rank) for shape in net.shapes), 0.0
    return {"passes": 0.0, "plain": 4.0, "bf16": 2.0}[exchange] * net.parameters, 0.0


def calculate_wire(exchange: str, net: Net, ranks: int, mbit: float | None) -> float:
    """Calculate the seconds that the bytes of a step take on a link that all ranks share, in rings, with
    the headers of packets. They take none without a limit (None)."""
    if mbit is None:
        return 0.0
    summed, gathered = count_handed_bytes(exchange, net)
    sent = 2 * (ranks - 1) / ranks * summed + (ranks - 1) * gathered  # by one rank
    with_headers = sent * _FRAME / _PAYLOAD
    return 8 * ranks * with_headers / (1e6 * mbit)


# A rank ───────────────────────────────────────────────────────────────────────────────────────────


def _make_model(exchange: str, net: Net) -> DistributedDataParallel:
    torch.manual_seed(0)
    setting = setting_of(exchange)
    rank = setting.rank if isinstance(setting, PowerSGDScheme) else None
    one_bucket = 10_000  # with several buckets, gloo mixes up PowerSGD's collectives
    cap = 25 if rank is None else one_bucket
    model = DistributedDataParallel(net.make(), bucket_cap_mb=cap, gradient_as_bucket_view=True)
    if exchange == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if rank is not None:
        state = power_sgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, power_sgd.powerSGD_hook)
    if isinstance(setting, HookScheme):
        model.register_comm_hook(TCSState(None, **setting.model_dump(), start_iter=2), tcs_hook)
    return model


def _limit(mbit: float | None) -> None:
    """Limit the loopback of this network namespace, or remove the limit for None."""
    no_limit = ["tc", "qdisc", "del", "dev", "lo", "root"]
    subprocess.run(no_limit, capture_output=True, timeout=_SOON)
    if mbit is not None:
        burst = f"{max(16, int(mbit / 2))}kb"  # what may pass at once after a pause; it is little
        words = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst {burst} latency 100ms"
        run_within(_SOON, words.split())


def _read_memory(key: str) -> int | None:
    """Return the bytes that this process uses now (VmRSS), or used at most (VmHWM); None if unknown."""
    with suppress(OSError):
        if found := re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return 1024 * int(found[1])
    return None


def _measure(exchange: str, net: Net, links: list[float | None]) -> list[dict[str, Any]]:
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts anew from now on
    before = _read_memory("VmRSS")
    model = _make_model(exchange, net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch, rank, ranks = net.draw_batch(), dist.get_rank(), dist.get_world_size()

    def step() -> float:
        dist.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        with model.no_sync() if exchange == "passes" else nullcontext():
            net.loss(model, batch).backward()
        optimizer.step()
        return time.perf_counter() - begun

    for _ in range(WARM_UP):
        step()
    rows = []
    for mbit in links:
        if rank == 0:
            _limit(mbit)
        dist.barrier()
        wire = calculate_wire(exchange, net, ranks, mbit)
        most = 9 if net.parameters < 10**8 else 5
        times = sorted(step() for _ in range(max(1, min(most, int(SECONDS / max(wire, 0.1))))))
        rows.append(
            {"way": exchange, "ranks": ranks, **net.fields, "mbit": mbit,
             "seconds": median(times), "low": times[0], "high": times[-1], "n": len(times)}
        )  # fmt: skip
    if rank == 0:
        _limit(None)
    peak = _read_memory("VmHWM")
    for row in rows:
        row["peak"] = peak - before if peak is not None and before is not None else None
    return rows


def _measure_as_rank(file: str, net: Net, links: list[float | None], exchanges: list[str]) -> None:
    """Measure, as one process of torchrun. A line for each row is added to the file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    nn.Linear(8, 8)(torch.randn(2, 8)).sum().backward()  # loads what should count for none of them
    for exchange in exchanges:
        rows = _measure(exchange, net, links)
        if dist.get_rank() == 0:
            with Path(file).open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in rows)
    dist.barrier()
    os._exit(0)  # a thread of gloo may outlive Python and abort


# Measurements as jobs ─────────────────────────────────────────────────────────────────────────────


def _check_exchanges(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        setting_of(name)
    return names


class LinkStage(Stage):
    """A net, measured on all links and with all exchanges (`ways`)."""

    kind: str = "studies.links"
    ranks: WholeNumber
    layers: WholeNumber
    width: WholeNumber
    net: Literal["linear", "GPT"] = "linear"
    mbit: Annotated[list[PositiveNumber | None], Field(min_length=1)]  # None stands for no limit
    ways: Annotated[tuple[str, ...], AfterValidator(_check_exchanges), Field(min_length=1)]

    @model_validator(mode="after")
    def _check_layers(self) -> LinkStage:
        if self.net == "GPT" and self.layers != 2:
            raise ValueError(f"layers: got {self.layers}, allowed for GPT: 2")
        return self

    def plan_jobs(self, planning: Planning | None = None) -> list[LinkMeasurement]:
        net = Net(self.layers, self.width, self.net)
        return [LinkMeasurement(self.ranks, net, tuple(self.mbit), self.ways)]


@dataclass(frozen=True)
class LinkMeasurement(Job):
    """Measures steps of one net. Its record has a row for each link and each exchange (`ways`)."""

    pattern = "links/*.json"
    ranks: int
    net: Net
    mbit: tuple[float | None, ...]
    ways: tuple[str, ...]

    @property
    def identity(self) -> dict[str, Any]:
        measured = {"mbit": list(self.mbit), "ways": list(self.ways)}
        return {"ranks": self.ranks} | self.net.fields | measured

    @property
    def name(self) -> str:
        kind = "GPT with " if self.net.kind == "GPT" else ""
        return f"links: {self.ranks} ranks, {kind}{self.net.layers} layers of {self.net.width}"

    def path(self, results: str | Path | None = None) -> Path:
        name = f"{self.ranks}-{self.net.layers}-{self.net.width}-{self.digest}.json"
        return results_folder("links", results) / name

    @property
    def limit(self) -> float:
        """Seconds after which a measurement has certainly got stuck: ten times what it should take."""
        seconds = 0.0
        for exchange in self.ways:
            seconds += _SOON * (1 + self.net.parameters / 1e7)  # to warm up
            for mbit in self.mbit:
                seconds += SECONDS + calculate_wire(exchange, self.net, self.ranks, mbit)
        return 10 * seconds

    def make(self, tell: Tell = None) -> Record:
        if sys.platform != "linux":
            raise ChildProcessError(f"{self.name}: it needs root on Linux, not {sys.platform}")
        git_state()  # read now, since the code may be edited during the measurement
        load, began = round(os.getloadavg()[0], 1), time.perf_counter()
        rates = ["none" if mbit is None else f"{mbit:g}" for mbit in self.mbit]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows"
            net = self.net
            words = [str(file), net.kind, str(net.layers), str(net.width), *rates, "--", *self.ways]
            inside = torchrun_command(self.ranks, "-m", "tcs_lab.studies.links", *words)
            set_up = f"ip link set lo mtu 1500 up; {shlex.join(inside)}"
            command = ["unshare", "-n", "bash", "-c", set_up]
            try:
                run_within(self.limit, command, show=True, cwd=ROOT, OMP_NUM_THREADS="1")
            except (RuntimeError, FileNotFoundError) as error:
                raise ChildProcessError(f"{self.name}: it needs root on Linux; {error}") from error
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if tell:
            tell({"epoch": 1, "seconds": time.perf_counter() - began})
        made = {"cores": os.cpu_count(), "load": load, **provenance()}
        return self.identity | {"rows": rows, "provenance": made}


# The records, read ────────────────────────────────────────────────────────────────────────────────


def read_stages(*stages: str, results: str | Path | None = None) -> Links:
    """Read the measurements of some stages of params/links.yaml, as far as they are made.

    Raises KeyError for a stage that is not in the plan.
    """
    planned = plan_jobs(PLAN, results=results)
    jobs = [job for stage in stages for job in planned[stage] if job.is_made(results)]
    return Links([row for job in jobs for row in job.read(results)["rows"]])


class Links:
    """Tables and sentences about the rows of measurements."""

    def __init__(self, rows: list[dict[str, Any]]):
        # Where only two steps were made, the first records have the longer one instead of the median.
        self.rows = [
            row | {"seconds": (row["low"] + row["high"]) / 2} if row.get("n") == 2 else row
            for row in rows
        ]
        self._by_case = {
            (Net.of(row), row["way"], row["ranks"], row["mbit"]): row
            for row in reversed(self.rows)  # so that the first of equal cases stays
        }

    def row(
        self, exchange: str, net: Net, ranks: int = 2, mbit: float | None = None
    ) -> dict[str, Any] | None:
        """Return the row of a case, or None if it was not measured."""
        return self._by_case.get((net, exchange, ranks, mbit))

    def calculate(self, row: dict[str, Any]) -> float | None:
        """Calculate the seconds of a limited row from the same case without a limit.

        Returns None where that was not measured.
        """
        return self._calculate(row["way"], Net.of(row), row["ranks"], row["ranks"], row["mbit"])

    def _calculate(
        self, exchange: str, net: Net, measured_ranks: int, ranks: int, mbit: float
    ) -> float | None:
        """Calculate a step of `ranks` ranks that share a link, from steps without a limit of fewer ranks.

        Without a limit, an all-reduce of all gradients takes as long as copying them. On a slow link,
        copying is hidden behind the wire.
        """
        free = self.row(exchange, net, measured_ranks)
        passes = self.row("passes", net, measured_ranks)
        if free is None or passes is None:
            return None
        wire = calculate_wire(exchange, net, ranks, mbit)
        if exchange not in ("plain", "bf16"):
            return free["seconds"] + wire
        return max(free["seconds"], passes["seconds"] + wire)

    def seconds(
        self, exchange: str, net: Net, ranks: int, own_mbit: float
    ) -> tuple[float, bool] | None:
        """Return the seconds of a step where each rank has a link of its own, with this rate in each
        direction, and whether they were measured.

        Links of their own are measured as one link with the sum of their rates. What was not measured
        is calculated from steps of two ranks without a limit. With more than two ranks, this leaves
        out what each rank computes on the entries that the additional ranks send. None if there is
        nothing to calculate it from.
        """
        if row := self.row(exchange, net, ranks, ranks * own_mbit):
            return row["seconds"], True
        seconds = self._calculate(exchange, net, 2, ranks, ranks * own_mbit)
        return None if seconds is None else (seconds, False)

    def tabulate_limited(self) -> pd.DataFrame:
        """Make the table of limited steps, a line per link and net: the measured seconds, their ratio to the
        calculated ones, and n where it is small. Rates are those of a rank's own link, in each direction."""
        table = dict[tuple[int, float], dict[str, Any]]()
        for row in self.rows:
            if row["mbit"] is None or row["way"] == "passes":
                continue
            mbit = row["mbit"] / row["ranks"]
            line = table.setdefault((Net.of(row).parameters, mbit), {})
            wanted = self.calculate(row)
            ratio = f" ({row['seconds'] / wanted:.2f})" if wanted else ""
            few = f", n = {row['n']}" if row["n"] < 5 else ""
            line[row["way"]] = f"{row['seconds']:.3g}{ratio}{few}"
        lines = [
            {"Parameters": f"{parameters:,}", "Mbit/s": f"{mbit:,.0f}", **line}
            for (parameters, mbit), line in sorted(table.items())
        ]
        return pd.DataFrame(lines).fillna("")

    def compare_with_calculation(self, within: float) -> tuple[int, int, int]:
        """Return how many measured times lie within a fraction of the calculated ones, how many there are, and
        how many of the others are longer."""
        wanted = (
            (row, self.calculate(row))
            for row in self.rows
            if row["mbit"] and row["way"] != "passes"
        )
        ratios = [row["seconds"] / calculated for row, calculated in wanted if calculated]
        off = [ratio for ratio in ratios if abs(ratio - 1) > within]
        return len(ratios) - len(off), len(ratios), sum(ratio > 1 for ratio in off)


if __name__ == "__main__":  # torchrun starts this module as each rank
    file, kind, layers, width, *given = sys.argv[1:]
    place = given.index("--")
    rates = [None if word == "none" else float(word) for word in given[:place]]
    _measure_as_rank(file, Net(int(layers), int(width), kind), rates, given[place + 1 :])
