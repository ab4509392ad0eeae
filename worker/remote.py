"""The queue of a running service, over HTTP, with a token of the scope ``work``.

A worker has no password of the database: all that it can say about a run goes through the
service, which checks it. What the service refuses for now (no answer, 429, 5xx) is
``Unreachable`` and may be said again: to renew, start or complete twice alike does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from affidavit.worker.queue import Job, LeaseLost, Refused, Renewal, Unreachable, Wanting

SECONDS = 30.0
LOST = frozenset({"lease_lost", "not_found"})


class RemoteQueue:
    """The port of the queue, spoken to a service; safe to use from several threads."""

    def __init__(self, server: str, token: str | None) -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(base_url=server.rstrip("/"), headers=headers, timeout=SECONDS)

    def claim(self, wanting: Wanting) -> Job | None:
        """The next run that fits; None if none does."""
        body = {
            "worker": wanting.worker,
            "lease": wanting.seconds,
            "gpu": wanting.gpu,
            "memory": wanting.memory_mib,
            **({} if wanting.place is None else {"place": wanting.place}),
        }
        found = self._post(f"/v1/queues/{wanting.queue}/claims", body)
        return None if found is None else Job.read(found)

    def start(self, job: Job, plan_digest: str, place: str | None) -> None:
        """Begin the run or go on with it, with no step granted yet."""
        self._say(job, "start", {"plan_digest": plan_digest, "wants": 0, "place": place})

    def renew(self, job: Job, steps: int, *, wants: int, head: str | None) -> Renewal:
        """Hold the run longer; whether to stop it, and how many steps it may charge."""
        said = self._say(job, "heartbeat", {"steps": steps, "wants": wants, "head": head})
        return Renewal(cancel=bool(said["cancel"]), granted=int(said["granted"]))

    def record(self, job: Job, part: int, lines: str) -> None:
        """Send a part of the record."""
        self._say(job, "record", {"part": part, "lines": lines})

    def complete(self, job: Job, provenance: Mapping[str, Any]) -> None:
        """Report what was run."""
        self._say(job, "complete", {"provenance": dict(provenance)})

    def fail(self, job: Job, code: str, message: str, *, again: bool = False) -> None:
        """Give the run up, or back."""
        self._say(job, "fail", {"code": code, "message": message, "again": again})

    def bundle(self, job: Job) -> bytes:
        """The certificate's signed bundle."""
        return self._ask("GET", f"/v1/runs/{job.run}/bundle").content

    def status(self) -> bytes:
        """The service's status list."""
        return self._ask("GET", "/v1/status").content

    def _say(self, job: Job, what: str, body: dict[str, Any]) -> Any:
        return self._post(f"/v1/runs/{job.run}/{what}", {"fence": job.fence, **body})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._ask("POST", path, body)
        try:
            return answer.json()
        except ValueError:
            raise Unreachable(f"{answer.url} did not answer in JSON") from None

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise Unreachable(f"{self._client.base_url}: {error}") from None
        if answer.is_success:
            return answer
        if answer.status_code == 429 or answer.status_code >= 500:
            raise Unreachable(f"{answer.url} answered {answer.status_code}")
        try:
            problem = answer.json()
            code, detail = str(problem["code"]), str(problem["detail"])
        except (ValueError, KeyError, TypeError):
            raise Unreachable(f"{answer.url} did not answer as a service does") from None
        if code in LOST:
            raise LeaseLost(detail)
        raise Refused(code, detail)
