"""An accountant for Opacus: ``PrivacyEngine(accountant="affidavit")``."""

from __future__ import annotations

from typing import Any

from affidavit.library.api import epsilon
from affidavit.library.bounds import Bound

try:
    from opacus.accountants import IAccountant
except ImportError:  # the name is there for who lists a package, and serves who has Opacus
    IAccountant = object

NAME = "affidavit"


class OpacusAccountant(IAccountant):  # type: ignore[misc]
    """Opacus' ``IAccountant`` whose ε is proved on both sides.

    As Opacus' own accountants it takes every step for a Poisson sample, which is what
    ``poisson_sampling=True`` draws, under add_remove.
    """

    history: list[tuple[float, float, int]]

    def __init__(self) -> None:
        self.history = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one step with noise in clip norms on the sum, and the rate of the sample."""
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            *earlier, (_, _, steps) = self.history
            self.history = [*earlier, (noise_multiplier, sample_rate, steps + 1)]
        else:
            self.history = [*self.history, (noise_multiplier, sample_rate, 1)]

    def get_epsilon(self, delta: float, *_: Any, **__: Any) -> Bound:
        """The proved ε in nats at ``delta``; raises ``NotCertified`` and ``MalformedPlan``."""
        if not self.history:
            return Bound(0.0)
        return epsilon(self, adjacency="add_remove", sampling="poisson", delta=delta)

    def __len__(self) -> int:
        return sum(steps for _, _, steps in self.history)

    @classmethod
    def mechanism(cls) -> str:
        """The name after ``PrivacyEngine(accountant=...)``."""
        return NAME


def register_opacus_accountant() -> None:
    """Let Opacus make an accountant of Affidavit: ``PrivacyEngine(accountant="affidavit")``.

    Raises ``ImportError`` without Opacus.
    """
    from opacus.accountants.registry import register_accountant

    register_accountant(NAME, OpacusAccountant, force=True)
