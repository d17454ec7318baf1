"""Augmentation on a GPU that is not there: see tests/core/test_fake_cuda.py."""

import pytest
import tcs_lab as lab
import torch
from common import config
from tcs_lab.tasks.images import Batches, Draws
from tcs_lab.training.training import ImageFeed
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode


@pytest.fixture
def feed():
    """Of three clients with 40 images each, as tensors without values on a device that need not be
    there; samples, crops and flips are drawn on the CPU."""
    settings, data = config("TCS-L2"), lab.synthetic_dataset(120, 40).resize(16)
    batches = Batches(data, torch.device("cpu"), settings.crop_padding)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, value in vars(batches).items():
            if isinstance(value, torch.Tensor):
                setattr(batches, name, torch.empty_like(value, device="cuda"))
        yield ImageFeed(batches, torch.arange(120).view(3, 40), settings)


def held_batch(feed, tau=1):
    feed.hold(range(feed.rounds))
    return feed.batch(2, torch.zeros((), dtype=torch.int64, device="cuda"), tau)


def test_a_static_rounds_batch_is_made_on_the_device(feed):
    images, labels = held_batch(feed)
    assert images.shape == (4, 3, 16, 16) and images.is_contiguous(
        memory_format=torch.channels_last
    )
    assert {images.device.type, labels.device.type} == {"cuda"}


def test_an_eager_rounds_batch_is_made_on_the_device_too(feed):
    images, labels = feed.batch(2, 3, 1)
    assert images.shape == (4, 3, 16, 16) and labels.shape == (4,)
    assert {images.device.type, labels.device.type} == {"cuda"}


def test_held_samples_stay_where_they_are(feed):
    held_batch(feed)
    before = list(vars(feed._held).values())
    feed.hold(range(feed.rounds, 2 * feed.rounds))
    after = list(vars(feed._held).values())
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert {tensor.device.type for tensor in after} == {"cuda"}


def test_all_clients_batches_of_a_static_round_are_made_at_once(feed):
    images, labels = held_batch(feed)
    found = feed.batches_of_all(torch.zeros((), dtype=torch.int64, device="cuda"), 1)
    assert [part.shape for part in found] == [(3, *images.shape), (3, *labels.shape)]
    assert {part.device.type for part in found} == {"cuda"}


def looks(draws):
    return Draws(draws.samples + int(draws.crops.max()), draws.crops, draws.flips)


def on_the_cpu(draws):
    return Draws(draws.samples, draws.crops.cpu(), draws.flips)


@pytest.mark.parametrize(
    ("spoiled", "error", "says"),
    [(looks, DataDependentOutputException, "_local_scalar_dense"), (on_the_cpu, RuntimeError, "devices")],
)  # fmt: skip
def test_what_does_not_belong_on_a_gpu_raises(spoiled, error, says, feed, monkeypatch):
    plain = Batches.augment
    monkeypatch.setattr(Batches, "augment", lambda self, draws: plain(self, spoiled(draws)))
    with pytest.raises(error, match=says):
        held_batch(feed)
