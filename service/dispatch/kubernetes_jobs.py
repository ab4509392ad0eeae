"""Jobs of Kubernetes, from a manifest that the operator writes.

The manifest is a Job whose first container runs ``affidavit worker``. For each run it gets the
job's name, the worker's options, the run's GPUs and memory, and the label of Kueue with the run's
queue, which Kueue follows where it is installed. The service account needs to create, list and
delete Jobs in the namespace, and for the admission check (``admission_check``) to list
Workloads and AdmissionChecks and to patch their status.

References: Kubernetes API, batch/v1 Job; Kueue, "Run a Kubernetes Job".
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from affidavit.plan import MalformedPlan, load_yaml
from affidavit.service.dispatch.engine import (
    PREFIX,
    EngineUnavailable,
    Job,
    JobRefused,
    JobState,
    UnknownEngine,
)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SERVER = "https://kubernetes.default.svc"
KUEUE = "kueue.x-k8s.io/queue-name"
OURS = "affidavit.run"


class KubernetesApi:
    """The cluster's API server."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def answer(self, method: str, path: str, *, same: Collection[int] = (), **sent: Any) -> Any:
        """What is answered, with success or a status in ``same``; raises ``EngineUnavailable``."""
        try:
            answer = self._client.request(method, path, **sent)
            if answer.status_code not in same:
                answer.raise_for_status()
            return answer.json()
        except httpx.HTTPStatusError as error:
            raise JobRefused.by(error.response) from None
        except (httpx.HTTPError, ValueError, OSError) as error:
            raise EngineUnavailable(f"{method} {path}: {error}") from None


class KubernetesJobs:
    """The Jobs of a namespace; ``manifest`` is what each is made from."""

    def __init__(self, client: httpx.Client, namespace: str, manifest: Mapping[str, Any]) -> None:
        self.api, self.namespace = KubernetesApi(client), namespace
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._manifest = manifest

    @classmethod
    def in_cluster(cls, namespace: str, path: str) -> Self:
        """The cluster that this process runs in; raises ``UnknownEngine``."""
        try:
            manifest = load_yaml(Path(path).read_bytes()).data
            manifest["spec"]["template"]["spec"]["containers"][0]["name"]
        except (OSError, MalformedPlan, KeyError, IndexError, TypeError) as error:
            raise UnknownEngine(
                f"AFFIDAVIT_JOB is {path!r}, no manifest of a Job: {error}"
            ) from None
        client = httpx.Client(
            base_url=SERVER,
            verify=str(ACCOUNT / "ca.crt") if (ACCOUNT / "ca.crt").exists() else True,
            auth=_account,
            timeout=30,
        )
        return cls(client, namespace, manifest)

    def jobs(self) -> Mapping[str, JobState]:
        """The Jobs with our label."""
        listed = self.api.answer("GET", self._jobs, params={"labelSelector": OURS})
        return {
            entry["metadata"]["name"]: _state(entry)
            for entry in listed.get("items", [])
            if entry["metadata"]["name"].startswith(PREFIX)
        }

    def submit(self, job: Job) -> None:
        """Create the Job; one of its name is the same."""
        self.api.answer("POST", self._jobs, json=self._of(job), same=(httpx.codes.CONFLICT,))

    def cancel(self, job_id: str) -> None:
        """Delete the Job and its pods."""
        options, gone = {"propagationPolicy": "Background"}, (httpx.codes.NOT_FOUND,)
        self.api.answer("DELETE", f"{self._jobs}/{job_id}", params=options, same=gone)

    def page(self, job_id: str) -> None:
        """None: a cluster has no dashboard of its own."""

    def _of(self, job: Job) -> dict[str, Any]:
        manifest = copy.deepcopy(dict(self._manifest))
        manifest["metadata"] = {
            "name": job.id,
            "labels": {
                **manifest.get("metadata", {}).get("labels", {}),
                OURS: job.run,
                KUEUE: job.queue,
            },
        }
        # A retry by Kubernetes would not see that its predecessor's lease is lost; we send another.
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


def _account(request: httpx.Request) -> httpx.Request:
    """The service account's token, which the cluster renews in its file."""
    request.headers["authorization"] = f"Bearer {(ACCOUNT / 'token').read_text('ascii').strip()}"
    return request


def _state(entry: Mapping[str, Any]) -> JobState:
    status = entry.get("status", {})
    ends = {"Complete", "Failed", "FailureTarget", "SuccessCriteriaMet"}
    conditions = status.get("conditions") or []
    if any(one["type"] in ends and one["status"] == "True" for one in conditions):
        return "ended"
    return "running" if status.get("active") else "waiting"
