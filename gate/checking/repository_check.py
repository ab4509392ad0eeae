"""Check the plans of a repository: find, read, evaluate and fix them, in the child process.

What is found is yielded as it is found, because the child may be ended at any time.
"""

from __future__ import annotations

import os
import stat
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from affidavit.gate.checking.box import Begun, Limits
from affidavit.gate.checking.cache import Evaluator
from affidavit.gate.checking.discovery import (
    SETTINGS_FILE,
    Candidate,
    Skipped,
    candidates,
    limits,
)
from affidavit.gate.checking.finding import (
    CheckResult,
    Fix,
    GateFinding,
    UnreadableBase,
    unreadable_result,
)
from affidavit.gate.checking.source import Source, read_sources
from affidavit.gate.exit_codes import Exit
from affidavit.mechanisms import read_bytes
from affidavit.plan import MalformedPlan, Reason, printable
from affidavit.trust import write_atomically

if TYPE_CHECKING:
    from affidavit.gate.checking.service_check import ServiceCheck

__all__ = [
    "Checked",
    "Evaluating",
    "RepositoryCheck",
    "Searched",
    "UnreadableBase",
    "UnwritableFix",
]

SCRIPT_SUFFIXES = (".py", ".ipynb")
MAX_ERROR_LENGTH = 200
"""Characters of the text of an internal error, which may have a whole file in it."""
SEARCH = "affidavit check"
"""The name of the search for files, as of something that is checked."""


class UnwritableFix(Exception):
    """A fixed file cannot be written."""

    def __init__(self, file: str, cause: OSError) -> None:
        super().__init__(file, cause)
        self.file, self.cause = file, cause


@dataclass(frozen=True)
class Searched:
    """A script or notebook that nobody named is searched for a private call."""

    file: str


@dataclass(frozen=True, slots=True)
class Evaluating:
    """A plan is being evaluated, which may take seconds."""

    name: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a plan or of an unreadable file.

    ``fixed`` has a line for each fix that was applied, ``changes`` those since the base, and
    ``corrupt`` the entries of the cache that were removed.
    """

    result: CheckResult
    fixed: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    corrupt: tuple[Path, ...] = ()


Told = Begun | Limits | Searched | Skipped | Evaluating | Checked


@dataclass(frozen=True, slots=True)
class RepositoryCheck:
    """The work of ``affidavit check`` on the files that ``names`` match."""

    names: Sequence[str]
    evaluator: Evaluator
    service: ServiceCheck | None
    fix: bool
    base: str | None

    def __call__(self, done: frozenset[str]) -> Iterator[Told]:
        """Yield what is found in files that are not in ``done``."""
        if str(SETTINGS_FILE) not in done:
            yield Begun(str(SETTINGS_FILE))
            yield from self._limits()
        yield Begun(SEARCH, is_repeated=True)
        try:
            files = list(candidates(self.names))
        except MalformedPlan as error:
            is_of_settings = error.reasons[0].code == "syntax"
            name = str(SETTINGS_FILE) if is_of_settings else SEARCH
            yield Checked(unreadable_result(name, error.reasons))
            return
        todo = [item for item in files if item.file not in done]
        with _one_walk(todo):
            for item in todo:
                yield Begun(item.file)
                yield from self._results(item)

    def _results(self, item: Candidate | Skipped) -> Iterator[Told]:
        """Yield what is found in one file."""
        if isinstance(item, Skipped):
            yield item
            return
        if not item.explicit and item.file.lower().endswith(SCRIPT_SUFFIXES):
            yield Searched(item.file)
        try:
            yield from self._check(item)
        except (UnwritableFix, UnreadableBase, MemoryError, RecursionError, SystemError):
            raise
        except OSError as error:
            yield Checked(unreadable_result(item.file, (_unreadable(item.file, error),)))
        except Exception as error:  # the other files keep their results
            yield Checked(_failed_result(item.file, error))

    def _limits(self) -> Iterator[Told]:
        """Yield the limits of the settings; other errors are told where a setting is needed."""
        try:
            yield limits()
        except MalformedPlan as error:
            if error.reasons[0].code == "wrong_limit":
                yield Checked(unreadable_result(str(SETTINGS_FILE), error.reasons))

    def _check(self, candidate: Candidate) -> Iterator[Told]:
        try:
            sources = list(read_sources(candidate))
        except MalformedPlan as error:
            yield Checked(unreadable_result(candidate.file, error.reasons))
            return
        for source in sources:
            yield Evaluating(source.name)
            result = self.evaluator.evaluate_cached(source)
            fixed: tuple[str, ...] = ()
            if self.fix:
                result, fixed = self._fixed(source, result, candidate.root)
            if self.service is not None:
                result = self.service.apply(source, result)
            corrupt = tuple(self.evaluator.corrupt)
            self.evaluator.corrupt.clear()
            yield Checked(result, fixed, self._changes(source), corrupt)

    def _changes(self, source: Source) -> tuple[str, ...]:
        if self.base is None:
            return ()
        # Imported here because most checks compare nothing.
        from affidavit.gate.checking.evaluate import describe_changes

        return tuple(describe_changes(source, self.base))

    def _fixed(
        self, source: Source, result: CheckResult, root: Path | None
    ) -> tuple[CheckResult, tuple[str, ...]]:
        """Apply the first fix of each finding and evaluate again."""
        # A symbolic link is resolved so that its target is edited. A pipe cannot be edited.
        file = Path(source.file).resolve()
        if not _fixes(result) or source.file == "-" or not file.is_file():
            return result, ()
        from affidavit.gate.checking.fixes import apply_edits

        content = read_bytes(file, root)
        current = source.find_same(content)
        if current is not None and current.text != source.text:
            # A fix of another plan in the same file has moved this one.
            result = self.evaluator.evaluate(current)
        fixes = _fixes(result)
        edits = tuple(edit for fix in fixes for edit in fix.edits)
        text = apply_edits(content.decode("utf-8"), edits)
        try:
            write_atomically(file, text.encode(), mode=stat.S_IMODE(file.stat().st_mode))
        except OSError as error:
            raise UnwritableFix(str(file), error) from None
        lines = tuple(f"{printable(source.name)}: fixed: {fix.description}" for fix in fixes)
        fixed = source.find_same(text.encode())
        return result if fixed is None else self.evaluator.evaluate(fixed), lines


def _one_walk(files: Sequence[Candidate | Skipped]) -> AbstractContextManager[None]:
    """Find the modules of the repository once for all of its scripts, if there are any."""
    if not any(item.file.lower().endswith(SCRIPT_SUFFIXES) for item in files):
        return nullcontext()
    from affidavit.importers import one_walk

    return one_walk()


def _unreadable(file: str, error: OSError) -> Reason:
    """Return that a file was not checked, because another one that it depends on is not read."""
    return Reason(
        code="unreadable",
        message=f"{file} was not checked: {error.filename}: {error.strerror}.",
        remedy="Make this file or folder readable, or remove it.",
    )


def _failed_result(file: str, error: Exception) -> CheckResult:
    """Return the result of a file in whose reading this program failed."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_LENGTH]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    reason = Reason(
        code="internal_error",
        message=f"{file} was not checked: internal error ({text}, {place}).",
        remedy="Please report the file.",
    )
    finding = GateFinding.of(file, reason)
    return CheckResult(file=file, name=file, exit=Exit.UNDECIDED, findings=(finding,))


def _fixes(result: CheckResult) -> list[Fix]:
    return [
        finding.fixes[0] for finding in result.findings if finding.fixes and finding.fixes[0].edits
    ]
