"""Strict reading of JSON and YAML: the text says one thing, or it is refused.

Stock parsers accept NaN, duplicate keys, numbers that overflow to infinity or vanish to
zero, lone surrogates, and (in YAML) aliases that expand without bound. Any of these can
make two readers see two plans, so all of them are refused here, each naming the field
and, where there is text to point at, its line and column.

JSON is RFC 8259. YAML is the 1.2 core schema: ``yes`` is a string and ``1e-5`` a number.
Numbers are read as IEEE doubles; integers must be exact in one (at most 2^53 - 1).

>>> load_yaml(b"target: {delta: 1e-5}").data
{'target': {'delta': 1e-05}}
>>> load_json(b'{"steps": 1, "steps": 2}')
Traceback (most recent call last):
affidavit.plan.diagnostics.MalformedPlan: duplicate_key at /steps: ...
"""

from __future__ import annotations

import contextlib
import json

from affidavit.plan.diagnostics import MalformedPlan, Reason
from affidavit.plan.strictness import (
    BadNumber,
    Document,
    Pairs,
    Refused,
    checked,
    decoded,
    number,
    placed,
    too_deep,
)
from affidavit.plan.yaml_reader import YamlReader

MAX_JSON_BYTES = 1024 * 1024
MAX_YAML_BYTES = 64 * 1024
"""YAML is parsed in Python, at about 100 kB a second; a larger plan belongs in JSON."""


def load_json(raw: bytes, limit: int = MAX_JSON_BYTES) -> Document:
    """Read one JSON document of at most ``limit`` bytes strictly; raises ``MalformedPlan``."""
    text = decoded(raw, limit, "JSON")
    try:
        parsed = json.loads(
            text,
            object_pairs_hook=Pairs,
            parse_int=lambda literal: number(literal, integral=True),
            parse_float=lambda literal: number(literal, integral=False),
            parse_constant=lambda name: BadNumber("not_finite", f"{name} is not a finite number"),
        )
    except json.JSONDecodeError as error:
        raise MalformedPlan(
            Reason(
                code="syntax",
                pointer="",
                message=f"this is not JSON: {error.msg}.",
                remedy="Mend the text at the position given.",
                line=error.lineno,
                column=error.colno,
            )
        ) from None
    except RecursionError:
        raise MalformedPlan(placed(too_deep(()), (1, 1))) from None
    try:
        return Document(checked(parsed, ()))
    except Refused as found:
        # JSON is (but for details that no plan uses) YAML, whose parser knows positions.
        raise MalformedPlan(_positions_in_json(text).locate(found.reason, found.path)) from None


def locate_in_json(raw: bytes) -> Document:
    """Positions of the fields of a JSON text that ``load_json`` accepted."""
    return _positions_in_json(raw.decode("utf-8"))


def load_yaml(raw: bytes) -> Document:
    """Read one YAML 1.2 document strictly; raises ``MalformedPlan``."""
    text = decoded(raw, MAX_YAML_BYTES, "YAML")
    reader = YamlReader(text)
    try:
        parsed = reader.read()
        document = Document(checked(parsed, ()), reader.positions)
    except Refused as found:
        where = Document(None, reader.positions)
        raise MalformedPlan(where.locate(found.reason, found.path)) from None
    return document


def _positions_in_json(text: str) -> Document:
    if len(text) > MAX_YAML_BYTES:
        return Document(None)
    reader = YamlReader(text)
    with contextlib.suppress(MalformedPlan, Refused):  # what was read so far has its positions
        reader.read()
    return Document(None, reader.positions)
