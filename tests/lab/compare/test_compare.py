"""A method from a file: what each of its three forms becomes, what it sends, its row beside stored
ones, and what is said of a file that is wrong."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tcs_lab as lab
import torch
from scipy.special import stdtrit
from tcs_lab.__main__ import main
from tcs_lab.compare import methods, rows, scoring
from tcs_lab.compare import table as tables
from tcs_lab.compare import track as tracks
from tcs_lab.compare.methods import find_method
from tcs_lab.compare.probe import Probe
from tcs_lab.compare.track import read_track
from tcs_lab.schemes.packing import Context, pack, recoded_size, unpack
from tcs_lab.schemes.tensors import Side

import tcs_core as tcs

EXAMPLES = Path(lab.ROOT) / "notebooks" / "examples"
TRACK = """
profile: tiny
dataset: synthetic
train_samples: 40
test_samples: 20
test_unused: true
image_size: 4
crop_padding: 0
model: conv3
width: 2
clients: 2
batch_size: 5
epochs: 2
threads: 1
"""
PLAN = """
profile: tiny.yaml
tuning:
  seed: 11
  learning_rate: 0.5
  centralized_learning_rate: 0.1
  factors: [0.5, 1.0]
  choose_on: [[20, 60]]
  score_on: [[0, 20], [60, 100]]
stages:
  - {stage: rows, seeds: [1, 2], tune: [FedAvg, TCS, TCS-K4]}
analysis:
  confidence: 0.95
  minutes: 0.1
  methods:
    FedAvg: [FedAvg]
    TCS: [TCS, TCS-K4]
"""
SIGNS = """
class Signs:
    def compress(self, tensor, name):
        return [tensor >= 0, tensor.abs().mean()], None

    def decompress(self, tensors, context):
        return torch.where(tensors[0], tensors[1], -tensors[1])
"""

AVERAGED = """
class Averaged:
    def __init__(self):
        self.generator, self.last = torch.Generator().manual_seed(1), {}

    def compress(self, tensor, name):
        noise = torch.rand(tensor.shape, generator=self.generator)
        self.last[name] = 0.5 * self.last.get(name, 0.0) + tensor + noise
        return [self.last[name]], None

    def decompress(self, tensors, context):
        self.last[context.name] = self.last.get(context.name, 0.0) + tensors[0]
        return self.last[context.name]
"""


@pytest.fixture
def folder(tmp_path, registry, monkeypatch):
    """A tiny track; what its files register is taken out again."""
    (tmp_path / "tiny.yaml").write_text(TRACK, encoding="utf-8")
    (tmp_path / "plan.yaml").write_text(PLAN, encoding="utf-8")
    images = lab.synthetic_dataset(120, 20).resize(4)
    monkeypatch.setattr(lab.tasks.images, "synthetic_dataset", lambda **_: images)
    lab.load_dataset.cache_clear()
    methods._execute.cache_clear()
    yield tmp_path
    methods._execute.cache_clear()
    lab.load_dataset.cache_clear()


def compare(folder, *words):
    plan, results = str(folder / "plan.yaml"), str(folder / "results")
    return main(["compare", "--plan", plan, "--results", results, "--jobs", "1", *map(str, words)])


def written(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(f"import torch\nimport tcs_core as tcs\n{text}", encoding="utf-8")
    return path


def error_of(folder, capsys, *words):
    """The one line that is printed of a comparison that ends with exit code 2."""
    assert compare(folder, *words) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    return line


def records(folder, method):
    return sorted((folder / "results" / "tiny" / method / "runs").glob("*.json"))


# Three forms ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("file", ["mask_rule.py", "client_and_server.py", "per_tensor.py"])
def test_each_example_gets_a_row_and_a_picture(folder, capsys, file):
    file = EXAMPLES / file
    assert compare(folder, file) == 0
    name = find_method(str(file)).folder
    row = json.loads((folder / "results" / "tiny" / name / "row.json").read_text(encoding="utf-8"))
    assert (folder / "results" / "tiny" / name / "comparison.png").is_file()
    assert (folder / "results" / "tiny" / name / "method.py").read_bytes() == file.read_bytes()
    assert (
        row["sha256"] == find_method(str(file)).sha256
        and row["points"][find_method(str(file)).name]["n"] == 2
    )
    assert row["decodes"] and row["beside_tcs"] > 0
    assert len(records(folder, name)) == 4  # two rates, two seeds
    assert name in capsys.readouterr().out


def test_messages_of_a_class_have_the_bytes_of_its_tensors(folder):
    """A bool is a byte, the mean four; what is said of tensors takes a bit once it is known."""
    method = find_method(str(written(folder, SIGNS)))
    compressor = tcs.Compressor(method.name, [30, 20], 3)
    deltas_ND = torch.randn(3, 50)
    update_D = compressor.step(deltas_ND)
    first = compressor.traffic.bits_up
    compressor.step(deltas_ND)
    assert compressor.traffic.bits_up == 8 * (1 + (30 + 4) + (20 + 4)) < first
    assert compressor.traffic.bits_down == 32 * 50
    parts = [
        part.sign() * part.abs().mean(1, keepdim=True) for part in deltas_ND.split([30, 20], 1)
    ]
    torch.testing.assert_close(update_D, torch.cat(parts, 1).mean(0))


def test_with_error_feedback_what_was_not_sent_is_sent_later(folder):
    """What clients meant in all rounds is what the server got, plus what is left."""
    text = SIGNS.replace("class Signs:", "class Signs:\n    error_feedback = True")
    method = find_method(str(written(folder, text)))
    compressor = tcs.Compressor(method.name, [30, 20], 3)
    rounds_TND = torch.randn(4, 3, 50)
    got_D = sum(compressor.step(deltas_ND) for deltas_ND in rounds_TND)
    left_D = compressor.errors_ND.mean(0)
    torch.testing.assert_close(got_D + left_D, rounds_TND.sum(0).mean(0), atol=1e-5, rtol=1e-5)


def test_the_servers_twin_sees_nothing_but_what_was_sent(folder):
    """A class that hands its values on in an attribute is found out."""
    text = """
class Hidden:
    def compress(self, tensor, name):
        self.kept = tensor
        return [torch.zeros(1)], None

    def decompress(self, tensors, context):
        return getattr(self, "kept", torch.zeros(context.shape))
"""
    compressor = tcs.Compressor(find_method(str(written(folder, text))).name, [30, 20], 3)
    assert not compressor.step(torch.randn(3, 50)).any()


def test_random_numbers_at_the_server_are_others_and_repeat(folder):
    text = """
class Noise:
    def compress(self, tensor, name):
        return [torch.rand(1)], None

    def decompress(self, tensors, context):
        return (tensors[0] - torch.rand(1)).expand(context.shape)
"""
    name = find_method(str(written(folder, text))).name
    before = torch.random.get_rng_state()
    one, two = (tcs.Compressor(name, [30], 2).step(torch.ones(2, 30)) for _ in range(2))
    assert one.abs().min() > 0 and torch.equal(one, two)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_compressed_downlink_is_counted_and_decoded(folder):
    text = SIGNS.replace("class Signs:", "class Signs:\n    downlink = True")
    compressor = tcs.Compressor(find_method(str(written(folder, text))).name, [30, 20], 3)
    update_D = compressor.step(torch.randn(3, 50))
    compressor.step(torch.randn(3, 50))
    assert compressor.traffic.bits_down == 8 * (1 + 34 + 24)
    assert len(update_D.abs().unique()) == 2  # a magnitude for each parameter


def test_what_a_method_says_beside_its_tensors_is_counted(folder):
    text = """
