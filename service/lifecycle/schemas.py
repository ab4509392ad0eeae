"""What the routes about a certificate's later life take and answer, for OpenAPI."""

from __future__ import annotations

from typing import Any

from affidavit.service.lifecycle.standing import Status
from affidavit.service.lifecycle.wanted import REASONS

_TEXT = {"type": "string"}
_TIME = {"type": "string", "format": "date-time"}
_DIGEST = {"type": "string", "pattern": r"^sha256:[0-9a-f]{64}$"}
_COUNT = {"type": "integer", "minimum": 0}
_COMMENT = {"type": "string", "maxLength": 2000}
_CODE = {
    "enum": list(REASONS),
    "description": "; ".join(f"`{code}`: {meaning}" for code, meaning in REASONS.items()),
}


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_REVOCATION = _object(
    {
        "certificate_id": _DIGEST,
        "issue": _COUNT,
        "envelope_digest": _DIGEST,
        "code": _CODE,
        "reason": _COMMENT,
        "revoked_by": _TEXT,
        "at": _TIME,
    }
)

LIFECYCLE_SCHEMAS: dict[str, dict[str, Any]] = {
    "WantedDecision": _object(
        {
            "decision": {"enum": ["approve", "reject"], "default": "approve"},
            "envelope": {**_DIGEST, "description": "The envelope_digest of what was looked at."},
            "comment": {**_COMMENT, "description": "Needed to reject."},
        },
        "decision",
        "comment",
    ),
    "WantedRevocation": _object(
        {
            "code": _CODE,
            "reason": {**_COMMENT, "minLength": 1},
            "envelope": {**_DIGEST, "description": "Revoke only if this is still current."},
        },
        "envelope",
    ),
    "Revocation": _REVOCATION,
    "Issues": _object(
        {
            "items": {
                "type": "array",
                "items": _object(
                    {
                        "issue": {**_COUNT, "minimum": 1},
                        "untrusted": {"type": "boolean"},
                        "status": {"enum": [item.value for item in Status]},
                        "verdict": _TEXT,
                        "envelope_digest": _DIGEST,
                        "key_id": _TEXT,
                        "created_at": _TIME,
                        "not_after": _TIME,
                        "approvals": _object(
                            {
                                "required": _COUNT,
                                "decisions": {
                                    "type": "array",
                                    "items": _object(
                                        {
                                            "decision": {"enum": ["approve", "reject"]},
                                            "approver": _TEXT,
                                            "at": _TIME,
                                            "comment": _COMMENT,
                                        }
                                    ),
                                },
                            }
                        ),
                        "revocation": {"oneOf": [_REVOCATION, {"type": "null"}]},
                    }
                ),
            }
        }
    ),
    "StatusList": {
        "type": "object",
        "description": "A DSSE envelope; its payload is signed and short-lived.",
        "properties": {
            "payload": _TEXT,
            "payloadType": {"const": "application/vnd.affidavit.status-list.v1+json"},
            "signatures": {"type": "array", "items": {"type": "object"}},
        },
        "required": ["payload", "payloadType", "signatures"],
    },
}
