"""Rounds as a CUDA graph, held to the ordinary ones."""

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import tcs_lab as lab
import torch
from common import HeldFeed, Peak
from tcs_lab.training.client_streams import STREAMS, ClientStreams
from tcs_lab.training.cuda_graph import GraphRounds, is_suitable
from torch import nn

import tcs_core as tcs

DEVICES = ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])]  # fmt: skip


def federations(name, device="cpu", **changes):
    own = {key: changes.pop(key) for key in ("phi_local",) if key in changes}
    data = lab.synthetic_dataset(train=120, test=20).resize(16)
    settings = {"model": "resnet8", "width": 4, "clients": 3, "batch_size": 4, "epochs": 4,
                "warmup_epochs": 1, "reference_batch": None, "device": device,
                "side_by_side": False} | changes  # fmt: skip
    scheme = tcs.Scheme.named(name, **own)
    configs = [lab.RunConfig(scheme, 0.1, graph=graph, **settings) for graph in (False, True)]
    return [lab.Training(config, data) for config in configs]


def rounds_of(training, epoch):
    count = training.rounds_per_epoch
    return range(epoch * count, (epoch + 1) * count)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    ["TCS", "TCS-L4-Q5", "top-K", "top-K-Q5", "TCS-M2-E3", "TCS-Momentum", "TCS-NW", "FedAvg",
     "FedAvg-L2", "Baseline", "Baseline-Momentum"],
)  # fmt: skip
@pytest.mark.parametrize("together", [False, True])
def test_static_rounds_do_what_eager_ones_do(name, together, device):
    if together and name.startswith("Baseline"):
        pytest.skip("a single client trains in one way")
    if (name, device) == ("Baseline-Momentum", "cuda"):
        pytest.skip("a change by a millionth moves its loss by a percent: held to on a CPU")
    eager, static = federations(name, device, side_by_side=together)
    for epoch in range(3):
        one, two = eager.epoch(epoch), static.epoch(epoch)
        assert static.graph.is_ready(rounds_of(static, epoch + 1))
        loss = one.pop("train_loss"), two.pop("train_loss")
        near = 1e-4 if device == "cpu" or epoch < 2 else 1e-2  # there a rounding may flip a mask
        assert loss[1] == pytest.approx(loss[0], rel=near)
        if device == "cpu":  # there rounding is the same, so masks are
            assert one == two
            for key in ("theta_D", "statistics_NS"):
                torch.testing.assert_close(
                    getattr(static, key), getattr(eager, key), rtol=1e-4, atol=1e-6
                )
            mask = eager.compressor.rule.shared_mask()
            assert torch.equal(static.compressor.rule.shared_mask(), mask)
    assert eager.compressor.known.round == static.compressor.known.round


def test_what_static_rounds_cannot_do_stays_eager():
    for name in ("TCS-LF", "rand-K", "FedAvg-Q5", "TCS+", "TCS-D5"):
        assert federations(name)[1].graph is None
    assert federations("TCS", wire=True)[1].graph is None
    assert federations("TCS", participation=0.5)[1].graph is None
    assert federations("TCS")[1].graph is not None


def test_an_update_that_is_not_finite_is_named_after_the_epoch():
    _, static = federations("TCS", warmup_epochs=1)
    static.epoch(0)
    state = static.state_dict()
    static.flat.parameters[0].data.fill_(float("inf"))
    with pytest.raises(tcs.NotFiniteError, match=r"client 0.*epoch 2, round 1 of 10"):
        static.epoch(1)
    for call in (static.federation.round, static.state_dict, static.evaluate):
        with pytest.raises(ValueError, match="load_state_dict"):
            call()
    static.load_state_dict(state)
    assert static.epoch(1)["dense_rounds"] == 0 and static.evaluate()["accuracy"] >= 0


