"""README: what is generated is up to date, its numbers have one source, its commands, links and code
are real."""

import json
import math
import os
import re
import subprocess
import sys

import matplotlib
import pytest
import readme_table
import tcs_lab as lab
import torch
from readme_table import README
from torch import nn

import tcs_core as tcs

TEXT = README.read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", TEXT, re.S)
COMMANDS = (
    "pip install uv",
    "uv run papermill -f params/quick.yaml "
    "notebooks/00_reproduce.ipynb results/quick/00_reproduce.ipynb",
    "uv run pytest",
)


# What is generated ────────────────────────────────────────────────────────────────────────────────


def test_what_is_generated_is_up_to_date():
    assert readme_table.with_blocks(TEXT) == TEXT, "run: uv run python tests/readme_table.py"


def test_the_picture_is_generated(tmp_path):
    matplotlib.rcdefaults()  # whatever cells of notebooks have set in this process
    lab.save_figure(readme_table.picture(), tmp_path / "figure")
    path = readme_table.picture_path().with_suffix(".png")
    assert (tmp_path / "figure.png").read_bytes() == path.read_bytes(), "run the same"


def test_its_other_numbers_have_a_source():
    assert [words for words in readme_table.numbers() if words not in TEXT] == []


# One source ───────────────────────────────────────────────────────────────────────────────────────


def test_verdicts_and_differences_are_those_of_notebook_13():
    text = cells_of("13_evidence.ipynb")
    for name, claim in {"TCS": "TCS loses no", "TCS-L4-Q5": "TCS-L4-Q5 loses no"}.items():
        line = rf"^{claim} accuracy against centralized training: (.*); (.*)$"
        ((word, said),) = re.findall(line, text, re.M)  # others name what makes a verdict weak
        ends = said.partition("(")[2].strip(")")
        (own,) = [row for row in TEXT.splitlines() if row.startswith(f"- **{name}: ")]
        assert word.split(":")[0] in own and f"(interval {ends})" in own


def test_a_difference_has_one_interval_on_all_pages():
    """README, 08, 10b, 13 and the tables: that of the planned model."""
    read, found = readme_table.judged_records()
    dense = ("FedAvg", 0.5)
    pages = {name: cells_of(name) for name in ("00_reproduce.ipynb", "08_tables_and_curves.ipynb",
             "10b_fewer_bytes.ipynb", "13_evidence.ipynb")}  # fmt: skip
    table = (lab.ROOT / "results/evidence/table1.md").read_text(encoding="utf-8")
    for name in ("TCS", "TCS-L4-Q5"):
        said = interval_of(read, found, (name, 0.5), ("Baseline", 0.1))
        ends = said.partition("(")[2].strip(")")
        assert ends in TEXT and said in table
        others = [n for n in pages if not n.startswith("10b")]
        assert [n for n in others if said not in pages[n]] == []
        lines = pages["10b_fewer_bytes.ipynb"].splitlines()
        rows = [line for line in lines if f" | {name} − FedAvg | " in line]  # in a second column
        equal = interval_of(read, found, (name, 0.5), dense)
        assert rows and [row for row in rows if equal not in row] == []


def interval_of(read, found, *pair):
    row = lab.difference(read, found, *pair)
    return lab.with_interval(*(row[key] for key in readme_table.ENDS))


def printed(notebook):
    """All that a notebook's cells gave out."""
    cells = lab.ROOT / notebook
    text = cells.read_text(encoding="utf-8").replace("\\n", "\n").replace("\u00a0", " ")
    return re.sub("</?nobr>", "", text)


