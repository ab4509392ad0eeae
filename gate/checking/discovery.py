"""Discover plan files: files, folders, patterns, or the entries of pyproject.toml."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from affidavit.gate.checking.pyproject import SETTINGS, settings
from affidavit.plan import MalformedPlan, Reason

SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py", ".ipynb")
SKIPPED = frozenset({"node_modules", "__pycache__", "venv", "site-packages"})
"""Third-party folders; hidden folders and symbolic links are skipped too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file to read; ``explicit`` if it was named itself.

    An unreadable folder is a candidate too, so that reading it reports the error.
    """

    file: str
    explicit: bool


def candidates(names: Sequence[str]) -> Iterator[Candidate]:
    """The files that ``names`` match, each once; without names, those of pyproject.toml.

    Raises ``MalformedPlan`` if a name matches nothing.
    """
    seen: set[str] = set()
    for name in names or _configured_names():
        for candidate in _matches(name):
            if candidate.file not in seen:
                seen.add(candidate.file)
                yield candidate


def _matches(name: str) -> Iterator[Candidate]:
    if name == "-" or os.path.isfile(name):
        yield Candidate(name, explicit=True)
    elif os.path.isdir(name):
        yield from _below(name)
    elif glob.has_magic(name):
        files = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
        if not files:
            raise _no_match(name, "matches no file")
        yield from (Candidate(file, explicit=False) for file in files)
    else:
        # Reading it reports why it cannot be read.
        yield Candidate(name, explicit=True)


def _below(folder: str) -> Iterator[Candidate]:
    failed: list[OSError] = []
    for place, folders, files in os.walk(folder, onerror=failed.append):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in SKIPPED
        )
        yield from (
            Candidate(os.path.normpath(Path(place) / file), explicit=False)
            for file in sorted(files)
            if file.lower().endswith(SUFFIXES)
            and not file.startswith(".")
            and not _is_special(Path(place) / file)
        )
    yield from (Candidate(error.filename, explicit=True) for error in failed)


def _is_special(path: Path) -> bool:
    """Whether the path is a pipe or the like, whose reading may block."""
    return path.exists() and not path.is_file()


def _configured_names() -> list[str]:
    remedy = 'Name plans, folders or patterns, or set plans = ["plans/"] in [tool.affidavit].'
    table = settings()
    names = table.get("plans", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _no_match("plans of [tool.affidavit]", "is not a list of strings", remedy)
    if not names and "plan" in table:
        return [str(SETTINGS)]
    if not names:
        raise _no_match("affidavit check", "was given no plans", remedy)
    return names


def _no_match(name: str, problem: str, remedy: str = "Correct the pattern.") -> MalformedPlan:
    return MalformedPlan(
        Reason(code="nothing_checked", pointer="", message=f"{name} {problem}.", remedy=remedy)
    )
