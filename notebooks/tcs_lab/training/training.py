"""A training: a RunConfig and a data set made into a federation, epoch by epoch."""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcs_core
from tcs_core import (
    ClientError,
    Compressor,
    Federation,
    Link,
    LocalTrainer,
    Phase,
    Traffic,
    unchanged,
)
from tcs_lab.support.files import cache_folder
from tcs_lab.tasks.images import Batches, Dataset, Draws, generator_for, load_dataset, partition
from tcs_lab.tasks.text import GPT, Text, load_text
from tcs_lab.training.client_streams import ClientStreams, uses_client_streams
from tcs_lab.training.client_threads import ClientThreads, uses_client_threads
from tcs_lab.training.compiled import make_passes
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.cuda_graph import GraphRounds, uses_static_rounds
from tcs_lab.training.side_by_side import SideBySide, uses_side_by_side
from tcs_lab.training.text_feed import TextFeed
from tcs_lab.training.watching import MaskWatch, Row, UpdateWatch

Data = Dataset | Text

# Purposes of random numbers; with seed, epoch, client they name one independent stream each, so
# that no draw depends on the order of work, the number of processes or where a run was resumed.
_INIT, _PARTITION, _SAMPLING, _PARTICIPANTS, _MASKS = range(5)
_STAGED_SAMPLES = 4096  # augmented ahead, of all clients together
_EVALUATED_AT_ONCE = 500  # test samples whose losses are summed at once
_CACHED_IMAGES = 100  # evaluated at once on a CPU, for the sake of its cache


def load_data(config: RunConfig) -> Data:
    """The data set of a configuration, cut to its samples and pixels."""
    if config.dataset == "text":
        return load_text()
    data = load_dataset(config.dataset, config.data_root, config.data_label)
    counts = config.train_samples, config.test_samples
    return data.first(*counts, keep_unused=config.test_unused).resize(config.image_size)


