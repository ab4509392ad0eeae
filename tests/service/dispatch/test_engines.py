"""Kubernetes by its API as documented, Ray and Slurm by recorded answers, and engines' names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from affidavit.plan import load_yaml
from affidavit.service.core.errors import SettingsError
from affidavit.service.dispatch.engine import Job
from affidavit.service.dispatch.engines import (
    RayJobs,
    Slurm,
    build_engine,
)
from affidavit.service.dispatch.kubernetes_jobs import KubernetesJobs
from affidavit.service.settings import Settings
from tests.service.dispatch.conftest import RayCluster

ROOT = Path(__file__).resolve().parents[3]
MANIFEST = ROOT / "deploy" / "kubernetes" / "worker-job.yaml"
RUN = "6f1c0c9e-7d0b-4b52-9a37-0f5f4f7f9d11"
JOB = Job(run=RUN, number=2, queue="gpu", gpus=2, memory=4096)


class KubernetesApi:
    """What batch/v1 answers about Jobs, in the form of the API's reference."""

    def __init__(self) -> None:
        self.jobs: dict[str, Any] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        words = request.url.path.strip("/").split("/")
        assert words[:5] == ["apis", "batch", "v1", "namespaces", "affidavit"]
        if request.method == "GET":
            assert request.url.params["labelSelector"] == "affidavit.run"
            return httpx.Response(200, json={"kind": "JobList", "items": [*self.jobs.values()]})
        if request.method == "DELETE":
            gone = self.jobs.pop(words[-1], None)
            return httpx.Response(200 if gone else 404, json={"kind": "Status"})
        job = json.loads(request.content)
        name = job["metadata"]["name"]
        if name in self.jobs:
            return httpx.Response(409, json={"kind": "Status", "reason": "AlreadyExists"})
        self.jobs[name] = {**job, "status": {}}
        return httpx.Response(201, json=self.jobs[name])


def test_kubernetes_gets_one_job_of_a_name_with_what_the_run_requires() -> None:
    api = KubernetesApi()
    client = httpx.Client(base_url="https://k", transport=httpx.MockTransport(api))
    manifest = load_yaml(MANIFEST.read_bytes()).data
    before = json.dumps(manifest)
    engine = KubernetesJobs(client, "affidavit", manifest)
    engine.submit(JOB)
    engine.submit(JOB)
    (job,) = api.jobs.values()
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert job["spec"]["backoffLimit"] == 0
    container = job["spec"]["template"]["spec"]["containers"][0]
    expected = ["--run", RUN, "--queue", "gpu", "--name", JOB.id, "--gpu", "--processes", "2"]
    assert container["args"][-len(expected) :] == expected
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2", "memory": "4096Mi"}
    assert json.dumps(manifest) == before
    for status, state in (
        ({}, "waiting"),
        ({"active": 1}, "running"),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, "ended"),
        ({"conditions": [{"type": "Failed", "status": "True"}], "active": 1}, "ended"),
        ({"conditions": [{"type": "Suspended", "status": "True"}]}, "waiting"),
    ):
        job["status"] = status
        assert engine.jobs() == {JOB.id: state}
    engine.cancel(JOB.id)
    engine.cancel(JOB.id)
    assert engine.jobs() == {}


def test_slurm_ended_a_job_at_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '{JOB.id} TIMEOUT'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert Slurm("worker.sbatch").jobs() == {JOB.id: "ended"}


def test_ray_gets_the_gpus_and_the_memory_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    bodies: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        bodies.append(json.loads(request.content))
        return RayCluster()(request)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    RayJobs("http://head:8265", "/opt/a b/affidavit worker", client).submit(JOB)
    (body,) = bodies
    assert (body["entrypoint_num_gpus"], body["entrypoint_memory"]) == (2, 4096 * 1024**2)
    assert body["entrypoint"].endswith(f"--name {JOB.id} --gpu --processes 2")
    assert "env_vars" not in json.dumps(body)  # the dashboard shows them
    RayJobs("http://head:8265", "affidavit worker", client).submit(replace(JOB, hosts=3))
    spread = bodies[-1]
    assert spread["entrypoint"].endswith("--gpu --processes 2 --hosts 3")
    # The ranks take what they need on each of the hosts, and the job itself nothing.
    assert (spread["entrypoint_num_cpus"], spread["entrypoint_num_gpus"]) == (0, 0)


@pytest.mark.parametrize(
    ("dispatch", "job"),
    [
        ("mesos", ""),
        ("ray://", ""),
        ("ray://head:8265/x", ""),
        ("ray://user:secret@head", ""),
        ("slurm", ""),
        ("kubernetes:affidavit", ""),
        ("kubernetes:affidavit", "/nowhere.yaml"),
        ("kubernetes:Not_A_Name", str(MANIFEST)),
    ],
)
def test_what_names_no_engine_is_refused_when_the_service_starts(dispatch: str, job: str) -> None:
    with pytest.raises(SettingsError):
        build_engine(dispatch, job)
    with pytest.raises(SettingsError, match=r"AFFIDAVIT_(DISPATCH|JOB)"):
        Settings.from_environment({"AFFIDAVIT_DISPATCH": dispatch, "AFFIDAVIT_JOB": job})
