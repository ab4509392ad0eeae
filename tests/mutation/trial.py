"""One mutant held against the tests, in a fork of a process that has everything else loaded.

The child compiles the mutated text where the file's own would have been, imports the project
and the tests afresh, and stops at the first test that fails. It has a limit of processor time
and of memory, so that a mutant that never ends, or asks for everything, is killed like one
that fails.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import resource
import shutil
import signal
import tempfile
import time
import types
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

MEMORY = 12 << 30
PATIENCE = 600.0
"""Seconds on the clock after which a child that waits for something is ended."""
NEVER_RAN = {pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What ended the mutant; ``None`` where every test passed."""

    killed_by: str | None
    seconds: float


def load(modules: Iterable[str]) -> None:
    """Import what the tests need of other people's, once for all children."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception:  # parts of libraries for other machines
                continue


def attempt(file: str, source: str, tests: Sequence[str], cpu: float) -> Outcome:
    """Run ``tests`` in their order against ``file`` with another text, in a fork."""
    begin = time.monotonic()
    folder = tempfile.mkdtemp(prefix="mutant-")
    child = os.fork()
    if child == 0:
        os._exit(_child(file, source, tests, cpu, Path(folder)))
    status = _waited(child, begin + PATIENCE)
    said = Path(folder, "killed-by")
    name = said.read_text() if said.exists() else None
    shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.monotonic() - begin, 2)
    if status is None:
        return Outcome(killed_by="no end", seconds=seconds)
    if os.WIFSIGNALED(status):
        return Outcome(killed_by=signal.Signals(os.WTERMSIG(status)).name, seconds=seconds)
    code = os.WEXITSTATUS(status)
    if code in NEVER_RAN:
        raise SystemExit(f"no test was run for a mutant of {file}: {tests[:3]}")
    return Outcome(killed_by=None if code == 0 else name or "import", seconds=seconds)


def _waited(child: int, until: float) -> int | None:
    """The status with which ``child`` ended, or None where it had to be ended, with its own."""
    status = None
    while status is None and time.monotonic() < until:
        ended, found = os.waitpid(child, os.WNOHANG)
        if ended:
            status = found
        else:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def _child(file: str, source: str, tests: Sequence[str], cpu: float, folder: Path) -> int:
    os.setsid()
    seconds = int(cpu + time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    _replace(Path(file).resolve(), source)
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}"]
    # Rewritten assertions would have files read by another way than the one that is replaced.
    options += ["--assert=plain"]
    files = dict.fromkeys(name.partition("::")[0] for name in tests)
    return int(pytest.main([*options, *files], plugins=[_Chosen(tests, folder / "killed-by")]))


def _replace(path: Path, source: str) -> None:
    """Have the import of ``path`` compile ``source``."""
    loader = importlib.machinery.SourceFileLoader
    as_written = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> types.CodeType | None:
        if Path(self.path).resolve() != path:
            return as_written(self, name)
        return compile(source, self.path, "exec", dont_inherit=True)

    loader.get_code = get_code  # type: ignore[method-assign]


class _Chosen:
    """Runs the chosen tests alone, in the order given, and writes down which one failed."""

    def __init__(self, tests: Sequence[str], said: Path) -> None:
        self._place = {name: place for place, name in enumerate(tests)}
        self._said = said

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._place),
            key=lambda item: self._place[item.nodeid],
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._said.exists():
            self._said.write_text(report.nodeid)
