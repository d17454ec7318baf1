"""README: its table is the csv's, its commands and links are real."""

import re

import tcs_lab as lab
from readme_table import BLOCK, README, TABLES, prose, with_tables

import tcs_core as tcs

TEXT = README.read_text()
COMMANDS = (
    "pip install uv && uv run papermill notebooks/00_reproduce.ipynb "
    "results/quick/00_reproduce.ipynb -f params/quick.yaml",
    "uv run pytest",
)


def test_the_tables_are_generated():
    assert with_tables(TEXT) == TEXT, "run: uv run python tests/readme_table.py"


def numbers_left(text: str) -> list[str]:
    """Lines of prose that still hold a number once tables, code and names are taken out."""
    for name in TABLES:
        text = re.sub(BLOCK.format(name), "", text, flags=re.S)
    text = re.sub(r"```.*?```|^    .*?$|`[^`]*`", "", text, flags=re.S | re.M)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for found in prose():
        text = text.replace(found, "")
    names = (
        r"CIFAR-10", r"ResNet-\d+", r"(Tables?|Figs?\.|Alg\.|Sec\.) \d(–\d)?", r"[Hη] = [\d.]+",
        r"Python 3\.\d+", r"fp32", r"rank 0", r"exit code \d+", r"sha256", r"\[\d\d_\w+\]( \| \d+ \|)?",
        r"(TCS|FedAvg)(-[A-Z]+\d*)*\+*", r"width \d+", r"1/H", r"95 % interval", r"5-bit|32 bits|5 bits",
        r"×2000 is a count",  # the paper's own words
    )  # fmt: skip
    for name in names:
        text = re.sub(name, "", text)
    return [line for line in text.splitlines() if re.search(r"\d", line)]


def test_every_number_has_a_source():
    for words, computed in prose().items():
        assert words in TEXT
        assert computed == words
    assert numbers_left(TEXT) == []
    assert numbers_left(TEXT + "\nIt gained 2.6 points.") == ["It gained 2.6 points."]


def test_the_two_commands_stand_there_word_for_word():
    lines = [line.strip() for line in TEXT.splitlines()]
    assert all(command in lines for command in COMMANDS)
    assert COMMANDS[1] in (lab.ROOT / ".ci" / "run").read_text()


def test_every_file_it_names_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    words = re.findall(r"\b(?:notebooks|params|tests|results/cpu)/[\w./-]+\.\w+", TEXT)
    made = re.compile(r"results/(quick|ci)/|results/\w+/\w+\.ipynb")  # by the reader's commands
    named = {n for n in links + words if not made.match(n)}
    assert named and not [n for n in named if not (lab.ROOT / n).exists()]


def test_its_python_runs():
    """Every python block, in order, in one namespace, with the training made tiny."""
    namespace = {"__name__": "readme"}
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert blocks
    try:
        for block in blocks:
            exec(compile(block, "README.md", "exec"), namespace)
    finally:
        for name in set(tcs.FAMILIES) - {"TCS", "top-K", "rand-K", "FedAvg", "FedSGD", "Baseline"}:
            del tcs.FAMILIES[name], tcs.RULES[name]
