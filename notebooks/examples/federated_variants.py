"""Variants of federated averaging, each in a few lines, to be copied.

    uv run python notebooks/examples/federated_variants.py TCS-L4

Each variant is a function of the clients' batches. It trains a small network for five rounds, with the
scheme that is given, and returns the federation. Without a name of a scheme, it is FedAvg-L4, which
sends everything after four local steps.
"""

import copy
import sys

import torch
from torch import nn

import tcs_core as tcs

RATE, ROUNDS = 0.05, 5


def first_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def fed_prox(batches, scheme="FedAvg-L4", mu=0.5):
    """FedProx keeps a client close to the model that it started from: its loss has an additional term,
    mu / 2 times the squared distance to that model."""
    start = []  # the common parameters at the beginning of a round

    def proximal(model, batch):
        pairs = zip(model.parameters(), start, strict=True)
        away = sum((p - q).square().sum() for p, q in pairs)
        return loss(model, batch) + mu / 2 * away

    federation = tcs.Federation(first_model(), batches, scheme, RATE, loss=proximal)
    for _ in range(ROUNDS):
        # Between two rounds, the module holds the common parameters.
        start[:] = [p.detach().clone() for p in federation.model.parameters()]
        federation.round()
    return federation


class Adapted(nn.Module):
    """A layer that stays as it is, and beside it the product of two thin matrices, which is trained."""

    def __init__(self, layer: nn.Linear, rank: int = 2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def lora(batches, scheme="FedAvg-L4"):
    """LoRA trains adapters only. A federation trains, compresses and sends only the parameters that
    require a gradient."""
    layers = (Adapted(m) if isinstance(m, nn.Linear) else m for m in first_model())
    federation = tcs.Federation(nn.Sequential(*layers), batches, scheme, RATE, loss=loss)
    for _ in range(ROUNDS):
        federation.round()
    return federation


class UnequalFeed(tcs.Feed):
    """Gives each client its next batch, and None to a client that has taken all steps of its round."""

    def __init__(self, batches, steps):
        super().__init__(batches)
        self.steps = steps

    def batch(self, n, round, tau):
        return super().batch(n, round, tau) if tau < self.steps[n] else None


def unequal_steps(batches, scheme="FedAvg-L4"):
    """Clients take different numbers of local steps, for example because each makes one pass over its
    data in a round. The scheme has the largest number.

    For a client that has finished, the loss is zero, so that its model does not change. This works with
    plain SGD without `weight_decay`. An optimizer with momentum would still move the client.
    """
    steps = [1 + n % 4 for n in range(len(batches))]  # of each client, at most 4

    def loss_or_zero(model, batch):
        if batch is None:
            return 0.0 * sum(p.sum() for p in model.parameters())
        return loss(model, batch)

    feed = UnequalFeed(batches, steps)
    federation = tcs.Federation(first_model(), feed, scheme, RATE, loss=loss_or_zero)
    for _ in range(ROUNDS):
        federation.round()
    return federation


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.9, 0.99), eps=1e-3)


def fed_adam(batches, scheme="FedAvg-L4"):
    """FedAdam: the clients take plain SGD steps, and the server one Adam step per round. Its gradient
    is the mean of what the clients changed, with the opposite sign."""
    model = first_model()
    federation = tcs.Federation(model, batches, scheme, RATE, loss=loss, server_optimizer=adam)
    for _ in range(ROUNDS):
        federation.round()
    return federation


def personal_heads(batches, scheme="FedAvg-L4"):
    """Each client has a head of its own. Returns the federation and the heads.

    A federation averages all trained parameters of its module, so the heads are kept outside of it.
    Each batch says which client it belongs to, so that the loss can use the head of this client. A head
    takes its step in a hook, during the backward pass, as soon as its gradient is ready.

    Save the heads yourself, beside the state of the federation. If a round fails, a federation restores
    its own state, but it does not undo the steps of the heads.
    """
    body, last = first_model()[:2], first_model()[2]
    heads = [copy.deepcopy(last) for _ in batches]
    numbered = [[(n, *batch) for batch in own] for n, own in enumerate(batches)]

    def step_of_head(p):
        p.data.sub_(p.grad, alpha=RATE)
        p.grad = None

    for head in heads:
        for p in head.parameters():
            p.register_post_accumulate_grad_hook(step_of_head)

    def with_head(body, batch):
        n, inputs, targets = batch
        return nn.functional.mse_loss(heads[n](body(inputs)), targets)

    federation = tcs.Federation(body, numbered, scheme, RATE, loss=with_head)
    for _ in range(ROUNDS):
        federation.round()
    return federation, heads


def made_up_batches(clients: int = 4, seed: int = 0) -> list:
    """For each client a list of seven batches, each of four inputs and targets."""
    torch.manual_seed(seed)
    return [
        [(torch.randn(4, 20) + 0.1 * n, torch.randn(4, 1)) for _ in range(7)]
        for n in range(clients)
    ]


def main(scheme: str) -> None:
    batches = made_up_batches()
    for variant in (fed_prox, lora, unequal_steps, fed_adam):
        federation = variant(batches, scheme)
        print(f"{variant.__name__}: {federation.compressor.bytes_up:,} bytes in the last round")
    federation, _ = personal_heads(batches, scheme)
    print(f"personal_heads: {federation.compressor.bytes_up:,} bytes in the last round")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["FedAvg-L4"])
