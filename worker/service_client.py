"""The worker's client of the service's run queue, with a token of the scope ``work``.

A missing answer, 429 and 5xx raise ``Unreachable``. A claim or a renewal raises it at once. All
other requests are idempotent, and are repeated for ``RETRY_SECONDS`` before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from affidavit.client import Client, Problem, Unreachable
from affidavit.worker.lease import Job, LeaseLost, Refused, Renewal

LEASE_LOST_CODES = frozenset({"lease_lost", "not_found"})
RETRY_SECONDS = 600.0

Answer = TypeVar("Answer")


class RunQueueClient:
    """The run queue of a service; thread-safe.

    All methods raise ``Refused`` and ``Unreachable``; all but ``claim`` raise ``LeaseLost``.
    """

    def __init__(self, server: str, token: str | None) -> None:
        self._client = Client(server, token)

    def claim(self, queue: str, worker: str, lease: int, run: str | None) -> Job | None:
        """Claim ``run``, or the oldest run, for ``lease`` seconds; None if there is none."""
        body = {"worker": worker, "lease": lease, "run": run}
        claim = _translate_errors(lambda: self._client.post(f"/v1/queues/{queue}/claims", body))
        return None if claim is None else Job.read(claim)

    def renew(self, job: Job, steps: int, *, wants: int, head: str | None) -> Renewal:
        """Renew the lease after ``steps`` charged steps, and request a total of ``wants``.

        ``head`` is the digest of a record line that is durable on disk.
        """
        report = {"steps": steps, "wants": wants, "head": head}
        return Renewal.model_validate(
            _translate_errors(lambda: self._post(job, "heartbeat", report))
        )

    def report(self, job: Job, action: str, **body: Any) -> Any:
        """Report the ``start``, a part of the ``record``, ``fail`` or ``complete`` of a run."""
        return _retry(lambda: self._post(job, action, body))

    def bundle(self, job: Job) -> bytes:
        """Fetch the certificate's signed bundle."""
        return _retry(lambda: self._client.content(f"/v1/runs/{job.run}/bundle"))

    def status(self) -> bytes:
        """Fetch the service's status list."""
        return _retry(self._client.status_list)

    def _post(self, job: Job, action: str, body: Mapping[str, Any]) -> Any:
        report = {"fence": job.fence, "secret": job.secret, **body}
        return self._client.post(f"/v1/runs/{job.run}/{action}", report)


def _translate_errors(call: Callable[[], Answer]) -> Answer:
    """Return the answer of ``call``; raise its problem as an error of the worker."""
    try:
        return call()
    except Problem as problem:
        if problem.status == 429 or problem.status >= 500:
            raise Unreachable(str(problem)) from None
        if problem.code in LEASE_LOST_CODES:
            raise LeaseLost(problem.detail) from None
        raise Refused(problem.code, problem.detail) from None


def _retry(call: Callable[[], Answer]) -> Answer:
    """Return the answer of ``call``, repeated until the service can be reached."""
    end, pause = time.monotonic() + RETRY_SECONDS, 0.2
    while True:
        try:
            return _translate_errors(call)
        except Unreachable:
            if time.monotonic() > end:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 10.0)
