"""Section 7 with what a user brings: any model, any loss, batches from anywhere."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from common import sgd_steps
from torch import nn

import tcs_core as tcs


def mlp(norm=False):
    torch.manual_seed(1)
    norms = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *norms, nn.ReLU(), nn.Linear(16, 3))


def batches(count, seed, size=6):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, size, 8, generator=generator)
    return [(x, x[:, :3] * 2 + 1) for x in inputs]


def mse(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


COUNTS = (2, 5, 3)  # of three clients' batches


def federation(scheme="TCS-Q5", eta=0.05, norm=False, **more):
    feed = [batches(count, seed) for seed, count in enumerate(COUNTS)]
    return tcs.Federation(mlp(norm), feed, scheme, eta, loss=mse, **more)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scheme", ["TCS-Q5", "top-K-L2", "TCS-LF-Momentum", "FedAvg"])
def test_it_learns(norm, scheme):
    """A loss of one's own, on lists of unequal length, falls."""
    made = federation(scheme, eta=0.005 if "Momentum" in scheme else 0.05, norm=norm)
    assert made.scheme == tcs.Scheme.named(scheme)
    sums = []
    for _ in range(2):
        made.losses_N.zero_()
        for _ in range(30):
            update_D = made.round()
            assert (
                update_D.shape
                == made.theta_D.shape
                == (sum(p.numel() for p in mlp(norm).parameters()),)
            )
        sums.append(float(made.losses_N.sum()))
    assert sums[1] < 0.8 * sums[0]
    assert torch.equal(nn.utils.parameters_to_vector(made.model.parameters()), made.theta_D)


def test_every_client_goes_round_its_own_batches():
    seen = []

    def watched(model, batch):
        seen.append(batch[0])
        return mse(model, batch)

    made = tcs.Federation(mlp(), [batches(2, 0), batches(3, 1)], "TCS-L2", 0.01, loss=watched)
    made.round(), made.round([1]), made.round()
    expected = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 0), (0, 0), (0, 1), (1, 1), (1, 2)]
    sources = [batches(2, 0), batches(3, 1)]
    for got, (n, i) in zip(seen, expected, strict=True):
        assert torch.equal(got, sources[n][i][0])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scheme", ["FedSGD", "FedSGD-Momentum", "FedAvg-L2"])
def test_one_client_and_no_compression_is_torchs_sgd(norm, scheme):
    made = tcs.Federation(mlp(norm), [batches(3, 0)], scheme, 0.1, loss=mse, weight_decay=1e-2)
    steps = [batches(3, 0)[i % 3] for i in range(8)]
    expected = sgd_steps(mlp(norm), steps, 0.1, mse, 1e-2, made.scheme.momentum)
    for _ in range(8 // made.scheme.local_steps):
        made.round()
    for p, reference in zip(made.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), reference, rtol=1e-6, atol=1e-6)


def test_batch_norms_statistics_are_each_clients_own():
    made = federation("FedAvg", norm=True)
    made.round()
    assert made.statistics_NS.shape == (3, 2 * 16)
    for n, row_S in enumerate(made.statistics_NS):
        model = mlp(norm=True).train()
        model(batches(COUNTS[n], n)[0][0])
        torch.testing.assert_close(row_S, torch.cat([model[1].running_mean, model[1].running_var]))


def test_weights_are_shares_of_the_average():
    deltas = {}
    feed = [batches(1, 0), batches(1, 1)]
    made = tcs.Federation(mlp(), feed, "FedAvg", 0.1, loss=mse, weights=[3, 1])
    made.on_delta = lambda n, delta_D: deltas.update({n: delta_D.clone()})
    torch.testing.assert_close(made.round(), 0.75 * deltas[0] + 0.25 * deltas[1])
    torch.testing.assert_close(made.round([1]), deltas[1])  # of those who take part


def test_weights_count_where_only_one_client_sends_too():
    """Entries of a client's own mask are averaged over all weights, as with equal ones."""
    scheme = tcs.Scheme.named("top-K", phi_local=0.1)
    compressor = tcs.Compressor(scheme, [10], 2, weights=[3, 1])
    deltas_ND = torch.zeros(2, 10)
    deltas_ND[0, 2], deltas_ND[1, 5] = 8.0, 8.0
    assert compressor.step(deltas_ND)[[2, 5]].tolist() == [6.0, 2.0]


@pytest.mark.parametrize("scheme", ["TCS-Q5", "FedAvg"])
def test_equal_weights_are_none(scheme):
    equal, none = federation(scheme, weights=[2.0] * 3), federation(scheme)
    for _ in range(4):
        assert torch.equal(equal.round(), none.round())


