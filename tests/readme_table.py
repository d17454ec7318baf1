"""README's picture, tables and numbers, from records, params and formulas.

    uv run python tests/readme_table.py

writes them between their comments, and the picture beside its records: the row on unequal clients
once their runs are made. Other numbers in sentences stand in `numbers`, with the words around them;
test_readme.py compares all.
"""

import math
import re
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import tcs_lab as lab
from tcs_lab import compare
from tcs_lab.studies import links, optimizers

import tcs_core as tcs

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SITUATIONS_PAGE = ROOT / "results/which_method.md"
PROFILE = "evidence"  # of the picture, of traffic and verdicts
DRAWN = ("Baseline", "FedAvg", "top-K", "TCS", "FedAvg-L4", "TCS-L4", "TCS-L4-Q5")
NAMES = {  # what the picture calls the schemes
    "Baseline": "centralized training",
    "FedAvg": "FedAvg (everything is sent)",
    "TCS": "TCS",
    "top-K": "top-K",
    "FedAvg-L4": "FedAvg, 4 local steps",
    "TCS-L4": "TCS, 4 local steps",
    "TCS-L4-Q5": "TCS, 4 local steps,\n5-bit values",
}
OUTCOME = """**What came out.** Our main comparison trains a ResNet-18 with a quarter of the channels on half of the training images of CIFAR-10 at {pixels} × {pixels} pixels. The images are divided evenly and at random among {clients} clients, which all take part in every round with one local step. Each method is trained for {epochs} epochs with the paper's learning rates and {n} seeds (5 with momentum). *Centralized training* means one model that is trained on all data in one place; *dense* means that every entry of an update is sent.

- **On this small network, TCS ended within half a percentage point of centralized training.** Its accuracy differed by {tcs}, while a client sent and received 1/{times} of the bytes of dense training. With the paper's full network there is only one run per method, over a fifth of the epochs; there TCS ended {gpu} points from centralized training and top-K, its closest relative, {gpu_topk} ([limits](#how-far-the-results-go)).
- **The variant with the fewest bytes loses accuracy.** TCS-L4-Q5 takes four local steps between two messages and rounds values to 5 bits. It needs 1/{times_short} of the bytes of dense training with one local step, and its difference is {short}. Dense training with four local steps already differs by {dense_short} points, so most of the loss comes from the local steps and not from the compression.
- **Why TCS works is open.** The paper assumes that important positions change slowly. From one round of dense training to the next, {stay} of the largest 1 % of the entries stay among the largest; {chance} would stay if positions were drawn at random within each layer. The comparison that can tell, TCS against masks that are random or outdated, is planned but not finished ({controls} runs done).
- **No learning rate was tuned in the main comparison.** The one in which every method gets its own best rate is unfinished ({tuned} runs done). Dense federated training may gain most from it."""
CAPTION = """The picture shows final test accuracy against the bytes that one client sends and receives in the whole training. The data are called {data}, because the pixels of these JPEG files differ slightly from the original; the settings are in `params/{profile}.yaml`. FedAvg means dense federated training, here with one local step per round (many authors call this FedSGD). Top-K sends the largest 1 % of each client's own update with their positions. In names, `-L4` means four local steps and `-Q5` values that are rounded to 5 bits. Bars show the standard deviation between seeds; the intervals in the text are about differences of means."""
TABLE = ("Method", "Paper: difference from centralized training, in points", "Here, with 95 % interval", "Within half a point?")  # fmt: skip
VERDICTS = """The question for each method is whether it ends at most half a point below centralized training. *Yes* means that the whole 95 % interval of the difference lies above −0.5, *no* that all of it lies below, and *open* that the interval contains −0.5. The [question, the half point and the analysis](params/claims.yaml) were fixed before these runs and after smaller pilot runs. Lines marked with * were added when the results were known, so they only describe. Intervals come from one regression over the finished runs of the plan, with seeds and test images as sources of chance; n is the number of seeds.

{table}

In the paper, TCS and TCS-L4-Q5 ended above centralized training; here they did not. The paper trains the full ResNet-18 for 300 epochs and ends near 92 %; our model, data and number of epochs are smaller, and centralized training ends near {level:.0f} %.

**Traffic.** After the first epoch, in which everything is sent, a TCS client sends 1/{up[0]} of the bits of dense training (paper: 1/{theirs[0]}), and a TCS-L4-Q5 client 1/{up[1]} (paper: 1/{theirs[1]}). Over the whole training and in both directions, the factors are 1/{whole[0]:.0f} and 1/{whole[1]:.0f}. Of the bytes of TCS-L4-Q5, {warm} come from the dense first epoch, and {down} of the rest comes from the server's messages.

**Does sparsification itself cost accuracy?** In this training and at these learning rates, we saw no loss for TCS: it differs from its dense counterpart FedAvg by {sparse} points (95 % interval in brackets). For TCS-L4-Q5 a small loss is possible: it differs from dense training with four local steps by {sparse_short}. FedAvg may gain more from a higher rate than TCS does ([limits](#how-far-the-results-go)), and in a shorter training sparsification cost more ([short training](#which-method-should-i-use)).

**Does TCS beat top-K?** In bytes yes: it needs {topk_less:.1f} times fewer, because clients that share a mask produce a sum with few entries, which the server sends back. Their accuracies differ by {topk} points, so our planned question, whether TCS ends higher, is {top-K}.

**Do important positions change slowly?** Positions drawn at random would agree in 1 % of the cases. But some layers always have larger updates than others, and positions drawn at random within each layer already agree in {by_layers}. We measured {seen} (n = {count}). We tested two readings: that positions stay more often than by chance ({correlation}), and that at least half of them stay ({slowly}). The paper names no number; half is ours. So important positions stay a little more often than by chance, but most of them change in every round."""
EVIDENCE = """**{days} days: repeat the evidence.** The planned main measurements (settings in `params/evidence.yaml`) are {made} runs. Added up, they took {cpu:.0f} hours on one or two cores of an AMD EPYC processor and {gpu:.0f} hours on an NVIDIA H100 or H200; no run needs a GPU. Interrupted runs resume where they stopped. To share the work, start the same command in several terminals. This makes all runs anew, in a folder of your choice:

    uv run tcs queue params/evidence_plan.yaml \\
        --set data_root=DATA --results FOLDER

DATA is a folder or tar archive with `train/<class>/*` and `test/<class>/*`. Ours is a copy of CIFAR-10 in JPEG files, called "CIFAR-10 (JPEG copy)" on all pages because its pixels differ slightly from the original. With `--set dataset=cifar10` instead, torchvision downloads the original. The [page beside the records](results/evidence/README.md) says what is stored and what it cost."""
ADVICE = """Each answer comes from one training task, so try the methods that it names on your own model ([notebook 15](notebooks/15_your_own_model.ipynb)). In this section, differences are from dense FedAvg and not from centralized training; in the answer on DDP they are from plain DDP, in test loss. They are in points of accuracy, with 95 % intervals. Bytes count both directions and the dense start. [All comparisons](results/which_method.md) are in one table.

- **All methods tuned and scored in the same way:** this is what `uv run tcs compare` does, on a small training with synthetic images (n = 3, {compared_made} of {compared_planned} rows are made). Centralized training ended at {compared[Baseline]} % and FedAvg at {compared[FedAvg]} %. With error feedback, TCS ended at {compared[TCS]} % with 1/{compared_less[TCS]} of the bytes of FedAvg, top-K at {compared[top-K]} % with 1/{compared_less[top-K]}, and STC (below) at {compared[STC]} % with 1/{compared_less[STC]}. The best rates of all of them were above the paper's. [Notebook 17](notebooks/17_rivals.ipynb) has the table.
- **Federated training on images over slow links:** TCS or STC. In a small training ({images_setting}, n = {images_n}, the rate of each method tuned), TCS used 1/{images_tcs[0]} of the bytes with a difference of {images_tcs[1]}, and sparse ternary compression (STC, by other authors) 1/{images_stc[0]} with {images_stc[1]}. The intervals are too wide to tell them apart in accuracy. Try STC first if bytes matter most; TCS is the better studied one here.
- **Federated training on text:** deep gradient compression (DGC, by other authors) or TCS-Q5. With a small GPT (n = {text_n}, the rate of each method tuned), DGC used 1/{dgc[0]} of the bytes with a difference of {dgc[1]}, and TCS-Q5 1/{tcs_q5[0]} with {tcs_q5[1]}. DGC includes momentum, which FedAvg and TCS did not have, so its lead may come from that alone.
- **Short training:** TCS without local steps. Multiply the number of rounds by the fraction of entries that is sent per round: that is how often the average entry is sent in the whole training. In a training of 15 epochs on CIFAR-10 (n = {few_n}, the paper's rates), it was {often[0]} times, and TCS showed {few[0]}. With four local steps it was {often[1]} times, and TCS-L4-Q5 showed {few[1]}; local steps alone, without compression, account for {few[2]} of that. Between these two numbers we have no measurement.
- **Clients with unequal data:** TCS. With classes that are distributed unequally among clients (Dirichlet with α = {alpha:g}, where a smaller α is more unequal; n = {unequal_n}, the paper's rates), it showed {unequal[0]} when all clients took part in each round and {unequal[1]} when half of them did. Do not read the plus as an advantage over FedAvg, which may gain more from a higher rate. Other methods were not tested here.
- **PyTorch DDP:** use a compressing hook only on links up to about 1 Gbit/s. (We measured processes on CPUs with gloo; GPUs with NCCL were not measured, nor links between 1 and 10 Gbit/s.) PowerSGD, which comes with PyTorch, is faster than the TCS hook at 10 % on every link of the table below, but we have not measured yet what it costs in loss: compare it with plain DDP on your task first. The loss of the TCS hook is measured: at 10 % it changed the test loss by {loss10} nats (lower is better), and at 1 % by {loss1} (AdamW at the best rate of its dense training, a small GPT, n = {ddp_n}). On one machine or at 10 Gbit/s, use plain DDP or its bf16 hook.
- **When not to use TCS:** on fast links; in short trainings with local steps; in DDP with only 1 % of the entries; or where half a point matters on a full-size network (our only run with the full ResNet-18 ended {gpu} points from centralized training).

Seconds per training step, computation included, for {parameters} parameters and two CPU processes that share a link of limited rate (gloo):

{links}"""
SIZE = """- **Not tested at the paper's size.** There is no run of 300 epochs. One run per method with the full ResNet-18, all of CIFAR-10 and {share} of these epochs ended at {} (TCS), {} (FedAvg), {} (top-K) and {} (TCS-L4-Q5) points from centralized training. There TCS is outside the half point and below top-K, but a single seed decides nothing. Our prediction for the full length is in [notebook 13](notebooks/13_evidence.ipynb)."""
SIZE_TESTED = """- **At the paper's size**, the runs are beside our prediction in [notebook 13](notebooks/13_evidence.ipynb). With {share} of the epochs, one run per method ended at {} (TCS), {} (FedAvg), {} (top-K) and {} (TCS-L4-Q5) points from centralized training."""
RATES = """- **The learning rates of the main comparison are the paper's**, and nobody tuned them for this training. At higher rates, FedAvg ended {fedavg} points higher (twice the rate, one seed), TCS {tcs} points (the paper's higher rate, {n} seeds), and centralized training no higher (twice the rate, one seed). So both gaps to centralized training may come from rates that were too low, and FedAvg may then be level with TCS. {tuned}"""
UNDER_WAY = """The comparison in which every method gets its own best rate (`params/fair_plan.yaml`) is unfinished: {made} of {planned} runs are done, and we draw no conclusion before all are. The controls with random and outdated masks (`params/controls_plan.yaml`) are unfinished, too: {controls_made} of {controls} runs are done."""
ALL_MADE = """A comparison at tuned rates is in [notebook 13](notebooks/13_evidence.ipynb)."""
MOMENTUM = """- **Momentum.** Except where momentum or AdamW is named, everything above is plain SGD, as in the paper's first table. Momentum raises centralized training by {helps} points, and TCS without momentum differs from centralized training with momentum by {with_momentum}."""
PLAN = """- **Planned before measured.** We committed the plan ([params/evidence_plan.yaml](params/evidence_plan.yaml), [params/claims.yaml](params/claims.yaml)) in {commit} on {day}, after pilot runs and before the first of the runs that it describes. Of {planned} planned runs, {made} are done; {missing}."""


