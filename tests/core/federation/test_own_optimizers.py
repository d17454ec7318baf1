"""Section 7 with optimizers, loaders and random numbers of one's own; and resumed to the same bits."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tcs_core as tcs

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}
SERVERS = {
    "SGD nesterov": lambda parameters: torch.optim.SGD(
        parameters, lr=0.7, momentum=0.9, nesterov=True
    ),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def net(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(dropout), nn.Linear(20, 3)
    )


def loaders(clients=2, samples=12, shuffle=True):
    """Batches of 4: three in a pass."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(clients):
        x = torch.randn(samples, 6, generator=generator)
        made.append(DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 4, shuffle=shuffle))
    return made


def federation(scheme="TCS-L2", dropout=0.0, schedule=0.1, feed=None, **more):
    return tcs.Federation(net(dropout), feed or loaders(), scheme, schedule, **more)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def resumes_to_the_same_bits(make, rounds=4, more=5):
    """`make()` for `rounds`, saved; a new one goes on as the first does."""
    one, two = make(), make()
    for _ in range(rounds):
        one.round()
    two.load_state_dict(through_a_file(one.state_dict()))
    torch.rand(3)  # what somebody draws in between
    for _ in range(more):
        assert torch.equal(one.round(), two.round())
    assert torch.equal(one.theta_D, two.theta_D)
    assert torch.equal(one.compressor.errors_ND, two.compressor.errors_ND)
    for a, b in zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    return one, two


# Resumed ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", ["TCS-L2-Q5", "top-K", "rand-K", "TCS-Momentum", "FedAvg-L2"])
def test_dropout_and_a_loader_that_shuffles_resume_to_the_same_bits(scheme):
    """In the middle of a pass of the loaders."""
    one, two = resumes_to_the_same_bits(lambda: federation(scheme, dropout=0.5, schedule=0.02))
    assert one.feed.state_dict() == two.feed.state_dict()


@pytest.mark.parametrize("local", OPTIMIZERS)
def test_a_clients_own_optimizer_resumes_to_the_same_bits(local):
    def make():
        return federation("TCS-L2-Q5", 0.5, None, local_optimizer=OPTIMIZERS[local])

    one, two = resumes_to_the_same_bits(make)
    assert one.trainer.optimizers.keys() == two.trainer.optimizers.keys() == {0, 1}


@pytest.mark.parametrize("server", SERVERS)
def test_a_servers_optimizer_resumes_to_the_same_bits(server):
    one, two = resumes_to_the_same_bits(
        lambda: federation("TCS-L2", 0.5, server_optimizer=SERVERS[server])
    )
    (kept,), (resumed,) = (o.server_optimizer.state.values() for o in (one, two))
    assert kept.keys() == resumed.keys() and kept
    assert all(torch.equal(torch.as_tensor(kept[k]), torch.as_tensor(resumed[k])) for k in kept)


def test_without_its_state_a_resumed_optimizer_would_be_another():
    def make():
        return federation("FedAvg-L2", 0, None, local_optimizer=OPTIMIZERS["SGD with momentum"])

    one, two = make(), make()
    for _ in range(3):
        one.round()
    two.load_state_dict(one.state_dict() | {"optimizers": {}})
    assert not torch.equal(one.round(), two.round())


def test_a_feeds_place_is_counted_and_taken_up():
    """After two passes and one batch comes the second batch of the third pass, shuffled alike."""
    one, two = tcs.Feed(loaders(), seed=3), tcs.Feed(loaders(), seed=3)
    first = [one.batch(0, t, 0)[0] for t in range(7)]
    assert (one.passes, one.given) == ([3, 0], [1, 0])
    two.load_state_dict(through_a_file(one.state_dict()))
    for t in range(7, 12):
        a, b = one.batch(0, t, 0), two.batch(0, t, 0)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    passes = [torch.cat(first[i : i + 3]) for i in (0, 3)]
    assert not torch.equal(*passes)  # each in an order of its own
    assert torch.equal(*[rows.sort(0).values for rows in passes])
    assert torch.equal(one.batch(1, 0, 0)[0], two.batch(1, 0, 0)[0])
    with pytest.raises(ValueError, match=r"^state: feed: passes: got 2, allowed: 3 entries$"):
        tcs.Feed(loaders(3)).load_state_dict(one.state_dict())


