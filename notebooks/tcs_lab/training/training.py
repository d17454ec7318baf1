"""A training: a federation made of a RunConfig and a data set, epoch by epoch."""

from __future__ import annotations

import base64
import contextlib
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
    Federation,
    Link,
    LocalTrainer,
    Phase,
    Traffic,
    unchanged,
)
from tcs_lab.tasks.images import Batches, Dataset, Draws, generator_for, load_dataset, partition
from tcs_lab.tasks.text import GPT, Text, load_text
from tcs_lab.training.bf16_convolutions import Bf16Convolutions, uses_bf16_convolutions
from tcs_lab.training.client_streams import ClientStreams, uses_client_streams
from tcs_lab.training.client_threads import ClientThreads, uses_client_threads
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.cuda_graph import GraphRounds, uses_static_rounds
from tcs_lab.training.side_by_side import SideBySide, uses_side_by_side
from tcs_lab.training.text_feed import TextFeed
from tcs_lab.training.watching import MaskWatch, Row, UpdateWatch

Data = Dataset | Text

# Purposes of random numbers. With seed, epoch and client they name independent streams, so that no draw
# depends on the order of work, on the number of processes or on where a run was resumed.
_INIT, _PARTITION, _SAMPLING, _PARTICIPANTS, _MASKS = range(5)
_STAGED_SAMPLES = 4096  # augmented ahead, for all clients together
_EVALUATED_AT_ONCE = 500  # test samples whose losses are summed at once
_CACHED_IMAGES = 100  # evaluated at once on a CPU, so that they fit its cache


def load_data(config: RunConfig) -> Data:
    """Load the data set of a configuration, with its number of samples and of pixels."""
    if config.dataset == "text":
        return load_text()
    data = load_dataset(config.dataset, config.data_root, config.data_label)
    counts = config.train_samples, config.test_samples
    return data.first(*counts, keep_unused=config.test_unused).resize(config.image_size)


