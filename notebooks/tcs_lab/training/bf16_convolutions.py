"""Convolutions in bf16 on processors without AVX-512, where PyTorch's own take several times as long.

Factors are rounded to bf16, products are summed in fp32, and sums are rounded to bf16, in the backward
pass, too. PyTorch does the same on processors with AVX-512, and only the order of sums differs. On an
EPYC with AVX-512 we compared six convolutions, with their gradients, with PyTorch's own: at most four of
10,000 values were rounded differently. PyTorch's own backward pass without AVX-512 rounds more often, and
its gradients are about twice as far from exact ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tcs_lab.training.configuration import RunConfig

# Pixels of an image up to which the gradient of the weights is one matrix product per group. On one core
# with AVX2, ten groups and batches of eight, a backward pass then takes 0.4 times as long as with oneDNN's
# kernel at 2 x 2 pixels, and 0.7 to 0.95 times at 4 x 4. At 8 x 8, it takes longer.
FEW_PIXELS = 16


def uses_bf16_convolutions(config: RunConfig) -> bool:
    """Return whether passes compute with `Bf16Convolutions`: those in bf16, on processors where they
    take less time in this way."""
    slow = torch.backends.cpu.get_cpu_capability() == "AVX2"
    on_cpu = config.torch_device.type == "cpu"
    return config.precision == "bf16" and on_cpu and slow


class Bf16Convolutions(TorchFunctionMode):
    """A context in which `torch.conv2d` rounds to bf16 and computes in fp32. The backward passes of
    what was computed in it may follow outside of it."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.conv2d or kwargs or len(args) < 3:  # nn.Conv2d gives all by position
            return func(*args, **(kwargs or {}))
        x, weight, bias, *geometry = args
        with torch.autocast("cpu", enabled=False):
            # The backward passes of these conversions round the gradients.
            rounded = [None if t is None else t.bfloat16().float() for t in (x, weight, bias)]
            few = x.shape[-2:].numel() <= FEW_PIXELS and _FewPixels.takes(bias, *geometry)
            convolve: Callable[..., Tensor] = _FewPixels.apply if few else F.conv2d
            return convolve(*rounded, *geometry).bfloat16()


class _FewPixels(torch.autograd.Function):
    """A convolution of x (B, G C, H, W) and a weight (G K, C, h, w) in G groups, all fp32."""

    @staticmethod
    def takes(bias: Tensor | None, *geometry: Any) -> bool:
        """Return whether this is a convolution like those of the networks here."""
        return bias is None and len(geometry) == 4 and geometry[2] == (1, 1)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: None, *geometry: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        x_gradient, *_ = torch.ops.aten.convolution_backward(
            gradients[0], x, weight, None, stride, padding, dilation, False, [0, 0], groups,
            [ctx.needs_input_grad[0], False, False],
        )  # fmt: skip
        (height, width), (down, right) = padding, stride
        padded = F.pad(x.movedim(1, 3), (0, 0, width, width, height, height))
        patches = padded.unfold(1, weight.shape[2], down).unfold(2, weight.shape[3], right)
        # The batch's pixels are rows, and values of a patch are columns, channels last as in the weights.
        patches_GRS = (
            patches.unflatten(3, (groups, -1)).movedim((3, 4), (0, 6)).flatten(1, 3).flatten(2)
        )
        gradients_GKR = gradients[0].unflatten(1, (groups, -1)).movedim(0, 2).flatten(2)
        weight_gradient = torch.bmm(gradients_GKR, patches_GRS).flatten(0, 1)
        weight_gradient = weight_gradient.unflatten(1, (*weight.shape[2:], -1)).movedim(3, 1)
        return x_gradient, weight_gradient, None, None, None, None, None
