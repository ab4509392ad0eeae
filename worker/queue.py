"""The client of a running service's queue, with a token of the scope ``work``.

A worker has no database password: every report goes through the service, which checks it. No
answer, 429 and 5xx raise ``Unreachable`` and may be retried: renewing, starting and completing
are idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from affidavit.worker.lease import ClaimRequest, Job, LeaseLost, Refused, Renewal, Unreachable

TIMEOUT = 30.0
"""Seconds."""
LOST = frozenset({"lease_lost", "not_found"})


class RunQueue:
    """The queue over HTTP; thread-safe.

    All methods raise ``Refused`` and ``Unreachable``; all but ``claim`` raise ``LeaseLost``.
    """

    def __init__(self, server: str, token: str | None) -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(base_url=server.rstrip("/"), headers=headers, timeout=TIMEOUT)

    def claim(self, request: ClaimRequest) -> Job | None:
        """Claim the run that is named, or the oldest; None if there is none to claim."""
        body = {"worker": request.worker, "lease": request.seconds, "run": request.run}
        claim = self._post(f"/v1/queues/{request.queue}/claims", body)
        return None if claim is None else Job.read(claim)

    def start(self, job: Job, plan_digest: str) -> None:
        """Start or resume the run, which commits its budget; no step is granted yet."""
        self._report(job, "start", {"plan_digest": plan_digest, "wants": 0})

    def renew(self, job: Job, steps: int, *, wants: int, head: str | None) -> Renewal:
        """Renew the lease after ``steps`` charged steps, and request up to ``wants`` in all.

        ``head`` is the digest of a record line that is durable on disk.
        """
        answer = self._report(job, "heartbeat", {"steps": steps, "wants": wants, "head": head})
        return Renewal(cancel=bool(answer["cancel"]), granted=int(answer["granted"]))

    def record(self, job: Job, part: int, lines: str) -> None:
        """Upload a part of the record, counted from 1."""
        self._report(job, "record", {"part": part, "lines": lines})

    def complete(self, job: Job, provenance: Mapping[str, Any]) -> None:
        """Complete the run with its signed provenance."""
        self._report(job, "complete", {"provenance": dict(provenance)})

    def fail(self, job: Job, code: str, message: str, *, again: bool = False) -> None:
        """Fail the run: free if it was not started, charged in full if it was.

        With ``again`` another worker may retry it.
        """
        self._report(job, "fail", {"code": code, "message": message, "again": again})

    def bundle(self, job: Job) -> bytes:
        """The certificate's signed bundle."""
        return self._request("GET", f"/v1/runs/{job.run}/bundle").content

    def status(self) -> bytes:
        """The service's status list."""
        return self._request("GET", "/v1/status").content

    def _report(self, job: Job, action: str, body: dict[str, Any]) -> Any:
        return self._post(
            f"/v1/runs/{job.run}/{action}", {"fence": job.fence, "secret": job.secret, **body}
        )

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._request("POST", path, body)
        try:
            return answer.json()
        except ValueError:
            raise Unreachable(f"{answer.url} did not return JSON") from None

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
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
            raise Unreachable(f"{answer.url} did not return a problem document") from None
        if code in LOST:
            raise LeaseLost(detail)
        raise Refused(code, detail)
