"""Limits of this process that the kernel enforces, and the processor time of another.

Processes that read or run what others wrote set limits of memory, written files and open files
before they begin.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress


def processor_time_of(process: int) -> float:
    """Return the processor time of a process in seconds, or 0 where the system has no such clock.

    The clock is that of clock_getcpuclockid(3) on Linux.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            return time.clock_gettime(~process << 3 | 2)
    return 0.0


def limit_process(
    *, memory: int, written: int, open_files: int | None = None, is_final: bool = True
) -> None:
    """Bound the memory and the size of each written file, in bytes, and the number of open files.

    No core is written. Unless the limits are ``is_final``, the process may raise them again. A
    system that lacks a limit, such as macOS one of memory, goes without. POSIX only.
    """
    import resource

    bounds = {
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_FSIZE: written,
        resource.RLIMIT_CORE: 0,
    }
    if open_files is not None:
        bounds[resource.RLIMIT_NOFILE] = open_files
    for kind, bound in bounds.items():
        with suppress(ValueError, OSError):
            most = resource.getrlimit(kind)[1]
            limit = bound if most == resource.RLIM_INFINITY else min(bound, most)
            resource.setrlimit(kind, (limit, limit if is_final else most))
