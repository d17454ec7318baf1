"""Files: written whole or not at all, locks between processes, the cache folder."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def cache_folder() -> Path:
    """Where decoded data and checkpoints live: $TCS_CACHE, or tcs-core in the user's cache."""
    try:
        if given := os.environ.get("TCS_CACHE"):
            return Path(given).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tcs-core"
    except RuntimeError as error:  # no home folder
        raise ValueError(f"the cache folder: {error} Set $TCS_CACHE to a folder") from error


def _write_whole(path: Path, write: Callable[[Any], Any]) -> None:
    """The file appears complete under its name, or not at all, also if the process is killed.

    What a killed process left behind of an earlier try is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    file, part = _new_part(path)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(part, 0o644)
            if fcntl:
                os.replace(part, path)
        if not fcntl:  # Windows renames no open file, so nobody sweeps one away either
            os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def _new_part(path: Path) -> tuple[Any, Path]:
    """A new file beside `path`, open and locked, so that `_sweep` leaves it alone; its name."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
        file = os.fdopen(handle, "wb")
        if _try_lock(file) and os.path.exists(name):
            return file, Path(name)
        file.close()


def _sweep(path: Path) -> None:
    """Removes what killed processes left of `path`; a part that is being written is locked."""
    for part in path.parent.glob(f".{glob.escape(path.name)}-*.part"):
        with contextlib.suppress(OSError), part.open("r+b") as file:
            if _try_lock(file):
                part.unlink()


_POLL_SECONDS = 0.2  # how often a waiting process looks again


def _try_lock(file: Any) -> bool:
    """Locks an open file for this process until it is closed; False if another process has it."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks: go on without
        return True
    return True


def _lock_file(path: Path) -> Any | None:
    """The open and locked file at `path`, made if need be; None if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("a+b")
        if not _try_lock(file):
            file.close()
            return None
        with contextlib.suppress(OSError):  # its last owner may have removed it meanwhile
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


@contextlib.contextmanager
def _alone(path: Path, waiting: Callable[[str], None] | None) -> Iterator[bool]:
    """One process at a time has the lock that belongs to `path`: True, or False if it is taken.

    With `waiting`, a function that is told what for, waits for the other process.
    """
    mark = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:12]
    lock = cache_folder() / "locks" / f"{path.stem[:80]}-{mark}.lock"
    file = _lock_file(lock)
    if file is None and waiting:
        waiting(path.stem)
        while file is None:
            time.sleep(_POLL_SECONDS)
            file = _lock_file(lock)
    try:
        yield file is not None
    finally:
        if file is not None:
            with contextlib.suppress(OSError):  # Windows removes no open file
                lock.unlink()
            file.close()


def _say_waiting(what: str) -> None:
    print(f"waiting for another process, which works on {what}", file=sys.stderr, flush=True)
