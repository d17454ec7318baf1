"""The sensitivity study: its file, its runs, its table, figures and rule, from records alone."""

import copy
import math

import pandas as pd
import pytest
import tcs_lab as lab
import yaml

SWEEP = lab.ROOT / "params" / "sensitivity.yaml"
TINY = {"dataset": "synthetic", "train_samples": 80, "test_samples": 20, "model": "resnet8", "width": 2,
        "clients": 2, "batch_size": 4, "epochs": 2, "reference_batch": None, "threads": 1, "profile": "ci"}  # fmt: skip
SMALL = {
    "margin": 0.5,
    "base": {"schemes": ["TCS-Q5"], "learning_rate": 0.1},
    "settings": {
        "phi_local": {"label": "own share", "values": [0.001, 0.01], "paper": 0.001},
        "value_bits": {"label": "bits", "named": {5: "TCS-Q5", 32: "TCS"}, "paper": 5},
        "dirichlet_alpha": {"label": "skew", "values": {"IID": None, "1": 1}, "given": True},
    },
}


@pytest.fixture
def files(tmp_path):
    """A tiny sweep, a tiny profile and a results folder, as words of the command line."""
    for name, content in (("sweep", SMALL), ("profile", TINY)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return ["--params", str(tmp_path / "profile.yaml"), "--sweep", str(tmp_path / "sweep.yaml"),
            "--results", str(tmp_path / "results")]  # fmt: skip


def runs(folder):
    return sorted(path.name for path in (folder / "results" / "ci" / "runs").glob("*.json"))


# The file ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_the_file_plans(profile):
    sweep = lab.read_sensitivity(SWEEP)
    params = lab.read_params([lab.ROOT / f"params/{profile}.yaml"])
    for name, setting in sweep["settings"].items():
        points = lab.sensitivity_plan(sweep, params, name)
        values = len(setting.get("values", setting.get("named")))
        assert len(points) == values * len(setting.get("schemes", [1]))
        assert all(len(configs) == params["seeds"] for configs in points.values())


def test_the_papers_choice_is_the_base():
    """Where the paper's choice is marked stands the run that all settings share."""
    sweep = lab.read_sensitivity(SWEEP)
    params = lab.read_params([lab.ROOT / "params/cpu.yaml"]) | {"seeds": [0]}
    base = lab.plan(sweep["base"] | params)[0]
    marked = 0
    for name, setting in sweep["settings"].items():
        for (shown, _), configs in lab.sensitivity_plan(sweep, params, name).items():
            if "paper" in setting:
                chosen = shown == str(setting["paper"])
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
        (changed("margins", to=1), "unknown key: margins; allowed: base, margin, settings"),
        (changed("margin", to=...), "margin: got None"),
        (changed("margin", to=-1), "margin: got -1"),
        (changed("base", to=[]), "base: got []"),
        (changed("base", to={}), "schemes: got None"),
        (changed("base", "lr", to=1), "unknown parameter: lr"),
        (changed("settings", to={}), "settings: got {}"),
        (changed("settings", "phi", to=SMALL["settings"]["phi_local"]), "'phi': is no parameter"),
        (changed("settings", "profile", to={"label": "x", "values": ["a", "b"]}), "'profile': is no"),
        (changed(*PHI, to=3), "'phi_local': got 3"),
        (changed(*PHI, "label", to=...), "'phi_local': got {'paper'"),
        (changed(*PHI, "label", to=7), "label: got 7, allowed: text"),
        (changed(*PHI, "given", to="x"), "given: got 'x', allowed: true or false"),
        (changed(*PHI, "value", to=[1]), "unknown key: value"),
        (changed(*PHI, "values", to=...), "either values or named"),
        (changed(*PHI, "named", to={5: "TCS-Q5"}), "either values or named"),
        (changed(*PHI, "values", to=[0.1]), "values: got [0.1], allowed: a list"),
        (changed(*PHI, "values", to=[0.1, 7]), "phi_local: got 7 (int), allowed: a share"),
        (changed(*PHI, "values", to=[0.1, None]), "got None, allowed: numbers, or word: value"),
        (changed(*PHI, "values", to=[0.1, 0.1]), "got 0.1, 0.1, allowed: each once"),
        (changed(*PHI, "paper", to=0.5), "paper: got 0.5, allowed: one of 0.001, 0.01"),
        (changed(*PHI, "schemes", to="TCS"), "schemes: got 'TCS'"),
        (changed(*PHI, "schemes", to=["TCX"]), "'TCX' is unknown"),
        (changed(*BITS, "named", to={5: "TCS-Q5"}), "allowed: value: scheme, two or more"),
        (changed(*BITS, "named", to={5: "TCS-Q5", 4: "TCS"}), "TCS has 32, not 4"),
        (changed(*BITS, "schemes", to=["TCS"]), "allowed only beside values"),
        (changed("settings", "clients", to=SMALL["settings"]["value_bits"]), "nothing that a scheme"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_told_what_is_wrong(tmp_path, text, names):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        lab.read_sensitivity(path)
    assert str(error.value).startswith(str(path)) and names in str(error.value)
    assert len(str(error.value)) < 1200


# The runs ─────────────────────────────────────────────────────────────────────────────────────────


def test_one_setting_is_varied_and_the_base_is_shared():
    plans = {
        name: lab.sensitivity_plan(SMALL, TINY | {"seeds": 2}, name) for name in SMALL["settings"]
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
        lab.sensitivity_plan(SMALL, TINY, "phi")


def test_the_command_makes_the_runs_and_the_table_is_rebuilt_from_them(tmp_path, files, capsys):
    words = ["sensitivity", *files, "--setting", "phi_local", "--seed", "3"]
    assert lab.__main__.main(words) == 0
    assert "| phi_local | 0.01 | TCS-Q5 |" in capsys.readouterr().out
    made = runs(tmp_path)
    assert len(made) == 2 and all(name.startswith("TCS-Q5-0.1-3-") for name in made)
    only = ["--setting", "value_bits", "--scheme", "TCS", "--seed", "3", "--seed", "4"]
    assert lab.__main__.main(["sensitivity", *files, *only]) == 0
    assert len(runs(tmp_path)) == 4  # the base with 5 bits is not made again, nor with seed 4
    written = []
    for folder in ("one", "two"):
        table = lab.sensitivity_table(SMALL, TINY | {"seeds": 9}, results=tmp_path / "results")
        lab.save_table(table, tmp_path / folder, "Title", lab.readable_sensitivity)
        written.append([(tmp_path / folder).with_suffix(s).read_bytes() for s in (".csv", ".md")])
    assert written[0] == written[1]
    assert list(table["n"]) == [1, 1, 1, 1, 1, 0]  # seed 4 has no base with 5 bits beside it
    assert table["records"][0] in made and table["records"][2] == table["records"][0]
    assert table["accuracy"][:5].between(0, 1).all() and math.isnan(table["accuracy"][5])
    assert table["megabytes_up"][1] > table["megabytes_up"][0] > table["megabytes_warmup"][0] / 2
    (record,) = lab.recorded(lab.sensitivity_plan(SMALL, TINY | {"seeds": [3]}, "phi_local")[("0.01", "TCS-Q5")],
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
    assert lab.__main__.main(["sensitivity", *files, *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("error: ") and message in error[0]
    assert not list(tmp_path.glob("results/**/*.json"))


# The rule, and what is drawn ──────────────────────────────────────────────────────────────────────


def rows(*points, setting="phi_local"):
    """A table's rows: (value, accuracy, std, megabytes up, n)."""
    columns = ["value", "accuracy", "accuracy_std", "megabytes_up", "n"]
    table = pd.DataFrame(points, columns=columns)
    fixed = {"setting": setting, "scheme": "TCS-Q5", "diverged": 0, "records": ""}
    return table.assign(megabytes_down=table["megabytes_up"], megabytes_warmup=0.5, **fixed)


NONE = math.nan


@pytest.mark.parametrize(
    ("points", "value", "best"),
    [
        ([("a", 0.700, NONE, 1.0, 1), ("b", 0.705, NONE, 2.0, 1)], "a", "b"),  # just within
        ([("a", 0.699, NONE, 1.0, 1), ("b", 0.705, NONE, 2.0, 1)], "b", "b"),
        (
            [("a", 0.699, 0.02, 1.0, 3), ("b", 0.705, 0.001, 2.0, 3)],
            "b",
            "b",
        ),  # the best one's counts
        ([("a", 0.690, 0.001, 1.0, 3), ("b", 0.705, 0.02, 2.0, 3)], "a", "b"),
        ([("a", 0.704, NONE, 2.0, 1), ("b", 0.705, NONE, 2.0, 1)], "b", "b"),  # as cheap, better
        ([("a", NONE, NONE, 1.0, 0), ("b", 0.705, NONE, 2.0, 1)], "b", "b"),  # diverged
    ],
)
def test_the_cheapest_value_near_the_best_one_is_chosen(points, value, best):
    chosen, most = lab.cheapest_near_best(rows(*points), 0.5)
    assert (chosen["value"], most["value"]) == (value, best)


def test_without_bytes_or_accuracy_nothing_is_chosen():
    assert lab.cheapest_near_best(rows(("a", 0.7, NONE, NONE, 1)), 0.5) is None
    assert lab.cheapest_near_best(rows(("a", NONE, NONE, 1.0, 0)), 0.5) is None


def test_a_setting_with_fewer_than_two_values_is_neither_drawn_nor_judged():
    table = rows(("0.001", 0.7, NONE, 1.0, 1), ("0.01", NONE, NONE, NONE, 0))
    assert lab.sensitivity_curves(table, SMALL["settings"]["phi_local"]) == {}
    assert lab.sensitivity_choices(table, SMALL).empty


def test_choices_are_text_for_what_is_chosen_and_what_is_given():
    mine = rows(("0.001", 0.700, NONE, 1.0, 1), ("0.01", 0.704, 0.001, 2.0, 3))
    skew = rows(("IID", 0.7, NONE, 1.0, 1), ("1", 0.6, NONE, 1.0, 1), setting="dirichlet_alpha")
    chosen, given = lab.sensitivity_choices(pd.concat([mine, skew]), SMALL).to_dict("records")
    assert chosen == {"Setting": "phi_local", "Scheme": "TCS-Q5", "Most accurate": "0.01 (70.40 ± 0.10 %)",
                      "Choose": "0.001", "Points": "−0.40", "MB both ways": "2 instead of 4", "Paper": "0.001",
                      "n": "1 to 3"}  # fmt: skip
    assert given["Choose"] == "given; worst: 1" and given["Points"] == "−10.00"


def test_a_figure_tells_what_diverged_and_how_many_trials_there_are(tmp_path):
    table = rows(("0.001", 0.7, NONE, 1.0, 1), ("0.01", NONE, NONE, 2.0, 2)).assign(diverged=[0, 1])
    setting = SMALL["settings"]["phi_local"]
    figure = lab.sensitivity_figure(lab.sensitivity_curves(table, setting), setting, "Title")
    lab.save_figure(figure, tmp_path / "figure")
    text = (tmp_path / "figure.svg").read_text()
    assert "1 diverged" in text and "n = 1 to 2" in text and "the paper's choice" in text


def test_schemes_that_are_the_values_share_a_curve():
    table = rows(("5", 0.7, NONE, 1.0, 1), ("32", 0.6, NONE, 2.0, 1), setting="value_bits")
    table["scheme"] = ["TCS-Q5", "TCS"]
    (name,) = lab.sensitivity_curves(table, SMALL["settings"]["value_bits"])
    assert name == "TCS-Q5 … TCS"
    assert list(lab.sensitivity_curves(table, SMALL["settings"]["phi_local"])) == ["TCS-Q5", "TCS"]


# What stands in results/ ──────────────────────────────────────────────────────────────────────────


FOLDERS = [
    f
    for f in (lab.ROOT / "results").iterdir()
    if (f / "sensitivity.csv").is_file() and f.name != "ci"
]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_table_and_figures_are_rebuilt_from_the_records(folder, tmp_path):
    """The same bytes, from nothing but params/ and the records."""
    import matplotlib

    sweep = lab.read_sensitivity(SWEEP)
    params = lab.read_params([lab.ROOT / f"params/{folder.name}.yaml"]) | {"seeds": 100}
    table = lab.sensitivity_table(sweep, params)
    title = (folder / "sensitivity.md").read_text().split("**")[1]
    lab.save_table(table, tmp_path / "sensitivity", title, lab.readable_sensitivity)
    for name, setting in sweep["settings"].items():
        curves = lab.sensitivity_curves(table[table["setting"] == name], setting)
        if curves:
            figure = lab.sensitivity_figure(curves, setting, f"{title}: {name}")
            lab.save_figure(figure, tmp_path / f"sensitivity_{name}")
    tested = f'"matplotlib=={matplotlib.__version__}"' in (lab.ROOT / "pyproject.toml").read_text()
    suffixes = (".csv", ".md", ".png", ".svg") if tested else (".csv", ".md")
    rebuilt = sorted(f.name for f in tmp_path.iterdir() if f.suffix in suffixes)
    assert len(rebuilt) >= 2
    different = [n for n in rebuilt if (folder / n).read_bytes() != (tmp_path / n).read_bytes()]
    assert not different
