"""Run the trainer as a subprocess in its own process group, and report why it failed.

The trainer is not imported, so that its memory, CUDA state and crashes stay in its own process. A
file requests it to stop after the current step; ``GRACE_SECONDS`` later its process group is
killed. If the worker dies, the kernel kills the trainer (``exec_with_parent``, on Linux). The ranks
of a multi-process trainer have process groups of their own, and are ended by their launcher, or by
the kernel if the launcher is killed.

A trainer's log may quote training data (like a cell that is not a number), so it stays on this
host. The service receives only a code of the trainer.

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

GRACE_SECONDS = 600.0
"""Time to start, to end a step and to write the weights, before the trainer is killed.

A step and the weights of a large model take minutes. A killed run is charged in full.
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
    """Run ``command`` with its output in ``log``, and return its exit code.

    ``poll`` is called every ``pause`` seconds. It may request a stop through the file ``stop``, or
    kill the process, as a stop without a file does. No process of the group survives this call.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "affidavit.worker.exec_with_parent", str(os.getpid()), *command],
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
                kill_at = now if stop is None else now + GRACE_SECONDS
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


LOG_TAIL_BYTES = 65536
"""End of a log that is searched for a code."""


def failure_reason(log: Path) -> str:
    """Return the trainer's code at the end of its log, and nothing else of the log."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        code = line.partition(":")[0]
        if any(meaning.part == "trainer" for meaning in explain(code)):
            return f": {code} (affidavit explain {code}). The worker's log says more."
    return ". The worker's log says more."
