"""Run work on a repository in a child process, with limits that the kernel enforces.

The child is a fork of this process, which starts within milliseconds. It tells each item that it
begins, and each result, through a pipe. A timer of its processor time ends it at the deadline of an
item, also inside of C code such as ``re`` or an integer's power; a new child then continues after
that item. Results that were told before are kept.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import BinaryIO, Generic, NoReturn, TypeVar

from affidavit.replay.process_limits import limit_process, processor_time_of

T = TypeVar("T")

MAX_WRITTEN_BYTES = 1 << 26
"""Size of a file that the child may write: a plan with its fixes, or an entry of the cache."""
MAX_OPEN_FILES = 512
GARBAGE_COLLECTION = 50_000, 20, 100
"""Thresholds of a child: syntax trees are millions of objects, and live until it ends."""
OUT_OF_MEMORY, TOO_DEEP = 70, 71
"""Exit codes of a child that had no memory left, or whose input is nested too deeply."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Processor time for each file, and of all children with their parent; memory of a child."""

    file_seconds: float = 60.0
    total_seconds: float = 600.0
    memory_mebibytes: int = 4096


@dataclass(frozen=True)  # with slots, reading it from the pipe takes three times as long
class Begun:
    """An item was begun; it has the child's attention until the next one is."""

    item: str
    is_repeated: bool = False
    """Whether every child must begin with it, so that nothing follows if one is ended in it."""
    of_total: bool = False
    """Whether less is left for the whole than the deadline of an item."""
    seconds: float = math.inf
    """Processor time that it may take, with what this process does with its results."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The child was ended in ``item``; no item follows if ``is_over``."""

    item: str
    why: str
    is_over: bool


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


Work = Callable[[frozenset[str]], Iterator[Begun | Limits | T]]
"""Yields ``Begun`` for each item that is not in the given set, its results, and limits to set."""


def run_in_box(work: Work[T], *, asks_service: bool = False) -> Iterator[Begun | Ended | T]:
    """Yield what ``work`` yields in child processes, and the items in which one was ended.

    Exceptions of ``work`` are raised here. ``work`` runs in this process and without limits where
    the system has no fork, or if it asks a service and this process has other threads, which may
    be the service's: a child does not have them, and would never end. The command has one.
    """
    if not hasattr(os, "fork") or (asks_service and threading.active_count() > 1):
        yield from (message for message in work(frozenset()) if not isinstance(message, Limits))
        return
    done: set[str] = set()
    box: _Box[T] = _Box(work)
    while True:
        last = Begun("", is_repeated=True)
        for message in box.run(frozenset(done)):
            if isinstance(message, Begun):
                last = message
                if not last.is_repeated:
                    done.add(last.item)
            yield message
        if box.why is None:
            return
        is_over = last.of_total or last.is_repeated
        yield Ended(last.item, box.why, is_over)
        if is_over:
            return


class _Box(Generic[T]):
    """Starts children one after another, and adds up their processor time and this process's."""

    def __init__(self, work: Work[T]) -> None:
        self._work, self._limits, self._used = work, Limits(), -time.process_time()
        self._is_late = False
        self.why: str | None = None
        """Why the last child was ended, or None if it finished."""

    def run(self, done: frozenset[str]) -> Iterator[Begun | T]:
        """Yield the messages of one child, which leaves out the items in ``done``."""
        self._is_late = False
        reading, writing = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self._run_child(writing, done)
        os.close(writing)
        reaped = False
        try:
            with open(reading, "rb") as stream:
                yield from self._messages(stream, child)
            _, status, usage = os.wait4(child, 0)
            reaped = True
        finally:
            if not reaped:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        self._used += usage.ru_utime + usage.ru_stime
        # It may have told everything before it was ended for results that take long.
        code = -signal.SIGPROF if self._is_late else os.waitstatus_to_exitcode(status)
        self.why = self._reason(code)

    def _messages(self, stream: BinaryIO, child: int) -> Iterator[Begun | T]:
        """Yield what the child tells; end it if an item and its results take too long together."""
        began, seconds = 0.0, math.inf
        while True:
            try:
                message = pickle.load(stream)  # of a fork of this process
            except (EOFError, pickle.UnpicklingError):  # the end, or ended while it wrote
                return
            if isinstance(message, _Failed):
                raise message.error
            if isinstance(message, Limits):
                self._limits = message
                continue
            if isinstance(message, Begun):
                began, seconds = time.process_time() + processor_time_of(child), message.seconds
            yield message
            if time.process_time() + processor_time_of(child) - began > seconds:
                self._is_late = True
                os.kill(child, signal.SIGPROF)
                return

    def _reason(self, code: int) -> str | None:
        if code == 0:
            return None
        if code == OUT_OF_MEMORY:
            return f"it needs more than {self._limits.memory_mebibytes} MiB of memory"
        if code == TOO_DEEP:
            return "it is nested too deeply"
        if code in (-signal.SIGPROF, -signal.SIGXCPU):
            return "it needs more processor time than its deadline gives"
        return f"reading it ended the process with code {code}"

    def _run_child(self, writing: int, done: frozenset[str]) -> NoReturn:
        """Send what the work yields, and end this process, whatever happens."""
        code = 1
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            warnings.simplefilter("ignore")  # readers' warnings quote what they read, unescaped
            with open(writing, "wb") as stream:
                code = self._send(stream, done)
        except BaseException:
            pass  # the parent is gone, and waits for nothing
        finally:
            os._exit(code)

    def _send(self, stream: BinaryIO, done: frozenset[str]) -> int:
        _limit(self._limits)
        gc.freeze()
        gc.set_threshold(*GARBAGE_COLLECTION)
        try:
            for message in self._work(done):
                if isinstance(message, Begun):
                    self._begin(message, stream)
                    continue
                if isinstance(message, Limits):
                    self._limits = message
                    _limit(message)
                _tell(stream, message)
        except MemoryError:
            return OUT_OF_MEMORY
        except (RecursionError, SystemError):  # CPython 3.11 can lose the former, deep in C code
            return TOO_DEEP
        except Exception as error:
            error.add_note(traceback.format_exc())
            _tell(stream, _Failed(_picklable(error)))
        return 0

    def _begin(self, begun: Begun, stream: BinaryIO) -> None:
        """Tell that an item is begun, and set the timer for it."""
        used = self._used + time.process_time() + processor_time_of(os.getppid())
        left = self._limits.total_seconds - used
        seconds = min(left, self._limits.file_seconds)
        _tell(stream, replace(begun, of_total=left < self._limits.file_seconds, seconds=seconds))
        if left <= 0:
            signal.raise_signal(signal.SIGPROF)  # the timer would let what is short pass
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _tell(stream: BinaryIO, message: object) -> None:
    pickle.dump(message, stream, pickle.HIGHEST_PROTOCOL)
    stream.flush()


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _limit(limits: Limits) -> None:
    # The settings may set others later.
    limit_process(
        memory=limits.memory_mebibytes << 20,
        written=MAX_WRITTEN_BYTES,
        open_files=MAX_OPEN_FILES,
        is_final=False,
    )
