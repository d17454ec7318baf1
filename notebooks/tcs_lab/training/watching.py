"""Counters of how masks change during a training. They do not influence it, and checkpoints do not
hold them; records have their results, epoch by epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import tcs_core
from tcs_core import TCS, Known, is_on_cpu, top_k_positions

Row = dict[str, Any]  # the row of a record for one epoch


def count_common(one_K: Tensor, other_K: Tensor) -> Tensor:
    """Count the positions that two masks of K entries share, both in ascending order: int64 ()."""
    if is_on_cpu(one_K):  # a stable sort merges two ascending sequences fast
        both_2K = np.concatenate([one_K.numpy(), other_K.numpy()])
        both_2K.sort(kind="stable")
        return torch.tensor(np.count_nonzero(both_2K[1:] == both_2K[:-1]), device="cpu")
    nearest_K = torch.searchsorted(one_K, other_K).clamp_(max=len(one_K) - 1)
    return (one_K[nearest_K] == other_K).sum()


class UpdateWatch:
    """Measures how slowly the important entries of dense updates change.

    "update_overlap" is the share of an update's 1 % largest entries (the paper's phi_global) that were
    among those of the update before. "update_overlap_chance" is what masks with as many entries in
    every layer would share by chance. Both are means over an epoch's rounds without the first.
    """

    def __init__(self, layer_sizes: list[int], phi: float = 1e-2, device: Any = "cpu"):
        self.sizes_L = torch.tensor(layer_sizes, device=device)
        self.ends_L = self.sizes_L.cumsum(0)
        self.k = tcs_core.kept(phi, sum(layer_sizes))
        # At first, these are positions that do not exist.
        self.before_K = torch.arange(-self.k, 0, device=device)
        self.before_L = torch.zeros_like(self.sizes_L)  # how many of these are in each layer
        self.counts: list[Tensor] = []  # (2,) for each round

    def begin(self) -> None:
        """Begin an epoch."""
        self.counts.clear()

    def observe(self, update_D: Tensor) -> None:
        """Count for the next update, (D,)."""
        self.counts.append(self.compare(update_D))

    def compare(self, update_D: Tensor) -> Tensor:
        """Return how many entries an update (D,) shares with the one before, and how many it would by
        chance: (2,) float64. The first update shares none. A GPU is not waited for, and the results of
        the last call are kept in the same tensors."""
        now_K = top_k_positions(update_D, self.k)
        now_L = torch.searchsorted(now_K, self.ends_L).diff(prepend=self.ends_L.new_zeros(1))
        shared = count_common(self.before_K, now_K)
        chance = (self.before_L * now_L / self.sizes_L).sum()
        self.before_K.copy_(now_K)
        self.before_L.copy_(now_L)
        return torch.stack([shared.double(), chance.double()])

    def row(self) -> Row:
        """Return the epoch's means, for its row of the record."""
        if len(self.counts) < 2:
            return {}
        shares_T2 = torch.stack(self.counts[1:]).cpu() / self.k
        shared, chance = shares_T2.mean(0).tolist()
        return {"update_overlap": shared, "update_overlap_chance": chance}


class MaskWatch:
    """Measures how slowly the shared mask of TCS changes.

    "mask_overlap" is the share of its entries that were in it a round before, over the rounds of an
    epoch. A mask that does not follow the updates has no such number, and a round in which the size of
    the mask changes does not count. For "stale", these are the newest masks, which are used some rounds
    later.
    """

    def __init__(self, known: Known):
        self.known = known
        rule = known.rule
        follows = rule.scheme.shared_from in ("update", "stale")
        self.rule = rule if isinstance(rule, TCS) and follows else None
        self.before_K = self.rule.positions if self.rule else None
        self.counts: list[Tensor] = []  # (2,) for each round: entries in common, entries

    def begin(self) -> None:
        """Begin an epoch. The training may have been resumed before it."""
        self.before_K = self.rule.positions if self.rule else None
        self.counts.clear()

    def observe(self, update_D: Tensor) -> None:
        """Count for the round that has ended."""
        if self.rule is None:
            return
        used, before_K, now_K = self.known.shared_K, self.before_K, self.rule.positions
        if not self.known.dense and self.rule.scheme.shared_from == "update":
            before_K = used  # smaller than the last mask after a warm-up with larger masks
        self.before_K = now_K
        if now_K is None or before_K is None or now_K is before_K:
            return  # there is no mask yet, or the update was all zero and left it as it is
        if len(now_K) == len(before_K):
            self.counts.append(self.compare(before_K, now_K))

    @staticmethod
    def compare(before_K: Tensor, now_K: Tensor) -> Tensor:
        """Return how many entries two masks have in common, and how many they have: (2,) float64."""
        shared = count_common(before_K, now_K).double()
        return torch.stack([shared, torch.full_like(shared, len(now_K))])

    def row(self) -> Row:
        """Return the epoch's share, for its row of the record."""
        if not self.counts:
            return {}
        shared, entries = torch.stack(self.counts).cpu().sum(0).tolist()
        return {"mask_overlap": shared / entries} if entries else {}
