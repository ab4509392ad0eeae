"""How often a caller may call: a bucket of requests for each, and a number at once.

Each caller has a bucket that holds one minute's requests and fills evenly, so that a burst is
served and a stream is slowed to the rate. Callers are counted by their token, and by their address
where they have none; an IPv6 caller owns at least 64 bits of address, which count as one.
Requests that show a bad token are counted against the address, so that they cannot use
up what belongs to a token's holder. The buckets are those of one process: two processes together
let through twice as much.

>>> limits = RateLimiter(per_minute=2, at_once=1)
>>> [limits.take("token:a", now=0.0) for _ in range(3)]
[0.0, 0.0, 30.0]
>>> limits.take("token:b", now=0.0)
0.0
>>> limits.fields("token:b", now=0.0)[1]
(b'ratelimit', b'"minute";r=1;t=30')
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict

MAX_BUCKETS = 10_000
"""Buckets in memory; the one unused for longest, and so fullest, is forgotten first."""


class RateLimiter:
    """The buckets of one process; belongs to one event loop."""

    def __init__(self, *, per_minute: int, at_once: int) -> None:
        self.per_minute = per_minute
        self.at_once = at_once
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._running: dict[str, int] = {}

    def take(self, caller: str, now: float | None = None) -> float:
        """Take one request from the caller's bucket.

        Returns 0, or the seconds until there is one where the bucket is empty.
        """
        moment = time.monotonic() if now is None else now
        left = self._left(caller, moment)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, moment)
        self._buckets.move_to_end(caller)
        while len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) * 60 / self.per_minute

    def fields(self, caller: str, now: float | None = None) -> tuple[tuple[bytes, bytes], ...]:
        """``RateLimit-Policy`` and ``RateLimit``: the limit, what remains, and when all is back.

        Reference: draft-ietf-httpapi-ratelimit-headers-10.
        """
        left = self._left(caller, time.monotonic() if now is None else now)
        full = math.ceil((self.per_minute - left) * 60 / self.per_minute)
        return (
            (b"ratelimit-policy", f'"minute";q={self.per_minute};w=60'.encode()),
            (b"ratelimit", f'"minute";r={int(left)};t={full}'.encode()),
        )

    def _left(self, caller: str, moment: float) -> float:
        """The requests in the caller's bucket."""
        left, since = self._buckets.get(caller, (float(self.per_minute), moment))
        return min(left + (moment - since) * self.per_minute / 60, float(self.per_minute))

    def begin(self, caller: str) -> bool:
        """Count a request as being answered, until ``end``; False where no other may be."""
        running = self._running.get(caller, 0)
        if running < self.at_once:
            self._running[caller] = running + 1
        return running < self.at_once

    def end(self, caller: str) -> None:
        """A request that ``begin`` counted was answered."""
        if self._running[caller] == 1:
            del self._running[caller]
        else:
            self._running[caller] -= 1


def retry_after(seconds: float) -> str:
    """The value of ``Retry-After``: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


def counted(address: str | None) -> str:
    """The name under which requests from ``address`` are counted.

    >>> counted("2001:db8::1") == counted("2001:db8::2"), counted("::ffff:192.0.2.1")
    (True, 'address:192.0.2.1')
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
