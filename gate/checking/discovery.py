"""Discover plan files: files, folders, patterns, or the entries of pyproject.toml.

``[tool.affidavit]`` has plans to check, the fields of imported plans, and limits::

    [tool.affidavit]
    plans = ["plans/*.yaml"]        # checked by `affidavit check` without arguments
    exclude = ["vendor/**"]         # not read unless a file is named

    [tool.affidavit.plan]           # or a plan itself
    version = 1

    [tool.affidavit.limits]         # of the process that reads the repository
    file_seconds = 60

``tomllib`` has no positions, so they are derived from the headers and keys at the start of lines. A
finding inside a multi-line value points at its key.

A file that lies in the current folder by its name must lie there by its real path too, because a
pull request may replace it by a link, and a comment quotes what was read. A file elsewhere is read
if the user names it.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from affidavit.gate.checking.box import Limits
from affidavit.mechanisms import read_bytes
from affidavit.plan import (
    MAX_JSON_BYTES,
    Document,
    MalformedPlan,
    Position,
    Reason,
    is_inside,
)
from affidavit.plan import Path as Pointer

TABLE = ("tool", "affidavit")
MAX_KEY_PARTS = 1_000
_NAME = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_NAMES = re.compile(rf"\s*+({_NAME}(?:\s*+\.\s*+{_NAME})*+)\s*+")


def _load(raw: bytes) -> dict[str, Any]:
    """Parse TOML; raises ``MalformedPlan`` with the position of a syntax error."""
    import tomllib  # a plan that is named needs none

    for number, written in enumerate(raw.splitlines(), 1):
        name, equals, _ = written.partition(b"=")
        named = equals or name.lstrip().startswith(b"[")
        if named and name.count(b".") > MAX_KEY_PARTS:  # tomllib takes quadratic time
            message = f"a key has more than {MAX_KEY_PARTS} parts."
            raise _malformed(message, "Write tables in place of dots.", (number, 1))
    try:
        document = tomllib.loads(raw.decode("utf-8"))
        _require_small_integers(_table(document))
        return document
    except (ValueError, RecursionError) as error:  # also of integers with too many digits
        at = re.search(r"line (\d+), column (\d+)", str(error))
        place = (int(at[1]), int(at[2])) if at else (None, None)
        message = f"not valid TOML: {error}."
        raise _malformed(message, "Correct the text at this position.", place) from None


def _require_small_integers(part: Any) -> None:
    """Raise ``ValueError`` for an integer beyond TOML's 64 bits, which may take long to print."""
    if isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            _require_small_integers(inner)
    elif isinstance(part, int) and part.bit_length() > 64:
        raise ValueError("an integer has more than 64 bits")


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
        written = line.lstrip()
        column = len(line) - len(written) + 1
        opens = written.startswith("[[")
        header = written.startswith("[")
        match = _NAMES.match(written, 1 + opens if header else 0)
        if match is None or written[match.end() : match.end() + 1] != ("]" if header else "="):
            continue
        names = _names(match[1])
        if header:
            table = _indexed(names, counts, opens=opens)
        path, first = (table, 1) if header else (table + names, len(table) + 1)
        for length in range(first, len(path) + 1):
            positions.setdefault(path[:length], (number, column))
    return positions


def _names(dotted: str) -> Pointer:
    return tuple(part.strip("\"'") for part in re.findall(_NAME, dotted))


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
    if not SETTINGS_FILE.is_file():
        return {}
    raw = read_bytes(SETTINGS_FILE, Path.cwd())
    if len(raw) > MAX_JSON_BYTES:
        raise _malformed("the file is larger than 1 MiB.", "Shorten it.", (None, None))
    return _settings_in(raw)


@lru_cache(maxsize=2)
def _settings_in(raw: bytes) -> dict[str, Any]:
    return _table(_load(raw))


