"""``python -m affidavit.worker.child PARENT COMMAND…``: become COMMAND, and die with PARENT.

PARENT is a process id, or ``launcher`` for a rank of a trainer of several processes: whatever the
worker's own child became.

A process of its own rather than code between fork and exec, where a worker that has threads
must not run Python. On other systems than Linux a trainer outlives a worker that is killed;
what it does then counts for nothing, because its lease is lost.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
LAUNCHER = "AFFIDAVIT_LAUNCHER"


def main() -> None:
    """Ask the kernel for SIGKILL at the parent's end, and become the command.

    Raises ``SystemExit`` where the parent is gone.
    """
    parent, *command = sys.argv[1:]
    if parent == "launcher":
        parent = os.environ[LAUNCHER]
    os.environ[LAUNCHER] = str(os.getpid())  # which it keeps as it becomes the command
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it ended before the line above
            raise SystemExit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