class Scaled:
    def compress(self, tensor, name):
        self.step = getattr(self, "step", 0) + 1
        return [tensor.half()], {"name": name, "shape": tensor.shape, "step": self.step}

    def decompress(self, tensors, context):
        assert context["name"] == "0" and context["shape"] == tensors[0].shape
        return tensors[0].float() * context["step"]
"""
    compressor = tcs.Compressor(find_method(str(written(folder, text))).name, [30], 2)
    deltas_ND = torch.ones(2, 30)
    assert compressor.step(deltas_ND).max() == 1 and compressor.step(deltas_ND).max() == 2
    header = len(pack({"name": "0", "shape": torch.Size([30]), "step": 2}, context_of("0", 30)))
    assert compressor.traffic.bits_up // 8 > 60 + header


def context_of(name, *shape):
    return Context(name, torch.Size(shape), torch.float32)


def test_a_class_goes_on_where_its_state_was_taken(folder):
    name = find_method(str(written(folder, AVERAGED))).name
    rounds = torch.randn(6, 2, 50)
    one, two = (tcs.Compressor(name, [30, 20], 2) for _ in range(2))
    for deltas_ND in rounds[:3]:
        one.step(deltas_ND)
    saved = io.BytesIO()
    torch.save(one.state_dict(), saved)
    saved.seek(0)
    two.load_state_dict(torch.load(saved, weights_only=True))  # as checkpoints are read
    for deltas_ND in rounds[3:]:
        assert torch.equal(one.step(deltas_ND), two.step(deltas_ND))


STATEFUL = """
import numpy as np

class Base:
    beta = 0.5

    def __init__(self):
        self.size, self.act = 3, torch.relu

class Stateful(Base):
    def __init__(self):
        super().__init__()
        self.residuals, self.generator = {}, torch.Generator().manual_seed(0)
        self.total, self.scale = np.array(0.0), np.float64(0.1)

    def compress(self, tensor, name):
        noise = torch.rand((), generator=self.generator).item()
        self.residuals[name] = self.beta * self.residuals.get(name, 0.0) + tensor + noise
        self.total += noise
        same = (self.scale * np.ones(1, np.float32)).itemsize
        return [self.act(self.residuals[name]) + tensor + self.total.item() + same], None

    def decompress(self, tensors, context):
        return tensors[0]
"""


def test_nothing_that_a_class_keeps_is_lost_when_a_run_goes_on(folder):
    name = find_method(str(written(folder, STATEFUL))).name
    rounds = torch.randn(8, 2, 50)
    one, two, three = (tcs.Compressor(name, [30, 20], 2) for _ in range(3))
    for deltas_ND in rounds[:4]:
        one.step(deltas_ND)
    two.load_state_dict(one.state_dict())
    for deltas_ND in rounds[:2]:
        three.step(deltas_ND)  # an instance that has been used gets the saved state, too
    three.load_state_dict(one.state_dict())
    for deltas_ND in rounds[4:]:
        update_D = one.step(deltas_ND)
        assert torch.equal(update_D, two.step(deltas_ND))
        assert torch.equal(update_D, three.step(deltas_ND))


KEEPS = """
import collections, itertools, random, threading
import numpy as np

class Memory:
    pass

class Keeps:
    {slots}

    def __init__(self):
        self.value = {made}

    def compress(self, tensor, name):
        {then}
        return [tensor], None

    def decompress(self, tensors, context):
        return tensors[0]
"""


@pytest.mark.parametrize("made, then, kind", [
    ("Memory()", "self.value.sums = tensor", "Memory"),
    ("[Memory()]", "self.value[0].sums = tensor", "list"),
    ("random.Random(0)", "self.value.random()", "Random"),
    ("np.random.default_rng(0)", "self.value.random()", "Generator"),
    ("itertools.count()", "next(self.value)", "count"),
    ("collections.defaultdict(float)", "self.value[name] += 1", "defaultdict"),
    ("collections.deque()", "self.value.append(1)", "deque"),
    ("torch.relu", "self.value = torch.sigmoid", "builtin_function_or_method"),
    ("threading.Lock()", "pass", "lock"),
])  # fmt: skip
def test_what_a_resumed_run_could_not_get_back_is_named_before_any_run(
    folder, capsys, made, then, kind
):
    path = written(folder, KEEPS.format(slots="", made=made, then=then))
    line = error_of(folder, capsys, path, "--dry-run")
    assert f"attribute value of Keeps: got {kind}" in line
    assert "allowed: numbers, strings, tensors, arrays" in line and "state_dict" in line


def test_a_class_with_slots_must_say_what_it_keeps(folder, capsys):
    path = written(folder, KEEPS.format(slots="__slots__ = ('value',)", made="0", then="pass"))
    assert "Keeps: got a class with __slots__" in error_of(folder, capsys, path, "--dry-run")


def test_low_rank_factors_give_a_matrix_of_that_rank(registry):
    side = Side(tcs.RULES["LowRank-1"](tcs.Scheme.named("LowRank-1"), [12]), "client", 0)
    matrix = torch.outer(torch.randn(8), torch.randn(9))
    tensors, _ = side.instance.compress(matrix, "a")
    assert [tuple(t.shape) for t in tensors] == [(8, 1), (9, 1)]
    torch.testing.assert_close(side.instance.decompress(tensors, context_of("a", 8, 9)), matrix)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -2.5, "a", b"\0", (1, [2, {"k": None}]), torch.Size([2]), torch.float16,
     torch.arange(6).view(2, 3), torch.tensor(1.5), torch.empty(0), torch.tensor([True]),
     torch.tensor([1.5], dtype=torch.bfloat16), np.arange(3), np.float32(2.0), {1, 2}],
)  # fmt: skip
def test_values_come_back_from_their_bytes(value):
    read = unpack(pack(value, context_of("x", 5)), context_of("x", 5))
    assert str(read) == str(value if not isinstance(value, np.generic) else value.item())
    if isinstance(value, torch.Tensor):
        assert read.dtype == value.dtype and torch.equal(read, value)


def test_a_shorter_code_finds_what_is_empty_in_whole_numbers():
    positions = torch.arange(0, 100_000, 100)  # int64: most of their bytes are 0
    assert recoded_size(positions) < 3 * len(positions) < 8 * len(positions)
    noise = torch.randint(256, (1000,), dtype=torch.uint8)
    assert recoded_size(noise) == 1000


# Rows ─────────────────────────────────────────────────────────────────────────────────────────────


def test_one_of_several_classes_may_need_what_nobody_gives(folder, capsys):
    other = SIGNS.replace("class Signs:", "class Other:\n    def __init__(self, share): pass\n")
    path = written(folder, SIGNS + other)
    assert find_method(f"{path}:Signs").name == "Signs"
    assert "Other.__init__() missing" in error_of(folder, capsys, f"{path}:Other")


def test_a_killed_comparison_goes_on_and_finished_runs_stay(folder, monkeypatch):
    path = written(folder, SIGNS)
    from tcs_lab.runs import runs

    train, made = runs._train, []

    def train_twice(*arguments):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(arguments)
        return train(*arguments)

    monkeypatch.setattr(runs, "_train", train_twice)
    assert compare(folder, path) == 130
    before = {file: file.stat().st_mtime_ns for file in records(folder, "Signs")}
    assert len(before) == 2
    monkeypatch.setattr(runs, "_train", train)
    assert compare(folder, path) == 0
    after = {file: file.stat().st_mtime_ns for file in records(folder, "Signs")}
    assert len(after) == 4 and before.items() <= after.items()


def test_a_run_that_was_killed_in_the_middle_ends_in_the_same_record(folder, monkeypatch):
    path, epoch, killed = written(folder, AVERAGED), lab.Training.epoch, []

    def killed_once(training, number):
        if number == 1 and not killed:
            killed.append(number)
            raise KeyboardInterrupt
        return epoch(training, number)

    monkeypatch.setattr(lab.Training, "epoch", killed_once)
    assert compare(folder, path) == 130 and killed and not records(folder, "Averaged")
    assert compare(folder, path) == 0
    (resumed, *_) = (
        json.loads(f.read_text(encoding="utf-8"))["rows"] for f in records(folder, "Averaged")
    )
    for file in records(folder, "Averaged"):
        file.unlink()
    assert compare(folder, path) == 0
    (whole, *_) = (
        json.loads(f.read_text(encoding="utf-8"))["rows"] for f in records(folder, "Averaged")
    )
    for one, other in zip(resumed, whole, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


def test_the_same_command_makes_nothing_again_and_another_file_does(folder, capsys):
    path = written(folder, SIGNS)
    compare(folder, path)
    row = folder / "results" / "tiny" / "Signs" / "row.json"
    before = row.stat().st_mtime_ns
    assert compare(folder, path) == 0 and row.stat().st_mtime_ns == before
    assert len(records(folder, "Signs")) == 4
    path.write_text(path.read_text(encoding="utf-8") + "\n# another version\n", encoding="utf-8")
    assert compare(folder, path) == 0
    assert len(records(folder, "Signs")) == 8
    assert json.loads(row.read_text(encoding="utf-8"))["sha256"] == find_method(str(path)).sha256


HELPED = {
    "quantizer": """
