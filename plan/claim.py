"""A claim: the number that a plan is said to reach, with the digits in which it was published.

"7.98" and "7.9800" have different precision, so a claim may be text. A number stands for its
shortest decimal. A claim changes no guarantee: the plan is certified, and a claim below the
certified number is reported and explained.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints
from pydantic_core import PydanticCustomError

from affidavit.plan.types import StrictModel

MIN_CLAIM, MAX_CLAIM = 1e-9, 1e9
"""Range of a claimed ε, in nats, and of a claimed noise multiplier."""
CLAIM_PATTERN = r"^[0-9]{1,12}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?$"
"""A published decimal: digits, an optional fraction and an optional exponent."""
_RULE = "a claim is a positive decimal, like 7.9852"


def _validate_decimal(value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise PydanticCustomError("decimal_type", _RULE)
    if isinstance(value, str) and not re.fullmatch(CLAIM_PATTERN, value, re.ASCII):
        raise PydanticCustomError("decimal_form", _RULE)
    if not MIN_CLAIM <= (float(value) if isinstance(value, str) else value) <= MAX_CLAIM:
        raise PydanticCustomError(
            "out_of_range", f"a claim must lie between {MIN_CLAIM:g} and {MAX_CLAIM:g}"
        )
    return value if isinstance(value, str) else float(value)


Claimed = Annotated[
    float | str,
    PlainValidator(
        _validate_decimal,
        json_schema_input_type=Annotated[float, Field(ge=MIN_CLAIM, le=MAX_CLAIM)]
        | Annotated[str, StringConstraints(pattern=CLAIM_PATTERN)],
    ),
]
"""A positive decimal, as a number or as published text."""


class Claim(StrictModel):
    """A claimed ``epsilon``, in nats at the target's δ, or a claimed ``noise_multiplier``.

    The claimed noise multiplier is that of every block, and is said to meet the plan's target.
    """

    epsilon: Claimed | None = None
    noise_multiplier: Claimed | None = None

    @property
    def text(self) -> str:
        """The claimed number as published."""
        provided = self.epsilon if self.epsilon is not None else self.noise_multiplier
        return provided if isinstance(provided, str) else repr(provided)


def _wrap_epsilon(value: Any) -> Any:
    return value if isinstance(value, dict | Claim | None) else {"epsilon": value}


GivenClaim = Annotated[
    Claim, BeforeValidator(_wrap_epsilon, json_schema_input_type=Claim | Claimed)
]
"""A claim in a plan, where ``claim: 7.98`` is a claimed ε."""


def significant_digits(text: str) -> Decimal:
    """Return ``text`` with its significant digits.

    Trailing zeros of a whole number are not significant, nor is the zero of ``94.0``, which is how
    programs print a whole number. At least two digits are significant: "8" means 8.0.

    >>> [str(significant_digits(text)) for text in ("7.9800", "94.0", "120", "8")]
    ['7.9800', '94', '1.2E+2', '8.0']
    """
    _, point, fraction = text.lower().partition("e")[0].partition(".")
    number = Decimal(text)
    if not point or fraction == "0":
        number = number.normalize()
    missing = 2 - len(number.as_tuple().digits)
    return number.quantize(number.scaleb(-missing)) if missing > 0 else number
