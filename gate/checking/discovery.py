"""Where plans are looked for: files, folders, patterns, or what pyproject.toml names."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from affidavit.gate.checking.project import SETTINGS, settings
from affidavit.plan import MalformedPlan, Reason

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
PASSED_OVER = frozenset({"node_modules", "__pycache__", "venv", "site-packages"})
"""Folders that hold other people's files; hidden ones and links are passed over too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file to look into; ``asked_for`` if somebody named it and none other.

    A folder is one where it cannot be looked into, so that reading it says so.
    """

    file: str
    asked_for: bool


def candidates(names: Sequence[str]) -> Iterator[Candidate]:
    """The files that ``names`` mean, each once; without names, those of the settings.

    Raises ``MalformedPlan`` where a name means nothing.
    """
    seen: set[str] = set()
    for name in names or _named_in_settings():
        for found in _meant_by(name):
            if found.file not in seen:
                seen.add(found.file)
                yield found


def _meant_by(name: str) -> Iterator[Candidate]:
    if name == "-" or Path(name).is_file():
        yield Candidate(name, asked_for=True)
    elif Path(name).is_dir():
        yield from _below(name)
    elif glob.has_magic(name):
        files = sorted(item for item in glob.glob(name, recursive=True) if Path(item).is_file())
        if not files:
            raise _nothing(name, "matches no file")
        yield from (Candidate(file, asked_for=False) for file in files)
    else:
        # Reading it says why it cannot be read.
        yield Candidate(name, asked_for=True)


def _below(folder: str) -> Iterator[Candidate]:
    failed: list[OSError] = []
    for place, folders, files in os.walk(folder, onerror=failed.append):
        folders[:] = sorted(
            item for item in folders if not item.startswith(".") and item not in PASSED_OVER
        )
        yield from (
            Candidate(os.path.normpath(Path(place) / file), asked_for=False)
            for file in sorted(files)
            if file.lower().endswith(SUFFIXES)
            and not file.startswith(".")
            and not _is_special(Path(place) / file)
        )
    yield from (Candidate(error.filename, asked_for=True) for error in failed)


def _is_special(path: Path) -> bool:
    """Whether it is there and no file, like a pipe, whose reading may never end."""
    return path.exists() and not path.is_file()


def _named_in_settings() -> list[str]:
    remedy = 'Name plans, folders or patterns, or set plans = ["plans/"] in [tool.affidavit].'
    given = settings()
    named = given.get("plans", [])
    if not isinstance(named, list) or not all(isinstance(item, str) for item in named):
        raise _nothing("plans of [tool.affidavit]", "is not a list of names", remedy)
    if not named and "plan" in given:
        return [str(SETTINGS)]
    if not named:
        raise _nothing("nothing", "was named", remedy)
    return named


def _nothing(name: str, what: str, remedy: str = "Correct the pattern.") -> MalformedPlan:
    return MalformedPlan(
        Reason(code="nothing_checked", pointer="", message=f"{name} {what}.", remedy=remedy)
    )
