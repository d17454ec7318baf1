"""Settings: configurations, params files, the plan of a table."""

import importlib
import linecache
import math
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import tcs_lab as lab
import torch
import yaml
from tcs_lab.studies import nodes
from tcs_lab.training import configuration as settings

import tcs_core as tcs

PARAMS = Path(lab.ROOT) / "params"
PROFILES = ("ci", "quick", "small", "cpu", "cpu18", "gpu", "paper", "text")

BASE = {"schemes": ["TCS"], "epochs": 4}

WRONG = [
    ("learning_rate", "1e-3"), ("learning_rate", 0), ("learning_rate", math.nan), ("learning_rate", math.inf),
    ("learning_rate", None), ("epochs", 0), ("epochs", 1.5), ("epochs", "3"), ("epochs", True),
    ("batch_size", -1), ("clients", 0), ("clients", 2.0), ("participation", 0), ("participation", 1.1),
    ("width", 0), ("model", "vgg"), ("dataset", "mnist"), ("precision", "fp16"), ("weight_decay", -1e-4),
    ("weight_decay", "1e-4"), ("drops", [0.9, 0.1]), ("drops", [1]), ("drops", 0.5), ("drops", ["1e-1"]),
    ("dirichlet_alpha", 0), ("threads", 0), ("device", "tpu"), ("profile", "../up"), ("profile", ""),
    ("phi_global", 0), ("phi_global", 1.01), ("phi_global", -0.1), ("phi_global", "1e-2"),
    ("phi_local", math.nan), ("phi_local", 2), ("warmup_epochs", 4), ("warmup_epochs", -1),
    ("reference_batch", 0), ("seeds", 0), ("seeds", []), ("seeds", [0, -1]), ("seeds", "3"), ("seeds", True),
    ("schemes", []), ("schemes", "TCS"), ("schemes", [3]), ("schemes", None), ("train_samples", 0),
    ("jobs", 0), ("jobs", "2"), ("paper", [1]), ("table", "one"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_wrong_value_is_an_error_with_key_value_and_what_is_allowed(key, value):
    with pytest.raises(ValueError, match="allowed") as raised:
        lab.plan(BASE | {key: value})
    assert key in str(raised.value)
    assert repr(value) in str(raised.value) or str(value) in str(raised.value)


def test_text_that_looks_like_a_number_gets_a_hint():
    with pytest.raises(ValueError, match=r"write 1.0e-3"):
        lab.plan(BASE | yaml.safe_load("learning_rate: 1e-3"))


def test_an_unknown_key_is_an_error_that_lists_the_known():
    with pytest.raises(
        ValueError, match=r"unknown parameter: learning_rte; allowed: .*learning_rate"
    ):
        lab.plan(BASE | {"learning_rte": 0.1})


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("table", [1, 2, 3])
def test_every_table_in_every_profile_is_a_plan(table, profile):
    params = lab.read_params([PARAMS / f"table{table}.yaml", PARAMS / f"{profile}.yaml"])
    configs = lab.plan(params)
    assert [c.scheme.name for c in configs if c.seed == 0] == list(params["paper"])
    assert {c.profile for c in configs} == {profile}


@pytest.mark.parametrize("name", ["table1.yaml", "ci.yaml"])
def test_files_that_are_no_params(tmp_path, name):
    for text in ("[1, 2]", "a: [", "\x00"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=name):
            lab.read_params([path])


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("rivals_quick.yaml", "rivals_small.yaml, rivals_text.yaml"), ("nope.yaml", "ci.yaml, .*")],
)
def test_a_file_that_is_not_there_names_those_that_are(name, allowed):
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist, allowed: {allowed}"):
        lab.read_params([PARAMS / name])


def test_a_phi_in_params_replaces_that_of_schemes_that_have_one():
    configs = lab.plan(BASE | {"schemes": ["TCS", "top-K", "FedAvg"], "phi_global": 0.05})
    assert [c.scheme.phi_global for c in configs] == [0.05, None, 1.0]


# Derived numbers ──────────────────────────────────────────────────────────────────────────────────


def paper(scheme, **changes):
    return lab.RunConfig(scheme, **({"profile": "paper", "warmup_epochs": 5} | changes))


