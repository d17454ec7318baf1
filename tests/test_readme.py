"""README: its table is the csv's, its commands and links are real."""

import re

from readme_table import README, with_tables

import tcs_core as tcs

TEXT = README.read_text()
COMMANDS = (
    "pip install uv && uv run papermill notebooks/00_reproduce.ipynb "
    "results/quick/00_reproduce.ipynb -f params/quick.yaml",
    "uv run pytest",
)


def test_the_tables_are_generated():
    assert with_tables(TEXT) == TEXT, "run: uv run python tests/readme_table.py"


def test_the_two_commands_stand_there_word_for_word():
    lines = [line.strip() for line in TEXT.splitlines()]
    assert all(command in lines for command in COMMANDS)
    assert COMMANDS[1] in (tcs.ROOT / ".ci" / "run").read_text()


def test_every_file_it_names_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    words = re.findall(r"\b(?:notebooks|params|tests|results/cpu)/[\w./-]+\.\w+", TEXT)
    made = re.compile(r"results/(quick|ci)/|results/\w+/\w+\.ipynb")  # by the reader's commands
    named = {n for n in links + words if not made.match(n)}
    assert named and not [n for n in named if not (tcs.ROOT / n).exists()]


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