# Records ──────────────────────────────────────────────────────────────────────────────────────────


def params(*names: str) -> dict[str, Any]:
    return lab.read_params([ROOT / f"params/{name}.yaml" for name in names])


@cache
def records(scheme: str, profile: str, **changes: Any) -> list[Record]:
    """The finished records of a scheme at Table 1's rate in a profile, by seed."""
    seeds = {} if profile == PROFILE else {"seeds": 100}
    asked = params("table1", profile) | seeds | {"schemes": [scheme]} | changes
    return list(lab.load_records(lab.plan(asked), diverged=False).values())


def stands(stage: str) -> bool:
    """Whether all runs of a stage of the plan are made."""
    planned = lab.plan_runs(ROOT / "params/evidence_plan.yaml")[stage]
    return len(lab.load_records(planned)) == len(planned)


def both_ways(found: Iterable[Record]) -> float:
    """Bytes of one client's messages in a whole run, up and down, mean over the runs."""
    return fmean(flow["up"] + flow["down"] for flow in map(lab.traffic, found))


def difference(one: Iterable[Record], other: Iterable[Record]) -> tuple[float, float, float]:
    """Final accuracies of the first minus the second's, in points, over the seeds of both."""
    first, second = final(one), final(other)
    return lab.mean_interval(first[s] - second[s] for s in sorted(first.keys() & second))


