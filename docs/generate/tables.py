"""Markdown tables, and types of JSON Schema in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Schema = dict[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; cells may hold bars and line ends."""
    heads = list(head)
    lines = [heads, ["---"] * len(heads), *([_cell(item) for item in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def words(schema: Schema) -> str:
    """What a value may be, in a few words: ``integer from 1 to 100``, ``a or b``."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(words(entry) for entry in schema[key]))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{item}`" for item in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {words(schema.get('items', {}))}"
    if isinstance(kind, list):
        return " or ".join(kind)
    return {"null": "null", "string": "text"}.get(kind, kind) + _range(schema)


def _range(schema: Schema) -> str:
    if schema.get("type") not in {"integer", "number"}:
        return ""
    low = schema.get("ge", schema.get("minimum"))
    high = schema.get("le", schema.get("maximum"))
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    parts = [
        f" from {low:g}" if low is not None else f" above {above:g}" if above is not None else "",
        f" to {high:g}" if high is not None else f" below {below:g}" if below is not None else "",
    ]
    return "".join(parts)
