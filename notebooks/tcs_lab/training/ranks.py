"""Ranks: one federation over many processes, joined by torch.distributed."""

from __future__ import annotations

import contextlib
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tcs_core import Arrival, Known, Link, Message, MessageError, NotFiniteError, unchanged


class RankError(RuntimeError):
    """Another rank is late, gone, or went wrong; the text names it."""


class Ranks:
    """The processes that share a federation. This one is alone; `joined_ranks` gives the others.

    Every method but `own` is called by all ranks, in the same order.
    """

    rank, size = 0, 1

    def own(self, count: int, rank: int | None = None) -> range:
        """Which of `count` things are this rank's (or that one's): a block, perhaps empty."""
        rank = self.rank if rank is None else rank
        return range(rank * count // self.size, (rank + 1) * count // self.size)

    def exchange(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` returns on every rank, in rank order; what it raises on one, all raise."""
        return [work()]

    def together(self, work: Callable[[], Any]) -> Any:
        """`work()` of this rank, if it went well on all."""
        done: list[Any] = []
        self.exchange(lambda: done.append(work()))
        return done[0]

    def first(self, work: Callable[[], Any]) -> Any:
        """`work()` of rank 0, on all ranks."""
        return self.exchange(lambda: None if self.rank else work())[0]

    def in_turn(self, work: Callable[[], Any]) -> Any:
        """`work()`, by one rank of every machine before the others: downloads, cached files."""
        leads = _local_rank(self.rank) == 0
        early = self.together(work if leads else lambda: None)
        late = self.together((lambda: None) if leads else work)
        return early if leads else late

    def rows(self, rows_N: Tensor) -> Tensor:
        """The rows of all ranks, in rank order, on this rank's device."""
        if self.size == 1:
            return rows_N
        return torch.cat(self.exchange(rows_N.cpu)).to(rows_N.device)

    def check_same(self, tensor: Tensor, what: str) -> None:
        """Raises RankError if the tensor is not the same, bit for bit, on all ranks."""
        if self.size == 1:
            return
        sums = self.exchange(lambda: zlib.crc32(tensor.cpu().contiguous().numpy().data))
        if others := [str(rank) for rank, value in enumerate(sums) if value != sums[0]]:
            raise RankError(
                f"{what}: rank {', '.join(others)} got another than rank 0, allowed: the same "
                "(machines of one kind; a scheme of your own may keep state in observe only)"
            )

    def merged(self, state: dict[str, Any]) -> dict[str, Any]:
        """A federation's state with all clients' rows on rank 0; elsewhere as it is."""
        return state

    def split(self, state: dict[str, Any], clients: int, device: Any) -> dict[str, Any]:
        """The inverse: rank 0's whole state, as the part of it that is this rank's."""
        return _on(state, device)


class ProcessRanks(Ranks):
    """Ranks joined by torch.distributed (gloo). What they exchange is pickled: they run the same
    program and trust each other, so join no machine that is not yours."""

    def __init__(self, rank: int, size: int, timeout: float):
        self.rank, self.size, self.timeout = rank, size, timeout

    def exchange(self, work: Callable[[], Any]) -> list[Any]:
        error, told = None, None
        try:
            value = work()
        except Exception as raised:  # any: the others must not wait for a rank that went wrong
            error, value = raised, None
            text = str(error) if isinstance(error, ValueError | OSError) else repr(error)
            told = text, error.client if isinstance(error, NotFiniteError) else None
        parts: list[Any] = [None] * self.size
        with self._waiting():
            dist.all_gather_object(parts, (told, value))
        if failed := [(rank, told) for rank, (told, _) in enumerate(parts) if told]:
            raise _first_error(failed, self.rank, error)
        return [value for _, value in parts]

    def merged(self, state: dict[str, Any]) -> dict[str, Any]:
        parts: list[Any] = [] if self.rank else [None] * self.size
        with self._waiting():
            dist.gather_object(_on(_client_rows(state), "cpu"), parts or None)
        if not parts:
            return state
        return _with_client_rows(state, _joined(parts))

    def split(self, state: dict[str, Any], clients: int, device: Any) -> dict[str, Any]:
        parts, own_part = [], [None]
        if self.rank == 0:
            rows = _client_rows(state)
            for own in (self.own(clients, rank) for rank in range(self.size)):
                part = {key: value[own.start : own.stop] for key, value in rows.items()}
                part["statistics_NS"] = part["statistics_NS"].clone()
                parts.append(_with_client_rows(state, part))
        with self._waiting():
            dist.scatter_object_list(own_part, _on(parts, "cpu") or None)
        return _on(own_part[0], device)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around whatever waits for other ranks, which have to come in time."""
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=self.timeout), wait_all_ranks=True)
            yield
        except RuntimeError as error:  # torch.distributed's own, DistError, is one
            raise RankError(f"rank {self.rank}: {self._absence(str(error))}") from error

    def _absence(self, error: str) -> str:
        """Who is missing: torch.distributed tells rank 0, and the others only that rank 0 left."""
        if late := re.search(r"Ranks? ([\d, ]+) failed to pass", error):
            return f"rank {late[1]} did not come within {self.timeout:g} s, or ended"
        if self.rank:
            return "rank 0 has ended, or named another that did"
        return f"another rank has ended ({error.splitlines()[0]})"


class ProcessLink(Link):
    """Clients in several processes, a block of them in each; every process is the server too.

    `exchange(work)` gives what `work()`, a list of bytes, returned in every process, in their
    order; what it raises in one, all raise. Everything that all know is computed in each alike.
    """

    def __init__(
        self, exchange: Callable[[Callable[[], list[bytes]]], list[list[bytes]]],
        process: int, processes: int, on_bad: str = "stop",
    ):  # fmt: skip
        super().__init__(unchanged, on_bad)
        self.exchange, self.process, self.processes = exchange, process, processes
        self.client_count = 0

    def own(self, clients: int) -> range:
        self.client_count = clients
        return self._of(self.process)

    def _of(self, process: int) -> range:
        count, all_ = self.client_count, self.processes
        return range(process * count // all_, (process + 1) * count // all_)

    def gather(
        self, known: Known, chosen: list[int], send: Callable[[int], Message]
    ) -> Iterator[Arrival]:
        mine = [n for n in chosen if n in self._of(self.process)]
        channel = self.channel or unchanged

        def sent() -> list[bytes]:
            return [channel(n, known.to_bytes(send(n))) for n in mine]

        arrived = [data for part in self.exchange(sent) for data in part]
        senders = [n for p in range(self.processes) for n in chosen if n in self._of(p)]
        data = dict(zip(senders, arrived, strict=True))
        for n in chosen:
            yield self.accept(known, n, data.pop(n))

    def accept(self, known: Known, n: int, data: bytes) -> Arrival:
        try:
            return super().accept(known, n, data)
        except MessageError as error:
            vars(error)["told_to_all"] = True  # who have the same bytes
            raise


def _first_error(failed: list[tuple[int, Any]], rank: int, own: Exception | None) -> Exception:
    """The error that one process would have met first, marked as told to all."""
    diverged = [client for _, (_, client) in failed]
    who, (text, _) = failed[0]
    if None not in diverged:
        error: Exception = NotFiniteError(min(diverged))
    elif own and who in (rank, 0):  # what rank 0 cannot use either, none can
        error = own
    else:
        error = RankError(f"rank {who}: {text}")
    vars(error)["told_to_all"] = True
    return error


# A federation's state ─────────────────────────────────────────────────────────────────────────────


def _client_rows(state: dict[str, Any]) -> dict[str, Any]:
    """What a state has of each client of this process: a tensor's rows, a list."""
    clients = state["compressor"]["clients"]
    return {"statistics_NS": state["statistics_NS"], "clients": clients}


def _with_client_rows(state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    compressor = state["compressor"] | {"clients": rows["clients"]}
    return state | {"statistics_NS": rows["statistics_NS"], "compressor": compressor}


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The client rows of all ranks, in rank order."""
    statistics_NS = torch.cat([part["statistics_NS"] for part in parts])
    return {
        "statistics_NS": statistics_NS,
        "clients": [client for part in parts for client in part["clients"]],
    }


def _on(value: Any, device: Any) -> Any:
    """All tensors of a state, or of a list of them, on a device."""
    if isinstance(value, dict):
        return {key: _on(inner, device) for key, inner in value.items()}
    if isinstance(value, list):
        return [_on(inner, device) for inner in value]
    return value.to(device) if isinstance(value, Tensor) else value


# Joining ──────────────────────────────────────────────────────────────────────────────────────────

TIMEOUT = 600.0  # seconds that a rank waits for another, unless $TCS_TIMEOUT or --timeout says so


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun tells; alone without it."""
    keys = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(os.environ.get(key) for key in keys):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _local_rank(rank: int) -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", rank))


@contextlib.contextmanager
def joined_ranks(timeout: float | None = None) -> Iterator[Ranks]:
    """All processes that torchrun started, as `Ranks`; a process of its own is alone.

        with joined_ranks() as ranks:
            record = run(config, ranks=ranks)

    Where there are GPUs every rank takes the one of its number on the machine. `timeout`, in seconds, is how
    long a rank waits for another, start-up included; it must be longer than a round, an evaluation
    or a checkpoint takes (default: $TCS_TIMEOUT, or 600).
    Raises RankError naming ranks that do not come, ValueError for a timeout that is none.
    """  # fmt: skip
    rank, size = world()
    if size == 1:
        yield Ranks()
        return
    seconds = _timeout(timeout)
    if torch.cuda.is_available():
        torch.cuda.set_device(_local_rank(rank) % torch.cuda.device_count())
    wait = timedelta(seconds=seconds)
    store = _common_store(rank, size, wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    yield ProcessRanks(rank, size, seconds)
    dist.destroy_process_group()  # not after an error: it would wait for those who are gone


def _timeout(given: float | None) -> float:
    text = os.environ.get("TCS_TIMEOUT", TIMEOUT) if given is None else given
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1e9:
            return float(text)
    raise ValueError(f"timeout: got {text!r}, allowed: a number of seconds, 0 < s <= 1e9")


def _common_store(rank: int, size: int, wait: timedelta) -> dist.Store:
    """The store that torchrun, or rank 0, keeps; all ranks have come to it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    late = f"did not come within {wait.total_seconds():g} s"
    try:
        tcp = dist.TCPStore(host, port, size, keeps, wait, wait_for_workers=False)
    except RuntimeError as error:
        raise RankError(f"rank {rank}: rank 0 {late}: nobody answers at {host}:{port}") from error
    store = dist.PrefixStore(f"tcs/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", tcp)
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, wait)
    except RuntimeError as error:
        absent = ", ".join(str(other) for other in range(size) if not store.check([keys[other]]))
        time.sleep(3 if keeps else 0)  # the others read the store too
        raise RankError(f"rank {rank}: rank {absent} of {size} {late}") from error
    return store
