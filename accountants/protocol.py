"""What an accountant is.

An accountant takes an ``Event`` and returns a ``PrivacyCurve``. The curve covers both
directions of the adjacency, of the composition as a whole. An accountant that cannot
bound an event raises ``Unsupported``; unknown never means zero loss.

Contract of a curve:

* ``epsilon(delta)`` for 0 < delta < 1 and ``delta(epsilon)`` for epsilon >= 0 return a
  ``Bracket`` of the tight value; ``upper`` is always a proved bound.
* The empty composition costs nothing: ε = 0 for every δ, and δ = 0 for every ε.
* ``epsilon`` does not increase in δ, ``delta`` does not increase in ε.
* Both raise ``ValueError`` outside these ranges, and may raise ``OutOfReach`` within them.
* Where nothing else is said ε is in nats and δ a probability.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

from affidavit.accountants.bracket import Bracket
from affidavit.plan import Event


class AccountantError(Exception):
    """Base of everything that an accountant raises on purpose.

    ::

        AccountantError
        ├── Unsupported      the method has no theorem for this event
        ├── OutOfReach       it has one, but not at these parameters or this cost
        └── NoSolution       a calibration target that no parameter in range meets
    """

    code = "accountant_error"

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class Unsupported(AccountantError):
    """The accountant has no theorem that bounds this event."""

    code = "unsupported"


class OutOfReach(AccountantError):
    """The event's parameters are outside the range in which the method's bounds hold."""

    code = "out_of_reach"


class NoSolution(AccountantError):
    """No parameter in the searched range meets the target."""

    code = "no_solution"


def require_delta(delta: float) -> None:
    """Raise ``ValueError`` unless ``delta`` lies strictly between 0 and 1."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}")


def require_epsilon(epsilon: float) -> None:
    """Raise ``ValueError`` unless ``epsilon`` (nats) is finite and not negative."""
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon must be finite and not negative, got {epsilon!r}")


class PrivacyCurve(Protocol):
    """ε against δ for one event, as brackets."""

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of the smallest ε (nats) for which the event is (ε, δ)-DP."""
        ...

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of the smallest δ for which the event is (ε, δ)-DP; ε in nats."""
        ...


@runtime_checkable
class Adjustable(PrivacyCurve, Protocol):
    """A curve whose brackets can be asked for wider, and so sooner, or narrower."""

    def with_width(self, relative_width: float) -> PrivacyCurve:
        """The same curve with brackets about ``relative_width`` of ε (or δ) wide, as true."""
        ...


@runtime_checkable
class Refinable(PrivacyCurve, Protocol):
    """A curve that may have narrower upper ends, which take about a second each."""

    @property
    def refined(self) -> PrivacyCurve | None:
        """Those upper ends, if it has any."""
        ...


@runtime_checkable
class TwoOrders(PrivacyCurve, Protocol):
    """The larger of the curves of P against Q and of Q against P."""

    @property
    def orders(self) -> tuple[PrivacyCurve, PrivacyCurve]:
        """The curve of either order alone."""
        ...


class Accountant(Protocol):
    """One method of accounting, by name and version."""

    @property
    def name(self) -> str:
        """Stable name, as it stands in certificates and after ``--engine``."""
        ...

    @property
    def version(self) -> str:
        """Version of the library that computes, so that a certificate can be repeated."""
        ...

    def curve(self, event: Event) -> PrivacyCurve:
        """The privacy curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        ...


@runtime_checkable
class Provable(Accountant, Protocol):
    """An accountant some of whose bounds the checker has no statement for."""

    def provable_alone(self) -> Accountant:
        """This accountant without those bounds."""
        ...


@runtime_checkable
class Attaining(Accountant, Protocol):
    """An accountant that knows pairs of data sets, and not only what dominates them."""

    def attained(self, event: Event) -> tuple[PrivacyCurve, PrivacyCurve]:
        """The curves of one pair of data sets, one for each order of the two.

        Raises ``Unsupported`` or ``OutOfReach``.
        """
        ...


@runtime_checkable
class Approximating(Protocol):
    """An accountant that can also say quickly where about ε is, for a search to begin at."""

    def approximate_epsilon(self, event: Event, delta: float) -> float:
        """About the ε (nats) of ``event`` at ``delta``; **not a bound**. Raises like ``curve``."""
        ...


@runtime_checkable
class Sampling(Approximating, Protocol):
    """An accountant whose brackets hold with confidence, and cost seconds each."""

    @property
    def failure_probability(self) -> float:
        """With what probability, at most, any of the brackets of one question is wrong."""
        ...
