"""The privacy loss of one Laplace release, in closed form.

With noise of scale b (in sensitivities) the loss of x is (|x - 1| - |x|) / b, where P is centred at
0 and Q at 1: 1/b for x <= 0 and -1/b for x >= 1, and in between it falls as x grows, with
P-density e^{l/2} and Q-density e^{-l/2}, both times e^{-1/(2b)}/4. The reverse order has the same
law, because x -> 1 - x exchanges P and Q.

Reference: Balle and Wang, arXiv:1805.06530, for the curve 1 - exp((ε - 1/b)/2) of one release.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.fourier.normal_masses import UNIT_ROUNDOFF, Array
from affidavit.accountants.fourier.privacy_loss import Atoms, Cells, Survival

_ATOMS = 201
"""Between the two ends of the law."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaplaceLaw:
    """The law of the loss of a Laplace release of this ``scale``."""

    scale: float

    @property
    def ceiling(self) -> float:
        """No loss exceeds this (nats)."""
        return 1 / self.scale

    def atoms(self) -> Atoms:
        """The law under P: both ends, and what is between them in cells."""
        edges = np.linspace(-self.ceiling, self.ceiling, _ATOMS + 1)
        p, _ = self._between(edges)
        losses = np.concatenate((edges[:1], (edges[:-1] + edges[1:]) / 2, edges[-1:]))
        return Atoms(losses=losses, weights=np.concatenate(([self._rare / 2], p, [0.5])))

    def top(self, probability: float) -> float:  # noqa: ARG002  (half of P is at the ceiling)
        """The largest loss."""
        return self.ceiling

    def survival(self, losses: Array) -> Survival:
        """Both survival functions.

        ``losses`` in nats and each part of the answer have shape (n,).
        """
        inside = np.clip(losses, -self.ceiling, self.ceiling)
        lost = -np.expm1((inside - self.ceiling) / 2)
        p, q = (1 + lost) / 2, np.exp(-(inside + self.ceiling) / 2) / 2
        all_of_it, none = losses <= -self.ceiling, losses > self.ceiling
        return Survival(
            p=np.where(all_of_it, 1.0, np.where(none, 0.0, p)),
            q=np.where(all_of_it, 1.0, np.where(none, 0.0, q)),
            relative=np.full(losses.shape, self._relative),
            loss_error=self._misplaced(losses),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses between ``edges``, shape (n,), and beyond them, each with its ends' atoms."""
        inside = np.clip(edges, -self.ceiling, self.ceiling)
        p, q = self._between(np.concatenate(([-self.ceiling], inside, [self.ceiling])))
        low, high = np.searchsorted(edges, (-self.ceiling, self.ceiling))
        p[low] += self._rare / 2
        q[low] += 0.5
        p[high] += 0.5
        q[high] += self._rare / 2
        return Cells(
            p=p,
            q=q,
            relative=np.full(p.size, self._relative),
            misplaced=np.full(p.size, self._misplaced(edges)),
        )

    @property
    def _rare(self) -> float:
        return math.exp(-self.ceiling)

    def _between(self, losses: Array) -> tuple[Array, Array]:
        """P- and Q-masses between increasing ``losses`` within the law's ends."""
        shares = -np.expm1(-np.diff(losses) / 2) / 2
        p = np.exp((losses[1:] - self.ceiling) / 2) * shares
        q = np.exp(-(losses[:-1] + self.ceiling) / 2) * shares
        return p, q

    @property
    def _relative(self) -> float:
        return UNIT_ROUNDOFF * (16.0 + 4.0 * self.ceiling)

    def _misplaced(self, losses: Array) -> float:
        """How far a loss may be from the edge it is read at, ends of the law included (nats)."""
        return UNIT_ROUNDOFF * 8.0 * (self.ceiling + float(np.abs(losses).max()))
