"""From text to a policy, or to reasons that name the field, the line and the remedy.

>>> parse_policy(b"schema_version: 1\\nname: nlg\\nversion: 1\\ndatasets: default\\n", "yaml").name
'nlg'
>>> parse_policy(b'{"schema_version": 1, "name": "nlg", "version": 1, "epsilon_cup": 8}', "json")
Traceback (most recent call last):
affidavit.certificate.policy.document.MalformedPolicy: missing_field at /datasets: ...
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from affidavit.certificate.policy.document import Caps, MalformedPolicy, Policy
from affidavit.plan.loading import load_json, load_yaml, locate_in_json
from affidavit.plan.parse import Syntax, located
from affidavit.plan.reasons import MalformedPlan, Reason, pointer_to

MAX_REASONS = 20
SHOWN = 80


def parse_policy(raw: bytes, syntax: Syntax) -> Policy:
    """The policy that ``raw`` says; raises ``MalformedPolicy`` with every reason found."""
    try:
        document = load_yaml(raw) if syntax == "yaml" else load_json(raw)
    except MalformedPlan as error:
        raise MalformedPolicy(*(_of_a_policy(reason) for reason in error.reasons)) from None
    try:
        return policy_from(document.data)
    except MalformedPolicy as error:
        places = document if syntax == "yaml" else locate_in_json(raw)
        raise MalformedPolicy(*located(error.reasons, places)) from None


def policy_from(data: Any) -> Policy:
    """The policy of an already loaded tree; raises ``MalformedPolicy`` without positions."""
    if not isinstance(data, dict):
        raise MalformedPolicy(
            Reason(
                code="wrong_type",
                pointer="",
                message="a policy is a mapping of fields.",
                remedy="Start from one of examples/policies/.",
            )
        )
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        names = (*Policy.model_fields, *Caps.model_fields)
        raise MalformedPolicy(*reasons_of(error, data, "a policy", names)) from None


def reasons_of(
    error: ValidationError, data: Any, what: str, names: Sequence[str]
) -> tuple[Reason, ...]:
    """pydantic's errors about ``data`` as reasons; ``names`` are the fields that ``what`` has."""
    found = islice(error.errors(include_url=False), MAX_REASONS)
    return tuple(_reason(each, data, what, names) for each in found)


def _of_a_policy(reason: Reason) -> Reason:
    """A reader's reason, without the remedies that only a plan has."""
    if reason.code in ("too_large", "too_deep", "empty"):
        return replace(reason, remedy="Give a policy, such as one of examples/policies/.")
    return reason


def _reason(details: ErrorDetails, data: Any, what: str, names: Sequence[str]) -> Reason:
    path = _path_in(data, details["loc"])
    field = str(path[-1])[:SHOWN] if path else what
    kind = details["type"]
    if kind == "extra_forbidden":
        return Reason(
            code="unknown_field",
            pointer=pointer_to(*path),
            message=f"{field} is not a field of {what}.",
            remedy=_did_you_mean(field, names),
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
        message=f"{field}: {message}{shown[:SHOWN]}.",
        remedy="Correct the value; docs/how-to/policies.md lists what each field takes.",
    )


def _path_in(data: Any, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """pydantic's location without the variants of a union, which are not in the document."""
    path: list[str | int] = []
    node = data
    for place, token in enumerate(loc):
        inside = (isinstance(node, dict) and token in node) or (
            isinstance(node, list) and isinstance(token, int) and token < len(node)
        )
        if inside:
            node = node[token]
            path.append(token)
        elif place == len(loc) - 1 and isinstance(node, dict) and token != "[key]":
            path.append(token)
    return tuple(path)


def _did_you_mean(field: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(field, names, n=1)
    if near:
        return f"Did you mean {near[0]}?"
    return "Remove it; docs/how-to/policies.md lists the fields."