def test_the_papers_schedule():
    """eta = 0.5: from 0.1 over five epochs, then 0.5, 0.05 after 150 and 0.005 after 225 of 300."""
    rate = paper("TCS").learning_rate_at
    found = [rate(e) for e in (0, 2.5, 5, 149.9, 150, 224.9, 225, 299)]
    assert found == pytest.approx([0.1, 0.3, 0.5, 0.5, 0.05, 0.05, 0.005, 0.005])


def test_without_a_dense_warm_up_the_learning_rate_does_not_rise():
    with_, without = (lab.RunConfig(tcs.Scheme.named(n), epochs=60) for n in ("TCS", "TCS-NW"))
    assert (with_.warmup, without.warmup) == (1, 0)
    assert with_.learning_rate_at(0) == pytest.approx(0.1)
    assert without.learning_rate_at(0) == without.learning_rate_at(29) == pytest.approx(0.5)
    wide = lab.RunConfig(tcs.Scheme.named("TCS-W10"), epochs=60)
    assert (wide.warmup, wide.scheme.warmup_masks, wide.scheme.dense_warmup) == (1, 10, False)
    assert wide.learning_rate_at(0) == pytest.approx(0.5)
    assert without.digest != lab.RunConfig(with_.scheme, epochs=60).digest


def test_the_baseline_is_one_client_at_batch_128_and_eta_01_in_every_table():
    one, other = paper("Baseline"), paper("Baseline", learning_rate=0.8, clients=20)
    assert (one.client_count, one.batch, one.warmup) == (1, 128, 0)
    assert one.learning_rate_at(0) == pytest.approx(0.1)
    assert one.digest == other.digest
    assert one.record_name.startswith("Baseline-0.1-0-")


def test_linear_scaling():
    """A quarter of the batch, a quarter of eta; the same for the baseline beside it."""
    assert paper("TCS", batch_size=16).learning_rate_at(10) == pytest.approx(0.125)
    assert paper("Baseline", batch_size=16).learning_rate_at(10) == pytest.approx(0.025)
    assert paper("TCS", clients=20).learning_rate_at(10) == pytest.approx(1.0)
    assert paper("TCS", batch_size=16, reference_batch=None).learning_rate_at(10) == 0.5


@pytest.mark.parametrize(("epochs", "warmup"), [(300, 5), (60, 1), (15, 1), (3, 1)])
def test_warm_up_keeps_its_share(epochs, warmup):
    assert lab.RunConfig("TCS", epochs=epochs).warmup == warmup


def test_identity_ignores_where_and_how_fast_and_nothing_else():
    base = paper("TCS")
    for change in ({"device": "cpu"}, {"threads": 3}, {"profile": "other"}):
        assert paper("TCS", **change).digest == base.digest
    folder = paper("TCS", dataset="folder")
    assert paper("TCS", dataset="folder", data_root="/x").digest == folder.digest
    assert paper("TCS", data_label="x").digest == base.digest  # synthetic images have their own
    different = [
        {"seed": 1}, {"learning_rate": 0.8}, {"epochs": 200}, {"batch_size": 32}, {"clients": 5},
        {"participation": 0.5}, {"width": 16}, {"model": "resnet8"}, {"precision": "bf16"},
        {"dataset": "cifar10"}, {"dataset": "cifar10", "data_label": "x"}, {"dirichlet_alpha": 0.1}, {"drops": (0.5,)},
        {"weight_decay": 0.0}, {"warmup_epochs": 1}, {"reference_batch": None}, {"train_samples": 9},
    ]  # fmt: skip
    digests = {paper("TCS", **c).digest for c in different} | {base.digest, paper("TCS-L4").digest}
    assert len(digests) == len(different) + 2


def test_centralized_training_has_a_learning_rate_of_its_own():
    """It names centralized runs only, and sets their schedule only."""
    for name in ("Baseline", "Baseline-Momentum"):
        plain, faster = paper(name), paper(name, centralized_learning_rate=0.16)
        assert plain.digest != faster.digest and faster.identity()["learning_rate"] == 0.16
        assert paper(name, learning_rate=0.8).digest == plain.digest
        assert plain.digest == paper(name, centralized_learning_rate=0.1).digest
        for epoch in (0, 149.5, 200, 299):
            rates = [config.learning_rate_at(epoch) for config in (faster, plain)]
            assert rates[0] == pytest.approx(1.6 * rates[1])
    for name in ("TCS", "FedAvg", "TCS-L4-Q5", "top-K", "STC", "TCS-Global Momentum"):
        plain, other = paper(name), paper(name, centralized_learning_rate=0.16)
        assert plain.digest == other.digest and plain.identity() == other.identity()
        assert [plain.learning_rate_at(e) for e in range(300)] == [
            other.learning_rate_at(e) for e in range(300)
        ]
    with pytest.raises(ValueError, match=r"^centralized_learning_rate: got 0 .*, allowed: "):
        paper("Baseline", centralized_learning_rate=0)


