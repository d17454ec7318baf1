"""PyTorch's PowerSGD hook for all ranks in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from tcs_core import NotFiniteError

_LEAST_SAVING = 2  # PowerSGDState's own min_compression_rate


class PowerSGD:
    """Turns the gradients of all ranks, each (D,), into what every rank gets from `powerSGD_hook`.

    The hook's settings are PyTorch's defaults, with error feedback and warm start; the first
    `dense_steps` steps are averaged as they are. A rank's input is its gradient plus its error. The
    hook averages what each rank computes from its input by a linear map (P = M Q, then Q = M^T P),
    and every rank's error is its input minus the same output. So only the average of the inputs
    matters, and one error, the average of the ranks' errors, is enough. Only rounding differs.

    A step after the dense ones:

    1. The average of the gradients, plus the error, is the input.
    2. A matrix M (n, m) is compressed if P and Q have less than half of its entries.
    3. Q (m, r) is that of the last step, or random at first, with orthonormal columns.
    4. P = M Q, with orthonormal columns; Q = M^T P; the output is P Q^T.
    5. The error is the input minus the output; it is zero for what is not compressed.

    `shapes` are those of the parameters, in their order in D.
    """

    def __init__(self, rank: int, shapes: Sequence[torch.Size], dense_steps: int):
        self.rank, self.shapes, self.dense_steps = rank, list(shapes), dense_steps
        self.step = 0
        self.error_D = torch.zeros(sum(math.prod(shape) for shape in self.shapes))
        self.factors: dict[int, Tensor] = {}  # Q (m, r) of the last step, by parameter
        self.random = torch.Generator().manual_seed(0)  # the same on all ranks

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        for number, gradient_D in enumerate(gradients):
            if not gradient_D.isfinite().all():
                raise NotFiniteError(number)
        average_D = torch.stack(gradients).mean(0)
        self.step += 1
        if self.step <= self.dense_steps:
            return average_D
        input_D = average_D + self.error_D  # 1.
        parts = input_D.split([math.prod(shape) for shape in self.shapes])
        output_D = torch.cat([self._approximate(i, part) for i, part in enumerate(parts)])
        self.error_D = input_D - output_D  # 5.
        return output_D

    def _approximate(self, number: int, part: Tensor) -> Tensor:
        """Return the entries of one parameter as the hook returns them."""
        shape = self.shapes[number]
        if count_entries(shape, self.rank) == len(part):  # 2.
            return part
        matrix = part.view(shape[0], -1)
        q = self.factors.get(number)
        if q is None:
            q = torch.randn(matrix.shape[1], min(self.rank, *matrix.shape), generator=self.random)
        q = _orthonormal(q)  # 3.
        p = _orthonormal(matrix @ q)  # 4.
        self.factors[number] = matrix.T @ p
        return (p @ self.factors[number].T).flatten()


def _orthonormal(matrix: Tensor) -> Tensor:
    """Make the columns of a matrix orthonormal in place, by the function that the hook uses."""
    power_sgd._orthogonalize(matrix[None])
    return matrix


def count_entries(shape: torch.Size, rank: int) -> int:
    """Count the numbers that a rank hands to collectives in a step for a parameter of this shape: those
    of P and Q, or all entries if P and Q would not save enough."""
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rows, columns, rank)
    worth_it, everything, factors = power_sgd._should_compress(rows, columns, rank, _LEAST_SAVING)
    return factors if worth_it else everything
