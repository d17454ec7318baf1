"""Sections 7 and 8: local training, averaging, momentum, batch norm, the model."""

import copy

import numpy as np
import pytest
import tcs_lab as lab
import torch
from common import sgd_steps
from torch.nn import functional as F
from torch.utils.data import DataLoader

import tcs_core as tcs

TINY = {"model": "resnet8", "width": 2, "batch_size": 4, "clients": 3, "epochs": 2, "warmup_epochs": 0,
        "reference_batch": None, "learning_rate": 0.1, "threads": 1}  # fmt: skip


@pytest.fixture(scope="module")
def data():
    return lab.synthetic_dataset(train=120, test=40).resize(16)


def federation(scheme, data, keep_deltas=False, **changes):
    config = lab.RunConfig(scheme, **(TINY | changes))
    return lab.Training(config, data, keep_deltas=keep_deltas)


def test_the_papers_parameter_count():
    """11,173,962 trainable parameters (Sec. III-A); the small relative has 78,042."""
    assert sum(p.numel() for p in tcs.resnet18().parameters()) == 11_173_962
    assert sum(p.numel() for p in tcs.build_model("resnet8", 16).parameters()) == 78_042
    assert tcs.resnet18(width=4)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_a_resnet_is_residual_blocks_of_two_convolutions():
    model = tcs.resnet18(16).eval()
    values = iter(model.state_dict().values())

    def conv(x, stride=1):
        kernel = next(values)
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[2] // 2)
        weight, bias, mean, variance, _ = (next(values) for _ in range(5))
        return F.batch_norm(x, mean, variance, weight, bias)

    images = torch.randn(2, 3, 32, 32)
    x = conv(images).relu()
    for stage, block in ((s, b) for s in range(4) for b in range(2)):
        stride = 2 if stage and not block else 1
        inside = conv(conv(x, stride).relu())
        x = (inside + (conv(x, stride) if stride == 2 else x)).relu()
    logits = F.linear(x.mean((2, 3)), next(values), next(values))
    torch.testing.assert_close(model(images), logits, rtol=1e-4, atol=1e-5)


def test_the_shortcut_of_a_thin_net_takes_every_second_pixel_and_then_convolves():
    """A 1x1 convolution with a stride, of fewer inputs than a register holds, can write past its
    memory (oneDNN's issue 6035: on CPUs without AVX-512 the process dies, or gradients are wrong)."""
    for width, thin in ((2, True), (8, True), (16, False)):
        block = tcs.build_model("resnet8", width)[4]
        strided = [m for m in block.modules() if isinstance(m, torch.nn.Conv2d) and m.stride[0] > 1]
        assert [m.kernel_size[0] for m in strided] == ([3] if thin else [3, 1])
        *_, conv, norm = block.shortcut
        images = torch.randn(2, width, 9, 8)
        strided = norm(torch.nn.functional.conv2d(images, conv.weight, stride=2))
        torch.testing.assert_close(block.shortcut(images), strided)


def test_a_net_that_does_not_exist():
    with pytest.raises(ValueError, match=r"^model: got 'resnet50', allowed: resnet18, resnet8"):
        tcs.build_model("resnet50", 16)


def test_a_flat_vector_follows_the_memory_order_of_parameters_that_stay_their_own():
    model = tcs.build_model("resnet8", 2)  # channels last
    before = [p.detach().clone() for p in model.parameters()]
    flat = tcs.FlatView(model)
    theta_D = torch.empty(flat.dimension)
    views = flat.views(theta_D)
    flat.read_(views)
    parts = [p.permute(0, 2, 3, 1).flatten() if p.dim() == 4 else p.flatten() for p in before]
    assert torch.equal(theta_D, torch.cat(parts))
    theta_D.add_(1.0)  # changes no parameter, until it is put there
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    flat.put(views)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old + 1) and p.stride() == old.stride()
        assert p.untyped_storage().nbytes() == 4 * p.numel()


