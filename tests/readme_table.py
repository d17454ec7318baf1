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

import tcs_lab as lab
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
    "FedAvg": "FedAvg: everything is sent",
    "FedAvg-L4": "FedAvg, 4 local steps",
    "TCS-L4": "TCS, 4 local steps",
    "TCS-L4-Q5": "TCS, 4 local steps,\n5-bit values",
}
OUTCOME = """**What came out.** Our largest comparison trains a ResNet-18 of a quarter of its width on half of CIFAR-10, with {clients} clients, {epochs} epochs and {n} seeds for each method, at the paper's learning rates.

- **TCS keeps the accuracy.** It ended {tcs}, while a client sent and received {times} times fewer bytes than with dense training.
- **The shortest scheme does not.** With four local steps and 5-bit values, TCS sent {times_short} times fewer bytes and ended {short}. Dense training with four local steps lost {dense_short} points as well, so most of that loss comes from the local steps and not from the compression.
- **Why it works is open.** The paper assumes that important positions change slowly. In our runs only {stay} of them stay from one round to the next. Whether a shared mask that follows the last update is better than a random one, and how the methods compare when each has its own best learning rate, is being measured now ({made} of {planned} runs)."""
CAPTION = """The picture shows final accuracy against the bytes of one client, for {data} at {pixels} × {pixels} pixels (settings: `params/{profile}.yaml`). FedAvg is dense federated training. Top-K sends the largest 1 % of each client's update with their positions. Four local steps mean that a client trains four steps between two messages; the names of these schemes end in `-L4`, and those with 5-bit values in `-Q5`."""
TABLE = (
    "Difference to centralized training", "The paper", "Here, with 95 % interval", "Within half a point?",
)  # fmt: skip
VERDICTS = """Final accuracies are compared in percentage points. Before our runs we fixed the question for each method: does it end at most half a point below centralized training? *Yes* means that the whole 95 % interval lies above −0.5, *no* that all of it lies below, and *open* that it includes −0.5. The [plan](params/claims.yaml) is older than the runs; only the line on top-K was not part of it.

{table}

The paper trains the full ResNet-18 for 300 epochs and ends near 92 %; our training is smaller and ends near {level:.0f} %.

**Traffic.** Bytes follow from counting, so they reproduce exactly: after its dense first epoch, TCS needs {up[0]} times and TCS-L4-Q5 {up[1]} times fewer uplink bits than dense training (by the paper's tables {theirs[0]} and {theirs[1]}). Counted over the whole training and in both directions, which is what a user pays for, the factors are {whole[0]:.0f} and {whole[1]:.0f}. Of the bytes of TCS-L4-Q5, {warm} belong to the dense first epoch, and {down} of the rest is what the server sends.

**Does sparsification itself cost accuracy?** Dense FedAvg ended {fedavg}, so TCS ended {sparse} points above its dense counterpart. TCS-L4-Q5 ended {sparse_short} points from dense FedAvg with four local steps.

**Does TCS beat top-K?** This is {top-K}: the two ended equally high, and TCS needs {topk_less:.1f} times fewer bytes, because the server's message is shorter when clients share a mask.

**Do important positions change slowly?** Of the 1 % of entries that are largest in a dense update, {seen} are among the largest of the next one as well (n = {count}). By chance it would be {by_layers}, since some layers have larger updates than others. So positions stay more often than by chance ({correlation}), but not half of them do ({slowly}; half is our bound, the paper names none)."""
EVIDENCE = """**{days} days: repeat the evidence.** The `evidence` profile consists of {made} runs that took {hours:.0f} hours of computation, on an AMD EPYC processor and in part on NVIDIA H100 and H200 GPUs. Killed runs go on where they stopped, and several processes can share the work. `uv run tcs queue params/evidence_plan.yaml --set data_root=FOLDER` makes the runs that are missing; FOLDER is a folder or tar with `train/<class>/*` and `test/<class>/*`. Our images are a copy of CIFAR-10 in JPEG files, which we call "CIFAR-10 (JPEG copy)" because its pixels differ slightly from the original. With `--set dataset=cifar10`, torchvision downloads the original."""
ADVICE = """These are our answers so far. Each comes from one training task, and the learning rates were tuned for the methods of the first two answers only. So try the methods that an answer names on your own model ([notebook 15](notebooks/15_your_own_model.ipynb)). Bytes are counted in both directions and include the dense start; [all comparisons with their intervals](results/which_method.md) stand in one table.

- **Federated training on images over slow links:** TCS. In {images_setting}, it sent {images_tcs[0]} times fewer bytes than dense FedAvg and ended {images_tcs[1]} points from it. STC, a method by other authors that compresses in both directions, sent {images_stc[0]} times fewer bytes and ended {images_stc[1]} points from it; the intervals are wide (n = {images_n}).
- **Federated training on text:** DGC (by other authors, with momentum) or TCS-Q5. For a small GPT they sent {dgc[0]} and {tcs_q5[0]} times fewer bytes and ended {dgc[1]} and {tcs_q5[1]} points from FedAvg in accuracy.
- **Few rounds:** TCS without local steps. Multiply the number of rounds by φ, the fraction of entries that is sent per round: this is how often the average entry is sent. In a training of 15 epochs, where it was {often[0]} times, TCS ended {few[0]} points from FedAvg. With four local steps it was {often[1]} times, and TCS-L4-Q5 lost {few[1]} points, of which dense training with four local steps lost {few[2]}.
- **Clients with unequal data:** TCS. With classes distributed unequally (Dirichlet, α = {alpha:g}), it ended {unequal[0]} points from FedAvg when all clients took part in each round and {unequal[1]} when half of them did.
- **PyTorch DDP:** usually not TCS. At 10 million parameters and 10 Mbit/s, one step takes {plain:.0f} seconds with plain DDP, {bf16:.0f} with the bf16 hook, {hook10:.1f} with our hook at 10 %, {hook1:.1f} at 1 % and {power:.1f} with PowerSGD. Our hook costs {loss10} nats of test loss at 10 % and {loss1} at 1 % (AdamW, a small GPT); what PowerSGD costs is not measured yet. On one machine, or at 10 Gbit/s, do not sparsify: plain DDP or its bf16 hook is faster."""
SIZE = """- **Not tested at the paper's size.** There is no run of 300 epochs with the full ResNet-18. With {share} of these epochs on a GPU, one run of each method ended, in points from centralized training, at {} (TCS), {} (FedAvg), {} (top-K) and {} (TCS-L4-Q5). What we predict for the full length stands in [notebook 13](notebooks/13_evidence.ipynb)."""
SIZE_TESTED = """- **At the paper's size**, see the runs beside our prediction in [notebook 13](notebooks/13_evidence.ipynb). With {share} of the epochs, one run of each method ended, in points from centralized training, at {} (TCS), {} (FedAvg), {} (top-K) and {} (TCS-L4-Q5)."""
RATES = """- **The learning rates are the paper's** and nobody tuned them for these trainings. At higher rates FedAvg ended {fedavg} points higher (twice the rate, one seed) and TCS {tcs} points higher (the paper's higher rate, {n} seeds), but centralized training did not. So the gaps to centralized training may come from rates that were too low. {tuned}"""
UNDER_WAY = """The comparison in which every method gets its own best rate (`params/fair_plan.yaml`) is under way: {made} of {planned} runs are made, and we draw no conclusion before it is complete. The same holds for the controls with random and outdated masks (`params/controls_plan.yaml`)."""
ALL_MADE = """A comparison at tuned rates is in [notebook 13](notebooks/13_evidence.ipynb)."""
MOMENTUM = """- **Momentum.** The answers above are about SGD without momentum, as in the paper's first table. Momentum raises centralized training by {helps} points, and TCS without momentum ended {with_momentum}."""
PLAN = """- **Planned before measured.** The plan of the evidence ([params/evidence_plan.yaml](params/evidence_plan.yaml), [params/claims.yaml](params/claims.yaml)) was committed in {commit} on {day}, before its first record and after smaller trainings and a pilot run. Of {planned} planned runs, {made} are made; {missing}."""


