"""Section 7, static rounds: what a CUDA graph holds, held to the eager rounds."""

import gc
import weakref

import pytest
import tcs_lab as lab
import torch

import tcs_core as tcs

DEVICES = ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])]  # fmt: skip


def federations(name, device="cpu", **changes):
    own = {key: changes.pop(key) for key in ("phi_local",) if key in changes}
    data = lab.synthetic_dataset(train=120, test=20).resized(16)
    settings = {
        "model": "resnet8",
        "width": 4,
        "clients": 3,
        "batch_size": 4,
        "epochs": 4,
        "device": device,
    }
    settings |= {"warmup_epochs": 1, "reference_batch": None} | changes
    scheme = tcs.Scheme.named(name, **own)
    return [
        lab.Training(lab.RunConfig(scheme, 0.1, graph=g, **settings), data) for g in (False, True)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", ["TCS", "TCS-L4-Q5", "top-K", "top-K-Q5", "TCS-M2-E3", "TCS-Momentum", "TCS-NW"]
)
def test_static_rounds_do_what_eager_ones_do(name, device):
    eager, static = federations(name, device)
    for epoch in range(3):
        one, two = eager.epoch(epoch), static.epoch(epoch)
        assert static.static.ready(epoch + 1)
        loss = one.pop("train_loss"), two.pop("train_loss")
        near = 1e-4 if device == "cpu" or epoch < 2 else 1e-2  # there a rounding may flip a mask
        assert loss[1] == pytest.approx(loss[0], rel=near)
        if device == "cpu":  # there rounding is the same, so masks are
            assert one == two
            for key in ("theta_D", "statistics_NS"):
                torch.testing.assert_close(
                    getattr(static, key), getattr(eager, key), rtol=1e-4, atol=1e-6
                )
            mask = eager.compressor.rule.global_mask()
            assert torch.equal(static.compressor.rule.global_mask(), mask)
    assert eager.compressor.round == static.compressor.round


def test_what_static_rounds_cannot_do_stays_eager():
    for name in ("TCS-LF", "rand-K", "FedAvg", "TCS+", "TCS-D5", "Baseline"):
        assert federations(name)[1].static is None
    assert federations("TCS", wire=True)[1].static is None
    assert federations("TCS", participation=0.5)[1].static is None
    assert federations("TCS")[1].static is not None


def test_an_update_that_is_not_finite_is_named_after_the_epoch():
    _, static = federations("TCS", warmup_epochs=1)
    static.epoch(0)
    static.theta_D[3] = float("inf")
    with pytest.raises(tcs.NotFiniteError, match=r"client 0.*epoch 2, round 1 of 10"):
        static.epoch(1)


def test_masks_that_were_replaced_are_seen_by_the_next_static_round():
    """By a checkpoint or by eager rounds in between: a graph would read the old ones."""
    one, two = federations("TCS")[1], federations("TCS")[1]
    for federation in (one, two):
        federation.epoch(0)
        federation.epoch(1)
    held = one.static._masks()
    one.static.held = held
    assert all(a is b for a, b in one.static._masks_and_held())
    one.load_state_dict(two.state_dict())
    assert not all(a is b for a, b in one.static._masks_and_held())
    assert one.epoch(2) == two.epoch(2) and torch.equal(one.theta_D, two.theta_D)


def test_a_federation_with_static_rounds_is_freed_at_once():
    gc.disable()
    try:
        _, static = federations("TCS")
        static.epoch(0)
        alive = weakref.ref(static)
        del static
        assert alive() is None
    finally:
        gc.enable()


def test_replays_are_rounds():
    eager, static = federations("TCS-L2")
    draws = eager._draws(0)
    eager.round(draws, 0, 1e-3)
    for index in range(eager.rounds_per_epoch):
        eager.round(draws, index, 1e-3)
    lab.bench._replays(static)()
    torch.testing.assert_close(static.theta_D, eager.theta_D, rtol=1e-4, atol=1e-6)


def test_without_a_local_mask_static_rounds_do_what_eager_ones_do():
    eager, static = federations("TCS", phi_local=None)
    for epoch in range(2):
        assert eager.epoch(epoch) == static.epoch(epoch)


@pytest.mark.parametrize(
    "values", [[0.0] * 9, [1.0] * 9, [3, 1, 2, 3, 1, 2, 0, 0, 3], [3, -1, 2, -1, 1, 2, 0, -1, 3]]
)
def test_static_selection_breaks_ties_as_the_other_does(values):
    """-1 stands for an excluded entry: the last to be taken."""
    magnitudes = torch.tensor(values).float()
    for k in range(10):
        assert torch.equal(tcs.static_top_k(magnitudes, k), tcs._top(magnitudes, k))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_round_on_a_gpu_never_waits_for_the_host():
    _, static = federations("TCS-Q5", "cuda")
    static.epoch(0)
    static.epoch(1)  # captured
    before = static.theta_D.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        static.static._round()  # not replayed: it names the line that waits
        static.static.graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(static.theta_D, before)