class ImageFeed:
    """Batches of augmented images for the core's federation.

    In every epoch, each client passes over its samples (N, M) in a new order, without replacement.
    Samples that do not fill the batches of one more round are left out.
    """

    weights = None  # clients have equally many samples

    def __init__(self, batches: Batches, samples_NM: Tensor, config: RunConfig):
        self.batches, self.samples_NM, self.config = batches, samples_NM, config
        self.clients, self.size = config.client_count, config.batch
        self.steps = config.scheme.local_steps
        self.rounds = samples_NM.shape[1] // self.size // self.steps  # per epoch
        self.offsets = torch.arange(self.size, device=batches.padded.device)
        self._epoch, self._draws = -1, dict[int, Draws]()
        self._held: Draws | None = None  # for GraphRounds: tensors that keep their memory
        self._ahead: dict[int, tuple[Draws, dict[int, tuple[Tensor, Tensor]]]] = {}

    @staticmethod
    def of(config: RunConfig, data: Dataset) -> ImageFeed:
        """Make the feed of a configuration."""
        batches = Batches(data, config.torch_device, config.crop_padding)
        return ImageFeed(batches, _deal_samples(config, data), config)

    def test_count(self, last: bool) -> int:
        """Return how many images are tested after an epoch. After the last one, unused images are tested, too."""
        return len(self.batches.test_labels) if last else self.batches.test_count

    def test(self, part: slice) -> tuple[Tensor, Tensor]:
        return self.batches.test(part)

    def draws(self, epoch: int) -> list[Draws]:
        """Return every client's order of samples, crops and flips for one epoch."""
        return [self._draws_of(n, epoch) for n in range(self.clients)]

    def _draws_of(self, n: int, epoch: int) -> Draws:
        """Return those of one client. Clients that take no part cost nothing."""
        if epoch != self._epoch:
            self._epoch, self._draws = epoch, {}
        if n not in self._draws:
            need = self.rounds * self.steps * self.size
            generator = generator_for(self.config.seed, _SAMPLING, epoch, n)
            drawn = Draws.of(self.samples_NM[n], need, generator, self.batches.padding)
            self._draws[n] = drawn.to(self.offsets.device)
        return self._draws[n]

    def hold(self, rounds: range) -> None:
        """Hold the samples of these rounds, an epoch's, in tensors that keep their memory.

        From now on, a tensor in place of a round's number counts from the first of these rounds.
        """
        draws = Draws.stack(self.draws(rounds.start // self.rounds))
        if self._held is None:
            self._held = draws
            return
        for kept, new in zip(vars(self._held).values(), vars(draws).values(), strict=True):
            kept.copy_(new)

    def batch(self, n: int, round: int | Tensor, tau: int) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, h, w) float32 and labels (B,) for client n's local step tau."""
        if isinstance(round, Tensor):
            first = (round * self.steps + tau) * self.size
            return self.batches.augment(cast(Draws, self._held)[n][first + self.offsets])
        epoch, index = divmod(round, self.rounds)
        return self._augment_ahead(
            n, self._draws_of(n, epoch), (index * self.steps + tau) * self.size
        )

    def batches_of_all(self, round: Tensor, tau: int) -> tuple[Tensor, Tensor]:
        """Return all clients' batches of a static round, augmented at once: (N, B, 3, h, w) and (N, B)."""
        first = (round * self.steps + tau) * self.size
        draws = cast(Draws, self._held)[:, first + self.offsets]
        images, labels = self.batches.augment(draws.flatten())
        return images.unflatten(0, draws.flips.shape), labels.view(draws.flips.shape)

    def _augment_ahead(self, n: int, draws: Draws, first: int) -> tuple[Tensor, Tensor]:
        """Return the batch that begins at `first`. Several batches are augmented at a time."""
        of_draws, ready = self._ahead.get(n, (None, {}))
        if of_draws is not draws or first not in ready:
            ahead = max(1, _STAGED_SAMPLES // len(self.samples_NM) // self.size) * self.size
            images, labels = self.batches.augment(draws[first : first + ahead])
            pairs = zip(images.split(self.size), labels.split(self.size), strict=True)
            ready = dict(zip(range(first, first + len(labels), self.size), pairs, strict=True))
            self._ahead[n] = (draws, ready)
        return ready[first]

    def forget_augmented(self) -> None:
        """Forget the batches that were augmented ahead: they are made anew."""
        self._ahead.clear()


class Training:
    """The federation that a RunConfig describes, on a data set. `epoch` trains one epoch.

    With `keep_deltas`, `deltas_ND` holds the last round's model differences. `link` replaces the link
    of the configuration. Raises ValueError if the data has too few samples for the configured
    clients, batches or local steps.
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
            torch.default_generator.manual_seed(generator_for(config.seed, _INIT).initial_seed())
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
        # Methods that compress each parameter separately have `set_model`.
        if hasattr(self.compressor.rule, "set_model"):
            self.compressor.rule.set_model(self.flat)
        # in dense schemes, the updates show which entries are important
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
        """Choose how clients train: one after another, or several at a time."""
        if uses_client_threads(self.config):
            return ClientThreads
        if uses_side_by_side(self.config):
            return SideBySide
        return ClientStreams if static and uses_client_streams(self.config) else LocalTrainer

    def _keep_delta(self, n: int, delta_D: Tensor) -> None:
        self.deltas_ND[n] = delta_D

    # Parts of the federation, under the names that notebooks use.
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
        """The sum of the losses of all clients' local steps in this epoch so far."""
        return self.federation.losses_N.sum()

    def rounds(self, epoch: int) -> Iterator[Tensor]:
        """Play the rounds of one epoch (counted from 0), and yield the update_D (D,) of each.

        Between two rounds, `theta_D` and `compressor` may be looked at. Raises NotFiniteError or
        MessageError, which name the round; theta_D is then that of the last good round.
        """
        self.federation.losses_N.zero_()
        first = self.federation.t = epoch * self.rounds_per_epoch
        for index in range(self.rounds_per_epoch):
            try:
                yield self.federation.round(self._participants(epoch, index))
            except ClientError as error:
                raise self._locate(error, first + index) from None

    def _locate(self, error: ClientError, t: int) -> ClientError:
        """Add epoch and round to the message of an error."""
        epoch, index = divmod(t, self.rounds_per_epoch)
        where = f"epoch {epoch + 1}, round {index + 1} of {self.rounds_per_epoch}"
        error.args = (f"{error.args[0]}; {where}",)
        return error

    def _play_rounds(self, graph: GraphRounds, rounds: range) -> list[Traffic]:
        """Play all of these rounds at once. Return the traffic of each."""
        self.federation.losses_N.zero_()
        try:
            played = graph.play(rounds)
        except ClientError as error:
            first_bad = rounds.start if error.round is None else error.round
            raise self._locate(error, first_bad) from None
        self.watch.counts += list(graph.watched_T2[: len(rounds)])
        return played

    def _traffic(self, epoch: int) -> Iterator[Traffic]:
        """Play the rounds of one epoch, and yield the traffic of each."""
        for update_D in self.rounds(epoch):
            self.watch.observe(update_D)
            yield self.compressor.traffic

    def epoch(self, epoch: int) -> Row:
        """Play all rounds of one epoch. Return its row of the record, without the evaluation."""
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
            if self.config.bad_message == "skip":  # count the messages that were left out
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
        """Return accuracy (0..1) and mean loss on the test samples, or on the characters of a test text.

        The statistics of the clients are averaged for it. After the `last` epoch, with `test_unused`,
        the unused training images are tested too, and "right" has a flag for each image that says
        whether it was classified right (see `pack_flags`).
        """
        starts = range(0, self.feed.test_count(last), _EVALUATED_AT_ONCE)
        parts = [slice(start, start + _EVALUATED_AT_ONCE) for start in starts]
        trainer = self.federation.trainer
        each = trainer.each if isinstance(trainer, ClientThreads) else map
        with self.federation.evaluated():
            evaluated = list(each(self._evaluate_part, parts))
        right = torch.cat([right for _, right in evaluated]).cpu()
        loss = sum(loss for loss, _ in evaluated) / len(right)
        row = {"accuracy": int(right.sum()) / len(right), "loss": loss}
        return row | ({"right": pack_flags(right)} if last and self.config.test_unused else {})

    @torch.no_grad()
    def _evaluate_part(self, part: slice) -> tuple[float, Tensor]:
        """Return the summed loss of a part of the test samples, and for each whether it is right, bool."""
        inputs, labels = self.feed.test(part)
        pieces = inputs.split(len(inputs) if self.device.type == "cuda" else _CACHED_IMAGES)
        with _make_precision(self.config)():
            scores = torch.cat([self.flat.model(piece) for piece in pieces]).float()
        scores, labels = scores.flatten(0, -2), labels.flatten()
        loss = float(F.cross_entropy(scores, labels, reduction="sum"))
        return loss, scores.argmax(1) == labels

    def state_dict(self) -> dict[str, Any]:
        return self.federation.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.federation.load_state_dict(state)


def pack_flags(right: Tensor) -> str:
    """Return (M,) bool as text in base64: eight flags per byte, the first in the highest bit."""
    return base64.b64encode(np.packbits(right.numpy()).tobytes()).decode()


def read_outcomes(record: dict[str, Any]) -> np.ndarray | None:
    """Return which of the images tested after the last epoch were classified right, (images,) bool.

    Returns None if the record did not keep it, or if not one of them was. Raises ValueError if it
    contradicts the accuracy.
    """
    last = record["rows"][-1] if record["rows"] else {}
    if "right" not in last:
        return None
    # the flags that `pack_flags` packed, with the bits that fill the last byte
    padded = np.unpackbits(np.frombuffer(base64.b64decode(last["right"]), np.uint8)).astype(bool)
    if not last["accuracy"]:
        return None  # then the number of images cannot be told
    count = round(padded.sum() / last["accuracy"])
    short = len(padded) - count  # the last byte may be filled with zeros
    if not 0 <= short < 8 or padded[count:].any() or padded.sum() / count != last["accuracy"]:
        raise ValueError(
            f"right: got {padded.sum()} of {len(padded)} images, allowed: the share that the record's "
            f"accuracy gives, {last['accuracy']}"
        )
    return padded[:count]


Spans = list[tuple[int, int]]  # of tested images: the first one, and the one after the last


def measure_accuracy(record: dict[str, Any], spans: Spans) -> float:
    """Return the final accuracy, 0..1, on a part of the images that a run was tested on.

    The tested images are the test images, followed by the training images that nobody trained on.
    Raises ValueError if the record did not keep which of them were right, or has fewer of them.
    """
    right = read_outcomes(record)
    last = max(end for _, end in spans)
    if right is None or last > len(right):
        there = "it does not say which were right" if right is None else f"{len(right)} were tested"
        name = f"record {record['digest']}"
        raise ValueError(f"{name}: tested images up to {last} are asked for, but {there}")
    return float(np.concatenate([right[start:end] for start, end in spans]).mean())


def _phase(config: RunConfig, rounds: int, t: int) -> Phase:
    """Return the phase of round t: its rate, whether it is dense, and how much larger its masks are."""
    epoch, index = divmod(t, rounds)
    eta, warm = config.learning_rate_at(epoch + index / rounds), config.warmup
    dense = epoch < warm and config.scheme.dense_warmup
    return Phase(eta, dense, config.scheme.warmup_masks if epoch < warm else 1)


def _make_precision(config: RunConfig) -> Callable[[], contextlib.AbstractContextManager]:
    """Make the function that opens a context in which passes have the configured precision."""
    kind, enabled = config.torch_device.type, config.precision == "bf16"
    autocast = partial(torch.autocast, kind, torch.bfloat16, enabled=enabled)
    if not uses_bf16_convolutions(config):
        return autocast

    @contextlib.contextmanager
    def with_convolutions() -> Iterator[None]:
        with autocast(), Bf16Convolutions():
            yield

    return with_convolutions


class CrossEntropy:
    """The loss of a federation: mean cross entropy, with passes in the configured precision."""

    def __init__(self, config: RunConfig):
        self.precision = _make_precision(config)

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.scores(model, inputs).flatten(0, -2), labels.flatten())

    def scores(self, model: nn.Module, inputs: Tensor) -> Tensor:
        with self.precision():
            return model(inputs).float()

    @staticmethod
    def each(scores_NBK: Tensor, labels_NB: Tensor) -> Tensor:
        """Return each client's loss, (N,), where `__call__` returns a single one."""
        losses = F.cross_entropy(scores_NBK.flatten(0, 1), labels_NB.flatten(), reduction="none")
        return losses.view_as(labels_NB).mean(1)


def make_run_model(config: RunConfig, classes: int) -> nn.Module:
    """Make the model of a configuration."""
    if config.dataset == "text":
        return GPT(classes, config.width, config.context)
    return tcs_core.build_model(config.model, config.width, classes)


def _deal_samples(config: RunConfig, data: Dataset) -> Tensor:
    """Deal out the training samples to the clients, (N, M). Raises ValueError if they are too few."""
    total, clients = len(data.train_labels), config.client_count
    if clients > total:
        raise ValueError(f"clients: got {clients}, allowed: at most the {total} training samples")
    each = total // clients
    if config.batch > each:
        raise ValueError(
            f"batch_size: got {config.batch_size} (a step of {config.batch} samples), "
            f"allowed: at most the {each} samples of a client"
        )
    if config.scheme.local_steps > each // config.batch:
        raise ValueError(
            f"local_steps: got {config.scheme.local_steps} ({config.scheme.name}), allowed: at "
            f"most {each // config.batch}, the batches of {config.batch} in a client's {each} samples"
        )
    alpha = None if config.scheme.centralized else config.dirichlet_alpha
    generator = generator_for(config.seed, _PARTITION)
    return partition(data.train_labels, clients, alpha, generator)
