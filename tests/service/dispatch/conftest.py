"""A cluster as far as Ray's Jobs API tells of it, for the service of ``tests/service/runs``.

What it answers was recorded from Ray 2.60.0: ``ray start --head``, then the requests of
``RayJobs``. The real one is in ``tests/worker/test_ray.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from affidavit.service.dispatch.dispatcher import Dispatcher
from affidavit.service.dispatch.engines import RayJobs
from tests.service.runs.conftest import Yard
from tests.service.runs.conftest import yard as yard

EXISTS = "ValueError: Job with submission_id {} already exists. Please use a different one."


@dataclass
class RayCluster:
    """The jobs of a head, and how it fails."""

    status: dict[str, str] = field(default_factory=dict)
    entrypoints: dict[str, str] = field(default_factory=dict)
    down: bool = False
    lose_answers: bool = False
    refused: set[str] = field(default_factory=set)
    attempts: int = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("no route to the head")
        words = request.url.path.strip("/").split("/")
        if request.method == "GET":
            listed = [
                {"type": "SUBMISSION", "job_id": None, "submission_id": job, "status": status}
                for job, status in self.status.items()
            ]
            driver = {"type": "DRIVER", "job_id": "01000000", "submission_id": None}
            return httpx.Response(200, json=[*listed, {**driver, "status": "RUNNING"}])
        if words[-1] == "stop":
            return self._stop(words[-2])
        body = json.loads(request.content)
        job = body["submission_id"]
        self.attempts += 1
        if job in self.refused:
            return httpx.Response(500, text="no node has these resources")
        if job in self.status:
            return httpx.Response(500, text=EXISTS.format(job))
        self.status[job], self.entrypoints[job] = "PENDING", body["entrypoint"]
        if self.lose_answers:
            raise httpx.ReadTimeout("the answer was lost")
        return httpx.Response(200, json={"job_id": job, "submission_id": job})

    def _stop(self, job: str) -> httpx.Response:
        if job in self.refused:
            return httpx.Response(500, text="its supervisor is dead")
        if job not in self.status:
            return httpx.Response(404, text=f"Job {job} does not exist")
        active = self.status[job] in ("PENDING", "RUNNING")
        if active:
            self.status[job] = "STOPPED"
        return httpx.Response(200, json={"stopped": active})

    def forget(self) -> None:
        """What a head that starts anew knows of its jobs."""
        self.status.clear()

    @property
    def active(self) -> list[str]:
        return [job for job, status in self.status.items() if status in ("PENDING", "RUNNING")]


@pytest.fixture
def cluster() -> RayCluster:
    return RayCluster()


def dispatcher_of(yard: Yard, cluster: RayCluster) -> Dispatcher:
    client: Any = httpx.Client(transport=httpx.MockTransport(cluster))
    return Dispatcher(yard.engine, RayJobs("http://head:8265", "affidavit worker", client))


@pytest.fixture
def dispatcher(yard: Yard, cluster: RayCluster) -> Dispatcher:
    return dispatcher_of(yard, cluster)