def test_a_state_of_another_scheme_seed_or_model_changes_nothing():
    made = federation("TCS-L2")
    made.round(), made.round()
    before, theta_D = made.state_dict(), made.theta_D.clone()
    wide = tcs.Federation(nn.Linear(6, 3), loaders(), "TCS-L2", 0.1)
    others = [
        (federation("TCS-L3"), "state: scheme: name: got .*; local_steps: got 3, allowed: 2$"), (federation("TCS-L2", seed=4), "state: seed: got 4, allowed: 0"),
        (wide, r"state: layers: got \('weight', \[3, 6\]\), allowed: \('0\.weight'"), (federation("TCS-L2", feed=loaders(3)), "state: .*got"),
    ]  # fmt: skip
    for other, text in others:
        other.round()
        with pytest.raises(ValueError, match=f"^{text}"):
            made.load_state_dict(other.state_dict())
        assert torch.equal(made.theta_D, theta_D) and made.t == 2
        errors = [client["errors_D"] for client in before["compressor"]["clients"]]
        assert torch.equal(made.compressor.errors_ND, torch.stack(errors))
        assert made.feed.state_dict() == before["feed"]


def test_a_state_with_other_optimizers_changes_nothing():
    kinds = [{}, {"local_optimizer": OPTIMIZERS["AdamW"]}, {"server_optimizer": SERVERS["Adam"]}]
    pairs = [(1, 0, "optimizers: got some"), (2, 0, "server_optimizer: got one"),
             (0, 2, "server_optimizer: got none")]  # fmt: skip
    for given, taken, text in pairs:
        one, two = (federation(schedule=0.01, **kinds[which]) for which in (given, taken))
        one.round(), one.round(), two.round()
        theta_D = two.theta_D.clone()
        with pytest.raises(ValueError, match=f"^state: {text}"):
            two.load_state_dict(one.state_dict())
        assert torch.equal(two.theta_D, theta_D) and two.t == two.compressor.known.round == 1


@pytest.mark.parametrize("own", ["local_optimizer", "server_optimizer"])
def test_a_state_is_by_value_and_may_be_taken_up_often(own):
    optimizer = OPTIMIZERS["AdamW"] if own == "local_optimizer" else SERVERS["Adam"]
    made = federation("TCS-L2", 0.5, schedule=0.01, **{own: optimizer})
    for _ in range(3):
        made.round()
    state = made.state_dict()
    kept = copy.deepcopy(state)
    expected = [made.round() for _ in range(3)]
    for _ in range(2):
        made.load_state_dict(state)
        assert made.t == 3 and torch.equal(made.theta_D, kept["theta_D"])
        updates = [made.round() for _ in range(3)]
        assert all(torch.equal(*pair) for pair in zip(updates, expected, strict=True))
    assert torch.equal(state["theta_D"], kept["theta_D"]) and state["feed"] == kept["feed"]


@pytest.mark.parametrize("own", ["local_optimizer", "server_optimizer"])
def test_a_state_of_another_optimizer_changes_nothing(own):
    adam = federation(schedule=0.01, **{own: SERVERS["Adam"]})
    adam.round()
    sgd = federation(schedule=0.05, **{own: OPTIMIZERS["SGD with momentum"]})
    sgd.round()
    before_D = sgd.theta_D.clone()
    name = "optimizer of client 0" if own == "local_optimizer" else own
    with pytest.raises(ValueError, match=f"^state: {name}: got one of Adam, allowed: SGD$"):
        sgd.load_state_dict(adam.state_dict())
    assert sgd.t == 1 and torch.equal(sgd.theta_D, before_D)


def test_one_optimizer_of_two_clients():
    model = net()
    shared = torch.optim.AdamW(model.parameters())
    made = tcs.Federation(model, loaders(), "TCS", local_optimizer=lambda parameters: shared)
    with pytest.raises(ValueError, match=r"^local_optimizer: gave one optimizer twice, allowed"):
        made.round()


