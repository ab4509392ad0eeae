"""Errors as problem documents (RFC 9457), with the codes that the command line uses.

::

    {"type": "/problems/malformed_plan", "title": "Bad Request", "status": 400,
     "code": "malformed_plan", "detail": "unknown_field at /stepz: ...",
     "reasons": [{"code": "unknown_field", "pointer": "/stepz", "message": ...,
                  "remedy": "Did you mean steps?", "line": 3, "column": 1}]}

``code`` and the reasons' codes never change their meaning once published; ``detail`` and
``message`` are for people. A reason's ``pointer`` points into the plan or body, or is
``/query/NAME``, ``/path/NAME`` or ``/header/NAME``. Every error response has this shape, including
404, 405 and 500, and none contains a traceback.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from sqlalchemy.exc import (
    DatabaseError,
    DataError,
    DBAPIError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as NoFreeConnection
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from affidavit.certificate.policy import MalformedPolicy
from affidavit.client import RecordedRequest
from affidavit.plan import DocumentSchema, MalformedPlan, PlanError, Reason, pointer_to
from affidavit.service.core.database import InvalidCursor
from affidavit.service.core.errors import (
    AccountingFailed,
    AccountingTimeout,
    AccountingUnavailable,
    DomainError,
    LogDamaged,
    MalformedRequest,
    NotLogged,
    PolicyTampered,
)
from affidavit.trust import KeyFailure, KeysetError
from affidavit.trust.log import merkle_tree

MEDIA_TYPE = "application/problem+json"
MAX_ECHOED = 80
"""Characters of an invalid value that are repeated in a response."""

STATEMENT_ERRORS = (DataError, IntegrityError, NotSupportedError, ProgrammingError)
"""Errors of a statement, which are faults of this service; others are the database's."""

log = logging.getLogger("affidavit.service")


