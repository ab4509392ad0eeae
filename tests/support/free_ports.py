"""Ports for servers that are told theirs before they listen.

A port that the system gives to a probe may be given to the next connection of anybody a moment
later. These lie below the ones that it gives out, and differ between processes that run tests
side by side.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from functools import cache

FIRST, NUMBER = 20_000, 12_000


@cache
def _turns(process: int) -> Iterator[int]:
    return itertools.count(process * 61)


def free_port() -> int:
    """A port of loopback that nobody listens on, and that this process asked for first."""
    for turn in itertools.islice(_turns(os.getpid()), NUMBER):
        port = FIRST + turn % NUMBER
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError(f"every port from {FIRST} to {FIRST + NUMBER} is in use")
