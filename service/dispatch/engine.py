"""The port through which runs reach an engine that executes them."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import httpx

JobState = Literal["waiting", "running", "ended"]


JOB_PREFIX = "affidavit-"


JOB_ID = re.compile(rf"{JOB_PREFIX}([0-9a-f-]{{36}})-([0-9]+)")


log = logging.getLogger("affidavit.service.dispatch")


class EngineUnavailable(Exception):
    """The engine did not respond; the next round tries again."""


class JobRefused(EngineUnavailable):
    """The engine refused the request, for the reason in the text; other jobs are unaffected."""


def request_json(
    client: httpx.Client, method: str, url: str, *, accept: Collection[int] = (), **arguments: Any
) -> Any:
    """Return the JSON of an engine's response, or an empty object for a status in ``accept``.

    Raises ``JobRefused`` and ``EngineUnavailable``.
    """
    try:
        response = client.request(method, url, **arguments)
        return {} if response.status_code in accept else response.raise_for_status().json()
    except httpx.HTTPStatusError as error:
        # The text may be a traceback, whose last line is the reason.
        reason = error.response.text.strip().rpartition("\n")[2]
        message = f"HTTP {error.response.status_code}: {reason[-500:]}"
        raise JobRefused(message) from None
    except (httpx.HTTPError, ValueError, OSError) as error:
        raise EngineUnavailable(f"{method} {url}: {error}") from None


@contextmanager
def log_refusal() -> Iterator[None]:
    """Log a job that the engine refuses, so that the other jobs are still handled."""
    try:
        yield
    except JobRefused as error:
        log.warning("a job was refused: %s", error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The ``number``-th job of a run, with ``gpus`` on each of its ``hosts``.

    ``memory`` is in MiB; 0 is the engine's default.
    """

    run: str
    number: int
    queue: str
    gpus: int = 0
    hosts: int = 1
    memory: int = 0

    @property
    def id(self) -> str:
        """The job's id in the engine; submitting the id again has no effect."""
        return job_id_of(self.run, self.number)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Options of ``affidavit worker``; its name is the job's id."""
        ranks = ("--gpu", "--processes", str(self.gpus)) if self.gpus else ()
        hosts = ("--hosts", str(self.hosts)) if self.hosts > 1 else ()
        return ("--run", self.run, "--queue", self.queue, "--name", self.id, *ranks, *hosts)


def job_id_of(run: str, number: int) -> str:
    """Return the id of the ``number``-th job of a run."""
    return f"{JOB_PREFIX}{run}-{number}"


class Engine(Protocol):
    """The interface of an engine; methods raise ``EngineUnavailable`` or ``JobRefused``."""

    def jobs(self) -> Mapping[str, JobState]:
        """Return the states of jobs with ``JOB_PREFIX``; ended jobs may be missing."""

    def submit(self, job: Job) -> None:
        """Submit a job; does nothing if a job of that id exists."""

    def cancel(self, job_id: str) -> None:
        """Terminate a job; does nothing if it has ended or is unknown."""

    def dashboard_url(self, job_id: str) -> str | None:
        """Return the URL of a job in the engine's dashboard."""
