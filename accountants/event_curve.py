"""The privacy curve of an event without a plan, by the first engines that bound it.

>>> bracket = EventCurve(events.Laplace(noise_multiplier=2.0)).epsilon(0.01)
>>> bracket.lower <= 0.5 + 2 * math.log(1 - 0.01) <= bracket.upper < 0.4801
True
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import (
    FirstAvailableCurve,
    attained_event,
    close_bracket,
)
from affidavit.accountants.composition import parts
from affidavit.accountants.participations import with_bins_known
from affidavit.accountants.post_processing import PostProcessedCurve
from affidavit.accountants.protocol import (
    AccountantError,
    PrivacyCurve,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.registry import certain_accountants
from affidavit.plan import events

NARROW_WIDTH = 1e-3
"""Relative width of a bracket that is narrow enough: no other lower bound is computed."""


@dataclass(frozen=True, slots=True)
class EventCurve:
    """Upper bounds by the first engine that has any, or infinity (1 for δ)."""

    event: events.Event

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``; raises ``ValueError`` unless 0 < δ < 1."""
        require_delta(delta)
        return self._bracket(lambda curve: curve.epsilon(delta), math.inf)

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        if epsilon >= self._max_loss:
            return Bracket(lower=0.0, upper=0.0)
        return self._bracket(lambda curve: curve.delta(epsilon), 1.0)

    @property
    def _max_loss(self) -> Fraction | float:
        """The largest loss (nats), which is finite if every release is Laplace."""
        total = Fraction(0)
        for part, count in parts(self.event):
            if not isinstance(part, events.Laplace):
                return math.inf
            total += count / Fraction(part.noise_multiplier)
        return total

    def _bracket(self, ask: Callable[[PrivacyCurve], Bracket], worst: float) -> Bracket:
        bracket = Bracket(lower=0.0, upper=worst)
        try:
            bracket = self._answer(self.event, ask)
        except AccountantError:
            with suppress(AccountantError):
                known = self._answer(with_bins_known(self.event), ask)
                bracket = Bracket(lower=0.0, upper=known.upper)
        if bracket.lower >= bracket.upper * (1 - NARROW_WIDTH):
            return bracket
        below = close_bracket(
            bracket.upper, (PostProcessedCurve(event=attained_event(self.event)),), ask
        )
        return Bracket(lower=max(bracket.lower, below.lower), upper=bracket.upper)

    @staticmethod
    def _answer(event: events.Event, ask: Callable[[PrivacyCurve], Bracket]) -> Bracket:
        return ask(FirstAvailableCurve(event=event, engines=certain_accountants(), refined=True))
