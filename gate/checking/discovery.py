"""Discover plan files: files, folders, patterns, or the entries of pyproject.toml.

``[tool.affidavit]`` has plans to check, and the fields of imported plans::

    [tool.affidavit]
    plans = ["plans/*.yaml"]        # checked by `affidavit check` without arguments

    [tool.affidavit.plan]           # or a plan itself
    version = 1

``tomllib`` has no positions, so they are derived from the headers and keys at the start of lines. A
finding inside a multi-line value points at its key.
"""

from __future__ import annotations

import glob
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from affidavit.plan import Document, MalformedPlan, Position, Reason
from affidavit.plan import Path as Pointer

TABLE = ("tool", "affidavit")
MAX_KEY_PARTS = 1_000
_HEADER = re.compile(r"\s*\[(\[)?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')(?:\s*\.\s*[A-Za-z0-9_"'-]+)*)\s*="""
)


def _load(raw: bytes) -> dict[str, Any]:
    """Parse TOML; raises ``MalformedPlan`` with the position of a syntax error."""
    for number, written in enumerate(raw.splitlines(), 1):
        name, equals, _ = written.partition(b"=")
        named = equals or name.lstrip().startswith(b"[")
        if named and name.count(b".") > MAX_KEY_PARTS:  # tomllib takes quadratic time
            message = f"a key has more than {MAX_KEY_PARTS} parts."
            raise _malformed(message, "Write tables in place of dots.", (number, 1))
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also of integers with too many digits
        at = re.search(r"line (\d+), column (\d+)", str(error))
        place = (int(at[1]), int(at[2])) if at else (None, None)
        message = f"not valid TOML: {error}."
        raise _malformed(message, "Correct the text at this position.", place) from None


def _malformed(
    message: str, remedy: str, place: tuple[int, int] | tuple[None, None]
) -> MalformedPlan:
    line, column = place
    return MalformedPlan(
        Reason(code="syntax", message=message, remedy=remedy, line=line, column=column)
    )


def _table(document: dict[str, Any]) -> dict[str, Any]:
    """Return the table ``[tool.affidavit]``, empty if there is none."""
    table: Any = document
    for name in TABLE:
        table = table.get(name, {}) if isinstance(table, dict) else {}
    return table if isinstance(table, dict) else {}


def find_toml_plan(raw: bytes) -> Document | None:
    """Return the plan in ``[tool.affidavit.plan]`` with its positions, or None."""
    plan = _table(_load(raw)).get("plan")
    if plan is None:
        return None
    inside = (*TABLE, "plan")
    return Document(
        plan,
        {
            path[len(inside) :]: place
            for path, place in _positions(raw.decode("utf-8")).items()
            if path[: len(inside)] == inside
        },
    )


def _positions(text: str) -> dict[Pointer, Position]:
    positions: dict[Pointer, Position] = {}
    counts: dict[Pointer, int] = {}
    table: Pointer = ()
    for number, line in enumerate(text.splitlines(), 1):
        column = len(line) - len(line.lstrip()) + 1
        if header := _HEADER.match(line):
            table = _indexed(_names(header[2]), counts, opens=header[1] is not None)
            for length in range(1, len(table) + 1):
                positions.setdefault(table[:length], (number, column))
        elif key := _KEY.match(line):
            names = _names(key[1])
            for length in range(1, len(names) + 1):
                positions.setdefault(table + names[:length], (number, column))
    return positions


def _names(dotted: str) -> Pointer:
    return tuple(
        part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.\s]+", dotted)
    )


def _indexed(names: Pointer, counts: dict[Pointer, int], *, opens: bool) -> Pointer:
    """Return the path of a header, with the latest index of each array of tables."""
    path: Pointer = ()
    for place, name in enumerate(names):
        path = (*path, name)
        last = place == len(names) - 1
        if last and opens:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, str(counts[path]))
    return path


SETTINGS_FILE = Path("pyproject.toml")


def settings() -> dict[str, Any]:
    """Return ``[tool.affidavit]`` of the current folder, empty if there is none.

    Raises ``MalformedPlan``.
    """
    return _table(_load(SETTINGS_FILE.read_bytes())) if SETTINGS_FILE.is_file() else {}


def declared_fields(file: str) -> dict[str, Any]:
    """Return the fields of ``[tool.affidavit.given]`` for a file; raises ``MalformedPlan``."""
    tables = settings().get("given", {})
    fields: Any = {}
    if isinstance(tables, dict):
        matches = (key for key in tables if PurePath(key) == PurePath(file))
        fields = tables.get(next(matches, file), {})
    if not isinstance(fields, dict):
        raise MalformedPlan.with_reason(
            code="wrong_type",
            message=f'[tool.affidavit.given] of "{file}" is not a table.',
            remedy="Make it a table of plan fields.",
        )
    return fields


SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py", ".ipynb")
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv", "site-packages"})
"""Third-party folders; hidden folders and symbolic links are skipped too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file to read; ``explicit`` if the user named it.

    An unreadable folder is a candidate too, so that its error is reported.
    """

    file: str
    explicit: bool


def candidates(names: Sequence[str]) -> Iterator[Candidate]:
    """Yield the files that ``names`` match, each once; without names, those of pyproject.toml.

    A repository's settings name only files inside of it: what they match is quoted in comments.
    Raises ``MalformedPlan`` if a name matches nothing, or if one of the settings leads outside.
    """
    seen: set[str] = set()
    for name in names or _configured_names():
        for candidate in _match_name(name):
            if not names and not _is_inside(candidate.file):
                remedy = "Name files of the repository, and no link that leads out of it."
                raise _no_match(name, f"matches {candidate.file}, outside of this folder", remedy)
            if candidate.file not in seen:
                seen.add(candidate.file)
                yield candidate


def _is_inside(file: str) -> bool:
    """Whether the real path of a file lies in the current folder."""
    return Path(file).resolve().is_relative_to(Path.cwd().resolve())


def _match_name(name: str) -> Iterator[Candidate]:
    if name == "-" or os.path.isfile(name):
        yield Candidate(name, explicit=True)
    elif os.path.isdir(name):
        yield from _files_in(name)
    elif glob.has_magic(name):
        files = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
        if not files:
            raise _no_match(name, "matches no file")
        yield from (Candidate(file, explicit=False) for file in files)
    else:
        # Reading it reports the error.
        yield Candidate(name, explicit=True)


def _files_in(folder: str) -> Iterator[Candidate]:
    failed: list[OSError] = []
    for place, folders, files in os.walk(folder, onerror=failed.append):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS
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
    """Whether the path is a pipe or device, whose reading may block."""
    return path.exists() and not path.is_file()


def _configured_names() -> list[str]:
    remedy = 'Name plans, folders or patterns, or set plans = ["plans/"] in [tool.affidavit].'
    table = settings()
    names = table.get("plans", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _no_match("plans of [tool.affidavit]", "is not a list of strings", remedy)
    if not names and "plan" in table:
        return [str(SETTINGS_FILE)]
    if not names:
        raise _no_match("affidavit check", "was given no plans", remedy)
    return names


def _no_match(name: str, problem: str, remedy: str = "Correct the pattern.") -> MalformedPlan:
    return MalformedPlan.with_reason(
        code="nothing_checked", message=f"{name} {problem}.", remedy=remedy
    )