# Records ──────────────────────────────────────────────────────────────────────────────────────────


def params(*names: str) -> dict[str, Any]:
    return lab.read_params([ROOT / f"params/{name}.yaml" for name in names])


@cache
def records(scheme: str, profile: str, **changes: Any) -> list[Record]:
    """The finished records of a scheme at Table 1's rate in a profile, by seed."""
    seeds = {} if profile == PROFILE else {"seeds": 100}
    asked = params("table1", profile) | seeds | {"schemes": [scheme]} | changes
    return list(lab.recorded(lab.plan(asked), diverged=False).values())


def stands(stage: str) -> bool:
    """Whether all runs of a stage of the plan are made."""
    planned = lab.planned_runs(ROOT / "params/evidence_plan.yaml")[stage]
    return len(lab.recorded(planned)) == len(planned)


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
    return lab.megabytes_figure(table, f"{title}{config['epochs']} epochs", NAMES)


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
        lab.difference(read, found, (name, 0.5), ("Baseline", 0.1))
        for name in ("TCS", "TCS-L4-Q5", "FedAvg-L4")
    )
    times, times_short = whole_factors()
    config = drawn()["FedAvg"][0]["config"]
    assert (config["model"], config["width"]) == ("resnet18", 16)  # as the sentence says
    stay = lab.recurring(r for r in found.values() if r["config"]["scheme"]["name"] == "FedAvg")
    made, planned = planned_and_made()
    return OUTCOME.format(
        clients=config["clients"], epochs=config["epochs"], n=tcs["n"], times=f"{times:.0f}",
        times_short=f"{times_short:.0f}", tcs=apart(tcs, CENTRAL), short=apart(short, "it"),
        dense_short=f"{abs(dense['measured']):.2f}", stay=f"{100 * stay['seen']:.0f} %",
        made=made, planned=planned,
    )  # fmt: skip