@pytest.mark.parametrize(
    "weights", [[1, 1], [1, 1, 0], [1, -1, 1], [1, 1, 1, 1], [], [1, math.nan, 1], [math.inf, 1, 1]]
)
def test_weights_that_are_none(weights):
    with pytest.raises(ValueError, match=r"weights: got .*, allowed: 3 positive numbers"):
        federation(weights=weights)


def frozen():
    model = mlp()
    for p in model.parameters():
        p.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "text"),
    [(nn.ReLU(), "got no parameter that is trained"), (frozen(), "got no parameter that is trained"),
     (mlp().double(), r"0\.weight: got torch\.float64, allowed: torch\.float32 \(.* autocast"),
     (nn.Linear(8, 3).half(), r"weight: got torch\.float16, allowed: torch\.float32 \(.* autocast"),
     (nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3).bfloat16()), r"1\.weight: got torch\.bfloat16")],
)  # fmt: skip
def test_a_model_with_nothing_to_train_or_of_another_type(model, text):
    with pytest.raises(ValueError, match=rf"^model: {text}"):
        tcs.Federation(model, [batches(1, 0)], "TCS", 0.1, loss=mse)


def test_a_batch_norm_that_counts_its_batches():
    """It would count those of all clients together."""
    model = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3, momentum=None))
    with pytest.raises(ValueError, match=r"^model: 1: momentum of a norm: got None"):
        tcs.Federation(model, [batches(1, 0)], "TCS", 0.1, loss=mse)


@pytest.mark.parametrize(
    "norm, text",
    [(nn.BatchNorm1d(3).half(), r"running statistics of a norm: got torch\.float16, allowed"),
     (nn.LazyBatchNorm1d(affine=False), "got a norm without a shape, allowed: after one batch")],
    ids=["half precision", "no shape yet"],
)  # fmt: skip
def test_a_norm_whose_statistics_cannot_be_averaged(norm, text):
    model = nn.Sequential(nn.Linear(8, 3), norm.requires_grad_(False))
    with pytest.raises(ValueError, match=f"^model: 1: {text}"):
        tcs.Federation(model, [batches(1, 0)], "TCS", 0.1, loss=mse)


def test_a_schedule_gives_a_rate_or_a_phase():
    made = [
        tcs.Federation(mlp(), [batches(3, 0)], "TCS", schedule, loss=mse)
        for schedule in (0.1, lambda t: 0.1, lambda t: tcs.Phase(0.1))
    ]
    for _ in range(3):
        updates = [federation.round() for federation in made]
        assert all(torch.equal(update_D, updates[0]) for update_D in updates)


def test_frozen_parameters_stay():
    model = mlp()
    model[0].weight.requires_grad_(False)
    made = tcs.Federation(model, [batches(2, 0)], "FedAvg", 0.1, loss=mse)
    made.round()
    assert torch.equal(model[0].weight, mlp()[0].weight)
    assert not torch.equal(model[0].bias, mlp()[0].bias)


@pytest.mark.parametrize("nothing", [[], iter([])])
def test_a_client_without_data_is_named(nothing):
    made = tcs.Federation(mlp(), [batches(1, 0), nothing], "TCS", 0.1, loss=mse)
    with pytest.raises(
        ValueError,
        match=r"^feed: client 1 has no batch for step 1: .*ended, or is empty\nclient 1, round 0: ",
    ):
        made.round()


def test_a_loader_that_leaves_out_its_only_batch_names_the_option():
    few = torch.utils.data.TensorDataset(*batches(1, 0)[0])
    loader = torch.utils.data.DataLoader(few, len(few) + 1, drop_last=True)
    with pytest.raises(ValueError, match=r"^feed: client 0 has no batch .*\bdrop_last\b"):
        tcs.Federation(mlp(), [loader], "TCS", 0.1, loss=mse).round()


def test_data_that_can_be_gone_through_once_only_ends_with_a_word():
    made = tcs.Federation(mlp(), [iter(batches(2, 0))], "TCS", 0.1, loss=mse)
    made.round(), made.round()
    with pytest.raises(
        ValueError, match="feed: client 0 has no batch for step 1: its iterable has ended"
    ):
        made.round()


@pytest.mark.parametrize("scheme", ["TCS", "FedAvg-L2", "TCS-Momentum"])
def test_a_loss_that_is_not_a_number_names_the_client(scheme):
    def broken(model, batch):
        return mse(model, batch) * (math.nan if batch[0] is bad else 1.0)

    feed = [batches(2, 0), batches(4, 1)]
    bad = feed[1][3][0]
    made = tcs.Federation(mlp(), feed, scheme, 0.1, loss=broken)
    good = 3 // made.scheme.local_steps
    for _ in range(good):
        made.round()
    before = made.theta_D.clone()
    with pytest.raises(tcs.NotFiniteError, match=r"^client 1: the update is not finite") as raised:
        made.round()
    assert raised.value.client == 1 and made.t == good + 1  # the feed goes on, too
    assert torch.equal(made.theta_D, before)


