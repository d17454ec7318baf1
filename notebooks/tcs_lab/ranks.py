"""Ranks: one federation over many processes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tcs_core import NotFiniteError, RankError, Ranks, _positive

_SHORT = 240  # bytes that travel with their length, in one collective
_PATIENCE = 3.0  # seconds in which ranks that saw a failure say so; those that did not are named
_LENGTH = struct.Struct("<Q")


class ProcessRanks(Ranks):
    """Ranks joined by torch.distributed: gloo between CPUs, nccl between GPUs.

    `store` is the key-value store that all were started with: before a rank waits for others it
    writes there how often it has, so that those who wait too long can say for whom.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, device: Any):
        self.rank, self.size, self.timeout, self.device = rank, size, timeout, device
        self._store, self._count = store, 0
        self._arrive()

    def exchange(self, work: Callable[[], list[bytes]]) -> list[list[bytes]]:
        error = None
        try:
            sent = _framed([b"", *work()])
        except Exception as raised:  # any: the others must not wait for a rank that went wrong
            error, sent = raised, _framed([_error_json(raised)])
        with self._waiting():
            parts = [_frames(part) for part in self._all_gathered(sent)]
        failed = [(rank, part[0]) for rank, part in enumerate(parts) if part[0]]
        if failed:
            raise _first_error(failed, self.rank, error)
        return [part[1:] for part in parts]

    def together(self, work: Callable[[], Any]) -> Any:
        done: list[Any] = []
        self.exchange(lambda: done.append(work()) or [])
        return done[0]

    def first(self, work: Callable[[], Any]) -> Any:
        made = self.exchange(lambda: [] if self.rank else [json.dumps(work()).encode()])
        return json.loads(made[0][0])

    def in_turn(self, work: Callable[[], Any]) -> Any:
        leads = int(os.environ.get("LOCAL_RANK", self.rank)) == 0
        early = self.together(work if leads else lambda: None)
        late = self.together((lambda: None) if leads else work)
        return early if leads else late

    def rows(self, rows_N: Tensor) -> Tensor:
        parts = self.exchange(lambda: [rows_N.cpu().contiguous().numpy().tobytes()])
        joined = bytearray(b"".join(part[0] for part in parts))
        return (
            torch.frombuffer(joined, dtype=rows_N.dtype)
            .view(-1, *rows_N.shape[1:])
            .to(rows_N.device)
        )

    def check_same(self, tensor: Tensor, what: str) -> None:
        sums = self.rows(
            torch.tensor([zlib.crc32(tensor.cpu().contiguous().numpy().data)])
        ).tolist()
        others = [str(rank) for rank, value in enumerate(sums) if value != sums[0]]
        if others:
            raise RankError(
                f"{what}: rank {', '.join(others)} got another than rank 0, allowed: the same "
                "(machines of one kind; a scheme of your own may keep state in observe only)"
            )

    def merged(self, state: dict[str, Any]) -> dict[str, Any]:
        own = _client_rows(state)
        if self.rank:
            self._send(_saved(own), 0)
            return state
        parts = [own] + [_loaded(self._receive(rank)) for rank in range(1, self.size)]
        cat = {key: torch.cat([part[key].cpu() for part in parts]) for key in own}
        return _with_client_rows(state, cat)

    def split(self, state: dict[str, Any], clients: int, device: Any) -> dict[str, Any]:
        if self.rank:
            return _loaded(self._receive(0), device)
        rows = _client_rows(state)
        for rank in reversed(range(self.size)):
            own = self.own(clients, rank)
            part = {key: value[own.start : own.stop].clone() for key, value in rows.items()}
            part = _with_client_rows(state, part)
            if rank:
                self._send(_saved(part), rank)
        return part

    # Transport ───────────────────────────────────────────────────────────────────────────────────

    def _all_gathered(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any length."""
        heads = self._gathered(
            _LENGTH.pack(len(data)) + data[:_SHORT], _LENGTH.size + _SHORT, "cpu"
        )
        lengths = [_LENGTH.unpack_from(head)[0] for head in heads]
        if max(lengths) <= _SHORT:
            bodies = [head[_LENGTH.size :] for head in heads]
        else:
            bodies = self._gathered(data, max(lengths), self.device)
        return [body[:length] for body, length in zip(bodies, lengths, strict=True)]

    def _gathered(self, data: bytes, size: int, device: Any) -> list[bytes]:
        own = torch.zeros(size, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(self.size)]
        dist.all_gather(parts, own.to(device))
        return [part.cpu().numpy().tobytes() for part in parts]

    def _send(self, data: bytes, rank: int) -> None:
        with self._waiting():
            dist.send(torch.tensor([len(data)]), rank)
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)

    def _receive(self, rank: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        with self._waiting():
            dist.recv(length, rank)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(data, rank)
        return data.numpy().tobytes()

    def _arrive(self) -> None:
        self._count += 1
        self._store.set(f"at/{self.rank}", str(self._count))

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around whatever waits for other ranks: what goes wrong there is put into words."""
        try:
            self._arrive()
            yield
        except RuntimeError as error:  # torch.distributed's own, DistError, is one
            raise RankError(f"rank {self.rank}: {self._absence(error)}") from error

    def _absence(self, error: RuntimeError) -> str:
        try:
            absent = self._absent()
        except RuntimeError:
            return "the ranks' store is gone: torchrun, or rank 0, has ended"
        names = ", ".join(f"rank {rank}" for rank in absent) or "no rank"
        reason = str(error).strip().split("\n")[0]
        return f"{names} did not come within {self.timeout:g} s, or has ended ({reason})"

    def _absent(self) -> list[int]:
        """Ranks that do not report a failure as well; first of all those that came here less often.

        Some of those are stuck one step behind, waiting for the same rank: they will report.
        """
        silent = [rank for rank in range(self.size) if rank != self.rank]
        behind = [rank for rank in silent if int(self._store.get(f"at/{rank}")) < self._count]
        self._store.set(f"failed/{self.rank}", "1")
        until = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):  # rank 0, with the store, has left
            while silent and time.monotonic() < until:
                time.sleep(0.05)
                silent = [rank for rank in silent if not self._store.check([f"failed/{rank}"])]
        return [rank for rank in silent if rank in behind] or silent or behind


