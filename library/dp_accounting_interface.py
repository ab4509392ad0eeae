"""An accountant with dp-accounting's interface, for code that is written against it."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
from dp_accounting import NeighboringRelation

from affidavit.library.api import delta, epsilon, load
from affidavit.library.bounds import Bound
from affidavit.library.certification import NotCertified
from affidavit.mechanisms import lower
from affidavit.plan import PlanError

ADJACENCY = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "add_remove",
    NeighboringRelation.REPLACE_SPECIAL: "zero_out",
}
UNBOUNDED = {"unbounded", "out_of_reach"}
"""Codes of refusals that say no more than that no finite bound is proved."""


class PrivacyAccountant(dp_accounting.PrivacyAccountant):  # type: ignore[misc]
    """``dp_accounting.PrivacyAccountant`` whose answers are proved on both sides.

    It takes Poisson and truncated Poisson samples of Gaussians, Gaussians, and Laplace releases
    after one of them. ``get_epsilon`` and ``get_delta`` return upper bounds with a ``lower``. Noise
    multipliers are read as noise over the clip norm.
    """

    def __init__(
        self, neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    ) -> None:
        """Raises ``ValueError`` for REPLACE_ONE, where what noise is relative to is not settled."""
        if neighboring_relation not in ADJACENCY:
            raise ValueError(
                f"{neighboring_relation} is not supported: write a plan with adjacency "
                "replace_one, whose noise is relative to the clip norm."
            )
        super().__init__(neighboring_relation)
        self._released = dp_accounting.DpEventBuilder()
        self._without_noise = False

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            repeated = event.count if count == 0 and not do_compose else event.count * count
            return self._maybe_compose(event.event, repeated, do_compose)
        if isinstance(event, dp_accounting.ComposedDpEvent):
            parts = [self._maybe_compose(part, count, do_compose) for part in event.events]
            return next((error for error in parts if error is not None), None)
        if _releases_nothing(event):
            return None
        if _adds_no_noise(event):
            self._without_noise |= do_compose
        elif do_compose:
            self._released.compose(event, count)
        else:
            repeated = dp_accounting.SelfComposedDpEvent(event, count or 1)
            composed = dp_accounting.ComposedDpEvent([self._released.build(), repeated])
            try:
                lower(load(composed, **self._given()))
            except PlanError as error:
                return self.CompositionErrorDetails(event, str(error))
        return None

    def get_epsilon(self, target_delta: float) -> Bound:
        """The proved ε in nats at ``target_delta``, infinite where no finite one is proved.

        Raises ``NotCertified`` where nothing may be claimed.
        """
        return self._answer(epsilon, math.inf, delta=target_delta)

    def get_delta(self, target_epsilon: float) -> Bound:
        """The proved δ at ``target_epsilon`` nats; raises ``NotCertified`` and ``ValueError``."""
        if not target_epsilon >= 0:
            raise ValueError(f"ε is {target_epsilon}; give 0 or more.")
        return self._answer(delta, 1.0, epsilon=target_epsilon)

    def _answer(self, question: Any, worst: float, **target: float) -> Bound:
        if self._without_noise:
            return Bound(worst)
        released = self._released.build()
        if _releases_nothing(released):
            return Bound(0.0)
        try:
            answer: Bound = question(released, **self._given(**target))
        except NotCertified as refusal:
            if {reason.code for reason in refusal.reasons} <= UNBOUNDED:
                return Bound(worst)
            raise
        return answer

    def _given(self, delta: float = 0.5, **target: float) -> Any:
        target = target or {"delta": delta}
        return {"adjacency": ADJACENCY[self.neighboring_relation], "target": target}


def _releases_nothing(event: Any) -> bool:
    return isinstance(event, dp_accounting.NoOpDpEvent) or (
        getattr(event, "sampling_probability", None) == 0
    )


def _adds_no_noise(event: Any) -> bool:
    """Whether a part of ``event`` has a noise multiplier of 0, as where a search begins."""
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return True
    parts = (*getattr(event, "events", ()), *filter(None, (getattr(event, "event", None),)))
    return getattr(event, "noise_multiplier", None) == 0 or any(map(_adds_no_noise, parts))
