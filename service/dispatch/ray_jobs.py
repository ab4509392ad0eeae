"""Ray's Jobs API over HTTP; the service needs no Ray.

Reference: Ray 2.60, "Ray Jobs REST API".
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import httpx

from affidavit.service.dispatch.engine import (
    PREFIX,
    EngineUnavailable,
    Job,
    JobRefused,
    JobState,
)

MIB = 1024 * 1024
STATES: Mapping[str, JobState] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "STOPPED": "ended",
    "SUCCEEDED": "ended",
    "FAILED": "ended",
}


class RayJobs:
    """The jobs of the cluster whose dashboard answers at ``address``; ``command`` is started."""

    def __init__(self, address: str, command: str, client: httpx.Client | None = None) -> None:
        self._client = client or httpx.Client(timeout=30)
        self._address = address
        self._command = shlex.split(command)

    def jobs(self) -> Mapping[str, JobState]:
        """The jobs of the cluster, which a new head forgets; raises ``EngineUnavailable``."""
        listed = self._answer("GET", "/api/jobs/")
        if not isinstance(listed, list):
            raise EngineUnavailable(f"{self._address} listed no jobs")
        entries = [entry for entry in listed if isinstance(entry, dict)]
        return {
            job_id: STATES.get(str(entry.get("status")), "running")
            for entry in entries
            if (job_id := str(entry.get("submission_id"))).startswith(PREFIX)
        }

    def submit(self, job: Job) -> None:
        """Submit under the job's id, which Ray refuses a second time."""
        spread = job.hosts > 1 or "--hosts" in self._command
        body: dict[str, Any] = {
            "submission_id": job.id,
            "entrypoint": shlex.join([*self._command, *job.arguments]),
            # Ranks on several nodes take what they need themselves.
            "entrypoint_num_cpus": 0 if spread else 1,
            "entrypoint_num_gpus": 0 if spread else job.gpus,
            "metadata": {"run": job.run, "queue": job.queue},
        }
        if job.memory:
            body["entrypoint_memory"] = job.memory * MIB
        try:
            self._answer("POST", "/api/jobs/", body)
        except EngineUnavailable:
            if job.id not in self.jobs():
                raise

    def cancel(self, job_id: str) -> None:
        """Stop the job: SIGTERM, and SIGKILL some seconds later."""
        self._answer("POST", f"/api/jobs/{job_id}/stop", unknown=httpx.codes.NOT_FOUND)

    def page(self, job_id: str) -> str:
        """The job in Ray's dashboard."""
        return f"{self._address}/#/jobs/{job_id}"

    def _answer(self, method: str, path: str, body: Any = None, unknown: int | None = None) -> Any:
        try:
            answer = self._client.request(method, self._address + path, json=body)
            if answer.status_code == unknown:
                return None
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPStatusError as error:
            raise JobRefused.by(error.response) from None
        except (httpx.HTTPError, ValueError) as error:
            raise EngineUnavailable(f"{method} {self._address}{path}: {error}") from None
