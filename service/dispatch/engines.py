"""Engines that execute runs: their interface, Ray, Slurm, and the choice of ``AFFIDAVIT_DISPATCH``.

=======================  ============================================================
``local``                none: ``affidavit worker`` claims one run after another
``ray://HOST:8265``      a Ray cluster's Jobs API (``ray+https://`` behind TLS)
``slurm``                ``sbatch``, ``squeue`` and ``scancel``
``kubernetes:NAMESPACE``  Jobs of the cluster that the service runs in
=======================  ============================================================

``AFFIDAVIT_JOB`` is started for each run: a command for Ray (default ``affidavit worker``), a batch
script for Slurm, a Job manifest for Kubernetes. ``--run``, ``--queue`` and ``--name`` are added.
The nodes have the addresses and keys of workers, so no secret passes through the engine.

Reference: Ray 2.60, "Ray Jobs REST API".

>>> build_engine("local", "") is None
True
>>> build_engine("ray://head:8265", "").dashboard_url("affidavit-1")
'http://head:8265/#/jobs/affidavit-1'
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from typing import Any

import httpx

from affidavit.service.core.errors import SettingsError
from affidavit.service.dispatch.engine import (
    JOB_PREFIX,
    Engine,
    EngineUnavailable,
    Job,
    JobRefused,
    JobState,
    request_json,
)

# ---- engines -------------------------------------------------------------------------

MIB = 1024 * 1024
RAY_STATES: Mapping[str, JobState] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "STOPPED": "ended",
    "SUCCEEDED": "ended",
    "FAILED": "ended",
}


class RayJobs:
    """The jobs of the Ray cluster with its dashboard at ``address``; each starts ``command``.

    The service calls Ray's Jobs API over HTTP and does not need Ray. ``RAY_AUTH_TOKEN`` is the
    cluster's token, if it has one.
    """

    def __init__(self, address: str, command: str, client: httpx.Client | None = None) -> None:
        self._client = client or httpx.Client(timeout=30)
        if token := os.environ.get("RAY_AUTH_TOKEN"):
            self._client.headers["Authorization"] = f"Bearer {token}"
        self._address, self._jobs = address, f"{address}/api/jobs/"
        self._command = shlex.split(command)

    def jobs(self) -> Mapping[str, JobState]:
        """Return the jobs of the cluster, which a new head forgets.

        Raises ``EngineUnavailable``.
        """
        listed = request_json(self._client, "GET", self._jobs)
        if not isinstance(listed, list):
            raise EngineUnavailable(f"{self._address} listed no jobs")
        entries = [entry for entry in listed if isinstance(entry, dict)]
        return {
            job_id: RAY_STATES.get(str(entry.get("status")), "running")
            for entry in entries
            if (job_id := str(entry.get("submission_id"))).startswith(JOB_PREFIX)
        }

    def submit(self, job: Job) -> None:
        """Submit the job under its id, which Ray accepts only once."""
        spread = job.hosts > 1 or "--hosts" in self._command
        body: dict[str, Any] = {
            "submission_id": job.id,
            "entrypoint": shlex.join([*self._command, *job.arguments]),
            # Ranks on several nodes request their own resources.
            "entrypoint_num_cpus": 0 if spread else 1,
            "entrypoint_num_gpus": 0 if spread else job.gpus,
            "metadata": {"run": job.run, "queue": job.queue},
        }
        if job.memory:
            body["entrypoint_memory"] = job.memory * MIB
        try:
            request_json(self._client, "POST", self._jobs, json=body)
        except EngineUnavailable:
            if job.id not in self.jobs():
                raise

    def cancel(self, job_id: str) -> None:
        """Stop the job: SIGTERM, and SIGKILL some seconds later."""
        unknown = (httpx.codes.NOT_FOUND,)
        request_json(self._client, "POST", f"{self._jobs}{job_id}/stop", accept=unknown)

    def dashboard_url(self, job_id: str) -> str:
        """Return the URL of the job in Ray's dashboard."""
        return f"{self._address}/#/jobs/{job_id}"


