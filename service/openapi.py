"""The OpenAPI document: every body, every status, every error's shape.

Plans are read by our own strict loader and results are stored text, so FastAPI cannot
derive their schemas from a signature; they are written here. A test compares what the
service answers with what it documents.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from affidavit.plan import CLAIM_PATTERN, LARGEST, SMALLEST, plan_schemas
from affidavit.service.keysets.schemas import KEYSET_SCHEMAS
from affidavit.service.ledger.schemas import LEDGER_SCHEMAS
from affidavit.service.lifecycle.schemas import LIFECYCLE_SCHEMAS
from affidavit.service.lifecycle.standing import Status
from affidavit.service.log.schemas import LOG_SCHEMAS
from affidavit.service.models import ProblemReason
from affidavit.service.policies.schemas import POLICY_SCHEMAS
from affidavit.service.runs.schemas import RUN_SCHEMAS

JSON = "application/json"
YAML = ("application/yaml", "application/x-yaml", "text/yaml")
PROBLEM = "application/problem+json"
ID_PATTERN = r"^sha256:[0-9a-f]{64}$"

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]

_MEANINGS = {
    400: "The body is not a plan of schema version 1; the reasons say where and why.",
    401: "It is not known who asks: no token, or one that does not count.",
    403: "The token's scopes do not allow this.",
    404: "There is nothing of that name.",
    408: "The body did not arrive in time.",
    409: "It cannot stand beside what is kept already.",
    413: "The body is too large.",
    415: "The body is neither JSON nor YAML by its content type.",
    422: "A parameter of the URL is not valid.",
    500: "A fault of the service; nothing was stored.",
    503: "Not now: accounting cut off, too many waiting, or the database does not answer.",
}


def problems(*statuses: int) -> Responses:
    """Documentation of these error statuses, with those that any request may meet."""
    content = {PROBLEM: {"schema": _ref("Problem")}}
    return {
        status: {"description": _MEANINGS[status], "content": content}
        for status in sorted({*statuses, 413, 500})
    }


def answers(description: str, schema: str) -> dict[str, Any]:
    """Documentation of a JSON answer."""
    return {"description": description, "content": {JSON: {"schema": _ref(schema)}}}


def plan_body() -> dict[str, Any]:
    """Documentation of a plan as request body."""
    return body("Plan", "A training plan.")


def body(schema: str, description: str) -> dict[str, Any]:
    """Documentation of a request body that our own loader reads."""
    content = {"schema": _ref(schema)}
    return {
        "requestBody": {
            "required": True,
            "description": f"{description} JSON of at most 1 MiB or YAML 1.2 of at most 64 KiB.",
            "content": {JSON: content} | dict.fromkeys(YAML, content),
        }
    }


def json_body(schema: str, description: str, *, required: bool = True) -> dict[str, Any]:
    """Documentation of a request body that comes as JSON and nothing else."""
    content = {JSON: {"schema": _ref(schema)}}
    return {"requestBody": {"required": required, "description": description, "content": content}}


def install(app: FastAPI) -> None:
    """Give ``app`` the document with our schemas in it."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(_plan_schemas() | _SCHEMAS | KEYSET_SCHEMAS | LOG_SCHEMAS)
            schemas["ProblemReason"] = ProblemReason.model_json_schema(mode="serialization")
            _describe_problems(document)
            schemas.update(LEDGER_SCHEMAS | POLICY_SCHEMAS | LIFECYCLE_SCHEMAS | RUN_SCHEMAS)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _describe_problems(document: Schema) -> None:
    """Document the problems of malformed requests in place of FastAPI's own answers to them."""
    for operation in (each for path in document["paths"].values() for each in path.values()):
        responses = operation["responses"]
        if "requestBody" in operation:
            known = {str(status): response for status, response in problems(400, 408, 415).items()}
            operation["responses"] = responses = known | responses
        if "HTTPValidationError" in str(responses.get("422")):
            responses["422"] = problems(422)[422]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _plan_schemas() -> dict[str, Schema]:
    """The plan with phases, and the plan whose only phase's fields stand at the top."""
    return {
        **plan_schemas("#/components/schemas/{model}"),
        "Plan": {"anyOf": [_ref("PlanOfOnePhase"), _ref("PlanOfPhases")]},
    }


def _object(properties: dict[str, Schema], *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_ANY: Schema = {"type": "object"}
_CLAIMED: Schema = {
    "oneOf": [
        {"type": "number", "minimum": SMALLEST, "maximum": LARGEST},
        {"type": "string", "pattern": CLAIM_PATTERN},
    ]
}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}
_INTERVAL: Schema = {
    "type": ["object", "null"],
    "properties": {"lower": {"type": "number"}, "upper": _NUMBER_OR_NULL},
    "required": ["lower", "upper"],
}
_VERDICT: Schema = {"enum": ["certified", "under_noised", "refused", "undecided"]}
_ID: Schema = {"type": "string", "pattern": ID_PATTERN}
_TIME: Schema = {"type": "string", "format": "date-time"}
_STATUS: Schema = {"enum": [entry.value for entry in Status]}
_SUMMARY = _object(
    {
        "id": _ID,
        "untrusted": {**_FLAG, "description": "Signed by a development key."},
        "issue": _COUNT,
        "status": _STATUS,
        "plan_digest": _ID,
        "name": _TEXT_OR_NULL,
        "dataset": _TEXT_OR_NULL,
        "adjacency": _TEXT,
        "verdict": _VERDICT,
        "epsilon_upper": _NUMBER_OR_NULL,
        "delta": _NUMBER_OR_NULL,
        "created_at": _TIME,
        "not_after": _TIME,
    }
)

