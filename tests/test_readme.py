"""README is up to date with its template and the stored runs, and its commands, links and code are real."""

import math
import os
import re
import subprocess
import sys

import matplotlib
import pytest
import tcs_lab as lab
import torch
import write_readme
from torch import nn

import tcs_core as tcs

TEXT = (write_readme.ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", TEXT, re.S)
COMMANDS = (
    "pip install uv",
    "uv run papermill -f params/quick.yaml "
    "notebooks/00_reproduce.ipynb results/quick/00_reproduce.ipynb",
    "uv run pytest",
)


# What is generated ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", write_readme.PAGES, ids=lambda page: page.parent.name)
def test_a_page_is_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert text == write_readme.render(page), "run: uv run python tests/write_readme.py"
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert links and not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("path", write_readme.PICTURES, ids=lambda path: path.name)
def test_a_picture_is_up_to_date(tmp_path, path):
    matplotlib.rcdefaults()  # whatever cells of notebooks have set in this process
    lab.save_figure(write_readme.PICTURES[path](), tmp_path / "figure")
    stored = path.with_suffix(".png").read_bytes()
    assert (tmp_path / "figure.png").read_bytes() == stored, "run the same"


# Commands and links ───────────────────────────────────────────────────────────────────────────────


def test_the_commands_stand_there_word_for_word():
    blocks = re.sub(r" *\\\n *", " ", TEXT)
    lines = [line.strip() for line in blocks.splitlines()]
    assert [command for command in COMMANDS if command not in lines] == []
    assert COMMANDS[-1] in (lab.ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_file_it_names_exists():
    words = re.findall(r"\b(?:notebooks|params|tests|results)/[\w./-]+\.\w+", TEXT)
    made = re.compile(r"results/quick/")  # by the reader's command
    named = {word for word in words if not made.match(word)}
    assert named and not [n for n in named if not (lab.ROOT / n).exists()]


def test_its_table_has_every_notebook_once():
    table = TEXT.partition("\n## The notebooks\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| .*\]\(notebooks/(\w+)\.ipynb\)", table, re.M)
    assert sorted(listed) == sorted(p.stem for p in (lab.ROOT / "notebooks").glob("[0-9]*.ipynb"))


# Code ─────────────────────────────────────────────────────────────────────────────────────────────


def model_of():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def loaders_of(clients=4):
    """A list of batches a client: two classes."""
    inputs = torch.randn(clients, 25, 8, 20, generator=torch.Generator().manual_seed(0))
    labels = (inputs.sum(-1) > 0).long()
    return [list(zip(*own, strict=True)) for own in zip(inputs, labels, strict=True)]


def test_its_first_script_runs_as_a_file_and_sends_what_the_text_says(tmp_path):
    (tmp_path / "first.py").write_text(CODE[0], encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(lab.ROOT)}
    done = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, env=environment, capture_output=True,
        encoding="utf-8", check=True,
    )  # fmt: skip
    lines = re.findall(r"round (\d+): loss ([\d.]+), ([\d,]+) bytes", done.stdout)
    assert float(lines[-1][1]) < 0.5 * float(lines[0][1])
    dense, later = lines[0][2], {sent for _, _, sent in lines[1:]}
    assert len(later) == 1
    below = TEXT.partition(CODE[0])[2].partition("**")[0]
    assert re.findall(r"sends ([\d,]+) bytes", below) == [dense, later.pop()]


@pytest.fixture
def own_scheme():
    """The namespace of the block with a scheme."""
    namespace = {"__name__": "readme", "torch": torch}
    exec(compile(CODE[1], "README.md", "exec"), namespace)
    yield namespace
    tcs.FAMILIES.pop("TCS-Average", None)
    tcs.RULES.pop("TCS-Average", None)


def test_its_scheme_trains(own_scheme):
    assert tcs.Scheme.named("TCS-Average-L4-Q5").rule == "TCS-Average"
    federation = tcs.Federation(model_of(), loaders_of(), "TCS-Average-L4-Q5", 0.2)
    for _ in range(3):
        federation.round()
    assert federation.compressor.known.rule.average_D.shape == federation.theta_D.shape


def test_its_federation_learns_and_saves(own_scheme, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loaders = loaders_of()
    torch.manual_seed(0)
    own_scheme |= {"model": model_of(), "loaders": loaders, "rounds": 120, "batch": loaders[0][0]}
    exec(compile(CODE[2], "README.md", "exec"), own_scheme)
    assert float(capsys.readouterr().out) < 0.9 * math.log(2)  # two classes
    assert torch.load("model.pt").keys() == model_of().state_dict().keys()


DIFF = re.findall(r"```diff\n(.*?)```", TEXT, re.S)[0]
DDP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import tcs_core as tcs
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, rank = torch.nn.Linear(3, 2), dist.get_rank()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = [(torch.ones(4, 3), torch.zeros(4, 2))] * 3
loss_function = torch.nn.functional.mse_loss
{code}
assert state.iter == 3 and torch.load("tcs-0.pt")["iter"] == 3
os._exit(0)  # a thread of gloo may outlive Python and abort
"""


def test_its_ddp_lines_run(tmp_path):
    path = os.pathsep.join([str(lab.ROOT), os.environ.get("PYTHONPATH", "")])
    code = re.sub(r"^[ +]", "", re.sub(r"^-.*\n", "", DIFF, flags=re.M), flags=re.M)
    command = [sys.executable, "-c", DDP.format(code=code)]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr


class Registered:
    """A model that only remembers which hooks it was given."""

    def __init__(self):
        self.hooks = []

    def register_comm_hook(self, state, hook):
        self.hooks.append((type(state).__name__, hook.__name__))


def test_pytorchs_hooks_are_there_under_these_names():
    model = Registered()
    exec(compile(CODE[4], "README.md", "exec"), {"model": model})
    assert model.hooks == [
        ("NoneType", "bf16_compress_hook"),
        ("PowerSGDState", "powerSGD_hook"),
    ]


def test_its_two_sides_agree():
    def train_locally(model):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))

    model, start = torch.nn.Linear(19, 5), torch.nn.Linear(19, 5)
    start.load_state_dict(model.state_dict())
    namespace = {"model": model, "train_locally": train_locally, "rounds": 3}
    exec(compile(CODE[3], "README.md", "exec"), namespace)
    client, server = namespace["client"], namespace["server"]
    assert torch.equal(namespace["update_D"], namespace["average_D"])
    assert client.known.round == server.known.round == 3
    assert torch.equal(client.known.shared_K, server.known.shared_K)
    assert torch.equal(tcs.parameters_to_vector(model), namespace["theta_D"])
    assert not torch.equal(tcs.parameters_to_vector(start), namespace["theta_D"])
