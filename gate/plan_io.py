"""Read plans and bundles from files, or from standard input (``-``)."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import BinaryIO

from affidavit.mechanisms.plan_files import MAX_BYTES, _unreadable

POLL_SECONDS = 0.05
"""Time to wait for a line before ``poll_lines`` yields None."""


def poll_lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """Yield each line of ``stream`` as it arrives, and None after ``POLL_SECONDS`` without one.

    Raises ``MalformedPlan`` for a line of more than ``MAX_BYTES``.
    """
    try:
        descriptor = stream.fileno()
        select.select([descriptor], [], [], 0)
    except OSError:  # a stream in memory, or Windows, which can only wait for sockets
        yield from stream
        return
    partial = bytearray()
    while True:
        if not select.select([descriptor], [], [], POLL_SECONDS)[0]:
            yield None
            continue
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            break
        partial += chunk
        if len(partial) > MAX_BYTES:
            raise _unreadable("too_large", f"a line is larger than {MAX_BYTES >> 20} MiB.")
        if b"\n" in chunk:
            *lines, partial = partial.split(b"\n")
            yield from map(bytes, lines)
    if partial:
        yield bytes(partial)