def test_masks_that_were_replaced_are_seen_by_the_next_static_round(monkeypatch):
    """By a checkpoint or by eager rounds in between: a graph would read the old ones."""
    one, two = federations("TCS")[1], federations("TCS")[1]
    for federation in (one, two):
        federation.epoch(0)
        federation.epoch(1)
    static, captured = one.graph, []
    graph = mock.Mock()
    with monkeypatch.context() as as_on_a_gpu:
        as_on_a_gpu.setattr(static, "index", mock.Mock(wraps=static.index))
        static.index.device = mock.Mock(type="cuda")
        as_on_a_gpu.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        as_on_a_gpu.setattr(static, "_capture", lambda: captured.append(1) or graph)
        for _ in range(2):
            static._play(0, 0.1)
        assert len(captured) == 1
        one.load_state_dict(two.state_dict())
        static._play(0, 0.1)
        assert len(captured) == 2
    assert one.epoch(2) == two.epoch(2) and torch.equal(one.theta_D, two.theta_D)


@pytest.mark.parametrize("name", ["TCS", "FedAvg", "Baseline-Momentum", "TCS-Momentum"])
def test_what_the_capture_changes_is_put_back(name, monkeypatch):
    """Its trial rounds. Here the capture is one more of them, and a replay makes the round."""
    for part in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, part, mock.Mock())
    for part in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, part, lambda *_, **__: contextlib.nullcontext())
    eager, static = federations(name)
    rounds = static.graph

    def play(index, eta):
        rounds.index.fill_(index)
        rounds.eta.fill_(eta)
        rounds.graph = rounds.graph or rounds._capture()
        rounds._round()

    monkeypatch.setattr(rounds, "_play", play)
    for epoch in range(3):
        assert eager.epoch(epoch) == static.epoch(epoch)
    assert torch.equal(static.theta_D, eager.theta_D) and rounds.graph is not None


def small_federation(name):
    generator = torch.Generator().manual_seed(4)
    inputs, labels = torch.randn(2, 30, 5, 6, generator=generator), torch.arange(5) % 3
    feed = HeldFeed(
        [[(x, labels) for x in row] for row in inputs], tcs.Scheme.named(name).local_steps
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
    rate = lambda t: tcs.Phase(0.1 / (1 + t), mask_factor=1)  # noqa: E731
    return tcs.Federation(model, feed, name, rate, weight_decay=1e-3)


@pytest.mark.parametrize("name", ["TCS-L2-K2", "TCS-Q5-Momentum", "top-K-M2"])
def test_static_rounds_may_come_anywhere_between_eager_ones(name):
    """A few at a time, of a federation over any model and feed."""
    eager, mixed = small_federation(name), small_federation(name)
    rounds = GraphRounds(mixed, 4)
    assert rounds.is_ready(range(1)) == (name == "top-K-M2")  # others have no mask yet
    for _ in range(12):
        eager.round()
    mixed.round()
    for span in (range(1, 4), range(4, 8)):
        assert rounds.is_ready(span)
        assert len(rounds.play(span)) == len(span)
    mixed.round()
    traffic = rounds.play(range(9, 12))[-1]
    assert mixed.t == eager.t == mixed.compressor.known.round == 12
    assert traffic == eager.compressor.traffic and min(traffic[:4]) > 0
    for key in ("theta_D", "statistics_NS", "losses_N"):
        torch.testing.assert_close(getattr(mixed, key), getattr(eager, key), rtol=1e-5, atol=1e-7)
    one, two = (f.compressor.errors_ND for f in (eager, mixed))
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["FedAvg", "top-K"])
def test_a_graph_is_captured_anew_for_what_is_elsewhere_now(name, monkeypatch):
    """A graph would go on with tensors that its federation has no longer."""
    federation = small_federation(name)
    rounds = GraphRounds(federation, 4)
    rounds.play(range(2))
    captured, graph = [], mock.Mock()
    with monkeypatch.context() as as_on_a_gpu:
        as_on_a_gpu.setattr(rounds, "index", mock.Mock(wraps=rounds.index))
        rounds.index.device = mock.Mock(type="cuda")
        as_on_a_gpu.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        as_on_a_gpu.setattr(rounds, "_capture", lambda: captured.append(1) or graph)
        rounds.play(range(2, 4))
        assert len(captured) == 1
        federation.model[0].bias.data = federation.model[0].bias.data.clone()
        rounds.play(range(4, 6))
        assert len(captured) == 2
        federation.model[0].weight.data = federation.model[0].weight.data.clone()
        rounds.play(range(6, 8))
        assert len(captured) == 3


