"""Whatever has `set_epoch` is told the number of a pass before the pass begins."""

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
)  # fmt: skip

import tcs_core as tcs

NUMBERS = TensorDataset(torch.arange(12.0)[:, None])


def of_rank(rank, **more):
    sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=rank, shuffle=True, seed=3)
    return DataLoader(NUMBERS, 2, sampler=sampler, **more)


class Wrapping(Sampler):
    """A sampler around another, as libraries have them."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return reversed(list(self.sampler))

    def __len__(self):
        return len(self.sampler)


def wrapped(rank):
    inner = DistributedSampler(NUMBERS, num_replicas=2, rank=rank, shuffle=True)
    return DataLoader(NUMBERS, 2, sampler=Wrapping(inner))


def in_batches(rank):
    inner = DistributedSampler(NUMBERS, num_replicas=2, rank=rank, shuffle=True)
    return DataLoader(NUMBERS, batch_sampler=BatchSampler(Wrapping(inner), 2, drop_last=True))


class Stream(IterableDataset):
    epoch = 0

    def __init__(self, rank):
        self.rank = rank

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch))
        return iter((2 * order + self.rank).float()[:, None])


def streamed(rank):
    return DataLoader(Stream(rank), 2)


def without_a_loader(rank):
    return Stream(rank)


class Augmented(Dataset):
    """A data set that changes its samples from pass to pass."""

    epoch = 0

    def __len__(self):
        return 6

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor([float(index + 100 * self.epoch)])


def in_parts(rank):
    return DataLoader(ConcatDataset([Augmented(), Subset(Augmented(), range(rank, 6, 2))]), 3)


def stacked(rank):
    return DataLoader(StackDataset(x=Augmented(), y=Augmented()), 2)


def in_workers(rank):
    return DataLoader(Augmented(), 2, num_workers=1)


def told(source, epoch):
    """What a training loop does that tells everybody by hand."""
    tell(source, epoch)
    return list(source)


def tell(part, epoch):
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)
    inner = [getattr(part, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    datasets = getattr(part, "datasets", [])
    inner += datasets.values() if isinstance(datasets, dict) else datasets
    for other in inner:
        if other is not None:
            tell(other, epoch)


def same(batch, other):
    if isinstance(batch, dict):
        return all(torch.equal(batch[key], other[key]) for key in batch)
    batch, other = (x[0] if isinstance(x, list) else x for x in (batch, other))
    return torch.equal(batch, other)


SOURCES = [of_rank, wrapped, in_batches, streamed, without_a_loader, in_parts, stacked, in_workers]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_passes_are_those_of_a_loop_that_tells_them(source):
    passes = [told(source(1), epoch) for epoch in range(3)]
    feed = tcs.Feed([source(0), source(1)])
    for t, batch in enumerate(batch for batches in passes for batch in batches):
        feed.batch(0, t, 0)
        assert same(feed.batch(1, t, 0), batch)
    assert not all(map(same, passes[0], passes[1]))


@pytest.mark.parametrize("source", [of_rank, in_batches, streamed, in_parts])
@pytest.mark.parametrize("stop", [3, 4, 7])
def test_a_feed_that_is_resumed_tells_the_pass_in_which_it_was_saved(source, stop):
    first, second = (tcs.Feed([source(0), source(1)], seed=2) for _ in range(2))
    for t in range(stop):
        first.batch(1, t, 0)
    second.load_state_dict(first.state_dict())
    for t in range(stop, 12):
        assert same(first.batch(1, t, 0), second.batch(1, t, 0))


def test_a_federation_trains_on_other_orders_in_every_pass():
    seen = []

    def loss(model, batch):
        seen.append(batch[0].flatten().tolist())
        return model(batch[0]).square().mean()

    federation = tcs.Federation(nn.Linear(1, 1), [of_rank(0), of_rank(1)], "TCS", 0.001, loss=loss)
    for _ in range(6):
        federation.round()
    client = seen[1::2]
    first, second = ([x for batch in client[i : i + 3] for x in batch] for i in (0, 3))
    assert first != second
    assert sorted(first) != sorted(second)  # with another seed each rank has other samples


# Workers that persist ─────────────────────────────────────────────────────────────────────────────


class Shared(Augmented):
    """Its epoch lies in memory that its workers share."""

    def __init__(self):
        self.shared = torch.zeros(1, dtype=torch.int64).share_memory_()

    epoch = property(lambda self: int(self.shared))

    def set_epoch(self, epoch):
        self.shared.fill_(epoch)


def test_a_sampler_of_workers_that_persist_is_told():
    with_workers = of_rank(1, num_workers=1, persistent_workers=True)
    feed = tcs.Feed([with_workers])
    for epoch in range(3):
        for batch in told(of_rank(1), epoch):
            assert same(feed.batch(0, 0, 0), batch)


def test_a_data_set_in_shared_memory_is_told():
    feed = tcs.Feed([DataLoader(Shared(), 2, num_workers=1, persistent_workers=True)])
    for epoch in range(3):
        for batch in told(DataLoader(Augmented(), 2), epoch):
            assert same(feed.batch(0, 0, 0), batch)


@pytest.mark.parametrize("data", [Augmented(), Subset(Augmented(), [0, 1]), Stream(0)])
def test_a_data_set_that_workers_have_copied_is_refused(data):
    loaders = [DataLoader(NUMBERS, 2), DataLoader(data, 2, num_workers=1, persistent_workers=True)]
    with pytest.raises(ValueError, match=r"^feed: client 1: got persistent workers .*allowed: "):
        tcs.Feed(loaders)


class Numbered(Dataset):
    """Its samples say in which pass they were read."""

    epoch = 0

    def __len__(self):
        return 20

    def __getitem__(self, place):
        return torch.tensor([place, self.epoch])

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_clients_that_share_a_data_set_have_passes_of_their_own():
    """A client with fewer samples begins its next pass in the middle of another's."""

    def made():
        data = Numbered()
        parts = Subset(data, range(6)), Subset(data, range(10, 14))
        return tcs.Feed([DataLoader(part, 2) for part in parts])

    feed, resumed, passes = made(), made(), [[], []]
    for step in range(6):
        for n in range(2):
            batch = feed.batch(n, step, 0)
            passes[n] += batch[:, 1].unique().tolist()
            if step > 3:
                assert torch.equal(resumed.batch(n, step, 0), batch)
        if step == 3:
            resumed.load_state_dict(feed.state_dict())
    assert passes == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]]
