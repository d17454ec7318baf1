"""A low-rank method per client: it sends the matrix of a layer as a product of two thin matrices.

The power iteration is PowerSGD's (Vogels et al., 2019, arXiv:1905.13727), with its warm start and
error feedback. It is not PowerSGD: that one averages the first factor over all clients before it
makes the second, in two all-reduces. Here each client sends factors of its own, so that the server
can add up messages as they come. The server's reply has all entries in 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcs_lab.schemes.tensors import register_tensors


class LowRank:
    """Send a tensor with two or more dimensions as P (n, r) and Q (m, r), and other tensors unchanged."""

    error_feedback = True
    densities = (2, 1, 4)  # ranks

    def __init__(self, rank: int):
        self.rank = rank
        # The last Q of each parameter, from which the next one starts.
        self.factors: dict[str, Tensor] = {}

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], None]:
        matrix = tensor.reshape(len(tensor), -1)
        rank = min(self.rank, *matrix.shape)
        if tensor.dim() < 2 or rank * sum(matrix.shape) >= tensor.numel():
            return [tensor], None
        start = self.factors.get(name)
        if start is None or not start.any():
            start = torch.randn(matrix.shape[1], rank, dtype=matrix.dtype)
        left, _ = torch.linalg.qr(matrix @ start)
        right = matrix.T @ left
        self.factors[name] = right
        return [left, right], None

    def decompress(self, tensors: list[Tensor], context) -> Tensor:
        if len(tensors) == 1:
            return tensors[0]
        left, right = tensors
        return (left @ right.T).reshape(context.shape)


register_tensors(LowRank, "LowRank")