def edge(values_K):
    return values_K.abs().max() * 1.0

@tcs.register_quantizer("U", "uniform")
def uniform(values_K, intervals):
    width = (edge(values_K) / intervals).clamp(min=1e-30)
    interval_K = (values_K.abs() / width).ceil().clamp(1, intervals).long() - 1
    means_P = width * (torch.arange(intervals) + 0.5)
    return (interval_K + intervals * (values_K < 0)).int(), means_P

tcs.register_scheme("Helped", value_bits=5, quantizer="uniform")(tcs.TCS)
""",
    "code": """
def edge(code):
    return code + bytes(1)

class Longer(tcs.BlockCode):
    def encode(self, message, wire):
        code, plain = super().encode(message, wire)
        return edge(code), plain

    def decode(self, code, shared, own, wire):
        return super().decode(code[:-1], shared, own, wire)

tcs.CODES["longer"] = Longer()
tcs.register_scheme("Helped", code="longer")(tcs.TCS)
""",
    "a family of a core rule that is entered by hand": """
def edge(code):
    return code

tcs.CODES["longer"] = tcs.BlockCode()
tcs.FAMILIES["Helped"] = {"code": "longer"}
""",
}


@pytest.mark.parametrize("kind", HELPED)
def test_another_helper_function_makes_other_runs(folder, kind):
    """Also where the file registers a rule of the core, beside a quantizer or a code of its own."""
    before, digests = dict(tcs.RULES), []
    for version in ("", "\n    # another version"):
        head, tail = HELPED[kind].split("):\n", 1)
        method = find_method(str(written(folder, f"{head}):{version}\n{tail}")))
        tcs.Compressor(method.name, [300, 200], 2).step(torch.randn(2, 500))
        digests.append(lab.RunConfig(method.name).digest)
        assert method.names[0] == "Helped" and len(method.names) == 3
    assert digests[0] != digests[1]
    assert before.items() <= tcs.RULES.items()


def test_a_name_that_is_no_text_is_not_the_name_of_a_method(folder):
    for member in ("@property\n    def name(self):", "def name(self):"):
        text = SIGNS.replace("class Signs:", f"class Signs:\n    {member}\n        return 'x'\n")
        assert find_method(str(written(folder, text))).name == "Signs"


def test_a_class_with_two_names_in_its_file_is_one_method(folder):
    assert find_method(str(written(folder, f"{SIGNS}\nOther = Signs\n"))).name == "Signs"


def test_an_older_point_stays_in_the_row_only_if_its_runs_are_of_this_track(folder):
    path, track = EXAMPLES / "mask_rule.py", folder / "tiny.yaml"
    names = ["Average-Mask", "Average-Mask-K4", "Average-Mask-K16"]

    def read():
        file = folder / "results" / "tiny" / "Average-Mask" / "row.json"
        row = json.loads(file.read_text(encoding="utf-8"))
        assert sorted(row["points"]) == sorted(row["tried"])
        return row

    assert compare(folder, path) == 0
    first = read()
    assert list(first["points"]) == names[:1]
    assert compare(folder, path, "--densities") == 0
    assert sorted(read()["points"]) == sorted(names)
    assert compare(folder, path) == 0
    assert sorted(read()["points"]) == sorted(names)
    assert read()["points"][names[0]] == first["points"][names[0]]
    track.write_text(TRACK.replace("epochs: 2", "epochs: 3"), encoding="utf-8")
    assert compare(folder, path) == 0
    assert list(read()["points"]) == names[:1]
    assert read()["points"][names[0]] != first["points"][names[0]]
    track.write_text(TRACK, encoding="utf-8")  # the runs of the first track are still there
    assert compare(folder, path) == 0
    assert read()["points"] == first["points"]


def test_committed_rows_are_what_their_runs_say(monkeypatch):
    """Then they are not written again."""
    done = []
    monkeypatch.setattr(rows, "write_json", lambda *_: done.append("written"))
    monkeypatch.setattr(rows, "probe_method", lambda *_: done.append("measured"))
    for name in ("Baseline", "TCS"):
        rows._save_row(read_track(), find_method(name), (name,))
    assert done == []


def test_a_dry_run_finds_mistakes_in_a_rule(folder, capsys):
    for keeps, mistake in (("()", "self.kglobal"), ('("gone",)', "None")):
        text = f"""
@tcs.register_scheme("Mine", phi_global=0.1, phi_local=None)
class Mine(tcs.RandK):
    keeps = {keeps}
    def shared_mask(self):
        {mistake}
        return super().shared_mask()
"""
        assert compare(folder, written(folder, text), "--dry-run") != 0
        line = capsys.readouterr().err
        assert "mine.py" in line and ("kglobal" in line or "such as gone = None" in line)


FORGETFUL = """
@tcs.register_scheme("Mine", phi_global=0.1, phi_local=0.01)
class Mine(tcs.TCS):
    keeps = {keeps}
    mean_D = 0.0
    def observe(self, update_D):
        self.mean_D = 0.9 * self.mean_D + update_D.abs()
        super().observe(self.mean_D)
