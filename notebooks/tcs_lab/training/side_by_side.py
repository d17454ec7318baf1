"""Clients side by side: the local steps of all clients in one pass, for small nets.

Masks are the same as those of one client after another, and numbers are the same up to rounding. The
pass of a small net takes mostly the time of its calls, which all clients then share. Large nets are
slower in this way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from tcs_core import LocalTrainer
from tcs_lab.training.client_threads import check_plain
from tcs_lab.training.configuration import RunConfig

# Channels x samples x pixels of the first layer's output up to which clients train side by side.
# Measured on one core of a CPU with ten clients, it is 7.2 times as fast at 4 x 4 x 8^2, 4.1 times at
# 8 x 8 x 8^2, 1.7 times at 16 x 16 x 16^2, 1.2 times at 32 x 16 x 16^2, and slower at 16 x 64 x 32^2.
MOST_PIXELS = 131_072
# Channels x samples x characters. It is 2.3 times as fast at 64 x 2 x 32, and 2.0 times at 96 x 2 x 32.
MOST_CHARACTERS = 8192

_MOMENTUM = 0.1  # of batch norms' running statistics: PyTorch's default

# From the model of all clients (D,), or a model of each (N, D), and a batch of each client, passes give
# gradients (N, D), losses (N,), and the means and variances of the batch norms (N, S).
Passes = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor]]


def uses_side_by_side(config: RunConfig) -> bool:
    """Return whether clients train side by side: as configured, or else by the sizes of net, batch and
    images (never by a timing, since records must be repeatable). Without `image_size`, images count as
    32 x 32. Threads take one client at a time."""
    if config.client_threads or config.client_count == 1:
        return False
    if config.side_by_side is not None:
        return config.side_by_side
    channels = config.width * config.batch
    if config.dataset == "text":
        return channels * config.context <= MOST_CHARACTERS
    return channels * (config.image_size or 32) ** 2 <= MOST_PIXELS


class GroupedPasses:
    """The passes of a net for images (B, 3, h, w). The clients' channels lie side by side, (B, N C, h, w),
    and those of a client are a group of every convolution; norms treat each channel apart anyway.

    The net may consist of convolutions, batch norms, linear layers with bias, and layers without
    parameters. Raises ValueError for a linear layer without bias, for a batch norm with another momentum
    than PyTorch's default, and for a loss without `scores` and `each` (see `CrossEntropy`).
    """

    def __init__(self, trainer: LocalTrainer):
        self.trainer, self.clients = trainer, 0
        if any(isinstance(m, nn.Linear) and m.bias is None for m in trainer.model.modules()):
            raise ValueError("model: got a Linear without bias, allowed with SideBySide: with bias")
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
            delattr(module, name)  # every pass puts a tensor of all clients there
        self.convolutions = [m for m in self.net.modules() if isinstance(m, nn.Conv2d)]
        self.seen: list[Tensor] = []  # in a pass, norm by norm: a mean and 1 / deviation
        self.counts: list[int] = []  # in a pass, norm by norm: how many values a channel had
        self.corrections: dict[tuple[int, ...], tuple[Tensor, ...]] = {}  # by these counts
        for module in self.net.modules():
            if isinstance(module, nn.BatchNorm2d):
                if module.momentum != _MOMENTUM:
                    got = f"got the momentum {module.momentum} of a batch norm"
                    raise ValueError(f"model: {got}, allowed with SideBySide: {_MOMENTUM}")
                vars(module)["forward"] = self._norm(module)
            elif isinstance(module, nn.Linear):
                vars(module)["forward"] = self._linear(module)
        if not (hasattr(trainer.loss, "scores") and hasattr(trainer.loss, "each")):
            got = getattr(trainer.loss, "__name__", type(trainer.loss).__name__)
            way = "one with `scores` and `each`, such as tcs_lab.training.training.CrossEntropy"
            raise ValueError(f"loss: got {got}, allowed with SideBySide: {way}")

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
        """Return the parameters, each (N P,): those of all clients, one after another. `theta` is one
        model for all clients, (D,), or one for each, (N, D)."""
        sizes, clients = self.trainer.flat.layer_sizes, range(self.clients)
        rows = 1 if theta.dim() == 1 else self.clients
        pieces = theta.detach().reshape(-1).split(sizes * rows)
        order = [n % rows * len(sizes) + i for i in range(len(sizes)) for n in clients]
        parts = torch.cat([pieces[i] for i in order]).split([s * self.clients for s in sizes])
        return [part.requires_grad_() for part in parts]

    def _norm(self, norm: Any) -> Callable[[Tensor], Tensor]:
        """Make the forward pass of a batch norm, which also notes what `_statistics` needs."""

        def forward(x: Tensor) -> Tensor:
            count = x.numel() // x.shape[1]
            if count < 2:
                raise ValueError(
                    "batch_size, image_size: got 1 value per channel for a batch norm, allowed: 2 or "
                    "more; with a DataLoader, drop_last=True leaves out a last batch of one sample"
                )
            normed, mean, inverse = torch.native_batch_norm(
                x, norm.weight, norm.bias, None, None, True, 0.0, norm.eps
            )
            self.seen.extend([mean.detach(), inverse.detach()])
            self.counts.append(count)
            return normed

        return forward

    def _statistics(self) -> Tensor:
        """Return the means and variances of the batch, norm by norm, (N, S)."""
        seen_NS = torch.cat([s.view(self.clients, -1) for s in self.seen], 1)
        counts = tuple(self.counts)
        if counts not in self.corrections:
            self.corrections[counts] = self._make_corrections(seen_NS.device)
        is_mean_S, eps_S, unbiased_S = self.corrections[counts]
        variances_NS = (seen_NS.pow(-2) - eps_S) * unbiased_S
        return torch.where(is_mean_S, seen_NS, variances_NS)

    def _make_corrections(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return where `seen` has means, and what turns the rest into variances: eps, n / (n - 1)."""
        norms, columns = self.trainer.flat.norms, list[tuple[bool, float, float]]()
        for norm, count in zip(norms, self.counts, strict=True):
            columns += [(True, 0.0, 1.0)] * norm.num_features
            columns += [(False, norm.eps, count / (count - 1))] * norm.num_features
        return tuple(torch.tensor(column, device=device) for column in zip(*columns, strict=True))

    def _linear(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Make the forward pass of a linear layer, (B, N inputs) to (B, N outputs)."""

        def forward(x: Tensor) -> Tensor:
            x_NBI = x.unflatten(1, (self.clients, -1)).transpose(0, 1)
            weight = linear.weight.unflatten(0, (self.clients, -1)).transpose(1, 2)
            bias = linear.bias.view(self.clients, 1, -1)
            return torch.baddbmm(bias, x_NBI, weight).transpose(0, 1).flatten(1)

        return forward


def _stack_parameter(part: Tensor, shape: torch.Size) -> Tensor:
    """Stack a parameter of all clients, (N P,), along its first dimension. Convolutions have channels
    last in memory."""
    if len(shape) != 4:
        return part.view(-1, *shape[1:])
    _, inputs, height, width = shape
    return part.view(-1, height, width, inputs).permute(0, 3, 1, 2)


def make_vmapped_passes(trainer: LocalTrainer) -> Passes:
    """Make the passes of any model without batch norms, by torch.func.vmap."""
    model = copy.deepcopy(trainer.model).train()
    names = [name for name, p in model.named_parameters() if p.requires_grad]

    def loss_of(theta_D: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        parameters = dict(zip(names, trainer.flat.views(theta_D), strict=True))
        called = cast(nn.Module, lambda x: functional_call(model, parameters, (x,)))
        return trainer.loss(called, batch)

    with_gradient = grad_and_value(loss_of)
    one_model = vmap(with_gradient, in_dims=(None, 0))
    models = vmap(with_gradient, in_dims=(0, 0))

    def passes(theta: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        gradients_ND, losses_N = (one_model if theta.dim() == 1 else models)(theta, batch)
        return gradients_ND, losses_N.detach(), theta.new_empty(len(losses_N), 0)

    return passes


class SideBySide(LocalTrainer):
    """Train all clients of a round side by side. Raises ValueError for a model or settings that
    `check_plain` refuses.

    A feed whose class defines `batches_of_all(t, tau)` gives all clients' batches of a static round at
    once, stacked. Memory: three times the differences (N, D) of a round, and five times with several
    local steps.
    """

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        check_plain(self)
        self._passes = GroupedPasses(self) if self.flat.norms else make_vmapped_passes(self)
        self._rows: dict[int, Tensor] = {}

    def begin(self, chosen: list[int], t: int | Tensor, eta: float | Tensor) -> None:
        """Do lines 3 to 6 of Alg. 1 for all of these clients. `local_training` returns the results."""
        rows = slice(None) if chosen == list(range(self.feed.clients)) else chosen
        theta, decay = self.theta_D, self.weight_decay
        sums_ND = theta[:0]
        for tau in range(self.scheme.local_steps):
            gradients_ND, losses_N, seen_NS = self._passes(theta, self._batches(chosen, t, tau))
            gradients_ND = gradients_ND.add_(theta, alpha=decay)
            sums_ND = sums_ND.add_(gradients_ND) if tau else gradients_ND
            self.losses_N[rows] += losses_N
            self.statistics_NS[rows] = self.statistics_NS[rows].lerp(seen_NS, _MOMENTUM)
            if tau + 1 < self.scheme.local_steps:
                theta = self.theta_D - eta * sums_ND  # line 6
        self._rows = dict(zip(chosen, sums_ND, strict=True))

    def local_training(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        return self._rows[n]

    def _batches(self, chosen: list[int], t: int | Tensor, tau: int) -> tuple[Tensor, ...]:
        """Return the batches of all these clients, stacked."""
        if isinstance(t, Tensor) and "batches_of_all" in vars(type(self.feed)):
            return cast(Any, self.feed).batches_of_all(t, tau)
        batches = [self.feed.batch(n, t, tau) for n in chosen]
        sizes = [len(batch[0]) for batch in batches]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"batch: got batches of {sizes} samples in one round, allowed: equally many for all "
                "clients that train side by side; give their DataLoaders drop_last=True and one batch "
                "size, or use LocalTrainer"
            )
        return tuple(torch.stack(parts) for parts in zip(*batches, strict=True))
