"""Runs in forks of a process, each with limits of time, memory and files.

    python -m affidavit.replay.child torch opacus -- tqdm utils

starts the process in the loop's own interpreter, which imports the named modules once, after ``--``
only what installed packages have, and then forks for each run. Each line of standard input is a
job; each line of standard output is the result of one: ``{"status": 0}``, or -9 after the deadline.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

from affidavit.replay.process_limits import limit_process
from affidavit.replay.settings import Job
from affidavit.replay.traced_run import prepare, run_command

LARGEST_FILE = 1 << 30
"""Bytes of a file that a run may write."""


def main() -> None:
    """Import the modules of the command line, and run the jobs of standard input."""
    end = sys.argv.index("--")
    known, others = sys.argv[1:end], sys.argv[end + 1 :]
    for name in (*known, *filter(_is_installed, others)):
        with contextlib.suppress(Exception):  # the run says so, if it imports this
            pkgutil.resolve_name(name)
    prepare()
    sys.dont_write_bytecode = True  # in the runs, and in what they start
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    gc.freeze()  # the runs' collections leave the imported modules alone
    for line in sys.stdin:
        fields = json.loads(line)
        status = fork(Job.from_json(fields["job"]), fields["deadline"], run_command)
        sys.stdout.write(json.dumps({"status": status}) + "\n")
        sys.stdout.flush()


def _is_installed(name: str) -> bool:
    package = name.partition(".")[0]
    spec = importlib.util.find_spec(package)
    is_own = package == __name__.partition(".")[0]  # also in a checkout
    return is_own or (spec is not None and "-packages/" in str(spec.origin))


def fork(job: Job, deadline: float, run: Callable[[Job], None]) -> int:
    """Call ``run(job)`` in a fork of this process, and return the exit status, -9 if it is late.

    ``deadline`` is in seconds. Whatever the run started ends with it.
    """
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setsid()
            limit_process(memory=job.memory, written=LARGEST_FILE)
            run(job)
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            sys.__stderr__.flush()  # type: ignore[union-attr]
            os._exit(status)

    def end(_: int, __: FrameType | None) -> None:
        os.kill(pid, signal.SIGKILL)

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, deadline)
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
