"""README's table, figures and numbers, from records, params and formulas.

    uv run python tests/readme_table.py

writes the table between its comments, and the figures beside the records. Numbers in sentences stand
in `numbers`, with the words around them, by where they come from; test_readme.py compares them.
"""

import math
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import tcs_lab as lab

import tcs_core as tcs

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- (verdict|trainings): [^\n]*-->\n).*?(<!-- end of \2 -->)", re.S)
CLAIMS = ("x100", "x2000", "downlink", "x2000-parity", "parity", "top-K")
EPOCHS = 300  # as many as the paper's, twice as many as profile small has by itself
COLUMNS = {
    "The paper says": "The paper's claim",
    "Holds if": "Ours must be",
    "Paper (interval)": "The paper's figures",
    "Ours (interval)": "Ours",
    "n": "Our n",
    "Verdict": "Our verdict",
}
COMPARED = {  # claims and gates by their names in params/claims.yaml
    "dense": "FedAvg (gate)",
    "local-steps": "FedAvg-L4 (gate)",
    "parity": "TCS",
    "x2000-parity": "TCS-L4-Q5",
    "top-K": "TCS from top-K",
}
OPENS = {"holds": ", open", "does not hold": ", shut"}
RIVALS = ("FedAvg", "QSGD", "top-K", "TCS", "EF-signSGD-D1", "STC")
DRAWN = ("Baseline", "FedAvg", "top-K", "TCS", "FedAvg-L4", "TCS-L4", "TCS-L4-Q5")


def params(*names: str) -> dict[str, Any]:
    return lab.read_params([ROOT / f"params/{name}.yaml" for name in names])


def evidence(scheme: str, profile: str = "small", **changes: Any) -> list[dict[str, Any]]:
    """The finished records of a scheme at Table 1's rate, of 300 epochs unless `changes` says else."""
    asked = {"schemes": [scheme], "seeds": 100, "epochs": EPOCHS} | changes
    return list(lab.recorded(lab.plan(params("table1", profile) | asked)).values())


def final(scheme: str, **asked: Any) -> float:
    """Their mean final accuracy, in percent."""
    return fmean(100 * record["rows"][-1]["accuracy"] for record in evidence(scheme, **asked))