"""


def test_a_dry_run_finds_what_a_stopped_run_would_forget(folder, capsys):
    assert compare(folder, written(folder, FORGETFUL.format(keeps=())), "--dry-run") != 0
    assert "not in `keeps`: mean_D, allowed" in capsys.readouterr().err
    assert compare(folder, written(folder, FORGETFUL.format(keeps=("mean_D",))), "--dry-run") == 0


MISTAKES = {  # the end of a rule's class, and what a dry run says about it
    "observe: changed its tensor in place": """
    def observe(self, update_D):
        super().observe(update_D.abs_())
""",
    "own_mask: changed its tensor in place": """
    def own_mask(self, intended_D, shared_D, k):
        return super().own_mask(intended_D.abs_(), shared_D, k)
""",
    "a second object of the class found another one": """
    number = 0
    keeps = ("number",)
    def own_mask(self, intended_D, shared_D, k):
        self.number = self.number + 1
        self.best = intended_D.abs().argmax()
        return super().own_mask(intended_D, shared_D, k)
    def observe(self, update_D):
        changed_D = update_D.clone()
        changed_D[self.best if self.number else 0] = 100.0
        super().observe(changed_D)
""",
}


@pytest.mark.parametrize("says", MISTAKES)
def test_a_dry_run_finds_masks_that_nobody_can_know_and_changes_in_place(folder, capsys, says):
    head = FORGETFUL.partition("    keeps")[0]
    assert compare(folder, written(folder, head + MISTAKES[says]), "--dry-run") != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line and "mine.py" in line


def test_a_dry_run_asks_about_a_misspelt_method(folder, capsys):
    head, end = FORGETFUL.format(keeps=("mean_D",)).rsplit("def observe", 1)
    for name, asks in (("obseve", True), ("observe", False), ("_mean_of", False)):
        text = f"{head}def {name}{end}"
        assert compare(folder, written(folder, text), "--dry-run") == 0
        assert (
            "`obseve`, which the core does not call. Is `observe` meant?" in capsys.readouterr().out
        ) == asks


def test_a_dry_run_says_what_a_client_sends_and_whether_the_round_was_dense(folder, capsys):
    text = FORGETFUL.format(keeps=("mean_D",))
    for end, is_dense in (("", False), ("    def shared_mask(self):\n        return None\n", True)):
        assert compare(folder, written(folder, text + end), "--dry-run") == 0
        said = capsys.readouterr().out
        assert "a client sent" in said and ("because this round was dense" in said) == is_dense


def test_a_dry_run_makes_nothing(folder, capsys):
    assert compare(folder, written(folder, SIGNS), "--dry-run") == 0
    said = capsys.readouterr().out
    assert "4 runs" in said and "at most" not in said  # the plan has no further rates
    assert not (folder / "results").exists()


def test_a_dry_run_says_how_many_runs_it_can_become(folder, capsys):
    plan = folder / "plan.yaml"
    text = plan.read_text(encoding="utf-8")
    assert "factors: [" in text
    text = re.sub(r"(factors: )\[.*?\]", r"\1[1.0, 2.0]\n  further: [0.25, 0.5, 4.0]", text)
    plan.write_text(re.sub(r"\n  further: \[\]", "", text), encoding="utf-8")
    path = written(folder, SIGNS)
    assert compare(folder, path, "--dry-run") == 0
    said = capsys.readouterr().out
    first, most = map(int, re.search(r"(\d+) runs of .*at most (\d+) runs", said).groups())
    assert most == first + 2


def test_the_time_of_the_runs_is_that_of_a_slower_method(folder, capsys, monkeypatch):
    measured = Probe(1.0, 8.0, 1.0, True)
    monkeypatch.setattr(rows, "probe_method", lambda *_, **__: measured)
    path = written(folder, SIGNS)
    for local_steps, minutes in ((1, "0.8"), (2, "0.4")):
        text = f"""
@tcs.register_scheme("Slow", local_steps={local_steps})
class Slow(tcs.TCS): pass
"""
        for file in (path, written(folder, text, "slow.py"))[local_steps > 1 :]:
            assert compare(folder, file, "--dry-run") == 0
            assert f"4 runs of about {minutes} minutes" in capsys.readouterr().out
    assert compare(folder, path) == 0  # nothing is measured before these runs
    assert "several times as long" in capsys.readouterr().err


def test_the_time_of_a_known_method_is_that_of_its_stored_row(folder, capsys):
    """The plan's 0.1 minutes without a row, or with one that has no time; 0.25 with one of 2.5 times TCS's."""
    row = folder / "results" / "tiny" / "TCS" / "row.json"
    row.parent.mkdir(parents=True)
    for text, minutes in ((None, "0.1"), ("{}", "0.1"), ('{"beside_tcs": 2.5}', "0.25")):
        if text:
            row.write_text(text, encoding="utf-8")
        assert compare(folder, "TCS", "--densities", "--dry-run") == 0
        assert f"8 runs of about {minutes} minutes" in capsys.readouterr().out


def test_a_name_may_have_a_point(folder, capsys):
    path = written(folder, SIGNS.replace("class Signs:", "class Signs:\n    name = 'Mine v1.5'"))
    assert compare(folder, path, "--dry-run") == 0
    assert "mine.py: Mine v1.5: " in capsys.readouterr().out
    assert find_method(str(path)).folder == "Mine_v1.5"


def test_densities_that_send_the_same_are_found_before_the_runs(folder, capsys):
    text = """
@tcs.register_scheme("Half", phi_global=0.1, phi_local=None)
class Half(tcs.RandK):
    def shared_mask(self):
        return torch.arange(0, self.dimension, 2)
"""
    path = written(folder, text)
    for more in ([], ["--dry-run"]):
        assert compare(folder, path, "--densities", *more) != 0
        line = capsys.readouterr().err
        assert "--densities: mine.py: Half: Half and Half-K4 both send " in line
    assert not (folder / "results").exists()
    assert compare(folder, path, "--dry-run") == 0


def test_densities_of_a_method_that_begins_dense_are_not_taken_for_the_same(folder, capsys):
    """Its first rounds have as many bytes at every density."""
    text = """
@tcs.register_scheme("Late", phi_global=0.1, phi_local=None)
class Late(tcs.RandK):
    def shared_mask(self):
        return None if self.round < 10 else super().shared_mask()
