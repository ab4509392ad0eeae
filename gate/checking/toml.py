"""``[tool.affidavit]`` in a TOML file: a plan in it, and where the other plans are.

::

    [tool.affidavit]
    plans = ["plans/*.yaml"]        # what `affidavit check` looks at when nothing is named

    [tool.affidavit.plan]           # or the plan itself
    version = 1

The standard library reads TOML without positions, so they are found by the headers and keys
at the beginning of lines; inside a value that spans lines a finding points at its key.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from affidavit.plan import Document, MalformedPlan, Path, Position, Reason

TABLE = ("tool", "affidavit")
_HEADER = re.compile(r"\s*\[(\[)?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')(?:\s*\.\s*[A-Za-z0-9_"'-]+)*)\s*="""
)


def load(raw: bytes) -> dict[str, Any]:
    """The document; raises ``MalformedPlan`` with the line of what is no TOML."""
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        line = re.search(r"line (\d+), column (\d+)", str(error))
        raise MalformedPlan(
            Reason(
                code="syntax",
                pointer="",
                message=f"this is not TOML: {error}.",
                remedy="Mend the text at the position given.",
                line=int(line[1]) if line else None,
                column=int(line[2]) if line else None,
            )
        ) from None


def settings(document: dict[str, Any]) -> dict[str, Any]:
    """What ``[tool.affidavit]`` says, or nothing."""
    found: Any = document
    for name in TABLE:
        found = found.get(name, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def plan_in(raw: bytes) -> Document | None:
    """The plan of ``[tool.affidavit.plan]`` with its positions, if there is one."""
    found = settings(load(raw)).get("plan")
    if found is None:
        return None
    inside = (*TABLE, "plan")
    return Document(
        found,
        {
            path[len(inside) :]: place
            for path, place in _positions(raw.decode("utf-8")).items()
            if path[: len(inside)] == inside
        },
    )


def _positions(text: str) -> dict[Path, Position]:
    found: dict[Path, Position] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    for number, line in enumerate(text.splitlines(), 1):
        column = len(line) - len(line.lstrip()) + 1
        if header := _HEADER.match(line):
            table = _indexed(_names(header[2]), counts, opens=header[1] is not None)
            for length in range(1, len(table) + 1):
                found.setdefault(table[:length], (number, column))
        elif key := _KEY.match(line):
            names = _names(key[1])
            for length in range(1, len(names) + 1):
                found.setdefault(table + names[:length], (number, column))
    return found


def _names(dotted: str) -> Path:
    return tuple(
        part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.\s]+", dotted)
    )


def _indexed(names: Path, counts: dict[Path, int], *, opens: bool) -> Path:
    """The path of a header, with the index of the latest item for each array of tables."""
    path: Path = ()
    for place, name in enumerate(names):
        path = (*path, name)
        last = place == len(names) - 1
        if last and opens:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, str(counts[path]))
    return path
