"""The sensitivity study: its file, its runs, its table from records alone."""

import copy
import math

import pytest
import tcs_lab as lab
import yaml
from common import READERS
from tcs_lab.__main__ import main

SWEEP = lab.ROOT / "params" / "sensitivity.yaml"
TINY = {"dataset": "synthetic", "train_samples": 80, "test_samples": 20, "model": "resnet8", "width": 2,
        "clients": 2, "batch_size": 4, "epochs": 2, "reference_batch": None, "threads": 1, "profile": "ci"}  # fmt: skip
SMALL = {
    "base": {"schemes": ["TCS-Q5"], "learning_rate": 0.1},
    "settings": {
        "phi_local": {"label": "own share", "values": [0.001, 0.01], "paper": 0.001},
        "value_bits": {"label": "bits", "named": {5: "TCS-Q5", 32: "TCS"}, "paper": 5},
        "dirichlet_alpha": {"label": "skew", "values": {"IID": None, "1": 1}},
    },
}
SWEPT = lab.evidence.sensitivity.SensitivitySweep.model_validate(SMALL)


@pytest.fixture
def files(tmp_path):
    """A tiny sweep, a tiny profile and a results folder, as words of the command line."""
    for name, content in (("sweep", SMALL), ("profile", TINY)):
        text = yaml.safe_dump(content, sort_keys=False)
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    return ["--params", str(tmp_path / "profile.yaml"), "--sweep", str(tmp_path / "sweep.yaml"),
            "--results", str(tmp_path / "results")]  # fmt: skip


def runs(folder):
    return sorted(path.name for path in (folder / "results" / "ci" / "runs").glob("*.json"))


# The file ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("profile", ["short", "gpu"])
def test_the_file_plans(profile):
    sweep = lab.read_sensitivity(SWEEP)
    params = lab.read_params([lab.ROOT / f"params/{profile}.yaml"])
    for name, setting in sweep.settings.items():
        points = lab.sensitivity_plan(sweep, params, name)
        assert len(points) == len(setting.choices) * len(setting.schemes or [1])
        assert all(len(configs) == params["seeds"] for configs in points.values())


def test_the_papers_choice_is_the_base():
    """Where the paper's choice is marked stands the run that all settings share."""
    sweep = lab.read_sensitivity(SWEEP)
    params = lab.read_params([lab.ROOT / "params/short.yaml"]) | {"seeds": [0]}
    base = lab.plan(sweep.base | params)[0]
    marked = 0
    for name, setting in sweep.settings.items():
        for (shown, _), configs in lab.sensitivity_plan(sweep, params, name).items():
            if setting.marked:
                chosen = shown == setting.marked
                assert (configs[0].record_name == base.record_name) == chosen, (name, shown)
                marked += chosen
    assert marked == 7


def changed(*path, to):
    """SMALL with one thing changed (or, `to` ..., taken out), as YAML."""
    sweep = copy.deepcopy(SMALL)
    place = sweep
    for key in path[:-1]:
        place = place[key]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return yaml.safe_dump(sweep, sort_keys=False)


