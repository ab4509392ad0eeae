"""Kueue's admission check against its API as far as the controller sees it.

The objects are those of Kueue's reference (kueue.x-k8s.io/v1beta1) after quota was reserved.
"""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from affidavit.certificate import KeyStore
from affidavit.service.dispatch.engines import EngineUnavailable
from affidavit.service.dispatch.kubernetes_jobs import AdmissionCheck, build_judge
from tests.service.runs.conftest import Yard

KUEUE = "/apis/kueue.x-k8s.io/v1beta1"
CHECK = {
    "apiVersion": "kueue.x-k8s.io/v1beta1",
    "kind": "AdmissionCheck",
    "metadata": {"name": "certified"},
    "spec": {"controllerName": "affidavit.dev/certificate"},
}
OTHER = {**CHECK, "metadata": {"name": "prov"}, "spec": {"controllerName": "kueue.x-k8s.io/p"}}


def workload_of(job: str, *, quota: str = "True") -> dict[str, Any]:
    pending = {"lastTransitionTime": "2026-11-23T10:00:00Z", "message": "", "state": "Pending"}
    return {
        "metadata": {
            "name": f"job-{job}-1a2b3",
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": job}],
        },
        "status": {
            "conditions": [{"type": "QuotaReserved", "status": quota}],
            "admissionChecks": [{"name": "certified", **pending}, {"name": "prov", **pending}],
        },
    }


class Kueue:
    """The API server: what it lists, and what was applied to a status, by name."""

    def __init__(self, *workloads: dict[str, Any]) -> None:
        self.checks, self.workloads = [copy.deepcopy(CHECK), OTHER], [*workloads]
        self.applied: dict[str, Any] = {}
        self.installed = True

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if not self.installed:
            return httpx.Response(404, json={"kind": "Status", "reason": "NotFound"})
        if request.method == "GET":
            listed = {
                f"{KUEUE}/admissionchecks": self.checks,
                f"{KUEUE}/namespaces/affidavit/workloads": self.workloads,
            }[path]
            return httpx.Response(200, json={"items": listed})
        assert request.method == "PATCH"
        assert path.endswith("/status")
        assert request.headers["content-type"] == "application/apply-patch+yaml"
        assert request.url.params["fieldManager"] == "affidavit"
        body = json.loads(request.content)
        name = path.split("/")[-2]
        assert body["metadata"] == {"name": name}
        self.applied[name] = body["status"]
        return httpx.Response(200, json=body)


@pytest.fixture
def kueue() -> Kueue:
    return Kueue()


def look(yard: Yard, kueue: Kueue, keys: Path) -> dict[str, tuple[str, str]]:
    """State and message by workload, after one round."""
    client = httpx.Client(base_url="https://k", transport=httpx.MockTransport(kueue))
    judge = build_judge(yard.engine, KeyStore(keys))
    AdmissionCheck(client, "affidavit", judge).reconcile(datetime.now(UTC))
    told = {}
    for name, status in kueue.applied.items():
        for check in status.get("admissionChecks", []):
            assert check["name"] == "certified"  # the other controller's is left alone
            told[name] = (check["state"], check["message"])
    return told


def job_of(run: Any, number: int = 1) -> str:
    return f"affidavit-{run['id']}-{number}"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_workload_is_admitted_for_a_run_that_is_certified_and_reserved(
    yard: Yard, kueue: Kueue, tmp_path: Path
) -> None:
    keys, certificate = tmp_path / "keys", yard.certify()
    good, over = yard.request(certificate).json(), yard.request(certificate).json()
    assert yard.ask("POST", f"/v1/runs/{over['id']}/cancel", "submit", {}).is_success
    early = workload_of(job_of(good))
    early["metadata"]["name"], early["status"]["conditions"] = "early", []
    done = workload_of(job_of(good))
    done["metadata"]["name"] = "done"
    done["status"]["admissionChecks"][0]["state"] = "Ready"
    kueue.workloads += [
        *(workload_of(job_of(run)) for run in (good, over)),
        *(workload_of(job) for job in (job_of(good, 2), "crypto-miner", job_of({"id": "0" * 36}))),
        *(early, done),
    ]
    told = look(yard, kueue, keys)
    state = {name: one for name, (one, _) in told.items()}
    assert state.pop(f"job-{job_of(good)}-1a2b3") == "Ready"
    assert len(state) == 4
    assert set(state.values()) == {"Rejected"}
    assert certificate in told[f"job-{job_of(good)}-1a2b3"][1]
    assert kueue.applied["certified"]["conditions"][0]["type"] == "Active"
    assert "prov" not in kueue.applied


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_certificate_that_does_not_verify_admits_nothing(
    yard: Yard, kueue: Kueue, tmp_path: Path
) -> None:
    keys, certificate = tmp_path / "keys", yard.certify()
    run = yard.request(certificate).json()
    kueue.workloads.append(workload_of(job_of(run)))
    KeyStore(tmp_path / "others").new("other")
    ((state, why),) = look(yard, kueue, tmp_path / "others").values()
    assert (state, "does not verify" in why) == ("Rejected", True)
    revoked = {"code": "plan_error", "reason": "wrong data"}
    path = f"/v1/certificates/{certificate}/revocation"
    assert yard.ask("POST", path, "approve", revoked).is_success
    ((state, why),) = look(yard, kueue, keys).values()
    assert (state, "revoked" in why) == ("Rejected", True), why


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_without_kueue_nothing_is_asked_and_a_lost_cluster_is_said(
    yard: Yard, kueue: Kueue, tmp_path: Path
) -> None:
    kueue.installed = False
    assert look(yard, kueue, tmp_path / "keys") == {}

    def lost(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route")

    client = httpx.Client(base_url="https://k", transport=httpx.MockTransport(lost))
    judge = build_judge(yard.engine, KeyStore(tmp_path))
    check = AdmissionCheck(client, "affidavit", judge)
    with pytest.raises(EngineUnavailable):
        check.reconcile(datetime.now(UTC))