"""
    assert compare(folder, written(folder, text), "--densities", "--dry-run") == 0
    assert "because this round was dense" in capsys.readouterr().out


def test_stored_rows_are_made_by_the_queue_and_stand_beside_a_method(folder, capsys):
    queue = ["queue", str(folder / "plan.yaml"), "--results", str(folder / "results")]
    assert main(queue) == 0
    assert compare(folder, "--list") == 0
    assert "3 of 3 planned rows" in capsys.readouterr().out
    stored = {f: f.read_bytes() for f in (folder / "results/tiny/runs").iterdir()}
    assert compare(folder, EXAMPLES / "mask_rule.py", "--densities") == 0
    said = capsys.readouterr().out
    for name in ("FedAvg", "TCS-K4", "Average-Mask", "Average-Mask-K16"):
        assert f"| {name} |" in said
    assert compare(folder, "--list") == 0
    own = capsys.readouterr().out.splitlines()[-1]
    assert "rows of Average-Mask (mask_rule.py): " in own
    assert "Average-Mask-K16 " in own and " MB up" in own and "TCS" not in own
    assert compare(folder, "TCS", "--densities") == 0  # a stored method: nothing is made
    row = (folder / "results/tiny/TCS/row.json").read_bytes()
    assert compare(folder, "TCS") == 0
    assert (folder / "results/tiny/TCS/row.json").read_bytes() == row
    assert {f: f.read_bytes() for f in (folder / "results/tiny/runs").iterdir()} == stored


def test_it_is_said_before_the_runs_if_no_known_method_is_made(folder, capsys):
    path = written(folder, SIGNS)
    assert compare(folder, path) == 0
    said = capsys.readouterr().err
    assert said.index("no other known method") < said.index("missing runs begin")
    assert str(folder / "results") in said
    assert compare(folder, "TCS") == 0
    assert "no other known method" in capsys.readouterr().err
    assert compare(folder, path) == 0 and compare(folder, "TCS-K4", "--dry-run") == 0
    assert "no other known method" not in capsys.readouterr().err


def test_the_list_says_how_its_own_plan_is_made(folder, capsys):
    assert compare(folder, "--list") == 0
    said = capsys.readouterr().out
    plan, results = folder / "plan.yaml", folder / "results"
    assert f"`tcs compare NAME --plan {plan} --results {results}`" in said
    assert f"`tcs queue {plan} --results {results}`" in said


@pytest.mark.parametrize("more", ["METHOD", "--densities", "--dry-run"])
def test_the_list_takes_no_method(folder, capsys, more):
    more = written(folder, SIGNS) if more == "METHOD" else more
    line = error_of(folder, capsys, "--list", more)
    assert f"--list: got {more} beside it" in line


@pytest.mark.parametrize("jobs", [0, 1000])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_wrong_number_of_jobs_is_refused_before_all(folder, capsys, jobs, more):
    assert compare(folder, written(folder, SIGNS), "--jobs", jobs, *more) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: jobs: got {jobs}") and not said.out


def point(scheme, both, accuracy):
    return scoring.Point(scheme, 0.5, accuracy, 0.1, 3, both, 0.0, 0.0)


def test_between_two_points_of_a_method_and_nowhere_else():
    points = [point("a", 1.0, 60.0), point("b", 4.0, 70.0), point("c", 16.0, 74.0)]
    assert scoring.weigh_points(points, 2.0) == pytest.approx({"a": 0.5, "b": 0.5})
    assert scoring.weigh_points(points, 0.5) is None and scoring.weigh_points(points, 17.0) is None
    assert scoring.weigh_points(points[1:2], 4.0) == {"b": 1.0}  # at the bytes of an only point
    assert scoring.weigh_points(points[1:2], 4.5) is None
    assert scoring.find_bytes(points, 65.0) == pytest.approx(2.0)
    assert scoring.find_bytes(points, 72.0) == pytest.approx(8.0)
    assert math.isnan(scoring.find_bytes(points, 75.0))  # never reached
    assert math.isnan(scoring.find_bytes(points, 55.0))  # with fewer bytes than any point has
    dip = [points[0], point("b", 4.0, 50.0), points[2]]
    assert math.isnan(scoring.find_bytes(dip, 55.0))  # that, too, if a later point is worse
    assert math.isnan(scoring.find_bytes([], 55.0))


def test_bytes_count_as_equal_up_to_one_percent():
    """At either end of a method's points, and not between two of them, where interpolation is exact."""
    points = [point("a", 100.0, 60.0), point("b", 146.2, 70.0)]
    assert scoring.weigh_points(points, 146.5) == {"b": 1.0} == scoring.weigh_points(points, 147.6)
    assert scoring.weigh_points(points, 99.1) == {"a": 1.0}
    assert scoring.weigh_points(points, 98.9) is None is scoring.weigh_points(points, 148.0)
    assert scoring.weigh_points(points, 145.9) == pytest.approx(
        {"a": 0.0054, "b": 0.9946}, abs=1e-4
    )
    assert scoring.weigh_points([point("b", 146.2, 70.0)], 146.5) == {"b": 1.0}
    assert scoring.weigh_points([point("b", 0.0, 70.0)], 1e-3) is None
    close = [point("a", 100.0, 60.0), point("b", 100.2, 61.0)]
    assert scoring.weigh_points(close, 100.3) == {"b": 1.0}  # the nearest of two


def test_a_stored_method_with_almost_the_same_bytes_is_compared():
    """TCS sends 146.5 MB, and TCS with a random mask 146.2."""
    track = read_track()
    stored = track.analysis.model_copy(update={"methods": {"TCS": ["TCS"], "FedAvg": ["FedAvg"]}})
    track = dataclasses.replace(track, analysis=stored)
    scores = scoring.Scores(track, [track.find_scheme("TCS-Random")])
    one = next(c for c in scores.compare(scores.points[0]) if c.method == "TCS")
    gap = scores.points[0].accuracy - scores.stored["TCS"][0].accuracy
    assert one.equal_bytes.value == pytest.approx(gap) == one.without_start.value
    assert "sends at" not in one.reason
    far = next(c for c in scores.compare(scores.points[0]) if c.method == "FedAvg")
    assert math.isnan(far.equal_bytes.value) and "sends at least" in far.reason


def test_a_shorter_code_leaves_the_dense_start_as_it_is():
    one = scoring.Point("a", 0.5, 60.0, 0.1, 3, up=30.0, down=50.0, start=40.0)
    rows = {"a": {"recoded": 0.5, "beside_tcs": 1.0, "decodes": True}}
    assert tables.rows_table([("a", one)], rows)["MB up, re-coded"].tolist() == ["25"]
    none = dataclasses.replace(one, start=0.0)
    assert tables.rows_table([("a", none)], rows)["MB up, re-coded"].tolist() == ["15"]


def test_a_dense_start_can_be_left_out_of_both_ways():
    one = scoring.Point("a", 0.5, 60.0, 0.1, 3, 30.0, 10.0, 20.0)
    later = one.without_start()
    assert later.both == pytest.approx(20) and later.up == pytest.approx(15) and not later.start
    assert point("b", 4.0, 70.0).without_start() == point("b", 4.0, 70.0)


def test_the_interval_of_a_score_pools_the_deviation_of_all_methods():
    """Runs are off by ±1 and ±2: 10 over two degrees of freedom is 5, half of it for two runs. If both
    runs have nearly the same images right, these add their binomial variance; if each has images of its
    own, the deviation of a run contains this chance already."""
    accuracies = {("a", 1): 60.0, ("a", 2): 62.0, ("b", 1): 70.0, ("b", 2): 74.0}
    runs, order = [("a", 1), ("a", 2)], np.arange(1000)
    for shift, part in ((0, 61 * 39 / 1000), (390, 0.0)):
        right = {run: (order - shift * (run[1] - 1)) % 1000 < 10 * accuracies[run] for run in runs}
        half = scoring.compute_half_width(runs, lab.Comparison(accuracies, right), 0.95)
        seeds, images = 5 / 2, half_squared_images(right, runs)
        freedom = 2 * ((seeds + images) / seeds) ** 2
        expected = stdtrit(freedom, 0.975) * math.sqrt(seeds + images)
        assert half == pytest.approx(expected, rel=1e-6)
        assert images == pytest.approx(part, abs=0.15)
    single = {("a", 1): 60.0, ("b", 1): 70.0}
    right = dict.fromkeys(single, np.zeros(4, dtype=bool))
    assert math.isnan(scoring.compute_half_width([("a", 1)], lab.Comparison(single, right), 0.95))