def with_buffers():
    torch.manual_seed(1)
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16))
    return nn.Sequential(first, nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))


def test_buffers_that_are_not_batch_norms_are_restored_too():
    """Spectral norm goes on from vectors of its own."""
    feed = [batches(3, seed) for seed in range(2)]
    one, two = (tcs.Federation(with_buffers(), feed, "TCS", 0.05, loss=mse) for _ in range(2))
    for _ in range(3):
        one.round()
    saved = {key: copy.deepcopy(value) for key, value in one.state_dict().items()}
    assert {key.rsplit(".", 1)[1] for key in saved["buffers"]} == {
        "_u",
        "_v",
        "num_batches_tracked",
    }
    for _ in range(3):
        one.round()
    two.load_state_dict(saved)
    for _ in range(3):
        two.round()
    assert torch.equal(one.theta_D, two.theta_D)
    theta_D = two.theta_D.clone()
    name = next(key for key in saved["buffers"] if key.endswith("_u"))
    fewer = {key: v for key, v in saved["buffers"].items() if key != name}
    other = saved["buffers"] | {name: torch.zeros(3)}
    for buffers, text in (
        (fewer, f"buffers: {name} is missing$"),
        (other, rf"buffers: {name}: got shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=f"^state: {text}"):
            two.load_state_dict(saved | {"buffers": buffers})
    assert torch.equal(two.theta_D, theta_D)


class Standardized(nn.Conv2d):
    def forward(self, x):
        rows = self.weight.view(self.weight.size(0), -1)  # what channels last would not allow
        weight = (rows - rows.mean(1, keepdim=True)).view_as(self.weight)
        return self._conv_forward(x, weight, self.bias)


def test_a_kernel_that_is_looked_at_as_rows_stays_as_it_was():
    torch.manual_seed(1)
    model = nn.Sequential(Standardized(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batch = torch.randn(2, 3, 6, 6), torch.tensor([0, 3])
    made = tcs.Federation(model, [[batch]], "TCS", 0.1)
    made.round()
    assert model[0].weight.is_contiguous() and torch.equal(made.theta_D[108:], model[0].bias)
    assert torch.equal(made.theta_D[:108], model[0].weight.flatten())


def test_the_trained_model_loads_into_an_ordinary_one():
    made = federation(norm=True)
    made.round()
    other = mlp(norm=True)
    other.load_state_dict(made.model.state_dict())
    x = torch.ones(2, 8)
    assert torch.equal(other.eval()(x), made.model.eval()(x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_vector_has_what_is_trained_in_the_order_of_a_federation(layout):
    def model():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
        net[3].bias.requires_grad_(False)
        return net.to(memory_format=layout)

    net = model()
    theta_D = tcs.parameters_to_vector(net)
    assert len(theta_D) == sum(tcs.layer_sizes(net)) and not theta_D.requires_grad
    pairs = [(torch.randn(2, 3, 4, 4), torch.tensor([0, 1]))]
    made = tcs.Federation(model(), [pairs, pairs], "TCS", 0.1)
    made.round()
    tcs.vector_to_parameters(made.theta_D, net)
    for (name, mine), (_, theirs) in zip(
        net.named_parameters(), made.model.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    assert torch.equal(tcs.parameters_to_vector(net), made.theta_D)
    assert not torch.equal(theta_D, made.theta_D)  # a copy, not a view
    before = [p.clone() for p in net.parameters()]
    for wrong in (theta_D[1:], theta_D.double(), [0.0]):
        with pytest.raises(ValueError, match=r"^vector_D: got "):
            tcs.vector_to_parameters(wrong, net)
    assert all(map(torch.equal, before, net.parameters()))


def test_a_loss_with_other_arguments_is_told_how_it_is_called():
    made = tcs.Federation(mlp(), [batches(2, 0)], "TCS", 0.1, loss=F.cross_entropy)
    with pytest.raises(TypeError) as raised:
        made.round()
    assert (
        "the loss is called as loss(model, batch) with a batch of the feed"
        in raised.value.__notes__
    )


def test_a_state_of_another_number_of_clients_says_so():
    two, three = (
        tcs.Federation(mlp(True), [batches(2, 0)] * n, "TCS", 0.1, loss=mse) for n in (2, 3)
    )
    with pytest.raises(ValueError, match=r"^state: clients: got 2, allowed: 3$"):
        three.load_state_dict(two.state_dict())
