"""From text to a plan, or to reasons that name the field, the line and the remedy.

>>> plan = parse_plan(b'''
... version: 1
... dataset: {size: 60000}
... adjacency: add_remove
... sampling: {scheme: poisson, lot_size: 256}
... epochs: 15
... releases: [{name: all, clip_norm: 1, noise_multiplier: 1.1}]
... target: {delta: 1.0e-5}
... ''', "yaml")
>>> plan.phases[0].sampling.lot_size
256
"""

from __future__ import annotations

import difflib
from functools import cache
from itertools import islice
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from affidavit.plan.loading import load_json, load_yaml, locate_in_json
from affidavit.plan.model import PHASE_FIELDS, Plan
from affidavit.plan.reasons import MalformedPlan, Reason, pointer_to
from affidavit.plan.strictness import Document, Path

Syntax = Literal["json", "yaml"]
MAX_REASONS = 20


def syntax_of(name: str, raw: bytes) -> Syntax:
    """The syntax of a file by its suffix, or by its first character when it has none."""
    if name.endswith((".yaml", ".yml")):
        return "yaml"
    return "json" if name.endswith(".json") or raw.lstrip()[:1] in (b"{", b"[") else "yaml"


def parse_plan(raw: bytes, syntax: Syntax) -> Plan:
    """The plan that ``raw`` says; raises ``MalformedPlan`` with every reason found."""
    document = load_yaml(raw) if syntax == "yaml" else load_json(raw)
    try:
        return plan_from(document.data)
    except MalformedPlan as error:
        places = document if syntax == "yaml" else locate_in_json(raw)
        raise MalformedPlan(*located(error.reasons, places)) from None


def locate(reasons: tuple[Reason, ...], raw: bytes, syntax: Syntax) -> tuple[Reason, ...]:
    """``reasons`` about an accepted plan, with line and column in the text it came from."""
    return located(reasons, load_yaml(raw) if syntax == "yaml" else locate_in_json(raw))


def plan_from(data: Any) -> Plan:
    """The plan of an already loaded tree; raises ``MalformedPlan`` without positions."""
    if not isinstance(data, dict):
        raise MalformedPlan(
            Reason(
                code="wrong_type",
                pointer="",
                message="a plan is a mapping of fields.",
                remedy="Start from one of examples/.",
            )
        )
    if "phases" in data and (both := sorted(PHASE_FIELDS & data.keys())):
        raise MalformedPlan(
            Reason(
                code="conflict",
                pointer=pointer_to(both[0]),
                message=f"{both[0]} is given beside phases.",
                remedy="Move it into each phase, or remove phases.",
            )
        )
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        own = (details for details in found if not _echoes(details, found))
        raise MalformedPlan(*(_reason(each, data) for each in islice(own, MAX_REASONS))) from None


def located(reasons: tuple[Reason, ...], places: Document) -> tuple[Reason, ...]:
    """``reasons`` with the line and column of their pointers in ``places``."""
    return tuple(
        reason if reason.line is not None else places.locate(reason, _path_of(reason.pointer))
        for reason in reasons
    )


def _path_of(pointer: str) -> Path:
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])


def _echoes(details: ErrorDetails, found: list[ErrorDetails]) -> bool:
    """Whether a list is called too short only because an item of it was already refused."""
    loc = details["loc"]
    return details["type"] == "too_short" and any(
        len(other["loc"]) > len(loc) and other["loc"][: len(loc)] == loc for other in found
    )


def _reason(details: ErrorDetails, data: Any) -> Reason:
    path = _path_in(data, details["loc"])
    field = str(path[-1]) if path else "the plan"
    kind = details["type"]
    if kind == "extra_forbidden":
        return Reason(
            code="unknown_field",
            pointer=pointer_to(*path),
            message=f"{field} is not a field of a plan.",
            remedy=_did_you_mean(field),
        )
    if kind == "missing":
        return Reason(
            code="missing_field",
            pointer=pointer_to(*path),
            message=f"{field} is not given.",
            remedy=f"Give {field}.",
        )
    wrong_type = kind.endswith("_type") or kind.endswith("_parsing")
    message = details["msg"][0].lower() + details["msg"][1:]
    shown = "" if isinstance(details["input"], dict | list) else f", not {details['input']!r}"
    return Reason(
        code="wrong_type" if wrong_type else "invalid_value",
        pointer=pointer_to(*path),
        message=f"{field}: {message}{shown[:80]}.",
        remedy="Correct the value; docs/plan.md lists what each field takes.",
    )


def _path_in(data: Any, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """pydantic's location as a path in the document.

    The location also names the variant of a union and the phase that a one-phase
    document leaves out; neither is in the document, so a token that leads nowhere is
    dropped, unless it is the last one (a field that is missing).
    """
    tokens = list(loc)
    if tokens[:2] == ["phases", 0] and "phases" not in data:
        tokens = tokens[2:]
    path: list[str | int] = []
    node = data
    for place, token in enumerate(tokens):
        inside = (isinstance(node, dict) and token in node) or (
            isinstance(node, list) and isinstance(token, int) and token < len(node)
        )
        if inside:
            node = node[token]
            path.append(token)
        elif place == len(tokens) - 1 and isinstance(node, dict):
            path.append(token)
    return tuple(path)


def _did_you_mean(field: str) -> str:
    near = difflib.get_close_matches(field, _field_names(), n=1)
    return f"Did you mean {near[0]}?" if near else "Remove it; docs/plan.md lists the fields."


@cache
def _field_names() -> tuple[str, ...]:
    names: set[str] = set(PHASE_FIELDS)
    schema = Plan.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        names |= part.get("properties", {}).keys()
    return tuple(sorted(names))
