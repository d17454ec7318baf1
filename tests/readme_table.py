"""README's numbers, from results/, params/ and the formulas: uv run python tests/readme_table.py

Tables stand between comments and are written here. Every other number that says something measured,
counted or configured is in `PROSE`, beside where it comes from; test_readme.py compares them.
"""

import json
import re
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tcs_lab as lab  # noqa: E402

import tcs_core as tcs  # noqa: E402

README = ROOT / "README.md"
EVIDENCE = ROOT / "results" / "cpu"
BLOCK = r"(<!-- {0}: [^\n]*-->\n).*?(\n?<!-- end of {0} -->)"
HEADLINE = ["Scheme", "Paper: accuracy %", "Ours: accuracy %", "n", "Paper: bits", "Sent up"]
REFERENCE = "TCS-L4-Q5"
BEYOND = [*(f"TCS-L4-M2-E3{end}" for end in ("-D2+", "-W10++", "++")), "TCS-M2-E3-K4++"]
CLAIMS = ["The paper says", "Paper (interval)", "Ours (interval)", "n", "Verdict"]


def headline() -> str:
    """Table 1 of the committed evidence as README shows it."""
    return lab.markdown(lab.readable(pd.read_csv(EVIDENCE / "table1.csv"))[HEADLINE])


def points(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def claims() -> str:
    """Every claim of the paper with its verdict."""
    judged = pd.read_csv(EVIDENCE / "claims.csv", keep_default_na=False, na_values=[""])
    return lab.markdown(lab.readable_claims(judged)[CLAIMS])


def of_scheme(name: str) -> list[dict]:
    """The finished records of a scheme at the evidence's settings, by seed."""
    asked = params("cpu") | {"learning_rate": 0.5, "schemes": [name], "seeds": 100}
    return list(lab.recorded(lab.plan(asked)).values())


def whole_runs() -> str:
    """Accuracy and bytes of whole runs, from the records; the first row is what all are measured by."""
    names = ["FedAvg", "FedAvg-L4", "top-K", "TCS", "TCS-L4", REFERENCE, *BEYOND]
    table = lab.summary([record for name in names for record in of_scheme(name)])
    assert table.scheme.tolist() == names
    sent = table.megabytes_up + table.megabytes_down
    readable = lab.readable(table)[["Scheme", "Ours: accuracy %", "n", "MB both ways"]]
    return lab.markdown(readable.assign(Less=[f"×{sent[0] / one:,.4g}" for one in sent]))


def price() -> str:
    """What TCS changes against dense training with as many local steps, and the shorter schemes
    against the paper's shortest and, with H = 1, against TCS."""
    compared = [("TCS", "FedAvg"), ("TCS-L4", "FedAvg-L4")] + [(name, REFERENCE) for name in BEYOND]
    at_one_step = [n for n in BEYOND if tcs.Scheme.named(n).local_steps == 1]
    return "\n".join(difference(*pair) for pair in compared + [(n, "TCS") for n in at_one_step])


def difference(name: str, base: str) -> str:
    """A sentence on two schemes, paired by seed."""
    theirs = {r["config"]["seed"]: r for r in of_scheme(base)}
    ours = {r["config"]["seed"]: r for r in of_scheme(name)}
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    gaps = [100 * (a["rows"][-1]["accuracy"] - b["rows"][-1]["accuracy"]) for a, b in pairs]
    mean, low, high = lab.mean_interval(gaps, 0.95)
    flows = [[lab.traffic(record) for record in side] for side in zip(*pairs, strict=True)]
    sent, before = (sum(flow["up"] + flow["down"] for flow in side) for side in flows)
    seen = "lower" if high < 0 else "higher" if low > 0 else "not decided"
    if seen == "not decided" and low >= -0.5:
        seen = "no loss"
    return (
        f"- {name} against {base}: {points(mean)} points of accuracy (95 % interval {points(low)} to "
        f"{points(high)}, {len(gaps)} seeds: {seen}), and {before / sent:.3g} times fewer bytes."
    )


def choices() -> str:
    """What a practitioner would choose, as notebook 14 has it."""
    sweep = lab.read_sensitivity(ROOT / "params/sensitivity.yaml")
    table = lab.sensitivity_table(sweep, params("cpu") | {"seeds": 100})
    return lab.markdown(lab.sensitivity_choices(table, sweep))


def lengths() -> str:
    """Accuracy in trainings of different lengths, and how far local steps fall behind in each."""
    sweep = lab.read_sensitivity(ROOT / "params/sensitivity.yaml")
    table = lab.sensitivity_table(sweep, params("cpu") | {"seeds": 100}, ["epochs"])
    rows = []
    for epochs, group in table[table["accuracy"].notna()].groupby("value", sort=False):
        ours = group.set_index("scheme")
        if not {"Baseline", "TCS", "TCS-L4-Q5"} <= set(ours.index):
            continue
        accuracy = 100 * ours["accuracy"]
        gaps = {f"{a} − {b}": accuracy[a] - accuracy[b] for a, b in BEHIND}
        rows.append({
            "Epochs": epochs,
            **{f"{name}, %": f"{accuracy[name]:.2f}" for name in ("Baseline", "TCS", "TCS-L4-Q5")},
            **{name: points(gap) for name, gap in gaps.items()},
            "n": str(ours["n"].min()),
        })  # fmt: skip
    return lab.markdown(pd.DataFrame(rows))


def timings(parts: str) -> dict[str, dict[str, dict]]:
    """Rows of the committed CPU bench record of these parts: of a case, by work."""
    record = json.loads((ROOT / "results/bench" / f"AMD-EPYC-fp32-{parts}.json").read_text())
    cases = {}
    for row in record["rows"]:
        if "work" in row:
            cases.setdefault(row["case"], {})[row["work"]] = row
    return cases


def speed() -> str:
    """Rounds over their bare passes; compression beside a textbook version of it."""
    rows = []
    for case, works in timings("round").items():
        net, _, batch, scheme = case.replace(", threads 1", "").split(", ")
        whole, bare = works["round"], works["passes"]
        rows.append({
            "Net": net.replace("resnet", "ResNet-"),
            "B": batch.removeprefix("B "),
            "Scheme": scheme,
            "Threads": str(whole["threads"]),
            "A round, seconds": f"{whole['median']:#.3g}",
            "Over its passes": f"{whole['median'] / bare['median']:.2f}",
            "n": str(whole["n"]),
        })  # fmt: skip
    (works,) = (w for w in timings("step-codecs-growth").values() if "textbook" in w)
    step, textbook = works["step"], works["textbook"]
    return lab.markdown(pd.DataFrame(rows)) + (
        f"\n\nCompression alone takes {1e3 * step['median'] / step['clients']:.1f} ms a client at "
        f"D = {step['dimension']:,}; textbook code for the same, "
        f"{textbook['median'] / step['median']:.0f} times as long."
    )


def short_runs() -> str:
    """The runs with the paper's model, as the committed output of notebook 13 has them."""
    path = next((ROOT / "notebooks").glob("13*.ipynb"))
    outputs = [o for c in json.loads(path.read_text())["cells"] for o in c.get("outputs", [])]
    texts = ["".join(o.get("data", {}).get("text/markdown", "")) for o in outputs]
    (table,) = [text.split("\n\n", 1)[1] for text in texts if text.startswith("**Profile cpu18:")]
    return table.strip()


BEHIND = (("TCS", "Baseline"), ("TCS-L4-Q5", "TCS"))
TABLES = {
    "headline": headline, "claims": claims, "bytes": whole_runs, "price": price,
    "choices": choices, "lengths": lengths, "speed": speed, "short-runs": short_runs,
}  # fmt: skip


def with_tables(text: str) -> str:
    """README's text with all tables as the results have them."""
    for name, table in TABLES.items():
        block = re.compile(BLOCK.format(name), re.S)
        assert block.search(text), f"README has no block of {name}"
        made = table()
        text = block.sub(
            lambda match, made=made: match[1] + made + "\n" + match[2].lstrip("\n"), text
        )
    return text


def params(profile: str) -> dict:
    return lab.read_params([ROOT / f"params/{profile}.yaml"])


def profile_row(profile: str) -> str:
    """The cells of a profile in README's table that hold numbers: epochs and trials."""
    read = params(profile)
    return f"| {read['epochs']} × {read['seeds']} |"


def both_ways(scheme: str) -> str:
    """The whole run's factor for a scheme, from the committed output of notebook 10."""
    text = next((ROOT / "notebooks").glob("10*.ipynb")).read_text(encoding="utf-8")
    found = re.search(rf"\| {re.escape(scheme)} \|(?: ×[\d,]+ \|){{3}} ×([\d,]+) \|", text)
    return found[1] if found else f"no factor of {scheme} in notebook 10"


def at_the_papers_size(scheme: str) -> dict:
    """The record of a scheme in profile cpu18."""
    table = lab.read_params([ROOT / "params/table1.yaml", ROOT / "params/cpu18.yaml"])
    (record,) = lab.recorded(lab.plan(table | {"schemes": [scheme]})).values()
    return record


def prose() -> dict[str, str]:
    """Every number of README's text, with enough words around it to be found, and its source."""
    one = of_scheme("TCS-L4-Q5")[0]
    paper, cpu = params("paper"), params("cpu")
    tcs_budget, short_budget = (tcs.bit_budget(name) for name in ("TCS", "TCS-L4-Q5"))
    top_k = tcs.Scheme.named("top-K").phi_local
    rows = {p: profile_row(p) for p in ("ci", "quick", "cpu", "cpu18", "gpu", "paper")}
    large, central = (at_the_papers_size(name) for name in ("TCS", "Baseline"))
    epochs = {5: "five"}[len(large["rows"])]
    rounds = [sum(row["rounds"] for row in record["rows"]) for record in (central, large)]
    more_steps = {5: "five"}[round(rounds[0] / rounds[1])]
    trials = {5: "five"}[paper["seeds"]]
    quarters = {0.25: "a quarter"}  # of the batch, and so of the learning rates
    steps = [50_000 // (10 * run["batch_size"]) * run["epochs"] for run in (paper, cpu)]
    times = {5.0: "five"}[steps[0] / steps[1]]
    sweep, halves = lab.read_sensitivity(ROOT / "params/sensitivity.yaml"), {0.5: "half a point"}
    warm = paper["warmup_epochs"] / paper["epochs"]
    with_warmup = warm * 32 / 4 + (1 - warm) * short_budget  # H = 4: an iteration has a quarter
    return {
        "1/88 of the bits": f"1/{32 / tcs_budget:.0f} of the bits",
        "or 1/1,900 with": f"or 1/{round(32 / short_budget, -2):,.0f} with",
        "300 epochs, five trials": f"{paper['epochs']} epochs, {trials} trials",
        "78,042 parameters": f"{one['dimension']:,} parameters",
        "15 epochs": f"{cpu['epochs']} epochs",
        "its own largest 1 %": f"its own largest {top_k:.0%}".replace("%", " %"),
        "5 of 300 epochs": f"{paper['warmup_epochs']} of {paper['epochs']} epochs",
        "a factor of 139 against": f"a factor of {both_ways('TCS-L4-Q5')} against",
        "a factor of 2,020;": f"a factor of {both_ways('TCS-M2-E3-K4++')};",
        "within half a point": f"within {halves[sweep['margin']]}",
        "×214 over": f"×{32 / with_warmup:.0f} over",
        "a quarter of the paper's": f"{quarters[cpu['batch_size'] / paper['batch_size']]} of the paper's",
        "have five times as many rounds": f"have {times} times as many rounds",
        "run for five epochs only": f"run for {epochs} epochs only",
        "(11,173,962 parameters)": f"({large['dimension']:,} parameters)",
        "training takes five times as many steps": f"training takes {more_steps} times as many steps",
        **{row: row for row in rows.values()},
    }


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
