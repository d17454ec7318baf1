"""What would pass in silence and be wrong: mistakes of users, and states that are not whole."""

import copy
import pickle
import warnings

import pytest
import torch
from classifier import Classifier, batches, federation
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import tcs_core as tcs

# Feeds ────────────────────────────────────────────────────────────────────────────────────────────


def loader_with_a_samplers_generator(of_batches=False):
    data = TensorDataset(torch.arange(12.0))
    sampler = SubsetRandomSampler(range(12), generator=torch.Generator())
    if of_batches:
        return DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 4, False))
    return DataLoader(data, 4, sampler=sampler)


@pytest.mark.parametrize("of_batches", [False, True])
def test_a_samplers_own_generator_draws_the_same_order_after_a_resume(of_batches):
    feed = tcs.Feed([loader_with_a_samplers_generator(of_batches)])
    for step in range(4):  # into the second pass
        feed.batch(0, step, 0)
    other = tcs.Feed([loader_with_a_samplers_generator(of_batches)])
    other.load_state_dict(feed.state_dict())
    for step in range(4, 10):
        assert torch.equal(feed.batch(0, step, 0)[0], other.batch(0, step, 0)[0])


def persistent_loader():
    data = TensorDataset(torch.arange(12.0))
    return DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize("step", [2, 4])  # in the first pass, in the second
def test_persistent_workers_draw_the_same_order_after_a_resume(step):
    feed, other = (tcs.Feed([persistent_loader()]) for _ in range(2))
    for t in range(step):
        feed.batch(0, t, 0)
    other.load_state_dict(feed.state_dict())
    for t in range(step, 9):
        assert torch.equal(feed.batch(0, t, 0)[0], other.batch(0, t, 0)[0])


class Uncounted:
    def batch(self, n, round, tau):
        return batches(1)[0]


def test_a_feed_that_does_not_say_of_how_many_clients():
    with pytest.raises(ValueError, match=r"^feed: got a .* without `clients`"):
        tcs.Federation(Classifier(), Uncounted(), "TCS", 0.1)


def test_a_loader_with_persistent_workers_is_one_clients():
    loader = DataLoader(TensorDataset(torch.arange(8.0)), num_workers=1, persistent_workers=True)
    with pytest.raises(ValueError, match=r"^feed: client 1: got another's persistent loader"):
        tcs.Feed([loader, loader])


# Models and losses ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_a_loss_of_another_module(optimizer):
    model = Classifier()
    made = federation(
        copy.deepcopy(model),
        loss=lambda _, batch: tcs.cross_entropy(model, batch),
        local_optimizer=optimizer,
    )
    with pytest.raises(ValueError, match="no trained parameter has a gradient"):
        made.round()


def test_two_parameters_in_one_memory():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"^model: 1\.weight: got the memory of 0\.weight"):
        tcs.Federation(model, [[0]], "TCS", 0.1)


def test_two_parameters_that_overlap_in_memory():
    model = nn.Sequential(nn.Embedding(3, 6), nn.Linear(6, 2))
    model[1].weight.data = model[0].weight.data[1:]
    with pytest.raises(ValueError, match=r"^model: 1\.weight: got the memory of 0\.weight"):
        tcs.Federation(model, [[0]], "TCS", 0.1)
    both = torch.randn(4, 8)  # two halves of one matrix share no entry
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, part in zip(model, both.split(4, dim=1), strict=True):
        layer.weight.data = part
    tcs.Federation(model, [[0]], "TCS", 0.1)


@pytest.mark.parametrize(
    ("given", "got"), [((1, 2), "a tuple"), (0.5, "a float"), (torch.ones(2), r"shape \(2,\)")]
)
def test_a_loss_that_is_no_scalar_tensor(given, got):
    made = federation(Classifier(), loss=lambda model, batch: given)
    with pytest.raises(ValueError, match=rf"^loss: got {got}, allowed: a scalar tensor\b"):
        made.round()


def test_a_parameter_whose_entries_share_memory():
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.ones(1, 3).expand(4, 3))
    with pytest.raises(ValueError, match=r"^model: weight: got one whose entries share memory"):
        tcs.Federation(model, [[0]], "TCS", 0.1)


