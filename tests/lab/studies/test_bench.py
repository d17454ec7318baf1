"""Benchmarks measure what they say. No test here measures speed."""

import copy
import json

import pytest
import tcs_lab as lab
import torch
from tcs_lab.__main__ import main

import tcs_core as tcs


def test_the_textbook_version_is_the_compressor():
    """The plain algorithm, clone, topk, multiply by masks, gives what the fast one gives."""
    generator = torch.Generator().manual_seed(5)
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), [4000], 3)
    compressor.step(torch.randn(3, 4000, generator=generator))
    mask_D = tcs.positions_to_mask(compressor.rule.shared_mask(), 4000)
    errors = [torch.zeros(4000) for _ in range(3)]
    for _ in range(30):
        deltas_ND = torch.randn(3, 4000, generator=generator)
        plain = lab.studies.bench._textbook_round(deltas_ND, errors, mask_D, 40, 4)
        torch.testing.assert_close(compressor.step(deltas_ND), plain, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(compressor.errors_ND, torch.stack(errors), rtol=0, atol=1e-6)
        assert torch.equal(tcs.positions_to_mask(compressor.rule.shared_mask(), 4000), mask_D)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_the_plain_loop_is_top_k(layout):
    """Its model after two rounds, the second with errors, is that of the federation."""
    training = lab.studies.bench._bench_federation(
        lab.studies.bench.Bench(device="cpu"), "top-K", "conv3", 2, 64
    )
    federation = training.federation
    federation.weight_decay = 0.0
    federation.compressor.errors_ND.zero_()
    model = copy.deepcopy(federation.model).train().to(memory_format=layout)
    plain, rounds = (
        lab.studies.bench._plain_rounds(training, model),
        lab.studies.bench._rounds(training),
    )
    start_D = training.theta_D.clone()
    plain()
    rounds()
    assert training.feed.rounds == 2 and not torch.equal(training.theta_D, start_D)
    for p, own in zip(model.parameters(), federation.flat.parameters, strict=True):
        torch.testing.assert_close(p, own, rtol=1e-5, atol=1e-7)


@pytest.fixture
def tiny_benches(monkeypatch):
    cases = {
        "round": [
            lambda b: lab.bench_round(b, "TCS-L2", "resnet8", 8, 17),
            lambda b: lab.bench_round(b, "TCS", "conv3", 2, 2),
        ],
        "step": [lambda b: lab.bench_step(b, 3000, 2)],
        "codecs": [lambda b: lab.bench_codecs(b, 5000)],
        "growth": [lambda b: lab.bench_step(b, 3000, 2, textbook=False)],
    }
    monkeypatch.setattr(lab.studies.bench, "BENCHES", cases)


def test_the_command_writes_a_record_and_prints_a_table(tiny_benches, tmp_path, capsys):
    assert main(["bench", "--repeat", "2", "--threads", "1", "--results", str(tmp_path)]) == 0
    (path,) = (tmp_path / "bench").glob("*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["provenance"]["threads"] == 1
    timed = [row for row in record["rows"] if "median" in row]
    assert {row["part"] for row in timed} == set(lab.studies.bench.BENCHES)
    assert all(0 < row["low"] <= row["median"] <= row["high"] and row["n"] == 2 for row in timed)
    parts = {"passes", "round", "compression", "augmentation"}
    for case, more in {
        "conv3 width 2, N 10, B 2, TCS": {"side by side", "plain top-K", "plain top-K, torch's layout"},
        "resnet8 width 8, N 10, B 17, TCS-L2": {"client threads"},
    }.items():  # fmt: skip
        works = {row["work"] for row in timed if row["case"] == case}
        assert works == parts | more
    assert capsys.readouterr().out.count("\n") == len(timed) + 2


def test_a_part_or_a_number_of_turns_that_is_none(tmp_path, capsys):
    with pytest.raises(ValueError, match="unknown part: lunch"):
        lab.run_benches(["lunch"], results=tmp_path)
    assert main(["bench", "--repeat", "0", "--results", str(tmp_path)]) == 2
    assert "--repeat: got 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
