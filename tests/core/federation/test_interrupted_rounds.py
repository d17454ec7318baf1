"""Section 7: what happens when the end of a round goes wrong, and what refused messages leave."""

import copy

import pytest
import torch
from common import same_state
from torch import nn

import tcs_core as tcs

CLIENTS = 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches():
    """Clients whose inputs lie apart, so that their statistics do."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: 4.0 * n + torch.randn(5, 6, generator=generator)  # noqa: E731
    return [[(draw(n), torch.arange(5) % 3) for _ in range(3)] for n in range(CLIENTS)]


def federation(scheme="TCS", **more):
    more = {"schedule": 0.05} | more
    return tcs.Federation(net(), batches(), scheme, **more)


def vectors(made):
    """What a round moves, but for a norm's count of passes, which no mean depends on."""
    kept = [made.theta_D, made.statistics_NS, made.momentum_D, *made.model.state_dict().values()]
    return [one.clone() for one in kept if one is not None and one.dim()]


# Exceptions while theta moves ─────────────────────────────────────────────────────────────────────


class Late(Exception):
    pass


SCHEMES = {
    "TCS": {}, "TCS-L2-Q5": {}, "TCS-Global Momentum": {},
    "FedAvg": {"server_optimizer": lambda p: torch.optim.SGD(p, 1.0, momentum=0.9)},
    "top-K": {"weights": [1.0, 2.0, 3.0]},
}  # fmt: skip


def raises(made, monkeypatch, name, error):
    def late(*_):
        raise error

    monkeypatch.setattr(made.trainer, name, late)


@pytest.mark.parametrize("error", [Late, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_exception_in_the_averaging_of_statistics_moves_nothing(scheme, error, monkeypatch):
    made = federation(scheme, **SCHEMES[scheme])
    made.round(), made.round()
    before, active = vectors(made), list(made.active)
    with monkeypatch.context() as patched:
        raises(made, patched, "average_statistics", error)
        with pytest.raises(error):
            made.round([0, 2])
    assert same_state(vectors(made), before)
    assert made.active == active and made.t == 3


CALLS = {
    "round": lambda made: made.round(),
    "state_dict": lambda made: made.state_dict(),
    "evaluated": lambda made: made.evaluated().__enter__(),
    "averaged_state_dict": lambda made: made.averaged_state_dict(),
}


@pytest.mark.parametrize("where", ["average_statistics", "put_theta", "server"])
@pytest.mark.parametrize("scheme", ["TCS", "FedAvg", "TCS-L2-Q5"])
def test_after_an_interruption_while_theta_moves_all_is_refused_until_a_state_is_loaded(
    scheme, where, monkeypatch
):
    own = {"server_optimizer": lambda p: torch.optim.SGD(p, 1.0)} if where == "server" else {}
    made, other = federation(scheme, **own), federation(scheme, **own)
    for _ in range(2):
        made.round(), other.round()
    saved = made.state_dict()
    with monkeypatch.context() as patched:
        if where == "server":
            interrupted = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
            patched.setattr(made.server_optimizer, "step", interrupted)
        elif where == "put_theta":
            interrupts_once(made, patched)
        else:
            raises(made, patched, where, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt) as raised:
            made.round()
    assert any("round 2" in note for note in raised.value.__notes__)
    for name, call in CALLS.items():
        with pytest.raises(ValueError, match=r"round 2 .*load_state_dict"):
            call(made)
        assert made.t == 3, name
    with pytest.raises(ValueError, match=r"^state: t is missing"):
        made.load_state_dict({key: value for key, value in saved.items() if key != "t"})
    with pytest.raises(ValueError, match="load_state_dict"):
        made.round()  # a state that was refused does not count
    made.load_state_dict(saved)
    for _ in range(2):
        assert torch.equal(made.round(), other.round())
    assert same_state(made.state_dict(), other.state_dict())


def interrupts_once(made, patched):
    """Where the whole of theta was to be put into the module at the end of the round."""
    plain, interrupted = made.trainer.put_theta, []

    def put_theta():
        if not made.is_whole and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        plain()

    patched.setattr(made.trainer, "put_theta", put_theta)


def test_a_failed_round_before_the_exchange_is_over_refuses_nothing():
    fails = [0]

    def loss(model, batch):
        fails[0] -= 1
        if fails[0] == 0:
            raise KeyboardInterrupt
        return tcs.cross_entropy(model, batch)

    made = federation(loss=loss)
    made.round()
    before = vectors(made)
    fails[0] = 2
    with pytest.raises(KeyboardInterrupt):
        made.round()
    assert same_state(vectors(made), before) and made.is_whole
    made.state_dict(), made.round(), made.averaged_state_dict()


# Refused messages ─────────────────────────────────────────────────────────────────────────────────


def with_a_bad_network(bad, scheme="TCS", **more):
    """Messages of these clients are cut on the way, from the second round on."""
    federations = []

    def channel(sender, data):
        cut = sender in bad and federations[0].t > 1
        return data[:-1] if cut else data

    link = tcs.Link(channel, "skip")
    federations.append(federation(scheme, link=link, **more))
    return federations[0]


@pytest.mark.parametrize("bad", [[0], [1], [0, 2], [2]])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 5.0]])
@pytest.mark.parametrize("scheme", ["TCS", "FedAvg"])
def test_statistics_of_clients_that_were_not_heard_are_not_averaged(scheme, weights, bad):
    made = with_a_bad_network(bad, scheme, weights=weights)
    made.round()
    assert made.active == [0, 1, 2]
    made.round()
    heard = [n for n in range(CLIENTS) if n not in bad]
    assert made.active == heard == list(made.compressor.traffic.heard)
    shares_N = torch.tensor([(weights or [1.0] * CLIENTS)[n] for n in heard])
    expected_S = shares_N / shares_N.sum() @ made.statistics_NS[heard]
    norm = made.model[1]
    torch.testing.assert_close(torch.cat([norm.running_mean, norm.running_var]), expected_S)
    with made.evaluated() as model:
        torch.testing.assert_close(model[1].running_mean, expected_S[:8])
    assert made.state_dict()["active"] == heard


