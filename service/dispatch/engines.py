"""Engines: Ray, Slurm, and the one that ``AFFIDAVIT_DISPATCH`` names.

=======================  ============================================================
``local``                none: ``affidavit worker`` claims runs one after the other
``ray://HOST:8265``      a Ray cluster's Jobs API (``ray+https://`` behind TLS)
``slurm``                ``sbatch``, ``squeue`` and ``scancel``
``kubernetes:NAMESPACE``  Jobs of the cluster that the service runs in
=======================  ============================================================

``AFFIDAVIT_JOB`` is what the engine starts for a run: a command for Ray (``affidavit worker``), a
batch script for Slurm, a Job's manifest for Kubernetes. ``--run``, ``--queue`` and ``--name`` are
added. Addresses and keys of workers are on the nodes, so that no secret passes through the engine.

Reference: Ray 2.60, "Ray Jobs REST API".

>>> engine_of("local", "") is None
True
>>> engine_of("ray://head:8265", "").page("affidavit-1")
'http://head:8265/#/jobs/affidavit-1'
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import httpx

from affidavit.service.errors import SettingsError

JobState = Literal["waiting", "running", "ended"]
PREFIX = "affidavit-"
JOB = re.compile(rf"{PREFIX}([0-9a-f-]{{36}})-([0-9]+)")

log = logging.getLogger("affidavit.service.dispatch")


class EngineUnavailable(Exception):
    """The engine did not answer; the next round tries again."""


class JobRefused(EngineUnavailable):
    """The engine answered and refused, for the reason in the text; other jobs go on."""

    @classmethod
    def by(cls, answer: httpx.Response) -> Self:
        """The refusal in an answer, whose text may be a traceback that ends in the reason."""
        reason = answer.text.strip().rpartition("\n")[2]
        return cls(f"HTTP {answer.status_code}: {reason[-500:]}")


def ask(
    client: httpx.Client, method: str, url: str, *, same: Collection[int] = (), **sent: Any
) -> Any:
    """The JSON that an engine answers; an empty object with a status in ``same`` as success.

    Raises ``JobRefused`` and ``EngineUnavailable``.
    """
    try:
        answer = client.request(method, url, **sent)
        return {} if answer.status_code in same else answer.raise_for_status().json()
    except httpx.HTTPStatusError as error:
        raise JobRefused.by(error.response) from None
    except (httpx.HTTPError, ValueError, OSError) as error:
        raise EngineUnavailable(f"{method} {url}: {error}") from None


@contextmanager
def others_go_on() -> Iterator[None]:
    """Let a job that the engine refuses hold up no other."""
    try:
        yield
    except JobRefused as error:
        log.warning("a job was refused: %s", error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job of a run, the ``number``-th, with so many ``gpus`` on each of its ``hosts``.

    ``memory`` is in MiB, 0 for the engine's default.
    """

    run: str
    number: int
    queue: str
    gpus: int = 0
    hosts: int = 1
    memory: int = 0

    @property
    def id(self) -> str:
        """What engines know it by: a second submission is of the same job."""
        return job_id_of(self.run, self.number)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Options of ``affidavit worker``; the worker's name tells which job claimed a run."""
        ranks = ("--gpu", "--processes", str(self.gpus)) if self.gpus else ()
        hosts = ("--hosts", str(self.hosts)) if self.hosts > 1 else ()
        return ("--run", self.run, "--queue", self.queue, "--name", self.id, *ranks, *hosts)


def job_id_of(run: str, number: int) -> str:
    """The id of the ``number``-th job of a run."""
    return f"{PREFIX}{run}-{number}"


