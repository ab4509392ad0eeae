"""The interfaces of accountants and privacy curves.

An accountant takes an ``Event`` and returns a ``PrivacyCurve``, which covers both directions of the
adjacency of the whole composition. An accountant that cannot bound an event raises ``Unsupported``:
unknown never means zero loss.

Contract of a curve:

* ``epsilon(delta)`` for 0 < delta < 1 and ``delta(epsilon)`` for epsilon >= 0 return a
  ``Bracket`` of the tight value; ``upper`` is always a proved bound.
* The empty composition costs nothing: ε = 0 for every δ, and δ = 0 for every ε.
* ``epsilon`` does not increase in δ, ``delta`` does not increase in ε.
* Both raise ``ValueError`` outside these ranges, and may raise ``OutOfReach`` inside them.
* Unless stated otherwise, ε is in nats and δ is a probability.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

from affidavit.accountants.bracket import Bracket
from affidavit.plan import events


class AccountantError(Exception):
    """Base class of the errors of accountants.

    ::

        AccountantError
        ├── Unsupported      the method has no theorem for this event
        ├── OutOfReach       it has one, but not for these parameters or at this cost
        └── NoSolution       no parameter in range meets a calibration target
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
    """ε as a function of δ, and δ as a function of ε, for one event."""

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of the smallest ε (nats) for which the event is (ε, δ)-DP."""
        ...

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of the smallest δ for which the event is (ε, δ)-DP; ε in nats."""
        ...


@runtime_checkable
class Adjustable(PrivacyCurve, Protocol):
    """A curve with adjustable brackets: wider ones take less time."""

    def with_width(self, relative_width: float) -> PrivacyCurve:
        """Return this curve with proved brackets about ``relative_width`` of ε (or δ) wide."""
        ...


@runtime_checkable
class Refinable(PrivacyCurve, Protocol):
    """A curve that may have narrower upper bounds, which take about a second each."""

    @property
    def refined(self) -> PrivacyCurve | None:
        """The curve of the narrower upper bounds, or None."""
        ...


@runtime_checkable
class TwoOrders(PrivacyCurve, Protocol):
    """A curve that is the larger of the curves of P against Q and of Q against P."""

    @property
    def orders(self) -> tuple[PrivacyCurve, PrivacyCurve]:
        """The curves of P against Q, and of Q against P."""
        ...


class Accountant(Protocol):
    """A method of accounting with a name and a version."""

    @property
    def name(self) -> str:
        """Stable name, as in certificates and for ``--engine``."""
        ...

    @property
    def version(self) -> str:
        """Version of the library that computes, which makes a certificate reproducible."""
        ...

    def curve(self, event: events.Event) -> PrivacyCurve:
        """Return the privacy curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        ...


@runtime_checkable
class Provable(Accountant, Protocol):
    """An accountant with some bounds for which the checker has no statement."""

    def provable_alone(self) -> Accountant:
        """Return this accountant without those bounds."""
        ...


def provable_alone(engine: Accountant) -> Accountant:
    """Return ``engine`` with only the bounds that the checker proves."""
    return engine.provable_alone() if isinstance(engine, Provable) else engine


@runtime_checkable
class Attaining(Accountant, Protocol):
    """An accountant that has curves of pairs of data sets, not only of dominating pairs."""

    def attained(self, event: events.Event) -> tuple[PrivacyCurve, PrivacyCurve]:
        """Return the curves of one pair of data sets, one for each order.

        Raises ``Unsupported`` or ``OutOfReach``.
        """
        ...


@runtime_checkable
class Approximating(Protocol):
    """An accountant that also approximates ε quickly, as the start of a search."""

    def approximate_epsilon(self, event: events.Event, delta: float) -> float:
        """Return about the ε (nats) at ``delta``; **not a bound**. Raises like ``curve``."""
        ...


@runtime_checkable
class Sampling(Approximating, Protocol):
    """An accountant whose brackets hold with confidence and take seconds each."""

    @property
    def failure_probability(self) -> float:
        """Bound of the probability that any bracket of one search is wrong."""
        ...
