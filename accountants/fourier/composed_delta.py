"""δ of a composition of lattice measures, through one transform per measure.

Tilting every measure by exp(λ l) and dividing by its total M gives a law π; the T-fold
convolution of the measures is exp(-λ x) M^T times that of the laws, so the digits of the
Fourier transform stand where δ is made. With C the product of M^T over the measures, x
the composed loss, y = x - ε and g(y) = e^{-λy} (1 - e^{-y})_+,

    δ(ε) = C e^{-λε} Σ_x c(x) g(x - ε) + (infinite mass),      c = convolution of the π.

The sum is over a window [low, high) of x as long as the transform, in the frequency domain.
Frequencies at which the product of transforms is negligible are left out, so the work after the
forward transform does not depend on its length.

Errors bounded here, each added (upper) or subtracted (lower):

* aliasing: cyclic c is never below c. Chernoff's bound at a further tilt of the lattice laws
  themselves holds the mass outside the window, which may replace mass inside; mass above the
  window contributes at most that times g(high - ε), or the largest g;
* those of the transform (``composed_transform.py``): a 2-norm error e of the composed law moves δ
  by at most e ‖g‖₂ (Cauchy-Schwarz), a frequency left out by its size times ‖g‖₁, and the
  rounding of powers and of the sum over frequencies is counted term by term;
* infinite masses (a union bound) and shifted nodes (``loss_error``, T-fold in ε);
* the place of the composed nodes, in roundings of their sizes, as a shift of ε; the log of
  C e^{-λε}, T·log M included, in roundings of its terms.

References: Koskela, Jälkö and Honkela, arXiv:1906.03049, for δ by transforms; Gopi, Lee and
Wutschitz, arXiv:2106.02848, for windows; docs/theorems/fourier-lattice.md, Theorem 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from affidavit.accountants.fourier.composed_transform import (
    TiltedLaw,
    composed,
    fast_length,
    log_moment,
)
from affidavit.accountants.fourier.discretized_pld import LatticeMeasure
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF
from affidavit.accountants.fourier.tilting import Window, bounded_exp, log_peak


class ComposedTransform:
    """The tilted transform of a composition, from which δ(ε) is read with its error.

    ``parts`` are the measures with their counts, on grids of one step. With a ``cut`` (nats) it is
    the composition with at least one loss above it: its curve and that of the measures up to the
    cut add up to the whole.

    Guarantees
    ----------
    * ``upper(ε)`` is at least, and ``lower(ε)`` at most, the hockey-stick curve at e^ε of
      the composition of the measures, for every ε; outside the window they are loose.
    """

    def __init__(
        self,
        parts: Sequence[tuple[LatticeMeasure, int]],
        window: Window,
        cut: float | None = None,
    ) -> None:
        self._order = window.order
        self._peak = math.exp(log_peak(window.order))
        self._step = parts[0][0].grid.step
        self._size = fast_length(window.points(self._step))
        origins = [part.grid.origin * count for part, count in parts]
        self._origin = math.fsum(origins)
        self._first = math.ceil((window.low - self._origin) / self._step)
        self._last = self._first + self._size - 1
        far = abs(self._origin) + abs(self._last * self._step)
        self._placing = 8 * UNIT_ROUNDOFF * (sum(map(abs, origins)) + far)
        self._shift = sum(part.loss_error * count for part, count in parts)
        self._infinite = sum(part.infinite * count for part, count in parts)
        laws = [TiltedLaw.of(part, count, window.order, cut) for part, count in parts]
        result = [law for law in laws if law is not None]
        self._alive = len(result) == len(laws) and (
            cut is None or any(law.rare is not None for law in result)
        )
        if self._alive:
            self._transform(result, window)

    def _transform(self, laws: Sequence[TiltedLaw], window: Window) -> None:
        """Transform, and store the frequencies that matter with the sums' denominators."""
        self._log_total = sum(law.count * law.log_total for law in laws)
        self._relative = sum(law.relative_error for law in laws)
        low, high = self._loss(self._first), self._loss(self._last)
        slack = 1 + 1e-9
        below = window.below * low + log_moment(laws, -window.below)
        above = -window.above * high + log_moment(laws, window.above)
        self._below = math.exp(min(0.0, below)) * slack
        self._above = math.exp(min(0.0, above)) * slack
        spectrum = composed(laws, self._size)
        stored = spectrum.indices
        # A real transform stands for both k and -k, except at k = 0 and the middle.
        twice = np.where((stored == 0) | (2 * stored == self._size), 1.0, 2.0) / self._size
        angle = 2j * math.pi * stored / self._size
        slow = twice / -np.expm1(angle - self._order * self._step)
        fast = twice / -np.expm1(angle - (self._order + 1) * self._step)
        self._frequencies = stored
        self._slow, self._fast = spectrum.values * slow, spectrum.values * fast
        # The far end of both geometric sums is at a fixed loss, so it is summed once.
        turn = self._turn(self._last + 1)
        self._slow_end = float(np.sum(self._slow * turn).real)
        self._fast_end = float(np.sum(self._fast * turn).real)
        steps = sum(law.count for law in laws)
        size_of_sum = 2 * float(spectrum.sizes @ (np.abs(slow) + np.abs(fast)))
        sum_of_g = 1 / (self._step * self._order * (self._order + 1)) + self._peak
        self._error = (
            spectrum.error * math.sqrt(self._peak * sum_of_g)
            + UNIT_ROUNDOFF * (64.0 + 16.0 * steps) * size_of_sum
            + spectrum.left_out * sum_of_g
        )

    def _loss(self, index: int) -> float:
        return self._origin + index * self._step

    def _turn(self, index: int) -> NDArray[np.complex128]:
        phases = (self._frequencies * (index % self._size)) % self._size
        turn: NDArray[np.complex128] = np.exp(2j * math.pi / self._size * phases)
        return turn

    def _sum(self, epsilon: float) -> tuple[float, float]:
        """Return Σ c(x) g(x - ε) over the window, and a bound of its error."""
        index = max(self._first, math.ceil((epsilon - self._origin) / self._step))
        near = max(0.0, self._loss(index) - epsilon)
        far = self._loss(self._last + 1) - epsilon
        turn = self._turn(index)
        slow, fast = self._order, self._order + 1
        total = math.exp(-slow * near) * float(np.sum(self._slow * turn).real)
        total -= math.exp(-fast * near) * float(np.sum(self._fast * turn).real)
        total -= math.exp(-slow * far) * self._slow_end - math.exp(-fast * far) * self._fast_end
        return total, self._error

    def _scale(self, epsilon: float) -> tuple[float, float]:
        """Return log of C e^{-λε}, and a bound of the relative error of every multiple."""
        log_scale = self._log_total - self._order * epsilon
        size = abs(self._log_total) + abs(self._order * epsilon)
        return log_scale, self._relative + 16 * UNIT_ROUNDOFF * (1 + size)

    def upper(self, epsilon: float) -> float:
        """Return an upper bound of δ at ``epsilon`` (nats), at most 1."""
        if not self._alive:
            return min(1.0, self._infinite)
        epsilon = min(epsilon - self._shift - self._placing, self._loss(self._last))
        total, error = self._sum(epsilon)
        log_scale, relative = self._scale(epsilon)
        far = self._loss(self._last) - epsilon
        beyond = self._peak
        if far > math.log1p(1 / self._order):
            # g falls beyond its peak.
            beyond = math.exp(-self._order * far) * -math.expm1(-far) * (1 + 1e-12)
        total = max(total, 0.0) + error + self._above * beyond
        if epsilon < self._loss(self._first):
            total += self._below * self._peak
        return min(1.0, bounded_exp(log_scale + relative) * total + self._infinite * (1 + 1e-12))

    def lower(self, epsilon: float) -> float:
        """Return a lower bound of δ at ``epsilon`` (nats), at least 0."""
        if not self._alive:
            return 0.0
        epsilon = epsilon + self._shift + self._placing
        if epsilon >= self._loss(self._last):
            return 0.0
        total, error = self._sum(epsilon)
        log_scale, relative = self._scale(epsilon)
        total -= error + (self._below + self._above) * self._peak
        return max(0.0, bounded_exp(log_scale - relative) * total)
