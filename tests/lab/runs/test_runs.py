"""One run: its record, and how it ends when numbers go wrong."""

import hashlib
import json
import math
import os
import platform
import re
import resource
from pathlib import Path

import pytest
import tcs_lab as lab
import torch
from common import config
from processes import FORKSERVER
from torch.nn import functional as F

import tcs_core as tcs


def test_a_run_leaves_its_record_and_no_checkpoint(tmp_path, small):
    rows = []
    record = lab.run(config(), tmp_path, rows.append)
    assert [r["epoch"] for r in rows] == [1, 2, 3]
    path = lab.record_path(config(), tmp_path)
    assert path.parent == tmp_path / "ci" / "runs" and path.name.startswith("TCS-L2-Q5-0.5-0-")
    assert json.loads(path.read_text(encoding="utf-8")) == record == lab.read_record(path, config())
    made = record["provenance"]
    of_the_file = hashlib.sha256(Path(tcs.__file__).read_bytes()).hexdigest()
    assert made["core_sha256"] == of_the_file and len(made["lab_sha256"]) == 64
    assert made["fingerprint"] == lab.tasks.images.synthetic_dataset().fingerprint
    assert not list((tmp_path / "cache" / "checkpoints").glob("*"))
    assert os.listdir(path.parent) == [path.name]


def test_what_a_run_sets_for_a_gpu_is_put_back(tmp_path, monkeypatch, small):
    """fp32 convolutions are fp32, and cuDNN tries which of its own are the fastest."""
    cudnn, seen = torch.backends.cudnn, []
    monkeypatch.setattr(cudnn, "allow_tf32", True)
    monkeypatch.setattr(cudnn, "benchmark", False)

    def look(row):
        seen.append((cudnn.allow_tf32, cudnn.benchmark))

    lab.run(config(), tmp_path, look)
    assert set(seen) == {(False, True)}
    assert (cudnn.allow_tf32, cudnn.benchmark) == (True, False)


def test_a_run_computes_on_its_threads_and_puts_back_their_number(tmp_path, small):
    before, seen = torch.get_num_threads(), []
    lab.run(config(threads=before + 1), tmp_path, lambda _: seen.append(torch.get_num_threads()))
    assert set(seen) == {before + 1} and torch.get_num_threads() == before


