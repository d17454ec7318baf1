"""Messages at the paper's size: the layers of ResNet-18, with random values instead of a training."""

from __future__ import annotations

import torch
from torch import Tensor

from tcs_core import (
    OVERHEAD_BYTES,
    Client,
    Downlink,
    Known,
    Message,
    Scheme,
    Wire,
    decode_message,
    encode_message,
    resnet18,
)

# The paper's federation and schedule (Sec. III).
PAPER_CLIENTS = 10
PAPER_EPOCHS = 300
PAPER_STEPS = 78  # local steps per epoch: 50,000 images, 10 clients, batches of 64


class PaperSize:
    """The messages of a round with 11.2 million parameters, without training them.

    Values are normal, times a log-normal factor for every entry (heavy tails) and another one for every
    layer. There is a new vector, and an old one that is correlated with it, for the shared mask. In the
    paper's code, the size of a message depends only on the number of its values; in the "+" code, also
    on their distribution.
    """

    def __init__(self) -> None:
        with torch.device("meta"):
            self.layer_sizes = [p.numel() for p in resnet18().parameters()]
        self.dimension = sum(self.layer_sizes)
        self.generator = torch.Generator().manual_seed(0)
        layers_L = torch.exp(0.5 * self._normal(len(self.layer_sizes)))
        scale_D = layers_L.repeat_interleave(torch.tensor(self.layer_sizes))
        scale_D *= torch.exp(self._normal(self.dimension))
        self.old_D = self._normal(self.dimension) * scale_D
        self.new_D = 0.5 * self.old_D + self._normal(self.dimension) * scale_D

    def _normal(self, count: int) -> Tensor:
        return torch.randn(count, generator=self.generator)

    def _known(self, scheme: Scheme, first: bool, times: int) -> Known:
        """Return what everybody knows in a round whose masks are `times` as large as usual."""
        known = Known(scheme, self.layer_sizes)
        known.begin(mask_factor=times)
        if not first:
            known.observe(self.old_D)
            known.begin(mask_factor=times)
        return known

    def message(
        self, name: str, direction: str = "up", first: bool = False, times: int = 1
    ) -> tuple[Message, Tensor | None]:
        """Return a message and the positions of the shared mask, or None for them if it is dense.

        `direction` is "up" or "down". `first` means that nothing was received before this message.
        """
        scheme = Scheme.named(name)
        known = self._known(scheme, first, times)
        if known.dense:
            return Message.dense_of(self.new_D), None
        if direction == "up":
            own_K = Client(known).own_positions(self.new_D)
            bits, quantizer = scheme.value_bits, scheme.quantizer
        else:
            own_K = self._server_positions(known)
            bits, quantizer = scheme.down_value_bits, scheme.down_quantizer
        values = self.new_D[torch.cat([known.shared_K, own_K])]
        return Message.of(values, own_K, bits, quantizer=quantizer), known.shared_K

    def _server_positions(self, known: Known) -> Tensor:
        """Return the positions that the server chooses or, without a compressed downlink, as many as all
        clients choose if no two of them choose the same."""
        if known.scheme.phi_down is not None:
            return Downlink(known).own_positions(self.new_D)
        shared = len(known.shared_K)
        own = known.rule.k_local if known.own_count is None else known.own_count
        k = min(PAPER_CLIENTS * own, self.dimension - shared)
        return known.rule.own_mask(self.new_D, known.shared_D, k)

    def bits(
        self, name: str, made: tuple[Message, Tensor | None] | None = None, direction: str = "up"
    ) -> float:
        """Count the bits per parameter of a round's message, which is encoded and decoded for it."""
        message, known_K = made or self.message(name, direction)
        wire = getattr(Wire, direction)(Scheme.named(name), self.layer_sizes)
        data = encode_message(message, wire)
        got = decode_message(data, wire, known_K)
        assert torch.equal(got.values, message.values)
        assert torch.equal(got.positions, message.positions)
        return 8 * len(data) / self.dimension

    def _warmup_bits(self, name: str, direction: str) -> tuple[float, float]:
        """Count the bits per parameter of a round of the warm-up, and how many more its first round takes."""
        scheme = Scheme.named(name)
        if scheme.dense_warmup:
            return 32 + 8 * OVERHEAD_BYTES / self.dimension, 0.0
        made = [
            self.message(name, direction, first, scheme.warmup_masks) for first in (False, True)
        ]
        early, first = (self.bits(name, one, direction) for one in made)
        return early, first - early

    def whole_run(self, name: str, warmup: int) -> dict[str, float]:
        """Count the bits per parameter and local iteration of a whole training, "up" and "down".

        The first `warmup` epochs are the warm-up. Where the server sends all entries that clients sent,
        it is assumed that no two clients choose the same entry. So the result is an upper bound.
        """
        local = Scheme.named(name).local_steps
        rounds, warm = (PAPER_STEPS // local * count for count in (PAPER_EPOCHS, warmup))
        total = {}
        for direction in ("up", "down"):
            early, once = self._warmup_bits(name, direction)
            late = self.bits(name, direction=direction)
            bits = warm * early + (rounds - warm) * late + once
            total[direction] = bits / (rounds * local)
        return total