def bytes_less(records: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many times fewer bytes than FedAvg each sends, both ways, warm-up included."""
    flows = {name: lab.traffic(record) for name, record in records.items()}
    both = {name: flow["up"] + flow["down"] for name, flow in flows.items()}
    return {name: both["FedAvg"] / flow for name, flow in both.items()}


def verdict() -> str:
    """Six claims, judged on the records of profile small, of 300 epochs."""
    read = lab.read_claims(ROOT / "params/claims.yaml")
    records = lab.claim_records(read, params("small") | {"epochs": EPOCHS})
    table = lab.judged(read, records).set_index("claim")
    readable = lab.readable_claims(table.loc[list(CLAIMS)].reset_index())
    written = lab.markdown(readable[list(COLUMNS)].rename(columns=COLUMNS))
    written = written.replace(" ---: |\n", " --- |\n", 1)  # the last column has words
    return written.replace("≥ ", "≥\N{NO-BREAK SPACE}")  # else a narrow page breaks the bound


def trainings() -> str:
    """The same comparisons in trainings of two lengths and two sizes; of gates whether they open."""
    read, rows = lab.read_claims(ROOT / "params/claims.yaml"), []
    for profile, epochs in (("small", EPOCHS), ("small", 150), ("cpu", 150)):
        records = lab.claim_records(read, params(profile) | {"epochs": epochs})
        table = lab.judged(read, records).set_index("claim", drop=False)
        table["ours"] = lab.readable_claims(table)["Ours (interval)"].array
        table["ours"] += table["verdict"].map(OPENS).where(table["gate"]).fillna("")
        ends = [
            r["rows"][-1] for r in records.values() if r["config"]["scheme"]["name"] == "Baseline"
        ]
        level, loss = (fmean(end[key] for end in ends) for key in ("accuracy", "train_loss"))
        row = {
            "Training": f"`{profile}`, {epochs} epochs",
            "Baseline: %, loss": f"{100 * level:.1f}, {loss:.2f}",
        }
        ns = table.loc[list(COMPARED), "n"]
        row["n"] = "–".join(map(str, sorted({ns.min(), ns.max()})))
        rows.append(row | {label: table.loc[name, "ours"] for name, label in COMPARED.items()})
    return lab.markdown(pd.DataFrame(rows))


def with_table(text: str) -> str:
    """README's text with the tables as the records have them."""
    tables = {"verdict": verdict, "trainings": trainings}
    return BLOCK.sub(lambda match: match[1] + tables[match[2]]() + "\n" + match[3], text)


def figure() -> Any:
    """Final accuracy against megabytes, from the same records."""
    table = lab.summary([record for name in DRAWN for record in evidence(name)])
    return lab.megabytes_figure(table, "CIFAR-10 (JPEG copy) at 8 × 8, ResNet-8, 300 epochs")


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


FIGURES = {figure: ROOT / "results/small/megabytes", rivals: ROOT / "results/small/rivals"}


def intervals(claims: str, profile: str, **changes: Any) -> dict[str, str]:
    """Claims by their names in params/<claims>.yaml: ours, with its interval."""
    read = lab.read_claims(ROOT / f"params/{claims}.yaml")
    table = lab.judged(read, lab.claim_records(read, params(profile) | changes))
    return dict(zip(table["claim"], lab.readable_claims(table)["Ours (interval)"], strict=True))


def from_150(scheme: str) -> str:
    """A scheme after 300 epochs minus the Baseline after 150, in points."""
    ends = [
        {r["config"]["seed"]: 100 * r["rows"][-1]["accuracy"] for r in found}
        for found in (evidence(scheme), evidence("Baseline", epochs=150))
    ]
    common = ends[0].keys() & ends[1].keys()
    return lab.with_interval(*lab.mean_interval(ends[0][s] - ends[1][s] for s in common))


def text_bits(scheme: str) -> float:
    """Bits per character at the end, of three seeds in profile text without momentum."""
    asked = params("text") | {"schemes": [scheme], "learning_rate": 1.0, "seeds": 3}
    ends = [record["rows"][-1]["loss"] for record in lab.recorded(lab.plan(asked)).values()]
    return sum(ends) / len(ends) / math.log(2)


def of_settings() -> list[str]:
    """From params files, and from one record the size of its net."""
    paper, small, short = params("paper"), params("small"), params("short")
    ours, theirs = evidence("Baseline")[0]["dimension"], 11_173_962
    pixels, images = (32 / small["image_size"]) ** 2, round(50_000 / small["train_samples"])
    level = params("table1")["paper"]["TCS"][0]
    return [
        f"with {ours:,} parameters",
        f"first {small['train_samples']:,} images",
        f"at {small['image_size']} × {small['image_size']}, {EPOCHS} epochs",
        f"CIFAR-10, {paper['epochs']} epochs, n = {paper['seeds']}",
        f"at {level:.0f} % in the paper",
        f"{theirs / ours:.0f} times the parameters",
        {16: "sixteen times the images"}[images] + {16.0: " at sixteen times the pixels"}[pixels],
        f"`short` ({short['epochs']} epochs)",
        f"Short trainings ({short['epochs']} epochs, profile",
        f"had planned {small['epochs']} epochs",
        f"which has {small['epochs']} by itself",
    ]


def of_code(name: str, dimension: int) -> int:
    """Bits of one client's message, after the warm-up, in a net of so many parameters."""
    scheme = tcs.Scheme.named(name)
    shared, own = (
        tcs.kept(phi, dimension) if phi else 0 for phi in (scheme.phi_global, scheme.phi_local)
    )
    return tcs.Wire.up(scheme, [dimension]).block_code_bits(shared + own, own)


def of_bytes() -> list[str]:
    """From formulas, and from what the records of profile small sent."""
    budgets = {name: 32 / tcs.bit_budget(name) for name in ("TCS", "TCS-L4-Q5")}
    sent = intervals("claims", "small", epochs=EPOCHS)
    less = bytes_less({name: made[0] for name, made in at_best_rates().items()})
    ours, theirs = evidence("Baseline")[0]["dimension"], 11_173_962
    large = {name: of_code(name, theirs) for name in ("TCS-Q5", "top-K-Q5")}
    longer = bytes_less({name: evidence(name)[0] for name in ("FedAvg", "TCS", "TCS-L4-Q5")})
    return [
        f"1/{budgets['TCS']:.0f} of the bits",
        f"1/{round(budgets['TCS-L4-Q5'], -2):,.0f} with four",
        f"runs it sends 1/{float(sent['x100'][1:]):.0f} and 1/{sent['x2000'][1:]}",
        f"the same code gives ×{large['top-K-Q5'] / large['TCS-Q5']:.4g}",
        f"means take {32 * 16 / of_code('TCS-Q5', ours):.0%} of a message".replace("%", " %"),
        f"sends {sent['x2000-whole']} less, not {sent['x2000']}",
        f"TCS takes {longer['TCS']:.0f} times",
        f"TCS-L4-Q5 {longer['TCS-L4-Q5']:.0f} times",
        f"STC {less['STC']:.0f} times, TCS {less['TCS']:.0f} times",
    ]


def of_images() -> list[str]:
    """From the records of profiles small, cpu and short: accuracies and masks."""
    half, whole = intervals("claims", "small"), intervals("claims", "small", epochs=EPOCHS)
    table = pd.read_csv(ROOT / "results/small/claims.csv").query(
        "measure == 'accuracy' and not gate"
    )
    judged = table["verdict"].value_counts().to_dict()
    assert judged.keys() == {"not decided", "not testable here"}
    gaps = pd.read_csv(ROOT / "results/short/table1.csv").set_index("scheme")["difference"]
    large, brief = intervals("claims", "cpu"), intervals("claims", "short")
    shut = -0.5 - float(large["local-steps"].split()[0].replace("−", "-"))
    after = {name: from_150(name) for name in ("Baseline", "TCS", "TCS-L4-Q5")}
    asked = {"profile": "cpu", "epochs": 150, "seeds": 1}
    exact, rounded = (final("TCS", precision=p, **asked) for p in ("fp32", "bf16"))
    return [
        f"lose up to {-100 * gaps[['TCS-L4', 'TCS-L4-Q5']].min():.1f} points",
        f"η 0.8 ({half['fair-high']} points)",
        f"momentum does to TCS ({half['momentum']})",
        f"With momentum TCS ends {half['momentum-parity']}",
        f"TCS-Q5 sends {half['top-K-q5-bits']} less",
        f"steady them: {whole['observes-better']}",
        f"TCS-L4 ends {whole['local-4']} points",
        f"largest overlap by {whole['slowly']}",
        f"Baseline changes by {after['Baseline']} points",
        f"TCS-L4-Q5 ends {after['TCS-L4-Q5']} after 300, TCS {after['TCS']}.",
        f"ends {half['top-K']} points from top-K after 150, {brief['top-K']} in `short`",
        f"shut by {shut:.2f} points",
        f"TCS-L4 ends {large['cost-4']} points from FedAvg-L4",
        f"centralized training, by {large['momentum-baseline']} points",
        f"{judged['not decided']} are not decided, {judged['not testable here']} not testable",
        f"a run of TCS by {abs(exact - rounded):.2f} points",
        f"ends at {final('Baseline'):.0f} % here",
    ]


def of_text() -> list[str]:
    """From the records of profile text."""
    gaps = intervals("claims_text", "text")
    bits = "TCS ends at {:.3f} bits per character, dense training at {:.3f}"
    return [
        bits.format(*map(text_bits, ("TCS", "FedAvg"))),
        f"accuracy is {gaps['cost-plain']} points from dense training",
        f"TCS-L4-Q5's {gaps['cost-4-q5-plain']}",
        f"local steps cost {gaps['local-steps-plain'].split()[0]}.",
        f"{gaps['top-k-plain']} on text",
        f"With global momentum TCS ends {gaps['cost']}",
    ]


def numbers() -> list[str]:
    """Words of README with a number in them, as they should be."""
    return [*of_settings(), *of_bytes(), *of_images(), *of_text()]


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    for draw, path in FIGURES.items():
        lab.save_figure(draw(), path)
