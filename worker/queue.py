"""The port of the queue: how a worker gets a run, keeps it, and gives account of it.

Who claims a run holds it for a while (a lease) under a fencing token, a number that grows with
every claim. Everything a worker says about a run carries the token; once the lease was given
up for lost, whatever still comes under the old token is refused (``LeaseLost``), however late.
A run that was claimed and never begun goes back to the queue when its lease is lost. One
that was begun is handed over: a worker charges no step that it was not granted, and whoever
goes on takes none that was granted before, so that it does not matter whether the one that is
not heard of any more still trains.

``affidavit.service.runs.queue`` keeps a queue in the service's own tables, ``worker.remote``
speaks to it over HTTP. Another engine can stand behind the same port.

References: C. Gray and D. Cheriton, "Leases", SOSP 1989; M. Kleppmann, "How to do distributed
locking", 2016 (fencing tokens).

>>> Job.read({"run": "../r", "fence": 1, "certificate": "sha256:0", "plan_digest": "sha256:1",
...           "data": "digits", "model": "mlp", "output": "a", "time_limit": None,
...           "granted": 0, "previous": None})
Traceback (most recent call last):
affidavit.worker.queue.Refused: the service offers a run whose run is '../r': that is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
TEXTS = {
    "run": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
    "certificate": _DIGEST,
    "plan_digest": _DIGEST,
    "data": re.compile(r"[A-Za-z0-9][!-~]{0,499}"),
    "model": re.compile(r"[A-Za-z0-9][!-~]{0,499}"),
    "output": re.compile(
        r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,99}){0,4}"
    ),
}
"""The forms of what folders and command lines are made of; the service takes no others either."""
LEAST = {"fence": 1, "granted": 0, "time_limit": 1, "previous": 1}
MAY_BE_NONE = ("time_limit", "previous")


class LeaseLost(Exception):
    """The run is not this worker's any more: what it does from now on counts for nothing."""


class Refused(Exception):
    """The queue does not take what was said; ``code`` is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Unreachable(Exception):
    """The queue cannot be asked now; asking again may help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanting:
    """What a worker asks for: a run of ``queue`` that fits what it has, for ``seconds``.

    ``place`` is the name of where it keeps checkpoints, the same for workers that share that.
    """

    queue: str
    worker: str
    seconds: int
    gpu: bool
    memory_mib: int
    place: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A claimed run: what to train, and the fencing token that it is held under.

    ``time_limit`` is in seconds from this attempt's first step. ``granted`` steps may have been
    charged by those who held it before; ``previous`` is the token under which it was begun last.
    """

    run: str
    fence: int
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
        """The job of its document; raises ``Refused`` where a service would not offer it.

        A worker does not take the service's word for what its folders are made of.
        """
        given = {name: document.get(name) for name in cls.__dataclass_fields__}
        for name, value in given.items():
            if not _is_fit(name, value):
                raise Refused(
                    "bad_job",
                    f"the service offers a run whose {name} is {str(value)[:80]!r}: that is none.",
                )
        return cls(**given)  # type: ignore[arg-type]  # it is fit


def _is_fit(name: str, value: Any) -> bool:
    if name in TEXTS:
        return isinstance(value, str) and TEXTS[name].fullmatch(value) is not None
    if value is None:
        return name in MAY_BE_NONE
    return type(value) is int and value >= LEAST[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewal:
    """What a run that is held longer is told: whether to stop, and how many steps it may charge."""

    cancel: bool
    granted: int


class Queue(Protocol):
    """What a worker does with a queue.

    All but ``claim`` raise ``LeaseLost``; all raise ``Refused`` and ``Unreachable``.
    """

    def claim(self, wanting: Wanting) -> Job | None:
        """The next run by priority, then age; None if none fits."""

    def start(self, job: Job, plan_digest: str, place: str | None) -> None:
        """Begin or go on: all is checked again and the budget committed, in one transaction."""

    def renew(self, job: Job, steps: int, *, wants: int, head: str | None) -> Renewal:
        """Hold the run longer, having charged ``steps`` and wanting to have charged ``wants``.

        ``head`` is the digest of a line of the record that is on the disk.
        """

    def record(self, job: Job, part: int, lines: str) -> None:
        """Send a part of the run's record, counted from 1."""

    def complete(self, job: Job, provenance: Mapping[str, Any]) -> None:
        """Report the signed provenance of what was run."""

    def fail(self, job: Job, code: str, message: str, *, again: bool = False) -> None:
        """Give up: free if the run was not begun, charged in full if it was.

        With ``again`` somebody else may go on with it.
        """
