"""A phase of a plan, lowered: its sampler, its steps and its joint noise multiplier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from affidavit.mechanisms.protocol import WholeRun
from affidavit.mechanisms.sampling_schemes import (
    Sampled,
)
from affidavit.plan import (
    Scheme,
    events,
)

if TYPE_CHECKING:
    from affidavit.mechanisms.correlation import Correlation


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredPhase:
    """One phase: its sampler, and the steps and joint noise multiplier if they are given.

    ``scheme`` is the simplest description of its sampling. ``whole`` replaces the events of the
    sampler if the phase is one Gaussian mechanism, and ``correlation`` if the noise is correlated
    across steps.
    """

    scheme: Scheme
    sampled: Sampled
    steps: int | None
    joint: float | None
    whole: WholeRun | None = None
    correlation: Correlation | None = None

    def event(self, joint: float, steps: int | None) -> events.Event:
        """Return the event of the phase at σ_joint, with ``steps`` if they are open.

        Raises ``ValueError`` if neither the plan nor the caller gives the steps.
        """
        length = self.steps if self.steps is not None else steps
        if length is None:
            raise ValueError("the plan leaves its steps open; give steps")
        if self.correlation is not None:
            return self.correlation.event(joint, length)
        if self.whole is not None:
            return events.Gaussian(noise_multiplier=joint / self.whole.sensitivity(length))
        return self.sampled.of_run(joint, length)

    def in_known_lots(self, joint: float, steps: int | None) -> events.Event | None:
        """Return another bound of a phase of bins, which is no mixture over all of them."""
        length = self.steps if self.steps is not None else steps
        if self.correlation is None or length is None:
            return None
        bounds = self.correlation.in_known_lots(joint, length)
        return events.EitherBound(events=bounds) if bounds else None

    def attained(self, joint: float, steps: int) -> events.Event:
        """Return an effect of one record on the phase, which ``event`` bounds from above."""
        if self.correlation is not None:
            return self.correlation.attained(joint, steps)
        if self.whole is not None:
            return self.whole.attained(joint, steps)
        return self.sampled.attained_by_run(joint, steps)

    @property
    def attack(self) -> tuple[events.TestedSums, int] | None:
        """What an attack on a phase with nothing open counts, and the number of such."""
        if self.sampled.attack is None or self.joint is None or self.steps is None:
            return None
        if self.correlation is not None:
            return self.correlation.attack(self.joint, self.steps)
        return None if self.whole is not None else self.sampled.attack(self.joint, self.steps)
