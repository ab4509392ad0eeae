"""The port to an engine that executes runs, and the jobs that it is handed."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import httpx

JobState = Literal["waiting", "running", "ended"]
PREFIX = "affidavit-"
JOB = re.compile(rf"{PREFIX}([0-9a-f-]{{36}})-([0-9]+)")

log = logging.getLogger("affidavit.service.dispatch")


class EngineUnavailable(Exception):
    """The engine did not answer; the next round tries again."""


class JobRefused(EngineUnavailable):
    """The engine answered and refused, for the reason in the text; other jobs go on."""

    @classmethod
    def by(cls, answer: httpx.Response) -> Self:
        """The refusal in an answer, whose text may be a traceback that ends in the reason."""
        reason = answer.text.strip().rpartition("\n")[2]
        return cls(f"HTTP {answer.status_code}: {reason[-500:]}")


def ask(
    client: httpx.Client, method: str, url: str, *, same: Collection[int] = (), **sent: Any
) -> Any:
    """The JSON that an engine answers; an empty object with a status in ``same`` as success.

    Raises ``JobRefused`` and ``EngineUnavailable``.
    """
    try:
        answer = client.request(method, url, **sent)
        return {} if answer.status_code in same else answer.raise_for_status().json()
    except httpx.HTTPStatusError as error:
        raise JobRefused.by(error.response) from None
    except (httpx.HTTPError, ValueError, OSError) as error:
        raise EngineUnavailable(f"{method} {url}: {error}") from None


@contextmanager
def others_go_on() -> Iterator[None]:
    """Let a job that the engine refuses hold up no other."""
    try:
        yield
    except JobRefused as error:
        log.warning("a job was refused: %s", error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job of a run, the ``number``-th, with so many ``gpus`` on each of its ``hosts``.

    ``memory`` is in MiB, 0 for the engine's default.
    """

    run: str
    number: int
    queue: str
    gpus: int = 0
    hosts: int = 1
    memory: int = 0

    @property
    def id(self) -> str:
        """What engines know it by: a second submission is of the same job."""
        return job_id_of(self.run, self.number)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Options of ``affidavit worker``; the worker's name tells which job claimed a run."""
        ranks = ("--gpu", "--processes", str(self.gpus)) if self.gpus else ()
        hosts = ("--hosts", str(self.hosts)) if self.hosts > 1 else ()
        return ("--run", self.run, "--queue", self.queue, "--name", self.id, *ranks, *hosts)


def job_id_of(run: str, number: int) -> str:
    """The id of the ``number``-th job of a run."""
    return f"{PREFIX}{run}-{number}"


class Engine(Protocol):
    """What is needed of an engine; all methods raise ``EngineUnavailable`` or ``JobRefused``."""

    def jobs(self) -> Mapping[str, JobState]:
        """The jobs that it knows whose ids have our prefix; it may forget those that ended."""

    def submit(self, job: Job) -> None:
        """Submit a job; nothing happens if one of that id exists."""

    def cancel(self, job_id: str) -> None:
        """End a job, as a signal would; nothing happens if it has ended or is unknown."""

    def page(self, job_id: str) -> str | None:
        """A URL of the engine's dashboard about a job."""