class Engine(Protocol):
    """What is needed of an engine; all methods raise ``EngineUnavailable`` or ``JobRefused``."""

    def jobs(self) -> Mapping[str, JobState]:
        """The jobs that it knows whose ids have our prefix; it may forget those that ended."""

    def submit(self, job: Job) -> None:
        """Submit a job; nothing happens if one of that id exists."""

    def cancel(self, job_id: str) -> None:
        """End a job, as a signal would; nothing happens if it has ended or is unknown."""

    def page(self, job_id: str) -> str | None:
        """A URL of the engine's dashboard about a job."""


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
    """The jobs of the cluster whose dashboard answers at ``address``; ``command`` is started.

    Ray's Jobs API is called over HTTP, so that the service needs no Ray. ``RAY_AUTH_TOKEN`` is the
    token of a cluster that has one.
    """

    def __init__(self, address: str, command: str, client: httpx.Client | None = None) -> None:
        self._client = client or httpx.Client(timeout=30)
        if token := os.environ.get("RAY_AUTH_TOKEN"):
            self._client.headers["Authorization"] = f"Bearer {token}"
        self._address, self._jobs = address, f"{address}/api/jobs/"
        self._command = shlex.split(command)

    def jobs(self) -> Mapping[str, JobState]:
        """The jobs of the cluster, which a new head forgets; raises ``EngineUnavailable``."""
        listed = ask(self._client, "GET", self._jobs)
        if not isinstance(listed, list):
            raise EngineUnavailable(f"{self._address} listed no jobs")
        entries = [entry for entry in listed if isinstance(entry, dict)]
        return {
            job_id: RAY_STATES.get(str(entry.get("status")), "running")
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
            ask(self._client, "POST", self._jobs, json=body)
        except EngineUnavailable:
            if job.id not in self.jobs():
                raise

    def cancel(self, job_id: str) -> None:
        """Stop the job: SIGTERM, and SIGKILL some seconds later."""
        unknown = (httpx.codes.NOT_FOUND,)
        ask(self._client, "POST", f"{self._jobs}{job_id}/stop", same=unknown)

    def page(self, job_id: str) -> str:
        """The job in Ray's dashboard."""
        return f"{self._address}/#/jobs/{job_id}"


COMMAND_SECONDS = 60
"""Seconds."""
VARIABLES = (
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
"""Other states are those of a job that runs."""


class Slurm:
    """The jobs of the cluster whose commands are on the path; a job's name is its id.

    ``sbatch`` starts the script with the worker's options as arguments. Slurm refuses no second
    job of a name, so its queue is looked at before; of two all the same, one finds the run claimed
    and ends. Jobs inherit the environment of ``sbatch``, which is the service's: only
    ``VARIABLES`` of it are passed on, none of which is a secret.
    """

    def __init__(self, script: str) -> None:
        self._script = script

    def jobs(self) -> Mapping[str, JobState]:
        """The jobs that ``squeue`` still shows; of two of a name, the one that has not ended."""
        listed = _run_command("squeue", "--noheader", "--states=all", "--format=%j %T")
        result: dict[str, JobState] = {}
        for line in listed.splitlines():
            name, _, state = line.strip().partition(" ")
            if name.startswith(PREFIX) and result.get(name, "ended") == "ended":
                result[name] = SLURM_STATES.get(state.strip(), "running")
        return result

    def submit(self, job: Job) -> None:
        """Submit the script with the worker's options, unless a job of the name is there."""
        if job.id in self.jobs():
            return
        # A job that lost its node is not started again by Slurm: the dispatcher submits the next.
        options = [f"--job-name={job.id}", "--no-requeue", f"--gpus-per-node={job.gpus}"]
        options += [f"--mem={job.memory}M"] if job.memory else []
        # The script reads processes and GPUs from the allocation.
        worker = ("--run", job.run, "--queue", job.queue, "--name", job.id)
        _run_command("sbatch", *options, self._script, *worker)

    def cancel(self, job_id: str) -> None:
        """End the jobs of the name."""
        _run_command("scancel", f"--name={job_id}")

    def page(self, job_id: str) -> None:
        """None: Slurm has no dashboard."""


def _run_command(*command: str) -> str:
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            check=False,
            env=environment,
            text=True,
            timeout=COMMAND_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineUnavailable(f"{command[0]}: {error}") from None
    if ran.returncode:
        raise JobRefused(f"{command[0]}: {ran.stderr.strip()[:500]}")
    return ran.stdout


def engine_of(dispatch: str, job: str) -> Engine | None:
    """The engine of a setting, None for ``local``; raises ``SettingsError``."""
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
