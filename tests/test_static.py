"""Section 7, static rounds: what a CUDA graph holds, held to the eager rounds."""

import pytest
import torch

import tcs_core as tcs

DEVICES = ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])]  # fmt: skip


def federations(name, device="cpu", **changes):
    data = tcs.synthetic_dataset(train=240, test=20)
    settings = {
        "model": "resnet8",
        "width": 4,
        "clients": 3,
        "batch_size": 4,
        "epochs": 4,
        "device": device,
    }
    settings |= {"warmup_epochs": 1, "reference_batch": None} | changes
    scheme = tcs.Scheme.named(name)
    return [
        tcs.Federation(tcs.RunConfig(scheme, 0.1, graph=g, **settings), data) for g in (False, True)
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
        assert loss[1] == pytest.approx(loss[0], rel=1e-4)
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
    with pytest.raises(tcs.NotFiniteError, match=r"client 0.*epoch 2, round 1 of 20"):
        static.epoch(1)


@pytest.mark.parametrize("values", [[0.0] * 9, [1.0] * 9, [3, 1, 2, 3, 1, 2, 0, 0, 3]])
def test_static_selection_breaks_ties_as_the_other_does(values):
    vector = torch.tensor(values).float()
    for k in range(1, 10):
        assert torch.equal(tcs.static_top_k(vector.abs(), k), tcs.top_k_positions(vector, k))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_round_on_a_gpu_never_waits_for_the_host():
    _, static = federations("TCS-Q5", "cuda")
    static.epoch(0)
    static.epoch(1)  # captured
    before = static.theta_D.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        static.static.graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(static.theta_D, before)