def test_who_was_heard_is_what_a_resumed_federation_goes_on_from():
    made = with_a_bad_network([1])
    for _ in range(3):
        made.round()
    resumed = federation(link=tcs.Link(tcs.unchanged, "skip"))
    resumed.load_state_dict(made.state_dict())
    assert resumed.active == [0, 2]
    for key, value in made.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], value), key


# torch's defaults ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def defaults():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("cpu")


def trained(model, feed, optimizer, steps):
    """What a trainer makes of its clients, and of their statistics."""
    trainer = tcs.LocalTrainer(
        model, tcs.Feed(feed), tcs.Scheme.named(f"TCS-L{steps}"), loss=tcs.cross_entropy,
        weight_decay=0.0 if optimizer else 1e-3, local_optimizer=optimizer, seed=3,
    )  # fmt: skip
    with trainer.lend_module():
        differences = [trainer.difference(n, 0, 0.1).clone() for n in range(CLIENTS)]
        weighted_S = trainer.average_statistics([0, 2], [1.0, 2.0, 3.0])
        trainer.left_S = trainer.average_statistics([0, 1], None)
    flat = [*differences, weighted_S, trainer.left_S, trainer.statistics_NS, trainer.losses_N]
    assert {one.dtype for one in flat} == {torch.float32}
    return [*flat, *trainer.model.state_dict().values()]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16, "meta"])
@pytest.mark.parametrize("optimizer", [None, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
@pytest.mark.parametrize("steps", [1, 3])
def test_torchs_defaults_change_nothing_in_local_training(default, optimizer, steps, defaults):
    models, feed = (net(), net()), batches()
    expected = trained(models[0], feed, optimizer, steps)
    if default == "meta":
        torch.set_default_device(default)
    else:
        torch.set_default_dtype(default)
    assert same_state(trained(models[1], feed, optimizer, steps), expected)


@pytest.mark.parametrize("scheme", ["TCS-L2-Q5", "top-K", "rand-K", "TCS-Global Momentum"])
def test_another_default_device_changes_nothing_in_a_federation(scheme, defaults):
    made, other = federation(scheme), federation(scheme)
    made.round()
    torch.set_default_device("meta")
    other.round()
    assert torch.equal(made.round(), other.round())
    other.load_state_dict(other.state_dict())
    assert torch.equal(made.round(), other.round())


# Calls during a round ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "call", ["round", "state_dict", "averaged_state_dict", "evaluated", "load_state_dict"]
)
def test_what_needs_the_module_is_refused_during_a_round(call):
    """There the module has a client's statistics; nobody must take them for the module's own."""
    made, plain = federation(), federation()
    state = made.state_dict()
    refused = []

    def calls(n, delta_D):
        with pytest.raises(
            ValueError, match=f"{call}: got called during round [01], allowed: between"
        ):
            if call == "evaluated":
                with made.evaluated():
                    pass
            else:
                getattr(made, call)(*[state] * (call == "load_state_dict"))
        refused.append(n)

    made.on_delta = calls
    for _ in range(2):
        made.round()
        plain.round()
    assert refused == [0, 1, 2] * 2 and made.t == 2
    for one, other in zip(vectors(made), vectors(plain), strict=True):
        assert torch.equal(one, other)


def test_a_copied_trainer_refuses_the_optimizers_of_the_other_module():
    made = federation("FedAvg", schedule=None, local_optimizer=lambda p: torch.optim.SGD(p, 0.1))
    made.round()
    other = copy.copy(made.trainer)
    other.use(copy.deepcopy(made.model))
    other.make_views()
    with (
        pytest.raises(ValueError, match="local_optimizer: gave an optimizer of other parameters"),
        other.lend_module(),
    ):
        other.difference(0, 1, float("nan"))


def test_norms_that_change_their_statistics_in_place_train_after_others():
    model = nn.Sequential(
        nn.BatchNorm1d(6), nn.Unflatten(1, (3, 2)), nn.InstanceNorm1d(3, track_running_stats=True),
        nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip
    made = tcs.Federation(model, batches(), "FedAvg", 0.05)
    before = made.statistics_NS.clone()
    made.round()
    assert (made.statistics_NS != before).all(1).any() and made.theta_D.isfinite().all()
    assert not torch.equal(made.statistics_NS[0], made.statistics_NS[1])
