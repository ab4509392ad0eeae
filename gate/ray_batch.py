"""A batch over the nodes of a Ray cluster, whose Python has Affidavit (``affidavit[ray]``).

Lines go out in chunks, a bounded number ahead of the output, to workers that Ray keeps between
chunks, so that an accountant is warm on each node. Ray repeats the chunks of a node that dies.
Results come back in the order of the lines.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from affidavit.gate.batch import Result, certify_line
from affidavit.gate.console import stop

CHUNK = 32
AHEAD = 4
"""Chunks in flight per processor."""


def certify_on(
    address: str,
    lines: Iterable[bytes | None],
    *,
    engine: str | None,
    second_opinion: bool,
    directory: Path,
) -> Iterator[Result]:
    """The results of ``lines``, in order; None among the lines sends what has come so far."""
    try:
        ray: Any = importlib.import_module("ray")
    except ModuleNotFoundError:
        stop("Ray is not installed: pip install 'affidavit[ray]'.")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        stop(f"no Ray cluster answers at {address}: {error}")
    certify_remote = ray.remote(num_cpus=1, max_retries=-1)(certify_chunk)
    pending: deque[Any] = deque()
    chunk: list[bytes] = []
    ahead = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))

    def send() -> None:
        if chunk:
            pending.append(certify_remote.remote([*chunk], engine, second_opinion, directory))
            chunk.clear()

    try:
        for line in lines:
            if line is not None:
                chunk.append(line)
            if line is None or len(chunk) == CHUNK:
                send()
            while pending and (len(pending) > ahead or ray.wait([pending[0]], timeout=0)[0]):
                yield from ray.get(pending.popleft())
        send()
        while pending:
            yield from ray.get(pending.popleft())
    finally:
        ray.shutdown()


def certify_chunk(
    lines: list[bytes], engine: str | None, second_opinion: bool, directory: Path
) -> list[Result]:
    """The results of a chunk, in a worker of the cluster."""
    return [certify_line(line, engine, second_opinion, directory) for line in lines]
