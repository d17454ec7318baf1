"""Write README's tables from results/: uv run python tests/readme_table.py"""

import re
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tcs_core as tcs  # noqa: E402

README = ROOT / "README.md"
SOURCE = ROOT / "results" / "cpu" / "table1.csv"
RUNS = ROOT / "results" / "cpu" / "runs"
BLOCK = r"(<!-- {0}: [^\n]*-->\n).*?(\n?<!-- end of {0} -->)"
COLUMNS = ["Scheme", "Paper: accuracy %", "Ours: accuracy %", "n", "Paper: bits", "Sent up"]


def headline() -> str:
    """Table 1 of the committed evidence as README shows it."""
    return tcs.markdown(tcs.readable(pd.read_csv(SOURCE))[COLUMNS])


def whole_runs() -> str:
    """Accuracy and bytes of whole runs at H = 4, from the records."""
    names = ["FedAvg-L4", "TCS-L4", "TCS-L4-Q5", "TCS-L4-Q5++"]
    files = [path for name in names for path in sorted(RUNS.glob(f"{name}-0.5-*.json"))]
    table = tcs.summary([tcs.read_record(path) for path in files])
    sent = table.megabytes_up + table.megabytes_down
    readable = tcs.readable(table)[["Scheme", "Ours: accuracy %", "n", "MB both ways"]]
    return tcs.markdown(readable.assign(Less=[f"×{sent[0] / one:,.4g}" for one in sent]))


def with_tables(text: str) -> str:
    """README's text with both tables as the results have them."""
    for name, table in (("headline", headline()), ("bytes", whole_runs())):
        block = re.compile(BLOCK.format(name), re.S)
        assert block.search(text), f"README has no block of {name}"
        text = block.sub(
            lambda match, table=table: match[1] + table + "\n" + match[2].lstrip("\n"), text
        )
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
