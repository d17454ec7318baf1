"""A client a core: every thread trains one client at a time and has no more threads in a pass.

For larger nets. A pass on one core rounds the same on any machine of its kind, so that a record
does not depend on the number of threads, bit for bit.
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


def goes_a_client_a_thread(config: RunConfig) -> bool:
    """As configured, on a CPU; a single client has all threads to itself."""
    cpu = config.torch_device.type == "cpu"
    return config.client_threads and cpu and config.client_count > 1


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """What this thread does meanwhile, it does on one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Given:
    """The feed of one client in one round: batches that are there already."""

    def __init__(self, batches: list[Any]):
        self.batches = batches

    def batch(self, n: int, t: int | Tensor, tau: int) -> Any:
        return self.batches[tau]


def seat_of(trainer: LocalTrainer) -> LocalTrainer:
    """A trainer of one client at a time, beside others: it has a model and gradients of its own, and
    shares theta, statistics and losses with `trainer`."""
    seat = LocalTrainer.__new__(LocalTrainer)
    vars(seat).update(vars(trainer))
    seat.use(copy.deepcopy(trainer.model).train())
    seat.make_views()
    return seat


class ClientThreads(LocalTrainer):
    """Trains clients on as many threads as torch has when it is made.

    Differences are compressed in the clients' order, by the thread that plays the round, which also
    fetches all batches: rules, links and feeds need not know of threads. Nothing depends on which
    client is done first, but for nets that draw random numbers (dropout).

    Memory: activations, and (D,) gradients, of every thread and one more; with local steps
    parameters too.
    """

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        threads = torch.get_num_threads()
        seats = [seat_of(self) for _ in range(threads + 1)]  # one may wait to be compressed
        self.free, self.later = seats[:1], seats[1:]  # the very first pass may be compiled: alone
        self.waiting = deque[int]()
        self.training: dict[int, tuple[LocalTrainer, Future[Tensor]]] = {}
        # its threads end when it is forgotten
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
        """Nothing is trained any more. Only where a round went wrong is there something left."""
        self.waiting.clear()
        for _, task in self.training.values():
            task.cancel()
        wait(task for _, task in self.training.values())
        self.free += [seat for seat, _ in self.training.values()]
        self.training.clear()

    def local_training(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Client n's summed gradients. Meanwhile every free seat trains one of those after it."""
        while self.waiting and self.free:
            self._start(self.waiting.popleft(), t, eta)
        seat, task = self.training[n]
        gradient_D = task.result()
        del self.training[n]
        self.free += [seat, *self.later]  # at the next call: by then the difference is compressed
        self.later.clear()
        return gradient_D

    def _start(self, n: int, t: int | Tensor, eta: float | Tensor) -> None:
        batches = [self.feed.batch(n, t, tau) for tau in range(self.scheme.local_steps)]
        seat = self.free.pop()
        seat.feed = _Given(batches)
        self.training[n] = seat, self.pool.submit(self._train, seat, n, t, eta)

    @staticmethod
    def _train(seat: LocalTrainer, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """On a thread of the pool."""
        seat.put_theta()
        return seat.local_training(n, t, eta)

    def each(self, work: Callable[[Any], Any], parts: Iterable[Any]) -> list[Any]:
        """`work` of all parts, in their order, on the threads."""
        return list(self.pool.map(work, parts))
