"""``JsonRoute``: FastAPI's routes with strict JSON bodies that are read after authorization.

FastAPI reads a body before it calls any dependency, and with the lax parser of the standard
library. A router with ``route_class=JsonRoute`` authorizes first, reads the body within its
bounds of time and size, and parses it as strictly as a plan; the route itself declares an
ordinary body parameter, which is a ``RequestModel``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, get_args, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from affidavit.service.bodies import read_body
from affidavit.service.identity.access import authorize
from affidavit.service.identity.guarded import guard_of
from affidavit.service.models import RequestModel
from affidavit.service.problems import Problem

JSON = "application/json"

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route whose body parameter, if it has one, is parsed strictly and after authorization.

    Mistakes in the body are answered with 400, others of the request with 422; a body that is
    not declared as JSON with 415. Raises ``TypeError`` for a body that is no ``RequestModel``.
    """

    def get_route_handler(self) -> Handler:
        """The handler that Starlette calls for a request."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = _body_model(self.endpoint)
        if model is None:
            raise TypeError(f"{self.path}: the body must be a RequestModel")
        required = self.body_field.field_info.is_required()
        access = guard_of(self)

        async def strict(request: Request) -> Response:
            if access is not None:
                await authorize(access, request)
            content = await _json_content(request, required=required)
            # An empty body leaves the parameter its default.
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
    """A request whose JSON body was parsed already."""

    def __init__(self, request: Request, content: bytes, data: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._content = content
        self._data = data

    async def body(self) -> bytes:
        """The body as it was read."""
        return self._content

    async def json(self) -> Any:
        """The data of the body."""
        return self._data


async def _json_content(request: Request, *, required: bool) -> bytes:
    """The body; raises ``Problem`` unless it is declared as JSON, or empty and not required."""
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


def _body_model(endpoint: Callable[..., Awaitable[Any] | Any]) -> type[RequestModel] | None:
    """The ``RequestModel`` among the parameters of ``endpoint``."""
    hints = get_type_hints(endpoint)
    hints.pop("return", None)
    for hint in hints.values():
        for kind in (hint, *get_args(hint)):
            if isinstance(kind, type) and issubclass(kind, RequestModel):
                return kind
    return None
