"""``JsonRoute``: FastAPI routes with strict JSON bodies that are read after authorization.

FastAPI reads a body before it calls any dependency, and parses it with the lax parser of the
standard library. A router with ``route_class=JsonRoute`` authorizes first, limits the body's time
and size, and parses it as strictly as a plan. Its routes declare an ordinary body parameter of a
``RequestModel``. Routes for plans or policies, which may be YAML, call ``syntax_of_body`` and
``read_body`` themselves.

The module also defines path and query parameters that several routes use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator
from pydantic_core import PydanticKnownError
from starlette.requests import ClientDisconnect

from affidavit.client import DIGEST
from affidavit.plan import Syntax
from affidavit.service.core.fair_queue import outside_turn
from affidavit.service.core.problems import Problem
from affidavit.service.core.wire_models import RequestModel
from affidavit.service.web.access import authorize, guard_of

JSON = "application/json"
YAML = ("application/yaml", "application/x-yaml", "text/yaml")
READ_SECONDS = 10.0
"""Time that a client may take to send a body."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route whose body parameter, if any, is parsed strictly and after authorization.

    Mistakes in the body are answered with 400, other mistakes with 422, and a body that is not
    declared as JSON with 415. Raises ``TypeError`` if the body is not a ``RequestModel``.
    """

    def get_route_handler(self) -> Handler:
        """Return the handler that Starlette calls for a request."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: Any = self.body_field.field_info.annotation
        if not (isinstance(model, type) and issubclass(model, RequestModel)):
            raise TypeError(f"{self.path}: the body must be a RequestModel")
        required = self.body_field.field_info.is_required()
        access = guard_of(self)

        async def strict(request: Request) -> Response:
            if access is not None:
                await authorize(access, request)
            content = await _json_content(request, required=required)
            # With an empty body, the parameter has its default.
            data = model.load(content) if content or required else None
            if content and not isinstance(data, dict):
                model.from_data(data)
            try:
                return await handle(_ParsedRequest(request, content, data))
            except RequestValidationError as error:
                others = [mistake for mistake in error.errors() if mistake["loc"][0] != "body"]
                if others:
                    raise RequestValidationError(others) from None
                model.from_data(data)
                raise

        return strict


class _ParsedRequest(Request):
    """A request whose JSON body has been parsed."""

    def __init__(self, request: Request, content: bytes, data: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._content = content
        self._data = data

    async def body(self) -> bytes:
        """Return the bytes of the body."""
        return self._content

    async def json(self) -> Any:
        """Return the data of the body."""
        return self._data


async def _json_content(request: Request, *, required: bool) -> bytes:
    """Return the body; raises ``Problem`` unless it is declared as JSON, or empty and optional."""
    declared = request.headers.get("content-type", "")
    is_json = declared.partition(";")[0].strip().lower() == JSON
    if declared and required and not is_json:
        raise _unsupported()
    content = await read_body(request)
    if content and not is_json:
        raise _unsupported()
    return content


def _unsupported() -> Problem:
    return Problem(
        415,
        "unsupported_media_type",
        f"Send the body as {JSON} and set Content-Type accordingly.",
        headers={"Accept": JSON},
    )


# ---- bodies -------------------------------------------------------------------------


async def read_body(request: Request) -> bytes:
    """Return the body; raises ``Problem`` if it does not arrive in time."""
    try:
        async with outside_turn(), asyncio.timeout(READ_SECONDS):
            return await request.body()
    except (TimeoutError, ClientDisconnect):
        raise Problem(
            408,
            "body_incomplete",
            f"the body did not arrive within {READ_SECONDS:g} s; "
            "check that Content-Length is its length.",
            headers={"Connection": "close"},
        ) from None


async def syntax_of_body(http: Request) -> Syntax:
    """Return the syntax that the headers declare; raises ``Problem`` for any other."""
    declared = http.headers.get("content-type", "")
    media, *parameters = [part.strip().lower() for part in declared.split(";")]
    charsets = [
        parameter.partition("=")[2].strip('"')
        for parameter in parameters
        if "charset=" in parameter
    ]
    encoding = http.headers.get("content-encoding", "identity").lower()
    if encoding == "identity" and set(charsets) <= {"utf-8"}:
        if media == JSON:
            return "json"
        if media in YAML:
            return "yaml"
    raise Problem(
        415,
        "unsupported_media_type",
        f"Send {JSON} or {YAML[0]}, in UTF-8 and not compressed, and set Content-Type accordingly.",
        headers={"Accept": ", ".join((JSON, *YAML))},
    )


async def read_json(request: Request) -> bytes:
    """Return the body; raises ``Problem`` unless it is declared as JSON."""
    return await _json_content(request, required=True)


# ---- pages of a list ----------------------------------------------------------------


def next_page(response: Response, path: str, query: BaseModel, **start: Any) -> str | None:
    """Return the path of the page from ``start`` with the filters of ``query``.

    The path is also the response's ``Link`` header. Returns None if a value of ``start`` is None.
    """
    if None in start.values():
        return None
    parameters = query.model_dump(mode="json", exclude_none=True, exclude_unset=True) | start
    following = f"{path}?{urlencode(parameters)}"
    response.headers["Link"] = f'<{following}>; rel="next"'
    return following


# ---- parameters ---------------------------------------------------------------------

CertificateId = Annotated[
    str, Path(pattern=DIGEST, description="``sha256:`` and 64 lower-case hex digits.")
]


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("this time does not exist in UTC") from None


def _reject_number(value: object) -> object:
    """Return ``value`` unless it is a number, which pydantic takes as seconds since 1970."""
    try:
        float(str(value))
    except ValueError:
        return value
    wrong = {"error": "invalid date separator, expected `-`"}
    raise PydanticKnownError("datetime_from_date_parsing", wrong)


Instant = Annotated[AwareDatetime, BeforeValidator(_reject_number), AfterValidator(_in_utc)]
"""An RFC 3339 time with its zone."""
