"""Exec a command that dies with its parent: ``python -m affidavit.worker.exec_with_parent``.

Its arguments are PARENT and the command.

PARENT is a process id, or ``launcher`` for a rank of a multi-process trainer, whose parent is the
process that the worker started.

COMMAND ignores SIGTERM and SIGINT: an engine may send them to every process of a job, but only the
worker decides whether its run continues.

This is a separate program because a worker with threads must not run Python between fork and exec.
On other systems than Linux a trainer outlives a killed worker, but its lease is lost, so the
service refuses its reports.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
LAUNCHER = "AFFIDAVIT_LAUNCHER"


def main() -> None:
    """Ask the kernel for SIGKILL when the parent dies, and exec the command.

    Raises ``SystemExit`` if the parent is gone.
    """
    parent, *command = sys.argv[1:]
    if parent == "launcher":
        parent = os.environ[LAUNCHER]
    os.environ[LAUNCHER] = str(os.getpid())  # exec keeps the process id
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # the parent died before prctl
            raise SystemExit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