def test_gradients_are_added_to_a_flat_vector_and_taken_away():
    model = tcs.build_model("resnet8", 2)
    flat = tcs.FlatView(model)
    gradient_D = torch.ones(flat.dimension)
    views = flat.views(gradient_D)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    expected = [1 + p.grad for p in flat.parameters]
    flat.parameters[3].grad = None  # one that was not used
    expected[3] = torch.ones_like(flat.parameters[3])
    flat.add_gradients_(views)
    assert all(torch.equal(view, e) for view, e in zip(views, expected, strict=True))
    assert all(p.grad is None for p in flat.parameters)


def plain_sgd(federation, rounds, weight_decay, momentum=0.0):
    """The same batches through torch's own SGD and an ordinary copy of the model."""
    draws, batch = federation.feed.draws(0)[0], federation.config.batch
    samples = (
        federation.feed.batches.augment(draws[i : i + batch])
        for i in range(0, rounds * batch, batch)
    )
    eta = federation.config.learning_rate_at(0)
    return sgd_steps(federation.flat.model, samples, eta, tcs.cross_entropy, weight_decay, momentum)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["FedSGD", "Baseline"])
def test_one_client_without_compression_is_plain_sgd(data, name, momentum):
    """Also Alg. 3: global momentum on dense gradients is momentum SGD."""
    scheme = tcs.Scheme.named(name, momentum=momentum)
    one = federation(scheme, data, clients=1, weight_decay=1e-2)
    expected = plain_sgd(one, 5, 1e-2, momentum)
    for _ in range(5):
        one.federation.round()
    for p, reference in zip(one.flat.parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), reference, rtol=1e-4, atol=1e-6)


def test_h_local_steps_of_one_client_are_h_steps_of_sgd(data):
    one = federation("FedAvg-L4", data, clients=1, weight_decay=1e-2)
    expected = plain_sgd(one, 4, 1e-2)
    one.federation.round()
    for p, reference in zip(one.flat.parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), reference, rtol=1e-4, atol=1e-6)


def thetas(scheme, data, epochs=1, **changes):
    made = federation(scheme, data, **changes)
    for epoch in range(epochs):
        made.epoch(epoch)
    return made.theta_D


def test_phi_one_is_dense_fedavg_and_fedavg_at_h_1_is_fedsgd(data):
    full = tcs.Scheme.named("TCS", phi_global=1.0, phi_local=None)
    dense = thetas("FedAvg", data)
    assert torch.equal(thetas(full, data), dense)
    assert torch.equal(thetas("FedSGD", data), dense)


def test_averaging_models_is_averaging_differences(data):
    """Alg. 1, line 8 against Eq. 3: the average of the clients' models after H steps."""
    fed = federation("FedAvg-L4", data, keep_deltas=True)
    start = fed.theta_D.clone()
    fed.federation.round()
    models = start + fed.deltas_ND
    torch.testing.assert_close(fed.theta_D, models.mean(0))


def test_absent_clients_take_no_part(data):
    fed = federation("TCS", data, participation=0.34)
    assert fed.config.participants == 2
    seen = {tuple(fed._participants(0, i)) for i in range(20)}
    assert seen == {(0, 1), (0, 2), (1, 2)}
    fed.epoch(0)
    assert fed.theta_D.isfinite().all()


def test_batch_norm_statistics_never_touch_training(data):
    """Wild running statistics change the evaluation and nothing else."""
    calm, wild = federation("TCS", data), federation("TCS", data)
    wild.statistics_NS.fill_(1e3)
    calm.epoch(0), wild.epoch(0)
    assert torch.equal(calm.theta_D, wild.theta_D)
    assert calm.evaluate() != wild.evaluate()


def test_evaluation_averages_the_clients_statistics(data):
    fed = federation("TCS", data)
    fed.epoch(0)
    with_own = fed.evaluate()
    fed.statistics_NS.copy_(fed.statistics_NS.mean(0).expand_as(fed.statistics_NS).clone())
    assert fed.evaluate() == pytest.approx(with_own, rel=1e-5)


def test_an_evaluation_between_two_rounds_changes_nothing(data):
    plain, watched = federation("TCS", data), federation("TCS", data)
    plain.epoch(0)
    for _ in watched.rounds(0):
        watched.evaluate()
    assert torch.equal(plain.theta_D, watched.theta_D)


