"""Run a worker as a forked process, with its trainers forked from it.

Importing a trainer takes longer than the work it does in these tests. As in production it is a
child of its worker in its own session, and runs ``exec_with_parent``, which ties its life to the
worker, and then the trainer's ``main``; the only difference is that it does not exec in between.
Multi-process trainers do exec. The worker's threads never run PyTorch, so the fork inherits none
of its locks.

After ``HELD_AFTER`` steps a trainer charges one more and waits while the file ``HELD_WHILE``
exists, so that no run ends before a slow test has acted on it. A file ``HELD`` beside its record
signals this.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from affidavit.worker import exec_with_parent, trainer_process
from affidavit.worker.__main__ import app
from tests.support.forked_processes import end

CHILD = [sys.executable, "-m", "affidavit.worker.exec_with_parent"]
TRAINER = [sys.executable, "-m", "affidavit.trainer"]
HELD_AFTER = 20
HELD = "held"


class Trainer:
    """What ``trainer_process.run`` needs of ``subprocess.Popen``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: int,
        env: Mapping[str, str] | None,
        start_new_session: bool,
    ) -> None:
        assert [*command[:3]] == CHILD
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, stdout, env)
        self._code: int | None = None
        self._handle = os.pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises ``subprocess.TimeoutExpired``."""
        if self._code is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(TRAINER, timeout)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._handle)
        return self._code


def _become(command: Sequence[str], log: IO[bytes], env: Mapping[str, str] | None) -> NoReturn:
    """What ``Popen`` does after its fork, and what the command is."""
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for item in (1, 2):
        os.dup2(log.fileno(), item)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    logging.getLogger().handlers.clear()
    provided = dict(os.environ if env is None else env)
    os.environ.clear()
    os.environ.update(provided)
    sys.argv = [exec_with_parent.__name__, *command[len(CHILD) :]]
    end(exec_with_parent.main)


def _executed(_program: str, command: list[str]) -> NoReturn:
    """In place of ``os.execvp`` at the end of ``child.main``."""
    if command[: len(TRAINER)] == TRAINER:
        from affidavit.trainer import app as trainer
        from affidavit.trainer.run_folder.run_writer import RunWriter

        _hold(RunWriter)
        end(lambda: trainer(command[len(TRAINER) :], prog_name="affidavit train"))
    os.execv(command[0], command)


def _hold(run_writer: Any) -> None:
    charge, steps, while_ = run_writer.charge, count(1), Path(os.environ["HELD_WHILE"])

    def held(self: Any, *given: Any, durable: bool = True) -> None:
        charge(self, *given, durable=durable)
        if durable and next(steps) > HELD_AFTER and while_.exists():
            (self.run_log.folder / HELD).touch()
            while while_.exists():
                time.sleep(0.01)

    run_writer.charge = held


def prepare() -> None:
    """Import what a trainer would."""
    # PyTorch's optimizers import its compiler.
    loaded = ("affidavit.trainer.loop", "affidavit.trainer.sources")
    for name in (*loaded, "affidavit.trainer.__main__", "sklearn.datasets", "torch._dynamo"):
        import_module(name)


def main(arguments: Sequence[str]) -> Any:
    """``python -m affidavit.worker``, which forks its trainers."""
    vars(trainer_process)["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": Trainer})
    vars(os)["execvp"] = _executed
    return app([*arguments], prog_name="affidavit worker")
