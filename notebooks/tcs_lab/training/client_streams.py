"""One stream per client: on a GPU the clients of a static round train at the same time.

A small batch leaves most of a large GPU idle. In a CUDA graph, the clients' passes become branches
that share the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcs_core import LocalTrainer
from tcs_lab.training.client_threads import check_plain, copy_trainer
from tcs_lab.training.configuration import RunConfig

MOST_CLIENTS = 16  # each of them needs a model and gradients
STREAMS = 5  # so many clients train at a time, while those before them are compressed


def uses_client_streams(config: RunConfig) -> bool:
    """Return whether clients train on streams: on a GPU, if they are several and few enough, since each
    needs a model. The caller has checked that rounds are static and clients not side by side."""
    return config.torch_device.type == "cuda" and 1 < config.client_count <= MOST_CLIENTS


class ClientStreams(LocalTrainer):
    """Train all clients of a round at the same time, on streams of a GPU.

    Differences are compressed in the clients' order, on the stream that plays the round. Raises
    ValueError for a model or settings that `check_plain` refuses. Memory: a model and gradients (D,)
    per client, and the activations of those that train at a time.
    """

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        check_plain(self)
        self.trainers = {n: copy_trainer(self) for n in range(self.feed.clients)}
        self.streams = [torch.cuda.Stream(self.theta_D.device) for _ in range(STREAMS)]
        self.trained: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def begin(self, chosen: list[int], t: int | Tensor, eta: float | Tensor) -> None:
        """Start the training of all clients. `local_training` waits for them one by one."""
        now = torch.cuda.current_stream(self.theta_D.device)
        for stream in self.streams:
            stream.wait_stream(now)
        for n in chosen:
            stream = self.streams[n % STREAMS]
            with torch.cuda.stream(stream):
                self.trainers[n].put_theta()
                gradient_D = self.trainers[n].local_training(n, t, eta)
                self.trained[n] = gradient_D, stream.record_event()

    def local_training(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Return client n's summed gradients, once they are computed."""
        gradient_D, done = self.trained.pop(n)
        torch.cuda.current_stream(self.theta_D.device).wait_event(done)
        return gradient_D
