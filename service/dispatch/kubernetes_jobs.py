"""Kubernetes Jobs, built from the operator's manifest, and Kueue's admission check.

The manifest is a Job whose first container runs ``affidavit worker``. For each run it gets the
job's name, the worker's options, the run's GPUs and memory, and Kueue's label with the run's queue.
The service account needs to create, list and delete Jobs in the namespace. For the admission check
it also needs to list Workloads and AdmissionChecks and to patch their status.

Kueue asks the admission check before it starts a workload that waits in a ClusterQueue with an
AdmissionCheck of the controller ``affidavit.dev/certificate``. The workload is Ready if its job is
the current job of an unfinished run, the run's certificate verifies and is usable, and its budget
is reserved or committed. Every other workload is Rejected. The check does not inspect containers:
anybody who may create Jobs in the namespace under a run's name is admitted as that run.

References: Kubernetes API, batch/v1 Job; Kueue, "Run a Kubernetes Job" and "Admission Check";
kueue.x-k8s.io/v1beta1, AdmissionCheck and Workload.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import httpx
from sqlalchemy import Connection, Engine

from affidavit.certificate import KeyStore, PublicKey, VerificationError, verify
from affidavit.plan import MalformedPlan, load_yaml
from affidavit.service.database import reader
from affidavit.service.dispatch.engines import (
    JOB_ID,
    JOB_PREFIX,
    Job,
    JobState,
    job_id_of,
    log_refusal,
    request_json,
)
from affidavit.service.errors import DomainError, SettingsError
from affidavit.service.ledger import repository as ledger_repository
from affidavit.service.ledger.store import require_reserved_usable
from affidavit.service.runs import repository

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SERVER = "https://kubernetes.default.svc"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
RUN_LABEL = "affidavit.run"


class KubernetesJobs:
    """The Jobs of a namespace, each built from ``manifest``."""

    def __init__(self, client: httpx.Client, namespace: str, manifest: Mapping[str, Any]) -> None:
        self.client, self.namespace = client, namespace
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
        listed = request_json(self.client, "GET", self._jobs, params={"labelSelector": RUN_LABEL})
        return {
            entry["metadata"]["name"]: _state(entry)
            for entry in listed.get("items", [])
            if entry["metadata"]["name"].startswith(JOB_PREFIX)
        }

    def submit(self, job: Job) -> None:
        """Create the Job, unless a Job of that name exists."""
        request_json(
            self.client,
            "POST",
            self._jobs,
            json=self._build_job(job),
            accept=(httpx.codes.CONFLICT,),
        )

    def cancel(self, job_id: str) -> None:
        """Delete the Job and its pods."""
        options, gone = {"propagationPolicy": "Background"}, (httpx.codes.NOT_FOUND,)
        request_json(self.client, "DELETE", f"{self._jobs}/{job_id}", params=options, accept=gone)

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


# ---- Kueue's admission check ---------------------------------------------------------

CONTROLLER = "affidavit.dev/certificate"
KUEUE_VERSION = "kueue.x-k8s.io/v1beta1"
MAX_MESSAGE_LENGTH = 500

Verdict = tuple[Literal["Ready", "Rejected"], str]
"""Whether a workload may start, and the reason."""


class AdmissionCheck:
    """The controller for the workloads of a namespace; ``judge`` decides by the job's name."""

    def __init__(
        self, client: httpx.Client, namespace: str, judge: Callable[[str], Verdict]
    ) -> None:
        self._client = client
        self._workloads = f"/apis/{KUEUE_VERSION}/namespaces/{namespace}/workloads"
        self._judge = judge

    def reconcile(self, at: datetime) -> None:
        """Decide about all waiting workloads, if the cluster has our AdmissionCheck.

        Raises ``EngineUnavailable``.
        """
        missing = (httpx.codes.NOT_FOUND, httpx.codes.FORBIDDEN)
        path = f"/apis/{KUEUE_VERSION}/admissionchecks"
        listed = request_json(self._client, "GET", path, accept=missing).get("items", [])
        checks = [entry for entry in listed if entry["spec"]["controllerName"] == CONTROLLER]
        for check in checks:
            self._activate(check, at)
        if not checks:
            return
        names = {check["metadata"]["name"] for check in checks}
        for workload in request_json(self._client, "GET", self._workloads).get("items", []):
            with log_refusal():
                self._decide(workload, names, at)

    def _decide(self, workload: Mapping[str, Any], names: Iterable[str], at: datetime) -> None:
        status = workload.get("status", {})
        waiting = [
            check["name"]
            for check in status.get("admissionChecks", [])
            if check["name"] in names and check["state"] == "Pending"
        ]
        if not waiting or not _is_true(status, "QuotaReserved"):
            return
        owners = workload["metadata"].get("ownerReferences", [])
        job = next((owner["name"] for owner in owners if owner["kind"] == "Job"), "")
        state, message = self._judge(job)
        path = f"{self._workloads}/{workload['metadata']['name']}/status"
        checks = [
            {
                "name": name,
                "state": state,
                "message": message[:MAX_MESSAGE_LENGTH],
                "lastTransitionTime": _instant(at),
            }
            for name in waiting
        ]
        self._apply(path, "Workload", workload, {"admissionChecks": checks})

    def _activate(self, check: Mapping[str, Any], at: datetime) -> None:
        if _is_true(check.get("status", {}), "Active"):
            return
        condition = {
            "type": "Active",
            "status": "True",
            "reason": "Active",
            "message": "The service checks certificates and budgets.",
            "lastTransitionTime": _instant(at),
        }
        path = f"/apis/{KUEUE_VERSION}/admissionchecks/{check['metadata']['name']}/status"
        self._apply(path, "AdmissionCheck", check, {"conditions": [condition]})

    def _apply(self, path: str, kind: str, item: Mapping[str, Any], status: Any) -> None:
        """Apply our part of a status; does nothing if the item no longer exists."""
        name = {"name": item["metadata"]["name"]}
        request_json(
            self._client,
            "PATCH",
            path,
            json={"apiVersion": KUEUE_VERSION, "kind": kind, "metadata": name, "status": status},
            params={"fieldManager": "affidavit", "force": "true"},
            headers={"content-type": "application/apply-patch+yaml"},
            accept=(httpx.codes.NOT_FOUND,),
        )


