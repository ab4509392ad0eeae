"""Reading of files that may have no end."""

from __future__ import annotations

import os

MAX_JSON_BYTES = 1024 * 1024


def read_limited(path: str | os.PathLike[str], limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a file, cut one byte after ``limit``, because a device has no end.

    Raises ``OSError``.
    """
    with open(path, "rb") as stream:
        return stream.read(limit + 1)
