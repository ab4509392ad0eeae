"""An accountant for Opacus: ``PrivacyEngine(accountant="affidavit")``."""

from __future__ import annotations

from typing import Any

from affidavit.library.api import epsilon
from affidavit.library.certification import Bound

try:
    from opacus.accountants import IAccountant
except ImportError:  # the class exists without Opacus, for tools that list the package
    IAccountant = object

NAME = "affidavit"


class OpacusAccountant(IAccountant):  # type: ignore[misc]
    """An ``IAccountant`` of Opacus with proved upper and lower bounds of ε.

    Like Opacus' own accountants, it treats every step as a Poisson sample under add_remove, which
    ``poisson_sampling=True`` draws.
    """

    history: list[tuple[float, float, int]]

    def __init__(self) -> None:
        self.history = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one step; the noise is in clip norms on the sum."""
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            *earlier, (_, _, steps) = self.history
            self.history = [*earlier, (noise_multiplier, sample_rate, steps + 1)]
        else:
            self.history = [*self.history, (noise_multiplier, sample_rate, 1)]

    def get_epsilon(self, delta: float, *_: Any, **__: Any) -> Bound:
        """Return the proved ε in nats at ``delta``; raises ``NotCertified``, ``MalformedPlan``."""
        if not self.history:
            return Bound(0.0)
        return epsilon(self, adjacency="add_remove", sampling="poisson", delta=delta)

    def __len__(self) -> int:
        return sum(steps for _, _, steps in self.history)

    @classmethod
    def mechanism(cls) -> str:
        """Return the name for ``PrivacyEngine(accountant=...)``."""
        return NAME


def register_opacus_accountant() -> None:
    """Register ``OpacusAccountant``, for ``PrivacyEngine(accountant="affidavit")``.

    Raises ``ImportError`` without Opacus.
    """
    try:
        from opacus.accountants.registry import register_accountant
    except ImportError:
        message = "register_opacus_accountant needs Opacus; run: pip install opacus"
        raise ImportError(message) from None
    register_accountant(NAME, OpacusAccountant, force=True)
