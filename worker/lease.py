"""Runs as workers hold them: claims, leases, fencing tokens and their errors.

A worker that claims a run holds a lease on it under a fencing token, a number that grows with
every claim, and a random secret. Every call about the run carries both; once the lease has
expired, calls with the old token are refused (``LeaseLost``), however late they arrive. A run that
was claimed but not started goes back to the queue when its lease expires. A started run is handed
over: a worker only charges steps that it was granted, and its successor uses none that were
granted before, so it does not matter whether the lost worker still trains.

``affidavit.service.runs.queue`` keeps the queue in the service's tables; ``worker.queue`` is its
HTTP client.

References: C. Gray and D. Cheriton, "Leases", SOSP 1989; M. Kleppmann, "How to do distributed
locking", 2016 (fencing tokens).

>>> Job.read({"run": "../r", "fence": 1, "secret": 64 * "0", "certificate": "sha256:0",
...           "plan_digest": "sha256:1", "data": "digits", "model": "mlp", "output": "a",
...           "time_limit": None, "granted": 0, "previous": None})
Traceback (most recent call last):
affidavit.worker.lease.Refused: the service offered a run with an invalid run: '../r'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
TEXTS = {
    "run": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
    "secret": re.compile(r"[0-9a-f]{64}"),
    "certificate": _DIGEST,
    "plan_digest": _DIGEST,
    "data": re.compile(r"[A-Za-z0-9][!-~]{0,499}"),
    "model": re.compile(r"[A-Za-z0-9][!-~]{0,499}"),
    "output": re.compile(
        r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,99}){0,4}"
    ),
}
"""Patterns of the values that become paths and command-line arguments, as in the service."""
MINIMUM = {"fence": 1, "granted": 0, "time_limit": 1, "previous": 1}
NULLABLE = ("time_limit", "previous")


class LeaseLost(Exception):
    """The worker no longer holds the run; the service refuses all further reports."""


class Refused(Exception):
    """The queue refused a request; ``code`` is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimRequest:
    """A request for ``run``, or for the oldest run of ``queue``, with a lease of ``seconds``."""

    queue: str
    worker: str
    seconds: int
    run: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A claimed run: what to train, and the fencing token and secret of its lease.

    ``time_limit`` is in seconds from this attempt's first step. Earlier attempts may have charged
    up to ``granted`` steps; ``previous`` is the fencing token of the last one that started.
    """

    run: str
    fence: int
    secret: str = field(repr=False)
    certificate: str
    plan_digest: str
    data: str
    model: str
    output: str
    time_limit: int | None
    granted: int = 0
    previous: int | None = None

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """Parse a job; raises ``Refused`` if a value has not the form that a service offers.

        A worker does not trust the service with its paths and command lines.
        """
        fields = {name: document.get(name) for name in cls.__dataclass_fields__}
        for name, value in fields.items():
            if not _is_valid(name, value):
                raise Refused(
                    "bad_job",
                    f"the service offered a run with an invalid {name}: {str(value)[:80]!r}.",
                )
        return cls(**fields)  # type: ignore[arg-type]  # checked above


def _is_valid(name: str, value: Any) -> bool:
    if name in TEXTS:
        return isinstance(value, str) and TEXTS[name].fullmatch(value) is not None
    if value is None:
        return name in NULLABLE
    return type(value) is int and value >= MINIMUM[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewal:
    """Answer to a heartbeat: whether to stop, and how many steps the run may charge in all."""

    cancel: bool
    granted: int
