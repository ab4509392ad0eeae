"""Limits of what is read: files that may have no end, and integers."""

from __future__ import annotations

import os

MAX_JSON_BYTES = 1024 * 1024
SMALLEST_POSITIVE = 1e-100
"""The least positive number: what is below it is meant as 0, or negative."""
MAX_INTEGER = 2**53 - 1
"""Larger integers are not exact in a double, so readers would disagree."""


def read_limited(path: str | os.PathLike[str], limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a file, cut one byte after ``limit``, because a device has no end.

    Raises ``OSError``.
    """
    with open(path, "rb") as stream:
        return stream.read(limit + 1)
