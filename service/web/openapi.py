"""The OpenAPI document, derived by FastAPI and completed here.

FastAPI derives parameters, request bodies and responses from the models of each route. This module
adds the problems, the access rules, and plans and policies as request bodies, which our own strict
loader reads. A test compares every response with the document.

``openapi_examples.json`` has an example of each body, recorded in a test, with long texts and lists
shortened. A test validates each against the schema of its model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import Field
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse

from affidavit.certificate.policy import Policy
from affidavit.client import DIGEST, RecordedRequest, ResponseModel, RunEvent, RunProgress
from affidavit.plan import plan_schemas, with_schema_keywords
from affidavit.service.core.wire_models import DiagnosisRequest, ProblemReason
from affidavit.service.web.access import (
    Guard,
    Open,
    guarded_routes,
)
from affidavit.service.web.routing import JSON as JSON
from affidavit.service.web.routing import YAML as YAML

# ---- examples ------------------------------------------------------------------------

PROBLEM = "application/problem+json"
RECORDED = Path(__file__).with_name("openapi_examples.json")

Schema = dict[str, Any]

_CHECKPOINT = (
    "affidavit.example/log\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
    "— affidavit.example/log az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeO\n"
)
_TEXTS = {
    "/metrics": "affidavit_requests_total 1\n",
    "/v1/log/checkpoint": _CHECKPOINT,
    "/v1/tlog/checkpoint": _CHECKPOINT,
    "/v1/tlog/tile/{level}/{number}": "256 hashes of 32 bytes",
    "/v1/tlog/tile/entries/{number}": "256 entries, each after its length in two bytes",
    "/v1/runs/{run_id}/evidence": "PK",
    "/v1/certificates/{certificate_id}/evidence": "PK",
    "/v1/runs/{run_id}/record": '{"type": "header", "version": 1}\n',
    "/v1/runs/{run_id}/events": "id: 7-120\nevent: progress\n"
    'data: {"steps": 120, "certified": 400, "spent": null}\n\n',
}
"""Examples of responses that are not JSON."""


def with_examples(document: Schema) -> Schema:
    """Add an example to every request body and response of ``document``."""
    examples = document["components"]["examples"] = _examples()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _show_examples(operation, examples, _TEXTS.get(path))
    return document


def _examples() -> dict[str, Schema]:
    """Return an example of each model of a body, and of a problem of each status."""
    recorded = json.loads(RECORDED.read_bytes())
    recorded["RunPage"] = {"items": [recorded["Run"]], "next": None}
    for status, (code, meaning) in _STATUSES.items():
        recorded[f"Problem{status}"] = {
            "type": f"/problems/{code}",
            "title": HTTPStatus(status).phrase,
            "status": status,
            "code": code,
            "detail": meaning,
            "reasons": [],
        }
    return {name: {"value": value} for name, value in recorded.items()}


def _show_examples(operation: Schema, examples: Schema, text: str | None) -> None:
    bodies = [(None, operation["requestBody"])] if "requestBody" in operation else []
    for status, body in [*bodies, *operation["responses"].items()]:
        for media, content in list(body.get("content", {}).items()):
            name = f"Problem{status}" if media == PROBLEM else _model_of(content["schema"])
            example = content.get("examples", {"text": {"value": text}})
            if name in examples:
                example = {name: {"$ref": f"#/components/examples/{name}"}}
            body["content"] = {**body["content"], media: {**content, "examples": example}}


def _model_of(schema: Schema) -> str:
    """Return the name of the model that a schema refers to, alone or with null."""
    for part in (schema, *schema.get("anyOf", ())):
        if "$ref" in part:
            return str(part["$ref"].rpartition("/")[2])
    return ""


# ---- the document --------------------------------------------------------------------

ID_PATTERN = DIGEST
SCHEME = "bearer"
REF = "#/components/schemas/{model}"

TAGS = {
    "certificates": "Certify plans, and read, approve and revoke certificates.",
    "certifications": "Plans that take longer to certify than a request.",
    "diagnoses": "Explain a claimed number.",
    "runs": "Request, watch and report training runs.",
    "queues": "Assign runs to workers.",
    "ledgers": "Budgets of data sets.",
    "reservations": "What runs take from a budget.",
    "policies": "What an organisation requires.",
    "waivers": "Granted exceptions.",
    "keys": "Keys that sign.",
    "keyset": "The keyset in force.",
    "keysets": "Signed sets of keys.",
    "status": "The signed list of revoked certificates.",
    "log": "The append-only log and its proofs.",
    "tlog": "The log as C2SP tiles, for monitors.",
    "mechanisms": "What optimisers release.",
    "health": "Probes and metrics.",
}
"""The resources by the first segment of their paths."""

Responses = dict[int | str, dict[str, Any]]

_STATUSES = {
    400: ("malformed_request", "The body is malformed; the reasons say where and why."),
    401: ("unauthenticated", "Authentication required: no token, or one that is not valid."),
    403: ("missing_scope", "You don't have permission."),
    404: ("not_found", "Not found."),
    408: ("body_incomplete", "The body did not arrive in time."),
    409: ("wrong_state", "The request conflicts with the current state."),
    413: ("too_large", "The body is too large."),
    415: ("unsupported_media_type", "Unsupported content type."),
    422: ("invalid_parameter", "A parameter of the URL or a header is not valid."),
    429: ("rate_limited", "Too many requests, in a minute or at once."),
    500: (
        "internal_error",
        "Internal error. Check whether the request took effect before you repeat it.",
    ),
    503: (
        "too_busy",
        "Temporarily unavailable: accounting cut off, too many plans waiting, or no database.",
    ),
}
"""An example code and the description of each status."""
_CHALLENGE = {
    "WWW-Authenticate": {
        "schema": {"type": "string"},
        "description": "RFC 6750: the scheme, and what is wrong.",
    }
}
_RETRY_AFTER = {
    "Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}
}
_LOCATION = {
    "Location": {
        "schema": {"type": "string", "format": "uri-reference"},
        "description": "The path of the new resource.",
    }
}
_RATE_LIMIT = {
    "RateLimit-Policy": {
        "schema": {"type": "string"},
        "description": "`q` requests in `w` seconds.",
    },
    "RateLimit": {
        "schema": {"type": "string"},
        "description": "`r` requests remain; all are back in `t` seconds.",
    },
}
_HEADERS = {
    201: _LOCATION,
    202: _LOCATION | _RETRY_AFTER,
    401: _CHALLENGE,
    403: _CHALLENGE,
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}


class ProblemDocument(ResponseModel):
    """RFC 9457 problem details."""

    type: str = Field(json_schema_extra={"format": "uri-reference"})
    title: str
    status: int = Field(ge=400, le=599)
    code: str = Field(description="Stable; never changes its meaning.")
    detail: str
    reasons: list[ProblemReason]


RECORDED_REQUEST: Responses = {
    202: {
        "model": RecordedRequest,
        "description": "Recorded; it takes effect once enough others send the same.",
    }
}


def problems(*statuses: int) -> Responses:
    """Return the documentation of a route's own error statuses.

    Others are added automatically: 401, 403 and 429 for its access, 400, 408 and 415 for its body,
    422 for its parameters.
    """
    content = {PROBLEM: {"schema": _ref("ProblemDocument")}}
    return {
        status: {"description": _STATUSES[status][1], "content": content} for status in statuses
    }


def body(schema: str, description: str) -> dict[str, Any]:
    """Return the documentation of a plan or policy as request body."""
    content = {"schema": _ref(schema)}
    return {
        "requestBody": {
            "required": True,
            "description": f"{description} JSON of at most 1 MiB or YAML 1.2 of at most 64 KiB.",
            "content": {JSON: content} | dict.fromkeys(YAML, content),
        }
    }


def json_body(schema: str, description: str) -> dict[str, Any]:
    """Return the documentation of a request body that must be JSON."""
    content = {JSON: {"schema": _ref(schema)}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


def document_bytes(app: FastAPI) -> bytes:
    """Return the document as JSON, made once: by ``serve`` before the first request."""
    if not hasattr(app.state, "openapi"):
        app.state.openapi = bytes(JSONResponse(app.openapi()).body)
    result: bytes = app.state.openapi
    return result


def install(app: FastAPI) -> None:
    """Let ``app`` generate this document on first use."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _document(app: FastAPI) -> Schema:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(_schemas())
    components["securitySchemes"] = {
        SCHEME: {
            "type": "http",
            "scheme": "bearer",
            "description": "A token from `affidavit tokens new` or from the OpenID provider. "
            "While there is neither, a program on the service's own machine may submit and audit "
            "without one.",
        }
    }
    for path, method, access in guarded_routes(app):
        operation = document["paths"].get(path, {}).get(method.lower())
        if operation is not None:
            _describe_operation(operation, access)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _name_operation(operation, method, path)
    document["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    document["servers"] = [{"url": "/", "description": "The service that answered."}]
    for name in ("HTTPValidationError", "ValidationError", "PlanDocument", "PolicyDocument"):
        components["schemas"].pop(name, None)
    return with_examples(_with_public_names(document))


def _with_public_names(document: Schema) -> Schema:
    """Rename ``Page_Run_`` to ``RunPage``, and refer to the plan's own schema."""
    text = re.sub(r"\bPage_(\w+?)_\b", r"\1Page", json.dumps(document))
    text = re.sub(r"schemas/(Plan|Policy)Document\b", r"schemas/\1", text)
    renamed: Schema = with_schema_keywords(json.loads(text, object_hook=_without_object_default))
    return renamed


def _without_object_default(part: Schema) -> Schema:
    """Remove a default that is an object, which client generators reject."""
    if isinstance(part.get("default"), dict) and "title" in part:
        del part["default"]
    return part


def _name_operation(operation: Schema, method: str, path: str) -> None:
    """Tag an operation with its resource and name it by verb and resource, as ``cancel_run``.

    Functions that change something have the name of the verb or the whole operation; functions
    that read have the name of what they return.
    """
    resource = path.removeprefix("/v1").split("/")[1]
    operation["tags"] = [resource if resource in TAGS else "health"]
    function = operation["operationId"].partition(re.sub(r"\W", "_", path))[
        0
    ]  # FastAPI appends the path
    singular = re.sub("ies$", "y", resource).removesuffix("s") if resource != "status" else resource
    if resource not in TAGS:
        name = function
    elif method != "get":
        name = function if "_" in function else f"{function}_{singular}"
    elif function == resource and function not in ("keyset", "status"):
        name = f"list_{function}"
    else:
        name = f"get_{function}" if function.startswith(singular) else f"get_{singular}_{function}"
    operation["operationId"] = name


def _describe_operation(operation: Schema, access: Guard | Open) -> None:
    """Add the access rules of an operation, and the problems that they and its body imply."""
    responses = operation["responses"]
    statuses = set(_problem_statuses(operation, access))
    if isinstance(access, Guard):
        operation["security"] = [{SCHEME: [scope.value]} for scope in access.scopes]
        forbidden = f"The token has no scope {' or '.join(access.scopes)}."
        responses["403"] = {**problems(403)[403], "description": forbidden}
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
        statuses.add(422)
    for status in statuses:
        responses.setdefault(str(status), problems(status)[status])
    limits = _RATE_LIMIT if 429 in statuses else {}
    for status, response in responses.items():
        waits = RecordedRequest.__name__ in str(response)  # without a resource to look at
        headers = {**({} if waits else _HEADERS.get(int(status), {})), **limits}
        if headers:
            responses[status] = {**response, "headers": headers}
    operation["responses"] = dict(sorted(responses.items()))


def _problem_statuses(operation: Schema, access: Guard | Open) -> Iterator[int]:
    yield from (413, 500)
    if isinstance(access, Guard):
        yield from (401, 403, 503)
    if isinstance(access, Guard) or access.limited:
        yield 429
    if "requestBody" in operation:
        yield from (400, 408, 415)


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(model=name)}


def _schemas() -> dict[str, Schema]:
    """Return the schemas that no route's signature refers to."""
    models: list[tuple[type[ResponseModel], Literal["serialization"]]] = [
        (ProblemDocument, "serialization"),
        (DiagnosisRequest, "serialization"),
        (RunEvent, "serialization"),
        (RunProgress, "serialization"),
    ]
    policy = Policy.model_json_schema(ref_template=REF)
    schemas = models_json_schema(models, ref_template=REF)[1]["$defs"]
    return {
        **schemas,
        **plan_schemas(REF),
        "Plan": {"anyOf": [_ref("PlanOfOnePhase"), _ref("PlanOfPhases")]},
        **policy.pop("$defs", {}),
        "Policy": policy,
    }
