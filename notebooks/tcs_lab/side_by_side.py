"""Clients side by side: all clients' local steps in one pass, for small nets (torch.func.vmap).

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

from tcs_core import Federation
from tcs_lab.settings import RunConfig

# Channels x samples x pixels of a first layer's output. One core, ten clients: 2.4 times as fast at
# 4 x 4 x 8^2, 1.6 at 8 x 8 x 8^2, 1.3 at 8 x 4 x 16^2; slower at 8 x 16 x 16^2. Of a text, channels
# x samples x characters: 2.3 at 64 x 2 x 32, 2.0 at 96 x 2 x 32.
MOST = 8192


def goes_side_by_side(config: RunConfig) -> bool:
    """As configured; else by the sizes of net, batch and images (never by a timing: records must
    repeat), on a CPU. Not where static rounds, threads or compiled passes take client by client."""
    apart = config.graph or config.client_threads or config.compiled or config.client_count == 1
    if apart or config.torch_device.type != "cpu":
        return False
    if config.side_by_side is not None:
        return config.side_by_side
    positions = config.context if config.dataset == "text" else (config.image_size or 32) ** 2
    return config.width * config.batch * positions <= MOST


def _norm(norm: Any, seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A batch norm's forward pass that keeps its batch's mean and variance, for the running ones."""

    def forward(x: Tensor) -> Tensor:
        found, mean, inverse = torch.native_batch_norm(
            x, norm.weight, norm.bias, None, None, True, 0.0, norm.eps
        )
        count = x.numel() // x.shape[1]
        seen.extend([mean, (inverse.pow(-2) - norm.eps) * (count / (count - 1))])
        return found

    return forward


class SideBySide(Federation):
    """A federation whose clients train side by side; the same otherwise.

    Memory: the differences (N, D) of a round and, with local steps, as many models.
    """

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        self.twin = copy.deepcopy(self.model).train()
        self.seen: list[Tensor] = []
        for module in self.twin.modules():
            if isinstance(module, nn.BatchNorm2d):
                vars(module)["forward"] = _norm(module, self.seen)
        self.names = [name for name, p in self.twin.named_parameters() if p.requires_grad]
        losses = grad_and_value(self._loss_of, has_aux=True)
        self.first = vmap(losses, in_dims=(None, 0))  # all clients start from one model
        self.later = vmap(losses, in_dims=(0, 0))
        self._rows: dict[int, Tensor] = {}

    def _loss_of(self, theta_D: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """A client's loss on a batch, and its batch norms' means and variances, (S,)."""
        self.seen.clear()
        parameters = dict(zip(self.names, self.flat.views(theta_D), strict=True))

        def model(x: Tensor) -> Tensor:
            return functional_call(self.twin, parameters, (x,))

        loss = self.loss(cast(nn.Module, model), batch)
        seen_S = torch.cat(self.seen) if self.seen else theta_D.new_empty(0)
        return loss, seen_S.detach()

    def play(
        self, chosen: list[int], t: int | Tensor, eta: float | Tensor, dense: bool = False
    ) -> Tensor:
        mine = [n for n in chosen if n in self.own]
        deltas_ND = self._train(mine, t, eta)
        self._rows = dict(zip(mine, deltas_ND, strict=True))
        return super().play(chosen, t, eta, dense)

    def _local_training(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        return self._rows[n]

    def _train(self, mine: list[int], t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Alg. 1, l. 3 to 6, of all these clients: their summed gradients, (N, D)."""
        rows = [self.own.index(n) for n in mine]
        theta, sums_ND, decay = self.theta_D, None, self.weight_decay
        for tau in range(self.scheme.local_steps):
            batches = [self.feed.batch(n, t, tau) for n in mine]
            batch = tuple(torch.stack(parts) for parts in zip(*batches, strict=True))
            passes = self.first if theta.dim() == 1 else self.later
            gradients_ND, (losses_N, seen_NS) = passes(theta, batch)
            gradients_ND = gradients_ND.add_(theta, alpha=decay)
            sums_ND = gradients_ND if sums_ND is None else sums_ND.add_(gradients_ND)
            self.losses_N[rows] += losses_N.detach()
            self.statistics_NS[rows] = self.statistics_NS[rows].lerp(seen_NS, 0.1)
            if tau + 1 < self.scheme.local_steps:
                theta = self.theta_D - eta * sums_ND  # line 6
        return sums_ND
