"""A lock for files that several processes update: one beside the file, given back on closing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``path``, whose folder is made if missing; raises ``OSError``."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        _lock(lock)
        yield


def _lock(file: IO[str]) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows locks bytes, and gives up after ten seconds
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(file, fcntl.LOCK_EX)
