"""The scalar types of a plan, and the base class of its parts.

Values are not coerced, because coercion makes two readers disagree: a boolean is not a number and
a string is not a number. Only an integral float counts as an integer, because ``1``, ``1.0`` and
``1e0`` are equal in JSON.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)
from pydantic_core import PydanticCustomError

from affidavit.plan.limits import MAX_INTEGER, SMALLEST_POSITIVE


def _integral_to_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def max_items(items: int) -> BeforeValidator:
    """Refuse a longer list before its items are validated, since each could be an error."""

    def check_length(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) > items:
            raise PydanticCustomError("too_long", f"the list has more than {items} items")
        return value

    return BeforeValidator(check_length)


Integer = Annotated[
    int, Field(strict=True, ge=-MAX_INTEGER, le=MAX_INTEGER), BeforeValidator(_integral_to_int)
]


def _require_canonical(value: float) -> float:
    # RFC 8785 writes these as whole numbers, which no reader of a signed plan accepts.
    if MAX_INTEGER < value < 1e21:
        raise PydanticCustomError("inexact", "a number must be below 2^53 or at least 10^21")
    return value


Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[
    Real, Field(ge=SMALLEST_POSITIVE, le=1e100), AfterValidator(_require_canonical)
]
Probability = Annotated[Real, Field(gt=0, lt=1)]
Name = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Text = Annotated[str, StringConstraints(strict=True, max_length=10_000)]


class StrictModel(BaseModel):
    """The base of every document model: frozen, no unknown fields, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