def test_the_row_of_an_epoch(data):
    fed = federation("TCS-L2", data, warmup_epochs=1)
    warm, sparse = fed.epoch(0), fed.epoch(1)
    dimension, rounds = len(fed.theta_D), 120 // 3 // 4 // 2
    assert (warm["rounds"], warm["dense_rounds"]) == (rounds, rounds)
    assert warm["bits_up"] == warm["bits_down"] == 32 * dimension * rounds
    assert sparse["dense_rounds"] == 0
    shared, own = tcs.kept(1e-2, dimension), tcs.kept(1e-3, dimension)
    one_message = 32 * (shared + own) + tcs.position_bits(own, dimension, 512)
    assert sparse["bits_up"] == rounds * one_message
    assert sparse["bytes_up"] == len(fed.active) * rounds * (-(-one_message // 8) + 20)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"clients": 121}, "clients: got 121, allowed: at most the 120"),
     ({"batch_size": 41}, "batch_size: got 41"), ({"scheme": "TCS-L11"}, "local_steps: got 11")],
)  # fmt: skip
def test_data_that_cannot_feed_the_federation(data, changes, key):
    scheme = changes.pop("scheme", "TCS")
    with pytest.raises(ValueError, match=key):
        federation(scheme, data, **changes)


def test_a_diverging_client_is_named_with_its_round(data):
    fed = federation("TCS", data)
    fed.flat.parameters[0].data.fill_(float("nan"))
    with pytest.raises(tcs.NotFiniteError, match=r"client 0: .*; epoch 1, round 1 of 10"):
        fed.epoch(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", ["TCS-L2-Q5", "top-K", "TCS-LF"])
def test_gpu_agrees_with_cpu(data, scheme):
    cpu = thetas(scheme, data, device="cpu")
    gpu = thetas(scheme, data, device="cuda").cpu()
    assert float((cpu - gpu).norm() / cpu.norm()) < 1e-2


def linear_federation(model, batches, scheme="TCS"):
    return tcs.Federation(model, [batches] * 2, scheme, 0.1)


def test_two_federations_may_take_turns_on_one_model():
    """What one has made of it is what the other goes on from."""
    model, batch = torch.nn.Linear(6, 3), (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    alone = linear_federation(copy.deepcopy(model), [batch], "FedSGD")
    first, second = (linear_federation(model, [batch], "FedSGD") for _ in range(2))
    for one in (first, second, first):
        one.round(), alone.round()
    torch.testing.assert_close(first.theta_D, alone.theta_D)


def test_a_local_step_that_fails_leaves_the_model_where_it_was():
    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    made = linear_federation(torch.nn.Linear(6, 3), [batch], "TCS-L2")
    made.round()
    before_D, loss, calls = made.theta_D.clone(), made.trainer.loss, []

    def fails_later(model, batch):
        calls.append(1)
        return loss(model, batch) if len(calls) % 2 else loss(model, None)

    made.trainer.loss = fails_later
    with pytest.raises(ValueError, match=r"^batch: got NoneType, allowed: a pair"):
        made.round()
    assert torch.equal(made.theta_D, before_D)
    assert torch.equal(torch.nn.utils.parameters_to_vector(made.model.parameters()), before_D)


def two_clients(model, loss=None, **settings):
    """Clients whose inputs lie around 0 and around 10."""
    generator = torch.Generator().manual_seed(0)
    feed = [
        [(at + torch.randn(16, 6, generator=generator), torch.zeros(16, 1)) for _ in range(3)]
        for at in (0.0, 10.0)
    ]
    mse = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()  # noqa: E731
    return tcs.Federation(model, feed, "FedAvg", loss=loss or mse, **settings)


def test_statistics_of_norms_are_averaged_by_the_clients_weights():
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(6, momentum=1.0)
    made = two_clients(
        torch.nn.Sequential(norm, torch.nn.Linear(6, 1)), schedule=0.0, weights=iter([1, 3])
    )
    made.round()
    rows_NS = made.statistics_NS
    torch.testing.assert_close(norm.running_mean, (0.25 * rows_NS[0] + 0.75 * rows_NS[1])[:6])
    assert 7 < norm.running_mean.mean() < 8


def test_errors_in_units_of_gradients_outlive_a_round_at_rate_0():
    """They are scaled from one rate to the next that is not 0."""
    rates = [0.1, 0.1, 0.0, 0.01]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    feed = [[(torch.randn(8, 6, generator=generator), torch.zeros(8).long())] * 4] * 2
    scheme = tcs.Scheme.named("top-K", phi_local=0.1, error_unit="gradient")
    made = tcs.Federation(torch.nn.Linear(6, 3), feed, scheme, rates.__getitem__)
    for _ in range(2):
        made.round()
    before_ND = made.compressor.errors_ND.clone()
    seen = []
    made.on_delta = lambda n, delta_D: seen.append(made.compressor.errors_ND[n].clone())
    made.round()
    assert torch.equal(torch.stack(seen), before_ND)
    before_ND = made.compressor.errors_ND.clone()
    seen.clear()
    made.round()
    torch.testing.assert_close(torch.stack(seen), 0.1 * before_ND)
    assert before_ND.any()


def test_a_loader_with_a_generator_of_its_own_resumes():
    def made():
        torch.manual_seed(0)
        dataset = torch.utils.data.TensorDataset(torch.arange(32.0).view(32, 1), torch.zeros(32, 1))
        loaders = [
            torch.utils.data.DataLoader(
                dataset, 8, shuffle=True, generator=torch.Generator().manual_seed(n)
            )
            for n in range(2)
        ]
        return tcs.Feed(loaders, seed=1)

    def given(feed, rounds):
        return [feed.batch(n, t, 0)[0].flatten().tolist() for t in rounds for n in range(2)]

    whole, first, second = made(), made(), made()
    expected = given(whole, range(10))
    begun = given(first, range(6))  # in the second pass
    second.load_state_dict(first.state_dict())
    assert begun + given(second, range(6, 10)) == expected
    pass_of_0 = [x for batch in expected[:8:2] for x in batch]
    assert sorted(pass_of_0) == list(range(32)) and pass_of_0 != sorted(pass_of_0)


class Unreliable:
    """Four batches in an order that is drawn for each pass. One fails once: (pass, place)."""

    def __init__(self, fails=None):
        self.fails, self.epoch, self.told = fails, 0, []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.told.append(epoch)

    def __iter__(self):
        for place, number in enumerate(torch.randperm(4).tolist()):
            if self.fails == (self.epoch, place):
                self.fails = None
                raise OSError("the disk is away")
            yield number


@pytest.mark.parametrize("fails", [(0, 0), (0, 3), (1, 0), (1, 2)])
def test_a_feed_goes_on_behind_a_failed_batch_as_if_it_had_not_failed(fails):
    source, found, failed = Unreliable(fails), [], 0
    feed = tcs.Feed([source], seed=5)
    while len(found) < 12:
        try:
            found.append(feed.batch(0, 0, 0))
        except OSError:
            failed += 1
    smooth = tcs.Feed([Unreliable()], seed=5)
    assert failed == 1 and found == [smooth.batch(0, 0, 0) for _ in range(12)]
    assert feed.state_dict() == smooth.state_dict()
    assert source.told == sorted([0, 1, 2, fails[0]])


def test_an_iterator_that_failed_goes_on():
    parts = iter([1, OSError(), 2])

    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            part = next(parts)
            if isinstance(part, OSError):
                raise part
            return part

    feed = tcs.Feed([Source()])
    assert feed.batch(0, 0, 0) == 1
    with pytest.raises(OSError):
        feed.batch(0, 0, 1)
    assert feed.batch(0, 1, 0) == 2


def test_a_numpy_number_as_a_seed_shuffles_as_pythons_does():
    orders = []
    for seed in (3, np.int64(3)):
        feed = tcs.Feed([DataLoader(torch.arange(20), shuffle=True)], seed)
        orders.append([int(feed.batch(0, 0, 0)) for _ in range(20)])
    assert orders[0] == orders[1] != list(range(20))
