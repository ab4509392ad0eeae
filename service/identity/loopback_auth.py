"""Who needs no token: the person at this very machine, while there are no identities yet.

The embedded default asks for no ceremony, so a request without a token is answered while
all of this holds, and only then:

- the service was started on a loopback address and nowhere else;
- no token was ever made, and no OpenID provider is configured;
- the connection comes from a loopback address;
- no header says that somebody forwarded it, and it is no HTTP/1.0: a reverse proxy on this
  machine would bring the whole network in from 127.0.0.1, and nginx as it comes says so
  by nothing but its old version of HTTP;
- ``Host`` names this machine: a page of another site that had its own name resolve to
  127.0.0.1 (DNS rebinding) still says that name;
- ``Origin``, where a browser sends one, is this service, and it does not say that another
  site made it ask.

``X-Forwarded-For`` can thus take this away and never give it.

Whoever is let in this way may submit plans and read. They approve nothing, administer
nothing and take no work: those need to know who it was.

>>> came_directly("127.0.0.1", {"host": "localhost:8321"})
True
>>> came_directly("127.0.0.1", {"host": "localhost:8321", "x-forwarded-for": "127.0.0.1"})
False
>>> came_directly("127.0.0.1", {"host": "rebound.example:8321"})
False
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from affidavit.service.identity.actor import Actor, Scope

ANONYMOUS = Actor("anonymous@loopback", frozenset({Scope.SUBMIT, Scope.AUDIT}))

FORWARDED = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-proto",
    "x-forwarded-server",
    "x-real-ip",
    "x-client-ip",
    "x-original-forwarded-for",
    "cf-connecting-ip",
    "true-client-ip",
)
"""Headers that proxies add; one that adds none of them cannot be told from a person."""


def came_directly(
    address: str | None, headers: Mapping[str, str], http_version: str = "1.1"
) -> bool:
    """Whether a program on this machine sent the request to this service by its own name."""
    if address is None or not is_loopback(address) or http_version < "1.1":
        return False
    if any(name in headers for name in FORWARDED):
        return False
    host = headers.get("host", "")
    if not _names_loopback(host):
        return False
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    return origin is None or origin == f"http://{host}"


def is_loopback(address: str) -> bool:
    """Whether a literal IP address is one of this machine's loopback addresses."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _names_loopback(host: str) -> bool:
    """Whether a ``Host`` header is ``localhost`` or a loopback address, with any port."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  # raises where it is no port
    except ValueError:
        return False
    name = parts.hostname or ""
    return parts.netloc == host and "@" not in host and (name == "localhost" or is_loopback(name))