PHI, BITS = ("settings", "phi_local"), ("settings", "value_bits")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[]", "got list, allowed: a mapping"),
        (changed("bases", to=1), "bases: got 1"),
        (changed("base", to=[]), "base: got []"),
        (changed("base", to={}), "schemes: got None"),
        (changed("base", "lr", to=1), "unknown parameter: lr"),
        (changed("settings", to={}), "settings: got {}"),
        (changed("settings", "phi", to=SMALL["settings"]["phi_local"]), "settings: got 'phi', allowed: bad_message, "),
        (changed("settings", "profile", to={"label": "x", "values": ["a", "b"]}), "settings: got 'profile', allow"),
        (changed(*PHI, to=3), "phi_local: got 3"),
        (changed(*PHI, "label", to=...), "phi_local: label: got"),
        (changed(*PHI, "label", to=7), "label: got 7"),
        (changed(*PHI, "value", to=[1]), "phi_local: value: got [1]"),
        (changed(*PHI, "values", to=...), "of values and named"),
        (changed(*PHI, "named", to={5: "TCS-Q5"}), "of values and named"),
        (changed(*PHI, "values", to=[]), "got the values [], allowed: two"),
        (changed(*PHI, "values", to=[0.1]), "got the values ['0.1'], allowed: two"),
        (changed(*PHI, "values", to=[0.001, 7]), "phi_local 7: phi_local: got 7 (int), allowed: "),
        (changed(*PHI, "values", to=[0.1, None]), "got None, allowed: a number"),
        (changed(*PHI, "values", to=[0.1, 0.1]), "got the values ['0.1'], allowed: two"),
        (changed(*PHI, "paper", to=0.5), "paper: got 0.5, allowed: one of 0.001, 0.01"),
        (changed(*PHI, "schemes", to="TCS"), "schemes: got 'TCS'"),
        (changed(*PHI, "schemes", to=["TCX"]), "'TCX' is unknown"),
        (changed(*BITS, "named", to={5: "TCS-Q5"}), "got the values ['5'], allowed: two"),
        (changed(*BITS, "named", to={5: "TCS-Q5", 4: "TCS"}), "value_bits: got 4 for TCS, allowed: 32"),
        (changed(*BITS, "schemes", to=["TCS"]), "schemes: got ['TCS']"),
        (changed("settings", "clients", to=SMALL["settings"]["value_bits"]), "settings: got 'clients', allowed: centr"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_told_what_is_wrong(tmp_path, text, names):
    path = tmp_path / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        lab.read_sensitivity(path)
    assert str(error.value).startswith(str(path)) and names in str(error.value)
    assert len(str(error.value)) < 1200


# The runs ─────────────────────────────────────────────────────────────────────────────────────────


def test_one_setting_is_varied_and_the_base_is_shared():
    plans = {
        name: lab.sensitivity_plan(SWEPT, TINY | {"seeds": 2}, name) for name in SWEPT.settings
    }
    assert list(plans["phi_local"]) == [("0.001", "TCS-Q5"), ("0.01", "TCS-Q5")]
    assert list(plans["value_bits"]) == [("5", "TCS-Q5"), ("32", "TCS")]
    assert list(plans["dirichlet_alpha"]) == [("IID", "TCS-Q5"), ("1", "TCS-Q5")]
    assert all(c.clients == 2 for plan in plans.values() for runs in plan.values() for c in runs)
    assert [c.seed for c in plans["phi_local"][("0.01", "TCS-Q5")]] == [0, 1]
    assert plans["phi_local"][("0.01", "TCS-Q5")][0].scheme.phi_local == 0.01
    assert plans["value_bits"][("32", "TCS")][0].scheme.value_bits == 32
    assert plans["dirichlet_alpha"][("1", "TCS-Q5")][0].dirichlet_alpha == 1.0
    names = [c.record_name for plan in plans.values() for runs in plan.values() for c in runs]
    assert len(names) == 12 and len(set(names)) == 8
    with pytest.raises(ValueError, match="setting: got 'phi', allowed: phi_local, value_bits, dir"):
        lab.sensitivity_plan(SWEPT, TINY, "phi")


def test_the_command_makes_the_runs_and_the_table_is_rebuilt_from_them(tmp_path, files, capsys):
    words = ["sensitivity", *files, "--setting", "phi_local", "--seed", "3"]
    assert main(words) == 0
    assert "| phi_local | 0.01 | TCS-Q5 |" in capsys.readouterr().out
    made = runs(tmp_path)
    assert len(made) == 2 and all(name.startswith("TCS-Q5-0.1-3-") for name in made)
    only = ["--setting", "value_bits", "--scheme", "TCS", "--seed", "3", "--seed", "4"]
    assert main(["sensitivity", *files, *only]) == 0
    assert len(runs(tmp_path)) == 4  # the base with 5 bits is not made again, nor with seed 4
    written = []
    for folder in ("one", "two"):
        table = lab.sensitivity_table(SWEPT, TINY | {"seeds": 9}, results=tmp_path / "results")
        lab.save_table(table, tmp_path / folder, "Title", lab.readable_sensitivity)
        written.append([(tmp_path / folder).with_suffix(s).read_bytes() for s in (".csv", ".md")])
    assert written[0] == written[1]
    assert list(table["n"]) == [1, 1, 1, 1, 1, 0]  # seed 4 has no base with 5 bits beside it
    assert table["records"][0] in made and table["records"][2] == table["records"][0]
    assert table["accuracy"][:5].between(0, 1).all() and math.isnan(table["accuracy"][5])
    assert table["megabytes_up"][1] > table["megabytes_up"][0] > table["megabytes_warmup"][0] / 2
    (record,) = lab.load_records(lab.sensitivity_plan(SWEPT, TINY | {"seeds": [3]}, "phi_local")[("0.01", "TCS-Q5")],
                             tmp_path / "results").values()  # fmt: skip
    assert table["accuracy"][1] == record["rows"][-1]["accuracy"]
    assert table["megabytes_up"][1] == lab.traffic(record)["up"] / 1e6


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--setting", "luck"], "setting: got 'luck', allowed: phi_local"), (["--scheme", "top-K"], "top-K; allowed: TCS"),
     (["--sweep", "/no/such.yaml"], "/no/such.yaml"), (["--set", "clients=500"], "clients: got 500"),
     (["--set", "epochs=0"], "phi_local 0.001: epochs: got 0"),
     (["--set", "lr=1"], "unknown parameter: lr"), (["--seed", "-1"], "seeds"), (["--jobs", "0"], "jobs")],
)  # fmt: skip
def test_errors_are_one_line_and_rc_2(tmp_path, files, capsys, words, message):
    assert main(["sensitivity", *files, *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("error: ") and message in error[0]
    assert not list(tmp_path.glob("results/**/*.json"))


# What stands in results/ ──────────────────────────────────────────────────────────────────────────


FOLDERS = [
    f.parent for f in lab.ROOT.glob("results/*/sensitivity.csv") if f.parent.name not in READERS
]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_table_is_rebuilt_from_the_records(folder, tmp_path):
    """The same bytes, from nothing but params/ and the records."""
    params = lab.read_params([lab.ROOT / f"params/{folder.name}.yaml"]) | {"seeds": 100}
    table = lab.sensitivity_table(lab.read_sensitivity(SWEEP), params)
    title = (folder / "sensitivity.md").read_text(encoding="utf-8").split("**")[1]
    lab.save_table(table, tmp_path / "sensitivity", title, lab.readable_sensitivity)
    for suffix in (".csv", ".md"):
        made, there = ((f / "sensitivity").with_suffix(suffix) for f in (tmp_path, folder))
        assert made.read_bytes() == there.read_bytes()
