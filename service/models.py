r"""Wire models: base classes and field types of request and response bodies.

A request body is a ``RequestModel``, parsed as strictly as a plan: duplicate keys, NaN, lone
surrogates, unknown fields, depth and size are refused with the position of the mistake. A
response body is a ``ResponseModel``, filled from the attributes of what a route returns.

>>> class CommentRequest(RequestModel):
...     noun = "a comment"
...     text: Comment
>>> CommentRequest.from_json(b'{"text": "fine"}').text
'fine'
>>> CommentRequest.from_json(b'{"text": "fine", "text": "bad"}')
Traceback (most recent call last):
affidavit.service.errors.MalformedRequest: duplicate_key at /text: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from affidavit.client import DIGEST, ResponseModel, is_none
from affidavit.plan import Kind, MalformedPlan, Reason, StrictModel, load_json
from affidavit.service.errors import MalformedRequest

UUID = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
# Of the control characters only tab and line ends are text; PostgreSQL takes no NUL at all.
_PRINTABLE = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"

Digest = Annotated[str, StringConstraints(strict=True, pattern=DIGEST)]
Comment = Annotated[str, StringConstraints(strict=True, max_length=2000, pattern=_PRINTABLE)]


class RequestModel(StrictModel):
    """Base of JSON request bodies: frozen, and closed to unknown fields.

    ``noun`` and ``guide`` (the page that describes the fields) stand in error messages,
    ``error_code`` is the code of the problem, and ``max_bytes`` bounds the body.
    """

    noun: ClassVar[str] = "a request"
    guide: ClassVar[str] = "/openapi.json"
    error_code: ClassVar[str] = "malformed_request"
    max_bytes: ClassVar[int] = 64 * 1024

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Parse ``content`` strictly; raises ``MalformedRequest`` with every mistake."""
        return cls.from_data(cls.load(content))

    @classmethod
    def load(cls, content: bytes) -> Any:
        """The JSON data of ``content``, before validation; raises ``MalformedRequest``."""
        try:
            return load_json(content, cls.max_bytes).data
        except MalformedPlan as error:
            raise cls._malformed([cls._adapted(reason) for reason in error.reasons]) from None

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Validate JSON data; raises ``MalformedRequest`` with every mistake."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            kind = Kind(cls.noun, lambda: {name: name for name in cls.model_fields}, cls.guide)
            raise cls._malformed(kind.reasons(error, data)) from None

    @classmethod
    def _malformed(cls, reasons: Sequence[Reason]) -> MalformedRequest:
        return MalformedRequest(*reasons, code=cls.error_code)

    @classmethod
    def _adapted(cls, reason: Reason) -> Reason:
        """``reason`` with a remedy for this model where the loader's own is one for plans."""
        remedies = {
            "empty": f"Give {cls.noun}; see {cls.guide}.",
            "too_large": f"Give {cls.noun} of at most {cls.max_bytes} bytes; see {cls.guide}.",
        }
        return replace(reason, remedy=remedies.get(reason.code, reason.remedy))


class QueryModel(BaseModel):
    """Base of query parameters that a route takes together: closed to unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Position = Annotated[int | None, Field(ge=1, exclude_if=is_none)]
"""A line or a column, left out where the text has no positions."""


class ProblemReason(ResponseModel):
    """What is wrong, where, and how to fix it; ``code`` never changes its meaning."""

    code: str
    pointer: str = Field(description="RFC 6901 pointer into the plan or the request.")
    message: str
    remedy: str
    line: Position = None
    column: Position = None