# Optimizers ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("local", OPTIMIZERS)
def test_local_steps_of_one_client_are_its_optimizers(local):
    """And those of the second round go on from its momentum."""
    norm_free = lambda: nn.Sequential(*(m for m in net() if not isinstance(m, nn.BatchNorm1d)))  # noqa: E731
    plain = norm_free()
    made = tcs.Federation(
        norm_free(), loaders(1, shuffle=False), "FedAvg-L3", None, local_optimizer=OPTIMIZERS[local]
    )
    optimizer = OPTIMIZERS[local](plain.parameters())
    for _ in range(2):
        for batch in loaders(1, shuffle=False)[0]:
            optimizer.zero_grad()
            tcs.cross_entropy(plain, batch).backward()
            optimizer.step()
        made.round()
        for p, q in zip(made.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in made.model.parameters())


def test_plain_sgd_of_ones_own_is_the_built_in_one():
    own = federation("TCS-L2", local_optimizer=torch.optim.SGD)
    built_in = federation("TCS-L2")
    for _ in range(4):
        torch.testing.assert_close(own.round(), built_in.round(), rtol=1e-4, atol=1e-6)


def test_a_schedule_is_the_rate_of_a_local_optimizer_and_without_one_its_own_is():
    def rates(schedule):
        adamw = lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.1)  # noqa: E731
        made = federation("TCS", 0, schedule, local_optimizer=adamw)
        seen = []
        for _ in range(3):
            made.round()
            seen.append([o.param_groups[0]["lr"] for o in made.trainer.optimizers.values()])
        return seen

    assert rates(lambda t: 0.1 / (1 + t)) == [[0.1] * 2, [0.05] * 2, [0.1 / 3] * 2]
    assert rates(None) == [[0.001] * 2] * 3


@pytest.mark.parametrize("scheme", ["TCS-L2-Q5", "FedAvg", "top-K"])
def test_a_server_that_takes_whole_steps_is_plain_averaging(scheme):
    whole = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
    one, other = federation(scheme, server_optimizer=whole), federation(scheme)
    for _ in range(4):
        assert torch.equal(one.round(), other.round())
        assert torch.equal(one.theta_D, other.theta_D)


def test_a_servers_momentum_is_that_of_torch():
    """One client, one step, no compression: Nesterov's steps by the negative update."""
    made = tcs.Federation(
        net(), loaders(1, shuffle=False), "FedSGD", 1.0, server_optimizer=SERVERS["SGD nesterov"]
    )
    plain = net()
    optimizer = SERVERS["SGD nesterov"](plain.parameters())
    for batch in [*loaders(1, shuffle=False)[0]]:
        optimizer.zero_grad()
        tcs.cross_entropy(plain, batch).backward()
        optimizer.step()
        made.round()
    for p, q in zip(made.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"schedule": None}, "schedule: got None, allowed: a learning rate"),
     ({"local_optimizer": OPTIMIZERS["AdamW"], "weight_decay": 0.1}, "weight_decay: got 0.1, allowed: 0 beside a local"),
     ({"local_optimizer": OPTIMIZERS["AdamW"], "scheme": "TCS-Momentum"}, "local_optimizer: got one with TCS-Global"),
     ({"server_optimizer": SERVERS["Adam"], "scheme": "TCS-Momentum"}, "server_optimizer: got one with TCS-Global"),
     ({"local_optimizer": OPTIMIZERS["AdamW"], "scheme": tcs.Scheme.named("TCS", error_unit="gradient")},
      "local_optimizer: got one with TCS")],
)  # fmt: skip
def test_settings_that_contradict_each_other(settings, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        federation(**settings)


def test_a_failed_round_leaves_the_module_where_it_was_with_a_local_optimizer_too():
    made = federation("TCS-L2", 0, None, local_optimizer=OPTIMIZERS["AdamW"])
    made.round()
    theta_D, plain, calls = made.theta_D.clone(), made.trainer.loss, []

    def breaks(model, batch):
        calls.append(1)
        return plain(model, batch if len(calls) < 4 else None)

    made.trainer.loss = breaks
    with pytest.raises(ValueError, match=r"^batch: got NoneType, allowed: a pair"):
        made.round()
    assert torch.equal(nn.utils.parameters_to_vector(made.model.parameters()), theta_D)
    assert all(p.grad is None for p in made.model.parameters())
    made.trainer.loss = plain
    assert made.round().isfinite().all()
