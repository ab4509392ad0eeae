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

UNSUPPORTED = (errno.EBADF, errno.EINVAL)
"""What ``fsync`` says on file systems that keep names in an order of their own."""


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``content`` in one step, with ``mode`` from the first byte on.

    No reader sees half of it, and when this returns both are on the disk. A device or a pipe is
    written to, and not replaced. Raises ``OSError`` with the name of ``path``; then ``path`` is as
    it was, unless it was the disk that failed at the very last.
    """
    try:
        stream_of_shell = path.is_relative_to("/dev") and path.is_symlink()  # like /dev/stdout
        if stream_of_shell or path.is_char_device() or path.is_fifo():
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
    """Write all of ``content``, of which one call may write less; raises ``OSError``."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def fsync_directory(folder: Path) -> None:
    """Have the names in ``folder`` on the disk; raises ``OSError``. Windows opens no folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


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
