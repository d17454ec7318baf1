"""The same seed, the same record, in any process and order; long runs do not grow.

TCS_ROUNDS=10000: rounds of the long runs (default 150), 1 minute.
"""

import gc
import json
import os

import psutil
import pytest
import tcs_lab as lab
import torch
from common import config, numbers
from processes import FORKSERVER, few_images

import tcs_core as tcs

ROUNDS = int(os.environ.get("TCS_ROUNDS", 150))

REPEATED = ["Baseline-Momentum", "FedAvg", "FedAvg-Q3++", "TCS", "TCS-L2-Q5", "TCS-Q5+", "TCS-L2-M2-E3++", "TCS-M2-W3++", "TCS-LF", "TCS-PLF-Q5+",
            "TCS-Global Momentum++", "TCS-D5", "TCS-Q5-NW", "top-K", "top-K-Q5++", "rand-K", "rand-K-Q5-D5"]  # fmt: skip


def repeated(name, **changes):
    participation = 1.0 if name.startswith("Baseline") else 0.6
    brief = {"epochs": 2, "train_samples": 36, "participation": participation}
    return config(name, **(brief | changes))


def make_repeated(folder):
    """In a new process: all of them, in another order."""
    os.environ["TCS_CACHE"] = str(folder / "cache")
    torch.set_num_threads(1)
    few_images()
    for name in reversed(REPEATED):
        lab.run(repeated(name), folder)


def test_in_any_process_and_order_and_with_real_messages(tmp_path, small):
    other = FORKSERVER.Process(target=make_repeated, args=(tmp_path / "other",))
    other.start()
    first = {name: lab.run(repeated(name), tmp_path / "first") for name in REPEATED}
    real = {n: lab.run(repeated(n, wire=True), tmp_path / "real") for n in REPEATED}
    other.join()
    assert other.exitcode == 0
    for name in REPEATED:
        expected = numbers(first[name])
        apart = lab.read_record(lab.record_path(repeated(name), tmp_path / "other"))
        assert numbers(apart) == expected, name
        assert numbers(real[name])[1:] == expected[1:], name
    different = {json.dumps(numbers(record)[4]) for record in first.values()}
    assert len(different) == len(REPEATED)


def test_another_seed_is_another_run(tmp_path, small):
    one, other = (lab.run(config(seed=seed), tmp_path) for seed in (0, 1))
    assert numbers(one)[-1] != numbers(other)[-1]
    assert one["provenance"]["repeats"].startswith("bit for bit")


# Long runs ────────────────────────────────────────────────────────────────────────────────────────


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def long_run(folder, rounds, sizes):
    """`rounds` rounds of a tiny run; memory in use after every epoch of 50."""
    os.environ["TCS_CACHE"] = str(folder / "cache")
    torch.set_num_threads(1)
    few_images(400)
    tiny = {
        "clients": 2,
        "epochs": rounds // 50,
        "train_samples": 400,
        "test_samples": 4,
        "width": 16,
    }  # 78,042 parameters: a vector that is lost in each round shows
    lab.run(config("TCS-Q5++", wire=True, **tiny), folder, lambda row: sizes.append(resident()))


def long_compression(folder, rounds, sizes):
    """`rounds` rounds of messages, client and server; memory every 50."""
    scheme = tcs.Scheme.named("TCS-LF-Q5++")
    compressor = tcs.Compressor(scheme, [90_000, 10_000], 3, link=tcs.Link(tcs.unchanged))
    deltas_ND = torch.randn(3, 100_000)
    for round_ in range(rounds):
        compressor.step(deltas_ND.roll(round_, 1))
        if round_ % 50 == 49:
            sizes.append(resident())


def measured(work, folder, rounds):
    """In a new process."""
    sizes = []
    work(folder, rounds, sizes)
    (folder / "sizes").write_text(json.dumps(sizes), encoding="utf-8")


@pytest.mark.parametrize("work", [long_run, long_compression])
def test_memory_does_not_grow_with_the_rounds(tmp_path, work):
    """After the first fifth, by less than ten megabytes, which the allocator may move: in 150 rounds
    one lost tensor of D entries a round is 60 MB, in 10,000 a lost kilobyte a round shows."""
    process = FORKSERVER.Process(target=measured, args=(work, tmp_path, ROUNDS))
    process.start()
    process.join()
    assert process.exitcode == 0
    sizes = json.loads((tmp_path / "sizes").read_text(encoding="utf-8"))
    growth = sizes[-1] - sizes[len(sizes) // 5]
    print(f"{ROUNDS} rounds: {sizes[0]:,} bytes at first, {growth:,} more in the last four fifths")
    assert len(sizes) == ROUNDS // 50 and growth < 10_000_000
