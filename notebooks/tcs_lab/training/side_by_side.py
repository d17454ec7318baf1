"""Clients side by side: all clients' local steps in one pass, for small nets.

The same masks and the same numbers to rounding as one client after another. A small net's pass is
mostly calls, of which ten clients then share one; a large one is slower so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from tcs_core import LocalTrainer
from tcs_lab.training.configuration import RunConfig

# Channels x samples x pixels of a first layer's output. Measured on a CPU alone, one core, ten
# clients: 7.2 times as fast at 4 x 4 x 8^2, 4.1 at 8 x 8 x 8^2, 1.7 at 16 x 16 x 16^2, 1.2 at
# 32 x 16 x 16^2; slower at 16 x 64 x 32^2.
MOST = 131_072
# Channels x samples x characters: 2.3 times as fast at 64 x 2 x 32, 2.0 at 96 x 2 x 32.
MOST_OF_TEXT = 8192

# Of all clients' models, the same or each its own, (N, D), and a batch of each:
# gradients (N, D), losses (N,), and the batch norms' means and variances (N, S).
Passes = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor]]


def uses_side_by_side(config: RunConfig) -> bool:
    """As configured; else by the sizes of net, batch and images (never by a timing: records must
    repeat). Not where threads or compiled passes take client by client."""
    if config.client_threads or config.compiled or config.client_count == 1:
        return False
    if config.side_by_side is not None:
        return config.side_by_side
    channels = config.width * config.batch
    if config.dataset == "text":
        return channels * config.context <= MOST_OF_TEXT
    return channels * (config.image_size or 32) ** 2 <= MOST


class GroupedPasses:
    """The passes of a net of images (B, 3, h, w): the clients' channels lie side by side, (B, N C,
    h, w), and each client's are a group of every convolution, so that norms keep them apart."""

    def __init__(self, trainer: LocalTrainer):
        self.trainer, self.clients = trainer, 0
        self.net = copy.deepcopy(trainer.model).train()
        which = {
            id(p): i for i, p in enumerate(p for p in self.net.parameters() if p.requires_grad)
        }
        self.places = [
            (module, name, which[id(p)])
            for module in self.net.modules()
            for name, p in module.named_parameters(recurse=False)
            if p.requires_grad
        ]
        for module, name, _ in self.places:
            delattr(module, name)  # every pass puts a tensor there, of all clients
        self.convolutions = [m for m in self.net.modules() if isinstance(m, nn.Conv2d)]
        self.seen: list[Tensor] = []  # of a pass, norm by norm, a mean and 1 / deviation
        self.counts: list[int] = []  # and how many values a channel had
        self.known: dict[tuple[int, ...], tuple[Tensor, ...]] = {}  # by these counts
        for module in self.net.modules():
            if isinstance(module, nn.BatchNorm2d):
                vars(module)["forward"] = self._norm(module)
            elif isinstance(module, nn.Linear):
                vars(module)["forward"] = self._linear(module)

    def __call__(self, theta: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        images, labels_NB = batch  # (N, B, 3, h, w)
        self.clients = len(images)
        for convolution in self.convolutions:
            convolution.groups = self.clients
        parts = self._parts(theta)
        shapes = [p.shape for p in self.trainer.flat.parameters]
        for module, name, which in self.places:
            vars(module)[name] = _stack_parameter(parts[which], shapes[which])
        inputs = images.transpose(0, 1).flatten(1, 2)  # (B, N 3, h, w)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        self.seen.clear()
        self.counts.clear()
        loss = cast(Any, self.trainer.loss)
        scores = loss.scores(self.net, inputs)
        scores_NBK = scores.unflatten(1, (self.clients, -1)).transpose(0, 1)
        losses_N = loss.each(scores_NBK, labels_NB)
        gradients = torch.autograd.grad(losses_N.sum(), parts, materialize_grads=True)
        gradients_ND = torch.cat([g.view(self.clients, -1) for g in gradients], 1)
        return gradients_ND, losses_N.detach(), self._statistics()

    def _parts(self, theta: Tensor) -> list[Tensor]:
        """Each of the parameters, (N P,): all clients', one after another. `theta` is one model for
        all, (D,), or each one's own, (N, D)."""
        sizes, clients = self.trainer.flat.layer_sizes, range(self.clients)
        rows = 1 if theta.dim() == 1 else self.clients
        pieces = theta.detach().reshape(-1).split(sizes * rows)
        order = [n % rows * len(sizes) + i for i in range(len(sizes)) for n in clients]
        parts = torch.cat([pieces[i] for i in order]).split([s * self.clients for s in sizes])
        return [part.requires_grad_() for part in parts]

    def _norm(self, norm: Any) -> Callable[[Tensor], Tensor]:
        """A batch norm's forward pass that keeps what `_statistics` needs."""

        def forward(x: Tensor) -> Tensor:
            found, mean, inverse = torch.native_batch_norm(
                x, norm.weight, norm.bias, None, None, True, 0.0, norm.eps
            )
            count = x.numel() // x.shape[1]
            if count < 2:
                raise ValueError(
                    "batch_size, image_size: got 1 value a channel, allowed: 2 or more"
                )
            self.seen.extend([mean.detach(), inverse.detach()])
            self.counts.append(count)
            return found

        return forward

    def _statistics(self) -> Tensor:
        """The batch's means and variances, norm by norm, (N, S): those of all norms at once."""
        seen_NS = torch.cat([s.view(self.clients, -1) for s in self.seen], 1)
        counts = tuple(self.counts)
        if counts not in self.known:
            self.known[counts] = self._of_variances(seen_NS.device)
        is_mean_S, eps_S, unbiased_S = self.known[counts]
        variances_NS = (seen_NS.pow(-2) - eps_S) * unbiased_S
        return torch.where(is_mean_S, seen_NS, variances_NS)

    def _of_variances(self, device: torch.device) -> tuple[Tensor, ...]:
        """Where `seen` has means, and what makes variances of the rest: eps, n / (n - 1)."""
        norms, columns = self.trainer.flat.norms, list[tuple[bool, float, float]]()
        for norm, count in zip(norms, self.counts, strict=True):
            columns += [(True, 0.0, 1.0)] * norm.num_features
            columns += [(False, norm.eps, count / (count - 1))] * norm.num_features
        return tuple(torch.tensor(column, device=device) for column in zip(*columns, strict=True))

    def _linear(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        """A linear layer's forward pass, (B, N inputs) to (B, N outputs)."""

        def forward(x: Tensor) -> Tensor:
            x_NBI = x.unflatten(1, (self.clients, -1)).transpose(0, 1)
            weight = linear.weight.unflatten(0, (self.clients, -1)).transpose(1, 2)
            bias = linear.bias.view(self.clients, 1, -1)
            return torch.baddbmm(bias, x_NBI, weight).transpose(0, 1).flatten(1)

        return forward


def _stack_parameter(part: Tensor, shape: torch.Size) -> Tensor:
    """A parameter of all clients, (N P,), along its first dimension; convolutions channels last."""
    if len(shape) != 4:
        return part.view(-1, *shape[1:])
    _, inputs, height, width = shape
    return part.view(-1, height, width, inputs).permute(0, 3, 1, 2)


def make_vmapped_passes(trainer: LocalTrainer) -> Passes:
    """The passes of any model without batch norms (torch.func.vmap)."""
    model = copy.deepcopy(trainer.model).train()
    names = [name for name, p in model.named_parameters() if p.requires_grad]

    def loss_of(theta_D: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        parameters = dict(zip(names, trainer.flat.views(theta_D), strict=True))
        called = cast(nn.Module, lambda x: functional_call(model, parameters, (x,)))
        return trainer.loss(called, batch)

    losses = grad_and_value(loss_of)
    ways = vmap(losses, in_dims=(None, 0)), vmap(losses, in_dims=(0, 0))

    def passes(theta: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        gradients_ND, losses_N = ways[theta.dim() - 1](theta, batch)
        return gradients_ND, losses_N.detach(), theta.new_empty(len(losses_N), 0)

    return passes


class SideBySide(LocalTrainer):
    """Trains all clients of a round side by side. No optimizers of the clients' own.

    A feed whose class defines `batches_of_all(t, tau)` gives all clients' batches of a static round at
    once, stacked. Memory: three times the differences (N, D) of a round, five times with local steps.
    """

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        if self.local_optimizer is not None:
            raise ValueError("local_optimizer: got one, allowed with clients side by side: none")
        self._passes = GroupedPasses(self) if self.flat.norms else make_vmapped_passes(self)
        self._rows: dict[int, Tensor] = {}

    def begin(self, chosen: list[int], t: int | Tensor, eta: float | Tensor) -> None:
        """All of them train."""
        sums_ND = self._train(chosen, t, eta)
        self._rows = dict(zip(chosen, sums_ND, strict=True))

    def local_training(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        return self._rows[n]

    def _batches(self, chosen: list[int], t: int | Tensor, tau: int) -> tuple[Tensor, ...]:
        """Those of all these clients, stacked."""
        if isinstance(t, Tensor) and "batches_of_all" in vars(type(self.feed)):
            return cast(Any, self.feed).batches_of_all(t, tau)
        batches = [self.feed.batch(n, t, tau) for n in chosen]
        return tuple(torch.stack(parts) for parts in zip(*batches, strict=True))

    def _train(self, chosen: list[int], t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Alg. 1, l. 3 to 6, of all these clients: their summed gradients, (N, D)."""
        rows = slice(None) if chosen == list(range(self.feed.clients)) else chosen
        theta, decay = self.theta_D, self.weight_decay
        sums_ND = theta[:0]
        for tau in range(self.scheme.local_steps):
            gradients_ND, losses_N, seen_NS = self._passes(theta, self._batches(chosen, t, tau))
            gradients_ND = gradients_ND.add_(theta, alpha=decay)
            sums_ND = sums_ND.add_(gradients_ND) if tau else gradients_ND
            self.losses_N[rows] += losses_N
            self.statistics_NS[rows] = self.statistics_NS[rows].lerp(seen_NS, 0.1)
            if tau + 1 < self.scheme.local_steps:
                theta = self.theta_D - eta * sums_ND  # line 6
        return sums_ND
