"""Files that are whole or as they were, and that a power cut leaves on the disk under their names.

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
from pathlib import Path

UNSUPPORTED = (errno.EBADF, errno.EINVAL)
"""What ``fsync`` says on file systems that keep names in an order of their own."""


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``content`` in one step, with ``mode`` from the first byte on.

    No reader sees half of it, and when this returns both are on the disk. Raises ``OSError``;
    then ``path`` is as it was, unless it was the disk that failed at the very last.
    """
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
