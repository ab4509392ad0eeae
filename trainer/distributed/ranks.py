"""``python -m affidavit.trainer.distributed.ranks N COMMAND…``: run COMMAND as N local ranks.

torchrun starts the ranks, forwards SIGTERM to them unless it is ignored, and ends all of them when
one fails. This program adds what a supervisor needs: it ends like the rank that failed first, with
its exit code or by its signal, whereas torchrun always exits with 1. It never restarts a rank,
because a second attempt is another run. The ranks meet on the loopback interface at a port that
torchrun finds, so that several groups of ranks fit on one host.

A rank is its own process group. If this process is killed, nothing ends the ranks: COMMAND must end
by itself (like ``affidavit.worker.exec_with_parent``).
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import takewhile

UNFINISHED = 3
USAGE = 2


def main(arguments: list[str]) -> int:
    """Run the ranks to their end, and return the exit code of the first one that failed."""
    if len(arguments) < 2 or not arguments[0].isdecimal() or int(arguments[0]) < 1:
        sys.stderr.write("usage: python -m affidavit.trainer.distributed.ranks N COMMAND...\n")
        return USAGE
    processes, *command = arguments
    # torchrun's messages about a failure would hide the rank's own. It reads this variable when it
    # is imported.
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Options before the command are torchrun's options about other hosts.
    hosts = list(takewhile(lambda word: word.startswith("--"), command))
    command = command[len(hosts) :]
    arguments = [
        *(hosts or ["--standalone"]),
        f"--nproc-per-node={processes}",
        "--max-restarts=0",
        "--no-python",
    ]
    options = {action.dest for action in run.get_args_parser()._actions}
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN and "signals_to_handle" in options:
        arguments.append("--signals-to-handle=SIGHUP,SIGQUIT")
    try:
        run.run(run.parse_args([*arguments, *command]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return int(failure.exitcode)
    except SignalException:
        return UNFINISHED
    return 0


def exit_like_rank(code: int) -> None:
    """End this process with exit code ``code``, or by the signal ``-code``, like a rank did."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    exit_like_rank(main(sys.argv[1:]))