def test_the_interval_of_a_score_pools_only_methods_that_scatter_alike():
    """a and b are off by ±1, c by ±10: 4 over two degrees of freedom is 2, half of it for two runs; for c
    it is 200 over one."""
    levels = {"a": (60.0, 62.0), "b": (70.0, 72.0), "c": (20.0, 40.0)}
    accuracies = {(name, seed): x for name, of in levels.items() for seed, x in enumerate(of)}
    right = dict.fromkeys(accuracies, np.zeros(4, dtype=bool))  # nothing comes from images
    model = lab.Comparison(accuracies, right, {"a": True, "b": True, "c": False})
    for name, variance, freedom in (("a", 2 / 2, 2), ("c", 200 / 2, 1)):
        half = scoring.compute_half_width([(name, 0), (name, 1)], model, 0.95)
        assert half == pytest.approx(stdtrit(freedom, 0.975) * math.sqrt(variance), rel=1e-6)


@pytest.mark.parametrize(
    ("accurate", "baseline", "expected"),
    [
        (2.0, 0.125, [True, True, False]),
        (1.0, 0.125, [True, False, False]),
        (None, 0.125, [True, True, True]),
        (2.0, math.nan, [True, True, True]),  # no Baseline is tuned yet
    ],
)
def test_accurate_methods_make_at_most_so_many_times_the_errors_of_the_baseline(
    accurate, baseline, expected
):
    """The three make as many errors as the Baseline, twice and three times as many."""
    tuned = [
        SimpleNamespace(name=name, chosen_error=times * 0.125)
        for name, times in (("a", 1), ("b", 2), ("c", 3))
    ]
    track = SimpleNamespace(
        analysis=SimpleNamespace(accurate=accurate),
        find_scheme=lambda name: SimpleNamespace(chosen_error={"Baseline": baseline}[name]),
    )
    assert tracks.Track.group_alike(track, tuned) == dict(zip("abc", expected, strict=True))


def test_the_stored_methods_have_two_deviations():
    """The committed tuning runs decide which methods are accurate, and intervals follow from it."""
    scores = scoring.Scores(read_track())
    groups = scores.model.groups
    assert groups["Baseline"] and groups["STC"] and not groups["rand-K-K16"]
    known = read_track().find_scheme("TCS")
    assert known.chosen_error == 1 - known.tried[known.chosen]
    accurate, other = (scores.model.fit.group_variance(group)[0] for group in (True, False))
    assert accurate < other
    halves = {p.scheme: p.half for points in scores.stored.values() for p in points}
    assert halves["TCS"] < halves["rand-K-K16"]


def half_squared_images(right, runs):
    """The variance of the mean over images, less what comes from single runs on single images."""
    one, other = (100.0 * right[run] for run in runs)
    mean, difference = (one + other) / 2, one - other
    return max(0.0, (mean.var(ddof=1) - difference.var(ddof=1) / 4) / len(mean))


@pytest.fixture
def scores():
    """Scores of the stored method M, whose points a and b send 2 and 5 MB, 1 MB of it at the start, and
    of N, which sends nothing. The points "low", "x" and "high" are those of another method."""
    track = SimpleNamespace(
        find_stored=dict, analysis=SimpleNamespace(confidence=0.95), group_alike=lambda tuned: {}
    )
    made = scoring.Scores(track)
    levels = {"a": 60.0, "b": 70.0, "none": 55.0, "low": 58.0, "x": 66.0, "high": 72.0}
    runs = {(name, seed): level + seed for name, level in levels.items() for seed in range(3)}
    made.model = lab.Comparison(runs, {})
    both, start = {"a": 2.0, "b": 5.0, "none": 0.0, "low": 1.5, "x": 3.0, "high": 9.0}, 1.0
    made.points = [
        scoring.Point(name, 0.5, level, 0.1, 3, both[name], 0.0, start if both[name] else 0.0)
        for name, level in levels.items()
    ]
    by_name = {point.scheme: point for point in made.points}
    made.stored = {"M": [by_name["a"], by_name["b"]], "N": [by_name["none"]]}
    return made, by_name


def test_a_point_between_those_of_a_stored_method_is_compared_with_it(scores):
    made, points = scores
    (found,) = made.compare(points["x"])
    at_three = 60 + 10 * math.log(3 / 2) / math.log(5 / 2)
    assert found.method == "M" and found.reason == ""
    assert found.equal_bytes.value == pytest.approx(66 - at_three)
    assert found.without_start.value == pytest.approx(66 - 65)  # 2 MB of 1 to 4
    assert found.megabytes == pytest.approx(2 * (5 / 2) ** 0.6)
    assert made.compare(points["a"]) == []  # nothing but itself, and what sends nothing


def test_every_stored_method_has_a_difference_whatever_it_sends(scores):
    """Also where nothing can be compared at equal bytes; then there are no columns for that."""
    made, points = scores
    for name, gap, ratio, equal in (("x", 66 - 70, 5 / 3, True), ("low", 58 - 70, 5 / 1.5, False)):
        (found,) = compared = made.compare(points[name])
        assert (found.usual, found.difference.value) == ("b", pytest.approx(gap))
        assert found.relative_bytes == pytest.approx(ratio)
        table = tables.comparison_table(compared, points[name])
        assert len(table.columns) == (7 if equal else 3)
        assert ("--densities" in tables.describe_comparison(compared)) != equal


@pytest.mark.parametrize(("name", "end"), [("low", "2 MB"), ("high", "5 MB")])
def test_a_point_beyond_those_of_a_stored_method_says_what_is_missing(scores, name, end):
    """Each reason names the end of the method's points that it is about."""
    made, points = scores
    (found,) = made.compare(points[name])
    assert math.isnan(found.equal_bytes.value) and math.isnan(found.megabytes)
    by_bytes, by_accuracy = found.reason.split("; ")
    assert end in by_bytes and end in by_accuracy


def test_the_front_has_no_point_that_another_beats():
    points = [
        point("a", 1.0, 60.0),
        point("b", 4.0, 70.0),
        point("c", 5.0, 69.0),
        point("d", 9, 71),
    ]
    assert [p.scheme for p in scoring.find_front(points)] == ["a", "b", "d"]


def test_the_projects_own_track_can_be_read():
    track = read_track()
    assert (
        track.name == "compare" and {"Baseline", "TCS", "LowRank"} <= track.analysis.methods.keys()
    )
    spans = track.plan.tuning.choose_on
    assert sum(end - start for start, end in spans) >= 15_000
    assert sum(end - start for start, end in track.plan.tuning.score_on) >= 10_000


@pytest.mark.parametrize(
    ("stages", "got"),
    [
        ("  - {stage: a, seeds: [1], tune: [TCS]}\n  - {stage: b, seeds: [2], tune: [TCS-K4]}", "seeds"),
        ("  - {stage: a, seeds: [1], runs: [{schemes: [TCS]}]}", "tuning"),
    ],
)  # fmt: skip
def test_a_track_has_one_list_of_seeds_and_tunes_every_method(folder, stages, got):
    plan = re.sub(r"(?<=stages:\n).*\n", f"{stages}\n", PLAN)
    if got == "tuning":
        plan = re.sub(r"tuning:\n(  .*\n)+", "", plan)
    (folder / "plan.yaml").write_text(plan, encoding="utf-8")
    with pytest.raises(ValueError, match=f"plan.yaml: stages: got .*{got}"):
        read_track(folder / "plan.yaml")


