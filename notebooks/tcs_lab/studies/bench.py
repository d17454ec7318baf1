"""Benchmarks. What is compared takes turns in one process. Medians with quartiles, and the provenance,
go to results/bench/. `BENCHES` lists the cases, each of which is a few lines of this module."""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from tcs_core import (
    Compressor,
    Message,
    Scheme,
    decode_message,
    decode_positions,
    encode_message,
    encode_positions,
    kept,
    top_k_mask,
)
from tcs_lab.runs.jobs import Job, Tell, make_anew
from tcs_lab.runs.progress import Progress
from tcs_lab.runs.records import (
    RECORD_VERSION,
    Record,
    git_state,
    provenance,
    results_folder,
    rounding,
)
from tcs_lab.runs.runs import keep_freed_memory, set_arithmetic
from tcs_lab.support.errors import reject_unknown
from tcs_lab.tasks.images import synthetic_dataset
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.side_by_side import uses_side_by_side
from tcs_lab.training.training import Training


@dataclass
class Bench:
    """The settings that all cases share, and the rows of the record."""

    repeat: int = 7
    device: str = "auto"
    precision: str = "fp32"
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def torch_device(self) -> torch.device:
        return RunConfig(Scheme.named("TCS"), device=self.device).torch_device

    def measure(
        self, part: str, case: str, works: dict[str, Callable[[], Any]], times: int = 1,
        turns: int = 1, **numbers: float,
    ) -> None:  # fmt: skip
        """Measure each work `repeat` times `turns` times, after one warm-up. The works take turns.

        A call of a work does the same thing `times` times. Rows have the median and the quartiles of
        the seconds of one of them.
        """
        seconds: dict[str, list[float]] = {name: [] for name in works}
        device = self.torch_device
        for turn in range(self.repeat * turns + 1):
            for name, work in works.items():
                start = time.perf_counter()
                work()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if turn:
                    seconds[name].append(time.perf_counter() - start)
        for name, values in seconds.items():
            low, median, high = (float(q) / times for q in np.quantile(values, [0.25, 0.5, 0.75]))
            timing = {"median": median, "low": low, "high": high, "n": len(values)}
            self.rows.append({"part": part, "case": case, "work": name, **timing, **numbers})


def _bench_federation(
    bench: Bench, scheme: str, model: str, width: int, batch: int, **settings: Any
) -> Training:
    """Make a federation of ten clients whose first, dense round has been played.

    Clients have samples for up to eight rounds, but for fewer if the batch is large.
    The differences of the first round are kept. `settings` are further fields of the RunConfig.
    """
    parsed = Scheme.named(scheme)
    one_round = batch * parsed.local_steps
    each = max(one_round, min(8 * one_round, 512 if bench.torch_device.type == "cuda" else 128))
    config = RunConfig(
        parsed, 1e-3, model=model, width=width, batch_size=batch, epochs=2, warmup_epochs=0,
        precision=cast(Any, bench.precision), device=bench.device, **settings,
    )  # fmt: skip
    data = synthetic_dataset(train=10 * each, test=10).resize(config.image_size)
    training = Training(config, data, keep_deltas=True)
    training.federation.round()
    training.federation.on_delta = None
    return training


def _passes(training: Training) -> Callable[[], None]:
    """Return the forward and backward passes of an epoch, with no federation around them."""
    federation, feed = training.federation, training.feed
    ready = [feed.batches.augment(draws) for draws in feed.draws(0)]

    def work() -> None:
        with federation.trainer.lend_module():
            for first in range(0, len(ready[0][1]), feed.size):
                for batch in ready:
                    part = [tensor[first : first + feed.size] for tensor in batch]
                    federation.trainer.loss(federation.model, part).backward()

    return work


def _rounds(training: Training) -> Callable[[], None]:
    """Return the rounds of an epoch."""
    federation, feed = training.federation, training.feed

    def work() -> None:
        federation.t = 0
        feed.forget_augmented()
        for _ in range(feed.rounds):
            federation.round()

    return work