class ImageFeed:
    """Batches of augmented images for the core's federation: every client passes over its own
    samples (N, M) without replacement, in an order of its own in every epoch. What an epoch's last
    round has no full batches for is left out."""

    weights = None  # clients have equally many samples

    def __init__(self, batches: Batches, samples_NM: Tensor, config: RunConfig):
        self.batches, self.samples_NM, self.config = batches, samples_NM, config
        self.clients, self.size = config.client_count, config.batch
        self.steps = config.scheme.local_steps
        self.rounds = samples_NM.shape[1] // self.size // self.steps  # an epoch
        self.offsets = torch.arange(self.size, device=batches.padded.device)
        self._epoch, self._draws = -1, dict[int, Draws]()
        self._held: Draws | None = None  # of GraphRounds: tensors that stay where they are
        self._ahead: dict[int, tuple[Draws, dict[int, tuple[Tensor, Tensor]]]] = {}

    @staticmethod
    def of(config: RunConfig, data: Dataset) -> ImageFeed:
        """The feed of a configuration."""
        batches = Batches(data, config.torch_device, config.crop_padding)
        return ImageFeed(batches, _deal_samples(config, data), config)

    def test_count(self, last: bool) -> int:
        """How many images are tested after an epoch; after the last one, those unused too."""
        return len(self.batches.test_labels) if last else self.batches.test_count

    def test(self, part: slice) -> tuple[Tensor, Tensor]:
        return self.batches.test(part)

    def draws(self, epoch: int) -> list[Draws]:
        """Every client's order of samples, crops and flips for one epoch."""
        return [self._draws_of(n, epoch) for n in range(self.clients)]

    def _draws_of(self, n: int, epoch: int) -> Draws:
        """One client's: those who take no part cost nothing."""
        if epoch != self._epoch:
            self._epoch, self._draws = epoch, {}
        if n not in self._draws:
            need = self.rounds * self.steps * self.size
            generator = generator_for(self.config.seed, _SAMPLING, epoch, n)
            found = Draws.of(self.samples_NM[n], need, generator, self.batches.padding)
            self._draws[n] = found.to(self.offsets.device)
        return self._draws[n]

    def hold(self, rounds: range) -> None:
        """From here on a tensor in the place of a round counts from the first of these, an epoch's.
        Their samples are kept in the same tensors every time."""
        draws = Draws.stack(self.draws(rounds.start // self.rounds))
        if self._held is None:
            self._held = draws
            return
        for kept, new in zip(vars(self._held).values(), vars(draws).values(), strict=True):
            kept.copy_(new)

    def batch(self, n: int, round: int | Tensor, tau: int) -> tuple[Tensor, Tensor]:
        """Images (B, 3, h, w) float32 and labels (B,) of client n's local step tau."""
        if isinstance(round, Tensor):
            first = (round * self.steps + tau) * self.size
            return self.batches.augment(cast(Draws, self._held)[n][first + self.offsets])
        epoch, index = divmod(round, self.rounds)
        return self._augment_ahead(
            n, self._draws_of(n, epoch), (index * self.steps + tau) * self.size
        )

    def batches_of_all(self, round: Tensor, tau: int) -> tuple[Tensor, Tensor]:
        """All clients' batches of a static round, augmented at once: (N, B, 3, h, w) and (N, B)."""
        first = (round * self.steps + tau) * self.size
        draws = cast(Draws, self._held)[:, first + self.offsets]
        images, labels = self.batches.augment(draws.flatten())
        return images.unflatten(0, draws.flips.shape), labels.view(draws.flips.shape)

    def _augment_ahead(self, n: int, draws: Draws, first: int) -> tuple[Tensor, Tensor]:
        """The batch from `first` on; many of them are augmented at a time."""
        known, found = self._ahead.get(n, (None, {}))
        if known is not draws or first not in found:
            ahead = max(1, _STAGED_SAMPLES // len(self.samples_NM) // self.size) * self.size
            images, labels = self.batches.augment(draws[first : first + ahead])
            pairs = zip(images.split(self.size), labels.split(self.size), strict=True)
            found = dict(zip(range(first, first + len(labels), self.size), pairs, strict=True))
            self._ahead[n] = (draws, found)
        return found[first]


class Training:
    """The federation that a RunConfig describes, on a data set, `epoch` by `epoch`.

    With `keep_deltas`, `deltas_ND` holds the last round's model differences; `link` is one of your
    own. Raises ValueError if the data can't feed the configured clients, batches or local steps.
    """

    def __init__(
        self, config: RunConfig, data: Data, keep_deltas: bool = False, link: Link | None = None
    ):
        self.config, self.device, self.fingerprint = config, config.torch_device, data.fingerprint
        scheme = config.scheme
        self.feed: Any = (
            TextFeed(data, config, (_PARTITION, _SAMPLING))
            if isinstance(data, Text)
            else ImageFeed.of(config, data)
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_for(config.seed, _INIT).initial_seed())
            model = make_run_model(config, data.classes)
        if link is None:
            link = Link(unchanged, config.bad_message) if config.wire else Link()
        static = uses_static_rounds(config, link)
        self.federation = Federation(
            model.to(self.device), self.feed, scheme, partial(_phase, config, self.feed.rounds),
            loss=CrossEntropy(config), link=link,
            weights=self.feed.weights,
            weight_decay=config.weight_decay, seed=config.seed * 8 + _MASKS,
            trainer=self._choose_trainer(static),
        )  # fmt: skip
        if hasattr(self.compressor.rule, "set_model"):  # of a method that compresses by parameter
            self.compressor.rule.set_model(self.flat)
        if config.errors_limit and 1e6 * config.errors_limit < self.compressor.errors_ND.nbytes:
            move_errors_to_file(self.compressor)
        # dense schemes' updates say which entries are important
        self.watch: UpdateWatch | MaskWatch = (
            UpdateWatch(self.flat.layer_sizes, device=self.device)
            if scheme.always_dense
            else MaskWatch(self.compressor.known)
        )
        self.graph = None
        if static:
            self.graph = GraphRounds(self.federation, self.rounds_per_epoch, self.watch)
        if keep_deltas:
            shape = config.client_count, len(self.theta_D)
            self.deltas_ND = torch.zeros(shape, device=self.device)
            self.federation.on_delta = self._keep_delta

    def _choose_trainer(self, static: bool) -> type[LocalTrainer]:
        """How clients train: one after another, or several at a time."""
        if uses_client_threads(self.config):
            return ClientThreads
        if uses_side_by_side(self.config):
            return SideBySide
        return ClientStreams if static and uses_client_streams(self.config) else LocalTrainer

    def _keep_delta(self, n: int, delta_D: Tensor) -> None:
        self.deltas_ND[n] = delta_D

    # What the federation has, by the names that notebooks use.
    theta_D = property(lambda self: self.federation.theta_D)
    statistics_NS = property(lambda self: self.federation.statistics_NS)
    momentum_D = property(lambda self: self.federation.momentum_D)
    compressor = property(lambda self: self.federation.compressor)
    flat = property(lambda self: self.federation.flat)
    samples_NM = property(lambda self: self.feed.samples_NM)
    rounds_per_epoch = property(lambda self: self.feed.rounds)
    active = property(lambda self: self.federation.active)

    @property
    def loss_sum(self) -> Tensor:
        """All local steps' losses in this epoch so far: the clients' own sums, added up."""
        return self.federation.losses_N.sum()

    def rounds(self, epoch: int) -> Iterator[Tensor]:
        """The rounds of one epoch (counted from 0), each as the update_D (D,) that it sent to all.

        Between two of them, `theta_D` and `compressor` may be looked at. Raises NotFiniteError, or
        MessageError, with the round in its text; theta_D is as after the last good round.
        """
        self.federation.losses_N.zero_()
        first = self.federation.t = epoch * self.rounds_per_epoch
        for index in range(self.rounds_per_epoch):
            try:
                yield self.federation.round(self._participants(epoch, index))
            except ClientError as error:
                raise self._split_path(error, first + index) from None

    def _split_path(self, error: ClientError, t: int) -> ClientError:
        epoch, index = divmod(t, self.rounds_per_epoch)
        where = f"epoch {epoch + 1}, round {index + 1} of {self.rounds_per_epoch}"
        error.args = (f"{error.args[0]}; {where}",)
        return error

    def _play_rounds(self, graph: GraphRounds, rounds: range) -> list[Traffic]:
        """All of them at once; what each sent."""
        self.federation.losses_N.zero_()
        try:
            played = graph.play(rounds)
        except ClientError as error:
            first_bad = rounds.start if error.round is None else error.round
            raise self._split_path(error, first_bad) from None
        self.watch.found += list(graph.watched_T2[: len(rounds)])
        return played

    def _traffic(self, epoch: int) -> Iterator[Traffic]:
        """The same, each as what it sent."""
        for update_D in self.rounds(epoch):
            self.watch.observe(update_D)
            yield self.compressor.traffic

    def epoch(self, epoch: int) -> Row:
        """All rounds of one epoch; its row of the record, without the evaluation."""
        count, compressor, scheme = self.rounds_per_epoch, self.compressor, self.config.scheme
        span = range(epoch * count, (epoch + 1) * count)
        row = {"epoch": epoch + 1, "rounds": count, "dense_rounds": 0}
        counted = ("bits_up", "bits_down", "bytes_up", "bytes_down")
        row |= dict.fromkeys(counted, 0)
        self.watch.begin()
        played: Iterable[Traffic] = self._traffic(epoch)
        if self.graph is not None and self.graph.is_ready(span):
            played = self._play_rounds(self.graph, span)
        for traffic in played:
            for key in counted:
                row[key] += getattr(traffic, key)
            row["dense_rounds"] += compressor.known.dense
            if self.config.bad_message == "skip":  # messages left out
                row["refused"] = row.get("refused", 0) + len(traffic.refused)
        steps = count * scheme.local_steps * self.config.participants
        row |= {"learning_rate": self.federation.schedule(span[-1]).eta}
        row |= {"train_loss": float(self.loss_sum) / steps}
        return row | self.watch.row()

    def _participants(self, epoch: int, index: int) -> list[int]:
        if self.config.participants == self.config.client_count:
            return list(range(self.config.client_count))
        generator = generator_for(self.config.seed, _PARTICIPANTS, epoch, index)
        order = torch.randperm(self.config.client_count, generator=generator)
        return sorted(order[: self.config.participants].tolist())

    @torch.no_grad()
    def evaluate(self, last: bool = False) -> Row:
        """Accuracy (0..1) and mean loss on the test samples (of a text, their characters); the
        clients' statistics averaged. After the `last` epoch with `test_unused`: on the unused training
        images too, and "right" says which of all these were right (`pack_flags`)."""
        average_S = self.statistics_NS[self.active].mean(0)
        starts = range(0, self.feed.test_count(last), _EVALUATED_AT_ONCE)
        parts = [slice(start, start + _EVALUATED_AT_ONCE) for start in starts]
        trainer = self.federation.trainer
        each = trainer.each if isinstance(trainer, ClientThreads) else map
        with self.federation.evaluated(average_S):
            found = list(each(self._evaluate_part, parts))
        right = torch.cat([right for _, right in found]).cpu()
        loss = sum(loss for loss, _ in found) / len(right)
        row = {"accuracy": int(right.sum()) / len(right), "loss": loss}
        return row | ({"right": pack_flags(right)} if last and self.config.test_unused else {})

    @torch.no_grad()
    def _evaluate_part(self, part: slice) -> tuple[float, Tensor]:
        """Of a part of the test samples: the summed loss, and which are right, bool."""
        inputs, labels = self.feed.test(part)
        pieces = inputs.split(len(inputs) if self.device.type == "cuda" else _CACHED_IMAGES)
        with _make_autocast(self.config)():
            scores = torch.cat([self.flat.model(piece) for piece in pieces]).float()
        scores, labels = scores.flatten(0, -2), labels.flatten()
        loss = float(F.cross_entropy(scores, labels, reduction="sum"))
        return loss, scores.argmax(1) == labels

    def state_dict(self) -> dict[str, Any]:
        return self.federation.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.federation.load_state_dict(state)


def pack_flags(right: Tensor) -> str:
    """(M,) bool as text: eight to a byte, the first the highest, in base64."""
    return base64.b64encode(np.packbits(right.numpy()).tobytes()).decode()


def unpack_flags(text: str) -> np.ndarray:
    """The inverse of `pack_flags`: bool, with the bits that fill up the last byte."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8)).astype(bool)


def read_outcomes(record: dict[str, Any]) -> np.ndarray | None:
    """Which of the images tested after the last epoch were right, (images,) bool; None if the record
    did not keep it. ValueError if that is not what its accuracy says."""
    last = record["rows"][-1] if record["rows"] else {}
    if "right" not in last:
        return None
    padded = unpack_flags(last["right"])
    count = round(padded.sum() / last["accuracy"]) if last["accuracy"] else len(padded)
    short = len(padded) - count  # the last byte may be filled up
    if not 0 <= short < 8 or padded[count:].any() or padded.sum() / count != last["accuracy"]:
        raise ValueError(f"right: got {padded.sum()} of {len(padded)}, allowed: as accuracy says")
    return padded[:count]


Spans = list[tuple[int, int]]  # of tested images: the first, and the one behind the last


def measure_accuracy(record: dict[str, Any], spans: Spans) -> float:
    """Final accuracy, 0..1, on a part of the images that a record was tested on.

    The tested images are the test images, then the training images that nobody trained on.
    ValueError if the record did not keep which of them were right, or has fewer.
    """
    right = read_outcomes(record)
    last = max(end for _, end in spans)
    if right is None or last > len(right):
        there = "none were kept" if right is None else f"{len(right)} were tested"
        name = f"record {record['digest']}"
        raise ValueError(f"{name}: tested images up to {last} are asked for, but {there}")
    return float(np.concatenate([right[start:end] for start, end in spans]).mean())


def _phase(config: RunConfig, rounds: int, t: int) -> Phase:
    """The schedule: a round's rate, whether it is dense, how much larger its masks are."""
    epoch, index = divmod(t, rounds)
    eta, warm = config.learning_rate_at(epoch + index / rounds), config.warmup
    dense = epoch < warm and config.scheme.dense_warmup
    return Phase(eta, dense, config.scheme.warmup_masks if epoch < warm else 1)


def _make_autocast(config: RunConfig) -> Callable[[], contextlib.AbstractContextManager]:
    kind, enabled = config.torch_device.type, config.precision == "bf16"
    return partial(torch.autocast, kind, torch.bfloat16, enabled=enabled)


class CrossEntropy:
    """A federation's loss: mean cross entropy, the passes in the configured precision."""

    def __init__(self, config: RunConfig):
        self.autocast, self.forward = _make_autocast(config), make_passes(config)

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.scores(model, inputs).flatten(0, -2), labels.flatten())

    def scores(self, model: nn.Module, inputs: Tensor) -> Tensor:
        with self.autocast():
            return self.forward(model, inputs).float()

    @staticmethod
    def each(scores_NBK: Tensor, labels_NB: Tensor) -> Tensor:
        """Each client's loss, (N,), where `__call__` gives one."""
        losses = F.cross_entropy(scores_NBK.flatten(0, 1), labels_NB.flatten(), reduction="none")
        return losses.view_as(labels_NB).mean(1)


def make_run_model(config: RunConfig, classes: int) -> nn.Module:
    if config.dataset == "text":
        return GPT(classes, config.width, config.context)
    return tcs_core.build_model(config.model, config.width, classes)


def move_errors_to_file(compressor: Compressor) -> None:
    """Before the first round: the clients' errors live in a file of the cache folder, mapped into
    memory, of which the system keeps as much there as fits. The file ends with the process.

    Raises ValueError on a GPU, OSError if the disk has no room.
    """
    errors_ND = compressor.errors_ND
    if errors_ND.device.type != "cpu":
        raise ValueError(f"errors_limit: allowed on a CPU, got errors on {errors_ND.device}")
    if not errors_ND.numel():
        return
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="errors-") as file:
        if hasattr(os, "posix_fallocate"):  # else a full disk would end the process much later
            os.posix_fallocate(file.fileno(), 0, errors_ND.nbytes)
        mapped = torch.from_file(file.name, shared=True, size=errors_ND.numel())
    compressor.keep_errors_in(mapped.view_as(errors_ND))


def _deal_samples(config: RunConfig, data: Dataset) -> Tensor:
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
