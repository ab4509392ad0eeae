"""Slurm by its commands; a job's name is its id.

``sbatch`` starts the script with the worker's options as arguments. Slurm refuses no second job of
a name, so its queue is looked at before; of two all the same, one finds the run claimed and ends.
Jobs inherit the environment of ``sbatch``, which is the service's: only ``VARIABLES`` of it are
passed on, none of which is a secret.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from affidavit.service.dispatch.engine import (
    PREFIX,
    EngineUnavailable,
    Job,
    JobRefused,
    JobState,
)

TIMEOUT = 60
"""Seconds."""
VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "SLURM_CONF"),
    *("AFFIDAVIT_SERVER", "AFFIDAVIT_SITE", "AFFIDAVIT_OUTPUTS"),
)
STATES: Mapping[str, JobState] = {
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
    """The jobs of the cluster whose commands are on the path."""

    def __init__(self, script: str) -> None:
        self._script = script

    def jobs(self) -> Mapping[str, JobState]:
        """The jobs that ``squeue`` still shows; of two of a name, the one that has not ended."""
        listed = _run("squeue", "--noheader", "--states=all", "--format=%j %T")
        result: dict[str, JobState] = {}
        for line in listed.splitlines():
            name, _, state = line.strip().partition(" ")
            if name.startswith(PREFIX) and result.get(name, "ended") == "ended":
                result[name] = STATES.get(state.strip(), "running")
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
        _run("sbatch", *options, self._script, *worker)

    def cancel(self, job_id: str) -> None:
        """End the jobs of the name."""
        _run("scancel", f"--name={job_id}")

    def page(self, job_id: str) -> None:
        """None: Slurm has no dashboard."""


def _run(*command: str) -> str:
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            check=False,
            env=environment,
            text=True,
            timeout=TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineUnavailable(f"{command[0]}: {error}") from None
    if ran.returncode:
        raise JobRefused(f"{command[0]}: {ran.stderr.strip()[:500]}")
    return ran.stdout
