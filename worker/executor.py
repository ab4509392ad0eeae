"""The executor: a trainer in a process group of its own, watched until nothing of it is left.

The trainer is never imported: what it does to its process (memory, CUDA, a crash) stays there.
It is asked to stop with SIGTERM, which ends training after a whole step, and killed with its
whole group when it has not ended ``GRACE`` seconds later. If the worker itself dies, however
it dies, the kernel kills the trainer (``affidavit.worker.child``, on Linux). The ranks of a trainer
of several processes are groups of their own: who started them ends them, or the kernel does when
that is killed.

>>> import sys, tempfile
>>> with tempfile.TemporaryFile() as log:
...     ended = run([sys.executable, "-c", "raise SystemExit(3)"], log, lambda: None, pause=0.05)
>>> ended.code, ended.stopped
(3, None)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Literal

GRACE = 30.0
"""Seconds that a trainer is given to write a checkpoint before it is killed."""

Stop = Literal["ask", "kill"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a process ended; ``stopped`` says whether it was asked to, or killed."""

    code: int
    stopped: Stop | None


def run(
    command: Sequence[str],
    log: IO[bytes],
    watch: Callable[[], Stop | None],
    *,
    environment: Mapping[str, str] | None = None,
    pause: float = 0.5,
) -> Ended:
    """Run ``command`` to its end.

    ``watch`` is called every ``pause`` seconds and may ask for the end, or kill. Output goes to
    ``log``. No process of the group is left when this returns or raises.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "affidavit.worker.child", str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=None if environment is None else dict(environment),
        start_new_session=True,
    )
    stopped: Stop | None = None
    asked_at = 0.0
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return Ended(code=process.wait(pause), stopped=stopped)
            wanted = watch()
            if wanted == "ask" and stopped is None:
                stopped, asked_at = "ask", time.monotonic()
                _signal(process, signal.SIGTERM)
            late = stopped == "ask" and time.monotonic() - asked_at > GRACE
            if wanted == "kill" or late:
                stopped = "kill"
                _signal(process, signal.SIGKILL)
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], sent: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, sent)