_SCHEMAS: dict[str, Schema] = {
    "Problem": {
        **_object(
            {
                "type": {"type": "string", "format": "uri-reference"},
                "title": _TEXT,
                "status": {"type": "integer", "minimum": 400, "maximum": 599},
                "code": {**_TEXT, "description": "Stable; never changes its meaning."},
                "detail": _TEXT,
                "reasons": _list_of(_ref("ProblemReason")),
            }
        ),
        "description": "RFC 9457 problem details.",
    },
    "Result": _object(
        {
            "verdict": _VERDICT,
            "plan_digest": _ID,
            "epsilon": {**_INTERVAL, "description": "In nats; lower and upper bound."},
            "delta": _INTERVAL,
            "confidence": {
                **_NUMBER_OR_NULL,
                "description": "With what probability the bounds hold, over draws from the "
                "accountant's seed; null where they are certain.",
            },
            "adjacency": _TEXT,
            "noise_multiplier": _ANY,
            "sensitivity": _NUMBER_OR_NULL,
            "strategy": {**_ANY, "description": "Where noise is correlated across steps."},
            "mu": _NUMBER_OR_NULL,
            "accountants": _list_of(_ANY),
            "reasons": _list_of(_ref("ProblemReason")),
            "warnings": _list_of(_ANY),
            "planning": {**_list_of(_ANY), "description": "For information; no guarantee."},
            "obligations": _list_of(_ANY),
            "policy": {**_ANY, "description": "Name, version and digest of what judged it."},
            "waived": {**_list_of(_ANY), "description": "Reasons, each with its waiver."},
            "certificate": _object(
                {
                    "id": _ID,
                    "bundle": _ANY,
                    "issue": {**_COUNT, "description": "How many times it was issued by then."},
                    "envelope_digest": {**_ID, "description": "What an approval names."},
                    "status": _STATUS,
                }
            ),
        },
        "strategy",
        "policy",
        "waived",
    ),
    "DiagnosisRequest": _object(
        {
            "plan": _ref("Plan"),
            "claimed_epsilon": {**_CLAIMED, "description": "ε in nats, at the plan's δ."},
            "claimed_noise_multiplier": {
                **_CLAIMED,
                "description": "σ of every block, said to reach the plan's target.",
            },
        },
        "claimed_epsilon",
        "claimed_noise_multiplier",
    ),
    "Diagnosis": _object(
        {
            "claim": _ANY,
            "summary": _TEXT,
            "certified": {**_ANY, "description": "A Result without certificate."},
            "explanations": _list_of(
                _object(
                    {
                        "mistakes": _list_of(_TEXT),
                        "accountant": _TEXT,
                        "reproduces": {"type": "number"},
                        "differs_by": {"type": "number"},
                        "agreement": {"enum": ["exactly", "cut", "nearly"]},
                        "steps": _list_of(_ANY),
                    },
                    "accountant",
                    "reproduces",
                    "differs_by",
                    "agreement",
                    "steps",
                )
            ),
            "corrected": {"type": ["object", "null"]},
        }
    ),
    "Curves": _object(
        {
            "plan_digest": _ID,
            "verdict": _VERDICT,
            "accountant": _ANY,
            "adjacency": _TEXT,
            "unit": _TEXT,
            "target": _ANY,
            "epsilon_at_delta": _list_of(_ANY),
            "delta_at_epsilon": _list_of(_ANY),
            "mu": {**_NUMBER_OR_NULL, "description": "Of Gaussian DP, where it is exact."},
            "rho": {**_NUMBER_OR_NULL, "description": "Of zCDP, where it is exact."},
            "renyi": _ANY,
            "trade_off": _list_of(_ANY),
            "advantage": {**_INTERVAL, "description": "Largest TPR - FPR of an attack."},
            "true_positive_rate": _list_of(_ANY),
            "posterior": _list_of(_ANY),
            "profile": _list_of(_ANY),
            "digest": {**_ID, "description": "sha256 of the rest, RFC 8785 canonical JSON."},
        }
    ),
    "Summary": _SUMMARY,
    "Page": _object(
        {
            "items": _list_of(_ref("Summary")),
            "next": {**_TEXT_OR_NULL, "description": "Path of the next page."},
        }
    ),
    "Bundle": {**_ANY, "description": "The signed envelope, and its place in the log."},
    "Keys": _object({"keys": _list_of(_ANY)}),
    "Mechanisms": _object({"mechanisms": _list_of(_ref("Mechanism"))}),
    "Mechanism": _object(
        {
            "name": _TEXT,
            "kind": {"enum": ["optimizer", "wrapper"]},
            "title": _TEXT,
            "releases": _TEXT,
            "sensitivity": _TEXT,
            "proof": {**_TEXT, "description": "Where the sensitivity is proved."},
            "post_processing": _list_of(_TEXT),
            "state_on_raw_data": _list_of(_TEXT),
            "obligations": _list_of(_ANY),
            "needs_auxiliary_block": _FLAG,
            "clipping": _TEXT,
            "noise": _list_of(_TEXT),
            "hyperparameters": _list_of(
                _object(
                    {
                        "field": _TEXT,
                        "takes": _TEXT,
                        "meaning": _TEXT,
                        "changes_the_guarantee": _FLAG,
                    }
                )
            ),
            "sources": _list_of(_TEXT),
            "minimal_plan": _ref("Plan"),
        }
    ),
}
