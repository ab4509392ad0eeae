"""Rate limits: a bucket of requests per caller, and a limit of concurrent requests.

A bucket holds one minute's requests and fills evenly, so bursts are served and streams are slowed
to the rate. Callers are identified by their token, or else by their address; an IPv6 caller by 64
bits of address. Requests with an invalid token count against the address, so that they do not use
up the limit of a token's holder. Each process has its own buckets.

>>> limits = RateLimiter(per_minute=2, at_once=1)
>>> [limits.take("token:a", now=0.0) for _ in range(3)]
[0.0, 0.0, 30.0]
>>> limits.take("token:b", now=0.0)
0.0
>>> limits.headers("token:b", now=0.0)[1]
(b'ratelimit', b'"minute";r=1;t=30')
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict

MAX_BUCKETS = 10_000
"""Buckets in memory; the least recently used one is dropped first."""


class RateLimiter:
    """The buckets of one process; belongs to one event loop."""

    def __init__(self, *, per_minute: int, at_once: int) -> None:
        self.per_minute = per_minute
        self.at_once = at_once
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._running: dict[str, int] = {}

    def take(self, caller: str, now: float | None = None) -> float:
        """Take one request from the caller's bucket.

        Returns 0, or the seconds until the empty bucket has a request again.
        """
        now = time.monotonic() if now is None else now
        available = self._available(caller, now)
        allowed = available >= 1
        self._buckets[caller] = (available - 1 if allowed else available, now)
        self._buckets.move_to_end(caller)
        while len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - available) * 60 / self.per_minute

    def headers(self, caller: str, now: float | None = None) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers ``RateLimit-Policy`` and ``RateLimit``.

        Reference: draft-ietf-httpapi-ratelimit-headers-10.
        """
        available = self._available(caller, time.monotonic() if now is None else now)
        full = math.ceil((self.per_minute - available) * 60 / self.per_minute)
        return (
            (b"ratelimit-policy", f'"minute";q={self.per_minute};w=60'.encode()),
            (b"ratelimit", f'"minute";r={int(available)};t={full}'.encode()),
        )

    def _available(self, caller: str, now: float) -> float:
        """Return the requests in the caller's bucket."""
        available, since = self._buckets.get(caller, (float(self.per_minute), now))
        return min(available + (now - since) * self.per_minute / 60, float(self.per_minute))

    def begin(self, caller: str) -> bool:
        """Count a running request until ``end``; return False if the caller has too many."""
        running = self._running.get(caller, 0)
        if running < self.at_once:
            self._running[caller] = running + 1
        return running < self.at_once

    def end(self, caller: str) -> None:
        """End a request that ``begin`` counted."""
        if self._running[caller] == 1:
            del self._running[caller]
        else:
            self._running[caller] -= 1


def retry_after(seconds: float) -> str:
    """Return the value of ``Retry-After``: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


def key_of_address(address: str | None) -> str:
    """Return the key under which requests from ``address`` are counted.

    >>> key_of_address("2001:db8::1") == key_of_address("2001:db8::2")
    True
    >>> key_of_address("::ffff:192.0.2.1")
    'address:192.0.2.1'
    """
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return "address:unknown"
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return f"address:{parsed.ipv4_mapped}"
        return f"address:{ipaddress.ip_network((int(parsed), 64), strict=False)}"
    return f"address:{parsed}"
