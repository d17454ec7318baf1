"""A client a core: the same record for any number of threads; what goes wrong is told, and no
thread stays behind. Compiled passes."""

import gc
import signal
import threading

import pytest
import tcs_lab as lab
import torch
from common import config, numbers
from tcs_lab.runs.checkpoints import checkpoint_path
from tcs_lab.training.client_threads import ClientThreads
from tcs_lab.training.side_by_side import SideBySide

import tcs_core as tcs

NET = {"model": "resnet18", "clients": 5, "train_samples": 60, "batch_size": 3, "epochs": 2}


def threaded(threads, scheme="TCS-L2-Q5", **changes):
    return config(scheme, **(NET | {"client_threads": True, "threads": threads} | changes))


# The same record ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        ("TCS-L2-Q5", {"participation": 0.6}),
        ("TCS-L4-M2-E3-W5++", {"wire": True}),
        ("TCS-Global Momentum", {"precision": "bf16"}),
    ],
)
def test_any_number_of_threads_makes_the_record_of_clients_in_turns_on_one(
    tmp_path, small, scheme, changes
):
    in_turns = threaded(1, scheme, client_threads=False, side_by_side=False, **changes)
    expected = numbers(lab.run(in_turns, tmp_path / "in turns"))
    for threads in (1, 2, 4):
        record = lab.run(threaded(threads, scheme, **changes), tmp_path / str(threads))
        made = record["provenance"]
        assert numbers(record) == expected
        assert made["client_threads"] and made["threads"] == threads
        assert made["repeats"].startswith("bit for bit")
        again = lab.runs.records.config_of(record, device="cpu")
        assert again.client_threads and again.threads == threads


def test_a_run_that_goes_on_with_other_threads_ends_in_the_same_record(
    tmp_path, small, monkeypatch
):
    monkeypatch.setattr(lab.runs.checkpoints.Pace, "due", lambda self: True)

    def stop(row):
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    longer = {"epochs": 3, "participation": 0.6}
    undisturbed = lab.run(threaded(1, **longer), tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        lab.run(threaded(4, **longer), tmp_path / "two", stop)
    assert checkpoint_path(threaded(2, **longer)).exists()
    made = []
    record = lab.run(threaded(2, **longer), tmp_path / "two", lambda row: made.append(row["epoch"]))
    assert numbers(record) == numbers(undisturbed) and made[-1] == 3 and len(made) < 3
    assert record["provenance"]["repeats"].startswith("bit for bit")


def test_a_single_client_has_all_threads_to_itself():
    assert "threads" not in lab.runs.records.rounding(threaded(2))
    alone = lab.runs.records.rounding(threaded(2, "Baseline"))
    assert not alone["client_threads"] and alone["threads"] == 2


@pytest.mark.parametrize(
    ("way", "other"),
    [("client_threads", "graph"), ("client_threads", "side_by_side")],
)
def test_ways_that_do_not_go_together(way, other):
    with pytest.raises(ValueError, match=f"^{way}: got True, allowed: false with {other}: true$"):
        config(**{way: True, other: True})


# What goes wrong ──────────────────────────────────────────────────────────────────────────────────


class Feed:
    """Batches of noise for eight clients; `disturb(n, t)` is called before each."""

    clients = 8

    def __init__(self, disturb=lambda n, t: None):
        self.disturb = disturb

    def batch(self, n, t, tau):
        self.disturb(n, t)
        generator = torch.Generator().manual_seed(100 * t + n)
        return n, t, torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)


def federation(disturb=lambda n, t: None, feed=None):
    """With three threads; `disturb(n, t)` is called on a thread, and what it returns times the loss."""

    def loss(model, batch):
        n, t, images, labels = batch
        factor = disturb(n, t)
        found = tcs.cross_entropy(model, (images, labels))
        return found if factor is None else found * factor

    torch.set_num_threads(3)
    model = tcs.build_model("conv3", 2)
    return tcs.Federation(model, feed or Feed(), "TCS", 0.1, loss=loss, trainer=ClientThreads)


def fail(n, t):
    if (n, t) == (4, 1):
        raise KeyError("a client's own error")


def overflow(n, t):
    return float("inf") if (n, t) == (4, 1) else None


def interrupt(n, t):
    if (n, t) == (4, 1):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def interrupted():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if the tests run with nohup
    return federation(interrupt)


@pytest.mark.parametrize(
    ("made", "error", "text"),
    [
        (lambda: federation(fail), KeyError, "own error"),
        (lambda: federation(feed=Feed(fail)), KeyError, "own error"),
        (lambda: federation(overflow), tcs.NotFiniteError, "client 4: the update is not finite"),
        (interrupted, KeyboardInterrupt, None),
    ],
)
def test_an_error_reaches_the_caller_nothing_trains_on_and_threads_end(made, error, text):
    one = made()
    one.round()
    before_D = one.theta_D.clone()
    with pytest.raises(error, match=text):
        one.round()
    assert torch.equal(one.theta_D, before_D) and one.t == 2  # the round was one in vain
    trainer = one.trainer
    assert not trainer.training and not trainer.waiting and len(trainer.free) == 4
    one.round()  # its caller may go on
    assert not torch.equal(one.theta_D, before_D)
    assert any(thread.name.startswith("client") for thread in threading.enumerate())
    del one, trainer
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("client"):
            thread.join(10)
            assert not thread.is_alive()


def test_differences_come_in_order_and_few_wait():
    """However late the first client is: as many train ahead as there are seats."""
    order, ahead, first = [], [], threading.Event()

    def late(n, t):
        ahead.append(n)
        if n == 0 and t == 1:
            first.wait(1)

    one = federation(late)
    one.round()
    ahead.clear()
    one.on_delta = lambda n, delta_D: order.append((n, max(ahead)))
    one.round()
    assert [n for n, _ in order] == list(range(8))
    assert all(most <= n + 4 for n, most in order)


@pytest.mark.parametrize("kind", [ClientThreads, SideBySide])
def test_a_model_with_a_part_in_eval_mode_is_refused(kind):
    """Copies of the model would train it."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    net[1].eval()
    batches = [[(torch.randn(4, 3), torch.zeros(4).long())]] * 2
    with pytest.raises(ValueError, match=r"^model: got a part that stays in eval mode, allowed"):
        tcs.Federation(net, batches, "TCS", 0.1, trainer=kind)