def test_a_track_stores_rows_of_planned_schemes_only(folder):
    wrong = PLAN.replace("TCS: [TCS, TCS-K4]", "TCS: [TCS, STC]")
    (folder / "plan.yaml").write_text(wrong, encoding="utf-8")
    with pytest.raises(ValueError, match=r"plan\.yaml.*STC"):
        read_track(folder / "plan.yaml")


def test_a_track_has_a_name(folder):
    (folder / "tiny.yaml").write_text(TRACK.replace("profile: tiny\n", ""), encoding="utf-8")
    with pytest.raises(ValueError, match=r"tiny\.yaml: profile: got none"):
        read_track(folder / "plan.yaml")


def test_outside_of_a_clone_a_plan_must_be_given(folder, monkeypatch, capsys):
    monkeypatch.setattr(tracks, "PLAN", folder / "params" / "compare_plan.yaml")
    assert main(["compare", "--list"]) == 2
    line = capsys.readouterr().err
    assert "compare_plan.yaml does not exist" in line and "--plan FILE" in line


# Wrong files ──────────────────────────────────────────────────────────────────────────────────────


def initialized(line):
    """A class with this line, the file's sixth, in its __init__."""
    return SIGNS.replace("class Signs:", f"class Signs:\n    def __init__(self):\n        {line}\n")


WRONG = {
    "nothing": ("x = 1\n", "no method in it"),
    "several": (SIGNS + SIGNS.replace("Signs", "Others"), "mine.py:Signs or"),
    "the paper's name": (
        '@tcs.register_scheme("TCS")\nclass Mine(tcs.TopK): pass\n', "mine.py, line 3: got an error",
    ),
    "a rival's name": (
        '@tcs.register_scheme("STC")\nclass Mine(tcs.TopK): pass\n', "STC, a built-in's name",
    ),
    "a built-in's name of a class": (SIGNS.replace("Signs", "LowRank"), "LowRank, a built-in's name"),
    "not Python": ("class Signs\n", "mine.py, line 3: got an error when it was executed (SyntaxError"),
    "it exits": ("import sys\nsys.exit(0)\n", "mine.py, line 4: got an error when it was executed"),
    "it needs arguments": (
        SIGNS.replace("class Signs:", "class Signs:\n    def __init__(self, share): pass\n"),
        "Signs.__init__() missing 1 required positional argument: 'share'",
    ),
    "two names": (
        SIGNS.replace("class Signs:", "class Signs:\n    name = 'Mine'")
        + SIGNS.replace("class Signs:", "class Others:\n    name = 'Mine'"),
        "got Mine (class Signs) and Mine (class Others), allowed: methods whose names differ",
    ),
    "names equal but for case": (
        SIGNS + SIGNS.replace("Signs", "SIGNS"), "got Signs (class Signs) and SIGNS (class SIGNS)",
    ),
    "the name of a rule": (
        '@tcs.register_scheme("signs")\nclass Mine(tcs.TopK): pass\n' + SIGNS,
        "got signs and Signs (class Signs)",
    ),
    "an unknown name": (initialized("self.share = SHARE"), "line 6: Signs: NameError: name 'SHARE'"),
    "a missing key": (initialized("self.share = {}['x']"), "line 6: Signs: KeyError: 'x'"),
    "an error of torch": (
        initialized("torch.zeros(2) @ torch.zeros(3)"), "line 6: Signs: RuntimeError: ",
    ),
    "an error of types": (initialized("self.share = 1 + 'x'"), "line 6: Signs: "),
    "it exits when it is made": (initialized("raise SystemExit(0)"), "line 6: Signs: SystemExit: 0"),
    "a second file": ("import no_such_helper\n", "a method must be in one file"),
    "a second file, later": (initialized("import no_such_helper"), "a method must be in one file"),
}  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        "0.01",
        "()",
        "torch.ones(2)",
        "[(1, 2)]",
        "[0.01, None]",
        "['low']",
        "[True]",
        "[float('nan')]",
    ],
)
def test_densities_are_a_list_of_numbers(folder, capsys, given):
    text = SIGNS.replace("class Signs:", f"class Signs:\n    densities = {given}\n")
    line = error_of(folder, capsys, written(folder, text))
    got = given.replace("float('nan')", "nan").replace("torch.ones(2)", "tensor([1., 1.])")
    assert f"Signs: densities: got {got}, allowed: a list or tuple of one or more numbers" in line


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_gets_one_line_that_names_it(folder, capsys, kind):
    text, said = WRONG[kind]
    before = dict(tcs.FAMILIES)
    line = error_of(folder, capsys, written(folder, text))
    assert "mine.py" in line and said in line
    if kind not in ("nothing", "several"):
        assert before == tcs.FAMILIES


