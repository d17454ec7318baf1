"""README: its numbers and figures are the records', its commands, links and code are real."""

import math
import re

import pytest
import readme_table
import tcs_lab as lab
from readme_table import README

import tcs_core as tcs

TEXT = README.read_text(encoding="utf-8")
COMMANDS = (
    "pip install uv",
    "uv run papermill -f params/quick.yaml "
    "notebooks/00_reproduce.ipynb results/quick/00_reproduce.ipynb",
    "uv run pytest",
)


@pytest.mark.parametrize("draw, path", readme_table.FIGURES.items())
def test_the_figures_are_generated(draw, path, tmp_path):
    lab.save_figure(draw(), tmp_path / "figure")
    assert (tmp_path / "figure.png").read_bytes() == path.with_suffix(".png").read_bytes()


def test_its_numbers_have_a_source():
    assert [words for words in readme_table.numbers() if words not in TEXT] == []


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150


def test_its_code_fits_the_narrowest_page():
    """GitHub shows as few as 57 columns; a block that is wider is cut off."""
    code = re.findall(r"```python\n(.*?)```", TEXT, re.S) + re.findall(r"^    (.+)$", TEXT, re.M)
    lines = [line for block in code for line in block.splitlines()]
    assert [line for line in lines if len(line) > 57] == []


def test_the_commands_stand_there_word_for_word():
    blocks = re.sub(r" *\\\n *", " ", TEXT)
    lines = [line.strip() for line in blocks.splitlines()]
    assert [command for command in COMMANDS if command not in lines] == []
    assert COMMANDS[-1] in (lab.ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_file_it_names_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    words = re.findall(r"\b(?:notebooks|params|tests|results)/[\w./-]+\.\w+", TEXT)
    made = re.compile(r"results/(quick|ci)/|results/\w+/\w+\.ipynb")  # by the reader's commands
    named = {n for n in links + words if not made.match(n)}
    assert named and not [n for n in named if not (lab.ROOT / n).exists()]


@pytest.mark.parametrize("name", ["TCS-Average-L4-Q5"])
def test_its_python_runs(name):
    """Every python block, in order, in one namespace."""
    namespace = {"__name__": "readme"}
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert blocks
    try:
        for block in blocks:
            exec(compile(block, "README.md", "exec"), namespace)
        assert tcs.Scheme.named(name).rule == "TCS-Average"
    finally:
        tcs.FAMILIES.pop("TCS-Average", None)
        tcs.RULES.pop("TCS-Average", None)
    after = tcs.cross_entropy(namespace["model"], namespace["feed"][0][0]).item()
    assert after < 0.9 * math.log(2)  # two classes
