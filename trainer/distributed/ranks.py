"""``python -m affidavit.trainer.distributed.ranks N COMMAND…``: COMMAND as N ranks of this host.

torchrun starts the ranks, passes SIGTERM on to them unless that is ignored, and ends all when one
ends badly. It is run here with what a supervisor needs besides: this process ends as the rank did
that failed first, with its exit code or by its signal, where torchrun's own would always be 1, and
no rank is ever started again by itself, because a second attempt is another run. The ranks meet on
the loopback interface at a port that torchrun finds, so that several such groups fit on one host.

A rank is a process group of its own. If this process is killed nobody is left to end them:
COMMAND must see to that (``affidavit.worker.child`` does).
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import takewhile

UNFINISHED = 3
USAGE = 2


def main(arguments: list[str]) -> int:
    """Run the ranks to their end; the exit code is that of the first one that failed."""
    if len(arguments) < 2 or not arguments[0].isdecimal() or int(arguments[0]) < 1:
        sys.stderr.write("usage: python -m affidavit.trainer.distributed.ranks N COMMAND...\n")
        return USAGE
    processes, *command = arguments
    # What torchrun says of a failure would hide what the rank itself said last. It reads this
    # as it is imported.
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Options before the command are those of torchrun about other hosts.
    hosts = list(takewhile(lambda word: word.startswith("--"), command))
    command = command[len(hosts) :]
    provided = [
        *(hosts or ["--standalone"]),
        f"--nproc-per-node={processes}",
        "--max-restarts=0",
        "--no-python",
    ]
    options = {action.dest for action in run.get_args_parser()._actions}
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN and "signals_to_handle" in options:
        provided.append("--signals-to-handle=SIGHUP,SIGQUIT")
    try:
        run.run(run.parse_args([*provided, *command]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return int(failure.exitcode)
    except SignalException:
        return UNFINISHED
    return 0


def end(code: int) -> None:
    """End this process by ``code``, which below zero is a signal, as a rank did."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    end(main(sys.argv[1:]))
