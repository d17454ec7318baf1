"""Compiled passes (torch.compile): for nets whose training takes longer than minutes of compiling.

In bf16 several operations become one, which rounds once. Evaluations are not compiled.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tcs_lab.training.configuration import RunConfig


def _forward(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


def _compiler() -> str:
    """The C++ compiler that torch.compile calls."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    given = os.environ.get("CXX", "")
    try:
        return (shlex.split(given) or [usual])[0]
    except ValueError as error:
        allowed = "the command of a C++ compiler, or nothing"
        raise ValueError(f"$CXX: got {given!r} ({error}), allowed: {allowed}") from error


def uses_compilation(config: RunConfig) -> bool:
    """As configured, on a CPU with a C++ compiler."""
    cpu = config.torch_device.type == "cpu"
    return config.compiled and cpu and shutil.which(_compiler()) is not None


def make_passes(config: RunConfig) -> Callable[..., Tensor]:
    """A model's scores of images; compiled, if that is configured and can be done, with the passes
    back. What was compiled for another training is forgotten: it would change how this one is."""
    if uses_compilation(config):
        torch.compiler.reset()
        return torch.compile(_forward, dynamic=False)
    if config.compiled:
        why = f"there is no C++ compiler {_compiler()} (CXX names another)"
        if config.torch_device.type != "cpu":
            why = "only those on a CPU are"
        print(f"compiled: passes are not compiled, {why}", file=sys.stderr, flush=True)
    return _forward
