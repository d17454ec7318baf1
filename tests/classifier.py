"""A small net as its owner brings it, and a federation of it."""

import torch
from torch import nn

import tcs_core as tcs


class Classifier(nn.Module):
    """A stem that its owner has frozen, batch norm and all, and a head with dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten())
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(20, 3)

    def forward(self, x):
        return self.head(self.drop(self.body(self.stem(x))))

    def frozen(self):
        self.stem.requires_grad_(False)
        self.stem.eval()
        return self


def batches(count, seed=0, size=6):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, size, 3, 6, 6, generator=generator)
    return [(x, x.mean((2, 3)).argmax(1)) for x in inputs]


def federation(model, scheme="TCS", clients=2, eta=0.1, **more):
    feed = [batches(3, seed) for seed in range(clients)]
    return tcs.Federation(model, feed, scheme, eta, **more)


def modes(model):
    return {name: m.training for name, m in model.named_modules()}


def flat(model):
    return nn.utils.parameters_to_vector(p.detach() for p in model.parameters())