def limits() -> Limits:
    """Return the limits of ``[tool.affidavit.limits]``; raises ``MalformedPlan``."""
    table = settings().get("limits", {})
    if not isinstance(table, dict):
        raise _wrong_limit("is not a table")
    for key, value in table.items():
        most = MAX_LIMITS.get(key)
        if most is None:
            raise _wrong_limit(f"has an unknown key {key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise _wrong_limit(f"has a {key} that is not above 0 and at most {most}")
    return Limits(**{key: type(LIMITS[key])(value) for key, value in table.items()})


LIMITS: dict[str, Any] = {item.name: item.default for item in fields(Limits)}
MAX_LIMITS = {"file_seconds": 3600, "total_seconds": 3600, "memory_mebibytes": 1 << 16}
"""A pull request may write the settings, so that they have bounds of their own."""


def _wrong_limit(problem: str) -> MalformedPlan:
    return MalformedPlan.with_reason(
        code="wrong_limit",
        message=f"[tool.affidavit.limits] {problem}.",
        remedy=f"Use {', '.join(LIMITS)} with positive numbers.",
    )


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
OTHERS_FOLDERS = frozenset({"tests", "test", "vendor", "vendored", "third_party"})
"""Folders whose scripts are left out unless they are named, or ``exclude`` is set."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file to read; ``explicit`` if the user named it.

    Its real path must lie in ``root``, unless that is None. An unreadable folder is a candidate
    too, so that its error is reported.
    """

    file: str
    explicit: bool
    root: Path | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that looks like a plan by its name and is not read."""

    file: str
    why: str


def candidates(names: Sequence[str]) -> Iterator[Candidate | Skipped]:
    """Yield the files that ``names`` match, each once; without names, those of pyproject.toml.

    A repository's settings name only files inside of it: what they match is quoted in comments.
    Raises ``MalformedPlan`` if a name matches nothing, or if one of the settings leads outside.
    """
    seen: set[str] = set()
    try:
        stated = settings()
    except MalformedPlan as unread:
        if not names:
            raise
        stated = {"exclude": []}  # names say what to check, and then nothing is left out
        yield Skipped(str(SETTINGS_FILE), f"its exclude is not known: {unread.reasons[0].message}")
    remedy = 'Write a list of patterns, such as exclude = ["vendor/**", "tests/**"].'
    patterns = _names_in(stated, "exclude", remedy)
    excluded = dict.fromkeys(patterns, 0)
    for name in names or _configured_names(stated):
        root = root_of(name) if names else Path.cwd()
        if names and _is_special(name) and (root is None or is_inside(name, root)):
            root = None  # a pipe that the user names
        for candidate in _match_name(name, root):
            if not names and not is_inside(candidate.file, Path.cwd()):
                remedy = "Name files of the repository, and no link that leads out of it."
                raise _no_match(name, f"matches {candidate.file}, outside of this folder", remedy)
            if candidate.file in seen:
                continue
            seen.add(candidate.file)
            explicit = isinstance(candidate, Candidate) and candidate.explicit
            by = next((item for item in patterns if _is_matched(candidate.file, item)), None)
            if "exclude" not in stated:
                by = _others_folder(candidate.file, name)
            if explicit or by is None:
                yield candidate
            else:
                excluded[by] = excluded.get(by, 0) + 1
    why = "exclude of [tool.affidavit] names it"
    if "exclude" not in stated:
        why = "scripts of others and tests are left out unless their folder is named"
    for pattern, count in excluded.items():
        if count:
            yield Skipped(pattern, f"{why} (files: {count})")


def _others_folder(file: str, name: str) -> str | None:
    """Return the folder of vendored code or tests that a script lies in, below a name."""
    if not file.lower().endswith((".py", ".ipynb")):
        return None
    *folders, _ = PurePath(os.path.relpath(file)).parts
    own = set(PurePath(name).parts)
    return next((part for part in folders if part in OTHERS_FOLDERS - own), None)


def _is_matched(file: str, pattern: str) -> bool:
    """Whether a pattern matches a file, relative to the current folder, or names its folder."""
    path = PurePath(os.path.relpath(file)).as_posix()
    folder = pattern.rstrip("/")
    return path.startswith(f"{folder}/") or any(
        fnmatch.fnmatchcase(place, pattern) for place in (path, f"./{path}")
    )


def root_of(name: str) -> Path | None:
    """Return the current folder if a name that the user typed lies in it, else None."""
    here = Path.cwd()
    return here if name != "-" and Path(os.path.abspath(name)).is_relative_to(here) else None


def _match_name(name: str, root: Path | None) -> Iterator[Candidate | Skipped]:
    named = Candidate(name, explicit=True, root=root)
    if name == "-" or os.path.isfile(name):
        yield named
    elif os.path.isdir(name):
        if root is not None and not is_inside(name, root):
            yield named  # reading it reports the error
        else:
            yield from _files_in(name, root or Path(name))
    elif glob.has_magic(name) and not os.path.lexists(name):
        # What a pattern outside of this folder matches was named by the user.
        files = sorted(_matching(name, root))
        if not files:
            raise _no_match(name, "matches no file")
        for file in files:
            yield _unless_skipped(Candidate(file, explicit=False, root=root))
    else:
        # Reading it reports the error.
        yield named


def _matching(pattern: str, root: Path | None) -> Iterator[str]:
    """Yield the files that a pattern of ``glob`` matches.

    ``**`` follows no links, and no folder is searched twice for the same rest of the pattern, so
    that links to folders above do not multiply the work.
    """
    drive, tail = os.path.splitdrive(pattern)
    parts = tuple(part for part in tail.replace(os.sep, "/").split("/") if part)
    start = drive + os.sep if tail.startswith((os.sep, "/")) else ""
    seen: set[tuple[str, int]] = set()
    todo: list[tuple[str, tuple[str, ...], str | None]] = [(start, parts, None)]
    while todo:
        place, rest, real = todo.pop()
        if not rest:
            if os.path.isfile(place) or _is_special(place):
                yield place
            continue
        if not os.path.isdir(place or os.curdir):
            continue
        real = real or os.path.realpath(place or os.curdir)
        state = (real, len(rest))
        if state in seen or (root is not None and not _may_lead_into(real, root)):
            continue
        seen.add(state)
        part, *after = rest
        if part == "**":
            todo.append((place, tuple(after) or ("*",), real))
            todo += [
                (path, rest, os.path.join(real, name))
                for name, path in _entries(place)
                if not name.startswith(".") and os.path.isdir(path) and not os.path.islink(path)
            ]
        elif glob.has_magic(part):
            todo += [
                (path, tuple(after), None)
                for name, path in _entries(place)
                if fnmatch.fnmatch(name, part) and name.startswith(".") <= part.startswith(".")
            ]
        elif os.path.lexists(path := os.path.join(place, part)):
            todo.append((path, tuple(after), None))


def _may_lead_into(real: str, root: Path) -> bool:
    """Whether a folder lies in ``root``, or above it on the way of an absolute pattern."""
    inner, outer = (os.path.join(path, "") for path in (real, os.path.realpath(root)))
    return inner.startswith(outer) or outer.startswith(inner)


def _entries(place: str) -> list[tuple[str, str]]:
    """Return the names and paths in a folder, or nothing if it is none."""
    try:
        return [(name, os.path.join(place, name)) for name in os.listdir(place or os.curdir)]
    except OSError:
        return []


def _files_in(folder: str, root: Path) -> Iterator[Candidate | Skipped]:
    """Yield the files of a folder and those in it, at any depth: ``os.walk`` recurses."""
    failed: list[str] = []
    pending = [folder]
    while pending:
        place = pending.pop()
        try:
            with os.scandir(place) as entries:
                names = sorted(entry.name for entry in entries)
        except OSError:
            failed.append(place)
            continue
        inside = []
        for name in names:
            path = os.path.join(place, name)
            if name.startswith("."):
                continue
            if not os.path.isdir(path):
                if name.lower().endswith(SUFFIXES):
                    named = Candidate(os.path.normpath(path), explicit=False, root=root)
                    yield _unless_skipped(named)
            elif name not in SKIPPED_FOLDERS and not os.path.islink(path):
                inside.append(path)
        pending += reversed(inside)
    yield from (Candidate(place, explicit=True, root=root) for place in failed)


def _unless_skipped(candidate: Candidate) -> Candidate | Skipped:
    """Return the candidate, or why a file that nobody named is not read."""
    file, root = candidate.file, candidate.root
    if _is_special(file):
        return Skipped(file, "it is a pipe or a device")
    if root is not None and os.path.islink(file) and not is_inside(file, root):
        return Skipped(file, "it leads out of the repository")
    return candidate


def _is_special(path: str) -> bool:
    """Whether the path is a pipe or device, whose reading may block."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _configured_names(table: dict[str, Any]) -> list[str]:
    remedy = 'Name plans, folders or patterns, or set plans = ["plans/"] in [tool.affidavit].'
    names = _names_in(table, "plans", remedy)
    if not names and "plan" in table:
        return [str(SETTINGS_FILE)]
    if not names:
        raise _no_match("affidavit check", "was given no plans", remedy)
    return names


def _names_in(table: dict[str, Any], key: str, remedy: str) -> list[str]:
    """Return a list of file names or patterns of the settings; raises ``MalformedPlan``."""
    names = table.get(key, [])
    if not isinstance(names, list) or not all(_is_name(name) for name in names):
        raise _no_match(f"{key} of [tool.affidavit]", "is not a list of file names", remedy)
    return names


def _is_name(name: Any) -> bool:
    """Whether a setting is the name of a file, and not of standard input."""
    return isinstance(name, str) and "\0" not in name and name != "-"


def _no_match(name: str, problem: str, remedy: str = "Correct the pattern.") -> MalformedPlan:
    return MalformedPlan.with_reason(
        code="nothing_checked", message=f"{name} {problem}.", remedy=remedy
    )
