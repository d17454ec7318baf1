"""Rounds that never wait for a GPU: a whole round, sparse or dense, as one CUDA graph.

No shape of such a round depends on a value, and the host looks at none until the last is made.
`Federation.round` is the reference: the same masks, the same numbers to rounding.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from tcs_core import (
    RULES,
    SERVER,
    TCS,
    Federation,
    Known,
    Link,
    NotFiniteError,
    Scheme,
    Server,
    TopK,
    Traffic,
    block_code_bits,
    bytes_of,
)
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.watching import MaskWatch, UpdateWatch


def suits(scheme: Scheme, link: Link) -> bool:
    """Whether a graph can stand in for this scheme's rounds of all clients, after its warm-up."""
    fair = scheme.phi_min_global is not None or scheme.phi_min_local is not None
    plain = scheme.code == "block" and not scheme.compresses_downlink and not fair
    usual = (scheme.error_unit, scheme.shared_from) == ("difference", "update")
    known = scheme.always_dense or RULES[scheme.rule] in (TCS, TopK)
    return known and plain and usual and type(link) is Link and link.channel is None


def goes_static(config: RunConfig, link: Link) -> bool:
    """As configured, where all clients take part and the scheme suits."""
    everyone = config.participants == config.client_count
    return config.graph and everyone and suits(config.scheme, link)


class DeferredLink(Link):
    """The link of a static round. Nobody looks at a value: how many entries clients sent on their
    own stays a tensor, and so do the flags of what was not finite, until `GraphRounds` reads both
    after the last round."""

    def __init__(self, known: Known):
        super().__init__()
        self.flags: list[tuple[int, Tensor]] = []
        self.explored = torch.zeros((), dtype=torch.int64, device=known.device)

    def to_clients(self, server: Server) -> tuple[Tensor, int]:
        known, update_D = server.known, server.average()
        self.flags, known.flags = known.flags, []
        self.explored = self.explored.new_zeros(()) if known.dense else server.explored_D.sum()
        return update_D, 0


