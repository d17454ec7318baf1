"""README's picture, verdicts and table, from records, params and formulas.

    uv run python tests/readme_table.py

writes them between their comments, and the picture beside its records: the row on unequal clients
once their runs are made. Other numbers in sentences stand in `numbers`, with the words around them;
test_readme.py compares all.
"""

import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import tcs_lab as lab
from tcs_lab.studies import links, optimizers

import tcs_core as tcs

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PROFILE = "evidence"  # of the picture, of traffic and verdicts
DRAWN = ("Baseline", "FedAvg", "top-K", "TCS", "FedAvg-L4", "TCS-L4", "TCS-L4-Q5")
CAPTION = (
    "The picture shows the bytes of one client in both directions and the final accuracy, for {net} on half of {data} at "
    "{pixels} × {pixels} pixels, with {clients} equal clients, {epochs} epochs (`params/{profile}.yaml`) and {n} seeds. "
    "FedAvg sends everything, and the Baseline is centralized training. `-L4` means four local steps per round, and `-Q5` "
    "means 5-bit values."
)
TRAFFIC = (
    "**Traffic follows from counting.** Over the whole training and in both directions, TCS sends {whole[0]:.0f} times fewer "
    "bytes than FedAvg, and TCS-L4-Q5 {whole[1]:.0f} times fewer (local steps alone account for {local}). Of the bytes of "
    "TCS-L4-Q5, {warm} are the dense first epoch, and {down} of the rest is what the server sends. After that epoch, the uplink "
    "is {up[0]} and {up[1]} times smaller than that of dense training (by the paper's tables {theirs[0]} and {theirs[1]} times)."
)
ACCURACY = (
    "**Accuracy.** We ask whether a scheme ends at most half a point below centralized training. The answer is *supported* if the "
    "whole 95 % interval lies there, by a regression that was [planned](params/claims.yaml) before the runs (seeds: {n}).\n\n"
    "- **TCS: {parity}.** It ended {tcs}. Dense FedAvg ended {fedavg}. So at these learning rates sparsification itself changed the "
    "accuracy by {sparse} points.\n"
    "- **TCS-L4-Q5: {x2000-parity}.** It ended {short}. Dense FedAvg-L4 already ended {fedavg_l4}. Sparsification and 5-bit values "
    "changed the accuracy by {sparse_short} points. (An earlier plan had a rule by which this question would not be testable here; see "
    "[13_evidence](notebooks/13_evidence.ipynb).)\n"
    "- **Momentum.** Both answers are about SGD without momentum, as in the paper's Table 1. With momentum, centralized training "
    "ends higher: TCS ended {with_momentum}.\n"
    "- **Top-K.** Whether TCS ends above top-K is {top-K}."
)
PREMISE = (
    "**Premise.** The paper assumes that important entries stay important for a while. Of the 1 % of entries that are largest in "
    "FedAvg's update, {seen} are among the largest of the next round as well (n = {n}). By chance it would be {by_layers} for masks "
    "with as many entries in every layer, and {by_chance} for masks drawn from all entries. That entries recur more often than by "
    "chance given the layers is **{correlation}**, but what the layers leave unexplained is only {share} of what could recur. That "
    "it is half of that, a bound of ours, is **{slowly}**."
)
SENDS = (
    "Multiply the number of rounds by φ, the fraction that is sent per round, to see how often the average entry is sent. "
    "Where that is only about ten times, accuracy was much lower in our runs, but few sends are only a part of the reason. In "
    "`short`, where TCS-L4-Q5 ended {short[1]} points from FedAvg, dense FedAvg-L4 had already ended {short[0]} points from it "
    "(n = {n}). In `evidence`, it accounts for {evidence[0]} of the {evidence[1]} points between TCS-L4-Q5 and "
    "centralized training. None of these learning rates was tuned for local steps."
)

TESTED = "- **At the paper's length** see the runs beside their prediction in [13_evidence](notebooks/13_evidence.ipynb). "
NOT_TESTED = "- **Not tested at the paper's length.** There is no run of the paper's 300 epochs at the paper's size. "
SIZE = (
    "One run of each method with {share} of these epochs ended, in points from the Baseline, at {} (TCS), {} (FedAvg), {} (top-K) "
    "and {} (TCS-L4-Q5); see [13_evidence](notebooks/13_evidence.ipynb), also for what we predict for the full length."
)
RATES = (
    "- **Learning rates** are the paper's, and nobody tuned them for these trainings. At higher rates FedAvg ended {fedavg} points "
    "higher (twice the rate, one seed) and TCS {tcs} points higher (the paper's higher rate, {n} seeds), but the Baseline did not. "
    "So the gaps of FedAvg and TCS to centralized training may come from learning rates that were too low. {tuned}"
)
UNDER_WAY = (
    "A comparison in which every method has its own tuned rate (`params/fair_plan.yaml`) is under way: {made} of {planned} runs are "
    "made, and no verdict is drawn before it is whole."
)
ALL_MADE = "A comparison at tuned rates is in [13_evidence](notebooks/13_evidence.ipynb)."


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


def setting(record: Record) -> dict[str, Any]:
    """What a record trained, in words."""
    config = record["config"]
    net = {"resnet8": "ResNet-8", "resnet18": "ResNet-18"}[config["model"]]
    if config["model"] == "resnet18" and config["width"] == 16:
        net += ", a quarter as wide,"
    words = ("data_label", "epochs", "clients", "image_size")
    label, epochs, clients, pixels = (config[word] for word in words)
    return {"net": net, "data": label, "epochs": epochs, "clients": clients, "pixels": pixels}