def test_an_evaluation_is_that_of_all_test_images_at_once():
    wanted = config("TCS", test_samples=650)
    training = lab.Training(wanted, lab.load_data(wanted))
    training.epoch(0)
    row = training.evaluate()
    images, labels = training.feed.test(slice(0, 650))
    with training.federation.evaluated(training.statistics_NS.mean(0)) as net, torch.no_grad():
        scores = net(images)
    assert row["accuracy"] == int((scores.argmax(1) == labels).sum()) / 650
    assert row["loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-5)


def test_the_training_loss_is_the_mean_of_a_step():
    """About ln 10 before anything is learned; a missing factor would at least double or halve it."""
    wanted = config("TCS-L2", participation=0.5, clients=4, learning_rate=1e-6)
    row = lab.Training(wanted, lab.load_data(wanted)).epoch(0)
    assert 1.6 < row["train_loss"] < 3.2


def test_an_existing_record_is_used(tmp_path, monkeypatch, small):
    first = lab.run(config(), tmp_path)
    monkeypatch.setattr(lab.runs.runs, "Training", lambda *_: pytest.fail("trained again"))
    assert lab.run(config(), tmp_path) == first


def test_a_results_folder_that_is_none_is_told_before_the_training(tmp_path, monkeypatch, small):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setattr(lab.runs.runs, "_train", None)
    with pytest.raises(ValueError, match=r"^results: got .*file, allowed: a folder"):
        lab.run(config(), tmp_path / "file")


def test_images_of_fewer_pixels_are_another_run(tmp_path, small):
    record = lab.run(config(image_size=8), tmp_path)
    assert record["config"]["image_size"] == 8 and record["digest"] != config().digest
    assert lab.config_of(record).digest == record["digest"]


# Numbers that go wrong ────────────────────────────────────────────────────────────────────────────


def test_a_diverged_run_keeps_its_record(tmp_path, monkeypatch, small):
    original = lab.Training.epoch

    def poisoned(self, epoch):
        if epoch == 1:
            next(self.federation.model.parameters()).data[0] = math.nan
        return original(self, epoch)

    monkeypatch.setattr(lab.Training, "epoch", poisoned)
    record = lab.run(config(), tmp_path)
    assert record["status"] == "diverged" and len(record["rows"]) == 1
    assert "client 0" in record["reason"] and "epoch 2, round 1 of 2" in record["reason"]
    row = lab.summary([record]).iloc[0]
    assert (row["n"], row["diverged"]) == (0, 1) and math.isnan(row["accuracy"])


@pytest.mark.parametrize("scheme", ["TCS", "TCS-Q5++", "TCS-L2", "TCS-Momentum", "FedAvg", "Baseline-Momentum"])  # fmt: skip
def test_a_run_that_diverges_says_where(tmp_path, small, scheme, monkeypatch):
    """A learning rate beyond reason; a table and a figure of it can still be drawn."""
    monkeypatch.setattr(lab.RunConfig, "eta", property(lambda self: 1e25))
    wild = config(scheme, warmup_epochs=0)
    record = lab.run(wild, tmp_path)
    assert record["status"] == "diverged"
    assert re.search(r"client \d|server|loss", record["reason"])
    assert re.search(r"epoch 1(, round \d+ of \d+)?$", record["reason"])
    assert lab.read_record(lab.record_path(wild, tmp_path), wild) == record
    text = lab.readable(lab.summary([record])).iloc[0]["Ours: accuracy %"]
    assert text == "diverged (1 of 1)"
    assert lab.draw_accuracy_figure([record], "x").axes


@pytest.mark.parametrize("which", ["training", "test"])
def test_a_loss_that_is_not_finite_is_a_diverged_run(tmp_path, small, monkeypatch, which):
    name, key = {"training": ("epoch", "train_loss"), "test": ("evaluate", "loss")}[which]
    original, calls = getattr(lab.Training, name), []

    def overflowed(self, *arguments):
        calls.append(1)
        row = original(self, *arguments)
        return row | {key: math.inf if len(calls) == 2 else 1.0}

    monkeypatch.setattr(lab.Training, name, overflowed)
    record = lab.run(config(), tmp_path)
    assert record["status"] == "diverged" and len(record["rows"]) == 1
    assert record["reason"] == f"the {which} loss is not finite; epoch 2"


def test_a_rule_that_fails_is_an_error_and_no_diverged_run(tmp_path, small):
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


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_hostile_client_in_a_run(tmp_path, small, monkeypatch, policy):
    """stop: no record, the client and the round named. skip: the row counts what was left out."""
    made = tcs.Link.__init__
    sent = []

    def hostile(self, *arguments, **more):
        def channel(sender, data):
            sent.append(sender)
            return data[::-1] if sender == 2 and sent.count(2) == 4 else data

        made(self, channel, *arguments[1:], **more)

    monkeypatch.setattr(tcs.Link, "__init__", hostile)
    bad = config("TCS", wire=True, bad_message=policy)
    if policy == "stop":
        with pytest.raises(tcs.MessageError, match=r"client 2: .*epoch 1, round 4 of 5"):
            lab.run(bad, tmp_path)
        assert not (tmp_path / "ci").exists()
        return
    record = lab.run(bad, tmp_path)
    assert [row["refused"] for row in record["rows"]] == [1, 0, 0]
    assert record["config"]["bad_message"] == "skip"


# Memory ───────────────────────────────────────────────────────────────────────────────────────────


def pages_of_a_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def within_and_after(answers):
    """In a new process: pages of the cheapest block within a run, of the first one after it."""
    with lab.runs.runs.keep_freed_memory():
        within = min(pages_of_a_block() for _ in range(8))
    answers.put((within, pages_of_a_block()))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to")
def test_a_run_keeps_what_a_step_frees_until_it_ends():
    """A block of 48 MB is new pages of the kernel, but within a run only at first."""
    answers = FORKSERVER.Queue()
    FORKSERVER.Process(target=within_and_after, args=(answers,)).start()
    within, after = answers.get(timeout=90)
    assert 4 * within < after


def test_two_hundred_clients(tmp_path, monkeypatch):
    images = lab.synthetic_dataset(400, 40).resize(16)
    monkeypatch.setattr(lab.tasks.images, "synthetic_dataset", lambda: images)
    lab.load_dataset.cache_clear()
    many = {"clients": 200, "batch_size": 1, "train_samples": 400, "epochs": 2, "wire": True}
    record = lab.run(config("TCS-Q5++", **many), tmp_path)
    lab.load_dataset.cache_clear()
    assert record["status"] == "finished" and record["rows"][-1]["rounds"] == 2
    assert record["rows"][-1]["bytes_up"] > 200 * tcs.OVERHEAD_BYTES


def test_only_clients_who_take_part_cost_time(small):
    """A round's work is its participants': the others' samples are not even drawn."""
    wanted = config("TCS", clients=12, participation=0.25)
    training = lab.Training(wanted, lab.load_data(wanted))
    next(training.rounds(0))
    assert len(training.active) == 3 and set(training.feed._draws) == set(training.active)
