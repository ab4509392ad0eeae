"""Run the trainer as a subprocess in its own process group, and report why it failed.

The trainer is never imported, so that its memory use, CUDA state and crashes stay in its own
process. A file asks it to stop after the current step; ``GRACE`` seconds later its whole process
group is killed. If the worker dies, the kernel kills the trainer (``affidavit.worker.child``, on
Linux). The ranks of a multi-process trainer have process groups of their own: their launcher ends
them, or the kernel does when the launcher is killed.

A trainer's log may quote training data (a cell that is not a number, say), so it stays on this
host. The service only receives one of the trainer's codes.

>>> import sys, tempfile
>>> with tempfile.TemporaryFile() as log:
...     run([sys.executable, "-c", "raise SystemExit(3)"], log, lambda: None, pause=0.05)
3
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from affidavit.plan import explain

GRACE = 600.0
"""Seconds a trainer has to start, to end its step and to write its weights before it is killed.

Steps and weights of large models take minutes; a run whose trainer is killed is charged in full.
"""

Stop = Literal["ask", "kill"]


def run(
    command: Sequence[str],
    log: IO[bytes],
    poll: Callable[[], Stop | None],
    *,
    stop: Path | None = None,
    environment: Mapping[str, str] | None = None,
    pause: float = 0.5,
) -> int:
    """The exit code of ``command``, whose output goes to ``log``.

    ``poll`` is called every ``pause`` seconds and may ask the process to stop, by the file
    ``stop``, or kill it, which is how a process without such a file stops. No process of the group
    is left when this returns or raises.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "affidavit.worker.child", str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=None if environment is None else dict(environment),
        start_new_session=True,
    )
    kill_at: float | None = None
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(pause)
            action, now = poll(), time.monotonic()
            if action == "ask" and kill_at is None:
                kill_at = now if stop is None else now + GRACE
                if stop is not None:
                    with suppress(OSError):  # disk full: it is killed after its grace
                        stop.touch()
            if action == "kill" or (kill_at is not None and now >= kill_at):
                _kill(process)
    finally:
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


TAIL = 65536
"""Bytes at the end of a log that are searched for a code."""


def failure_reason(log: Path) -> str:
    """The trainer's code at the end of its log, and nothing else of it."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL))
        lines = stream.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        code = line.partition(":")[0]
        if any(meaning.room == "trainer" for meaning in explain(code)):
            return f": {code} (affidavit explain {code}). The worker's log says more."
    return ". The worker's log says more."
