"""A client a stream: on a GPU clients train at the same time, in static rounds.

A small batch leaves most of a large GPU idle. In a CUDA graph the clients' passes become branches,
which share it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcs_core import LocalTrainer
from tcs_lab.training.client_threads import copy_trainer
from tcs_lab.training.configuration import RunConfig

MOST_CLIENTS = 16  # each has a model and gradients of its own
STREAMS = 5  # so many train at a time; meanwhile those before them are compressed


def uses_client_streams(config: RunConfig) -> bool:
    """On a GPU, in rounds that are static, where they do not train side by side; few clients, since
    each has a model of its own."""
    return config.torch_device.type == "cuda" and 1 < config.client_count <= MOST_CLIENTS


class ClientStreams(LocalTrainer):
    """Trains all clients of a round at the same time, on streams of a GPU. Differences are compressed
    in the clients' order, on the stream that plays the round. No optimizers of the clients' own.

    Memory: a model and gradients (D,) of every client, activations of those that train.
    """

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        if self.local_optimizer is not None:
            raise ValueError("local_optimizer: got one, allowed with a client a stream: none")
        self.seats = {n: copy_trainer(self) for n in range(self.feed.clients)}
        self.streams = [torch.cuda.Stream(self.theta_D.device) for _ in range(STREAMS)]
        self.trained: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def begin(self, chosen: list[int], t: int | Tensor, eta: float | Tensor) -> None:
        """All of them train; meanwhile `local_training` is asked for the first."""
        now = torch.cuda.current_stream(self.theta_D.device)
        for stream in self.streams:
            stream.wait_stream(now)
        for n in chosen:
            stream = self.streams[n % STREAMS]
            with torch.cuda.stream(stream):
                self.seats[n].put_theta()
                gradient_D = self.seats[n].local_training(n, t, eta)
                self.trained[n] = gradient_D, stream.record_event()

    def local_training(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Client n's summed gradients, once they are there."""
        gradient_D, done = self.trained.pop(n)
        torch.cuda.current_stream(self.theta_D.device).wait_event(done)
        return gradient_D
