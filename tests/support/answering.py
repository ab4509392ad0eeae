"""A service that was just started, waited for."""

from __future__ import annotations

import time

import httpx


def answering(url: str, seconds: float = 120.0) -> httpx.Response:
    """The answer of ``url`` once it is 200; ends this process if that takes too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            answer = httpx.get(url)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code == 200:
            return answer
        time.sleep(0.2)
    raise SystemExit(f"{url} did not answer 200 within {seconds:g} seconds")
