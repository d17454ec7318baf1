"""A training: a RunConfig and a data set made into a federation, epoch by epoch."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tcs_core import (
    OVERHEAD_BYTES,
    RULES,
    TCS,
    ClientError,
    Compressor,
    FlatModel,
    NotFiniteError,
    Ranks,
    TopK,
    _dequantize,
    _filtered,
    _lloyd_max,
    _quantize,
    _restore_,
    build_model,
    in_common,
    kept,
    static_top_k,
)
from tcs_lab.data import _CACHED_IMAGES, _STAGED_SAMPLES, Batches, Dataset, Draws, Staged, partition
from tcs_lab.settings import RunConfig

# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 7. The federation: local training, FedAvg, global momentum (Alg. 1, 3)
#    All clients live in one process and take turns on one model. A client's backward passes add up
#    in one flat gradient, which Eq. 3's factor takes into its row of deltas_ND.
# ══════════════════════════════════════════════════════════════════════════════════════════════════

Row = dict[str, Any]  # of a record: what one epoch did

# Purposes of random numbers; with seed, epoch, client they name one independent stream each, so
# that no draw depends on the order of work, the number of processes or where a run was resumed.
_INIT, _PARTITION, _SAMPLING, _PARTICIPANTS, _MASKS = range(5)


def generator_for(seed: int, *path: int) -> torch.Generator:
    """The CPU generator of one purpose: the same numbers for the same (seed, path), everywhere."""
    state = np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


class Training:
    """N clients and a server on one machine (Alg. 1 with Alg. 2's compression, or Alg. 3).

    `theta_D`, `deltas_ND`, `statistics_NS` and `compressor` are the whole state, beside
    `momentum_D`. Over several `ranks`, N is the number of this rank's `own` clients, and what the
    server knows is the same on all of them. Raises ValueError if the data can't feed the configured
    clients, batches or local steps.
    """

    def __init__(
        self,
        config: RunConfig,
        data: Dataset,
        ranks: Ranks | None = None,
        keep_deltas: bool = False,
    ):
        self.config, self.device, self.fingerprint = config, config.torch_device, data.fingerprint
        clients, self.ranks = config.client_count, ranks or Ranks()
        self.own = self.ranks.own(clients)
        self.samples_NM = _client_samples(config, data)[self.own.start : self.own.stop]
        self.batches = Batches(data, self.device)
        self.staged: dict[int, Staged] = {}
        if self.ranks.size > 1:
            self.samples_NM = self.batches.keep(self.samples_NM)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_for(config.seed, _INIT).initial_seed())
            model = build_model(config.model, config.width, data.classes)
        self.flat = FlatModel(model.to(self.device))
        self.theta_D, dimension = self.flat.theta_D, len(self.flat.theta_D)
        self.start_D = torch.empty_like(self.theta_D) if config.scheme.local_steps > 1 else None
        self.deltas_ND = torch.zeros(len(self.own), dimension, device=self.device)
        self.statistics_NS = self.flat.statistics().repeat(len(self.own), 1)
        self.statistics_views = [self.flat.statistics_views(row) for row in self.statistics_NS]
        self.momentum_D = torch.zeros_like(self.theta_D) if config.scheme.momentum else None
        sizes, seed = self.flat.layer_sizes, config.seed * 8 + _MASKS
        wire = (config.wire, config.bad_message, self.ranks)
        self.compressor = Compressor(config.scheme, sizes, clients, self.device, seed, *wire)
        self.static = StaticRound(self) if config.graph and StaticRound.suits(self) else None
        self.active = list(range(clients))
        self.loss_sums_N = torch.zeros(len(self.own), device=self.device)

    @property
    def loss_sum(self) -> Tensor:
        """All local steps' losses in this epoch so far: the clients' own sums, added up."""
        return self.ranks.rows(self.loss_sums_N).sum()

    @property
    def rounds_per_epoch(self) -> int:
        return self.samples_NM.shape[1] // self.config.batch // self.config.scheme.local_steps

    def rounds(self, epoch: int) -> Iterator[Tensor]:
        """The rounds of one epoch (counted from 0), each as the update_D (D,) it sent to all.

        Between two of them, `theta_D`, `deltas_ND` and `compressor` may be looked at.
        Raises NotFiniteError, or MessageError, with the round in its text; theta_D is as after the
        last good round.
        """
        self.loss_sums_N.zero_()
        self._widen(epoch)
        draws, count = self._draws(epoch), self.rounds_per_epoch
        for index in range(count):
            eta = self.config.learning_rate_at(epoch + index / count)
            self.active = self._participants(epoch, index)
            try:
                dense = epoch < self.config.warmup and self.config.scheme.dense_warmup
                yield self.round(draws, index, eta, dense)
            except ClientError as error:
                error.args = (f"{error.args[0]}; epoch {epoch + 1}, round {index + 1} of {count}",)
                raise

    def epoch(self, epoch: int) -> Row:
        """All rounds of one epoch; its row of the record, without the evaluation."""
        row = {"epoch": epoch + 1, "rounds": self.rounds_per_epoch, "dense_rounds": 0}
        traffic = ("bits_up", "bits_down", "bytes_up", "bytes_down")
        row |= dict.fromkeys(traffic, 0)
        self._widen(epoch)
        static = self.static is not None and self.static.ready(epoch)
        if isinstance(self.compressor.rule, TCS):
            self.compressor.rule.shared.zero_()
        watch = Watch(self.flat.layer_sizes) if self.config.scheme.dense else None
        for update_D in self.static.rounds(epoch) if static else self.rounds(epoch):
            if watch:
                watch.see(update_D)
            for key in traffic:
                row[key] += getattr(self.compressor, key)
            row["dense_rounds"] += self.compressor.last_dense
            if self.config.bad_message == "skip":  # messages left out
                row["refused"] = row.get("refused", 0) + len(self.compressor.refused)
        steps = row["rounds"] * self.config.scheme.local_steps * len(self.active)
        eta = self.config.learning_rate_at(epoch + 1 - 1 / row["rounds"])
        self.ranks.check_same(self.theta_D, f"theta_D after epoch {epoch + 1}")
        row |= {"learning_rate": eta, "train_loss": float(self.loss_sum) / steps}
        return row | self._mask_overlap() | (watch.row() if watch else {})

    def _widen(self, epoch: int) -> None:
        """Larger masks in a sparse warm-up, and no longer after it."""
        scheme = self.config.scheme
        if scheme.warmup_masks > 1:
            self.compressor.rule.widen(scheme.warmup_masks if epoch < self.config.warmup else 1)

    def _mask_overlap(self) -> Row:
        """Which share of the shared mask was in it a round before, in this epoch so far."""
        rule = self.compressor.rule
        kept, total = rule.shared.tolist() if isinstance(rule, TCS) else (0, 0)
        return {"mask_overlap": kept / total} if total else {}

    def _draws(self, epoch: int) -> list[Draws]:
        """Every own client's order of samples, crops and flips for one epoch."""
        steps = self.rounds_per_epoch * self.config.scheme.local_steps
        seeds = [(self.config.seed, _SAMPLING, epoch, n) for n in self.own]
        need = steps * self.config.batch
        return [
            Draws.of(samples_M, need, generator_for(*seed)).to(self.device)
            for samples_M, seed in zip(self.samples_NM, seeds, strict=True)
        ]

    def _participants(self, epoch: int, index: int) -> list[int]:
        if self.config.participants == self.config.client_count:
            return list(range(self.config.client_count))
        generator = generator_for(self.config.seed, _PARTICIPANTS, epoch, index)
        order = torch.randperm(self.config.client_count, generator=generator)
        return sorted(order[: self.config.participants].tolist())

    def round(
        self, draws: list[Draws], index: int | Tensor, eta: float | Tensor, dense: bool = False,
        compress: Callable[..., Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Round `index` of an epoch: local training, compression, the server's step; update_D.

        A static round gives `index` and `eta` as tensors, and its own `compress`.
        """
        scheme, compress = self.config.scheme, compress or self.compressor.step
        if not self.flat.model.training:
            self.flat.model.train()
        scale = 1.0 if scheme.momentum else -eta  # Eq. 3: gradients to a model difference
        for row in [self.own.index(n) for n in self.active if n in self.own]:
            self._local_training_(row, draws[row], index, eta)
            torch.mul(self.flat.gradient_D, scale, out=self.deltas_ND[row])
        update_D = compress(self.deltas_ND, dense, self.active)
        if scheme.momentum:
            self.momentum_D.mul_(scheme.momentum).add_(update_D)  # Alg. 3, line 7
            _descend(self.theta_D, self.momentum_D, eta, out=self.theta_D)  # Alg. 3, line 8
        else:
            self.theta_D.add_(update_D)  # Alg. 2, line 6
        return update_D

    def _local_training_(
        self, n: int, draws: Draws, index: int | Tensor, eta: float | Tensor
    ) -> None:
        """Alg. 1, l. 3 to 6: H steps of client n; its summed gradients are in `flat.gradient_D`."""
        config, theta_D = self.config, self.theta_D
        steps, batch = config.scheme.local_steps, config.batch
        gradient_D = torch.mul(theta_D, config.weight_decay, out=self.flat.gradient_D)
        self.flat.use(self.statistics_views[n])
        if steps > 1:
            self.start_D.copy_(theta_D)  # line 3
        for tau in range(steps):
            first = (index * steps + tau) * batch
            images, labels = self._batch(n, draws, first)
            loss = self._loss(images, labels)
            loss.backward()  # line 5; adds to gradient_D
            self.loss_sums_N[n].add_(loss.detach())
            if tau + 1 < steps:
                _descend(self.start_D, gradient_D, eta, out=theta_D)  # line 6
                gradient_D.add_(theta_D, alpha=config.weight_decay)
        if steps > 1:
            theta_D.copy_(self.start_D)

    def _batch(self, n: int, draws: Draws, first: int | Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, h, w) and labels (B,) from `first` on; augmented many batches at a time."""
        if isinstance(first, Tensor):
            return self.batches.augmented(draws.at(first + self.static.offsets))
        staged = self.staged.get(n)
        if staged is None or staged.draws is not draws or first not in staged.batches:
            self.staged[n] = staged = self._stage(draws, first)
        return staged.batches[first]

    def _stage(self, draws: Draws, first: int) -> Staged:
        size = self.config.batch
        ahead = max(1, _STAGED_SAMPLES // len(self.samples_NM) // size) * size
        images, labels = self.batches.augmented(draws[first : first + ahead])
        pairs = zip(images.split(size), labels.split(size), strict=True)
        return Staged(draws, dict(zip(range(first, first + len(labels), size), pairs, strict=True)))

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            scores = self.flat.model(images)
        return F.cross_entropy(scores.float(), labels)

    def _autocast(self) -> contextlib.AbstractContextManager:
        enabled = self.config.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    @torch.no_grad()
    def evaluate(self, batch: int = 500) -> dict[str, float]:
        """Accuracy (0..1) and mean loss on the test images; the clients' statistics averaged. Sums
        are over so many images as `batch` says, and ranks share them out so."""
        self.flat.model.eval()
        average_S = self.ranks.rows(self.statistics_NS)[self.active].mean(0)
        self.flat.use(self.flat.statistics_views(average_S))
        count = len(self.batches.test_labels)
        starts, found = range(0, count, batch), []
        for start in (starts[i] for i in self.ranks.own(len(starts))):
            images, labels = self.batches.test(slice(start, start + batch))
            pieces = images.split(batch if self.device.type == "cuda" else _CACHED_IMAGES)
            with self._autocast():
                scores = torch.cat([self.flat.model(piece) for piece in pieces]).float()
            loss = float(F.cross_entropy(scores, labels, reduction="sum"))
            found.append((loss, int((scores.argmax(1) == labels).sum())))
        found = self.ranks.rows(torch.tensor(found, dtype=torch.float64).view(-1, 2)).tolist()
        loss, right = (sum(column) for column in zip(*found, strict=True))
        return {"accuracy": right / count, "loss": loss / count}

    def state_dict(self) -> dict[str, Any]:
        state = {"theta_D": self.theta_D, "statistics_NS": self.statistics_NS}
        state |= {"active": self.active, "compressor": self.compressor.state_dict()}
        return state if self.momentum_D is None else state | {"momentum_D": self.momentum_D}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in ("theta_D", "statistics_NS"):
            _restore_(getattr(self, key), state[key], key)
        self.active = list(state["active"])
        self.compressor.load_state_dict(state["compressor"])
        if self.momentum_D is not None:
            _restore_(self.momentum_D, state["momentum_D"], "momentum_D")


class Watch:
    """How slowly the important entries of dense updates change: "update_overlap", the share of an
    update's 1 % largest entries (the paper's phi_global) that were among those of the one before,
    and "update_overlap_chance", what masks with as many entries in every layer would share by
    chance. Means over the rounds seen, but for the first."""

    def __init__(self, layer_sizes: list[int], phi: float = 1e-2):
        self.sizes_L = torch.tensor(layer_sizes)
        self.k, self.before_K = kept(phi, sum(layer_sizes)), None
        self.found: list[tuple[float, float]] = []
        self.floor = 0.0

    def see(self, update_D: Tensor) -> None:
        now_K, kth = _filtered(update_D, self.k, None, self.floor)
        before_K, self.before_K, self.floor = self.before_K, now_K, 0.85 * kth
        if before_K is not None:
            chance = (self._layers(before_K) * self._layers(now_K) / self.sizes_L).sum()
            self.found.append((int(in_common(before_K, now_K)) / self.k, float(chance) / self.k))

    def _layers(self, positions_K: Tensor) -> Tensor:
        """How many of the positions every layer has, (L,)."""
        layers = torch.bucketize(positions_K.cpu(), self.sizes_L.cumsum(0), right=True)
        return torch.bincount(layers, minlength=len(self.sizes_L))

    def row(self) -> Row:
        names = ("update_overlap", "update_overlap_chance")
        means = torch.tensor(self.found, dtype=torch.float64).mean(0).tolist()
        return dict(zip(names, means, strict=True)) if self.found else {}


def _descend(start_D: Tensor, gradient_D: Tensor, eta: float | Tensor, out: Tensor) -> None:
    """start - eta * gradient, into `out`."""
    if isinstance(eta, Tensor):
        torch.addcmul(start_D, gradient_D, eta, value=-1.0, out=out)
    else:
        torch.add(start_D, gradient_D, alpha=-eta, out=out)


def _client_samples(config: RunConfig, data: Dataset) -> Tensor:
    """Which training samples each client has, (N, M); ValueError if they are too few."""
    total, clients = len(data.train_labels), config.client_count
    if clients > total:
        raise ValueError(f"clients: got {clients}, allowed: at most the {total} training samples")
    own = total // clients
    if config.batch > own:
        raise ValueError(
            f"batch_size: got {config.batch_size} (a step of {config.batch} samples), "
            f"allowed: at most the {own} samples of a client"
        )
    if config.scheme.local_steps > own // config.batch:
        raise ValueError(
            f"local_steps: got {config.scheme.local_steps} ({config.scheme.name}), allowed: at "
            f"most {own // config.batch}, the batches of {config.batch} in a client's {own} samples"
        )
    alpha = None if config.scheme.centralized else config.dirichlet_alpha
    generator = generator_for(config.seed, _PARTITION)
    return partition(data.train_labels, clients, alpha, generator)


# Static rounds ────────────────────────────────────────────────────────────────────────────────────
#    A GPU is fast if the host never waits for it: then no shape may depend on a value, and no value
#    may be looked at. Every message of TCS and top-K has a fixed size, so that a whole round can be
#    like that; on a GPU it is captured once as a CUDA graph and replayed.


class StaticRound:
    """Rounds of a federation with static shapes and no host synchronization.

    `Training.round` with `Compressor.step` is the reference: the same masks, the same numbers to
    rounding. What the host needs to know (entries explored, updates that are not finite) stays on
    the device until the epoch's end.
    """

    def __init__(self, federation: Training):
        device, config = federation.device, federation.config
        self.federation = weakref.proxy(federation)  # which holds this: freed without a collection
        self.compressor = federation.compressor
        shape = (federation.rounds_per_epoch, config.client_count)
        self.index = torch.zeros((), dtype=torch.int64, device=device)
        self.eta = torch.zeros((), device=device)
        self.offsets = torch.arange(config.batch, device=device)
        self.explored_T = torch.zeros(shape[0], dtype=torch.int64, device=device)
        self.finite_TN = torch.ones(shape, dtype=torch.bool, device=device)
        self.draws: list[Draws] = []
        self.graph: Any = None
        self.held: list[Tensor | None] = []  # what the graph was captured with

    @staticmethod
    def suits(federation: Training) -> bool:
        """Whether static rounds can stand in for the sparse rounds of this federation."""
        config, scheme = federation.config, federation.config.scheme
        fair = scheme.phi_min_global is not None or scheme.phi_min_local is not None
        plain = scheme.code == "block" and not scheme.compresses_downlink and not config.wire
        everyone = config.participants == config.client_count and federation.ranks.size == 1
        return RULES[scheme.rule] in (TCS, TopK) and plain and everyone and not fair

    def ready(self, epoch: int) -> bool:
        """Whether all rounds of this epoch are sparse: no warm-up, and a first mask is there."""
        warm = epoch < self.federation.config.warmup
        mask = self.compressor.rule.global_mask()
        return not warm and mask is not None and len(mask) == self.compressor.rule.k_global

    def rounds(self, epoch: int) -> Iterator[None]:
        """All rounds of an epoch; then, one by one, what each left in the compressor's counts.

        Raises NotFiniteError, naming client and round, after the epoch; the state is then void.
        """
        federation, count = self.federation, self.federation.rounds_per_epoch
        federation.loss_sums_N.zero_()
        self._take(federation._draws(epoch))
        for index in range(count):
            self.play(index, federation.config.learning_rate_at(epoch + index / count))
        self.compressor.round += count
        for index, n in (~self.finite_TN).nonzero().tolist()[:1]:
            error = NotFiniteError(n)
            error.args = (f"{error.args[0]}; epoch {epoch + 1}, round {index + 1} of {count}",)
            raise error
        for explored in self.explored_T.tolist():
            self._count(explored)
            yield

    def _count(self, explored: int) -> None:
        compressor, rule = self.compressor, self.compressor.rule
        shared, clients = rule.k_global, self.finite_TN.shape[1]
        up = compressor.up.block_code_bits(shared + rule.k_local, rule.k_local)
        down = compressor.down.block_code_bits(shared + explored, explored)
        sizes = [(bits, OVERHEAD_BYTES + -(-bits // 8)) for bits in (up, down)]
        compressor._count([sizes[0]] * clients, sizes[1])
        compressor.last_dense = False

    def _take(self, draws: list[Draws]) -> None:
        """This epoch's samples, in the buffers that the graph reads."""
        self.draws = self.draws or draws
        for buffer, new in zip(self.draws, draws, strict=True):
            for name in ("samples", "crops", "flips"):
                getattr(buffer, name).copy_(getattr(new, name))

    def play(self, index: int, eta: float) -> None:
        """Round `index` of the epoch whose draws were taken."""
        self.index.fill_(index)
        self.eta.fill_(eta)
        if self.federation.device.type != "cuda":
            self._round()
            return
        with torch.cuda.device(self.federation.device):
            if self.graph is None or any(one is not two for one, two in self._masks_and_held()):
                self.graph, self.held = self._captured(), self._masks()
            self.graph.replay()

    def _masks(self) -> list[Tensor | None]:
        """What eager rounds and checkpoints put another tensor in the place of."""
        return [getattr(self.compressor.rule, name, None) for name in ("positions", "shared")]

    def _masks_and_held(self) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        return zip(self._masks(), self.held, strict=True)

    def _captured(self) -> Any:
        """The round as a CUDA graph. What the trial rounds before it change is put back."""
        before = [(tensor, tensor.clone()) for tensor in self._state()]
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
        return graph

    def _state(self) -> list[Tensor]:
        federation, masks = self.federation, self._masks()
        state = [federation.theta_D, federation.statistics_NS, federation.loss_sums_N]
        state += [self.compressor.errors_ND, self.explored_T, self.finite_TN]
        return state + [t for t in (federation.momentum_D, *masks) if t is not None]

    def _round(self) -> None:
        self.federation.active = list(range(len(self.draws)))
        self.federation.round(self.draws, self.index, self.eta, compress=self._compress)

    def _compress(self, deltas_ND: Tensor, *_: object) -> Tensor:
        """`Compressor._sparse_round`, its values never looked at."""
        rule, explored_D = self.compressor.rule, self.compressor._explored_D.zero_()
        global_K, update_D = rule.global_mask(), torch.zeros_like(deltas_ND[0])
        finite_N = []
        for n, delta_D in enumerate(deltas_ND):
            local_K, sent, finite = self._client(n, delta_D, global_K)
            finite_N.append(finite)
            update_D.index_add_(0, torch.cat([global_K, local_K]), sent)
            explored_D.index_fill_(0, local_K, True)
        update_D.div_(len(deltas_ND))
        now = self.index.view(1)
        self.finite_TN.index_copy_(0, now, torch.stack(finite_N).view(1, -1))
        self.explored_T.index_copy_(0, now, explored_D.sum().view(1))
        if rule.k_global:
            next_K = static_top_k(update_D.abs(), rule.k_global)
            rule.count_shared(global_K, next_K)
            global_K.copy_(next_K)
        return update_D

    def _client(self, n: int, delta_D: Tensor, global_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One client's own positions, the values it sends, and whether they are finite."""
        errors_D, scheme = self.compressor.errors_ND[n], self.compressor.scheme
        keep_errors = scheme.error_accumulation
        intended_D = errors_D.add_(delta_D) if keep_errors else errors_D.copy_(delta_D)
        magnitudes_D = intended_D.abs().index_fill_(0, global_K, -1.0)
        local_K = static_top_k(magnitudes_D, self.compressor.rule.k_local)
        positions = torch.cat([global_K, local_K])
        intended = sent = intended_D.index_select(0, positions)
        if scheme.intervals:
            quantize = _quantize if scheme.quantizer == "fractional" else _lloyd_max
            sent = _dequantize(*quantize(intended, scheme.intervals))
        errors_D.scatter_(0, positions, intended - sent)
        return local_K, sent, intended.isfinite().all() & delta_D.sum().isfinite()
