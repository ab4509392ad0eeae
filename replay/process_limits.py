"""Limits of this process that the kernel enforces: memory, written files, open files.

Processes that read or run what others wrote set them before they begin.
"""

from __future__ import annotations

from contextlib import suppress


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
