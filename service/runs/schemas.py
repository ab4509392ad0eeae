"""What the routes of runs take and answer, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from affidavit.plan import StrictModel
from affidavit.service.runs import wanted

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_COUNT_OR_NULL = {"type": ["integer", "null"]}
_DIGEST = {"type": "string", "pattern": r"^sha256:[0-9a-f]{64}$"}
_TIME = {"type": "string", "format": "date-time"}
_STATE = {"enum": ["queued", "claimed", "running", "settled", "failed", "cancelled"]}
_REF = "#/components/schemas/"


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _wanted(*kinds: type[StrictModel]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in kinds:
        schema = kind.model_json_schema(ref_template=_REF + "{model}")
        found |= schema.pop("$defs", {})
        found[kind.__name__] = schema
    return found


RUN_SCHEMAS: dict[str, Any] = {
    **_wanted(
        wanted.WantedRun,
        wanted.WantedCancellation,
        wanted.WantedClaim,
        wanted.WantedStart,
        wanted.WantedHeartbeat,
        wanted.WantedRecord,
        wanted.WantedCompletion,
        wanted.WantedFailure,
    ),
    "Run": _object(
        {
            "id": _TEXT,
            "state": _STATE,
            "certificate": _DIGEST,
            "issue": _COUNT,
            "plan_digest": _DIGEST,
            "reservation": _TEXT,
            "queue": _TEXT,
            "priority": {"type": "integer"},
            "requirements": _object({"gpu": {"type": "boolean"}, "memory": _COUNT}),
            "time_limit": _COUNT_OR_NULL,
            "data": _TEXT,
            "model": _TEXT,
            "output": _TEXT,
            "worker": _TEXT_OR_NULL,
            "claims": _COUNT,
            "cancel_asked": {"type": "boolean"},
            "steps": _object(
                {
                    "certified": _COUNT,
                    "granted": _COUNT,
                    "reported": _COUNT,
                    "charged": _COUNT_OR_NULL,
                }
            ),
            "code": _TEXT_OR_NULL,
            "message": _TEXT_OR_NULL,
            "record": _TEXT_OR_NULL,
            "provenance": {"type": ["object", "null"]},
            "requested_by": _TEXT,
            "requested_at": _TIME,
            "changed_at": _TIME,
        }
    ),
    "Runs": _object(
        {
            "runs": {"type": "array", "items": {"$ref": _REF + "Run"}},
            "next": {**_TEXT_OR_NULL, "description": "Path of the next page."},
        }
    ),
    "RunEvent": {
        **_object(
            {
                "seq": _COUNT,
                "event": _TEXT,
                "state": _STATE,
                "at": _TIME,
                "code": _TEXT_OR_NULL,
                "message": _TEXT_OR_NULL,
                "worker": _TEXT_OR_NULL,
                "fence": _COUNT_OR_NULL,
                "steps_charged": _COUNT_OR_NULL,
                "record": _TEXT_OR_NULL,
            }
        ),
        "description": "The data of a server-sent event `state`.",
    },
    "RunProgress": {
        **_object(
            {
                "steps": _COUNT,
                "certified": _COUNT,
                "spent": {
                    "description": "ε at the certificate's δ, rounded up, of so many steps, which "
                    "are at least those reported; null where it is not known yet.",
                    "oneOf": [
                        _object({"steps": _COUNT, "epsilon": _TEXT, "delta": _TEXT}),
                        {"type": "null"},
                    ],
                },
            }
        ),
        "description": "The data of a server-sent event `progress`.",
    },
    "Job": {
        "type": ["object", "null"],
        "properties": {
            "run": _TEXT,
            "fence": _COUNT,
            "certificate": _DIGEST,
            "plan_digest": _DIGEST,
            "granted": _COUNT,
            "previous": _COUNT_OR_NULL,
            "data": _TEXT,
            "model": _TEXT,
            "output": _TEXT,
            "time_limit": _COUNT_OR_NULL,
        },
    },
    "Renewal": _object({"cancel": {"type": "boolean"}, "granted": _COUNT}),
    "RecordPart": _object({"part": _COUNT}),
}