def build_judge(database: Engine, keys: KeyStore) -> Callable[[str], Verdict]:
    """Build a judge that reads the database and trusts the keys that may certify."""
    connections = reader(database)

    def judge(job_id: str) -> Verdict:
        with connections.connect() as connection:
            try:
                return _verdict(connection, job_id, keys.public_keys())
            except VerificationError as error:
                reason = f"its certificate does not verify: {error.message}"
            except DomainError as error:
                reason = error.message
        return "Rejected", reason

    return judge


def _verdict(connection: Connection, job_id: str, trusted: Iterable[PublicKey]) -> Verdict:
    """Judge a job; raises ``DomainError`` or ``VerificationError``."""
    match = JOB_ID.fullmatch(job_id)
    if match is None:
        return "Rejected", "no run with this id was requested from Affidavit."
    run = repository.find(connection, match[1])
    if run.outcome is not None:
        return "Rejected", f"run {run.id} is {run.state}."
    current = job_id_of(run.id, run.job)
    if job_id != current:
        return "Rejected", f"its job is {current}."
    reservation = ledger_repository.find_reservation(connection, run.reservation_id)
    if reservation is None or reservation.state not in ("reserved", "committed"):
        return "Rejected", "no budget is reserved for it."
    certificate = require_reserved_usable(connection, reservation)
    if not certificate.untrusted:
        verify(certificate.bundle, trusted)
    return "Ready", f"{run.certificate_id} verifies, and its budget is {reservation.state}."


def _is_true(status: Mapping[str, Any], kind: str) -> bool:
    conditions = status.get("conditions", [])
    return any(entry["type"] == kind and entry["status"] == "True" for entry in conditions)


def _instant(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
