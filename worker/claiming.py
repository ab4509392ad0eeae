"""Claim runs one by one, and execute each."""

from __future__ import annotations

import logging
import threading

from affidavit.client import Unreachable
from affidavit.worker.job import WorkerConfig, run_job
from affidavit.worker.lease import Job, LeaseLost, Refused

REFUSED, UNREACHABLE = 2, 3
"""Exit codes of the worker."""
MAX_PAUSE_SECONDS = 30.0
"""Longest pause while the service is unreachable or runs fail."""

log = logging.getLogger("affidavit.worker")


def claim_runs(
    config: WorkerConfig,
    queue: str,
    run: str | None,
    stop: threading.Event,
    *,
    wait: float,
    once: bool,
) -> int:
    """Execute ``run``, or the runs of the queue until ``stop`` is set; return the exit code.

    Pauses double while the service is unreachable or runs fail.
    """
    pause = wait
    while not stop.is_set():
        try:
            job = config.source.claim(queue, config.name, config.lease, run)
        except (Unreachable, LeaseLost) as error:
            log.warning("cannot claim a run at the moment: %s", error)
            if once and pause >= MAX_PAUSE_SECONDS:
                return UNREACHABLE
            stop.wait(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
            continue
        except Refused as error:
            log.error("cannot claim runs: %s: %s", error.code, error)
            return REFUSED
        if job is None and once:
            return 0
        conforms = job is not None and _execute(config, job)
        if job is not None and run is not None:
            return 0  # the engine reads the outcome from the service
        if not conforms:
            stop.wait(pause)
        pause = wait if conforms or job is None else min(2 * pause, MAX_PAUSE_SECONDS)
    return 0


def _execute(config: WorkerConfig, job: Job) -> bool:
    """Execute a claimed run, and return whether its record conforms."""
    log.info("run %s: claimed under fencing token %d", job.run, job.fence)
    try:
        return run_job(config, job)
    except LeaseLost as error:
        log.warning("run %s: the lease is lost, so nothing is reported: %s", job.run, error)
    except Refused as error:
        log.error("run %s: %s: %s", job.run, error.code, error)
    except Exception:
        # A failure must not end the worker. The lease of the run will expire.
        log.exception("run %s: internal error", job.run)
    return False
