"""What the OpenAPI document says of access, written from the guards themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from affidavit.service.identity.access import Guard, Open
from affidavit.service.identity.guarded import guarded_routes
from affidavit.service.openapi import PROBLEM

SCHEME = "bearer"
_PROBLEM = {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}
_TEXT = {"schema": {"type": "string"}}
_CHALLENGE = {"WWW-Authenticate": {**_TEXT, "description": "RFC 6750: which kind, and why."}}
_LATER = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}}


def install(app: FastAPI) -> None:
    """Let the document of ``app`` say who may ask what; after ``openapi.install``."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        if SCHEME not in document["components"].get("securitySchemes", {}):
            _describe(app, document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _describe(app: FastAPI, document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {
        SCHEME: {
            "type": "http",
            "scheme": "bearer",
            "description": "A token of `affidavit tokens new`, or of the OpenID provider. While "
            "there is neither, a program on the service's own machine may submit and audit "
            "without one.",
        }
    }
    for path, method, guard in guarded_routes(app):
        operation = document["paths"].get(path, {}).get(method.lower())
        if operation is not None:
            _describe_operation(operation, guard)


def _describe_operation(operation: dict[str, Any], guard: Guard | Open) -> None:
    responses = operation["responses"]
    if isinstance(guard, Guard):
        operation["security"] = [{SCHEME: [scope.value]} for scope in guard.scopes]
        named = " or ".join(guard.scopes)
        _answer(responses, "401", "No token, or one that does not count.", _CHALLENGE)
        _answer(responses, "403", f"The token has no scope {named}.", _CHALLENGE)
        unchecked = "The database or the OpenID provider does not answer."
        _answer(responses, "503", responses.get("503", {}).get("description", unchecked), _LATER)
    if isinstance(guard, Guard) or guard.limited:
        _answer(responses, "429", "Too many requests, in a minute or at once.", _LATER)
    operation["responses"] = dict(sorted(responses.items()))


def _answer(
    responses: dict[str, Any], status: str, description: str, headers: dict[str, Any]
) -> None:
    known = responses.get(status, {"content": _PROBLEM})
    responses[status] = {**known, "description": description, "headers": headers}
