"""Which form of a page is requested, and a view as JSON or CSV.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Row:
...     name: str
...     steps: int
>>> to_json(Row("a", 3))
b'{"name": "a", "steps": 3}'
>>> to_csv(Rows(Row, (Row("=1+1", -3),)))
b"name,steps\\r\\n'=1+1,-3\\r\\n"

References: RFC 4180 (CSV); OWASP, CSV injection.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel

from affidavit.service.pages.text import spreadsheet_safe

DATA = (".json", ".csv")
_MACHINES = ("/v1/", "/static/", "/livez", "/readyz", "/metrics", "/openapi.json")

T = TypeVar("T")


# ---- content negotiation ------------------------------------------------------------


def is_data(request: Request) -> bool:
    """Whether the path is that of a page's data."""
    return request.url.path.endswith(DATA)


def is_fragment(request: Request) -> bool:
    """Whether htmx requests a part of a page."""
    return "hx-request" in request.headers and "hx-history-restore-request" not in request.headers


def accepts_html(request: Request) -> bool:
    """Whether a browser sent the request, and not to the API."""
    if request.url.path.startswith(_MACHINES):
        return False
    return "text/html" in request.headers.get("accept", "") or is_fragment(request)


# ---- views --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """The main table of a view: its rows, and the dataclass whose fields are the columns."""

    of: type
    items: Sequence[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListPage(Generic[T]):
    """A page of a list; ``next`` is the cursor of the following page, None on the last."""

    lines: tuple[T, ...]
    next: str | None = None


def view_of(cls: type[T], source: Any, **changes: Any) -> T:
    """The dataclass ``cls`` with the fields that ``source`` has by the same names.

    ``source`` is an object or a mapping; ``changes`` are the fields that differ from it.
    Raises ``TypeError`` for a field that neither has.
    """
    get = source.get if isinstance(source, Mapping) else lambda name: getattr(source, name)
    has = source.__contains__ if isinstance(source, Mapping) else lambda name: hasattr(source, name)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    same = {name: get(name) for name in names if name not in changes and has(name)}
    return cls(**same, **changes)


def to_json(view: object) -> bytes:
    """Every field of ``view``, escaped to ASCII: a text may not be valid UTF-8."""
    return json.dumps(_data(view), ensure_ascii=True, allow_nan=False).encode("ascii")


def to_csv(rows: Rows) -> bytes:
    """A header line and a line for each row, in UTF-8."""
    names = [field.name for field in dataclasses.fields(rows.of)]
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\r\n")
    writer.writerow(names)
    for row in rows.items:
        writer.writerow([_cell(getattr(row, name)) for name in names])
    return output.getvalue().encode("utf-8")


def _data(value: Any) -> Any:
    match value:
        case datetime():
            return _instant(value)
        case Enum():
            return _data(value.value)
        case None | bool() | int() | str():
            return value
        case float():
            # JSON has no infinity, and nothing may be read as a smaller number than it is.
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): _data(member) for key, member in value.items()}
        case list() | tuple():
            return [_data(member) for member in value]
        case set() | frozenset():
            return sorted(_data(member) for member in value)
        case BaseModel():
            return _data(dict(value))
        case _ if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return {field.name: _data(getattr(value, field.name)) for field in fields}
    raise TypeError(f"cannot export {type(value).__name__} as data")


def _cell(value: Any) -> Any:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float() if not isinstance(value, Enum):
            return value
        case datetime():
            return _instant(value)
        case Enum():
            return _cell(value.value)
        case str():
            return spreadsheet_safe(value)
        case list() | tuple() if all(isinstance(member, str) for member in value):
            return spreadsheet_safe(" ".join(value))
    return spreadsheet_safe(json.dumps(_data(value), ensure_ascii=False))


def _instant(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")
