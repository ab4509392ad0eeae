"""A claim: the number that a plan is said to reach, digit for digit as it was written.

"7.98" and "7.9800" say different things about what was computed, so a claim may be given
as text; a number stands for its shortest decimal. It changes no guarantee: what is certified
beside it is the plan, and a claim below that is named and explained.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints
from pydantic_core import PydanticCustomError

from affidavit.plan.types import StrictModel

MIN_CLAIM, MAX_CLAIM = 1e-9, 1e9
"""Bounds of a claimed ε, in nats, and of a claimed noise multiplier."""
CLAIM_PATTERN = r"^[0-9]{1,12}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?$"
"""A decimal as it is published: digits, a point, perhaps an exponent."""


_DECIMAL = "a claim is a positive decimal, like 7.9852"


def _decimal(value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise PydanticCustomError("decimal_type", _DECIMAL)
    if isinstance(value, str) and not re.fullmatch(CLAIM_PATTERN, value, re.ASCII):
        raise PydanticCustomError("decimal_form", _DECIMAL)
    if not MIN_CLAIM <= (float(value) if isinstance(value, str) else value) <= MAX_CLAIM:
        raise PydanticCustomError(
            "out_of_range", f"a claim must lie between {MIN_CLAIM:g} and {MAX_CLAIM:g}"
        )
    return value if isinstance(value, str) else float(value)


Claimed = Annotated[
    float | str,
    PlainValidator(
        _decimal,
        json_schema_input_type=Annotated[float, Field(ge=MIN_CLAIM, le=MAX_CLAIM)]
        | Annotated[str, StringConstraints(pattern=CLAIM_PATTERN)],
    ),
]
"""A positive decimal, as a number or as the text that was published."""


class Claim(StrictModel):
    """What is claimed: ``epsilon`` in nats at the target's δ, or a ``noise_multiplier``.

    A claimed noise multiplier is that of every block, said to reach the plan's target.
    """

    epsilon: Claimed | None = None
    noise_multiplier: Claimed | None = None

    @property
    def text(self) -> str:
        """The claimed number as it was written."""
        provided = self.epsilon if self.epsilon is not None else self.noise_multiplier
        return provided if isinstance(provided, str) else repr(provided)


def _in_words(value: Any) -> Any:
    return value if isinstance(value, dict | Claim | None) else {"epsilon": value}


GivenClaim = Annotated[Claim, BeforeValidator(_in_words, json_schema_input_type=Claim | Claimed)]
"""A claim as a plan gives it, where ``claim: 7.98`` is a claimed ε."""


def significant_digits(text: str) -> Decimal:
    """``text`` with the digits that it vouches for.

    Zeros at the end of a whole number vouch for nothing, nor does that of ``94.0``, which is
    how programs print a whole number; at least two digits are read, since "8" means 8.0.

    >>> [str(significant_digits(text)) for text in ("7.9800", "94.0", "120", "8")]
    ['7.9800', '94', '1.2E+2', '8.0']
    """
    _, point, fraction = text.lower().partition("e")[0].partition(".")
    number = Decimal(text)
    if not point or fraction == "0":
        number = number.normalize()
    missing = 2 - len(number.as_tuple().digits)
    return number.quantize(number.scaleb(-missing)) if missing > 0 else number
