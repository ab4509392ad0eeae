"""A view as data: JSON of all of it, CSV of its main table.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Row:
...     name: str
...     steps: int
>>> json_of(Row("a", 3))
b'{"name": "a", "steps": 3}'
>>> csv_of(Rows(Row, (Row("=1+1", -3),)))
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
from typing import Any

from affidavit.service.pages.text import inert


@dataclass(frozen=True, slots=True)
class Rows:
    """The main table of a view: its rows, and the dataclass whose fields are the columns."""

    of: type
    items: Sequence[Any]


def json_of(view: object) -> bytes:
    """Every field of ``view``; escaped to ASCII, for a text may have no valid UTF-8."""
    return json.dumps(_data(view), ensure_ascii=True, allow_nan=False).encode("ascii")


def csv_of(rows: Rows) -> bytes:
    """A line of names and a line for each row, in UTF-8."""
    names = [field.name for field in dataclasses.fields(rows.of)]
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\r\n")
    lines.writerow(names)
    for item in rows.items:
        lines.writerow([_cell(getattr(item, name)) for name in names])
    return written.getvalue().encode("utf-8")


def _data(value: Any) -> Any:
    match value:
        case datetime():
            return _instant(value)
        case Enum():
            return _data(value.value)
        case None | bool() | int() | str():
            return value
        case float():
            # JSON has no infinity; nothing here may be read as a smaller number than it is.
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): _data(each) for key, each in value.items()}
        case list() | tuple():
            return [_data(item) for item in value]
        case set() | frozenset():
            return sorted(_data(entry) for entry in value)
        case _ if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return {field.name: _data(getattr(value, field.name)) for field in fields}
    raise TypeError(f"a view holds {type(value).__name__}, which has no form as data")


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
            return inert(value)
        case list() | tuple() if all(isinstance(item, str) for item in value):
            return inert(" ".join(value))
    return inert(json.dumps(_data(value), ensure_ascii=False))


def _instant(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")
