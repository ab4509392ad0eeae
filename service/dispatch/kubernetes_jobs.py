"""Kubernetes Jobs, built from the operator's manifest.

The manifest is a Job whose first container runs ``affidavit worker``. For each run it gets the
job's name, the worker's options, the run's GPUs and memory, and Kueue's label with the run's queue.
The service account needs to create, list and delete Jobs in the namespace.

References: Kubernetes API, batch/v1 Job; Kueue, "Run a Kubernetes Job".
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from affidavit.plan import MalformedPlan, load_yaml
from affidavit.service.core.errors import SettingsError
from affidavit.service.dispatch.engine import (
    JOB_PREFIX,
    Job,
    JobState,
    request_json,
)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SERVER = "https://kubernetes.default.svc"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
RUN_LABEL = "affidavit.run"


class KubernetesJobs:
    """The Jobs of a namespace, each built from ``manifest``."""

    def __init__(self, client: httpx.Client, namespace: str, manifest: Mapping[str, Any]) -> None:
        self._client = client
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._manifest = manifest

    @classmethod
    def in_cluster(cls, namespace: str, path: str) -> Self:
        """Connect to the cluster that this process runs in; raises ``SettingsError``."""
        try:
            manifest = load_yaml(Path(path).read_bytes()).data
            manifest["spec"]["template"]["spec"]["containers"][0]["name"]
        except (OSError, MalformedPlan, KeyError, IndexError, TypeError) as error:
            raise SettingsError(
                f"AFFIDAVIT_JOB is {path!r}, which is not a Job manifest: {error}"
            ) from None
        client = httpx.Client(
            base_url=API_SERVER,
            verify=str(SERVICE_ACCOUNT / "ca.crt")
            if (SERVICE_ACCOUNT / "ca.crt").exists()
            else True,
            auth=_add_token,
            timeout=30,
        )
        return cls(client, namespace, manifest)

    def jobs(self) -> Mapping[str, JobState]:
        """Return the Jobs with ``RUN_LABEL``."""
        listed = request_json(self._client, "GET", self._jobs, params={"labelSelector": RUN_LABEL})
        return {
            entry["metadata"]["name"]: _state(entry)
            for entry in listed.get("items", [])
            if entry["metadata"]["name"].startswith(JOB_PREFIX)
        }

    def submit(self, job: Job) -> None:
        """Create the Job, unless a Job of that name exists."""
        request_json(
            self._client,
            "POST",
            self._jobs,
            json=self._build_job(job),
            accept=(httpx.codes.CONFLICT,),
        )

    def cancel(self, job_id: str) -> None:
        """Delete the Job and its pods."""
        options, gone = {"propagationPolicy": "Background"}, (httpx.codes.NOT_FOUND,)
        request_json(self._client, "DELETE", f"{self._jobs}/{job_id}", params=options, accept=gone)

    def dashboard_url(self, job_id: str) -> None:
        """Return None: Kubernetes has no dashboard by default."""

    def _build_job(self, job: Job) -> dict[str, Any]:
        manifest = copy.deepcopy(dict(self._manifest))
        manifest["metadata"] = {
            "name": job.id,
            "labels": {
                **manifest.get("metadata", {}).get("labels", {}),
                RUN_LABEL: job.run,
                QUEUE_LABEL: job.queue,
            },
        }
        # A retry by Kubernetes would not have a lease: the dispatcher submits the next job.
        manifest["spec"]["backoffLimit"] = 0
        container = manifest["spec"]["template"]["spec"]["containers"][0]
        container["args"] = [*container.get("args", []), *job.arguments]
        resources = container.setdefault("resources", {})
        for kind, amount in (
            ("nvidia.com/gpu", str(job.gpus) if job.gpus else None),
            ("memory", f"{job.memory}Mi" if job.memory else None),
        ):
            if amount is not None:
                resources.setdefault("limits", {})[kind] = amount
                resources.setdefault("requests", {})[kind] = amount
        return manifest


def _add_token(request: httpx.Request) -> httpx.Request:
    """Add the service account's token, which the cluster renews in its file."""
    request.headers["authorization"] = (
        f"Bearer {(SERVICE_ACCOUNT / 'token').read_text('ascii').strip()}"
    )
    return request


def _state(entry: Mapping[str, Any]) -> JobState:
    status = entry.get("status", {})
    ends = {"Complete", "Failed", "FailureTarget", "SuccessCriteriaMet"}
    conditions = status.get("conditions") or []
    if any(entry["type"] in ends and entry["status"] == "True" for entry in conditions):
        return "ended"
    return "running" if status.get("active") else "waiting"
