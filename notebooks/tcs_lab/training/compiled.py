"""Compiled passes (torch.compile), for nets whose training takes longer than the minutes of compiling.

In bf16, several operations become one, which rounds only once. Evaluations are not compiled.
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
    """Return the C++ compiler that torch.compile calls."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    given = os.environ.get("CXX", "")
    try:
        return (shlex.split(given) or [usual])[0]
    except ValueError as error:
        allowed = "the command of a C++ compiler, or nothing"
        raise ValueError(f"$CXX: got {given!r} ({error}), allowed: {allowed}") from error


def uses_compilation(config: RunConfig) -> bool:
    """Return whether passes are compiled: if that is configured, on a CPU with a C++ compiler."""
    cpu = config.torch_device.type == "cpu"
    return config.compiled and cpu and shutil.which(_compiler()) is not None


def make_passes(config: RunConfig) -> Callable[..., Tensor]:
    """Return the function that gives a model's scores of a batch.

    It is compiled, with its backward pass, if that is configured and possible. What was compiled for
    another training is forgotten, since it would change how this one is compiled.
    """
    if uses_compilation(config):
        torch.compiler.reset()
        return torch.compile(_forward, dynamic=False)
    if config.compiled:
        why = f"since there is no C++ compiler {_compiler()}; the variable CXX names another"
        if config.torch_device.type != "cpu":
            why = "since only those on a CPU are"
        print(f"compiled: passes are not compiled, {why}", file=sys.stderr, flush=True)
    return _forward