COMMAND_SECONDS = 60
PASSED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "SLURM_CONF"),
    *("AFFIDAVIT_SERVER", "AFFIDAVIT_SITE", "AFFIDAVIT_OUTPUTS"),
)
SLURM_STATES: Mapping[str, JobState] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"), "waiting"),
    **dict.fromkeys(
        (
            *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
            *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
        ),
        "ended",
    ),
}
"""Other states mean that the job is running."""


class Slurm:
    """The jobs of the Slurm cluster with its commands on the path; a job's name is its id.

    ``sbatch`` starts the script with the worker's options as arguments. Slurm accepts several jobs
    of one name, so its queue is checked first; if two start all the same, the second one finds the
    run claimed and exits. Jobs inherit the environment of ``sbatch``, which is limited to
    ``PASSED_VARIABLES`` and contains no secret.
    """

    def __init__(self, script: str) -> None:
        self._script = script

    def jobs(self) -> Mapping[str, JobState]:
        """Return the jobs that ``squeue`` lists; of two with one name, the active one."""
        listed = _run_command("squeue", "--noheader", "--states=all", "--format=%j %T")
        result: dict[str, JobState] = {}
        for line in listed.splitlines():
            name, _, state = line.strip().partition(" ")
            if name.startswith(JOB_PREFIX) and result.get(name, "ended") == "ended":
                result[name] = SLURM_STATES.get(state.strip(), "running")
        return result

    def submit(self, job: Job) -> None:
        """Submit the script with the worker's options, unless a job of that name exists."""
        if job.id in self.jobs():
            return
        # Slurm must not restart a job that lost its node: the dispatcher submits the next one.
        options = [f"--job-name={job.id}", "--no-requeue", f"--gpus-per-node={job.gpus}"]
        options += [f"--mem={job.memory}M"] if job.memory else []
        # The script reads processes and GPUs from the allocation.
        worker = ("--run", job.run, "--queue", job.queue, "--name", job.id)
        _run_command("sbatch", *options, self._script, *worker)

    def cancel(self, job_id: str) -> None:
        """Cancel the jobs of that name."""
        _run_command("scancel", f"--name={job_id}")

    def dashboard_url(self, job_id: str) -> None:
        """Return None: Slurm has no dashboard."""


def _run_command(*command: str) -> str:
    environment = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            check=False,
            env=environment,
            text=True,
            timeout=COMMAND_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineUnavailable(f"{command[0]}: {error}") from None
    if result.returncode:
        raise JobRefused(f"{command[0]}: {result.stderr.strip()[:500]}")
    return result.stdout


def build_engine(dispatch: str, job: str) -> Engine | None:
    """Build the engine of ``AFFIDAVIT_DISPATCH``, None for ``local``; raises ``SettingsError``."""
    if dispatch == "local":
        return None
    kind, _, rest = dispatch.partition(":")
    if kind in ("ray", "ray+https") and re.fullmatch(r"//[A-Za-z0-9.-]+(:[0-9]{1,5})?/?", rest):
        scheme = "https" if kind == "ray+https" else "http"
        return RayJobs(f"{scheme}:{rest.rstrip('/')}", job or "affidavit worker")
    if dispatch == "slurm" and job:
        return Slurm(job)
    if kind == "kubernetes" and re.fullmatch(r"[a-z0-9-]{1,63}", rest) and job:
        from affidavit.service.dispatch.kubernetes_jobs import KubernetesJobs

        return KubernetesJobs.in_cluster(rest, job)
    if not job and (dispatch == "slurm" or kind == "kubernetes"):
        raise SettingsError(
            "AFFIDAVIT_JOB is not set; set it to the batch script or the Job manifest."
        )
    raise SettingsError(
        f"AFFIDAVIT_DISPATCH is {dispatch[:80]!r}; set it to local, ray://HOST:8265, slurm "
        "or kubernetes:NAMESPACE."
    )