def planned_and_made() -> tuple[int, int]:
    """How many runs of the tuned comparison and of its controls are made, and how many planned."""
    tuned = lab.fair_counts(ROOT / "params/fair_plan.yaml")
    controls = lab.made_of(lab.planned_runs(ROOT / "params/controls_plan.yaml"))
    made, planned = (
        tuned[f"tuning {word}"] + tuned[f"scoring {word}"] + int(controls[word].sum())
        for word in ("made", "planned")
    )
    return made, planned


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
    return lab.planned_records(PROFILE)


@cache
def judged_rows() -> dict[str, dict[str, Any]]:
    """The claims by name, by the analysis that was planned."""
    return {row["claim"]: row for row in lab.judged(*judged_records()).to_dict("records")}


def compared_table() -> str:
    """The paper's differences to centralized training and ours, method by method."""
    read, found = judged_records()
    paper = {}
    for table in ("table1", "table3"):
        paper = params(table)["paper"] | paper
    rows = [list(TABLE), ["---"] * len(TABLE)]
    for name, words, other in COMPARED:
        row = lab.difference(read, found, (name, 0.5), (other, 0.1))
        word = lab.decided(row["measured"], row["half"], -0.5)
        theirs = round(paper[name][0] - paper[other][0], 2) + 0.0  # no minus before a zero
        ours = f"{interval(row)}, n = {row['n']}"
        rows.append([words, f"{theirs:+.2f}".replace("-", "−"), ours, ANSWERS[word]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


COMPARED = (
    ("TCS", "TCS", "Baseline"),
    ("TCS-L4-Q5", "TCS with 4 local steps and 5-bit values (TCS-L4-Q5)", "Baseline"),
    ("top-K", "Top-K with error feedback", "Baseline"),
    ("TCS-Global Momentum", "TCS with global momentum, to centralized training with momentum", "Baseline-Momentum"),
)  # fmt: skip
ANSWERS = {"supported": "yes", "contradicted": "**no**", "open": "open"}


def verdicts_block() -> str:
    """The table of differences, and the answers to the paper's other main questions."""
    read, found = judged_records()
    rows, dense = judged_rows(), drawn()
    words = {name: lab.said(row).partition(":")[0] for name, row in rows.items()}
    after = [lab.bits_per_parameter(dense[name][0]) for name in ("TCS", "TCS-L4-Q5")]
    shares = lab.recurring(r for r in found.values() if r["config"]["scheme"]["name"] == "FedAvg")
    fedavg = lab.difference(read, found, ("FedAvg", 0.5), ("Baseline", 0.1))
    return VERDICTS.format(
        **words,
        table=compared_table(),
        level=fmean(final(dense["Baseline"]).values()),
        up=[lab.times(32 / bits["uplink"]) for bits in after],
        theirs=[lab.times(lab.paper_factor(name)) for name in ("TCS", "TCS-L4-Q5")],
        whole=whole_factors(),
        warm=dense_share(dense["TCS-L4-Q5"]),
        down=downlink_share(dense["TCS-L4-Q5"]),
        fedavg=apart(fedavg, CENTRAL),
        sparse=interval(rows["cost"]),
        sparse_short=interval(rows["cost-4-q5"]),
        topk_less=both_ways(dense["top-K"]) / both_ways(dense["TCS"]),
        seen=f"{100 * shares['seen']:.0f} %",
        by_layers=f"{100 * shares['by_layers']:.0f} %",
        count=rows["slowly"]["n"],
    )


def interval(row: dict[str, Any]) -> str:
    return lab.with_interval(*(row[key] for key in ENDS))


def apart(row: dict[str, Any], other: str, more: str = "") -> str:
    """A difference in words, like "0.17 points below it (interval −0.34 to −0.01)"."""
    way = "below" if row["measured"] < 0 else "above"
    ends = interval(row).partition(" ")[2].strip("()")
    return f"{abs(row['measured']):.2f} points {way} {other} (interval {ends}{more})"


CENTRAL = "centralized training"
ENDS = ("measured", "low", "high")


# What to use ──────────────────────────────────────────────────────────────────────────────────────


@cache
def at_best_rates(profile: str) -> dict[str, list[Record]]:
    """The rivals' records of notebook 17, of each at the best of the rates tried."""
    sweep = lab.read_sensitivity(ROOT / f"params/rivals_{profile}.yaml")
    points = lab.sensitivity_plan(sweep, params(profile) | {"seeds": 5}, "learning_rate")
    found = {point: lab.recorded(group) for point, group in points.items()}
    best = lab.best_values(found)
    return {name: list(found[rate, name].values()) for name, rate in best.items()}


def against_dense(found: dict[str, list[Record]], *names: str) -> list[str]:
    """n, times fewer bytes than FedAvg both ways, and points from it, of schemes."""
    dense = found["FedAvg"]
    less, points = [], []
    for name in names:
        ratio = both_ways(dense) / both_ways(found[name])
        less.append(f"{name} {lab.times(ratio)}")
        points.append(f"{name} {lab.with_interval(*difference(found[name], dense))}")
    counts = {len(found[name]) for name in (*names, "FedAvg")}
    assert len(counts) == 1, f"{names}: got n = {counts}, allowed: one n"
    return [f"n = {counts.pop()}", "<br>".join(less), "<br>".join(points)]


def unequal_row() -> list[str]:
    """From the last part of 10b: classes by Dirichlet, with all clients, then with some of them. Named
    is what may be used: no difference is wholly below the half point that "no loss" allows."""
    (read, equal), schemes = judged_records(), ("TCS", "TCS-L4-Q5")
    there = lab.unequal_records(read, params(PROFILE))
    table = lab.unequal(read, equal, there)
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
        less.append(f"{name} {lab.times(ratio)} (all)")
        points.append(f"{name} {', '.join(lab.with_interval(*row) for row in ends.to_numpy())}")
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
    judged = optimizers.Judged(optimizers.read_plan())
    dense = 4 * sum(judged.sizes)
    less, losses, counts, rates = [], [], set(), set()
    for share in SHARES:
        cell = optimizers.Cell("AdamW", f"TCS {share}")
        found = [record for (of, _), record in judged.records.items() if of == cell]
        counts.add(len(found))
        sparse = optimizers.bytes_a_step(found[0], judged.sizes)
        steps = judged.plan["dense_steps"], judged.plan["sparse_steps"]
        ratio = dense * sum(steps) / (dense * steps[0] + sparse * steps[1])
        less.append(f"{share}: {lab.times(ratio)}")
        cost = judged.cost(cell)
        losses.append(f"{share}: {lab.with_interval(cost.value, cost.low, cost.high)}")
        rates.update(measured.pays_to(f"TCS {share}", "bf16", *net) for net in nets)
    up_to, large = min(rates), nets[1]
    steps = [f"{share}: {over_bf16(measured, share, large)}" for share in SHARES]
    where = f"12: GPT of {sum(judged.sizes):,} parameters, AdamW, {found[0]['steps']:,} steps, n = {counts.pop()}"
    loss = f"Test loss, nats (more is worse)<br>{'<br>'.join(losses)}"
    fast = f"12: {links.parameters(*large) // 10**6} million parameters, two CPU processes"
    time = f"Step time ÷ bf16 hook's at {FASTEST:,} Mbit/s<br>{'<br>'.join(steps)}"
    a_step = [f"{share}: {lab.times(less_a_step(f'TCS {share}', large))}" for share in SHARES]
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
    return sum(links.handed_over("plain", *net)) / sum(links.handed_over(way, *net))


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
    often = [lab.turns(short[name][0]) for name in few]
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
    plans = lab.planned_runs(ROOT / "params/evidence_plan.yaml")
    table = lab.made_of(plans)
    devices = {r["provenance"]["device"] for r in lab.recorded(chain(*plans.values())).values()}
    assert devices == {"AMD EPYC", "NVIDIA H200", "NVIDIA H100 80GB HBM3"}  # as the sentence says
    hours = table["hours"].sum()
    days = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}[round(hours / 24)]
    return EVIDENCE.format(days=days, made=table["made"].sum(), hours=hours)


def less_and_points(found: dict[str, list[Record]], name: str) -> tuple[str, str]:
    """How many times fewer bytes than FedAvg a scheme needs, and its difference in accuracy."""
    dense = found["FedAvg"]
    ratio = both_ways(dense) / both_ways(found[name])
    return lab.times(ratio), lab.with_interval(*difference(found[name], dense))


def advice_block() -> str:
    """Which method to use, in sentences."""
    images, text = at_best_rates("small"), at_best_rates("text")
    short = {name: records(name, "short", seeds=3) for name in ("FedAvg", "TCS", "TCS-L4-Q5", "FedAvg-L4")}  # fmt: skip
    config = images["FedAvg"][0]["config"]
    few = [lab.with_interval(*difference(short[name], short["FedAvg"])) for name in ("TCS", "TCS-L4-Q5")]  # fmt: skip
    few[1] = few[1].removeprefix("−")
    few.append(f"{abs(difference(short['FedAvg-L4'], short['FedAvg'])[0]):.2f}")
    assert short["FedAvg"][0]["config"]["epochs"] == 15  # as the sentence says
    return ADVICE.format(
        images_setting=f"a small training ({config['image_size']} × {config['image_size']} pixels, {config['epochs']} epochs)",
        images_tcs=less_and_points(images, "TCS"),
        images_stc=less_and_points(images, "STC"),
        images_n=len(images["TCS"]),
        dgc=less_and_points(text, "DGC"),
        tcs_q5=less_and_points(text, "TCS-Q5"),
        often=[lab.turns(short[name][0]) for name in ("TCS", "TCS-L4-Q5")],
        few=few,
        **unequal_numbers(),
        **ddp_numbers(),
    )


def unequal_numbers() -> dict[str, Any]:
    """How TCS ends against FedAvg where clients have unequal classes."""
    read, equal = judged_records()
    there = lab.unequal_records(read, params(PROFILE))
    table = lab.unequal(read, equal, there).query(
        "where == 'there' and second == 'FedAvg' and first == 'TCS'"
    )
    skewed = [title for title, how in read.unequal.settings.items() if "dirichlet_alpha" in how]
    rows = table.set_index("setting").loc[skewed].to_dict("records")
    configs = [next(iter(there[title].values()))["config"] for title in skewed]
    assert [config["participation"] for config in configs] == [1.0, 0.5]  # as the sentence says
    return {"alpha": configs[0]["dirichlet_alpha"], "unequal": [interval(row) for row in rows]}


def ddp_numbers() -> dict[str, str]:
    """Seconds of a step of 10 million parameters at 10 Mbit/s, and what sparse steps cost in loss."""
    measured, judged = links.Links(links.read_rows()), optimizers.Judged(optimizers.read_plan())
    ways = {"plain": "plain", "bf16": "bf16", "hook10": "TCS 10 %", "hook1": "TCS 1 %", "power": "PowerSGD"}  # fmt: skip
    seconds = {key: measured.row(way, 10, 1000, mbit=10)["seconds"] for key, way in ways.items()}
    costs = {
        f"loss{share}": judged.cost(optimizers.Cell("AdamW", f"TCS {share} %")) for share in (1, 10)
    }
    for way in ("TCS 10 %", "TCS 1 %"):  # on the fastest link, and without one, plain or bf16 win
        for mbit in (FASTEST, None):
            ours = measured.row(way, 4, 5000, mbit=mbit)["seconds"]
            assert any(
                measured.row(w, 4, 5000, mbit=mbit)["seconds"] < ours for w in ("plain", "bf16")
            )
    said = {key: lab.with_interval(c.value, c.low, c.high) for key, c in costs.items()}
    return seconds | said


NOTEBOOKS = {  # group: notebook: question, minutes on two cores, with an exercise
    "Learn": {
        "01_fedavg": ("How do many clients train one model?", 1, True),
        "02_sparsification": ("What is lost if only the largest entries are sent?", 1, True),
        "03_tcs": ("How does TCS share a mask, and why does that work?", 1, True),
        "04_layerwise_fairness": ("Should every layer get its share of the mask?", 1, True),
        "05_global_momentum": ("How does momentum work if every side knows the update?", 1, True),
        "06_sparse_encoding": ("How many bits does a position need?", 1, True),
        "07_fractional_quantization": ("How can a value be sent in five bits?", 1, True),
    },
    "Reproduce": {
        "00_reproduce": ("What do all tables and figures of the paper look like here?", 5, False),
        "08_tables_and_curves": ("How do I draw one table, for a training of my choice?", 1, False),
        "10_bits_on_the_wire": ("Which bytes does each scheme really send?", 1, False),
        "13_evidence": ("Which of the paper's claims hold, and how sure is that?", 1, False),
        "14_sensitivity": ("What does each setting change?", 1, False),
    },
    "Use": {
        "09_your_own_scheme": ("How do I add a scheme of my own and compare it?", 1, False),
        "11_performance": ("Where does the time of a round go?", 2, False),
        "12_real_training": ("What does the DDP hook cost and save?", 1, False),
        "15_your_own_model": ("What would TCS save on my model?", 1, False),
        "18_flower": ("How does TCS run inside Flower?", 1, False),
    },
    "Compare": {
        "10b_fewer_bytes": ("Can one send fewer bytes than the paper?", 1, False),
        "16_text": ("Does it work for a language model?", 1, False),
        "17_rivals": ("How do nine methods by other authors compare?", 1, False),
    },
}


def notebooks_block() -> str:
    rows = ["| | Notebook | Question | Minutes | Exercises |", "| --- | --- | --- | --- | --- |"]
    for group, notebooks in NOTEBOOKS.items():
        for i, (name, (question, minutes, exercise)) in enumerate(notebooks.items()):
            first = f"**{group}**" if not i else ""
            link = f"[{name.replace('_', ' ', 1)}](notebooks/{name}.ipynb)"
            rows.append(
                f"| {first} | {link} | {question} | {minutes} | {'yes' if exercise else ''} |"
            )
    return "\n".join(rows)


def reproducibility_block() -> str:
    """The evidence's plan: its commit, and how much of it is made."""
    table = lab.made_of(lab.planned_runs(ROOT / "params/evidence_plan.yaml"))
    missing = table[table["made"] < table["planned"]]
    words = "; ".join(
        f"{row.planned - row.made} of stage {row.stage} are missing" for row in missing.itertuples()
    )
    counts = {"planned": table["planned"].sum(), "made": table["made"].sum()}
    return PLAN.format(**counts, **PLANNED_IN, missing=words or "none is missing")


PLANNED_IN = {"commit": "277d2f2", "day": "25 November 2026"}


def limits_block() -> str:
    return f"{at_the_papers_size()}\n{at_other_rates()}\n{about_momentum()}"


def about_momentum() -> str:
    read, found = judged_records()
    row = lab.difference(read, found, ("TCS", 0.5), ("Baseline-Momentum", 0.1))
    helps = judged_rows()["momentum-baseline"]["measured"]
    return MOMENTUM.format(
        helps=f"{helps:.2f}", with_momentum=apart(row, "that", f"; n = {row['n']}")
    )


def at_the_papers_size() -> str:
    """Final accuracies of profile gpu at its own length, one seed, in points from the Baseline; and
    whether there are runs of the paper's length."""
    names = ("Baseline", "TCS", "FedAvg", "top-K", "TCS-L4-Q5")
    asked = params("table1", "gpu") | {"schemes": list(names), "seeds": [0]}
    found = [lab.read_record(file) for file in sorted((ROOT / "results/gpu/runs").glob("*.json"))]
    long = [
        r for r in found if r["config"]["epochs"] == asked["epochs"] and not r["config"]["seed"]
    ]
    ends = {r["config"]["scheme"]["name"]: 100 * r["rows"][-1]["accuracy"] for r in long}
    share = params("paper")["epochs"] / asked["epochs"]
    gaps = [lab.with_interval(ends[n] - ends["Baseline"], math.nan, math.nan) for n in names[1:]]
    tested = lab.predicted(ROOT / "params/prediction.yaml")["n"].any()
    return (SIZE_TESTED if tested else SIZE).format(*gaps, share={5.0: "a fifth"}[share])


def at_other_rates() -> str:
    """What higher rates gave, and how far the comparison at tuned rates is.

    One seed at twice the plan's rate counts as higher where it is outside the range at that rate;
    TCS at the paper's higher rate is as judged."""
    twice, over = params(PROFILE)["reference_batch"] // 2, {}
    planned = lab.planned_runs(ROOT / "params/evidence_plan.yaml")["rates"]
    for config in (config for config in planned if config.reference_batch == twice):
        usual = final(records(config.scheme.name, PROFILE)).values()
        (now,) = final(lab.recorded([config]).values()).values()
        inside = min(usual) <= now <= max(usual)
        over[config.scheme.name] = 0.0 if inside else now - fmean(usual)
    assert not over["TCS-L4-Q5"] and not over["Baseline"]
    higher = judged_rows()["eta"]
    n = {"3": "three"}[str(higher["n"]).split()[0]]
    counts = lab.fair_counts(ROOT / "params/fair_plan.yaml")
    made, planned = (sum(counts[f"{kind} {what}"] for kind in ("tuning", "scoring"))
                     for what in ("made", "planned"))  # fmt: skip
    return RATES.format(
        fedavg=f"{over['FedAvg']:.2f}",
        tcs=f"{higher['measured']:.2f}",
        n=n,
        tuned=UNDER_WAY.format(made=made, planned=planned) if made < planned else ALL_MADE,
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
        f"every client sends the same {100 * scheme.phi_global:g} % of its update",
        f"adds the largest {100 * scheme.phi_local:g} % of the other entries",
    ]


def situations_page() -> str:
    """results/which_method.md: all comparisons behind README's advice, with their intervals."""
    lines = [SITUATIONS, ["---"] * len(SITUATIONS), *situations()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{PAGE}\n\n{table}\n"


PAGE = """# Which method in which situation

Written by `tests/readme_table.py` from the records in this folder. Bytes are counted in both directions and include the dense start; in the last row they are those of one sparse step. Intervals are 95 % intervals; n is the number of seeds."""


if __name__ == "__main__":
    README.write_text(with_blocks(README.read_text(encoding="utf-8")), encoding="utf-8")
    SITUATIONS_PAGE.write_text(situations_page(), encoding="utf-8")
    lab.save_figure(picture(), picture_path())
