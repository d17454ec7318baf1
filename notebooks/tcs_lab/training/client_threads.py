"""One core per client: each thread trains one client at a time, and runs its passes on one core.

This is for larger nets. A pass on one core rounds in the same way on any machine of the same kind, so
that the bits of a record do not depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from tcs_core import LocalTrainer
from tcs_lab.training.configuration import RunConfig


def uses_client_threads(config: RunConfig) -> bool:
    """Return whether clients train in threads: if that is configured, on a CPU, with several clients."""
    cpu = config.torch_device.type == "cpu"
    return config.client_threads and cpu and config.client_count > 1


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """In a `with` block, let torch use one core for the work of this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _FetchedBatches:
    """The feed of one client in one round, of batches that were fetched before."""

    def __init__(self, batches: list[Any]):
        self.batches = batches

    def batch(self, n: int, t: int | Tensor, tau: int) -> Any:
        return self.batches[tau]


def check_plain(trainer: LocalTrainer) -> None:
    """Raise ValueError for clients with optimizers, and for a model that keeps a part in eval mode in
    training. Trainers that train copies of the model allow neither."""
    kind = type(trainer).__name__
    if trainer.local_optimizer is not None:
        raise ValueError(f"local_optimizer: got one, allowed: none with {kind}; use LocalTrainer")
    with trainer.in_training_modes():
        is_whole = all(module.training for module in trainer.model.modules())
    if not is_whole:
        got = "got a part that stays in eval mode"
        raise ValueError(f"model: {got}, allowed: none with {kind}; use LocalTrainer")


def copy_trainer(trainer: LocalTrainer) -> LocalTrainer:
    """Make a trainer that trains one client while others train too. It gets another model and other
    gradients, and shares theta, statistics and losses with `trainer`."""
    made = LocalTrainer.__new__(LocalTrainer)
    vars(made).update(vars(trainer))
    made.use(copy.deepcopy(trainer.model).train())
    made.make_views()
    return made


class ClientThreads(LocalTrainer):
    """Train clients on as many threads as torch has when this object is made, each with a copy of the
    model. Raises ValueError for a model or settings that `check_plain` refuses.

    The thread that plays the round fetches all batches, and compresses the differences in the clients'
    order, so that rules, links and feeds need not know of threads. Nothing depends on which client is
    done first, except in nets that draw random numbers (dropout).

    Memory: gradients (D,) and activations for each thread and for one client more; with several local
    steps parameters, too.
    """

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        check_plain(self)
        threads = torch.get_num_threads()
        # one more than threads, since a difference may wait to be compressed
        self.free = [copy_trainer(self) for _ in range(threads + 1)]
        self.waiting = deque[int]()
        self.training: dict[int, tuple[LocalTrainer, Future[Tensor]]] = {}
        # the threads end with this object
        self.pool = ThreadPoolExecutor(threads, "client", torch.set_num_threads, (1,))

    @contextlib.contextmanager
    def lend_module(self) -> Iterator[None]:
        with _one_core(), super().lend_module():
            try:
                yield
            finally:
                self._end()  # before anything is put back

    def begin(self, chosen: list[int], t: int | Tensor, eta: float | Tensor) -> None:
        self.waiting.extend(chosen)

    def _end(self) -> None:
        """End all training. Only if a round failed is there something left to end."""
        self.waiting.clear()
        for _, task in self.training.values():
            task.cancel()
        wait(task for _, task in self.training.values())
        self.free += [trainer for trainer, _ in self.training.values()]
        self.training.clear()

    def local_training(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Return client n's summed gradients. Meanwhile the free trainers train the clients after it."""
        while self.waiting and self.free:
            self._start(self.waiting.popleft(), t, eta)
        trainer, task = self.training[n]
        gradient_D = task.result()
        del self.training[n]
        # used at the next call, after this difference is compressed
        self.free.append(trainer)
        return gradient_D

    def _start(self, n: int, t: int | Tensor, eta: float | Tensor) -> None:
        batches = [self.feed.batch(n, t, tau) for tau in range(self.scheme.local_steps)]
        trainer = self.free.pop()
        trainer.feed = _FetchedBatches(batches)
        self.training[n] = trainer, self.pool.submit(self._train, trainer, n, t, eta)

    @staticmethod
    def _train(trainer: LocalTrainer, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Train client n, on a thread of the pool."""
        trainer.put_theta()
        return trainer.local_training(n, t, eta)

    def each(self, work: Callable[[Any], Any], parts: Iterable[Any]) -> list[Any]:
        """Do `work` for all parts on the threads. Return the results in the order of the parts."""
        return list(self.pool.map(work, parts))
