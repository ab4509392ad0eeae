"""A run stops before the first record that may differ, and forks for those that go on from there.

What comes before it, such as imports, a model and its tokenizer, is the same in all runs, so it
runs once. A run does not stop where a fork would share more than memory: with other processes, a
file that is open to be written, or temporary files; nor with threads that a fork would miss, those
of Python or of a library that cannot be forked. Only Linux tells these.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

from affidavit.replay.settings import Job

STOPPED = "stopped"
OWN_FILES = {"stderr", "compiled"}
"""What a run has in its folder of results before it ends."""
UNFORKABLE = ("jax", "tensorflow")
"""Libraries whose own threads a fork cannot do without."""
SEMAPHORE = "/dev/shm/sem."
"""Memory that forks may share, because they run one after the other: a lock, as of tqdm's bars."""

_pipes: list[IO[str]] = []
_inherited: set[str] = set()


def may_stop(jobs: int, statuses: int) -> None:
    """Let this process stop, to read from one pipe what to run from there, and write to another.

    What it writes is that it has stopped, and how each of those runs ended.
    """
    _pipes[:] = os.fdopen(jobs), os.fdopen(statuses, "w")
    with contextlib.suppress(OSError):
        _inherited.update(os.listdir("/proc/self/fd"))


def stop(job: Job) -> Job:
    """Stop here, and return once for each job that continues, in a process of its own."""
    jobs, statuses = _pipes
    if not _shares_memory_alone(Path(job.out)):
        os._exit(1)
    below = os.path.relpath(os.getcwd(), job.folder)
    _write(statuses, STOPPED)
    for line in jobs:
        fields = json.loads(line)
        pid = os.fork()
        if pid:
            _write(statuses, wait_for(pid, fields["deadline"]))
            continue
        os.setsid()
        names: Any = getattr(tempfile, "_name_sequence", None)
        if hasattr(names, "_rng_pid"):
            names._rng_pid = os.getpid()  # else it draws a new seed for names of temporary files
        job = Job.from_json(fields["job"])
        os.chdir(Path(job.folder, below))
        return job
    os._exit(0)


def _write(statuses: IO[str], status: object) -> None:
    with contextlib.suppress(OSError):  # nobody reads it: no job follows
        statuses.write(f"{status}\n")
        statuses.flush()


def redirect_output(job: Job) -> None:
    """Write what goes to standard output and error past Python to a file of the job."""
    out = Path(job.out).resolve()
    with (out / "stderr").open("wb") as file:
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)
    os.environ["TMPDIR"] = tempfile.tempdir = str(out)


def _shares_memory_alone(out: Path) -> bool:
    """Whether two forks of this process meet in nothing but files that they open anew."""
    own = Path("/proc/self")
    if not own.exists() or {path.name for path in out.iterdir()} - OWN_FILES:
        return False
    if threading.active_count() > 1 or any(name in sys.modules for name in UNFORKABLE):
        return False
    tasks = list((own / "task").iterdir())
    if any((task / "children").read_text().strip() for task in tasks):
        return False
    if any(_is_running(task) for task in tasks if int(task.name) != os.getpid()):
        return False
    maps = (own / "maps").read_text().splitlines()
    if any(line.split()[1][1::2] == "ws" and SEMAPHORE not in line for line in maps):
        return False
    opened = set(os.listdir(own / "fd")) - _inherited
    return not any(_is_written(own / "fdinfo" / name) for name in opened)


def _is_running(task: Path) -> bool:
    """Whether a thread does something, rather than wait for work."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0] != "S"


def _is_written(info: Path) -> bool:
    """Whether an open file can be written."""
    with contextlib.suppress(OSError):
        flags = next(line for line in info.read_text().splitlines() if line.startswith("flags:"))
        is_file = stat.S_ISREG(os.fstat(int(info.name)).st_mode)
        return is_file and int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def wait_for(pid: int, deadline: float) -> int:
    """Return the exit status of a fork, -9 if it ran for over ``deadline`` seconds."""
    with ended_after(deadline, pid):
        _, status = os.waitpid(pid, 0)
    _end_group(pid)
    return os.waitstatus_to_exitcode(status)


def end(pid: int) -> None:
    """End a fork, with what it started."""
    _end_group(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def ended_after(deadline: float, pid: int) -> Iterator[None]:
    """End a process if the block takes over ``deadline`` seconds."""

    def kill(_: int, __: FrameType | None) -> None:
        os.kill(pid, signal.SIGKILL)

    previous = signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, deadline)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
