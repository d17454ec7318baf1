"""Static rounds, which never wait for a GPU: a whole round, sparse or dense, as one CUDA graph.

In such a round no shape depends on a value, and the host looks at no value before the last round has
been played. `Federation.round` is the reference: masks are the same, and numbers up to rounding.
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


def is_suitable(scheme: Scheme, link: Link) -> bool:
    """Return whether static rounds of all clients can replace this scheme's rounds after its warm-up."""
    fair = scheme.phi_min_global is not None or scheme.phi_min_local is not None
    plain = scheme.code == "block" and not scheme.compresses_downlink and not fair
    usual = (scheme.error_unit, scheme.shared_from) == ("difference", "update")
    known = scheme.always_dense or RULES[scheme.rule] in (TCS, TopK)
    return known and plain and usual and type(link) is Link and link.channel is None


def uses_static_rounds(config: RunConfig, link: Link) -> bool:
    """Return whether rounds are static: if that is configured, with all clients and a suitable scheme."""
    everyone = config.participants == config.client_count
    return config.graph and everyone and is_suitable(config.scheme, link)


class DeferredLink(Link):
    """The link of a static round, which looks at no value. How many entries the clients chose themselves
    remains a tensor, and so do the flags of what was not finite. `GraphRounds` reads both after the
    last round."""

    def __init__(self, known: Known):
        super().__init__()
        self.flags: list[tuple[int, Tensor]] = []
        self.explored = torch.zeros((), dtype=torch.int64, device=known.device)

    def to_clients(self, server: Server) -> tuple[Tensor, int]:
        known, update_D = server.known, server.average()
        self.flags, known.flags = known.flags, []
        self.explored = self.explored.new_zeros(()) if known.dense else server.explored_D.sum()
        server.drop()
        return update_D, 0


class GraphRounds:
    """Plays rounds of a federation without waiting for the GPU, up to `most` of them at once.

    In place of a round's number, the feed gets a tensor. It counts from the first of the rounds that
    the feed was last told to `hold`, whose samples are in tensors that keep their memory. `watched_T2`
    has the two numbers that `watch` counts in each round. An `UpdateWatch` also sees the trial rounds
    before a capture, so that its numbers for the first round after one mean nothing. (Its `row` leaves
    that round out.)

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
                got = type(optimizer).__name__
                raise ValueError(f"{name}: got {got}, allowed: none in static rounds (graph: True)")
        device = federation.theta_D.device
        self.federation = weakref.proxy(federation)  # which may hold this object
        self.index = torch.zeros((), dtype=torch.int64, device=device)
        self.eta = torch.zeros((), device=device)
        self.explored_T = torch.zeros(most, dtype=torch.int64, device=device)
        shape = (most, federation.clients + 1)  # the last is the server
        self.finite_TN = torch.ones(shape, dtype=torch.bool, device=device)
        self.watch = watch
        self.link = DeferredLink(federation.compressor.known)
        self.watched_T2 = torch.zeros(most, 2, dtype=torch.float64, device=device)
        self.graph: Any = None
        # the memory addresses of the tensors with which the graph was captured
        self.addresses: list[int] = []

    def is_ready(self, rounds: range) -> bool:
        """Return whether these rounds can be static: rounds of a dense scheme, or sparse ones with a
        mask to start from. The first of them decides."""
        if self.federation.scheme.always_dense:
            return True
        rule, first = self.federation.compressor.rule, self.federation.schedule(rounds.start)
        rule.begin(mask_factor=first.mask_factor)  # the larger masks of a warm-up end with it
        mask = None if first.dense else rule.shared_mask()
        return mask is not None and len(mask) == rule.k_global and first.mask_factor == 1

    def play(self, rounds: range) -> list[Traffic]:
        """Play these rounds. Return the traffic of each.

        Raises NotFiniteError, with the round as `error.round`, after the last round (on a CPU, at once).
        What was computed is then void, and the federation refuses all calls until a state is loaded; so
        does this one, with ValueError.
        """
        federation, known = self.federation, self.federation.compressor.known
        federation.check_usable("play")
        before = known.round
        trainer, everyone = federation.trainer, list(range(federation.clients))
        trainer.read_module()
        federation.feed.hold(rounds)
        with trainer.lend_module():
            federation.is_whole = False  # until all rounds are played, and finite
            for index, t in enumerate(rounds):
                self._play(index, federation.schedule(t).eta)
            weights = federation.compressor.server.weights
            trainer.left_S = trainer.average_statistics(everyone, weights)
        federation.t, federation.active = rounds.stop, everyone
        known.round = before + len(rounds)
        for index, n in (~self.finite_TN[: len(rounds)]).nonzero().tolist()[:1]:
            error = NotFiniteError(n if n < federation.clients else SERVER)
            error.round = rounds[index]
            raise error
        federation.is_whole = True
        played = [self._traffic(explored) for explored in self.explored_T[: len(rounds)].tolist()]
        federation.compressor.traffic = played[-1]
        return played

    def _traffic(self, explored: int) -> Traffic:
        """Return the traffic of a round in which clients chose so many entries themselves."""
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
            if self.graph is None or self.addresses != self._addresses():
                self.graph = self._capture()
                self.addresses = self._addresses()
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
            watched = self.watch.compare(update_D)
        if before_K is not None:
            if isinstance(self.watch, MaskWatch):
                watched = self.watch.compare(before_K, rule.positions)
            # The next round looks for the positions in the memory of the earlier ones.
            rule.positions = before_K.copy_(rule.positions)
        if watched is not None:
            self.watched_T2.index_copy_(0, now, watched.view(1, 2))
        finite = {n: torch.ones((), dtype=torch.bool, device=now.device) for n in everyone}
        finite[SERVER] = finite[0]
        # On a CPU there are no flags, since a value that is not finite raises an error there.
        for sender, flag in self.link.flags:
            finite[sender] = finite[sender] & flag
        self.finite_TN.index_copy_(0, now, torch.stack([*finite.values()]).view(1, -1))
        self.explored_T.index_copy_(0, now, self.link.explored.view(1))

    def _addresses(self) -> list[int]:
        """Return the addresses of what the graph reads and writes. The user, an ordinary round or a
        checkpoint may have replaced some of it."""
        federation = self.federation
        tensors = [federation.theta_D, *federation.flat.parameters, *self._masks()]
        return [tensor.data_ptr() for tensor in tensors]

    def _masks(self) -> list[Tensor]:
        """Return the tensors that an ordinary round or a checkpoint replaces."""
        rule = self.federation.compressor.rule
        positions = getattr(rule, "positions", None)
        return [] if positions is None else [positions]

    def _capture(self) -> Any:
        """Capture a round as a CUDA graph. What the trial rounds before it change is put back."""
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
        # The stream is given, because the default one belongs to the first device that was used.
        with torch.cuda.graph(graph, stream=side):
            self._round()
        for tensor, value in before:
            tensor.copy_(value)
        federation.trainer.put_theta()
        return graph