def test_a_scripted_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is old
        model = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        plain = torch.jit.script(nn.Linear(3, 4))
    with pytest.raises(ValueError, match=r"^model: 1: got a scripted norm with running statistics"):
        tcs.Federation(model, [[0]], "TCS", 0.1)
    assert tcs.Federation(plain, [[0]], "TCS", 0.1).flat.dimension == 16


def squared(model, batch):
    return model(batch).square().mean()


def bounded_embedding():
    """Its forward pass changes it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 3, max_norm=0.5))


def test_a_module_that_changes_its_parameters_in_the_forward_pass():
    model, words = bounded_embedding(), [[torch.tensor([0, 1, 2])]]
    made = tcs.Federation(model, words, "FedAvg", 0.1, loss=squared)
    before_D = made.theta_D.clone()
    with pytest.raises(ValueError, match=r"^model: 0\.weight: changes in the forward pass"):
        made.round()
    assert torch.equal(model[0].weight.flatten(), before_D)  # a failed round leaves theta
    with_own = tcs.Federation(
        bounded_embedding(), words, "FedAvg", 0.1, loss=squared, local_optimizer=torch.optim.SGD
    )
    alone = bounded_embedding()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(3):
        with_own.round()
        optimizer.zero_grad()
        squared(alone, words[0][0]).backward()
        optimizer.step()
    torch.testing.assert_close(with_own.model[0].weight, alone[0].weight)


# Evaluation ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("given", [False, True])
def test_what_is_done_in_an_evaluation_leaves_no_statistics(given):
    made = federation(Classifier(), clients=3)
    made.round()
    before_NS, module = made.statistics_NS.clone(), copy.deepcopy(made.model.state_dict())
    statistics_S = torch.full_like(before_NS[0], 2.0) if given else None
    with made.evaluated(statistics_S) as model:
        assert torch.equal(made.state_dict()["statistics_NS"], before_NS)
        model.train()
        model(10 * batches(3)[0][0])
    assert torch.equal(made.statistics_NS, before_NS)
    assert not given or (statistics_S == 2).all()
    for key, value in made.model.state_dict().items():
        assert "tracked" in key or torch.equal(value, module[key]), key


@pytest.mark.parametrize("what", ["round", "load_state_dict"])
def test_what_can_not_be_done_in_an_evaluation(what):
    made = federation(Classifier())
    made.round()
    state, t = made.state_dict(), made.t
    with made.evaluated(), made.evaluated(), pytest.raises(ValueError, match=rf"^{what}: got call"):
        made.round() if what == "round" else made.load_state_dict(state)
    assert made.t == t
    made.load_state_dict(state)
    made.round()


def test_a_state_that_is_saved_in_an_evaluation_has_the_trainings_statistics():
    made = federation(Classifier())
    made.round()
    with made.evaluated(torch.full_like(made.statistics_NS[0], 7.0)) as model:
        model.train()
        model(10 * batches(3)[0][0])
        state = made.state_dict()
    outside = made.state_dict()
    for key in ("left_S", "statistics_NS"):
        assert torch.equal(state[key], outside[key])


# Optimizers, and copies ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["local_optimizer", "server_optimizer"])
@pytest.mark.parametrize("nothing", [False, True])
def test_an_optimizer_of_nothing_that_is_trained(key, nothing):
    other = nn.Linear(2, 2)

    def make(parameters):
        return None if nothing else torch.optim.SGD(other.parameters(), 0.1)

    got = "a NoneType" if nothing else "an optimizer of other parameters"
    with pytest.raises(ValueError, match=rf"^{key}: gave {got}, allowed: an optimizer of the"):
        federation(Classifier(), **{key: make}).round()


def test_a_pickled_federation_goes_on():
    made = federation(Classifier(), "TCS-L2")
    made.round()
    other = pickle.loads(pickle.dumps(made))
    for _ in range(3):
        assert torch.equal(made.round(), other.round())
    assert torch.equal(made.theta_D, other.theta_D)
    assert torch.equal(torch.cat([p.flatten() for p in other.flat.parameters]), other.theta_D)
    assert torch.equal(made.compressor.errors_ND, other.compressor.errors_ND)
    for key, value in made.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[key]), key


def clipped(parameters):
    """An optimizer with a hook, which its own copies do not have."""
    parameters = list(parameters)
    made = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    made.register_step_pre_hook(
        lambda *_: (
            nn.utils.clip_grad_norm_(parameters, 0.01) and None
        )  # a result would be arguments
    )
    return made


@pytest.mark.parametrize("key", ["local_optimizer", "server_optimizer"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copied_federation_keeps_the_hooks_of_optimizers(key, copied):
    eta = None if key == "local_optimizer" else 0.1
    made = federation(Classifier(), "FedAvg", eta=eta, **{key: clipped})
    made.round()
    other = copied(made)
    for _ in range(2):
        assert torch.equal(made.round(), other.round())
    assert torch.equal(made.theta_D, other.theta_D)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_federation_over_loaders_is_copied_in_the_middle_of_a_pass(copied, shuffle):
    def loader(seed):
        samples = [(x, y) for of in batches(3, seed) for x, y in zip(*of, strict=True)]
        return torch.utils.data.DataLoader(samples, 4, shuffle=shuffle)

    made = tcs.Federation(Classifier(), [loader(0), loader(1)], "TCS", 0.1)
    for _ in range(2):
        made.round()
    other = copied(made)
    for _ in range(6):
        assert torch.equal(made.round(), other.round())


# Schemes and sides ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "key"),
    [("top-K", "phi_global"), ("rand-K", "phi_local"), ("FedAvg", "phi_global"),
     ("Baseline", "phi_local")],
)  # fmt: skip
def test_the_share_of_a_mask_that_is_not_there(name, key):
    with pytest.raises(ValueError, match=rf"^{name}: {key}: got 0.1"):
        tcs.Scheme.named(name, **{key: 0.1})


def test_another_clients_state_changes_nothing():
    one, other = tcs.Compressor("TCS", [40], 2), tcs.Compressor("TCS", [40], 2)
    other.step(torch.ones(2, 40))
    state = other.state_dict()
    state["clients"].reverse()
    with pytest.raises(ValueError, match="client: got 1, allowed: 0"):
        one.load_state_dict(state)
    assert one.known.round == 0 and one.rule.positions is None


def test_after_all_have_sent_a_failure_accuses_nobody(monkeypatch):
    compressor = tcs.Compressor("TCS", [40], 3)

    def observe(update_D):
        raise RuntimeError("mine")

    monkeypatch.setattr(compressor.rule, "observe", observe)
    with pytest.raises(RuntimeError) as error:
        compressor.step(torch.ones(3, 40))
    assert error.value.__notes__ == ["round 0: nobody was heard in it"]


def test_a_rate_of_zero_gives_no_mask():
    """A warm-up that begins at 0: which entries are large is not known after it."""
    made = federation(Classifier(), "TCS", eta=lambda t: 0.1 * min(1, t / 3))
    known = made.compressor.known
    made.round()
    assert known.rule.positions is None
    update_D = made.round()
    assert known.dense
    assert torch.equal(known.rule.positions, tcs.top_k_positions(update_D, known.rule.k_global))
    made.round()
    assert not known.dense
    compressor = tcs.Compressor("TCS", [40], 1)
    compressor.step(torch.randn(1, 40))
    before_K = compressor.rule.positions
    compressor.known.begin()
    compressor.known.observe(torch.zeros(40))
    assert compressor.rule.positions is before_K


def test_a_rule_may_observe_numbers_of_fewer_bits():
    """As a rule of one's own may keep them."""
    rule = tcs.TCS(tcs.Scheme.named("TCS"), [400])
    update_D = torch.randn(400).bfloat16()
    rule.observe(update_D)
    assert torch.equal(rule.positions, tcs.top_k_positions(update_D, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_rule_may_observe_numbers_of_another_type_in_a_sparse_warmup(dtype):
    known = tcs.Known(tcs.Scheme.named("TCS", warmup_masks=10), [400])
    known.begin(dense=True, mask_factor=10)
    update_D = torch.randn(400).to(dtype)
    known.observe(update_D)
    other = tcs.Known(known.scheme, [400])
    other.load_state_dict(known.state_dict())
    for one in (known, other):
        one.begin()
        assert torch.equal(one.shared_K, tcs.top_k_positions(update_D.float(), 4))


@pytest.mark.parametrize("weights", [[1e38, 3e38], [1e-44, 2e-44], [1e39, 1e39]])
def test_weights_that_a_sum_can_not_hold(weights):
    with pytest.raises(ValueError, match=r"^weights: got .*allowed: 2 positive numbers, 1e-18"):
        tcs.Compressor("TCS", [40], 2, weights=weights)


def test_an_update_of_another_length():
    known = tcs.Known("TCS", [40])
    known.begin(dense=True)
    with pytest.raises(ValueError, match=r"^update_D: got shape \(41,\), allowed: \(40,\)$"):
        known.observe(torch.ones(41))
    assert known.round == 0


@pytest.mark.parametrize("mask", [None, [1, 2]])
def test_a_mask_that_is_no_tensor(mask, monkeypatch):
    class Odd(tcs.TCS):
        def own_mask(self, intended_D, shared_D, k):
            return mask

    monkeypatch.setitem(tcs.RULES, "Odd", Odd)
    compressor = tcs.Compressor(tcs.Scheme("Odd", "Odd"), [40], 1)
    compressor.step(torch.ones(1, 40))
    with pytest.raises(
        ValueError, match=rf"^scheme Odd: mask: got a {type(mask).__name__}, allowed: a tensor"
    ):
        compressor.step(torch.ones(1, 40))


P_GIVEN = {
    "codes out of range": (lambda codes, means: (codes + 99, means), "got codes 99 to "),
    "codes below 0": (lambda codes, means: (codes - 1, means), "got codes -1 to "),
    "means below 0": (lambda codes, means: (codes, means - 99), "got means "),
    "means that are NaN": (lambda codes, means: (codes, means * torch.nan), "got means "),
    "nothing": (lambda codes, means: None, "got None, allowed: codes and means"),
}


@pytest.mark.parametrize("what", P_GIVEN)
def test_what_a_quantizer_should_not_give(what, monkeypatch):
    spoil, said = P_GIVEN[what]

    def quantize(values_K, intervals):
        return spoil(*tcs.fractional_quantize(values_K, intervals))

    monkeypatch.setitem(tcs.QUANTIZERS, "odd", quantize)
    scheme = tcs.Scheme("Odd", value_bits=3, quantizer="odd", phi_global=0.5)
    compressor = tcs.Compressor(scheme, [40], 1)
    compressor.step(torch.randn(1, 40))
    with pytest.raises(ValueError, match=rf"^quantizer odd: {said}"):
        compressor.step(torch.randn(1, 40))


def test_codes_that_their_bits_can_not_hold():
    wire = tcs.Wire.up(tcs.Scheme.named("TCS-Q3"), [40])
    codes = torch.tensor([1, 9], dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int64)
    message = tcs.Message(torch.ones(2), none, codes=codes, means=torch.ones(4))
    with pytest.raises(ValueError, match=r"got codes 1 to 9, allowed: 0 to 7$"):
        tcs.encode_message(message, wire)


class Listing(tcs.TCS):
    keeps = ("seen", *tcs.TCS.keeps)

    def __init__(self, *settings):
        super().__init__(*settings)
        self.seen = []

    def observe(self, update_D):
        self.seen.append(float(update_D.sum()))
        super().observe(update_D)


def test_what_a_rule_keeps_is_saved_by_value(monkeypatch):
    monkeypatch.setitem(tcs.RULES, "Listing", Listing)
    compressor = tcs.Compressor(tcs.Scheme("Listing", "Listing"), [40], 2)
    compressor.step(torch.ones(2, 40))
    state = compressor.state_dict()
    compressor.step(torch.ones(2, 40))
    assert len(state["known"]["rule"]["seen"]) == 1 and len(compressor.rule.seen) == 2