class Problem(Exception):
    """An error response; the client receives its code, detail and reasons."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *reasons: Reason,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{status} {code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail
        self.reasons = reasons
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        """Return the problem document."""
        return {
            "type": f"/problems/{self.code}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "code": self.code,
            "detail": _linked(self.detail),
            "reasons": [
                {**reason.as_dict(), "remedy": _linked(reason.remedy)} for reason in self.reasons
            ],
        }

    def as_response(self) -> Response:
        """Return the problem as an HTTP response."""
        # ASCII, because a message may repeat text that is not valid UTF-8.
        content = json.dumps(self.document(), ensure_ascii=True).encode("ascii")
        return ProblemResponse(self.code, content, self.status, self.headers, self.media_type)


def _linked(text: str) -> str:
    """Return ``text`` with the page of the service for a command or a page of the documentation.

    >>> _linked("Correct it; `affidavit schema steps` shows what it may be.")
    'Correct it; /docs shows what it may be.'
    """
    elsewhere = r"docs/[a-z/-]+\.md(#[\w-]+)?|`affidavit schema[^`]*`|the page on policies"
    return re.sub(elsewhere, "/docs", text)


class Recorded(Problem):
    """A request that was recorded and waits until more people send the same: 202, and no error."""

    media_type = "application/json"

    def __init__(self, waiting: RecordedRequest) -> None:
        super().__init__(202, waiting.code, waiting.detail)
        self.waiting = waiting

    def document(self) -> dict[str, Any]:
        """Return what waits, and for how many."""
        return self.waiting.model_dump(mode="json")


class ProblemResponse(Response):
    """A response that stores its code for logs and metrics when it is sent."""

    def __init__(
        self, code: str, content: bytes, status: int, headers: Mapping[str, str], media_type: str
    ) -> None:
        super().__init__(content, status, headers, media_type)
        self._code = code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        scope.setdefault("state", {})["code"] = self._code
        await super().__call__(scope, receive, send)


def malformed(code: str, error: PlanError) -> Problem:
    """Return the problem of a malformed body, with every reason."""
    too_large = any(reason.code == "too_large" for reason in error.reasons)
    return _of_reasons(413 if too_large else 400, code, error.reasons)


def _of_reasons(status: int, code: str, reasons: tuple[Reason, ...]) -> Problem:
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return Problem(status, code, f"{reasons[0]}{more}", *reasons)


def problem_of(error: DomainError) -> Problem:
    """Return the problem of a request that cannot be carried out."""
    return Problem(error.status, error.code, str(error), error.reason)


def unavailable(error: AccountingUnavailable) -> Problem:
    """Return the problem of accounting that did not finish."""
    match error:
        case AccountingTimeout():
            return Problem(
                503,
                "accounting_timeout",
                f"the accounting was {error}; nothing was stored. Certify a smaller plan, or "
                "ask the operator to raise AFFIDAVIT_TIME_LIMIT.",
            )
        case AccountingFailed():
            return Problem(
                503, "accounting_failed", f"{error}; nothing was stored. Send the plan again."
            )
        case _:
            return Problem(
                503,
                "too_busy",
                "too many plans are waiting; nothing was stored. Try again later.",
                headers={"Retry-After": "10"},
            )


def invalid_cursor(error: InvalidCursor) -> Problem:
    """Return the problem of a cursor that this service did not issue."""
    reason = Reason(
        code="invalid_cursor",
        pointer="/query/cursor",
        message=f"{error}.",
        remedy="Follow the next link of a page, or leave cursor out to start again.",
    )
    return Problem(422, "invalid_parameter", str(reason), reason)


def install(app: FastAPI) -> None:
    """Respond to every error of ``app`` with a problem document."""
    app.add_exception_handler(HTTPException, _http)
    for kind, problem in _PROBLEMS.items():
        app.add_exception_handler(kind, _handler(problem))


def _handler(problem: Callable[[Any], Problem]) -> Callable[[Request, Exception], Response]:
    return lambda _, error: problem(error).as_response()


def _http(request: Request, error: Exception) -> Response:
    """Return the response to an error of the router: an unknown path or method."""
    assert isinstance(error, HTTPException)
    code, detail = {
        404: ("not_found", "Path not found; /openapi.json lists the paths."),
        405: ("method_not_allowed", f"{request.method[:MAX_ECHOED]} is not allowed at this path."),
    }.get(error.status_code, ("http_error", str(error.detail)))
    return Problem(error.status_code, code, detail, headers=error.headers).as_response()


_PARAMETER = DocumentSchema("a parameter of this path", dict, "/openapi.json")


def _parameter(details: ErrorDetails) -> Reason:
    where, name = ([*details["loc"], "parameters"])[:2]
    if details["type"] == "extra_forbidden":
        field = str(name)[:MAX_ECHOED]
        return Reason(
            code="unknown_parameter",
            pointer=pointer_to(where, field),
            message=f"{field} is not a parameter of this path.",
            remedy="Remove it; /openapi.json lists the parameters.",
        )
    reason = _PARAMETER.reason(details, {where: {}})
    return replace(reason, code="invalid_parameter")


def _database(error: DatabaseError | NoFreeConnection) -> Problem:
    if isinstance(error, STATEMENT_ERRORS):
        raise error
    log.error("the database cannot be used: %s", error)
    later = {"Retry-After": "5"}
    # Without a statement, the connection broke during a commit.
    if isinstance(error, DBAPIError) and error.connection_invalidated and not error.statement:
        return Problem(
            503,
            "database_unavailable",
            "The connection to the database broke during the commit, so the change may be stored "
            "or not. Check, or send the request again with the same Idempotency-Key if it had one.",
            headers=later,
        )
    return Problem(
        503,
        "database_unavailable",
        "The database does not answer or is read-only; nothing was stored. Try again later; the "
        "service's log has the details.",
        headers=later,
    )


def _signer(error: KeyFailure) -> Problem:
    log.error("nothing can be signed: %s", error)
    return Problem(
        503,
        "signer_unavailable",
        "The service cannot use its signing key; nothing was stored. Its log has the details.",
    )


def _policies(error: PolicyTampered) -> Problem:
    log.critical("the policies cannot be trusted: %s", error)
    return Problem(
        503,
        "policy_altered",
        "A policy or waiver in the database differs from the signed one, so no plan is judged; "
        "nothing was stored. The service's log has the details.",
    )


def _log(error: LogDamaged) -> Problem:
    log.critical("the stored log is damaged: %s", error)
    return Problem(
        503,
        "log_damaged",
        "The stored log contradicts itself, so it cannot prove anything; tell the operator.",
    )


def _not_logged(error: NotLogged | merkle_tree.BadTile) -> Problem:
    return Problem(404, "not_logged", f"{error}; GET /v1/tlog/checkpoint has the log's size.")


_PROBLEMS: dict[type[Exception], Callable[[Any], Problem]] = {
    Problem: lambda problem: problem,
    MalformedPlan: lambda error: malformed("malformed_plan", error),
    MalformedPolicy: lambda error: malformed("malformed_policy", error),
    MalformedRequest: lambda error: malformed(error.code, error),
    RequestValidationError: lambda error: _of_reasons(
        422, "invalid_parameter", tuple(map(_parameter, error.errors()))
    ),
    InvalidCursor: invalid_cursor,
    DomainError: problem_of,
    AccountingUnavailable: unavailable,
    DatabaseError: _database,
    NoFreeConnection: _database,
    KeyFailure: _signer,
    KeysetError: lambda error: Problem(
        400 if error.code == "keyset_malformed" else 409,
        error.code,
        str(error),
        Reason(code=error.code, message=error.message, remedy=error.remedy),
    ),
    PolicyTampered: _policies,
    LogDamaged: _log,
    NotLogged: _not_logged,
    merkle_tree.BadTile: _not_logged,
    # A fault of this service: the traceback is logged and not sent.
    Exception: lambda _: Problem(
        500, "internal_error", "Internal error; the service's log has the details."
    ),
}
"""Functions that convert each kind of error to a problem."""


def problem_of_error(error: BaseException) -> Problem:
    """Return the problem for ``error``, and log faults of this service."""
    kind = next(kind for kind in type(error).__mro__ if kind in _PROBLEMS)
    if kind is Exception:
        log.error("internal error", exc_info=error)
    return _PROBLEMS[kind](error)