def _plain_rounds(training: Training, model: nn.Module) -> Callable[[], None]:
    """Return the same with top-K as one would write it without this package: clients in a loop,
    torch.topk of all entries, and errors. Images have the memory layout of the model's weights. There
    is one local step per round."""
    federation, feed = training.federation, training.feed
    weights = next(p for p in model.parameters() if p.dim() == 4)
    ours = weights.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if ours else torch.contiguous_format
    parameters, eta = list(model.parameters()), federation.schedule(0).eta
    errors = [torch.zeros_like(training.theta_D) for _ in range(feed.clients)]
    k = kept(1e-2, len(training.theta_D))

    def difference(n: int, t: int) -> Tensor:
        model.zero_grad()
        images, labels = feed.batch(n, t, 0)
        federation.trainer.loss(model, (images.contiguous(memory_format=layout), labels)).backward()
        return torch.cat([-eta * cast(Tensor, p.grad).flatten() for p in parameters])

    @torch.no_grad()
    def add(update_D: Tensor) -> None:
        for p, part in zip(
            parameters, update_D.split([p.numel() for p in parameters]), strict=True
        ):
            p.add_(part.view(p.shape))

    def work() -> None:
        feed.forget_augmented()
        for t in range(feed.rounds):
            update_D = torch.zeros_like(training.theta_D)
            for n in range(feed.clients):
                intended_D = difference(n, t) + errors[n]
                largest_K = intended_D.abs().topk(k).indices
                update_D[largest_K] += intended_D[largest_K] / feed.clients
                intended_D[largest_K] = 0
                errors[n] = intended_D
            add(update_D)

    return work


def _parts(training: Training) -> dict[str, Callable[[], Any]]:
    """Return what an epoch's rounds do besides passes, each on its own."""
    feed = training.feed

    def compression() -> None:
        for _ in range(feed.rounds):
            training.compressor.step(training.deltas_ND)

    def augmentation() -> None:
        for draws in feed.draws(0):
            feed.batches.augment(draws)

    return {"compression": compression, "augmentation": augmentation}


def bench_round(
    bench: Bench, scheme: str, model: str, width: int, batch: int, threads: int | None = None,
    turns: int = 1, size: int = 32,
) -> None:  # fmt: skip
    """Measure an epoch's rounds beside the same passes without a federation, and beside plain top-K.

    Plain top-K is also measured in torch's usual memory layout. On a CPU, clients in threads or, for a
    small net, side by side are measured, too; on a GPU, rounds in a CUDA graph. `threads` is the number
    of CPU threads that a profile sets for this net.
    """
    net = f"{model} width {width}" + (f", {size} x {size}" if size != 32 else "")
    net += f", threads {threads}" if threads else ""
    with set_arithmetic(threads), keep_freed_memory():

        def make_training(**settings: Any) -> Training:
            return _bench_federation(
                bench, scheme, model, width, batch, image_size=size, **settings
            )

        training = make_training(side_by_side=False)
        rounds, steps = training.feed.rounds, training.feed.steps
        works: dict[str, Any] = {"passes": _passes(training), "round": _rounds(training)}
        if steps == 1:
            ours = copy.deepcopy(training.federation.model).train()
            torchs = copy.deepcopy(ours).to(memory_format=torch.contiguous_format)
            works["plain top-K"] = _plain_rounds(training, ours)
            works["plain top-K, torch's layout"] = _plain_rounds(training, torchs)
        if bench.torch_device.type == "cuda":
            # it needs a name, since its GraphRounds hold the federation weakly
            graphed = make_training(graph=True, side_by_side=False)
            works["graph"] = lambda: cast(Any, graphed.graph).play(range(rounds))
        elif uses_side_by_side(replace(training.config, side_by_side=None)):
            works["side by side"] = _rounds(make_training())
        else:
            works["client threads"] = _rounds(make_training(client_threads=True))
        numbers = {"dimension": len(training.theta_D), "local_steps": steps}
        numbers["threads"] = torch.get_num_threads()
        title = f"{net}, N 10, B {batch}, {scheme}"
        bench.measure("round", title, works | _parts(training), rounds, turns, **numbers)


def _textbook_round(
    deltas_ND: Tensor, errors: list[Tensor], mask_D: Tensor, k_global: int, k_local: int
) -> Tensor:
    """Do a round of TCS as one would write it first: clone, topk, and multiply by masks."""
    update_D = torch.zeros_like(deltas_ND[0])
    for n, delta_D in enumerate(deltas_ND):
        intended_D = delta_D.clone() + errors[n]
        own_D = torch.zeros_like(mask_D)
        own_D[(intended_D * ~mask_D).abs().topk(k_local).indices] = True
        sent_D = intended_D * (mask_D | own_D)
        errors[n] = intended_D - sent_D
        update_D = update_D + sent_D
    update_D = update_D / len(deltas_ND)
    mask_D.zero_()[update_D.abs().topk(k_global).indices] = True
    return update_D


