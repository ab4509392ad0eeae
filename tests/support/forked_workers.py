"""Run the tests in processes that are forked once all are collected: ``pytest --forks 3``.

Importing the tests and what they test takes most of a minute and of a process's memory, which
workers that are forked afterwards share. Each begins with a part of the tests in their order,
because neighbours share fixtures, and takes half of what another has left when it is done.
Warnings are errors here, so a worker sends reports alone.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

from tests.support.forked_processes import fork_mothers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="run the tests in so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers, if ``--forks`` says so."""
    count, options = session.config.getoption("forks"), session.config.option
    if not count or options.collectonly or not session.items or session.testsfailed:
        return None
    with _ended(workers := [Worker(session, part) for part in _parts(len(session.items), count)]):
        while running := {one.connection: one for one in workers if one.running}:
            for connection in wait([*running]):
                running[connection].receive(workers)  # type: ignore[index]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    return True


def _parts(number: int, count: int) -> list[range]:
    """``count`` neighbouring ranges of nearly the same length.

    >>> _parts(7, 3)
    [range(0, 2), range(2, 4), range(4, 7)]
    """
    ends = [number * index // count for index in range(count + 1)]
    return [range(*pair) for pair in pairwise(ends)]


@contextmanager
def _ended(workers: Sequence[Worker]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for worker in workers:
            os.kill(worker.pid, signal.SIGINT)
        raise
    finally:
        for worker in workers:
            os.waitpid(worker.pid, 0)
            worker.connection.close()


class Worker:
    """A forked process, the tests that it was sent, and those that wait to be sent."""

    def __init__(self, session: pytest.Session, part: range) -> None:
        self.session, self.waiting = session, deque(part)
        self.running: deque[int] = deque()
        self._start()

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        # Made here, because pytest removes it in the process that made it.
        self.session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self.pid = os.fork()
        if self.pid == 0:
            self.connection.close()
            _work(self.session, theirs)
        theirs.close()
        for _ in range(2):  # which fixtures outlive a test depends on the next one
            self._send([])

    def _send(self, others: Sequence[Worker]) -> None:
        """Send the next test, taking over half of what another has left; or that none is left."""
        if not self.waiting and others:
            most = max((one.waiting for one in others), key=len)
            half = [most.pop() for _ in range((len(most) + 1) // 2)]
            self.waiting.extend(reversed(half))
        index = self.waiting.popleft() if self.waiting else None
        if index is not None:
            self.running.append(index)
        with suppress(BrokenPipeError):  # it has ended, which ``receive`` notices
            self.connection.send(index)

    def receive(self, workers: Sequence[Worker]) -> None:
        """Pass on a report, send a further test, or replace a process that has ended."""
        hook = self.session.config.hook
        try:
            report: Any = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._replace()
            return
        if report is None:
            item = self.session.items[self.running.popleft()]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            self._send(workers)
        else:
            report = hook.pytest_report_from_serializable(config=self.session.config, data=report)
            hook.pytest_runtest_logreport(report=report)

    def _replace(self) -> None:
        """Report the test in which the process ended, and go on in another one."""
        _, status = os.waitpid(self.pid, 0)
        self.connection.close()
        item = self.session.items[self.running.popleft()]
        message = f"the process of the test ended with {os.waitstatus_to_exitcode(status)}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")
        self.session.config.hook.pytest_runtest_logreport(report=report)
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self._start()


# ---- in the worker -----------------------------------------------------------------


def _work(session: pytest.Session, connection: Connection) -> NoReturn:
    code = 1
    try:
        _become_worker(session.config, connection)
        hook, items = session.config.hook, session.items
        index = connection.recv()
        while index is not None:
            following = connection.recv()
            hook.pytest_runtest_protocol(
                item=items[index], nextitem=None if following is None else items[following]
            )
            connection.send(None)
            index = following
        code = 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it too
        session._setupstate.teardown_exact(None)
    finally:
        os._exit(code)


def _become_worker(config: Any, connection: Connection) -> None:
    """Get streams, a folder and random numbers of its own, and send reports, not print them."""
    random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    plugins = config.pluginmanager
    captured = plugins.getplugin("capturemanager")._global_capturing
    for stream in (captured.out, captured.err):
        if hasattr(stream, "targetfd"):
            with tempfile.TemporaryFile() as file:  # in place of one that all workers would share
                os.dup2(file.fileno(), stream.tmpfile.fileno())
    folders = config._tmp_path_factory
    folders._basetemp = folders.getbasetemp() / str(os.getpid())
    folders._basetemp.mkdir(mode=0o700)
    plugins.unregister(name="terminalreporter")
    plugins.register(_Sender(config, connection))
    fork_mothers()


class _Sender:
    def __init__(self, config: Any, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(data)
