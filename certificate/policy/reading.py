"""From text to a policy, or to reasons that name the field, the line and the remedy.

>>> parse_policy(b"schema_version: 1\\nname: nlg\\nversion: 1\\ndatasets: default\\n", "yaml").name
'nlg'
>>> parse_policy(b'{"schema_version": 1, "name": "nlg", "version": 1, "epsilon_cup": 8}', "json")
Traceback (most recent call last):
affidavit.certificate.policy.document.MalformedPolicy: missing_field at /datasets: ...
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from affidavit.certificate.policy.document import Caps, MalformedPolicy, Policy
from affidavit.plan import (
    Kind,
    MalformedPlan,
    Reason,
    Syntax,
    load_json,
    load_yaml,
    locate_in_json,
    located,
)


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
        raise MalformedPolicy(*_POLICY.reasons(error, data)) from None


def _of_a_policy(reason: Reason) -> Reason:
    """A reader's reason, without the remedies that only a plan has."""
    if reason.code in ("too_large", "too_deep", "empty"):
        return replace(reason, remedy="Give a policy, such as one of examples/policies/.")
    return reason


_POLICY = Kind(
    "a policy",
    lambda: (*Policy.model_fields, *Caps.model_fields),
    "docs/how-to/policies.md",
)