@pytest.mark.parametrize("rate", [0.1, 0.063, 0.16])
@pytest.mark.parametrize("name", ["Baseline", "Baseline-Momentum"])
def test_a_centralized_record_says_its_learning_rate(name, rate):
    config = paper(name, centralized_learning_rate=rate, reference_batch=160)
    record = {"config": config.identity(), "digest": config.digest, "provenance": {}}
    again = lab.config_of(record)
    assert again.centralized_learning_rate == again.eta == rate
    assert again.identity() == config.identity()


def test_records_of_centralized_training_keep_their_names_and_say_their_rate():
    """Those from before it had a rate of its own, too."""
    paths = sorted((lab.ROOT / "results/evidence/runs").glob("Baseline-*.json"))[::4]
    assert paths
    for path in paths:
        record = lab.read_record(path)
        again = lab.config_of(record)
        assert again.digest == record["digest"]
        assert again.centralized_learning_rate == record["config"]["learning_rate"]


@pytest.mark.parametrize("given", [{}, {"dataset": "text", "model": "gpt"}])
def test_images_for_a_data_set_that_reads_none_are_refused(given):
    with pytest.raises(ValueError, match=r"^data_root: got '/x', allowed with dataset .*: null"):
        paper("TCS", data_root="/x", **given)


PLAN = """
profile: ci.yaml
stages:
- {stage: a, seeds: [1, 2], runs: [{schemes: [TCS, top-K]}, {schemes: [TCS], learning_rate: 0.8}]}
- {stage: %s, seeds: [3], runs: [{schemes: [Baseline]}]}
"""


def test_a_plan_has_each_stage_once_and_what_is_given_beside_it_wins(tmp_path):
    (tmp_path / "ci.yaml").write_text("epochs: 3\n", encoding="utf-8")
    file = tmp_path / "plan.yaml"
    file.write_text(PLAN % "b", encoding="utf-8")
    planned = lab.plan_runs(file, {"learning_rate": 0.1})
    assert [(c.scheme.name, c.seed) for c in planned["a"]] == [
        ("TCS", 1), ("top-K", 1), ("TCS", 1), ("TCS", 2), ("top-K", 2), ("TCS", 2),
    ]  # fmt: skip
    assert {c.learning_rate for runs in planned.values() for c in runs} == {0.1}
    for key, value in {"schemes": ["TCS"], "seeds": [9], "jobs": 4}.items():
        with pytest.raises(ValueError, match=f"^{key}: got .*, allowed: none"):
            lab.plan_runs(file, {key: value})
    with pytest.raises(ValueError, match=r"plan\.yaml: stage a: unknown parameter: path"):
        lab.plan_runs(file, {"path": "x"})
    file.write_text(PLAN % "a", encoding="utf-8")
    with pytest.raises(ValueError, match=r"plan\.yaml.*two stages.* a,"):
        lab.plan_runs(file)


def test_a_field_added_later_leaves_older_digests_alone():
    identity = paper("TCS").identity()
    older = {k: v for k, v in identity.items() if k != "participation"}
    assert lab.digest_of(older) == lab.digest_of(identity)


def test_a_rule_that_changes_is_another_run():
    """Also one that was typed in somewhere, so that its class has no source file."""

    def digest(body):
        namespace = {"tcs": tcs, "__name__": "__main__"}
        exec(f"class Rule(tcs.TCS):\n{body}", namespace)
        tcs.register_scheme("Changing")(namespace["Rule"])
        return lab.RunConfig("Changing").digest

    bodies = [
        "    decay = 0.9",
        "    decay = 0.8",
        "    def observe(self, update_D):\n        super().observe(0.9 * update_D)",
        "    def observe(self, update_D):\n        super().observe(0.8 * update_D)",
    ]
    try:
        digests = [digest(body) for body in bodies]
        assert len(set(digests)) == 4
        assert [digest(body) for body in bodies] == digests
    finally:
        tcs.RULES.pop("Changing"), tcs.FAMILIES.pop("Changing")