@pytest.mark.parametrize("which", ["local_optimizer", "server_optimizer"])
def test_static_rounds_refuse_optimizers(which):
    batches = [[(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))]] * 2
    optimizer = {which: lambda p: torch.optim.SGD(p, 0.1)}
    federation = tcs.Federation(torch.nn.Linear(6, 3), batches, "FedAvg", 0.1, **optimizer)
    with pytest.raises(ValueError, match=f"{which}: got .*, allowed: none"):
        GraphRounds(federation, 4)


def test_a_record_says_whether_its_rounds_were_static():
    said = {
        name: lab.runs.records.rounding(federations(name, **changes)[1].config)["graph"]
        for name, changes in {
            "TCS": {},
            "FedAvg": {},
            "rand-K": {},
            "top-K": {"wire": True},
        }.items()
    }
    assert said == {"TCS": True, "FedAvg": True, "rand-K": False, "top-K": False}
    half = federations("TCS", participation=0.5)[1].config
    assert not lab.runs.records.rounding(half)["graph"]


def test_a_federation_with_static_rounds_is_freed_at_once():
    gc.disable()
    try:
        federation = small_federation("top-K")
        federation.graph = GraphRounds(federation, 3)
        federation.graph.play(range(3))
        alive = weakref.ref(federation)
        del federation
        assert alive() is None
    finally:
        gc.enable()


def test_without_a_local_mask_static_rounds_do_what_eager_ones_do():
    eager, static = federations("TCS", phi_local=None)
    for epoch in range(2):
        assert eager.epoch(epoch) == static.epoch(epoch)


class FakeGPU:
    """Streams that are none: what is asked of them, in order."""

    def __init__(self, monkeypatch):
        self.asked = []
        usual = mock.Mock(wait_event=lambda event: self.asked.append(("usual waits for", event)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: usual)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream())
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)

    def stream(self):
        made = mock.Mock()
        made.wait_stream = lambda other: self.asked.append(("waits", made))
        made.record_event = lambda: self.asked.append(("is done", made)) or len(self.asked)
        return made


@pytest.mark.parametrize("name", ["TCS", "TCS-L2-Q5", "TCS-Momentum"])
def test_clients_on_streams_train_as_they_do_in_turns(name, monkeypatch):
    fake = FakeGPU(monkeypatch)
    eager = federations(name, clients=7)[0]
    monkeypatch.setattr(lab.Training, "_choose_trainer", lambda self, static: ClientStreams)
    streams = federations(name, clients=7)[0]
    assert type(streams.federation.trainer) is ClientStreams
    for epoch in range(3):
        assert streams.epoch(epoch) == eager.epoch(epoch)
    for key in ("theta_D", "statistics_NS"):
        assert torch.equal(getattr(streams, key), getattr(eager, key))
    a_round = fake.asked[: STREAMS + 14]
    assert [what for what, _ in a_round[:STREAMS]] == ["waits"] * STREAMS  # for theta
    done = [place for place, (what, _) in enumerate(a_round, 1) if what == "is done"]
    assert [event for what, event in a_round if what == "usual waits for"] == done


def test_only_a_few_clients_of_static_rounds_have_streams(monkeypatch):
    training = federations("TCS")[1]
    kinds = {}
    for device, clients in (("cuda", 10), ("cuda", 17), ("cuda", 1), ("cpu", 10)):
        settings = {"client_count": clients, "torch_device": torch.device(device)}
        ways = {"client_threads": False, "side_by_side": False, "graph": True}
        made = mock.Mock(config=mock.Mock(**settings, **ways))
        kinds[device, clients] = [
            lab.Training._choose_trainer(made, static) for static in (True, False)
        ]
    assert kinds.pop(("cuda", 10)) == [ClientStreams, tcs.LocalTrainer]
    assert all(kind == [tcs.LocalTrainer] * 2 for kind in kinds.values())
    assert type(training.federation.trainer) is tcs.LocalTrainer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["TCS-Q5", "FedAvg"])
