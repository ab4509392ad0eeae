"""Atomic file writes, even across a power cut, and locks between processes.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     write_atomically(Path(folder) / "a", b"old")
...     write_atomically(Path(folder) / "a", b"new")
...     [(path.name, path.read_bytes()) for path in Path(folder).iterdir()]
[('a', b'new')]
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

FSYNC_UNSUPPORTED = (errno.EBADF, errno.EINVAL)
"""The errors of ``fsync`` on file systems that do not support it for folders."""


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``content`` in one step, with ``mode`` from the beginning.

    No reader sees a part of it, and on return content and name are on the disk. A device or a pipe
    is written to instead of replaced. Raises ``OSError`` with the name of ``path``, which is then
    unchanged unless the last flush to the disk failed.
    """
    try:
        is_stream = path.is_relative_to("/dev") and path.is_symlink()  # such as /dev/stdout
        if is_stream or path.is_char_device() or path.is_fifo():
            with path.open("wb") as stream:
                stream.write(content)
        else:
            _replace(path, content, mode)
    except OSError as error:
        error.filename = str(path)
        raise


def _replace(path: Path, content: bytes, mode: int) -> None:
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            Path(partial).chmod(mode)
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of ``content``, in several calls if needed; raises ``OSError``."""
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def fsync_directory(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk, except on Windows; raises ``OSError``."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in FSYNC_UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``path`` and create its folder if missing; raises ``OSError``."""
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