def test_notebook_params_refuse_what_papermill_only_warns_of():
    own, injected = "tables = [3]\nepochs: int = 1", "# Parameters\nepochs = 2\nepochz = 3\n"
    namespace = {"In": ["", own, injected], "epochs": 2, "epochz": 3}
    for check in (lab.notebook_params, lab.check_notebook_params):
        with pytest.raises(ValueError, match="unknown parameter: epochz"):
            check(namespace)
    namespace["In"] = ["", own, "# Parameters\nepochs = 2\ntables = [1]\n"]
    assert lab.notebook_params(namespace) == {"epochs": 2}
    lab.check_notebook_params(namespace)
    namespace["In"][1] = "tables = [3]"
    with pytest.raises(ValueError, match="unknown parameter: epochs"):
        lab.check_notebook_params(namespace)


def test_only_the_cell_before_papermills_holds_the_notebooks_own_parameters():
    cells = ["epochz = 1", "phis = [0.1]", "# Parameters\nphis = [0.2]\nepochz = 3\n", "epochz = 2"]
    with pytest.raises(ValueError, match="unknown parameter: epochz"):
        lab.notebook_params({"In": cells})
    assert lab.notebook_params({}) == lab.notebook_params({"In": ["%matplotlib inline"]}) == {}


def test_what_is_named_twice_is_one_run():
    found = lab.plan({"schemes": ["TCS", "TCS"], "seeds": [0, 1, 0]})
    assert [config.seed for config in found] == [0, 1]


def test_a_drop_comes_with_its_epoch_whatever_the_share():
    run = paper("TCS", drops=(0.07, 0.75), epochs=100)
    assert run.learning_rate_at(7.0) == pytest.approx(0.1 * run.scale * run.eta)


@pytest.mark.parametrize("scheme", [None, 5, {"name": "TCS"}])
def test_a_scheme_that_is_none(scheme):
    with pytest.raises(ValueError, match=r"scheme: got .*, allowed: a Scheme or its name"):
        lab.RunConfig(scheme)


def test_members_of_a_rule_are_its_source_whatever_wraps_them():
    def two(self):
        return [x for x in (1, 2)]

    plain = settings._read_source("two", two)
    for wrap in (property, staticmethod, classmethod, cached_property):
        assert settings._read_source("two", wrap(two)) == plain
    assert " at 0x" not in settings._read_source("a", object())
    nested = {}
    exec("def three(self):\n    return sum(x for x in (1, 2))", nested)
    assert " at 0x" not in settings._read_source("three", nested["three"])


def test_a_rules_source_is_that_of_the_start_and_its_sets_have_an_order(tmp_path, monkeypatch):
    """An edit while it runs changes no name; a set of texts comes in another order every time."""
    path = tmp_path / "edited_rule.py"
    path.write_text("def observe(self): return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    observe = importlib.import_module("edited_rule").observe
    before = settings._read_source("observe", observe)
    path.write_text("# a remark\ndef observe(self): return 2\n", encoding="utf-8")
    linecache.checkcache()
    assert settings._read_source("observe", observe) == before
    words = settings._read_source("kinds", {"weight", "bias", "norm"})
    assert words == "kinds = [\"'bias'\", \"'norm'\", \"'weight'\"]"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"context": 32}, "context"),
        ({"context": 128, "dataset": "folder"}, "context"),
        ({"crop_padding": 2, "dataset": "text", "model": "gpt"}, "crop_padding"),
        ({"crop_padding": 0, "dataset": "text", "model": "gpt"}, "crop_padding"),
    ],
)
def test_a_setting_without_a_meaning_for_the_data_is_refused(changes, key):
    with pytest.raises(
        ValueError,
        match=rf"^{key}: got .*, allowed with dataset {changes.get('dataset', 'synthetic')}",
    ):
        lab.RunConfig("TCS", **changes)


# Numbers as people have them ──────────────────────────────────────────────────────────────────────

