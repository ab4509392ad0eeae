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
PATIENCE = 3600.0
"""Seconds on the clock after which a child that waits for something is ended."""
NEVER_RAN = {pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What ended the mutant, and what that said; ``None`` where every test passed."""

    killed_by: str | None
    seconds: float
    said: str = ""


def load(modules: Iterable[str]) -> None:
    """Import what the tests need of other people's, once for all children."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception:  # parts of libraries for other machines
                continue


Part = tuple[Sequence[str], float]
"""Tests in their order, and how many seconds of processor time they may take."""


def attempt(file: str, source: str, parts: Sequence[Part]) -> Outcome:
    """Run the tests of each part in their order against ``file`` with another text, in a fork."""
    begin = time.monotonic()
    folder = tempfile.mkdtemp(prefix="mutant-")
    child = os.fork()
    if child == 0:
        os._exit(_child(file, source, parts, Path(folder)))
    status = _waited(child, begin + PATIENCE)
    told = Path(folder, "killed-by")
    name, _, stated = (told.read_text() if told.exists() else "import").partition("\n")
    shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.monotonic() - begin, 2)
    if status is None:
        return Outcome(killed_by="no end", seconds=seconds)
    if os.WIFSIGNALED(status):
        return Outcome(killed_by=signal.Signals(os.WTERMSIG(status)).name, seconds=seconds)
    code = os.WEXITSTATUS(status)
    if code in NEVER_RAN:
        raise SystemExit(f"no test was run for a mutant of {file}: {parts}")
    return Outcome(killed_by=name if code else None, seconds=seconds, said=stated)


def _waited(child: int, until: float) -> int | None:
    """The status with which ``child`` ended, or None where it had to be ended, with its own."""
    status = None
    while status is None and time.monotonic() < until:
        ended, result = os.waitpid(child, os.WNOHANG)
        if ended:
            status = result
        else:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def _child(file: str, source: str, parts: Sequence[Part], folder: Path) -> int:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    _replace(Path(file).resolve(), source)
    # Rewritten assertions would have files read by another way than the one that is replaced.
    options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain"]
    options += [f"--basetemp={folder / 'tests'}"]
    for tests, cpu in parts:
        end = int(time.process_time() + cpu) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        files = dict.fromkeys(name.partition("::")[0] for name in tests)
        code = pytest.main([*options, *files], plugins=[_Chosen(tests, folder / "killed-by")])
        if code != pytest.ExitCode.OK:
            return int(code)
    return 0


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
            crash = getattr(report.longrepr, "reprcrash", None)
            stated = "" if crash is None else crash.message.partition("\n")[0]
            self._said.write_text(f"{report.nodeid}\n{stated}")
