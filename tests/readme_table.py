"""Write README's headline table from results/: uv run python tests/readme_table.py"""

import re
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tcs_core as tcs  # noqa: E402

README = ROOT / "README.md"
SOURCE = ROOT / "results" / "cpu" / "table1.csv"
BLOCK = re.compile(r"(<!-- headline: [^\n]*-->\n).*?(\n<!-- end of headline -->)", re.S)
COLUMNS = ["Scheme", "Paper: accuracy %", "Ours: accuracy %", "n", "Paper: bits", "Sent up"]


def headline() -> str:
    """Table 1 of the committed evidence as README shows it."""
    return tcs.markdown(tcs.readable(pd.read_csv(SOURCE))[COLUMNS])


def with_headline(text: str) -> str:
    return BLOCK.sub(lambda match: match[1] + headline() + match[2], text)


if __name__ == "__main__":
    README.write_text(with_headline(README.read_text()))