KINDS = {"numpy": (np.int64, np.float64), "tensor": (torch.tensor, lambda n: torch.tensor(n, dtype=torch.float64)),
         "array": (np.array, np.array)}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_numpy_and_torch_are_plain_numbers_in_configurations_and_plans(kind):
    whole, real = KINDS[kind]
    given = {"learning_rate": real(0.25), "epochs": whole(4), "drops": (real(0.5), real(0.75))}
    plain = {"learning_rate": 0.25, "epochs": 4, "drops": (0.5, 0.75)}
    made = lab.RunConfig("TCS", seed=whole(3), wire=whole(1) == 1, **given)
    assert made == lab.RunConfig("TCS", seed=3, wire=True, **plain)
    assert all(
        type(value).__module__ == "builtins"
        for value in vars(made).values()
        if value is not made.scheme
    )
    for seeds, numbers in [
        (whole(2), 2),
        ([whole(2), whole(5)], [2, 5]),
        (np.arange(3), [0, 1, 2]),
    ]:
        params = {"schemes": ["TCS"], "seeds": seeds, "phi_global": real(0.125), **given}
        assert lab.plan(params) == lab.plan(
            params | plain | {"seeds": numbers, "phi_global": 0.125}
        )


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_numpy_and_torch_in_the_labs_other_functions(kind):
    whole, real = KINDS[kind]
    lab.check_values({"n": whole(2), "share": real(0.5)}, n=lab.WholeNumber, share=lab.Fraction)
    assert lab.run_all([], jobs=whole(1)) == []
    data = lab.synthetic_dataset(whole(20), whole(10))
    assert data.first(whole(8), whole(4)).resize(whole(16)).train_images.shape == (8, 16, 16, 3)
    assert (
        lab.generator_for(whole(1), whole(2)).initial_seed()
        == lab.generator_for(1, 2).initial_seed()
    )
    assert lab.GPT(whole(5), whole(16), whole(4))(torch.zeros(1, 4, dtype=torch.int64)).shape == (
        1,
        4,
        5,
    )
    job = nodes.FederatedJob("TCS", lambda: torch.nn.Linear(2, 1), lambda *_: None, clients=whole(2), rounds=whole(3),
                    weights=[real(1.0), real(3.0)], seed=whole(1))  # fmt: skip
    assert nodes.ServerRounds(job).heard == [-1, -1] and job.rounds == 3


@pytest.mark.parametrize("wrong", [np.True_, torch.tensor(2.0), np.array([2]), np.float64(2), "2"])
def test_what_is_no_whole_number_stays_refused(wrong):
    for key in ("epochs", "clients", "seed"):
        with pytest.raises(ValueError, match=rf"^{key}: got .*allowed: a whole number"):
            lab.RunConfig("TCS", **{key: wrong})


def test_a_gpu_is_one_that_this_machine_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def device(name):
        return settings.RunConfig("TCS", device=name).torch_device

    assert device("auto") == device("cuda") == torch.device("cuda")
    assert device("cuda:0") == torch.device("cuda:0") and device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device: got 'cuda:1'"):
        device("cuda:1")


@pytest.mark.parametrize(
    ("epochs", "warmup"), [(300, 5), (600, 10), (210, 4), (200, 3), (20, 1), (1, 1)]
)
def test_the_warm_up_is_a_sixtieth_of_the_epochs_and_at_least_one(epochs, warmup):
    assert settings.RunConfig("TCS", epochs=epochs).warmup == warmup


@pytest.mark.parametrize(("epochs", "most"), [(1, 1), (2, 1), (4, 3)])
def test_a_warm_up_leaves_an_epoch_after_it_unless_there_is_only_one(epochs, most):
    assert settings.RunConfig("TCS", epochs=epochs, warmup_epochs=most).warmup == most
    with pytest.raises(ValueError, match=f"warmup_epochs: got {most + 1}, "):
        settings.RunConfig("TCS", epochs=epochs, warmup_epochs=most + 1)


def test_a_code_from_outside_is_part_of_the_identity(registry):
    class Mine(tcs.BlockCode):
        """A code that is not the lab's."""

    tcs.CODES["mine"] = Mine()
    scheme = tcs.Scheme.named("TCS", code="mine")
    assert Mine in lab.training.configuration.list_outside_parts(scheme)
    assert "rule_sha256" in lab.RunConfig(scheme).identity()
    assert "rule_sha256" not in lab.RunConfig("TCS+").identity()


def test_settings_that_old_records_lack_have_their_defaults():
    found = lab.find_records(profile="small", test_unused=False)
    assert found == lab.find_records(profile="small")
