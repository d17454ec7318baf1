"""Sections 10 to 12: records, checkpoints, tables, the command line."""

import importlib.util
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import tcs_lab as lab
import torch

import tcs_core as tcs

TINY = {"model": "resnet8", "width": 2, "batch_size": 4, "clients": 3, "epochs": 3, "train_samples": 120,
        "test_samples": 40, "reference_batch": None, "threads": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_synthetic(monkeypatch):
    small = lab.synthetic_dataset(120, 40).resized(16)
    monkeypatch.setattr(lab.data, "synthetic_dataset", lambda: small)
    lab.load_dataset.cache_clear()
    yield
    lab.load_dataset.cache_clear()


def config(scheme="TCS-L2-Q5", **changes):
    return lab.RunConfig(scheme, **(TINY | changes))


def numbers(record):
    """All of a record that a rerun must repeat bit for bit."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in record["rows"]]
    return record["config"], record["status"], record["reason"], record["dimension"], rows


def test_a_run_leaves_its_record_and_no_checkpoint(tmp_path):
    rows = []
    record = lab.run(config(), tmp_path, rows.append)
    assert [r["epoch"] for r in rows] == [1, 2, 3]
    path = lab.record_path(config(), tmp_path)
    assert path.parent == tmp_path / "ci" / "runs" and path.name.startswith("TCS-L2-Q5-0.5-0-")
    assert json.loads(path.read_text()) == record == lab.read_record(path, config())
    assert record["provenance"]["core_sha256"] == lab.core_sha256()
    assert record["provenance"]["fingerprint"] == lab.synthetic_dataset().fingerprint
    assert not list((tmp_path / "cache" / "checkpoints").glob("*"))
    assert os.listdir(path.parent) == [path.name]


def test_an_existing_record_is_used(tmp_path, monkeypatch):
    first = lab.run(config(), tmp_path)
    monkeypatch.setattr(lab.training, "Federation", lambda *_: pytest.fail("trained again"))
    assert lab.run(config(), tmp_path) == first


@pytest.mark.parametrize(
    "scheme", ["TCS", "TCS-L2-Q5", "top-K-Q5", "rand-K", "TCS-Global Momentum", "Baseline-Momentum"]
)
def test_a_run_that_was_stopped_ends_in_the_same_record(tmp_path, scheme):  # fmt: skip
    undisturbed = lab.run(config(scheme), tmp_path / "one")

    def stop(row):
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.run(config(scheme), tmp_path / "two", stop)
    epochs = []
    resumed = lab.run(config(scheme), tmp_path / "two", lambda row: epochs.append(row["epoch"]))
    assert epochs in ([2, 3], [3])
    assert numbers(resumed) == numbers(undisturbed)


def test_the_same_seed_is_the_same_and_another_is_not(tmp_path):
    one = lab.run(config(), tmp_path / "one")
    two = lab.run(config(), tmp_path / "two")
    other = lab.run(config(seed=1), tmp_path / "one")
    assert numbers(one) == numbers(two)
    assert numbers(one)[-1] != numbers(other)[-1]


def test_state_of_other_data_or_code_is_not_continued(tmp_path, monkeypatch):
    def stop(row):
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.run(config(), tmp_path, stop)
    monkeypatch.setattr(lab.records, "core_sha256", lambda: "another")
    epochs = []
    lab.run(config(), tmp_path, lambda row: epochs.append(row["epoch"]))
    assert epochs == [1, 2, 3]


def test_the_hash_is_that_of_the_code_that_was_imported(tmp_path, monkeypatch):
    """Not of what somebody edits while it runs."""
    path = shutil.copy(tcs.__file__, tmp_path / "copied_core.py")
    spec = importlib.util.spec_from_file_location("copied_core", path)
    copied = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copied_core", copied)
    spec.loader.exec_module(copied)
    path.write_text("edited")
    assert copied.core_sha256() == lab.core_sha256()


def test_a_checkpoint_that_is_none_is_named(tmp_path):
    path = lab.runs._checkpoint_path(config())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=path.name):
        lab.run(config(), tmp_path)
    torch.save({"identity": os.system}, path)
    with pytest.raises(ValueError, match=path.name):
        lab.run(config(), tmp_path)


def test_a_diverged_run_keeps_its_record(tmp_path, monkeypatch):
    original = lab.Training.epoch

    def poisoned(self, epoch):
        if epoch == 1:
            self.theta_D[0] = math.nan
        return original(self, epoch)

    monkeypatch.setattr(lab.Training, "epoch", poisoned)
    record = lab.run(config(), tmp_path)
    assert record["status"] == "diverged" and len(record["rows"]) == 1
    assert "client 0" in record["reason"] and "epoch 2, round 1 of 5" in record["reason"]
    row = lab.summary([record]).iloc[0]
    assert (row["n"], row["diverged"]) == (0, 1) and math.isnan(row["accuracy"])
    assert lab.readable(lab.summary([record])).iloc[0]["Ours: accuracy %"] == "diverged (1 of 1)"


def test_a_rule_that_fails_is_an_error_and_no_diverged_run(tmp_path):
    @tcs.register_scheme("Failing")
    class Failing(tcs.TCS):
        def observe(self, update_D):
            raise ValueError("a mistake in the rule")

    try:
        with pytest.raises(ValueError, match="a mistake in the rule"):
            lab.run(config("Failing"), tmp_path)
        assert not list(tmp_path.glob("ci/runs/*"))
    finally:
        del tcs.RULES["Failing"], tcs.FAMILIES["Failing"]


BROKEN = {
    "not json": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[]",
    "version": lambda text: text.replace('"version": 1', '"version": 2'),
    "status": lambda text: text.replace('"finished"', '"fine"', 1),
    "config": lambda text: text.replace('"seed": 0', '"seed": 5'),
    "rows": lambda text: text.replace('"epoch": 2', '"epoch": 9'),
    "accuracy": lambda text: text.replace('"accuracy": 0', '"accuracy": 8'),
    "missing": lambda text: text.replace('"bits_up"', '"bits"'),
    "wrong type": lambda text: text.replace('"accuracy": 0', '"accuracy": "x", "a": 0'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_record_that_is_none_is_named_and_left_alone(tmp_path, case):
    lab.run(config(), tmp_path)
    path = lab.record_path(config(), tmp_path)
    path.write_text(BROKEN[case](path.read_text()))
    broken = path.read_text()
    with pytest.raises(ValueError, match=path.name):
        lab.run(config(), tmp_path)
    assert path.read_text() == broken


def test_nothing_half_written_if_writing_fails(tmp_path):
    def fail(file):
        file.write(b"half")
        raise OSError("disk full")

    target = tmp_path / "record.json"
    target.write_text("before")
    with pytest.raises(OSError, match="disk full"):
        lab.files._write_whole(target, fail)
    assert target.read_text() == "before" and os.listdir(tmp_path) == ["record.json"]


def test_run_all_shares_runs_and_keeps_order(tmp_path, monkeypatch):
    made = []
    original = lab.runs._train
    monkeypatch.setattr(
        lab.runs, "_train", lambda c, *a: made.append(c.scheme.name) or original(c, *a)
    )
    configs = [config("TCS", epochs=1), config("Baseline", epochs=1), config("TCS", epochs=1)]
    records = lab.run_all(configs, tmp_path)
    assert made == ["TCS", "Baseline"]
    assert [r["config"]["scheme"]["name"] for r in records] == ["TCS", "Baseline", "TCS"]


@pytest.fixture
def whole_synthetic(tmp_path, monkeypatch):
    """Worker processes make the whole synthetic data set: so does this one."""
    monkeypatch.undo()
    monkeypatch.setenv("TCS_CACHE", str(tmp_path / "cache"))
    lab.load_dataset.cache_clear()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to")
def test_a_run_keeps_what_a_step_frees_until_it_ends():
    """A block of 48 MB is new pages of the kernel each time, but within a run only at first."""
    import resource

    def pages_of_a_block():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(12_000_000)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with lab.runs._memory_kept():
        within = min(pages_of_a_block() for _ in range(8))
    assert 4 * within < min(pages_of_a_block() for _ in range(8))


def test_a_row_that_arrives_after_its_run_was_counted_is_ignored():
    one = config(epochs=2)
    row = {"epoch": 2, "accuracy": 0.5, "bits_up": 10, "rounds": 1}
    with lab.Progress([one]) as bar:
        bar.epoch(one, row)
        bar.ended(one)
        bar.epoch(one, row)
        assert bar.finished == 1 and bar.left == {}


def test_a_scheme_of_ones_own_gets_its_record_in_any_process_and_row_and_curve(
    tmp_path, whole_synthetic
):
    @tcs.register_scheme("TCS-Mine", phi_global=1e-2, phi_local=1e-3)
    class Mine(tcs.TCS):
        pass

    try:
        configs = [config(name) for name in ("TCS-Mine-L2", "TCS-L2", "top-K", "Baseline")]
        side_by_side = lab.run_all(configs, tmp_path / "two", jobs=2)
        assert not multiprocessing.active_children()
        in_turn = lab.run_all(configs, tmp_path / "one", jobs=1)
        assert [numbers(r) for r in side_by_side] == [numbers(r) for r in in_turn]
        records = mine, own = side_by_side[:2]
        assert mine["config"]["rule_sha256"] and mine["rows"][-1]["bits_up"] > 0
        rows = [{k: v for k, v in r.items() if k != "seconds"} for r in mine["rows"]]
        assert rows == [{k: v for k, v in r.items() if k != "seconds"} for r in own["rows"]]
        table = lab.summary(records)
        assert list(table["scheme"]) == ["TCS-Mine-L2", "TCS-L2"]
        labels = [t.get_text() for t in lab.accuracy_figure(records, "x").legends[0].get_texts()]
        assert labels == ["TCS-Mine-L2", "TCS-L2"]
    finally:
        del tcs.RULES["TCS-Mine"], tcs.FAMILIES["TCS-Mine"]


# Tables and figures ───────────────────────────────────────────────────────────────────────────────


def fake(name, accuracy, seed, warmup=1):
    """A record with three epochs of ten rounds at D = 1000; the first `warmup` dense."""
    scheme = tcs.Scheme.named(name)
    rows = [
        {"epoch": e + 1, "accuracy": accuracy, "rounds": 10, "dense_rounds": 10 * (e < warmup),
         "bits_up": 320_000 if e < warmup else 4_000, "bits_down": 320_000 if e < warmup else 8_000}
        for e in range(3)
    ]  # fmt: skip
    identity = lab.RunConfig(scheme, seed=seed, epochs=3).identity()
    return {
        "config": identity,
        "digest": lab.digest_of(identity),
        "status": "finished",
        "reason": None,
        "dimension": 1000,
        "rows": rows,
    }


def test_bits_per_parameter_by_hand():
    """20 sparse rounds of 400 bits and 10 dense ones of 32,000, over 1000 parameters, H = 2."""
    bits = lab.bits_per_parameter(fake("TCS-L2", 0.5, 0))
    assert bits["uplink"] == pytest.approx(400 / 1000 / 2)
    assert bits["uplink with warm-up"] == pytest.approx((20 * 400 + 10 * 32_000) / 30 / 1000 / 2)
    assert bits["downlink"] == pytest.approx(800 / 1000 / 2)
    assert math.isnan(lab.bits_per_parameter(fake("Baseline", 0.5, 0))["uplink"])


def test_dense_fedavg_costs_32_bits():
    bits = lab.bits_per_parameter(fake("FedAvg", 0.5, 0, warmup=3))
    assert bits["uplink"] == bits["downlink"] == bits["uplink with warm-up"] == pytest.approx(32)


def test_summary_means_deviations_and_the_papers_figures():
    records = [fake("TCS", a, s) for s, a in enumerate((0.80, 0.82, 0.84))] + [
        fake("top-K", 0.7, 0)
    ]
    table = lab.summary(records, {"TCS": [92.44, 0.143, 0.363]})
    tcs_row, top_row = table.itertuples()
    assert (tcs_row.n, top_row.n) == (3, 1)
    named = [lab.RunConfig("TCS", seed=s, epochs=3).record_name for s in range(3)]
    assert tcs_row.records.split() == named
    assert tcs_row.accuracy == pytest.approx(0.82) and tcs_row.accuracy_std == pytest.approx(0.02)
    assert tcs_row.paper_accuracy == pytest.approx(0.9244) and tcs_row.paper_bits == 0.363
    assert math.isnan(top_row.accuracy_std) and math.isnan(top_row.paper_accuracy)
    text = lab.readable(table)
    assert list(text["Ours: accuracy %"]) == ["82.00 ± 2.00", "70.00"]
    assert list(text["Paper: accuracy %"]) == ["92.44 ± 0.143", "–"]


def test_saved_tables_and_figures(tmp_path):
    records = [fake("TCS", 0.8, 0), fake("Baseline", 0.9, 0)]
    table = lab.summary(records)
    lab.save_table(table, tmp_path / "table1", "A title")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "table1.csv"), table, check_dtype=False)
    lines = (tmp_path / "table1.md").read_text().splitlines()
    assert lines[0] == "**A title**" and len(lines) == 6
    assert len({line.count("|") for line in lines[2:]}) == 1
    for name in ("a", "b"):
        lab.save_figure(lab.accuracy_figure(records, "A title"), tmp_path / name)
    for suffix in (".png", ".svg"):
        one, two = ((tmp_path / n).with_suffix(suffix).read_bytes() for n in ("a", "b"))
        assert one == two and len(one) > 5000


def test_a_figure_shows_mean_and_band():
    records = [fake("TCS", a, s) for s, a in enumerate((0.6, 0.8))]
    (axes,) = lab.accuracy_figure(records, "x").axes
    np.testing.assert_allclose(axes.lines[0].get_ydata(), 70.0)
    assert axes.get_xlabel() == "epoch" and axes.get_ylabel() == "test accuracy (%)"
    assert len(axes.collections) == 1


# The command line ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def params(tmp_path):
    fields = {k: v for k, v in TINY.items()} | {"schemes": ["TCS", "Baseline"], "epochs": 1}
    path = tmp_path / "tiny.yaml"
    path.write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in fields.items()))
    return path


def test_a_killed_process_goes_on_and_ends_in_the_same_record(tmp_path, params, whole_synthetic):
    """SIGKILL in the middle of a real process; the same command again; this process beside it."""
    environment = dict(os.environ, TCS_CACHE=str(tmp_path / "cache"))
    words = ["run", "--params", str(params), "--scheme", "TCS", "--set", "epochs=8", "--results"]
    command = [sys.executable, tcs.__file__, *words, str(tmp_path / "two")]
    process = subprocess.Popen(command, env=environment)
    checkpoints = tmp_path / "cache" / "checkpoints"
    deadline = time.monotonic() + 60
    while not list(checkpoints.glob("*.pt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert list(checkpoints.glob("*.pt")) and not (tmp_path / "two" / "ci").exists()
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert lab.__main__.main([*words, str(tmp_path / "one")]) == 0
    two, one = (next((tmp_path / n / "ci" / "runs").iterdir()) for n in ("two", "one"))
    assert numbers(json.loads(two.read_text())) == numbers(json.loads(one.read_text()))


def test_the_core_imports_without_any_notebook_tool():
    tools = ("IPython", "jupytext", "papermill", "nbformat", "ipykernel", "jupyterlab")
    code = f"import sys\nfor t in {tools}: sys.modules[t] = None\nimport tcs_core\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=lab.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
