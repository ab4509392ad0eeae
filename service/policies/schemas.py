"""What the routes of policies and waivers take and answer, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from affidavit.certificate.policy import DIGEST_PATTERN, Policy
from affidavit.service.policies.wanted import WantedWaiver

_REF = "#/components/schemas/"
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_DIGEST = {"type": "string", "pattern": DIGEST_PATTERN}
_TIME_OR_NULL = {"type": ["string", "null"], "format": "date-time"}
_ANY = {"type": "object"}
_VERDICT = {"enum": ["certified", "under_noised", "refused", "undecided"]}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _of_model(model: type[Policy] | type[WantedWaiver]) -> dict[str, dict[str, Any]]:
    found = model.model_json_schema(ref_template=_REF + "{model}")
    return {**found.pop("$defs", {}), model.__name__: found}


_NAMED = {"name": _TEXT, "version": {"type": "integer", "minimum": 1}, "digest": _DIGEST}
_SUMMARY = {
    **_NAMED,
    "datasets": {"anyOf": [{"const": "default"}, _list_of(_TEXT)]},
    "active": {"type": "boolean", "description": "Whether plans can come under it now."},
    "created_by": _TEXT_OR_NULL,
    "created_at": _TIME_OR_NULL,
}
_REVOKED = _object({"by": _TEXT, "at": {"type": "string", "format": "date-time"}, "reason": _TEXT})

POLICY_SCHEMAS: dict[str, dict[str, Any]] = {
    **_of_model(Policy),
    **_of_model(WantedWaiver),
    "PolicySummary": _object(_SUMMARY),
    "Policies": _object({"policies": _list_of({"$ref": _REF + "PolicySummary"})}),
    "PolicyVersion": _object(
        {
            **_SUMMARY,
            "policy": {"$ref": _REF + "Policy"},
            "envelope": {
                "type": ["object", "null"],
                "description": "The signed statement (DSSE); null for the built-in policy.",
            },
        }
    ),
    "Waiver": _object(
        {
            "id": _DIGEST,
            "status": {"enum": ["in_force", "expired", "revoked"]},
            "waiver": _ANY,
            "revoked": {"anyOf": [_REVOKED, {"type": "null"}]},
            "envelope": _ANY,
        }
    ),
    "Waivers": _object({"waivers": _list_of({"$ref": _REF + "Waiver"})}),
    "Simulation": _object(
        {
            "policy": _object(_NAMED),
            "judged": {
                "type": "integer",
                "minimum": 0,
                "description": "Certificates of this page that would come under the policy.",
            },
            "changes": _list_of(
                _object(
                    {
                        "certificate_id": _DIGEST,
                        "plan_digest": _DIGEST,
                        "name": _TEXT_OR_NULL,
                        "dataset": _TEXT_OR_NULL,
                        "verdict": _VERDICT,
                        "would_be": _VERDICT,
                        "reasons": _list_of({"$ref": _REF + "ProblemReason"}),
                    }
                )
            ),
            "next": {**_TEXT_OR_NULL, "description": "Path of the next page, for the same body."},
        }
    ),
}
