"""README's figures and numbers, from records, params and formulas.

    uv run python tests/readme_table.py

writes the figures beside the records. Numbers in sentences stand in `numbers`, with the words around
them, by where they come from; test_readme.py compares them.
"""

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import tcs_lab as lab

import tcs_core as tcs

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RIVALS = ("FedAvg", "QSGD", "top-K", "TCS", "EF-signSGD-D1", "STC")
DRAWN = ("Baseline", "FedAvg", "top-K", "TCS", "FedAvg-L4", "TCS-L4", "TCS-L4-Q5")


def params(*names: str) -> dict[str, Any]:
    return lab.read_params([ROOT / f"params/{name}.yaml" for name in names])


def evidence(scheme: str, profile: str = "cpu", **changes: Any) -> list[dict[str, Any]]:
    """The finished records of a scheme at Table 1's rate in a profile."""
    asked = {"schemes": [scheme], "seeds": 100} | changes
    planned = lab.plan(params("table1", profile) | asked)
    return list(lab.recorded(planned, diverged=False).values())


def final(scheme: str, **asked: Any) -> float:
    """Their mean final accuracy, in percent."""
    return fmean(100 * record["rows"][-1]["accuracy"] for record in evidence(scheme, **asked))


def bytes_less(records: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many times fewer bytes than FedAvg each sends, both ways, warm-up included."""
    flows = {name: lab.traffic(record) for name, record in records.items()}
    both = {name: flow["up"] + flow["down"] for name, flow in flows.items()}
    return {name: both["FedAvg"] / flow for name, flow in both.items()}


def figure() -> Any:
    """Final accuracy against megabytes, from records of profile cpu."""
    table = lab.summary([record for name in DRAWN for record in evidence(name)])
    return lab.megabytes_figure(table, "CIFAR-10 (JPEG copy) at 16 × 16, ResNet-8, 150 epochs")


def at_best_rates() -> dict[str, list[dict[str, Any]]]:
    """The rivals' records in profile small, of each at its best rate."""
    sweep = lab.read_sensitivity(ROOT / "params/rivals_small.yaml")
    points = lab.sensitivity_plan(sweep, params("small") | {"seeds": 5}, "learning_rate")
    found = {point: lab.recorded(group) for point, group in points.items()}
    best = lab.best_values(found)
    return {name: list(found[rate, name].values()) for name, rate in best.items()}


def rivals() -> Any:
    """The same of six rivals, each at its best rate."""
    made = at_best_rates()
    records = [record for name in RIVALS for record in made[name]]
    title = "Rivals at their best rates, 150 epochs: CIFAR-10 (JPEG copy) at 8 × 8, ResNet-8"
    return lab.megabytes_figure(lab.summary(records), title)


FIGURES = {figure: ROOT / "results/cpu/megabytes", rivals: ROOT / "results/small/rivals"}


def counted(profile: str, **changes: Any) -> dict[str, str]:
    """Claims on bits and on masks, by their names in params/claims.yaml: ours."""
    read = lab.read_claims(ROOT / "params/claims.yaml")
    table = lab.judged(read, lab.claim_records(read, params(profile) | {"seeds": 100} | changes))
    rows = table[table["measured"].notna() & (table["measure"] != "accuracy")]
    return {row["claim"]: lab.numbers(row) for row in rows.to_dict("records")}


def ends(scheme: str, profile: str, **changes: Any) -> dict[int, float]:
    """Final accuracies in percent, by seed."""
    runs = evidence(scheme, profile, **changes)
    return {r["config"]["seed"]: 100 * r["rows"][-1]["accuracy"] for r in runs}


def paired(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """Difference over the seeds of both, with Student's interval."""
    common = ours.keys() & theirs.keys()
    return lab.with_interval(*lab.mean_interval(ours[s] - theirs[s] for s in sorted(common)))


def text_bits(scheme: str) -> float:
    """Bits per character at the end, of three seeds in profile text without momentum."""
    asked = params("text") | {"schemes": [scheme], "learning_rate": 1.0, "seeds": 3}
    found = lab.recorded(lab.plan(asked), diverged=False).values()
    return fmean(record["rows"][-1]["loss"] for record in found) / math.log(2)


def of_settings() -> list[str]:
    """From params files, and from one record the size of its net."""
    paper, cpu, small = map(params, ("paper", "cpu", "small"))
    ours, theirs = evidence("Baseline")[0]["dimension"], 11_173_962
    quarters = (
        cpu["train_samples"] / small["train_samples"],
        (cpu["image_size"] / small["image_size"]) ** 2,
        round(ours / evidence("Baseline", "small")[0]["dimension"]),
        round(50_000 / cpu["train_samples"]),
        (32 / cpu["image_size"]) ** 2,
    )
    assert set(quarters) == {4}
    return [
        f"with {ours:,} parameters",
        f"first {cpu['train_samples']:,} images",
        f"at {cpu['image_size']} × {cpu['image_size']}, {cpu['precision']}; `small` has a quarter",
        f"images, {paper['epochs']} epochs, n = {paper['seeds']}",
        f"at {params('table1')['paper']['TCS'][0]:.0f} % in the paper",
        f"{theirs / ours:.0f} times the parameters and sees four times the images at four times the",
    ]


def of_code(name: str, dimension: int) -> int:
    """Bits of one client's message, after the warm-up, in a net of so many parameters."""
    scheme = tcs.Scheme.named(name)
    shared, own = (
        tcs.kept(phi, dimension) if phi else 0 for phi in (scheme.phi_global, scheme.phi_local)
    )
    return tcs.Wire.up(scheme, [dimension]).block_code_bits(shared + own, own)


def of_bytes() -> list[str]:
    """From formulas, and from what the records of profiles cpu and small sent."""
    budgets = {name: 32 / tcs.bit_budget(name) for name in ("TCS", "TCS-L4-Q5")}
    sent, rivals = counted("cpu"), at_best_rates()
    less = bytes_less({name: made[0] for name, made in rivals.items()})
    ours, theirs = evidence("Baseline", "small")[0]["dimension"], 11_173_962
    large = {name: of_code(name, theirs) for name in ("TCS-Q5", "top-K-Q5")}
    whole = bytes_less(
        {name: evidence(name)[0] for name in ("FedAvg", "FedAvg-L4", "TCS", "TCS-L4-Q5")}
    )
    return [
        f"1/{budgets['TCS']:.0f} of the bits",
        f"1/{round(budgets['TCS-L4-Q5'], -2):,.0f} (there rounded to",
        f"Our messages take 1/{float(sent['x100'][1:]):.0f} and 1/{sent['x2000'][1:]}",
        f"the same code gives ×{large['top-K-Q5'] / large['TCS-Q5']:.4g}",
        f"means take {32 * 16 / of_code('TCS-Q5', ours):.0%} of a message".replace("%", " %"),
        f"sends {sent['x2000-whole']} less, not {sent['x2000']}",
        f"TCS takes {whole['TCS']:.0f} times and TCS-L4-Q5 {whole['TCS-L4-Q5']:.0f} times",
        f"is {whole['TCS-L4-Q5'] / whole['FedAvg-L4']:.0f} times fewer than FedAvg with four local steps",
        f"STC {less['STC']:.0f} times, TCS {less['TCS']:.0f} times",
    ]


def of_images() -> list[str]:
    """From the records of profiles cpu, small and short: accuracies and masks."""
    gaps = pd.read_csv(ROOT / "results/short/table1.csv").set_index("scheme")["difference"]
    base = ends("Baseline", "small")
    after = {
        n: paired(ends(n, "small", epochs=300), base) for n in ("Baseline", "TCS", "TCS-L4-Q5")
    }
    longer = [final(n, epochs=300) for n in ("Baseline", "FedAvg-L4", "TCS", "TCS-L4-Q5")]
    once = [lab.with_interval(end - longer[0], math.nan, math.nan) for end in longer[1:]]
    exact, rounded = (final("TCS", precision=p, seeds=1) for p in ("fp32", "bf16"))
    levels = final("Baseline", profile="small"), final("Baseline", profile="small", epochs=300)
    tcs_, high = ends("TCS", "cpu"), {"learning_rate": 0.8}
    faster = ends("TCS", "cpu", **high)
    brief = paired(ends("TCS", "short"), ends("top-K", "short"))
    return [
        f"ends at {final('Baseline'):.0f} % in `cpu`, at {levels[0]:.0f} % in `small` ({levels[1]:.0f} %",
        f"lower than after 150, by {after['Baseline']} points",
        f"TCS-L4-Q5 ends at {after['TCS-L4-Q5']}, TCS at {after['TCS']}.",
        "FedAvg-L4 ends {}, TCS {}, TCS-L4-Q5 {} points from the Baseline".format(*once),
        f"which ends {final('Baseline', seeds=1) - longer[0]:.2f} lower than after 150",
        f"{brief} points from top-K in `short`",
        f"fp32 instead of bf16 ended {abs(exact - rounded):.2f} points",
        f"Momentum helps TCS in `cpu`, by {paired(ends('TCS-Global Momentum', 'cpu'), tcs_)} points",
        f"lose up to {-100 * gaps[['TCS-L4', 'TCS-L4-Q5']].min():.1f} points",
        f"TCS-Q5 sends {counted('small')['top-K-q5-bits']} less",
        f"steady important entries: {counted('small', epochs=300)['observes-better']}",
        f"ends above η 0.5, by {paired(faster, tcs_)} points",
        f"(TCS-PLF) does not help: {paired(ends('TCS-PLF', 'cpu', **high), faster)}",
        f"(TCS-LF) at η 0.8 ({paired(ends('TCS-LF', 'cpu', **high), faster)} points",
        f"largest overlap by {counted('cpu')['slowly']}",
    ]


def of_text() -> list[str]:
    """From the records of profile text."""
    plain = {n: ends(n, "text", learning_rate=1.0)
             for n in ("FedAvg", "FedAvg-L4", "top-K", "TCS", "TCS-L4-Q5")}  # fmt: skip
    fast = {n: ends(f"{n}-Global Momentum", "text", learning_rate=0.1) for n in ("FedAvg", "TCS")}
    local = paired(plain["FedAvg-L4"], plain["FedAvg"])
    bits = "TCS ends at {:.3f} bits per character, dense training at {:.3f}"
    return [
        bits.format(*map(text_bits, ("TCS", "FedAvg"))),
        f"accuracy is {paired(plain['TCS'], plain['FedAvg'])} points from dense training",
        f"TCS-L4-Q5's is {paired(plain['TCS-L4-Q5'], plain['FedAvg'])}",
        f"local steps alone make {local.split()[0]}.",
        f"{paired(plain['TCS'], plain['top-K'])} on text",
        f"On text it does not, {paired(fast['TCS'], plain['TCS'])}",
        f"With global momentum TCS ends {paired(fast['TCS'], fast['FedAvg'])}",
    ]


def numbers() -> list[str]:
    """Words of README with a number in them, as they should be."""
    return [*of_settings(), *of_bytes(), *of_images(), *of_text()]


if __name__ == "__main__":
    for draw, path in FIGURES.items():
        lab.save_figure(draw(), path)