class GraphRounds:
    """Rounds of a federation without host synchronization, up to `most` of them at once.

    In place of a round's number the feed gets a tensor, which counts from the first of the rounds
    it was last told to `hold`: it keeps what they need in tensors that stay where they are.
    What `watch` counts in each round, two numbers, is in `watched_T2`; it sees trial rounds too, so
    that what it says of the first round after a capture means nothing.

    Raises ValueError for a federation with an optimizer, whose state a capture would change.
    """

    def __init__(
        self, federation: Federation, most: int, watch: UpdateWatch | MaskWatch | None = None
    ):
        used = {
            "local_optimizer": federation.trainer.local_optimizer,
            "server_optimizer": federation.server_optimizer,
        }
        for name, optimizer in used.items():
            if optimizer is not None:
                raise ValueError(f"{name}: allowed in static rounds: none")
        device = federation.theta_D.device
        self.federation = weakref.proxy(federation)  # which may hold this
        self.index = torch.zeros((), dtype=torch.int64, device=device)
        self.eta = torch.zeros((), device=device)
        self.explored_T = torch.zeros(most, dtype=torch.int64, device=device)
        shape = (most, federation.clients + 1)  # the last is the server
        self.finite_TN = torch.ones(shape, dtype=torch.bool, device=device)
        self.watch = watch
        self.link = DeferredLink(federation.compressor.known)
        self.watched_T2 = torch.zeros(most, 2, dtype=torch.float64, device=device)
        self.graph: Any = None
        self.places: list[int] = []  # in memory, of what the graph was captured with

    def ready(self, rounds: range) -> bool:
        """Whether these rounds, judged by the first, are of a dense scheme, or sparse ones that have
        a mask to start with."""
        if self.federation.scheme.always_dense:
            return True
        rule, first = self.federation.compressor.rule, self.federation.schedule(rounds.start)
        rule.begin(mask_factor=first.mask_factor)  # masks of a warm-up end with it
        mask = None if first.dense else rule.shared_mask()
        return mask is not None and len(mask) == rule.k_global and first.mask_factor == 1

    def play(self, rounds: range) -> list[Traffic]:
        """Makes these rounds; what each of them sent.

        Raises NotFiniteError, with the round as `error.round`, after the last: what was made is void, and
        the federation refuses all calls until a state is loaded.
        """
        federation, known = self.federation, self.federation.compressor.known
        before = known.round
        trainer, everyone = federation.trainer, list(range(federation.clients))
        trainer.read_module()
        federation.feed.hold(rounds)
        with trainer.lend_module():
            federation.is_whole = False  # until all rounds are made, and good
            for index, t in enumerate(rounds):
                self._play(index, federation.schedule(t).eta)
            weights = federation.compressor.server.weights
            trainer.left_S = trainer.average_statistics(everyone, weights)
        federation.t, federation.active = rounds.stop, everyone
        known.round = before + len(rounds)
        for index, n in (~self.finite_TN[: len(rounds)]).nonzero().tolist()[:1]:
            error = NotFiniteError(n if n < federation.clients else SERVER)
            error.happened_in(rounds[index])
            raise error
        federation.is_whole = True
        return [self._traffic(explored) for explored in self.explored_T[: len(rounds)].tolist()]

    def _traffic(self, explored: int) -> Traffic:
        """Of a round in which so many entries were sent by some clients only."""
        clients, known = self.federation.clients, self.federation.compressor.known
        rule, everyone = known.rule, tuple(range(clients))
        if self.federation.scheme.always_dense:
            bits = 32 * known.dimension
            return Traffic(bits, bits, bytes_of(bits) * clients, bytes_of(bits), everyone)
        shared, own = rule.k_global, rule.k_local
        up = block_code_bits(known.wire_up.value_bits, shared + own, own, known.dimension)
        values = shared + explored
        down = block_code_bits(known.wire_down.value_bits, values, explored, known.dimension)
        return Traffic(up, down, bytes_of(up) * clients, bytes_of(down), everyone)

    def _play(self, index: int, eta: float) -> None:
        self.index.fill_(index)
        self.eta.fill_(eta)
        if self.index.device.type != "cuda":
            self._round()
            return
        with torch.cuda.device(self.index.device):
            if self.graph is None or self.places != self._places():
                self.graph = self._captured()
                self.places = self._places()
            self.graph.replay()

    def _round(self) -> None:
        federation, compressor = self.federation, self.federation.compressor
        rule, usual = compressor.rule, compressor.link
        everyone, now = list(range(federation.clients)), self.index.view(1)
        before_K = getattr(rule, "positions", None)
        compressor.link = self.link
        try:
            update_D = federation.exchange(everyone, self.index, self.eta)
            federation.move(update_D, self.eta)
        finally:
            compressor.link = usual
        watched = None
        if isinstance(self.watch, UpdateWatch):
            watched = self.watch.compared(update_D)
        if before_K is not None:
            if isinstance(self.watch, MaskWatch):
                watched = self.watch.compared(before_K, rule.positions)
            rule.positions = before_K.copy_(rule.positions)  # where the next round looks for it
        if watched is not None:
            self.watched_T2.index_copy_(0, now, watched.view(1, 2))
        finite = {n: torch.ones((), dtype=torch.bool, device=now.device) for n in everyone}
        finite[SERVER] = finite[0]
        for sender, flag in self.link.flags:  # a CPU has none: there, what is not finite raises
            finite[sender] = finite[sender] & flag
        self.finite_TN.index_copy_(0, now, torch.stack([*finite.values()]).view(1, -1))
        self.explored_T.index_copy_(0, now, self.link.explored.view(1))

    def _places(self) -> list[int]:
        """Where there is what the graph reads and writes: an owner, an ordinary round or a
        checkpoint may have put something else in its place."""
        federation = self.federation
        tensors = [federation.theta_D, *federation.flat.parameters, *self._masks()]
        return [tensor.data_ptr() for tensor in tensors]

    def _masks(self) -> list[Tensor]:
        """Tensors that an ordinary round or a checkpoint replaces."""
        rule = self.federation.compressor.rule
        found = [getattr(rule, "positions", None)]
        return [tensor for tensor in found if tensor is not None]

    def _captured(self) -> Any:
        """The round as a CUDA graph. What the trial rounds before it change is put back."""
        federation = self.federation
        state = [federation.theta_D, federation.statistics_NS, federation.losses_N]
        state += [federation.compressor.errors_ND, self.explored_T, self.finite_TN, *self._masks()]
        state += [t for t in (federation.momentum_D,) if t is not None]
        before = [(tensor, tensor.clone()) for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._round()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):  # the default one is of the first device used
            self._round()
        for tensor, value in before:
            tensor.copy_(value)
        federation.trainer.put_theta()
        return graph
