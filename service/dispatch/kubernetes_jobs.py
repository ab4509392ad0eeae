"""Jobs of Kubernetes, from a manifest that the operator writes.

The manifest is a Job whose first container runs ``affidavit worker``. For each run it gets the
job's name, the worker's options, the run's GPUs and memory, and the label of Kueue with the run's
queue, which Kueue follows where it is installed. The service account needs to create, list and
delete Jobs in the namespace, and for the admission check to list Workloads and AdmissionChecks and
to patch their status.

References: Kubernetes API, batch/v1 Job; Kueue, "Run a Kubernetes Job".

Kueue's admission check admits a workload for what was certified and reserved. Kueue asks before it
starts a workload: one that waits in a ClusterQueue with an AdmissionCheck of the controller
``affidavit.dev/certificate`` is Ready once the job is the present one of a run that is not over,
its certificate verifies and is usable, and its budget is reserved or committed. Everything else is
Rejected, jobs that are no runs too. What a container does is not looked at: whoever may create Jobs
in the namespace under a run's name is admitted for it.

References: Kueue, "Admission Check"; kueue.x-k8s.io/v1beta1, AdmissionCheck and Workload.
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
    JOB,
    PREFIX,
    Job,
    JobState,
    ask,
    job_id_of,
    others_go_on,
)
from affidavit.service.errors import DomainError, SettingsError
from affidavit.service.ledger import repository as ledger_repository
from affidavit.service.ledger.store import require_reserved_usable
from affidavit.service.runs import repository

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SERVER = "https://kubernetes.default.svc"
KUEUE = "kueue.x-k8s.io/queue-name"
OURS = "affidavit.run"


class KubernetesJobs:
    """The Jobs of a namespace; ``manifest`` is what each is made from."""

    def __init__(self, client: httpx.Client, namespace: str, manifest: Mapping[str, Any]) -> None:
        self.client, self.namespace = client, namespace
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._manifest = manifest

    @classmethod
    def in_cluster(cls, namespace: str, path: str) -> Self:
        """The cluster that this process runs in; raises ``SettingsError``."""
        try:
            manifest = load_yaml(Path(path).read_bytes()).data
            manifest["spec"]["template"]["spec"]["containers"][0]["name"]
        except (OSError, MalformedPlan, KeyError, IndexError, TypeError) as error:
            raise SettingsError(
                f"AFFIDAVIT_JOB is {path!r}, which is not a Job manifest: {error}"
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
        listed = ask(self.client, "GET", self._jobs, params={"labelSelector": OURS})
        return {
            entry["metadata"]["name"]: _state(entry)
            for entry in listed.get("items", [])
            if entry["metadata"]["name"].startswith(PREFIX)
        }

    def submit(self, job: Job) -> None:
        """Create the Job; one of its name is the same."""
        ask(self.client, "POST", self._jobs, json=self._of(job), same=(httpx.codes.CONFLICT,))

    def cancel(self, job_id: str) -> None:
        """Delete the Job and its pods."""
        options, gone = {"propagationPolicy": "Background"}, (httpx.codes.NOT_FOUND,)
        ask(self.client, "DELETE", f"{self._jobs}/{job_id}", params=options, same=gone)

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


# ---- Kueue's admission check ---------------------------------------------------------

CONTROLLER = "affidavit.dev/certificate"
VERSION = "kueue.x-k8s.io/v1beta1"
MAX_MESSAGE = 500

State = Literal["Ready", "Rejected"]


Verdict = tuple[State, str]
"""Whether a workload may start, and why."""


class AdmissionCheck:
    """The controller, for the workloads of a namespace; ``judge`` is asked about a job's name."""

    def __init__(
        self, client: httpx.Client, namespace: str, judge: Callable[[str], Verdict]
    ) -> None:
        self._client = client
        self._workloads = f"/apis/{VERSION}/namespaces/{namespace}/workloads"
        self._judge = judge

    def round(self, at: datetime) -> None:
        """Decide about all that waits, if the cluster has a check of ours.

        Raises ``EngineUnavailable``.
        """
        missing = (httpx.codes.NOT_FOUND, httpx.codes.FORBIDDEN)
        path = f"/apis/{VERSION}/admissionchecks"
        listed = ask(self._client, "GET", path, same=missing).get("items", [])
        checks = [one for one in listed if one["spec"]["controllerName"] == CONTROLLER]
        for check in checks:
            self._activate(check, at)
        if not checks:
            return
        names = {check["metadata"]["name"] for check in checks}
        for workload in ask(self._client, "GET", self._workloads).get("items", []):
            with others_go_on():
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
                "message": message[:MAX_MESSAGE],
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
        path = f"/apis/{VERSION}/admissionchecks/{check['metadata']['name']}/status"
        self._apply(path, "AdmissionCheck", check, {"conditions": [condition]})

    def _apply(self, path: str, kind: str, item: Mapping[str, Any], status: Any) -> None:
        """Set what is ours of a status; an item that is gone needs none."""
        name = {"name": item["metadata"]["name"]}
        ask(
            self._client,
            "PATCH",
            path,
            json={"apiVersion": VERSION, "kind": kind, "metadata": name, "status": status},
            params={"fieldManager": "affidavit", "force": "true"},
            headers={"content-type": "application/apply-patch+yaml"},
            same=(httpx.codes.NOT_FOUND,),
        )


def judge_by(database: Engine, keys: KeyStore) -> Callable[[str], Verdict]:
    """Verdicts by what the service's database holds, and the keys that may certify."""
    connections = reader(database)

    def judge(job_id: str) -> Verdict:
        with connections.connect() as connection:
            try:
                return _verdict(connection, job_id, keys.public_keys())
            except VerificationError as error:
                why = f"its certificate does not verify: {error.message}"
            except DomainError as error:
                why = error.message
        return "Rejected", why

    return judge


def _verdict(connection: Connection, job_id: str, trusted: Iterable[PublicKey]) -> Verdict:
    """Raises ``DomainError`` or ``VerificationError``."""
    match = JOB.fullmatch(job_id)
    if match is None:
        return "Rejected", "no run with this id was requested from Affidavit."
    run = repository.find(connection, match[1])
    present, over = job_id_of(run.id, run.job), run.outcome is not None
    if over or job_id != present:
        why = f"run {run.id} is {run.state}" if over else f"its job is {present}"
        return "Rejected", f"{why}."
    reservation = ledger_repository.find_reservation(connection, run.reservation_id)
    if reservation is None or reservation.state not in ("reserved", "committed"):
        return "Rejected", "no budget is reserved for it."
    certificate = require_reserved_usable(connection, reservation)
    if not certificate.untrusted:
        verify(certificate.bundle, trusted)
    return "Ready", f"{run.certificate_id} verifies, and its budget is {reservation.state}."


def _is_true(status: Mapping[str, Any], kind: str) -> bool:
    conditions = status.get("conditions", [])
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def _instant(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
