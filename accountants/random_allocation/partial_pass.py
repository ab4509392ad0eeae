"""One direction of a pass that ends before all of its bins are released.

The record is in one of the ``inner.bins`` released bins with probability q, and else in none: the
pair is q P + (1-q) Q against Q, with P against Q that of a whole pass over the released bins.
Mixing with Q acts on hockey-stick curves exactly (docs/theorems/random-allocation.md, Theorem 5),
so that both bounds carry over, rounded outwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.cyclic_convolution import Array
from affidavit.accountants.random_allocation.directions import (
    Curves,
    Direction,
    where_it_falls_to,
)

ROUNDING = 2e-15
"""Relative error of what is computed here, and that of q, several times over."""


@dataclass(frozen=True, kw_only=True)
class PartialDirection:
    """``inner`` where the record is in one of its bins with probability ``share`` only."""

    inner: Direction
    share: float

    @property
    def bins(self) -> int:
        """The bins that are released."""
        return self.inner.bins

    @property
    def rate(self) -> float:
        """1/σ."""
        return self.inner.rate

    def guess(self, delta: float) -> float:
        """About the ε (nats) at which δ(ε) is ``delta``; not a bound."""
        return where_it_falls_to(delta, self.about, self.largest_epsilon)

    def about(self, epsilon: float) -> float:
        """About the δ at ``epsilon`` (nats); not a bound."""
        scale, inside = self._inside(epsilon, self.share, 0.0)
        return scale * self.inner.about(inside) if inside <= self.inner.largest_epsilon else 0.0

    @property
    def largest_epsilon(self) -> float:
        """No ε (nats) is searched beyond this."""
        most = self.inner.largest_epsilon
        if self.inner.side == "remove":
            return math.log1p(self.share * math.expm1(most))
        return -math.log1p(self.share * math.expm1(-most))

    def curves(
        self,
        epsilon: float,
        delta: float,
        width: float,
        step: float | None = None,
        upto: float = 0.0,
    ) -> Curves:
        """Bounds made for ``epsilon`` (nats) and ``delta``, as ``Direction.curves`` makes them."""
        scale, inside = self._inside(epsilon, self.share, 0.0)
        _, end = self._inside(upto, self.share, 0.0)
        most = self.inner.largest_epsilon
        likely = min(0.5, delta / (scale or 1.0))
        inner = self.inner.curves(min(inside, most), likely, width, step, min(end, most))
        return Curves(
            uppers=self._outside(inner.uppers, ROUNDING),
            lowers=self._outside(inner.lowers, -ROUNDING),
            step=inner.step,
        )

    def _outside(
        self, bound: Callable[[Array], Array], outwards: float
    ) -> Callable[[Array], Array]:
        share = min(1.0, self.share * (1 + outwards))

        def deltas(epsilons: Array) -> Array:
            pairs = [self._inside(epsilon, share, outwards) for epsilon in epsilons.tolist()]
            scales, inside = np.array(pairs).reshape(-1, 2).T
            none = scales <= 0
            return np.where(none, 0.0, scales * bound(np.where(none, 0.0, inside)) * (1 + outwards))

        return deltas

    def _inside(self, epsilon: float, share: float, outwards: float) -> tuple[float, float]:
        """The factor on the inner δ and the inner ε (nats); δ moves ``outwards`` by rounding."""
        if self.inner.side == "remove":
            inside = math.log1p(math.expm1(min(epsilon, 650.0)) / share)
            return share, inside * (1 - outwards)
        scale = share - (1 - share) * math.expm1(min(epsilon, 650.0)) + share * outwards
        if scale <= 0:
            return 0.0, math.inf
        inside = epsilon + math.log(share / scale)
        return scale, max(0.0, inside - outwards * (1 + abs(inside)))