@pytest.mark.parametrize(
    "profile, notebook, names",
    [("small", "notebooks/17_rivals.ipynb", ("STC", "TCS")),
     ("text", "results/text/17_rivals.ipynb", ("DGC", "TCS-Q5"))],
)  # fmt: skip
def test_rivals_are_those_of_notebook_17(profile, notebook, names):
    found = readme_table.at_best_rates(profile)
    lines = [line for line in printed(notebook).splitlines() if "|" in line]
    for name in names:
        n, _, points = readme_table.against_dense(found, name)
        points = points.removeprefix(f"{name} ")
        row = re.compile(rf"\| \**{re.escape(name)}\** \|")
        (line,) = [line for line in lines if row.search(line) and points in line]
        assert f"| {n.removeprefix('n = ')} |" in line
    words = {9: "nine"}
    assert f"compares {words[len(found)]} " in TEXT


def test_the_papers_factors_are_those_of_the_claims():
    """The claims have them from the budgets that the paper prints, with fewer digits."""
    claims = lab.read_params([lab.ROOT / "params/claims.yaml"])["claims"]
    plain, short = (lab.times(claims[name]["paper"]) for name in ("x100", "x2000"))
    assert f"by the paper's tables {plain} and {short} times" in TEXT


def cells_of(notebook):
    """The text of a notebook's prose and of what its cells put out, without marks of type."""
    cells = json.loads((lab.ROOT / "notebooks" / notebook).read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    for output in (output for cell in cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        texts.append("".join(output.get("text", data.get("text/markdown", []))))
    return re.sub(r"\x1b\[\d*m|</?nobr>", "", "\n".join(texts)).replace("\u00a0", " ")


@pytest.mark.parametrize(
    "file",
    ["08_tables_and_curves.ipynb", "10_bits_on_the_wire.ipynb", "10b_fewer_bytes.ipynb"],
)
def test_the_factor_of_the_shortest_scheme_is_one_number_everywhere(file):
    factor = lab.times(lab.paper_factor("TCS-L4-Q5"))
    said = set(re.findall(r"\b1,?9[01]\d\b", cells_of(file)))
    assert said == {factor}


def test_what_short_schemes_cost_is_one_number_in_both_places():
    """10b's table, and its sentence about the paper's shortest scheme."""
    text = cells_of("10b_fewer_bytes.ipynb")
    name = "TCS-M2-E3-K4++"
    mean, _, _ = readme_table.difference(
        readme_table.records(name, "short"), readme_table.records("TCS-L4-Q5", "short")
    )
    assert f"{mean:.2f} points above TCS-L4-Q5" in text
    rows = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    assert [row for row in rows if f"+{mean:.2f} (" in row]


@pytest.mark.parametrize("name", ["TCS", "TCS-L4-Q5"])
def test_few_rounds_are_those_of_notebook_10b(name):
    found, dense = (readme_table.records(one, "short", seeds=3) for one in (name, "FedAvg"))
    points = lab.with_interval(*readme_table.difference(found, dense))
    rows = cells_of("10b_fewer_bytes.ipynb").splitlines()
    assert [row for row in rows if row.startswith(f"| {name} |") and points in row]
    assert f"{name} {points}" in TEXT


def test_minus_is_one_sign():
    assert re.findall(r"(?<=[\s(|>])-\d", TEXT) == []


# Its parts ────────────────────────────────────────────────────────────────────────────────────────


def test_it_has_one_table_of_five_situations_or_six():
    assert len(re.findall(r"^\| ---", TEXT, re.M)) == 1
    table = [line for line in TEXT.splitlines() if line.startswith("|")]
    whole = readme_table.stands("unequal")
    assert len(table) == 2 + 5 + whole and [line for line in table if "do not sparsify" in line]


LATER = {"2, momentum": "momentum", "2, Table 1": "layer-wise fairness, two local steps",
         "2, Table 2": "η 0.8", "unequal": "unequal clients"}  # fmt: skip


def test_what_it_says_is_not_run_yet_is_not():
    said = re.findall(r"^- \*\*Not complete\*\* in `evidence`: (.*?)\.$", TEXT, re.M)
    missing = [words for stage, words in LATER.items() if not readme_table.stands(stage)]
    assert said == ([", ".join(missing)] if missing else [])


def test_its_code_fits_the_narrowest_page():
    """GitHub shows as few as 57 columns; a block that is wider is cut off."""
    code = CODE + re.findall(r"^    (.+)$", re.sub(r"```.*?```", "", TEXT, flags=re.S), re.M)
    lines = [line for block in code for line in block.splitlines()]
    assert [line for line in lines if len(line) > 57] == []
    assert [block for block in CODE if len(block.splitlines()) > 8] == []


# Commands and links ───────────────────────────────────────────────────────────────────────────────


def test_the_commands_stand_there_word_for_word():
    blocks = re.sub(r" *\\\n *", " ", TEXT)
    lines = [line.strip() for line in blocks.splitlines()]
    assert [command for command in COMMANDS if command not in lines] == []
    assert COMMANDS[-1] in (lab.ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_file_it_names_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    words = re.findall(r"\b(?:notebooks|params|tests|results)/[\w./-]+\.\w+", TEXT)
    made = re.compile(r"results/quick/")  # by the reader's command
    named = {n for n in links + words if not made.match(n)}
    assert named and not [n for n in named if not (lab.ROOT / n).exists()]


def test_it_lists_every_notebook_once_in_order():
    listed = re.findall(r"^- \[(\w+)\]\(notebooks/\1\.ipynb\): ", TEXT, re.M)
    assert listed == sorted(path.stem for path in (lab.ROOT / "notebooks").glob("[0-9]*.ipynb"))


# Code ─────────────────────────────────────────────────────────────────────────────────────────────


def model_of():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def loaders_of(clients=4):
    """A list of batches a client: two classes."""
    inputs = torch.randn(clients, 25, 8, 20, generator=torch.Generator().manual_seed(0))
    labels = (inputs.sum(-1) > 0).long()
    return [list(zip(*own, strict=True)) for own in zip(inputs, labels, strict=True)]


@pytest.fixture
def own_scheme():
    """The first block's namespace."""
    namespace = {"__name__": "readme", "torch": torch}
    exec(compile(CODE[0], "README.md", "exec"), namespace)
    yield namespace
    tcs.FAMILIES.pop("TCS-Average", None)
    tcs.RULES.pop("TCS-Average", None)


def test_its_scheme_trains(own_scheme):
    assert tcs.Scheme.named("TCS-Average-L4-Q5").rule == "TCS-Average"
    federation = tcs.Federation(model_of(), loaders_of(), "TCS-Average-L4-Q5", 0.2)
    for _ in range(3):
        federation.round()
    assert federation.compressor.known.rule.mean_D.shape == federation.theta_D.shape


def test_its_federation_learns_and_saves(own_scheme, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loaders = loaders_of()
    torch.manual_seed(0)
    own_scheme |= {"model": model_of(), "loaders": loaders, "rounds": 120, "batch": loaders[0][0]}
    exec(compile(CODE[1], "README.md", "exec"), own_scheme)
    assert float(capsys.readouterr().out) < 0.9 * math.log(2)  # two classes
    assert torch.load("model.pt").keys() == model_of().state_dict().keys()


DDP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import tcs_core as tcs
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, rank = torch.nn.Linear(3, 2), dist.get_rank()
{code}
model(torch.ones(4, 3)).sum().backward()
assert state.iter == 1 and torch.load("tcs0.pt")["iter"] == 0
os._exit(0)  # a thread of gloo may outlive Python and abort
"""


def test_its_ddp_lines_run(tmp_path):
    path = os.pathsep.join([str(lab.ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", DDP.format(code=CODE[2])]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr


def test_its_two_sides_agree():
    namespace = {"tcs": tcs, "sizes": [60, 40], "delta_D": torch.randn(100)}
    exec(compile(CODE[3], "README.md", "exec"), namespace)
    client, server = namespace["client"], namespace["server"]
    assert torch.equal(namespace["update_D"], namespace["delta_D"])
    assert client.known.round == server.known.round == 1