def picture() -> Any:
    """Final accuracy against megabytes."""
    found = drawn()
    first = found["FedAvg"][0]
    said = setting(first)
    said["net"] = said["net"].removesuffix(",")
    title = "{data} at {pixels} × {pixels}, {net}, {epochs} epochs"
    table = lab.summary([record for of in found.values() for record in of])
    return lab.megabytes_figure(table, title.format(**said))


def picture_path() -> Path:
    """Without a suffix."""
    return ROOT / f"results/{PROFILE}/megabytes"


def picture_block() -> str:
    """The picture and its caption."""
    found = drawn()
    counts = {len(of) for of in found.values()}
    n = f"{min(counts)} or more" if len(counts) > 1 else min(counts)
    caption = CAPTION.format(**setting(found["FedAvg"][0]), profile=PROFILE, n=n)
    file = picture_path().relative_to(ROOT).as_posix()
    return f"![Final accuracy against megabytes, by scheme]({file}.png)\n\n{caption}"


# The verdicts ─────────────────────────────────────────────────────────────────────────────────────


def traffic() -> str:
    """Counted in the picture's training, and by the paper's formula for its net."""
    found, names = drawn(), ("TCS", "TCS-L4-Q5")
    dense = both_ways(found["FedAvg"])
    local = round(dense / both_ways(found["FedAvg-L4"]))
    after = [lab.bits_per_parameter(found[name][0]) for name in names]
    return TRAFFIC.format(
        whole=[dense / both_ways(found[name]) for name in names],
        warm=dense_share(found[names[1]]),
        down=downlink_share(found[names[1]]),
        local={4: "a factor of four"}[local],
        up=[lab.times(32 / bits["uplink"]) for bits in after],
        theirs=[lab.times(lab.paper_factor(name)) for name in names],
    )


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


def judged_verdicts() -> list[str]:
    """Accuracy and premise, from the analysis that was planned."""
    read, found = judged_records()
    rows = judged_rows()
    words = {name: re.sub(": (.*)", r" (\1)", lab.said(row)) for name, row in rows.items()}
    split = lab.decomposed(read, found)
    (tcs_gap, fedavg, sparse), (short, fedavg_l4, sparse_short) = (
        part.to_dict("records") for _, part in split.groupby("chain")
    )
    momentum = lab.difference(read, found, ("TCS", 0.5), ("Baseline-Momentum", 0.1))
    accuracy = ACCURACY.format(
        **words, n=seeds_of(split["n"]), tcs=apart(tcs_gap, CENTRAL),
        short=apart(short, CENTRAL), fedavg=apart(fedavg, "it"),
        fedavg_l4=apart(fedavg_l4, "it"), sparse=interval(sparse),
        sparse_short=interval(sparse_short), with_momentum=apart(momentum, "that", f"; n = {momentum['n']}"),
    )  # fmt: skip
    slowly, dense = rows["slowly"], found.values()
    shares = lab.recurring(r for r in dense if r["config"]["scheme"]["name"] == "FedAvg")
    said = {name: f"{100 * share:.3g} %" for name, share in shares.items()}
    said["share"] = f"{100 * slowly['measured']:.1f} %"
    return [accuracy, PREMISE.format(**words, **said, n=slowly["n"])]


def interval(row: dict[str, Any]) -> str:
    return lab.with_interval(*(row[key] for key in ENDS))


def apart(row: dict[str, Any], other: str, more: str = "") -> str:
    """A difference in words, like "0.17 points below it (interval −0.34 to −0.01)"."""
    way = "below" if row["measured"] < 0 else "above"
    ends = interval(row).partition(" ")[2].strip("()")
    return f"{abs(row['measured']):.2f} points {way} {other} (interval {ends}{more})"


def seeds_of(counts: Iterable[int]) -> str:
    """n of several differences."""
    numbers = sorted(set(counts))
    return f"n = {numbers[0]}" if len(numbers) == 1 else f"n ≥ {numbers[0]}"


CENTRAL = "centralized training"
ENDS = ("measured", "low", "high")


def verdicts_block() -> str:
    return "\n\n".join([traffic(), *judged_verdicts()])


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


def situations_block() -> str:
    lines = [SITUATIONS, ["---"] * len(SITUATIONS), *situations()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# All of it ────────────────────────────────────────────────────────────────────────────────────────


def sends_block() -> str:
    """What few sends explain, beside what dense training with as many local steps loses."""
    names = ("FedAvg-L4", "TCS-L4-Q5")
    short = {name: records(name, "short", seeds=3) for name in ("FedAvg", *names)}
    gaps = [difference(short[name], short["FedAvg"])[0] for name in names]
    read, found = judged_records()
    sides = [((name, 0.5), ("Baseline", 0.1)) for name in names]
    planned = [lab.difference(read, found, *pair)["measured"] for pair in sides]
    return SENDS.format(
        short=[lab.with_interval(gap, math.nan, math.nan) for gap in gaps],
        evidence=[f"{abs(gap):.2f}" for gap in planned],
        n=len(short["FedAvg"]),
    )


def limits_block() -> str:
    return f"{at_the_papers_size()}\n{at_other_rates()}"


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
    return (TESTED if tested else NOT_TESTED) + SIZE.format(*gaps, share={5.0: "a fifth"}[share])


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
    "picture": picture_block,
    "verdicts": verdicts_block,
    "situations": situations_block,
    "sends": sends_block,
    "limits": limits_block,
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
        f"the same {100 * scheme.phi_global:g} % of its update",
        f"Each client adds {100 * scheme.phi_local:g} % of its own choice",
    ]


if __name__ == "__main__":
    README.write_text(with_blocks(README.read_text(encoding="utf-8")), encoding="utf-8")
    lab.save_figure(picture(), picture_path())
