"""What is counted about masks while a training goes on. Nothing of it influences the training, and
no checkpoint holds it: records have it epoch by epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import tcs_core
from tcs_core import TCS, Known, is_on_cpu, top_k_above

Row = dict[str, Any]  # of a record: what one epoch did


def in_common(one_K: Tensor, other_K: Tensor) -> Tensor:
    """How many positions two masks of K entries share, both ascending: int64 ()."""
    if is_on_cpu(one_K):  # a stable sort merges what is ascending already
        both_2K = np.concatenate([one_K.numpy(), other_K.numpy()])
        both_2K.sort(kind="stable")
        return torch.tensor(np.count_nonzero(both_2K[1:] == both_2K[:-1]), device="cpu")
    nearest_K = torch.searchsorted(one_K, other_K).clamp_(max=len(one_K) - 1)
    return (one_K[nearest_K] == other_K).sum()


class UpdateWatch:
    """How slowly the important entries of dense updates change: "update_overlap", the share of an
    update's 1 % largest entries (the paper's phi_global) that were among those of the one before,
    and "update_overlap_chance", what masks with as many entries in every layer would share by
    chance. Means over the rounds seen, but for the first."""

    def __init__(self, layer_sizes: list[int], phi: float = 1e-2, device: Any = "cpu"):
        self.sizes_L = torch.tensor(layer_sizes, device=device)
        self.ends_L = self.sizes_L.cumsum(0)
        self.k = tcs_core.kept(phi, sum(layer_sizes))
        self.before_K = torch.arange(-self.k, 0, device=device)  # at first, none that there are
        self.before_L = torch.zeros_like(self.sizes_L)  # how many of these a layer
        self.found: list[Tensor] = []  # (2,), round by round
        self.floor = 0.0  # of the last selection

    def begin(self) -> None:
        """An epoch begins."""
        self.found.clear()

    def see(self, update_D: Tensor) -> None:
        """The next update, (D,)."""
        self.found.append(self.compared(update_D))

    def compared(self, update_D: Tensor) -> Tensor:
        """How many entries an update (D,) shares with the one before, the first with none, and by
        chance: (2,) float64. A GPU is not waited for, and finds all in the same tensors."""
        now_K, self.floor = top_k_above(self.floor, update_D, self.k)
        now_L = torch.searchsorted(now_K, self.ends_L).diff(prepend=self.ends_L.new_zeros(1))
        shared = in_common(self.before_K, now_K)
        chance = (self.before_L * now_L / self.sizes_L).sum()
        self.before_K.copy_(now_K)
        self.before_L.copy_(now_L)
        return torch.stack([shared.double(), chance.double()])

    def row(self) -> Row:
        if len(self.found) < 2:
            return {}
        shares_T2 = torch.stack(self.found[1:]).cpu() / self.k
        shared, chance = shares_T2.mean(0).tolist()
        return {"update_overlap": shared, "update_overlap_chance": chance}


class MaskWatch:
    """How slowly the shared mask of TCS changes: "mask_overlap", which share of it was in it a
    round before, over the rounds seen of an epoch. A mask that does not follow the updates has no
    such number, nor has one whose size has just changed."""

    def __init__(self, known: Known):
        self.known = known
        rule = known.rule
        follows = rule.scheme.shared_from in ("update", "stale")
        self.rule = rule if isinstance(rule, TCS) and follows else None
        self.before_K = self.rule.positions if self.rule else None
        self.found: list[Tensor] = []  # (2,), round by round: entries in common, entries

    def begin(self) -> None:
        """An epoch begins; perhaps the training was resumed."""
        self.before_K = self.rule.positions if self.rule else None
        self.found.clear()

    def see(self, update_D: Tensor) -> None:
        """A round is over."""
        if self.rule is None:
            return
        used, before_K, now_K = self.known.shared_K, self.before_K, self.rule.positions
        if not self.known.dense and self.rule.scheme.shared_from == "update":
            before_K = used  # which is smaller than the last one where a wide warm-up has ended
        self.before_K = now_K
        if now_K is None or before_K is None or now_K is before_K:
            return  # there is no mask yet, or it stays since the update was all zero
        if len(now_K) == len(before_K):
            self.found.append(self.compared(before_K, now_K))

    @staticmethod
    def compared(before_K: Tensor, now_K: Tensor) -> Tensor:
        """(2,) float64: how many entries two masks have in common, and how many they have."""
        shared = in_common(before_K, now_K).double()
        return torch.stack([shared, torch.full_like(shared, len(now_K))])

    def row(self) -> Row:
        if not self.found:
            return {}
        shared, entries = torch.stack(self.found).cpu().sum(0).tolist()
        return {"mask_overlap": shared / entries} if entries else {}
