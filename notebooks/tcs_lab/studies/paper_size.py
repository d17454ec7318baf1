"""Messages at the paper's size: ResNet-18's layers, values drawn instead of trained."""

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


class PaperSize:
    """What a round sends at 11.2 million parameters, without training them.

    Values are normal, times a log-normal factor for every entry (heavy tails) and one for every
    layer: a new vector, and a correlated old one for the shared mask. A message's size in the
    paper's code depends on the number of its values only; in the "+" code on their distribution too.
    """

    def __init__(self, clients: int):
        self.clients = clients
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
        """What all sides know in a round whose masks are so many times as large."""
        known = Known(scheme, self.layer_sizes)
        known.begin(mask_factor=times)
        if not first:
            known.observe(self.old_D)
            known.begin(mask_factor=times)
        return known

    def message(
        self, name: str, way: str = "up", first: bool = False, times: int = 1
    ) -> tuple[Message, Tensor | None]:
        """A message and the shared mask's positions, None if it is dense. `first`: nothing was
        received before it."""
        scheme = Scheme.named(name)
        known = self._known(scheme, first, times)
        if known.dense:
            return Message.dense_of(self.new_D), None
        if way == "up":
            own_K = Client(known).own_positions(self.new_D)
            bits, quantizer = scheme.value_bits, scheme.quantizer
        else:
            own_K = self._server_positions(known)
            bits, quantizer = scheme.down_value_bits, scheme.down_quantizer
        values = self.new_D[torch.cat([known.shared_K, own_K])]
        return Message.of(values, own_K, bits, quantizer=quantizer), known.shared_K

    def _server_positions(self, known: Known) -> Tensor:
        """A mask of its own, or that of all clients: no two of them have a place in common."""
        if known.scheme.phi_down is not None:
            return Downlink(known).own_positions(self.new_D)
        shared = len(known.shared_K)
        own = known.rule.k_local if known.own_count is None else known.own_count
        k = min(self.clients * own, self.dimension - shared)
        return known.rule.own_mask(self.new_D, known.shared_D, k)

    def bits(
        self, name: str, made: tuple[Message, Tensor | None] | None = None, way: str = "up"
    ) -> float:
        """Bits per parameter of one round's message, as sent and decoded again."""
        message, known_K = made or self.message(name, way)
        wire = getattr(Wire, way)(Scheme.named(name), self.layer_sizes)
        data = encode_message(message, wire)
        got = decode_message(data, wire, known_K)
        assert torch.equal(got.values, message.values)
        assert torch.equal(got.positions, message.positions)
        return 8 * len(data) / self.dimension

    def _warmup_bits(self, name: str, way: str) -> tuple[float, float]:
        """Bits per parameter of a warm-up's round, and how many more its first one takes."""
        scheme = Scheme.named(name)
        if scheme.dense_warmup:
            return 32 + 8 * OVERHEAD_BYTES / self.dimension, 0.0
        made = [self.message(name, way, first, scheme.warmup_masks) for first in (False, True)]
        early, first = (self.bits(name, one, way) for one in made)
        return early, first - early

    def whole_run(self, name: str, epochs: int, warmup: int, steps: int) -> dict[str, float]:
        """Bits per parameter and local iteration of a whole training, "up" and "down".

        `steps` local steps make an epoch. Where the server sends all that came up, it is counted
        as if no two clients ever chose the same place: it is at most that much.
        """
        local = Scheme.named(name).local_steps
        rounds, warm = (steps // local * count for count in (epochs, warmup))
        total = {}
        for way in ("up", "down"):
            early, once = self._warmup_bits(name, way)
            bits = warm * early + (rounds - warm) * self.bits(name, way=way) + once
            total[way] = bits / (rounds * local)
        return total