def _error_json(error: Exception) -> bytes:
    diverged = error.client if isinstance(error, NotFiniteError) else None
    text = str(error) if isinstance(error, ValueError | OSError) else repr(error)
    return json.dumps({"text": text, "diverged": diverged}).encode()


def _first_error(failed: list[tuple[int, bytes]], rank: int, own: Exception | None) -> Exception:
    """The error that one process would have met first, marked as told to all."""
    told = [(who, json.loads(text)) for who, text in failed]
    diverged = [error["diverged"] for _, error in told]
    who, first = told[0]
    if None not in diverged:
        error: Exception = NotFiniteError(min(diverged))
    else:
        error = own if own and who == rank else RankError(f"rank {who}: {first['text']}")
    error.told_to_all = True
    return error


def _framed(parts: list[bytes]) -> bytes:
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def _frames(data: bytes) -> list[bytes]:
    parts, place = [], 0
    while place < len(data):
        end = place + _LENGTH.size + _LENGTH.unpack_from(data, place)[0]
        parts.append(data[place + _LENGTH.size : end])
        place = end
    return parts


def _saved(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _loaded(data: bytes, device: Any = "cpu") -> dict[str, Any]:
    return torch.load(io.BytesIO(data), map_location=device, weights_only=True)


_CLIENT_ROWS = ("statistics_NS", "errors_ND")  # of a federation's state: one row a client


def _client_rows(state: dict[str, Any]) -> dict[str, Tensor]:
    items = [*state.items(), *state["compressor"].items()]
    return {key: value for key, value in items if key in _CLIENT_ROWS}


def _with_client_rows(state: dict[str, Any], rows: dict[str, Tensor]) -> dict[str, Any]:
    def put(part: dict[str, Any]) -> dict[str, Any]:
        return part | {key: value for key, value in rows.items() if key in part}

    return put(state) | {"compressor": put(state["compressor"])}


TIMEOUT = 600.0  # seconds that a rank waits for another, unless $TCS_TIMEOUT or --timeout says so


def _world() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun tells; alone without it."""
    keys = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(os.environ.get(key) for key in keys):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def joined_ranks(
    device: str | torch.device = "cpu", timeout: float | None = None
) -> Iterator[Ranks]:
    """All processes that torchrun started, as `Ranks`; a process of its own is alone.

        with joined_ranks() as ranks:
            record = run(config, ranks=ranks)

    On a GPU every rank takes the one of its number on the machine. `timeout`, in seconds, is how
    long a rank waits for another, start-up included; it must be longer than a round, an evaluation
    or a checkpoint takes (default: $TCS_TIMEOUT, or 600).
    Raises RankError naming ranks that do not come, ValueError for a timeout that is none.
    """  # fmt: skip
    rank, size = _world()
    if size == 1:
        yield Ranks()
        return
    timeout, local = _timeout(timeout), int(os.environ.get("LOCAL_RANK", rank))
    gpus = torch.cuda.device_count() if torch.device(device).type == "cuda" else 0
    nccl = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", size))  # nccl wants a GPU a rank
    if gpus:
        torch.cuda.set_device(local % gpus)
    store = _common_store(rank, size, timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo", store=store, rank=rank, world_size=size,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    there = f"cuda:{local % gpus}" if nccl else "cpu"
    yield ProcessRanks(dist.PrefixStore("ranks", store), rank, size, timeout, there)
    dist.destroy_process_group()


def _timeout(given: float | None) -> float:
    text = os.environ.get("TCS_TIMEOUT", TIMEOUT) if given is None else given
    try:
        timeout = float(text)
    except ValueError:
        timeout = math.nan
    if not _positive(timeout):
        raise ValueError(f"timeout: got {text!r}, allowed: a positive number of seconds")
    return timeout


def _common_store(rank: int, size: int, timeout: float) -> dist.Store:
    """The store that torchrun, or rank 0, keeps; all ranks have come to it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent, wait = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        timedelta(seconds=timeout),
    )
    try:
        store = dist.TCPStore(
            host, port, size, rank == 0 and not agent, wait, wait_for_workers=False
        )
    except RuntimeError as error:
        raise RankError(
            f"rank {rank}: rank 0 did not come within {timeout:g} s: "
            f"nobody answers at {host}:{port}"
        ) from error
    store = dist.PrefixStore(f"tcs/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, wait)
    except RuntimeError as error:
        late = ", ".join(f"rank {r}" for r in range(size) if not store.check([keys[r]]))
        if rank == 0:
            time.sleep(_PATIENCE)  # the store may live here: the others read it too
        raise RankError(
            f"rank {rank}: {late} of {size} did not come within {timeout:g} s"
        ) from error
    return store
