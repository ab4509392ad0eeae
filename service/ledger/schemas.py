"""What the ledger's routes take and answer, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from affidavit.service.ledger.wanted import (
    WantedBudget,
    WantedCommitment,
    WantedRelease,
    WantedReservation,
    WantedSettlement,
)

_REF = "#/components/schemas/"
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_FLAG = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_DIGEST = {"type": "string", "pattern": r"^sha256:[0-9a-f]{64}$"}
_TIME = {"type": "string", "format": "date-time"}
_DECIMAL = {"type": "string", "description": "A decimal, rounded outward; or Infinity."}
_INTERVAL = {
    "type": ["object", "null"],
    "properties": {"lower": {"type": "number"}, "upper": {"type": ["number", "null"]}},
    "required": ["lower", "upper"],
}


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list_of(name: str) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": _REF + name}}


_SCOPE = {
    "dataset": _TEXT,
    "unit": {"enum": ["example", "user"]},
    "adjacency": {"enum": ["add_remove", "replace_one", "zero_out"]},
}
_READING = {"decides": _FLAG, "meaning": _TEXT}
_COST = _object({"epsilon": _DECIMAL, "delta": _DECIMAL, "mu": _TEXT_OR_NULL})
_SPENT = _object(
    {
        "filter": _object({"epsilon": _DECIMAL, "delta": _DECIMAL, **_READING}),
        "sum": _object({"epsilon": _DECIMAL, "delta": _DECIMAL, **_READING}),
        "composed": _object(
            {"engine": _TEXT_OR_NULL, "epsilon": _INTERVAL, "delta": _DECIMAL, **_READING}
        ),
    },
    "composed",
)
_BUDGET = _object({"version": _COUNT, "epsilon": _DECIMAL, "delta": _DECIMAL})
_SUMMARY = {
    **_SCOPE,
    "budget": _BUDGET,
    "runs": _COUNT,
    "exhausted": _FLAG,
    "spent": _SPENT,
    "remaining": _object({"epsilon": _DECIMAL}),
}
_FORECAST = _object(
    {"certificate": _DIGEST, "runs": _COUNT, "at_least": _FLAG, "message": _TEXT, "cost": _COST}
)

LEDGER_SCHEMAS: dict[str, dict[str, Any]] = {
    **{
        model.__name__: model.model_json_schema()
        for model in (
            WantedBudget,
            WantedReservation,
            WantedCommitment,
            WantedSettlement,
            WantedRelease,
        )
    },
    "LedgerSummary": _object(_SUMMARY),
    "LedgerSummaries": _object({"ledgers": _list_of("LedgerSummary")}),
    "Ledger": _object(
        {
            **_SUMMARY,
            "entries": _list_of("Reservation"),
            "entries_total": _COUNT,
            "forecast": _FORECAST,
        },
        "forecast",
    ),
    "Ledgers": _object({"dataset": _TEXT, "ledgers": _list_of("Ledger")}),
    "Reservation": _object(
        {
            "id": _TEXT,
            **_SCOPE,
            "certificate": _DIGEST,
            "issue": _COUNT,
            "plan_digest": _DIGEST,
            "name": _TEXT_OR_NULL,
            "state": {"enum": ["reserved", "committed", "settled", "released"]},
            "steps": _object({"certified": _COUNT, "run": {"type": ["integer", "null"]}}),
            "record": _TEXT_OR_NULL,
            "admitted_by": {"enum": ["filter", "alone"]},
            "reserved": _COST,
            "charged": _COST,
            "reserved_by": _TEXT,
            "reserved_at": _TIME,
            "changed_at": _TIME,
        }
    ),
}
