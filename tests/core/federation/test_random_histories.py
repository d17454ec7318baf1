"""Section 7: rounds, failures, saving and an owner's changes, in whatever order they come."""

import pytest
import torch
from common import same_state
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import nn

import tcs_core as tcs

NETS = {
    "batch norm, dropout": lambda: nn.Sequential(
        nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 3)
    ),
    "channels last": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, (2, 1)), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(8, 3),
    ).to(memory_format=torch.channels_last),
    "layer norm": lambda: nn.Sequential(
        nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3)
    ),
}  # fmt: skip
SCHEMES = ["TCS", "TCS-L2-Q5", "TCS-LF", "TCS-PLF-Q3", "top-K", "rand-K", "FedAvg-L2", "FedAvg-Q4"]
WITH_SGD = ["TCS-Global Momentum", "FedAvg-L2-Global Momentum"]  # a local optimizer has its own
OPTIMIZERS = {
    "SGD": {"schedule": lambda t: 0.1 / (1 + t), "weight_decay": 1e-3},
    "AdamW": {"schedule": 0.01, "local_optimizer": torch.optim.AdamW},
    "its own rate": {"local_optimizer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)},
    "server": {"schedule": 0.1, "server_optimizer": lambda p: torch.optim.Adam(p, 0.01)},
}
FAILURES = {"raised": RuntimeError, "Ctrl-C": KeyboardInterrupt, "NaN": tcs.NotFiniteError}


def scheme_of(name):
    """Of a small net: masks of more than an entry."""
    scheme = tcs.Scheme.named(name)
    shares = {"phi_global": 0.1, "phi_local": 0.05} if scheme.rule != "dense" else {}
    return tcs.Scheme.named(
        name, **{key: share for key, share in shares.items() if getattr(scheme, key)}
    )


def batches(clients):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(clients, 3, 8, 6, generator=generator)
    labels = torch.randint(0, 3, (clients, 3, 8), generator=generator)
    return [list(zip(*of_client, strict=True)) for of_client in zip(inputs, labels, strict=True)]


class Owner:
    """A module and its federation, whose loss fails when told to."""

    def __init__(self, net, scheme, clients, optimizer, **settings):
        torch.manual_seed(1)
        self.model, self.failure, self.passes = NETS[net](), None, 0
        settings |= OPTIMIZERS[optimizer] | {"loss": self.loss, "seed": 3}
        feed = batches(clients)
        self.federation = tcs.Federation(self.model, feed, scheme_of(scheme), **settings)

    def loss(self, model, batch):
        loss = tcs.cross_entropy(model, batch)
        self.passes -= 1
        if self.failure is None or self.passes >= 0:
            return loss
        if self.failure == "NaN":
            return loss * torch.nan
        raise FAILURES[self.failure]

    def parameters(self):
        return list(self.model.parameters())

    def statistics(self):
        return {name: b for name, b in self.model.named_buffers() if b.is_floating_point()}

    def snapshot(self):
        """What a failed round leaves as it is, by value."""
        federation = self.federation
        kept = [*self.parameters(), federation.theta_D, *self.statistics().values()]
        return [one.detach().clone() for one in kept], list(federation.active)

    def theirs(self):
        """What any round leaves as it is."""
        modes = [m.training for m in self.model.modules()]
        return modes, [id(p.grad) for p in self.parameters()], torch.get_rng_state().tolist()

    def check(self):
        """The module has theta, and the active clients' average statistics."""
        federation = self.federation
        for p, view in zip(federation.flat.parameters, federation.trainer.theta_views, strict=True):
            assert torch.equal(p, view)
        weights = federation.compressor.server.weights or [1.0] * federation.clients
        weights_N = torch.tensor([weights[n] for n in federation.active])
        mean_S = weights_N / weights_N.sum() @ federation.statistics_NS[federation.active]
        torch.testing.assert_close(federation.flat.statistics(), mean_S)
        assert federation.theta_D.isfinite().all() and federation.statistics_NS.isfinite().all()


class Lives(RuleBasedStateMachine):
    """Two owners do the same; the second saves now and then, and goes on in new objects."""

    @initialize(
        net=st.sampled_from(list(NETS)), optimizer=st.sampled_from(list(OPTIMIZERS)),
        clients=st.integers(1, 4), weighted=st.booleans(),
        link=st.sampled_from([None, tcs.unchanged]), data=st.data(),
    )  # fmt: skip
    def begin(self, net, optimizer, clients, weighted, link, data):
        scheme = data.draw(st.sampled_from(SCHEMES + WITH_SGD * (optimizer == "SGD")))
        weights = [1.0 + n for n in range(clients)] if weighted else None
        self.new = lambda: Owner(
            net, scheme, clients, optimizer, weights=weights, link=tcs.Link(link)
        )
        self.owners = [self.new(), self.new()]

    def both(self, change):
        return [change(owner) for owner in self.owners]

    def some_clients(self, data):
        everyone = range(self.owners[0].federation.clients)
        return data.draw(st.none() | st.sets(st.sampled_from(everyone), min_size=1).map(sorted))

    @rule(data=st.data())
    def round(self, data):
        chosen = self.some_clients(data)

        def played(owner):
            theirs = owner.theirs()
            update_D = owner.federation.round(chosen)
            assert owner.theirs() == theirs
            owner.check()
            return update_D.clone()

        assert same_state(*self.both(played))

    @rule(failure=st.sampled_from(list(FAILURES)), passes=st.integers(0, 4), data=st.data())
    def failed_round(self, failure, passes, data):
        chosen = self.some_clients(data)

        def failed(owner):
            owner.federation.trainer.read_module()
            theirs, (before, active) = owner.theirs(), owner.snapshot()
            owner.failure, owner.passes = failure, passes
            try:
                owner.federation.round(chosen)
            except FAILURES[failure]:
                after, now_active = owner.snapshot()
                torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
                assert now_active == active
            owner.failure = None
            assert owner.theirs() == theirs
            owner.check()

        self.both(failed)

    @rule()
    def second_goes_on_in_new_objects(self):
        before, after = self.owners[1], self.new()
        for old, new in zip(before.parameters(), after.parameters(), strict=True):
            new.grad = old.grad
        for old, new in zip(before.model.modules(), after.model.modules(), strict=True):
            new.training = old.training
        state = before.federation.state_dict()
        after.federation.load_state_dict(state)
        assert same_state(after.federation.state_dict(), state)
        self.owners[1] = after

    @rule(index=st.integers(0, 3))
    def a_parameter_changes(self, index):
        self.both(lambda owner: owner.parameters()[index].data.mul_(0.9))

    @rule(index=st.integers(0, 3))
    def a_parameter_is_frozen_for_a_while(self, index):
        def refused(owner):
            before, federation = owner.federation.state_dict(), owner.federation
            owner.parameters()[index].requires_grad_(False)
            for call in (federation.round, federation.state_dict):
                with pytest.raises(ValueError, match="got one that is frozen"):
                    call()
            owner.parameters()[index].requires_grad_(True)
            assert same_state(federation.state_dict(), before)

        self.both(refused)

    @rule()
    def statistics_change(self):
        self.both(lambda owner: [b.mul_(1.1) for b in owner.statistics().values()])

    @rule()
    def a_checkpoint_is_loaded(self):
        def load(owner):
            state = owner.federation.averaged_state_dict()
            state = {k: v * 0.95 if v.is_floating_point() else v for k, v in state.items()}
            owner.model.load_state_dict(state)

        self.both(load)

    @rule(mode=st.booleans())
    def its_mode_changes(self, mode):
        self.both(lambda owner: owner.model.train(mode))

    @rule()
    def it_is_evaluated(self):
        def evaluated(owner):
            theirs = owner.theirs()
            with owner.federation.evaluated() as model:
                outputs = model(torch.ones(2, 6)).detach()
            assert owner.theirs() == theirs
            return outputs

        torch.testing.assert_close(*self.both(evaluated))

    def teardown(self):
        if hasattr(self, "owners"):
            assert same_state(*self.both(lambda owner: owner.federation.state_dict()))


TestLives = Lives.TestCase
TestLives.settings = settings(stateful_step_count=12)
