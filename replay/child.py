"""Runs in forks of a process, each with limits of time, memory and files.

    python -m affidavit.replay.child torch opacus -- tqdm utils

starts the process in the loop's own interpreter, which imports the named modules once, after ``--``
only what installed packages have, and then forks for each run. Each line of standard input is a
job; each line of standard output is the result of one: ``{"status": 0}``, or -9 after the deadline.

A run can stop before the first record that may differ, and fork for the runs that go on from there.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from typing import IO

from affidavit.replay import stopping
from affidavit.replay.process_limits import limit_process
from affidavit.replay.settings import Job
from affidavit.replay.stopping import STOPPED, wait_for
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
    runs = Runs(run_command)
    for line in sys.stdin:
        fields = json.loads(line)
        status = runs.launch(Job.from_json(fields["job"]), fields["deadline"])
        sys.stdout.write(json.dumps({"status": status}) + "\n")
        sys.stdout.flush()


def _is_installed(name: str) -> bool:
    package = name.partition(".")[0]
    spec = importlib.util.find_spec(package)
    is_own = package == __name__.partition(".")[0]  # also in a checkout
    return is_own or (spec is not None and "-packages/" in str(spec.origin))


class Runs:
    """Runs jobs in forks of this process, or of a run that has stopped."""

    def __init__(self, run: Callable[[Job], None]) -> None:
        self._run = run
        self._stopped: tuple[int, IO[str], IO[str]] | None = None

    def launch(self, job: Job, deadline: float) -> int:
        """Run a job, and return its exit status; -9 after ``deadline`` seconds.

        The status of one with ``pause`` is 0 if it has stopped there, and can be continued.
        """
        if job.pause is not None:
            return self._start(job, deadline)
        if job.continues and self._stopped is not None:
            _, jobs, statuses = self._stopped
            jobs.write(json.dumps({"job": job.to_json(), "deadline": deadline}) + "\n")
            jobs.flush()
            return int(statuses.readline() or 1)
        self.close()
        return fork(job, deadline, self._run)

    def close(self) -> None:
        """End the run that has stopped."""
        if self._stopped is not None:
            pid, jobs, statuses = self._stopped
            self._stopped = None
            jobs.close()
            statuses.close()
            stopping.end(pid)

    def _start(self, job: Job, deadline: float) -> int:
        self.close()
        (of_jobs, jobs), (statuses, of_statuses) = os.pipe(), os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.close(jobs)
            os.close(statuses)
            stopping.may_stop(of_jobs, of_statuses)
            _run_and_exit(job, self._run)
        os.close(of_jobs)
        os.close(of_statuses)
        self._stopped = pid, os.fdopen(jobs, "w"), os.fdopen(statuses)
        with stopping.ended_after(deadline, pid):
            has_stopped = self._stopped[2].readline() == f"{STOPPED}\n"
        if not has_stopped:
            self.close()
        return int(not has_stopped)


def fork(job: Job, deadline: float, run: Callable[[Job], None]) -> int:
    """Call ``run(job)`` in a fork of this process, and return the exit status, -9 if it is late.

    ``deadline`` is in seconds. Whatever the run started ends with it.
    """
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _run_and_exit(job, run)
    return wait_for(pid, deadline)


def _run_and_exit(job: Job, run: Callable[[Job], None]) -> None:
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


if __name__ == "__main__":
    main()
