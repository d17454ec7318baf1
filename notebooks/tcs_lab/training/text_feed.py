"""The batches of clients that learn a text."""

from __future__ import annotations

import torch
from torch import Tensor

from tcs_lab.tasks.images import generator_for
from tcs_lab.tasks.text import Text
from tcs_lab.training.configuration import RunConfig


class TextFeed:
    """Batches of text for the core's federation.

    Each client has whole topics, dealt out at random, so that clients differ in what their text is
    about and in how much of it they have. An epoch has as many local steps as the text has batches. A
    client draws its windows of `context` characters at random. `purposes` are those of the random
    numbers for the partition and for the windows.

    Raises ValueError for more clients than topics, and for a text that does not fill a window.
    """

    def __init__(self, data: Text, config: RunConfig, purposes: tuple[int, int]):
        partition, self._sampling = purposes
        self.clients, self.size = config.client_count, config.batch
        self.steps, self.seed = config.scheme.local_steps, config.seed
        if self.clients > (most := len(data.train)):
            raise ValueError(
                f"clients: got {self.clients}, allowed: at most the {most} topics of the text"
            )
        device = config.torch_device
        order = torch.randperm(most, generator=generator_for(self.seed, partition)).tolist()
        dealt = [order[n :: self.clients] for n in range(self.clients)]
        self.texts = [torch.cat([data.train[i] for i in part]).to(device) for part in dealt]
        self.weights = [len(text) for text in self.texts]  # of the clients in the average
        self.window = torch.arange(config.context + 1, device=device)
        held_out = torch.cat(data.test).to(device)
        if min(self.weights) < len(self.window) or len(held_out) < len(self.window):
            least = min(*self.weights, len(held_out))
            raise ValueError(
                f"context: got {config.context}, allowed: at most {least - 1}, since the shortest text "
                f"of a client, or the test text, has {least} characters"
            )
        self._tests = held_out.unfold(0, len(self.window), config.context)
        per_round = self.clients * self.size * config.context * self.steps
        self.rounds = sum(self.weights) // per_round  # per epoch
        if not self.rounds:
            got = f"got {per_round} characters per round, allowed: at most the {sum(self.weights)}"
            raise ValueError(f"batch_size x context x clients x local steps: {got} of the text")

    def batch(self, n: int, round: int, tau: int) -> tuple[Tensor, Tensor]:
        """Return characters (B, T) int64 and those that follow them (B, T), for client n's local step."""
        generator = generator_for(self.seed, self._sampling, round, tau, n)
        text = self.texts[n]
        starts = torch.randint(
            len(text) - len(self.window) + 1, (self.size, 1), generator=generator
        )
        return self._pairs(text[starts.to(text.device) + self.window])

    def test(self, part: slice) -> tuple[Tensor, Tensor]:
        return self._pairs(self._tests[part])

    def test_count(self, last: bool) -> int:
        """Return how many windows are tested after an epoch: the same number after each."""
        return len(self._tests)

    @staticmethod
    def _pairs(windows: Tensor) -> tuple[Tensor, Tensor]:
        return windows[:, :-1], windows[:, 1:]
