"""Seconds and memory of a DDP step over links of a given speed: plain, and by four hooks.

    uv run tcs links 2 10 1000 none 1000      ranks, layers, width, Mbit/s … [ways …]

measures in a network namespace of its own, which needs root on Linux: the loopback is limited, and
all ranks' traffic, in both directions, shares its rate. Rows go to results/hook/links.json.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from tcs_core import TCSState, tcs_hook
from tcs_lab.runs.records import core_sha256, cpu_name, results_folder
from tcs_lab.studies.bench import memory_in_use, peak_memory, reset_peak_memory
from tcs_lab.support.files import write_whole
from tcs_lab.support.places import ROOT

SHARES = {"TCS 1 %": (1e-2, 1e-3), "TCS 10 %": (1e-1, 1e-2)}  # phi_global, phi_local
WAYS = ("passes", "plain", "bf16", "PowerSGD", *SHARES)  # the first exchanges nothing
BATCH, WARM_UP, SECONDS = 16, 3, 15.0
_FRAME, _PAYLOAD = 1514, 1448  # bytes of a full packet, as the limit counts it


def parameters(layers: int, width: int) -> int:
    return layers * (width * width + width)


def rank_for(layers: int, width: int, handed: float) -> int:
    """PowerSGD's rank for about so many bytes a step: (n + m) r for a matrix, biases as they are."""
    return max(1, round((handed / 4 - layers * width) / (2 * width * layers)))


def handed_over(way: str, layers: int, width: int) -> tuple[float, float]:
    """Bytes that a rank hands to all_reduce and to all_gather in a step."""
    dimension = parameters(layers, width)
    if way in SHARES:
        phi_global, phi_local = SHARES[way]
        return 4 * phi_global * dimension, 8 * phi_local * dimension
    if way == "PowerSGD":
        rank = rank_for(layers, width, sum(handed_over("TCS 1 %", layers, width)))
        return 4 * (2 * width * rank + width) * layers, 0.0
    return {"passes": 0.0, "plain": 4.0 * dimension, "bf16": 2.0 * dimension}[way], 0.0


def on_the_wire(way: str, layers: int, width: int, ranks: int) -> float:
    """Bytes that one rank sends in a step, by rings, with their packets' heads."""
    summed, gathered = handed_over(way, layers, width)
    sent = 2 * (ranks - 1) / ranks * summed + (ranks - 1) * gathered
    return sent * _FRAME / _PAYLOAD


def calculated(
    way: str, layers: int, width: int, ranks: int, mbit: float, unlimited: float
) -> float:
    """Seconds a step where all ranks share the link: what it takes without a limit, and the wire."""
    return unlimited + 8 * ranks * on_the_wire(way, layers, width, ranks) / (1e6 * mbit)


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
        rank = rank_for(layers, width, sum(handed_over("TCS 1 %", layers, width)))
        settings = power_sgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
        model.register_comm_hook(settings, power_sgd.powerSGD_hook)
    if way in SHARES:
        model.register_comm_hook(TCSState(None, *SHARES[way], start_iter=2), tcs_hook)
    return model


def _limit(mbit: float | None) -> None:
    """Of the loopback of this network namespace; None: none."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True)
    if mbit is not None:
        burst = f"{max(16, int(mbit / 2))}kb"  # what passes at once after a pause: little
        words = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst {burst} latency 100ms"
        subprocess.run(words.split(), check=True)


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
        wire = calculated(way, layers, width, ranks, mbit, 0.0) if mbit else 0.0
        most = 9 if parameters(layers, width) < 10**8 else 5
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


def _as_rank(layers: int, width: int, links: list[float | None], ways: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    nn.Linear(8, 8)(torch.randn(2, 8)).sum().backward()  # loads what no way shall count as its own
    for way in ways:
        rows = _measure(way, layers, width, links)
        if dist.get_rank() == 0:
            _add(rows)
            print(way, *(f"{row['seconds']:.3f}" for row in rows), flush=True)
    dist.barrier()
    os._exit(0)  # a thread of gloo may outlive Python and abort


# The record ───────────────────────────────────────────────────────────────────────────────────────


def record_file(results: Path | None = None) -> Path:
    return results_folder("hook", results) / "links.json"


def read_rows(results: Path | None = None) -> list[dict[str, Any]]:
    path = record_file(results)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _add(rows: list[dict[str, Any]]) -> None:
    """To the record, in place of rows of the same case."""
    key = ("way", "ranks", "layers", "width", "mbit")
    new = {tuple(row[name] for name in key) for row in rows}
    old = [row for row in read_rows() if tuple(row[name] for name in key) not in new]
    machine = {
        "cpu": cpu_name(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__, "core": core_sha256(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    lines = [json.dumps(row | ({} if row in old else machine)) for row in old + rows]
    text = "[\n " + ",\n ".join(lines) + "\n]\n"
    write_whole(record_file(), lambda file: file.write(text.encode()))


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

    def calculated(self, row: dict[str, Any]) -> float | None:
        """Of a limited row, from the same without a limit; None where that was not measured.

        An all-reduce of all gradients without a limit is as long as it takes to copy them; on a
        link that is hidden behind the wire.
        """
        case = row["layers"], row["width"], row["ranks"]
        free, passes = self.row(row["way"], *case), self.row("passes", *case)
        if free is None or passes is None:
            return None
        if row["way"] not in ("plain", "bf16"):
            return calculated(row["way"], *case, row["mbit"], free["seconds"])
        wired = calculated(row["way"], *case, row["mbit"], passes["seconds"])
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
                {"Parameters": f"{parameters(row['layers'], row['width']):,}",
                 "Ranks": row["ranks"], "Way": row["way"], "s a step": f"{row['seconds']:.3f}",
                 "from – to": f"{row['low']:.3f} – {row['high']:.3f}", "n": row["n"],
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
            wanted = self.calculated(row)
            ratio = f" ({row['seconds'] / wanted:.2f})" if wanted else ""
            few = f", n = {row['n']}" if row["n"] < 5 else ""
            line[row["way"]] = f"{row['seconds']:.3g}{ratio}{few}"
        lines = [
            {"Parameters": f"{parameters(layers, width):,}", "Mbit/s": f"{mbit:,.0f}", **line}
            for (layers, width, mbit), line in sorted(table.items())
        ]
        return pd.DataFrame(lines).fillna("")

    def agreement(self, within: float) -> str:
        """How many measurements are as calculated, and which are not."""
        ratios = dict[str, float]()
        for row in self.rows:
            if row["mbit"] and row["way"] != "passes" and (wanted := self.calculated(row)):
                net = f"{parameters(row['layers'], row['width']):,} parameters"
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
            wire = calculated(row["way"], *case, row["mbit"], 0.0) * _PAYLOAD / _FRAME  # no heads
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


def main(words: list[str]) -> int:
    """Measures in new processes, and in each of these: torchrun starts this module there."""
    if "RANK" in os.environ:
        layers, width = int(words[0]), int(words[1])
        given = [word for word in words[2:] if word not in WAYS]
        ways = [word for word in words if word in WAYS] or list(WAYS)
        _as_rank(layers, width, [None if word == "none" else float(word) for word in given], ways)
    ranks, *given = words
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    inside = shlex.join([*torchrun, "-m", "tcs_lab.studies.links", *given])
    command = ["unshare", "-n", "bash", "-c", f"ip link set lo mtu 1500 up; {inside}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