TRIAL = "trial with eta 0.5 and seed 1, "
WRONG_RUNS = {
    "shape": ("return tensors[0][:1]", "0.weight: got shape"),
    "NaN": ("return torch.full(context.shape, torch.nan)", "0.weight: got NaN"),
    "no tensor": ("return None", "0.weight: got a NoneType, allowed: a tensor"),
    "error": ("return 1 / 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize("kind", WRONG_RUNS)
def test_a_wrong_answer_names_file_method_run_and_round(folder, capsys, kind):
    code, said = WRONG_RUNS[kind]
    text = f"""
class Wrong:
    def compress(self, tensor, name):
        self.round = getattr(self, "round", 0) + (name == "0.weight")
        return [tensor], self.round

    def decompress(self, tensors, context):
        if context == 3:
            {code.replace("context.shape", "tensors[0].shape")}
        return tensors[0]
"""
    line = error_of(folder, capsys, written(folder, text))
    assert "mine.py" in line and f": Wrong: {TRIAL}client 0, round 2: " in line and said in line


@pytest.mark.parametrize(
    "sent, said",
    [("[1.0], None", "payload: got a float, allowed: a list of tensors"),
     ("[tensor] * 300, None", "payload: got 300 tensors, allowed: at most 255"),
     ("tensor", "got Tensor, allowed: (tensors, context)"),
     ("[tensor], object()", "got a object"),
     ("[tensor.to_sparse()], None", "got a tensor of layout torch.sparse_coo")],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused(folder, capsys, sent, said):
    text = SIGNS.replace("[tensor >= 0, tensor.abs().mean()], None", sent)
    line = error_of(folder, capsys, written(folder, text))
    assert "mine.py, line" in line or "mine.py: Signs" in line
    assert f"Signs: {TRIAL}client 0, round 0: " in line and said in line


def test_finished_runs_stay_when_a_later_one_fails(folder, capsys):
    """An error at the second of two rates."""
    text = SIGNS.replace(
        "return torch.where",
        "if FAILS():\n            raise RuntimeError('in the middle')\n        return torch.where",
    )
    path = written(
        folder,
        f"calls = []\ndef FAILS():\n    calls.append(1)\n    return len(calls) > 450\n{text}",
    )
    line = error_of(folder, capsys, path)
    assert "RuntimeError: in the middle" in line and "mine.py, line" in line
    assert len(records(folder, "Signs")) == 1


def test_a_run_that_fails_after_the_trial_is_named(folder, capsys):
    """The trial plays six rounds, and a run eight."""
    text = """
@tcs.register_scheme("Late", phi_global=None, phi_local=0.1)
class Late(tcs.TopK):
    def observe(self, update_D):
        if self.round == 7:
            raise RuntimeError("late")
"""
    line = error_of(folder, capsys, written(folder, text))
    assert "Late: run with eta 0.25 and seed 11, round 7: RuntimeError: late" in line


LEAKS = """
@tcs.register_scheme("Leak", phi_global=None, phi_local=0.1, dense_warmup=False)
class Leak(tcs.TopK):
    def own_mask(self, intended_D, shared_D, k):
        others = getattr(self, "chosen", {}).get(self.round, shared_D)
        mask = super().own_mask(intended_D, others, k)
        self.chosen = {self.round: others | tcs.positions_to_mask(mask, len(others))}
        return mask
"""
STORE = """
class Store:
    store = {}

    def compress(self, tensor, name):
        self.store[name] = tensor.clone()
        return [tensor[:0]], None

    def decompress(self, tensors, context):
        return self.store[context.name]
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [(LEAKS, "own_mask: each client must find its mask by itself"),
     (STORE, "Store: store: got an attribute of the class that changes"),
     (STORE.replace("class Store:\n    store = {}", "class Base:\n    store = {}\n\n\nclass Store(Base):"),
      "Base: store: got an attribute of the class that changes")],
)  # fmt: skip
def test_what_a_receiver_cannot_know_is_refused_before_the_first_run(folder, capsys, text, said):
    assert said in error_of(folder, capsys, written(folder, text))
    assert not list((folder / "results").rglob("*.json"))


def test_a_rule_without_a_dense_start_shares_nothing_at_first(folder, capsys):
    text = """
@tcs.register_scheme("Mine", dense_warmup=False)
class Mine(tcs.TCS):
    pass
"""
    assert compare(folder, written(folder, text), "--dry-run") == 0
    assert "Four rounds were played without a mistake" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["-Q5", "-K4", "-LF", "-S2"])
def test_suffixes_about_what_is_sent_are_refused_for_a_class(folder, capsys, suffix):
    for name in (f"{written(folder, SIGNS)}:Signs{suffix}", f"LowRank{suffix}"):
        line = error_of(folder, capsys, name)
        assert "makes no sense" in line or "decides itself what is sent, allowed: -L<H>" in line


def test_densities_of_a_class_keep_other_suffixes():
    assert find_method("LowRank-L4").names == ("LowRank-L4", "LowRank-1-L4", "LowRank-4-L4")
    assert find_method("LowRank-1").names == ("LowRank-1", "LowRank", "LowRank-4")


def test_two_methods_never_share_a_folder():
    names = ("TCS", "TCS+", "TCS++", "TCS-Global Momentum", "EF-signSGD-D1")
    folders = [find_method(name).folder for name in names]
    assert folders == ["TCS", "TCS+", "TCS++", "TCS-Global_Momentum", "EF-signSGD-D1"]


def test_a_method_that_diverges_at_the_first_rate_is_no_mistake(folder, capsys):
    """The trial of it is over early; its runs find the rates at which it does not diverge."""
    text = SIGNS.replace("tensor.abs().mean()", "1e30 * tensor.abs().mean()")
    assert compare(folder, written(folder, text), "--dry-run") == 0
    assert "Signs diverged in its first rounds" in capsys.readouterr().out


def test_a_file_with_a_byte_order_mark_is_read(folder):
    path = folder / "mine.py"
    path.write_bytes(b"\xef\xbb\xbf" + written(folder, SIGNS).read_bytes())
    assert find_method(str(path)).name == "Signs"


def test_a_mask_rule_that_is_wrong_is_named(folder, capsys):
    text = """
@tcs.register_scheme("Mine", phi_global=None, phi_local=0.1)
class Mine(tcs.TopK):
    def own_mask(self, intended_D, shared_D, k):
        if self.round < 5:
            return super().own_mask(intended_D, shared_D, k)
        return torch.arange(k + 1)
"""
    line = error_of(folder, capsys, written(folder, text))
    assert "mine.py" in line and f"Mine: {TRIAL}client 0, round 5: own_mask: got" in line


def test_workers_read_the_file_too_and_its_error_comes_back_in_one_line(
    folder, capsys, forked_workers
):
    path = written(folder, SIGNS.replace("-tensors[1])", "-tensors[1]) + 1 / 0"))
    line = error_of(folder, capsys, path, "--jobs", "2")
    assert "mine.py, line 9: Signs: " in line and "ZeroDivisionError" in line


def test_a_method_that_diverges_is_a_result(folder, capsys):
    text = SIGNS.replace("-tensors[1])", "-tensors[1]) * 1e30")
    path = written(folder, text)
    assert compare(folder, path) == 1
    assert "diverged: mine.py: Signs" in capsys.readouterr().err


HALVES = """
class Halves:
    downlink = {downlink}

    def compress(self, tensor, name):
        return {sent}

    def decompress(self, tensors, context):
        return tensors[0].float() * (context if isinstance(context, float) else 1.0)
"""


@pytest.mark.parametrize("downlink, who", [(False, "client 0"), (True, "server")])
@pytest.mark.parametrize(
    "sent", ["[tensor.half()], None", "[tensor / tensor.norm()], tensor.norm().half().item()"]
)
def test_what_half_precision_cannot_hold_counts_as_diverged(folder, downlink, who, sent):
    path = written(folder, HALVES.format(downlink=downlink, sent=sent))
    compressor = tcs.Compressor(find_method(str(path)).name, [30, 20], 2)
    compressor.step(torch.ones(2, 50))
    large_ND = torch.full((2, 50), 1e5)
    if downlink:  # only their sum is too large for half precision
        client, other = compressor.clients[0], compressor.clients[1]
        client.side.instance.compress = other.side.instance.compress = lambda t, _: ([t], None)
    with pytest.raises(tcs.NotFiniteError, match=f"^{who}: the update is not finite"):
        compressor.step(large_ND)


def test_infinity_from_a_small_difference_is_a_mistake_of_the_method(folder):
    path = written(folder, HALVES.format(downlink=False, sent="[tensor / 0.0], None"))
    compressor = tcs.Compressor(find_method(str(path)).name, [30, 20], 2)
    with pytest.raises(ValueError, match="got NaN or infinity, allowed: finite") as raised:
        compressor.step(torch.ones(2, 50))
    assert not isinstance(raised.value, tcs.NotFiniteError)


def test_what_is_neither_file_nor_method_is_refused(folder, capsys):
    assert "nowhere.py does not exist" in error_of(folder, capsys, folder / "nowhere.py")
    assert "scheme 'Unknown' is unknown" in error_of(folder, capsys, "Unknown")
    path = written(folder, SIGNS)
    assert "got Other, allowed: the methods in it, Signs" in error_of(
        folder, capsys, f"{path}:Other"
    )
    assert "which has one density" in error_of(folder, capsys, path, "--densities")


def test_an_older_version_of_a_file_is_registered_again(folder):
    """In one process, as in a notebook: a file is changed, and changed back."""
    texts = [SIGNS, SIGNS.replace("abs().mean()", "abs().max()")]
    updates, deltas_ND = [], torch.randn(3, 50)
    for text in (*texts, texts[0]):
        method = find_method(str(written(folder, text)))
        updates.append(tcs.Compressor(method.name, [30, 20], 3).step(deltas_ND))
    assert torch.equal(updates[0], updates[2]) and not torch.equal(updates[0], updates[1])
