"""``[tool.affidavit]`` in ``pyproject.toml``: plans to check, and the fields of imported plans.

::

    [tool.affidavit]
    plans = ["plans/*.yaml"]        # checked by `affidavit check` without arguments

    [tool.affidavit.plan]           # or a plan itself
    version = 1

``tomllib`` has no positions, so they are derived from the headers and keys at the beginning of
lines; a finding inside a multi-line value points at its key.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path, PurePath
from typing import Any

from affidavit.plan import Document, MalformedPlan, Position, Reason
from affidavit.plan import Path as Pointer

TABLE = ("tool", "affidavit")
_HEADER = re.compile(r"\s*\[(\[)?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')(?:\s*\.\s*[A-Za-z0-9_"'-]+)*)\s*="""
)


def _load(raw: bytes) -> dict[str, Any]:
    """Parse TOML; raises ``MalformedPlan`` with the position of a syntax error."""
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        line = re.search(r"line (\d+), column (\d+)", str(error))
        raise MalformedPlan(
            Reason(
                code="syntax",
                pointer="",
                message=f"this is not TOML: {error}.",
                remedy="Correct the text at this position.",
                line=int(line[1]) if line else None,
                column=int(line[2]) if line else None,
            )
        ) from None


def _table(document: dict[str, Any]) -> dict[str, Any]:
    """The table ``[tool.affidavit]``, empty if there is none."""
    table: Any = document
    for name in TABLE:
        table = table.get(name, {}) if isinstance(table, dict) else {}
    return table if isinstance(table, dict) else {}


def plan_in(raw: bytes) -> Document | None:
    """The plan of ``[tool.affidavit.plan]`` with its positions, if there is one."""
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
    """The path of a header, with the index of the latest item for each array of tables."""
    path: Pointer = ()
    for place, name in enumerate(names):
        path = (*path, name)
        last = place == len(names) - 1
        if last and opens:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, str(counts[path]))
    return path


SETTINGS = Path("pyproject.toml")


def settings() -> dict[str, Any]:
    """``[tool.affidavit]`` of the current folder, empty if there is none.

    Raises ``MalformedPlan``.
    """
    return _table(_load(SETTINGS.read_bytes())) if SETTINGS.is_file() else {}


def given_for(file: str) -> dict[str, Any]:
    """Plan fields that ``[tool.affidavit.given]`` adds to ``file``; raises ``MalformedPlan``."""
    tables = settings().get("given", {})
    fields: Any = {}
    if isinstance(tables, dict):
        matches = (key for key in tables if PurePath(key) == PurePath(file))
        fields = tables.get(next(matches, file), {})
    if not isinstance(fields, dict):
        raise MalformedPlan(
            Reason(
                code="wrong_type",
                pointer="",
                message=f'[tool.affidavit.given] of "{file}" is not a table.',
                remedy="Make it a table of plan fields.",
            )
        )
    return fields
