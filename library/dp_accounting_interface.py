"""An accountant with dp-accounting's interface, for code that is written against it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import dp_accounting
from dp_accounting import NeighboringRelation

from affidavit.accountants import Bracket, EventCurve, PrivacyCurve
from affidavit.library.bounds import Bound, bound_of
from affidavit.library.dp_accounting_events import (
    NotTranslated,
    adds_no_noise,
    event_of,
    releases_nothing,
)
from affidavit.plan import Adjacency, Composed, Event, Repeated

ADJACENCY: dict[NeighboringRelation, Adjacency] = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "add_remove",
    NeighboringRelation.REPLACE_ONE: "replace_one",
    NeighboringRelation.REPLACE_SPECIAL: "zero_out",
}


class PrivacyAccountant(dp_accounting.PrivacyAccountant):  # type: ignore[misc]
    """``dp_accounting.PrivacyAccountant`` whose answers are proved on both sides.

    It takes Gaussian and Laplace releases, Gaussians on samples (Poisson, truncated Poisson, of
    fixed size), mixtures of Gaussians, trees of one epoch and selections among repetitions.
    ``get_epsilon`` and ``get_delta`` return upper bounds with a ``lower``. Noise multipliers are
    read as noise over the clip norm, under REPLACE_ONE too.
    """

    def __init__(
        self, neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    ) -> None:
        super().__init__(neighboring_relation)
        self._counts: Counter[Event] = Counter()
        self._without_noise = False

    def compose(self, event: Any, count: int = 1) -> PrivacyAccountant:
        """Count ``event`` so many times more.

        Raises ``UnsupportedEventError`` for an event that is not taken, ``TypeError`` for what is
        no event, and ``ValueError`` for a count below 1.
        """
        if count < 1:
            raise ValueError(f"count is {count}; give a whole number of 1 or more.")
        super().compose(event, count)
        return self

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            repeated = event.count if count == 0 and not do_compose else event.count * count
            return self._maybe_compose(event.event, repeated, do_compose)
        if isinstance(event, dp_accounting.ComposedDpEvent):
            parts = [self._maybe_compose(part, count, do_compose) for part in event.events]
            return next((error for error in parts if error is not None), None)
        if count < 0:
            return self.CompositionErrorDetails(event, f"it is composed {count} times.")
        if releases_nothing(event):
            return None
        if adds_no_noise(event):
            self._without_noise |= do_compose
            return None
        try:
            released = event_of(event, ADJACENCY[self.neighboring_relation])
        except (NotTranslated, ValueError, TypeError, ArithmeticError) as error:
            return self.CompositionErrorDetails(event, str(error))
        if do_compose:
            self._counts[released] += count
        return None

    def get_epsilon(self, target_delta: float) -> Bound:
        """The proved ε in nats at ``target_delta``, infinite where no finite one is proved.

        Raises ``ValueError`` for a δ outside [0, 1].
        """
        if not 0 <= target_delta <= 1:
            raise ValueError(f"δ is {target_delta}; give a probability.")
        if self._without_noise or target_delta == 0:
            return Bound(math.inf if self._without_noise or self._counts else 0.0)
        if target_delta == 1:
            return Bound(0.0)
        return self._answer(lambda curve: curve.epsilon(target_delta), math.inf)

    def get_delta(self, target_epsilon: float) -> Bound:
        """The proved δ at ``target_epsilon`` nats; raises ``ValueError`` below 0."""
        if not target_epsilon >= 0:
            raise ValueError(f"ε is {target_epsilon}; give 0 or more.")
        if target_epsilon == math.inf:
            return Bound(1.0 if self._without_noise else 0.0)
        return self._answer(lambda curve: curve.delta(target_epsilon), 1.0)

    def _answer(self, ask: Callable[[PrivacyCurve], Bracket], worst: float) -> Bound:
        if self._without_noise:
            return Bound(worst)
        released = [Repeated(event=event, count=count) for event, count in self._counts.items()]
        if not released:
            return Bound(0.0)
        return bound_of(ask(EventCurve(Composed(events=tuple(released)))))
