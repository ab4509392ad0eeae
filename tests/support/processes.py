"""Find processes in ``/proc`` by their command lines or their parents."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support.polling import wait_until


def find_processes(matches: Callable[[list[bytes]], bool]) -> list[int]:
    """Return the ids of the processes whose command line (as words) ``matches``."""
    result = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if matches(words):
            result.append(int(process.parent.name))
    return result


def parent_of(pid: int) -> int:
    """Return the id of the parent of process ``pid``."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes_of(parent: int) -> set[int]:
    """Return the ids of all processes below ``parent``."""
    result: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(process.name)
            if parent_of(pid) == parent:
                result |= {pid} | processes_of(pid)
    return result


def gone(pids: set[int]) -> None:
    """Wait until none of the processes is left."""
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
        said=lambda: "worker processes were left behind",
    )
