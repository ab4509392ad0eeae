"""Agreement: when a number equals a claimed one, to the claim's digits.

A claim of 7.98 stands for everything that rounds to it. A reading agrees with it

* ``exactly``, when it rounds to the claim, half up or half down;
* ``cut``, when the claim is the reading cut off, or rounded up, at its last digit;
* ``nearly``, when what the reading is made from is known less well than that: a noise
  multiplier that was itself rounded before it was printed, or a program whose answer is
  documented to be off by so much.

A claimed noise multiplier is judged by the ε that it is said to reach: calibration stops a
little short of its target, and the claim's own rounding moves ε by twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum

from affidavit.plan import Claim, Plan, significant_digits

FEWEST_DIGITS_ROUNDED, MAX_DIGITS_ROUNDED = 4, 7
"""A noise multiplier of so many digits was calibrated and then rounded; a shorter one was
chosen as it is, and a longer one is all there is."""
ELASTICITY = 3.0
"""How much faster ε moves than the noise multiplier, relatively; 1 to 2.5 in practice."""
CALIBRATED_SHORT = 5e-3
"""How far below its target a calibration may stop, relatively; Opacus stops 0.01 below."""
TYPING = 1e-9
"""Relative allowance for decimals that are compared as doubles."""


class Agreement(IntEnum):
    """How well a reading agrees with a claim, best first."""

    EXACTLY = 0
    CUT = 1
    NEARLY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedEpsilon:
    """A claim as a range of ε: ``value`` with the unit of its last digit.

    ``loose`` is the relative uncertainty that the plan's own noise multipliers bring in, and
    ``short`` how far below ``value`` a reading may stay, relatively, for another reason.
    """

    value: float
    unit: float
    loose: float
    short: float = 0.0

    @classmethod
    def of(cls, claim: Claim, plan: Plan) -> ClaimedEpsilon:
        """The judgement of ``claim`` about ``plan``.

        Raises ``ValueError`` where σ is claimed and the plan has no ``target.epsilon``.
        """
        number = significant_digits(claim.text)
        if claim.epsilon is not None:
            unit = float(Decimal(1).scaleb(int(number.as_tuple().exponent)))
            return cls(value=float(number), unit=unit, loose=ELASTICITY * _rounded(plan))
        if plan.target.epsilon is None:
            raise ValueError("a claimed noise multiplier needs a target.epsilon")
        target = plan.target.epsilon
        relative = float(Decimal(1).scaleb(int(number.as_tuple().exponent)) / number)
        return cls(
            value=target, unit=ELASTICITY * relative * target, loose=0.0, short=CALIBRATED_SHORT
        )

    @property
    def precision(self) -> float:
        """The unit of the last digit over the value: 1e-4 for "7.980"."""
        return self.unit / self.value

    def agreement(self, reading: float, below: float = 0.0, above: float = 0.0) -> Agreement | None:
        """How ``reading`` agrees, its program's answer lying in [-below, +above] of it."""
        slip = TYPING * self.value
        excess = reading - self.value
        if abs(excess) <= self.unit / 2 + slip:
            return Agreement.EXACTLY
        if abs(excess) < self.unit + slip:
            return Agreement.CUT
        wide = self.unit / 2 + self.loose * reading + slip
        if -wide - above - self.short * self.value <= excess <= wide + below:
            return Agreement.NEARLY
        return None

    def furthest(self, above: float = 0.0) -> tuple[float, float]:
        """The range of readings that may agree at all."""
        wide = self.unit + 2 * self.loose * self.value + above + TYPING * self.value
        return self.value * (1 - self.short) - wide, self.value + wide


def _rounded(plan: Plan) -> float:
    """Half a unit in the last place of the plan's roundest noise, relatively."""
    result = 0.0
    for phase in plan.phases:
        for release in phase.releases:
            provided = release.noise_multiplier or release.noise_std
            if provided is None:
                continue
            number = Decimal(repr(provided)).normalize()
            if FEWEST_DIGITS_ROUNDED <= len(number.as_tuple().digits) <= MAX_DIGITS_ROUNDED:
                half = Decimal(5).scaleb(int(number.as_tuple().exponent) - 1)
                result = max(result, float(half / number))
    return result