def _make_drifting_deltas(
    dimension: int, clients: int, device: Any
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Make deltas (N, D) that change a little from call to call, as in a training."""
    generator = torch.Generator().manual_seed(0)
    base_ND = torch.randn(clients, dimension, generator=generator).pow_(3).to(device)
    factors = cycle([1.01, 1 / 1.01])
    return base_ND, lambda: base_ND.mul_(next(factors))


def bench_step(bench: Bench, dimension: int, clients: int, textbook: bool = True) -> None:
    """Measure `Compressor.step` of TCS for all clients, beside a textbook version and a plain copy."""
    device, scheme = bench.torch_device, Scheme.named("TCS")
    deltas_ND, change = _make_drifting_deltas(dimension, clients, device)
    compressor = Compressor(scheme, [dimension], clients, device)
    update_D = compressor.step(deltas_ND)
    works = {"change": change, "step": lambda: compressor.step(deltas_ND)}
    if textbook:
        mask_D = top_k_mask(update_D, compressor.rule.k_global)
        errors = [torch.zeros(dimension, device=device) for _ in range(clients)]
        ks = compressor.rule.k_global, compressor.rule.k_local
        works["textbook"] = lambda: _textbook_round(deltas_ND, errors, mask_D, *ks)
        works["copy of one row"] = lambda: errors[0].copy_(deltas_ND[0])
    part = "step" if textbook else "growth"
    case = f"D {dimension:,}, N {clients}"
    bench.measure(part, case, works, dimension=dimension, clients=clients)


def bench_codecs(bench: Bench, dimension: int = 11_173_962) -> None:
    """Measure encoding and decoding of positions and of whole messages, at the paper's size."""
    deltas_ND, _ = _make_drifting_deltas(dimension, 1, "cpu")
    sizes = [dimension // 2, dimension - dimension // 2]
    for name in ("TCS", "TCS-Q5", "TCS-Q5+"):
        scheme = Scheme.named(name)
        compressor = Compressor(scheme, sizes, 1)
        compressor.step(deltas_ND)
        known = compressor.known
        known.begin()
        shared_K, own_K = known.shared_K, compressor.clients[0].own_positions(deltas_ND[0].roll(7))
        intended = deltas_ND[0][torch.cat([shared_K, own_K])]
        wire, message = known.wire_up, Message.of(intended, own_K, scheme.value_bits)
        data = encode_message(message, wire)
        works: dict[str, Any] = {
            "quantize": lambda i=intended, o=own_K, s=scheme: Message.of(i, o, s.value_bits),
            "encode": lambda m=message, w=wire: encode_message(m, w),
            "decode": lambda d=data, w=wire, s=shared_K: decode_message(d, w, s),
        }
        if name == "TCS":
            bits = encode_positions(own_K, dimension, 512)
            works = works | {
                "encode positions": lambda o=own_K: encode_positions(o, dimension, 512),
                "decode positions": lambda b=bits: decode_positions(b, dimension, 512),
            }
        bench.measure("codecs", name, works, dimension=dimension, bytes=len(data))


_GROWTH_N = (2, 5, 10, 20, 40)
_GROWTH_D = (10**5, 10**6, 10**7, 10**8)
BENCHES: dict[str, list[Any]] = {
    "round": [
        lambda b: bench_round(b, "TCS", "resnet18", 64, 64),
        lambda b: bench_round(b, "TCS", "resnet18", 16, 64, turns=5),
        lambda b: bench_round(b, "TCS", "resnet8", 32, 16, 1, turns=2, size=16),  # cpu.yaml
        lambda b: bench_round(b, "TCS", "conv3", 8, 8, 1, turns=15, size=8),  # quick.yaml
        lambda b: bench_round(b, "TCS", "resnet8", 8, 8, 1, turns=15, size=8),
        lambda b: bench_round(b, "TCS", "resnet8", 4, 4, 1, turns=15, size=8),
    ],
    "paper": [  # for a GPU; only made if asked for
        lambda b: bench_round(b, "TCS", "resnet18", 64, 64),
        lambda b: bench_round(b, "TCS-L4", "resnet18", 64, 64),
        lambda b: bench_step(b, 11_173_962, 10),
    ],
    "step": [lambda b: bench_step(b, 11_173_962, 10)],
    "codecs": [bench_codecs],
    "growth": [lambda b, n=n: bench_step(b, 10**6, n, textbook=False) for n in _GROWTH_N]
    + [lambda b, d=d: bench_step(b, d, 2, textbook=False) for d in _GROWTH_D],
}


# What is made if no part is named.
USUAL_PARTS = [part for part in BENCHES if part != "paper"]


@dataclass(frozen=True)
class BenchRun(Job):
    """Some parts of the benchmarks, as a job. Its record is named after the device.

    Raises ValueError for an unknown part.
    """

    pattern = "bench/*.json"
    parts: tuple[str, ...] = tuple(USUAL_PARTS)
    repeat: int = 7
    device: str = "auto"
    precision: str = "fp32"
    threads: int | None = None

    def __post_init__(self) -> None:
        reject_unknown(self.parts, BENCHES, "part")

    @property
    def config(self) -> RunConfig:
        return RunConfig(
            Scheme.named("TCS"), device=self.device, precision=cast(Any, self.precision),
            threads=self.threads, profile="bench",
        )  # fmt: skip

    @property
    def identity(self) -> dict[str, Any]:
        device = rounding(self.config)["device"]
        threads = {} if self.threads is None else {"threads": self.threads}
        return {"device": device, "precision": self.precision, "parts": list(self.parts)} | threads

    @property
    def name(self) -> str:
        device = re.sub(r"\W+", "-", self.identity["device"]).strip("-")
        threads = "" if self.threads is None else f"-{self.threads}-threads"
        return f"{device}-{self.precision}-{'-'.join(self.parts)}{threads}"

    @property
    def length(self) -> int:  # type: ignore[override]
        return sum(len(BENCHES[part]) for part in self.parts)

    def path(self, results: str | Path | None = None) -> Path:
        return results_folder("bench", results) / f"{self.name}.json"

    def make(self, tell: Tell = None) -> Record:
        git_state()  # read now, since the code may be edited during the measurements
        bench = Bench(self.repeat, self.device, self.precision)
        cases = [case for part in self.parts for case in BENCHES[part]]
        with set_arithmetic(self.threads):
            for place, case in enumerate(cases, 1):
                began = time.perf_counter()
                case(bench)
                if tell:
                    tell({"epoch": place, "seconds": time.perf_counter() - began})
            made = provenance(self.config) | {"precision": self.precision, "cores": os.cpu_count()}
        return {"version": RECORD_VERSION, "rows": bench.rows, "provenance": made}

    def check(self, record: Record, path: Path) -> None:
        """Accept any record: its name has all that it depends on but the number of turns."""


def run_benches(
    parts: Iterable[str] = tuple(USUAL_PARTS), repeat: int = 7, device: str = "auto",
    precision: str = "fp32", threads: int | None = None, results: str | Path | None = None,
) -> Record:  # fmt: skip
    """Measure the named parts, also if there is a record of them. This takes minutes.

    Returns the record, which is also written to results/bench/. Raises ValueError for an unknown part.
    """
    job = BenchRun(tuple(parts), repeat, device, precision, threads)
    with Progress([job]) as bar:
        return make_anew(job, results, partial(bar.show_row, job.digest))


_BASES = {"round": "passes", "step": "step", "growth": "step"}  # by part


def bench_table(record: dict[str, Any]) -> pd.DataFrame:
    """Make the table of a bench record: milliseconds, and each work relative to the one that says most:
    the parts of a round to its bare passes, ways to compress to the core's own. Codecs have no such base.
    """
    timed = [row for row in record["rows"] if "median" in row]  # older records have other rows, too
    times = {(row["part"], row["case"], row["work"]): row["median"] for row in timed}
    rows = []
    for row in timed:
        base = _BASES.get(row["part"], "")
        against = times.get((row["part"], row["case"], base))
        relative = {"Relative": f"{row['median'] / against:.2f} × {base}"} if against else {}
        spread = f"{1e3 * row['low']:,.4g} – {1e3 * row['high']:,.4g}"
        rows.append(
            {"Case": f"{row['part']}: {row['case']}", "Work": row["work"],
             "Median, ms": f"{1e3 * row['median']:,.4g}", "Quartiles": spread, "n": str(row["n"])} | relative
        )  # fmt: skip
    return pd.DataFrame(rows).fillna("–")