def final(found: Iterable[Record]) -> dict[int, float]:
    """Final accuracies in percent, by seed."""
    return {r["config"]["seed"]: 100 * r["rows"][-1]["accuracy"] for r in found}


# The picture ──────────────────────────────────────────────────────────────────────────────────────


def drawn() -> dict[str, list[Record]]:
    return {name: records(name, PROFILE) for name in DRAWN}


def picture() -> Any:
    """Final accuracy against traffic."""
    found = drawn()
    config = found["FedAvg"][0]["config"]
    net = {"resnet8": "ResNet-8", "resnet18": "ResNet-18"}[config["model"]]
    if config["model"] == "resnet18" and config["width"] == 16:
        net += " of a quarter of its width"
    title = (
        f"{config['data_label']} at {config['image_size']} × {config['image_size']} pixels, {net}, "
    )
    table = lab.summary([record for of in found.values() for record in of])
    return lab.draw_megabytes_figure(table, f"{title}{config['epochs']} epochs", NAMES)


def picture_path() -> Path:
    """Without a suffix."""
    return ROOT / f"results/{PROFILE}/megabytes"


def picture_block() -> str:
    """The picture and its caption."""
    config = drawn()["FedAvg"][0]["config"]
    words = {"data": config["data_label"], "pixels": config["image_size"], "profile": PROFILE}
    file = picture_path().relative_to(ROOT).as_posix()
    return f"![Final accuracy against gigabytes of traffic, by method]({file}.png)\n\n{CAPTION.format(**words)}"


# The verdicts ─────────────────────────────────────────────────────────────────────────────────────


def whole_factors() -> list[float]:
    """How many times fewer bytes than FedAvg TCS and TCS-L4-Q5 need, over the whole training."""
    found = drawn()
    return [both_ways(found["FedAvg"]) / both_ways(found[name]) for name in ("TCS", "TCS-L4-Q5")]


def outcome_block() -> str:
    """The answers on the first screen."""
    read, found = judged_records()
    tcs, short, dense = (
        lab.estimate_difference(read, found, (name, 0.5), ("Baseline", 0.1))
        for name in ("TCS", "TCS-L4-Q5", "FedAvg-L4")
    )
    times, times_short = whole_factors()
    config = drawn()["FedAvg"][0]["config"]
    assert (config["model"], config["width"]) == ("resnet18", 16)  # as the sentence says
    shares = lab.measure_recurrence(
        r for r in found.values() if r["config"]["scheme"]["name"] == "FedAvg"
    )
    tuned, controls = tuned_runs(), control_runs()
    return OUTCOME.format(
        clients=config["clients"], epochs=config["epochs"], pixels=config["image_size"], n=tcs["n"],
        times=f"{times:.0f}", times_short=f"{times_short:.0f}", tcs=by_points(tcs),
        short=by_points(short), dense_short=signed(dense["measured"]), gpu=gpu_gaps()["TCS"], gpu_topk=gpu_gaps()["top-K"],
        stay=f"{100 * shares['seen']:.0f} %", chance=f"{100 * shares['by_layers']:.0f} %",
        tuned="{} of {}".format(*tuned), controls="{} of {}".format(*controls),
    )  # fmt: skip


def signed(value: float) -> str:
    return lab.format_interval(value, math.nan, math.nan)


def by_points(row: dict[str, Any], more: str = "") -> str:
    """A difference in words, like "−0.17 points (95 % interval −0.34 to −0.01)"."""
    value, _, ends = interval(row).partition(" ")
    return f"{value} points (95 % interval {ends.strip('()')}{more})"


def tuned_runs() -> tuple[int, int]:
    """How many runs of the comparison at tuned rates are made, and how many are planned."""
    counts = lab.fair_counts(ROOT / "params/fair_plan.yaml")
    made, planned = (counts[f"tuning {w}"] + counts[f"scoring {w}"] for w in ("made", "planned"))
    return made, planned


def control_runs() -> tuple[int, int]:
    """The same of the controls."""
    table = lab.count_made(lab.plan_runs(ROOT / "params/controls_plan.yaml"))
    return int(table["made"].sum()), int(table["planned"].sum())


