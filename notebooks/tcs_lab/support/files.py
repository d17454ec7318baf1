"""Files: written whole or not at all, locks between processes, the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm


def cache_folder() -> Path:
    """Return the folder of decoded data and checkpoints: $TCS_CACHE, or tcs-core in the user's cache.

    Raises ValueError, which names the variable, if that is a file or if there is no home folder.
    """
    name = next((key for key in ("TCS_CACHE", "XDG_CACHE_HOME") if os.environ.get(key)), None)
    try:
        folder = Path(os.environ[name]).expanduser() if name else Path.home() / ".cache"
    except RuntimeError as error:  # no home folder
        raise ValueError(
            f"the cache folder: got none ({error}); set $TCS_CACHE to a folder"
        ) from error
    if folder.exists() and not folder.is_dir():
        what = f"${name}" if name else "the cache folder"
        raise ValueError(f"{what}: got {folder}, which is a file, allowed: a folder")
    return folder if name == "TCS_CACHE" else folder / "tcs-core"


def write_whole(path: Path, write: Callable[[Any], Any]) -> None:
    """Write a file so that it appears complete or not at all, also if the process is killed.

    `write` gets the open file. Partial files that killed processes left in the folder at least an
    hour ago are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f".*-{'[0-9a-f]' * 8}.part"):
        with contextlib.suppress(OSError):  # somebody else removed it
            if time.time() - old.stat().st_mtime > 3600:
                old.unlink()
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one that people should read
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


_unsaved: list[Path] = []  # the files that this process could not write, in order


def write_if_possible(path: Path, write: Callable[[Any], Any]) -> None:
    """Write a file that a notebook shows as well. The first time that one cannot be written, one line
    says so; the notebook goes on."""
    try:
        write_whole(path, write)
    except OSError as error:
        if not _unsaved:
            reason = f"{error.strerror or error}: {error.filename or path}"
            print(f"Nothing can be saved here ({reason}), but everything is shown.", flush=True)
        _unsaved.append(path)


def write_json(path: Path, content: Any) -> None:
    """Write a value as indented JSON; the file appears complete or not at all."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


@contextlib.contextmanager
def hold_lock(path: Path, wait_for: str | None = None) -> Iterator[bool]:
    """Hold the lock of `path` in a `with` block, unless another process holds it.

    Yields True if this process holds the lock, else False. With `wait_for`, a few words on what the
    lock is about, it waits for the other process instead. The operating system releases the lock when
    its process ends, however that happens. Processes with different cache folders do not see each
    other's locks.
    """
    mark = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:12]
    name = cache_folder() / "locks" / f"{path.stem[:80]}-{mark}.lock"
    try:
        name.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(name)
        with contextlib.suppress(Timeout):
            lock.acquire(blocking=False)
    except OSError as error:
        got = f"got {cache_folder()} ({error.strerror or error})"
        what_to_do = "a folder that can be written to; set $TCS_CACHE to one"
        raise ValueError(f"the cache folder: {got}, allowed: {what_to_do}") from error
    if wait_for and not lock.is_locked:
        say_waiting(wait_for)
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def say_waiting(what: str) -> None:
    """Say on stderr what this process waits for, above a progress bar if there is one."""
    tqdm.write(f"waiting for another process, which works on {what}", file=sys.stderr)
    sys.stderr.flush()
