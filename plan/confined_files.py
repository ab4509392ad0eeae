"""Read files of a repository: regular ones whose real path lies in its folder.

A repository may have links to other files, pipes and devices, and another program may replace a
file by a link while it is read. So the file that was opened is compared with the one that the real
path names, and the opening never waits.
"""

from __future__ import annotations

import errno
import os
import stat
from functools import lru_cache


class OutsideFolder(OSError):
    """The real path of a file lies outside of the folder."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EXDEV, "it leads out of the repository", path)


def is_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether the real path of a file lies in the real path of a folder.

    What leads through more links than the system follows is nowhere, and counts as where it stands.
    """
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:  # realpath would follow thousands of links, and recurse
            return _is_below(os.path.abspath(path), folder)
    return _is_below(os.path.realpath(path), folder)


def _is_below(real: str, folder: str | os.PathLike[str]) -> bool:
    root = _real_folder(os.path.abspath(folder))
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)


@lru_cache(maxsize=8)
def _real_folder(path: str) -> str:
    return os.path.realpath(path)


def read_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str], limit: int) -> bytes:
    """Return the bytes of a regular file in ``folder``, cut one byte after ``limit``.

    Raises ``OSError``, which is ``OutsideFolder`` if links lead out of the folder.
    """
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode) and not is_inside(path, folder):
        raise OutsideFolder(os.fspath(path))
    _require_regular(state, path)  # opening a device may already change it
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as stream:
        opened = os.fstat(stream.fileno())
        _require_regular(opened, path)
        real = os.path.realpath(path)
        if not _is_below(real, folder) or not os.path.samestat(opened, os.stat(real)):
            raise OutsideFolder(os.fspath(path))
        size = min(opened.st_size, limit) + 1
        raw = stream.read(size)  # not limit + 1, which takes memory for as much
        return raw + stream.read(limit + 1 - size) if len(raw) == size else raw


def _require_regular(state: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device", os.fspath(path))