def dense_share(found: Iterable[Record]) -> str:
    """How much of all that a client sends and gets is of the dense first epochs, in words."""
    flows = [lab.traffic(record) for record in found]
    share = fmean(flow["warm-up"] / (flow["up"] + flow["down"]) for flow in flows)
    return {0.5: "half", 0.6: "most", 0.7: "most"}[round(share, 1)]


def downlink_share(found: Iterable[Record]) -> str:
    """How much of the sparse rounds' bytes is the server's, in words."""
    flows = [lab.traffic(record) for record in found]
    up = fmean(flow["up"] - flow["warm-up"] / 2 for flow in flows)  # half of that is each way's
    both = fmean(flow["up"] + flow["down"] - flow["warm-up"] for flow in flows)
    return {0.8: "most", 0.9: "most"}[round(1 - up / both, 1)]


@cache
def judged_records() -> tuple[lab.evidence.claims.Claims, dict[str, Record]]:
    """The claims' file and the records that it judges."""
    return lab.load_planned_records(PROFILE)


@cache
def judged_rows() -> dict[str, dict[str, Any]]:
    """The claims by name, by the analysis that was planned."""
    return {row["claim"]: row for row in lab.judge_claims(*judged_records()).to_dict("records")}


def compared_table() -> str:
    """The paper's differences to centralized training and ours, method by method."""
    read, found = judged_records()
    paper = {}
    for table in ("table1", "table3"):
        paper = params(table)["paper"] | paper
    rows = [list(TABLE), ["---"] * len(TABLE)]
    for name, words, other in COMPARED:
        row = lab.estimate_difference(read, found, (name, 0.5), (other, 0.1))
        word = lab.judge_mean(row["measured"], row["half"], -0.5)
        theirs = "not reported"
        if name in paper:
            points = round(paper[name][0] - paper[other][0], 2) + 0.0  # no minus before a zero
            theirs = (f"{points:+.2f}" if points else "0.00").replace("-", "−")
        ours = f"{interval(row)}, n = {row['n']}"
        rows.append([words, theirs, ours, ANSWERS[word]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


COMPARED = (
    ("TCS", "TCS", "Baseline"),
    ("TCS-L4-Q5", "TCS with 4 local steps and 5-bit values (TCS-L4-Q5)", "Baseline"),
    ("top-K", "Top-K with error feedback *", "Baseline"),
    ("FedAvg", "FedAvg, everything sent *", "Baseline"),
    ("FedAvg-L4", "FedAvg with 4 local steps, everything sent *", "Baseline"),
    ("TCS-Global Momentum", "TCS with momentum at the server and all clients (compared with centralized training with momentum)", "Baseline-Momentum"),
)  # fmt: skip
ANSWERS = {"supported": "yes", "contradicted": "**no**", "open": "open"}


def verdicts_block() -> str:
    """The table of differences, and the answers to the paper's other main questions."""
    _, found = judged_records()
    rows, dense = judged_rows(), drawn()
    words = {name: lab.format_verdict(row).partition(":")[0] for name, row in rows.items()}
    after = [lab.bits_per_parameter(dense[name][0]) for name in ("TCS", "TCS-L4-Q5")]
    shares = lab.measure_recurrence(
        r for r in found.values() if r["config"]["scheme"]["name"] == "FedAvg"
    )
    return VERDICTS.format(
        **words,
        table=compared_table(),
        level=fmean(final(dense["Baseline"]).values()),
        up=[lab.format_times(32 / bits["uplink"]) for bits in after],
        theirs=[lab.format_times(lab.paper_factor(name)) for name in ("TCS", "TCS-L4-Q5")],
        whole=whole_factors(),
        warm=dense_share(dense["TCS-L4-Q5"]),
        down=downlink_share(dense["TCS-L4-Q5"]),
        topk=interval(rows["top-K"]),
        sparse=interval(rows["cost"]),
        sparse_short=interval(rows["cost-4-q5"]),
        topk_less=both_ways(dense["top-K"]) / both_ways(dense["TCS"]),
        seen=f"{100 * shares['seen']:.0f} %",
        by_layers=f"{100 * shares['by_layers']:.0f} %",
        count=rows["slowly"]["n"],
    )


def interval(row: dict[str, Any]) -> str:
    return lab.format_interval(*(row[key] for key in ENDS))


ENDS = ("measured", "low", "high")


# What to use ──────────────────────────────────────────────────────────────────────────────────────


@cache
def at_best_rates(profile: str) -> dict[str, list[Record]]:
    """The rivals' records of notebook 17, of each at the best of the rates tried."""
    sweep = lab.read_sensitivity(ROOT / f"params/rivals_{profile}.yaml")
    points = lab.sensitivity_plan(sweep, params(profile) | {"seeds": 5}, "learning_rate")
    found = {point: lab.load_records(group) for point, group in points.items()}
    best = lab.best_values(found)
    return {name: list(found[rate, name].values()) for name, rate in best.items()}


def against_dense(found: dict[str, list[Record]], *names: str) -> list[str]:
    """n, times fewer bytes than FedAvg both ways, and points from it, of schemes."""
    dense = found["FedAvg"]
    less, points = [], []
    for name in names:
        ratio = both_ways(dense) / both_ways(found[name])
        less.append(f"{name} {lab.format_times(ratio)}")
        points.append(f"{name} {lab.format_interval(*difference(found[name], dense))}")
    counts = {len(found[name]) for name in (*names, "FedAvg")}
    assert len(counts) == 1, f"{names}: got n = {counts}, allowed: one n"
    return [f"n = {counts.pop()}", "<br>".join(less), "<br>".join(points)]


def unequal_row() -> list[str]:
    """From the last part of 10b: classes by Dirichlet, with all clients, then with some of them. Named
    is what may be used: no difference is wholly below the half point that "no loss" allows."""
    (read, equal), schemes = judged_records(), ("TCS", "TCS-L4-Q5")
    there = lab.load_unequal_records(read, params(PROFILE))
    table = lab.compare_unequal_clients(read, equal, there)
    table = table.query("where == 'there' and second == 'FedAvg'").set_index(["first", "setting"])
    skewed = [title for title, how in read.unequal.settings.items() if "dirichlet_alpha" in how]
    runs = [of_scheme(there[title].values()) for title in skewed]
    named, less, points = [], [], []
    counts = {len(by[name]) for by in runs for name in (*schemes, "FedAvg")}
    assert len(counts) == 1, f"unequal clients: got n = {counts}, allowed: one n"
    for name in schemes:
        ends = table.loc[[(name, title) for title in skewed], list(ENDS)]
        named += [name] if (ends["high"] >= -0.5).all() else []
        ratio = both_ways(runs[0]["FedAvg"]) / both_ways(runs[0][name])
        less.append(f"{name} {lab.format_times(ratio)} (all)")
        points.append(f"{name} {', '.join(lab.format_interval(*row) for row in ends.to_numpy())}")
    config = runs[-1]["FedAvg"][0]["config"]
    share = {0.5: "half"}[config["participation"]]
    dense = ", ".join(f"{fmean(final(by['FedAvg']).values()):.0f}" for by in runs)
    return [
        f"Unequal classes (Dirichlet {config['dirichlet_alpha']:g}); all or {share} the clients a round",
        " or ".join(named) or "**do not sparsify**",
        f"10b: `evidence`, {config['epochs']} epochs, n = {counts.pop()}",
        "<br>".join(less),
        f"Accuracy points (FedAvg: {dense} %)<br>{'<br>'.join(points)}",
    ]


def of_scheme(found: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by their scheme's name."""
    by: dict[str, list[Record]] = {}
    for record in found:
        by.setdefault(record["config"]["scheme"]["name"], []).append(record)
    return by


def ddp_rows() -> list[list[str]]:
    """From the records of 12: where a step is shorter than with bf16, bytes of a whole training,
    test loss; and of a larger net bytes of a step, and how much shorter or longer it is."""
    measured, nets = links.Links(links.read_rows()), ((10, 1000), (4, 5000))
    costs = optimizers.Costs()
    dense = 4 * sum(costs.sizes)
    less, losses, counts, rates = [], [], set(), set()
    for share in SHARES:
        setup = optimizers.Setup("AdamW", f"TCS {share}")
        found = [record for (of, _), record in costs.records.items() if of == setup]
        counts.add(len(found))
        sparse = optimizers.bytes_per_step(costs.stage.schemes[setup.scheme], costs.sizes)
        steps = costs.stage.dense_steps, costs.stage.sparse_steps
        ratio = dense * sum(steps) / (dense * steps[0] + sparse * steps[1])
        less.append(f"{share}: {lab.format_times(ratio)}")
        cost = costs.cost(setup)
        losses.append(f"{share}: {lab.format_interval(cost.value, cost.low, cost.high)}")
        rates.update(measured.pays_to(f"TCS {share}", "bf16", *net) for net in nets)
    up_to, large = min(rates), nets[1]
    steps = [f"{share}: {over_bf16(measured, share, large)}" for share in SHARES]
    where = f"12: GPT of {sum(costs.sizes):,} parameters, AdamW, {found[0]['steps']:,} steps, n = {counts.pop()}"
    loss = f"Test loss, nats (more is worse)<br>{'<br>'.join(losses)}"
    fast = f"12: {links.count_parameters(*large) // 10**6} million parameters, two CPU processes"
    time = f"Step time ÷ bf16 hook's at {FASTEST:,} Mbit/s<br>{'<br>'.join(steps)}"
    a_step = [
        f"{share}: {lab.format_times(less_a_step(f'TCS {share}', large))}" for share in SHARES
    ]
    dense_way = "**do not sparsify**: DDP's bf16 hook; on one machine, also plain DDP"
    return [
        [
            f"DDP, links up to {up_to:,.0f} Mbit/s",
            "`tcs_hook` at 10 %. PowerSGD is faster, its test loss unknown",
            where,
            "<br>".join(less),
            loss,
        ],
        ["A faster network, or one machine", dense_way, fast, "<br>".join(a_step), time],
    ]


def less_a_step(way: str, net: tuple[int, int]) -> float:
    """How many times fewer bytes than plain DDP a rank hands over in a sparse step."""
    return sum(links.count_handed_bytes("plain", *net)) / sum(links.count_handed_bytes(way, *net))


def over_bf16(measured: links.Links, share: str, net: tuple[int, int]) -> str:
    """A step's time over that with bf16, on the fastest link."""
    ours, theirs = (measured.row(way, *net, mbit=FASTEST) for way in (f"TCS {share}", "bf16"))
    return f"{ours['seconds'] / theirs['seconds']:.2f}"


SHARES = ("10 %", "1 %")
FASTEST = 10_000  # Mbit/s, of the links that were measured
SITUATIONS = (
    "Your situation", "Use", "Notebook: training", "Times fewer bytes", "Against FedAvg, or DDP (95 % interval)",
)  # fmt: skip


def situations() -> list[list[str]]:
    """A row a situation, with the training that it is from."""
    images, text = at_best_rates("small"), at_best_rates("text")
    few = ("TCS", "TCS-L4-Q5")
    short = {name: records(name, "short", seeds=3) for name in ("FedAvg", *few)}
    often = [lab.count_sends(short[name][0]) for name in few]
    epochs = {profile: params(profile)["epochs"] for profile in ("small", "text", "short")}
    pixels = {name: params(name).get("image_size") or 32 for name in ("small", "short")}
    inputs = {name: f"{size} × {size} pixels" for name, size in pixels.items()} | {"text": "a GPT"}
    rows = [
        ("Images, slow links", "STC", "17", "small", images, ("STC", "TCS")),
        ("Text, slow links", "DGC or TCS-Q5", "17", "text", text, ("DGC", "TCS-Q5")),
        (f"Few rounds: an entry sent {often[0]} times, with `-L4` {often[1]}", "TCS; no `-L4`", "10b",
         "short", short, few),
    ]  # fmt: skip
    cells = []
    for situation, use, notebook, profile, found, names in rows:
        n, less, points = against_dense(found, *names)
        where = f"{notebook}: `{profile}`, {inputs[profile]}, {epochs[profile]} epochs, {n}"
        level = fmean(final(found["FedAvg"]).values())
        cells.append(
            [situation, use, where, less, f"Accuracy points (FedAvg: {level:.0f} %)<br>{points}"]
        )
    if stands("unequal"):
        cells.append(unequal_row())
    return cells + ddp_rows()


# All of it ────────────────────────────────────────────────────────────────────────────────────────


def evidence_block() -> str:
    """What the evidence costs to repeat."""
    plans = lab.plan_runs(ROOT / "params/evidence_plan.yaml")
    found = lab.load_records(chain(*plans.values())).values()
    hours = {"AMD EPYC": 0.0, "NVIDIA H100 80GB HBM3": 0.0, "NVIDIA H200": 0.0}  # as it says
    for record in found:
        hours[record["provenance"]["device"]] += record["provenance"]["wall_seconds"] / 3600
    cpu, *gpus = hours.values()
    days = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}[round((cpu + sum(gpus)) / 24)]
    return EVIDENCE.format(days=days, made=len(found), cpu=cpu, gpu=sum(gpus))


def less_and_points(found: dict[str, list[Record]], name: str) -> tuple[str, str]:
    """How many times fewer bytes than FedAvg a scheme needs, and its difference in accuracy."""
    dense = found["FedAvg"]
    ratio = both_ways(dense) / both_ways(found[name])
    return lab.format_times(ratio), lab.format_interval(*difference(found[name], dense))


def advice_block() -> str:
    """Which method to use, in sentences."""
    images, text = at_best_rates("small"), at_best_rates("text")
    names = ("FedAvg", "TCS", "TCS-L4-Q5", "FedAvg-L4")
    short = {name: records(name, "short", seeds=3) for name in names}
    config = images["FedAvg"][0]["config"]
    few = [lab.format_interval(*difference(short[name], short["FedAvg"])) for name in names[1:3]]
    few.append(signed(difference(short["FedAvg-L4"], short["FedAvg"])[0]))
    assert short["FedAvg"][0]["config"]["epochs"] == 15  # as the sentence says
    pixels, epochs = config["image_size"], config["epochs"]
    return ADVICE.format(
        images_setting=f"CIFAR-10 at {pixels} × {pixels} pixels, {epochs} epochs",
        images_tcs=less_and_points(images, "TCS"),
        images_stc=less_and_points(images, "STC"),
        images_n=len(images["TCS"]),
        text_n=len(text["DGC"]),
        dgc=less_and_points(text, "DGC"),
        tcs_q5=less_and_points(text, "TCS-Q5"),
        often=[lab.count_sends(short[name][0]) for name in names[1:3]],
        few=few,
        few_n=len(short["TCS"]),
        gpu=gpu_gaps()["TCS"],
        **compared_numbers(),
        **unequal_numbers(),
        **ddp_numbers(),
    )


def compared_numbers() -> dict[str, Any]:
    """What the stored rows of `tcs compare` say of the best-known methods."""
    track = compare.track.read_track()
    scores = compare.scoring.Scores(track)
    points = {p.scheme: p for of in scores.stored.values() for p in of}
    names = ("Baseline", "FedAvg", "TCS", "top-K", "STC")
    rates = {"Baseline": 0.1} | dict.fromkeys(names[1:], 0.5)  # the paper's
    assert all(points[name].rate > rates[name] for name in names)  # as the sentence says
    made, planned = compare.rows.count_stored(track)
    levels = {name: f"{points[name].accuracy:.1f} ± {points[name].half:.1f}" for name in names}
    dense = points["FedAvg"].both
    less = {name: lab.format_times(dense / points[name].both) for name in names[1:]}
    return {
        "compared": levels, "compared_less": less, "compared_made": made, "compared_planned": planned
    }  # fmt: skip


def unequal_numbers() -> dict[str, Any]:
    """How TCS ends against FedAvg where clients have unequal classes."""
    read, equal = judged_records()
    there = lab.load_unequal_records(read, params(PROFILE))
    table = lab.compare_unequal_clients(read, equal, there).query(
        "where == 'there' and second == 'FedAvg' and first == 'TCS'"
    )
    skewed = [title for title, how in read.unequal.settings.items() if "dirichlet_alpha" in how]
    rows = table.set_index("setting").loc[skewed].to_dict("records")
    configs = [next(iter(there[title].values()))["config"] for title in skewed]
    assert [config["participation"] for config in configs] == [1.0, 0.5]  # as the sentence says
    (n,) = {row["n"] for row in rows}
    said = [interval(row) for row in rows]
    return {"alpha": configs[0]["dirichlet_alpha"], "unequal": said, "unequal_n": n}


def ddp_numbers() -> dict[str, Any]:
    """Seconds per step of ten million parameters by link, and what sparse steps cost in loss."""
    measured, costs = links.Links(links.read_rows()), optimizers.Costs()
    net, large = (10, 1000), (4, 5000)
    setups = {share: optimizers.Setup("AdamW", f"TCS {share} %") for share in (1, 10)}
    losses = {f"loss{share}": costs.cost(setup) for share, setup in setups.items()}
    (n,) = {len([1 for of, _ in costs.records if of == setup]) for setup in setups.values()}
    for way in ("TCS 10 %", "TCS 1 %"):  # on the fastest link, and without one, plain or bf16 win
        for mbit in (FASTEST, None):
            ours = measured.row(way, *large, mbit=mbit)["seconds"]
            others = [measured.row(w, *large, mbit=mbit)["seconds"] for w in ("plain", "bf16")]
            assert min(others) < ours
    lines = [["Link", *DDP_WAYS.values()], ["---"] * (1 + len(DDP_WAYS))]
    for mbit in (10, 50, 200, 1000):
        seconds = [measured.row(way, *net, mbit=mbit)["seconds"] for way in DDP_WAYS]
        lines.append([f"{mbit:,} Mbit/s", *(f"{s:.2f}" if s < 10 else f"{s:.0f}" for s in seconds)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    said = {key: lab.format_interval(c.value, c.low, c.high) for key, c in losses.items()}
    count = f"{round(links.count_parameters(*net) / 1e6)} million"
    return said | {"links": table, "parameters": count, "ddp_n": n}


DDP_WAYS = {
    "plain": "plain DDP", "bf16": "bf16 hook", "PowerSGD": "PowerSGD", "TCS 10 %": "TCS hook, 10 %",
    "TCS 1 %": "TCS hook, 1 %",
}  # fmt: skip


NOTEBOOKS = {  # group: notebook: question, with an exercise
    "Learn": {
        "01_fedavg": ("How do many clients train one model?", True),
        "02_sparsification": ("What is lost if only the largest entries are sent?", True),
        "03_tcs": ("How do clients share a mask, and when should that help?", True),
        "04_layerwise_fairness": ("Should every layer get its share of the mask?", True),
        "05_global_momentum": (
            "Can server and clients apply momentum to the shared update?",
            True,
        ),
        "06_sparse_encoding": ("How many bits does a position need?", True),
        "07_fractional_quantization": ("How can a value be sent in five bits?", True),
    },
    "Reproduce": {
        "00_reproduce": ("What do all tables and figures of the paper look like here?", False),
        "08_tables_and_curves": ("How do I make one table, for a training of my choice?", False),
        "10_bits_on_the_wire": ("Which bytes does each scheme really send?", False),
        "13_evidence": ("Which of the paper's claims hold, and with what certainty?", False),
        "14_sensitivity": ("What do the shares, local steps, bits and rates change?", False),
    },
    "Use": {
        "09_your_own_scheme": ("How do I add a scheme of my own and compare it?", False),
        "11_performance": ("Where does the time of a round go?", False),
        "12_real_training": ("What does the DDP hook cost and save?", False),
        "15_your_own_model": ("What would TCS save on my model?", False),
        "18_flower": ("How does TCS run inside Flower?", False),
    },
    "Compare": {
        "10b_fewer_bytes": ("Can one send fewer bytes than the paper's methods do?", False),
        "16_text": ("Does it work for a language model?", False),
        "17_rivals": ("Which method should I use, of TCS and those by other authors?", False),
    },
}


def notebooks_block() -> str:
    rows = ["| | Notebook | Question | Exercises |", "| --- | --- | --- | --- |"]
    for group, notebooks in NOTEBOOKS.items():
        for i, (name, (question, exercise)) in enumerate(notebooks.items()):
            first = f"**{group}**" if not i else ""
            link = f"[{name.replace('_', ' ', 1)}](notebooks/{name}.ipynb)"
            rows.append(f"| {first} | {link} | {question} | {'yes' if exercise else ''} |")
    return "\n".join(rows)


def reproducibility_block() -> str:
    """The evidence's plan: its commit, and how much of it is made."""
    table = lab.count_made(lab.plan_runs(ROOT / "params/evidence_plan.yaml"))
    missing = table[table["made"] < table["planned"]]
    words = "; ".join(
        f"the other {row.planned - row.made} (stage {row.stage} of the plan, single seeds of three variants) were optional from the start"
        for row in missing.itertuples()
    )
    assert set(missing["stage"]) <= {"3"}  # as the sentence says
    counts = {"planned": table["planned"].sum(), "made": table["made"].sum()}
    return PLAN.format(**counts, **PLANNED_IN, missing=words or "none is missing")


PLANNED_IN = {"commit": "277d2f2", "day": "25 November 2026"}


def limits_block() -> str:
    return f"{at_the_papers_size()}\n{at_other_rates()}\n{about_momentum()}"


def about_momentum() -> str:
    read, found = judged_records()
    row = lab.estimate_difference(read, found, ("TCS", 0.5), ("Baseline-Momentum", 0.1))
    helps = judged_rows()["momentum-baseline"]["measured"]
    return MOMENTUM.format(helps=f"{helps:.2f}", with_momentum=by_points(row, f"; n = {row['n']}"))


def gpu_gaps() -> dict[str, str]:
    """Final accuracies of profile gpu at its own length, one seed, in points from the Baseline."""
    names = ("Baseline", "TCS", "FedAvg", "top-K", "TCS-L4-Q5")
    asked = params("table1", "gpu") | {"schemes": list(names), "seeds": [0]}
    found = list(lab.find_records(profile="gpu").values())
    long = [
        r for r in found if r["config"]["epochs"] == asked["epochs"] and not r["config"]["seed"]
    ]
    ends = {r["config"]["scheme"]["name"]: 100 * r["rows"][-1]["accuracy"] for r in long}
    return {name: signed(ends[name] - ends["Baseline"]) for name in names[1:]}


def at_the_papers_size() -> str:
    """What was seen there, and whether there are runs of the paper's length."""
    share = params("paper")["epochs"] / params("gpu")["epochs"]
    tested = lab.compare_prediction(ROOT / "params/prediction.yaml")["n"].any()
    text = SIZE_TESTED if tested else SIZE
    return text.format(*gpu_gaps().values(), share={5.0: "a fifth"}[share])


def at_other_rates() -> str:
    """What higher rates gave, and how far the comparison at tuned rates is.

    One seed at twice the plan's rate counts as higher where it is outside the range at that rate;
    TCS at the paper's higher rate is as judged."""
    twice, over = params(PROFILE)["reference_batch"] // 2, {}
    planned = lab.plan_runs(ROOT / "params/evidence_plan.yaml")["rates"]
    for config in (config for config in planned if config.reference_batch == twice):
        usual = final(records(config.scheme.name, PROFILE)).values()
        (now,) = final(lab.load_records([config]).values()).values()
        inside = min(usual) <= now <= max(usual)
        over[config.scheme.name] = 0.0 if inside else now - fmean(usual)
    assert not over["TCS-L4-Q5"] and not over["Baseline"]
    higher = judged_rows()["eta"]
    n = {"3": "three"}[str(higher["n"]).split()[0]]
    (made, planned), (controls_made, controls) = tuned_runs(), control_runs()
    words = UNDER_WAY.format(
        made=made, planned=planned, controls_made=controls_made, controls=controls
    )
    return RATES.format(
        fedavg=f"{over['FedAvg']:.2f}",
        tcs=f"{higher['measured']:.2f}",
        n=n,
        tuned=words if made < planned else ALL_MADE,
    )


BLOCKS = {
    "outcome": outcome_block,
    "picture": picture_block,
    "verdicts": verdicts_block,
    "evidence": evidence_block,
    "advice": advice_block,
    "notebooks": notebooks_block,
    "limits": limits_block,
    "reproducibility": reproducibility_block,
}


def with_blocks(text: str) -> str:
    """README's text with all that is generated as its sources have it."""
    for name, made in BLOCKS.items():
        block = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.S)
        assert len(block.findall(text)) == 1, name
        content = made()
        text = block.sub(lambda match, c=content: f"{match[1]}{c}\n{match[2]}", text)
    return text


def numbers() -> list[str]:
    """Words of README with a number in them, outside the blocks, as they should be."""
    scheme = tcs.Scheme.named("TCS")
    return [
        f"{100 * scheme.phi_global:g} % of all entries, at the same positions for every client",
        f"its largest entries outside the mask ({100 * scheme.phi_local:g} % of all entries)",
    ]


def situations_page() -> str:
    """results/which_method.md: all comparisons behind README's advice, with their intervals."""
    lines = [SITUATIONS, ["---"] * len(SITUATIONS), *situations()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{PAGE}\n\n{table}\n"


PAGE = """# Which method in which situation

Written by `tests/readme_table.py` from the records in this folder. Bytes are counted in both directions and include the dense start; in the last row they are those of one sparse step. Intervals are 95 % intervals; n is the number of seeds."""


def evidence_page() -> str:
    """results/evidence/README.md: what lies there, how it was made, and what it cost."""
    files = lab.results_folder(PROFILE) / "runs"
    found = lab.find_records(profile=PROFILE)
    assert len(found) == len(list(files.glob("*.json")))  # so the page counts all that lie there
    config = drawn()["FedAvg"][0]["config"]
    table = lab.count_made(lab.plan_runs(ROOT / "params/evidence_plan.yaml"))
    (made, planned), (controls_made, controls) = tuned_runs(), control_runs()
    plans = [
        ["`evidence_plan.yaml`", "the paper's methods and claims", table["made"].sum(), table["planned"].sum()],
        ["`fair_plan.yaml`", "every method at its own best learning rate", made, planned],
        ["`controls_plan.yaml`", "TCS against masks that are random or outdated", controls_made, controls],
    ]  # fmt: skip
    return EVIDENCE_PAGE.format(
        records=len(found),
        plans=lab.plain_markdown(pd.DataFrame(plans, columns=["plan in `params`", "about", "made", "planned"])),
        costs=lab.plain_markdown(costs_by_device(found.values())),
        width={16: "a quarter"}[config["width"]],
        images=config["train_samples"],
        **{key: config[key] for key in ("data_label", "image_size", "epochs", "clients")},
    )  # fmt: skip


def costs_by_device(found: Iterable[Record]) -> pd.DataFrame:
    """Numbers of records and their hours from start to end, by the device that made them."""
    rows = [
        {"device": r["provenance"]["device"], "hours": r["provenance"]["wall_seconds"] / 3600}
        for r in found
    ]
    groups = pd.DataFrame(rows).groupby("device")["hours"].agg(["size", "sum"]).reset_index()
    groups["sum"] = groups["sum"].map("{:.1f}".format)
    return groups.rename(columns={"size": "records", "sum": "hours"})


EVIDENCE_PAGE_PATH = ROOT / "results/evidence/README.md"
EVIDENCE_PAGE = """# The evidence

Written by `tests/readme_table.py` from the records in this folder.

The verdicts of this package on the paper's claims rest on the training runs that are stored here. Most of them train a ResNet-18 with {width} of the channels on {images:,} images of {data_label} at {image_size} × {image_size} pixels, for {epochs} epochs, with {clients} clients or centralized. All settings are in [params/evidence.yaml](../../params/evidence.yaml).

## What lies here

| File | What it is | Made by |
| :--- | :--- | :--- |
| `runs/*.json` | {records} records, one for each training run: its settings, its accuracy and bytes after every epoch, which test images it got right, and on which device and with which commit it was made | the commands below |
| `table1` to `table3`, `figure3` to `figure5` | the paper's tables and figures from these records (`.csv` has all columns, `.md` those for reading, `.ipynb` explains them) | [notebook 08](../../notebooks/08_tables_and_curves.ipynb) |
| `claims.csv`, `claims.md`, `intervals.png` | each claim of the paper with its measured number, interval and verdict, and a picture of the main ones | [notebook 13](../../notebooks/13_evidence.ipynb) |
| `megabytes.png` | accuracy against traffic, the picture of the package's first page | `tests/readme_table.py` |

Pictures are also there as `.svg`. What the other notebooks found is in [results/verdicts](../verdicts).

## How it was made

Three plans say which runs are made, in which order, and how they are judged. Each was committed before its first run. A run that belongs to two plans is made once.

{plans}

This command makes the runs of a plan that are not in FOLDER yet. If it is interrupted, the same command goes on where it stopped.

    uv run tcs queue params/evidence_plan.yaml --set data_root=DATA --results FOLDER

DATA is a folder or tar archive with `train/<class>/*` and `test/<class>/*`. With `--set dataset=cifar10` instead, torchvision downloads the original CIFAR-10, whose pixels differ slightly from those of our copy in JPEG files.

## What it cost

Hours are from the start to the end of each run. Several runs shared a processor or a GPU, so the hours say nothing about speed.

{costs}

`uv run tcs again RECORD --set data_root=DATA` repeats a stored run and compares the results.
"""


if __name__ == "__main__":
    README.write_text(with_blocks(README.read_text(encoding="utf-8")), encoding="utf-8")
    EVIDENCE_PAGE_PATH.write_text(evidence_page(), encoding="utf-8")
    SITUATIONS_PAGE.write_text(situations_page(), encoding="utf-8")
    lab.save_figure(picture(), picture_path())
