"""README's table, figures and numbers, from records, params and formulas.

    uv run python tests/readme_table.py

writes the table between its comments, and the figures beside the records. Numbers in sentences stand
in `numbers`, with the words around them and where they come from; test_readme.py compares them.
"""

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import tcs_lab as lab

import tcs_core as tcs

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- verdict: [^\n]*-->\n).*?(<!-- end of verdict -->)", re.S)
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
RIVALS = ("FedAvg", "QSGD", "top-K", "TCS", "EF-signSGD-D1", "STC")
DRAWN = ("Baseline", "FedAvg", "top-K", "TCS", "FedAvg-L4", "TCS-L4", "TCS-L4-Q5")


def params(*names: str) -> dict[str, Any]:
    return lab.read_params([ROOT / f"params/{name}.yaml" for name in names])


def evidence(scheme: str) -> list[dict[str, Any]]:
    """The finished records of a scheme at Table 1's rate in profile small, of 300 epochs."""
    asked = params("table1", "small") | {"schemes": [scheme], "seeds": 100, "epochs": EPOCHS}
    return list(lab.recorded(lab.plan(asked)).values())


def verdict() -> str:
    """Six claims, judged on the records of profile small, of 300 epochs."""
    read = lab.read_claims(ROOT / "params/claims.yaml")
    records = lab.claim_records(read, params("small") | {"epochs": EPOCHS})
    table = lab.judged(read, records).set_index("claim")
    readable = lab.readable_claims(table.loc[list(CLAIMS)].reset_index())
    written = lab.markdown(readable[list(COLUMNS)].rename(columns=COLUMNS))
    written = written.replace(" ---: |\n", " --- |\n", 1)  # the last column has words
    return written.replace("≥ ", "≥\N{NO-BREAK SPACE}")  # else a narrow page breaks the bound


def with_table(text: str) -> str:
    """README's text with the table as the records have it."""
    return BLOCK.sub(lambda match: match[1] + verdict() + "\n" + match[2], text)


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
    title = "Rivals at their best rates: CIFAR-10 (JPEG copy) at 8 × 8, ResNet-8"
    return lab.megabytes_figure(lab.summary(records), title)


FIGURES = {figure: ROOT / "results/small/megabytes", rivals: ROOT / "results/small/rivals"}


def intervals(claims: str, profile: str, **changes: Any) -> dict[str, str]:
    """Claims by their names in params/<claims>.yaml: ours, with its interval."""
    read = lab.read_claims(ROOT / f"params/{claims}.yaml")
    table = lab.judged(read, lab.claim_records(read, params(profile) | changes))
    return dict(zip(table["claim"], lab.readable_claims(table)["Ours (interval)"], strict=True))


def text_bits(scheme: str) -> float:
    """Bits per character at the end, of three seeds in profile text without momentum."""
    asked = params("text") | {"schemes": [scheme], "learning_rate": 1.0, "seeds": 3}
    ends = [record["rows"][-1]["loss"] for record in lab.recorded(lab.plan(asked)).values()]
    return sum(ends) / len(ends) / math.log(2)


def numbers() -> dict[str, Any]:
    """Words of README with a number in them: what the number should be."""
    one = evidence("Baseline")[0]
    budgets = {name: 32 / tcs.bit_budget(name) for name in ("TCS", "TCS-L4-Q5")}
    paper, small, short = params("paper"), params("small"), params("short")
    ours, theirs = one["dimension"], 11_173_962
    gaps = pd.read_csv(ROOT / "results/short/table1.csv").set_index("scheme")["difference"]
    lost = -100 * gaps[["TCS-L4", "TCS-L4-Q5"]].min()
    pixels = (32 / small["image_size"]) ** 2
    table = pd.Series(params("table1")["paper"]["TCS"])
    of_images, text = intervals("claims", "small"), intervals("claims_text", "text")
    longer = intervals("claims", "small", epochs=EPOCHS)
    bits = [text_bits(name) for name in ("TCS", "FedAvg")]
    sent = {name: lab.traffic(made[0]) for name, made in at_best_rates().items()}
    both = {name: flows["up"] + flows["down"] for name, flows in sent.items()}
    less = {name: both["FedAvg"] / flow for name, flow in both.items()}
    return {
        f"1/{budgets['TCS']:.0f} of the bits": "bit_budget",
        f"1/{round(budgets['TCS-L4-Q5'], -2):,.0f} with four": "bit_budget",
        f"with {ours:,} parameters": "record",
        f"first {small['train_samples']:,} images": "params/small.yaml",
        f"at {small['image_size']} × {small['image_size']}, {EPOCHS} epochs": "params/small.yaml",
        f"CIFAR-10, {paper['epochs']} epochs, n = {paper['seeds']}": "params/paper.yaml",
        f"at {table[0]:.0f} % in the paper": "params/table1.yaml",
        f"1/{theirs / ours:.0f} of the parameters": "record",
        {16.0: "a sixteenth of the pixels"}[pixels]: "params/small.yaml",
        {16: "a sixteenth of the images"}[
            round(50_000 / small["train_samples"])
        ]: "params/small.yaml",
        f"`short`\n({short['epochs']} epochs)": "params/short.yaml",
        f"Short trainings ({short['epochs']} epochs, profile": "params/short.yaml",
        f"lose up to {lost:.1f} points": "results/short/table1.csv",
        f"η 0.8, by {of_images['fair-high']}": "results/small/runs",
        f"with momentum TCS ends {of_images['momentum-parity']}": "results/small/runs",
        f"four dense ones end {longer['local-steps']} points": "results/small/runs",
        f"{small['epochs']} epochs, as first planned, they end {of_images['local-steps']}": "results/small/runs",
        f"TCS-L4-Q5 {of_images['x2000-parity']}, TCS {of_images['parity']}": "results/small/runs",
        f"{of_images['top-K']} from top-K": "results/small/runs",
        f"TCS-L4 ends {longer['local-4']} points": "results/small/runs",
        f"sends {longer['x2000-whole']} less, not {longer['x2000']}": "results/small/runs",
        f"STC {less['STC']:.0f} times, TCS {less['TCS']:.0f} times": "results/small/runs",
        f"round to round by {longer['slowly']}": "results/small/runs",
        "TCS ends at {:.3f} bits per character, dense training at {:.3f}".format(
            *bits
        ): "results/text/runs",
        f"from dense training by {text['cost-plain']}": "results/text/runs",
        f"from top-K by {text['top-k-plain']}": "results/text/runs",
        f"With global momentum it ends {text['cost']}": "results/text/runs",
        f"ends at {100 * one['rows'][-1]['accuracy']:.0f} % here": "record",
    }


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    for draw, path in FIGURES.items():
        lab.save_figure(draw(), path)