def test_a_round_on_a_gpu_never_waits_for_the_host(name, together):
    _, static = federations(name, "cuda", side_by_side=together)
    static.epoch(0)
    static.epoch(1)  # captured
    before = static.theta_D.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        static.graph._round()  # not replayed: it names the line that waits
        static.graph.graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(static.theta_D, before)


def test_wide_masks_of_a_warm_up_end_with_it():
    eager, static = small_federation("TCS-W4"), small_federation("TCS-W4")
    for made in (eager, static):
        made.schedule = lambda t: tcs.Phase(0.1, mask_factor=4 if t < 3 else 1)
        for _ in range(3):
            made.round()
    rounds = GraphRounds(static, 4)
    assert not rounds.is_ready(range(2, 6)) and rounds.is_ready(range(3, 7))
    traffic = rounds.play(range(3, 7))[-1]
    for _ in range(4):
        eager.round()
    assert traffic.bits_up == eager.compressor.bits_up
    torch.testing.assert_close(static.theta_D, eager.theta_D, rtol=1e-5, atol=1e-7)


def test_a_sum_that_overflows_at_the_server_is_named_there():
    for played in ("eager", "static"):
        made = small_federation("TCS")
        made.round()
        shared_K = made.compressor.rule.shared_mask()
        made.compressor.errors_ND[:, shared_K[:1]] = 3e38
        with pytest.raises(tcs.NotFiniteError, match=r"^server: "):
            made.round() if played == "eager" else GraphRounds(made, 1).play(range(1, 2))


def test_they_make_no_tensor_of_all_clients_differences():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100))
    feed = HeldFeed([[(torch.randn(4, 100), torch.arange(4))] * 3] * 40)
    made = tcs.Federation(model, feed, "TCS", 0.1)
    made.round()
    rounds = GraphRounds(made, 2)
    with Peak() as peak:
        rounds.play(range(1, 3))
    assert peak.peak < 8 * 4 * len(made.theta_D) + 2 * 40 * 4 * 404  # and the batches it holds


def test_a_quantizer_of_ones_own_works_in_them(uniform):
    def federation():
        inputs = torch.randn(2, 9, 4, 5, generator=torch.Generator().manual_seed(3))
        feed = HeldFeed([[(x, torch.arange(4) % 3) for x in row] for row in inputs])
        torch.manual_seed(0)
        return tcs.Federation(nn.Linear(5, 3), feed, "TCS-U4-W9", 0.1)

    eager, static = federation(), federation()
    for _ in range(9):
        eager.round()
    static.round(), static.round()
    rounds = GraphRounds(static, 7)
    assert is_suitable(static.scheme, tcs.Link()) and rounds.is_ready(range(2, 9))
    rounds.play(range(2, 9))
    torch.testing.assert_close(static.theta_D, eager.theta_D, rtol=1e-5, atol=1e-7)
    assert len(static.theta_D.unique()) > 1


def test_static_rounds_are_refused_after_one_that_failed_and_inside_a_round():
    federation = small_federation("FedAvg")
    rounds, saved = GraphRounds(federation, 4), federation.state_dict()
    rounds.play(range(2))
    assert federation.compressor.traffic.bytes_down > 20
    with torch.no_grad():
        federation.model[0].weight[0, 0] = torch.nan
    with pytest.raises(tcs.NotFiniteError):
        rounds.play(range(2, 4))
    with torch.no_grad():
        federation.model[0].weight[0, 0] = 0.0
    with pytest.raises(ValueError, match=r"^play: round .* was interrupted"):
        rounds.play(range(2, 4))
    federation.load_state_dict(saved)
    rounds.play(range(2))
