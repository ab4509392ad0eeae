"""Measure how much one flooding client of 64 delays the new plans of the others.

63 clients each send a new plan (Poisson, a quarter of a second of accounting) a few times a minute.
In every second turn the last client floods the service: it keeps posting plans that take minutes
(balls in bins with BLT noise to solve for), and disconnects from half of them. The table shows the
other clients' median and 99th percentile with and without the flood, the ratio of the 99th
percentiles, and the longest response time of ``/livez`` during the flood.

    python -m bench.fair_share [SECONDS] [TURNS]
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any

from affidavit.plan import canonical_json
from affidavit.service.core.database import open_engine
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from bench.service import PLAN, Service, databases, say

OTHERS = 63
ORDINARY: dict[str, Any] = {
    **PLAN,
    "dataset": {"name": "toy", "size": 60_000},
    "sampling": {"scheme": "poisson", "lot_size": 256},
    "target": {"epsilon": 8, "delta": 1e-6},
    "steps": 1000,
}
LONG: dict[str, Any] = {
    **{name: value for name, value in PLAN.items() if name != "steps"},
    "dataset": {"name": "toy", "size": 60_000},
    "sampling": {"scheme": "balls_in_bins", "lot_size": 60},
    "noise": {"kind": "blt", "buffers": 4},
    "epochs": 10,
}
PAUSE = 40.0
"""Seconds between two plans of one of the others, on average."""
FLOODING = 40
"""Connections of the one that floods."""

numbers = itertools.count()


def tokens(url: str) -> list[str]:
    """Create a token for each client."""
    engine = open_engine(url)
    store, now = TokenRepository(engine), datetime.now(UTC)
    texts = [
        store.new(f"client{number}", [Scope.SUBMIT], 1, by="bench", at=now)[1].text
        for number in range(OTHERS + 1)
    ]
    engine.dispose()
    return texts


def post(service: Service, token: str, plan: dict[str, Any], *, hang_up: bool = False) -> int:
    """Send a new plan; return the status of the response, or 0 without one."""
    more = next(numbers) * 1e-5
    if plan is LONG:
        plan = {**plan, "target": {"epsilon": 8 + more, "delta": 1e-6}}
        noise: dict[str, Any] = {"name": "all", "clip_norm": 1}
    else:
        noise = {"name": "all", "clip_norm": 1, "noise_multiplier": 1.1 + more}
    connection = HTTPConnection("127.0.0.1", service.port, timeout=300)
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    body = canonical_json({**plan, "releases": [noise]})
    try:
        connection.request("POST", "/v1/certificates", body, head)
        return 0 if hang_up else connection.getresponse().status
    finally:
        connection.close()


@contextmanager
def flood(service: Service, token: str) -> Iterator[None]:
    """Run a client with many connections and long plans, which disconnects from half of them."""
    stop = Event()

    def run(number: int) -> None:
        while not stop.is_set():
            with suppress(OSError, HTTPException):
                post(service, token, LONG, hang_up=number % 2 == 0)
            stop.wait(0.2)

    threads = [Thread(target=run, args=(number,), daemon=True) for number in range(FLOODING)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()


@contextmanager
def watched(service: Service, took: list[float]) -> Iterator[None]:
    """Append the response time of ``/livez`` four times a second."""
    stop = Event()

    def run() -> None:
        while not stop.wait(0.25):
            begun = time.perf_counter()
            connection = HTTPConnection("127.0.0.1", service.port, timeout=300)
            connection.request("GET", "/livez")
            if connection.getresponse().status != 200:
                raise SystemExit("/livez failed")
            connection.close()
            took.append(time.perf_counter() - begun)

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def others(service: Service, texts: list[str], seconds: float) -> list[float]:
    """Return the response times of clients that send at random times."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    def run(token: str) -> None:
        time.sleep(random.uniform(0, min(2 * PAUSE, seconds)))
        while time.perf_counter() < end:
            begun = time.perf_counter()
            status = post(service, token, ORDINARY)
            if status != 201:
                raise SystemExit(f"answered {status}")
            took.append(time.perf_counter() - begun)
            left = end - time.perf_counter()
            time.sleep(max(0.0, min(left, random.uniform(0, 2 * PAUSE))))

    threads = [Thread(target=run, args=(token,)) for token in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def main() -> None:
    """Measure and print a table."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    say(
        "| database | others alone, p50 and p99 | beside a flood, p50 and p99 | ratio of p99 "
        "| `/livez` beside it, longest |"
    )
    say("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory, databases(Path(directory)) as urls:
        for kind, url in urls.items():
            home = Path(directory) / kind
            home.mkdir()
            with ExitStack() as rest:
                service = Service(url, home, rest)
                texts = tokens(url)
                others(service, texts[1:], PAUSE / 2)  # warms up
                alone: list[float] = []
                beside: list[float] = []
                alive: list[float] = []
                for _ in range(turns):
                    alone += others(service, texts[1:], seconds)
                    with flood(service, texts[0]), watched(service, alive):
                        time.sleep(3)
                        beside += others(service, texts[1:], seconds)
                    time.sleep(5)
            p50, p99 = (
                [statistics.quantiles(took, n=100)[at] for took in (alone, beside)]
                for at in (49, 98)
            )
            say(
                f"| {kind} | {p50[0] * 1e3:.0f} and {p99[0] * 1e3:.0f} ms | "
                f"{p50[1] * 1e3:.0f} and {p99[1] * 1e3:.0f} ms | {p99[1] / p99[0]:.2f} "
                f"| {max(alive) * 1e3:.0f} ms |"
            )


if __name__ == "__main__":
    main()
