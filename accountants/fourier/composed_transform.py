"""The transform of a composition of tilted lattice laws, with a bound of its error.

Tilting a measure by exp(λ l) and dividing by its total gives a law π. The transform of the
composition is the product of the laws' transforms to the powers of their counts. It is computed
from logarithms, and frequencies at which it is negligible are left out.

With a ``cut``, every law is split in two, π = s + r, the losses up to the cut and those above, and
the transform is that of the composition with at least one loss above it:

    Π (S + R)^T - Π S^T = Π S^T (exp(Σ T log1p(R / S)) - 1),

in this form, so that its error is relative to itself. If a rare loss alone decides δ, no tilt is
good for the composition as a whole, but each of its two parts has a good one.

Errors bounded here, with u = 2**-53:

* each forward transform of n points: 2-norm at most 16 u log2(n) times that of its input,
  and a rounding for each of the rows that wrapping sums ([1] Theorem 24.2 gives 7 u for radix 2
  with rounded twiddles; doubled for mixed radix); T-fold in the product, and times Σ T |r|₁ for
  the errors of S when there is a cut;
* logarithms, powers and their exponential, in units of ``sizes``;
* frequencies left out: at most ``left_out`` each;
* tilting: λ|l| + 8 roundings a mass, T-fold, in ``relative``.

References: [1] Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., §24.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.fft only where a transform is taken
from numpy.typing import NDArray

from affidavit.accountants.fourier.cache import up
from affidavit.accountants.fourier.discretized_pld import LatticeMeasure
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array
from affidavit.accountants.rounding import folded, transform_error

Complex = NDArray[np.complex128]

_NEGLIGIBLE = 1e-24
"""Frequencies whose composed transform is below this are left out."""
_LENGTH_RUNGS = 4
"""Rungs per octave of the ladder of lengths."""
_MIN_SUM = 1e-200
"""Sum below which terms may have underflowed, and logarithms are added instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TiltedLaw:
    """One tilted law, split at the cut, with its count and the error of tilting.

    ``common`` and ``rare``, which sum to one, have the shape (n,) of ``losses`` (nats). The measure
    is exp(``log_total``) times the law; ``relative_error`` is that of tilting.
    """

    losses: Array
    common: Array
    rare: Array | None
    count: int
    log_total: float
    relative_error: float

    @classmethod
    def of(
        cls, measure: LatticeMeasure, count: int, order: float, cut: float | None
    ) -> TiltedLaw | None:
        """Return ``measure`` tilted by ``order``, split at ``cut`` (nats); None without mass."""
        losses = measure.grid.losses()
        exponents = order * losses
        stride = max(1, measure.grid.size // 1024)
        sample = np.append(np.arange(0, measure.grid.size, stride), np.argmax(measure.masses))
        peak = float(_log_weights(measure.masses[sample], exponents[sample]).max())
        if peak == -math.inf:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            law: Array = np.exp(exponents - peak) * measure.masses
            total = float(law.sum())
        if not math.isfinite(total):
            # The sample missed a peak by more than the range of a double.
            weights = _log_weights(measure.masses, exponents)
            peak = float(weights.max())
            law = np.exp(weights - peak)
            total = float(law.sum())
        law /= total
        log_total = peak + math.log(total)
        size = float(max(abs(exponents[0]), abs(exponents[-1]))) + abs(peak) + abs(log_total)
        split = losses.size if cut is None else int(np.searchsorted(losses, cut, side="right"))
        rare = law[split:]
        if rare.any():
            rare = np.concatenate((np.zeros(split), rare))
            law[split:] = 0.0
        return cls(
            losses=losses,
            common=law,
            rare=rare if rare.any() else None,
            count=count,
            log_total=log_total,
            relative_error=count * UNIT_ROUNDOFF * (64.0 + 4.0 * size),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectrum:
    """The composed transform at the ``indices`` of frequencies that matter.

    ``error`` bounds the 2-norm error of the composed law, and ``sizes`` times the unit of rounding
    times 64 + 16 · steps the rounding of ``values``. ``left_out`` bounds each other frequency.
    Arrays have shape (m,).
    """

    indices: NDArray[np.intp]
    values: Complex
    sizes: Array
    error: float
    left_out: float


def composed(laws: Sequence[TiltedLaw], size: int) -> Spectrum:
    """Return the transform of ``size`` points of the composition.

    With rare parts it is that of the composition with at least one rare loss.
    """
    if any(law.rare is not None for law in laws):
        return _with_a_rare_loss(laws, size)
    indices, log_product = np.arange(size // 2 + 1), np.zeros(size // 2 + 1, dtype=np.complex128)
    error = 0.0
    for law in laws:
        # No factor exceeds 1 by more than the error below, so that a frequency that is negligible
        # after some measures is so after all.
        wrapped = folded(law.common, size)
        values = scipy.fft.rfft(wrapped)[indices]
        large = law.count * _log_abs(values) > math.log(_NEGLIGIBLE)
        indices = indices[large]
        log_product = log_product[large] + law.count * np.log(values[large])
        error += law.count * transform_error(wrapped, law.common.size)
    large = log_product.real > math.log(_NEGLIGIBLE)
    indices, log_product = indices[large], log_product[large]
    worst = error * math.sqrt(size)
    # (|F| + e)^T <= 1 + ... <= e^{Te}: how much the errors of T factors can reinforce each other.
    growth = math.exp(min(700.0, worst))
    values = np.exp(log_product)
    return Spectrum(
        indices=indices,
        values=values,
        sizes=np.abs(values),
        error=error * growth,
        left_out=_NEGLIGIBLE * growth,
    )


def _with_a_rare_loss(laws: Sequence[TiltedLaw], size: int) -> Spectrum:
    weight = sum(law.count * float(law.rare.sum()) for law in laws if law.rare is not None)
    error = worst = 0.0
    pairs = []
    log_common, log_both = np.zeros(size // 2 + 1), np.zeros(size // 2 + 1)
    for law in laws:
        wrapped = folded(law.common, size)
        one = transform_error(wrapped, law.common.size)
        error += law.count * one * min(2.0, weight)
        worst += law.count * one * math.sqrt(size)
        common = scipy.fft.rfft(wrapped)
        common[common == 0] = 1e-300
        logs = law.count * _log_abs(common)
        log_common += logs
        rare = None
        if law.rare is not None:
            wrapped = folded(law.rare, size)
            one = transform_error(wrapped, law.rare.size)
            error += law.count * one
            worst += law.count * one * math.sqrt(size)
            rare = scipy.fft.rfft(wrapped)
            logs = law.count * _log_abs(common + rare)
        log_both += logs
        pairs.append((common, rare))
    # The rare part may have no mass.
    least = max(_NEGLIGIBLE * min(1.0, weight), 1e-300)
    stored = np.flatnonzero(np.maximum(log_common, log_both) > math.log(least / 2))
    base: Complex = np.zeros(stored.size, dtype=np.complex128)
    both, ratio, ratio_size = base.copy(), base.copy(), np.zeros(stored.size)
    for law, (common, rare) in zip(laws, pairs, strict=True):
        logs = law.count * np.log(common[stored])
        base += logs
        if rare is None:
            both += logs
            continue
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            # A quotient that is large, or near -1, is not used.
            quotient = rare[stored] / common[stored]
            both += law.count * np.log(common[stored] + rare[stored])
            ratio += law.count * _log1p(quotient)
            ratio_size += law.count * np.abs(quotient)
    # If the two nearly cancel, the logarithm has few digits of their sum.
    near = ratio_size < 0.5
    values: Complex = np.zeros(stored.size, dtype=np.complex128)
    sizes = np.zeros(stored.size)
    common = np.exp(base)
    values[near] = common[near] * _expm1(ratio[near])
    sizes[near] = 2.0 * np.abs(common[near]) * ratio_size[near]
    together = np.nan_to_num(np.exp(both[~near]))
    values[~near] = together - common[~near]
    sizes[~near] = np.abs(together) + np.abs(common[~near])
    growth = math.exp(min(700.0, worst))
    return Spectrum(
        indices=stored,
        values=values,
        sizes=2.0 * sizes,
        error=error * growth * growth,
        left_out=least * growth,
    )


def log_moment(laws: Sequence[TiltedLaw], order: float) -> float:
    """Return log of the composed law's moment at a further tilt (1/nat), rounded up.

    With rare parts it is that of the composition with at least one rare loss.
    """
    total = ratio = 0.0
    log_ratio = -math.inf
    for law in laws:
        common = _log_sum(law.common, law.losses, order)
        total += law.count * common
        if law.rare is not None:
            quotient = _log_sum(law.rare, law.losses, order) - common
            ratio += law.count * float(np.logaddexp(0.0, quotient))
            log_ratio = float(np.logaddexp(log_ratio, quotient + math.log(law.count)))
    if any(law.rare is not None for law in laws):
        if ratio > 30.0:
            total += ratio
        else:
            total += math.log(math.expm1(ratio)) if ratio > 1e-12 else log_ratio
    return total + 1e-9


def fast_length(points: int) -> int:
    """Return the transform's length for a window of ``points``, on a ladder of lengths."""
    rung = up(max(32, points), _LENGTH_RUNGS)
    return int(scipy.fft.next_fast_len(math.ceil(rung * (1 - 1e-12)), real=True))


def _log_abs(z: Complex) -> Array:
    with np.errstate(divide="ignore"):
        logs: Array = 0.5 * np.log(z.real**2 + z.imag**2)
    return logs


def _log1p(z: Complex) -> Complex:
    """Return log(1 + z), whose error is a few roundings of |z| if |z| is at most 1/2."""
    x, y = z.real, z.imag
    logs: Complex = 0.5 * np.log1p(x * (2 + x) + y * y) + 1j * np.arctan2(y, 1 + x)
    return logs


def _expm1(z: Complex) -> Complex:
    """Return exp(z) - 1, whose error is a few roundings of |z| if |z| is small."""
    x, y = z.real, z.imag
    growth = np.exp(x)
    values: Complex = np.expm1(x) - 2 * growth * np.sin(y / 2) ** 2 + 1j * growth * np.sin(y)
    return values


def _log_weights(masses: Array, exponents: Array) -> Array:
    """Return log(mass) + exponent, -inf for no mass."""
    with np.errstate(divide="ignore"):
        weights: Array = exponents + np.log(masses)
    return weights


def _log_sum(law: Array, losses: Array, order: float) -> float:
    """Return log Σ law · exp(order · losses), rounded up."""
    exponents = order * losses
    peak = float(exponents.max())
    total = float(law @ np.exp(exponents - peak))
    if total < _MIN_SUM:
        # The law has no mass where the exponential is largest: combine the two.
        weights = _log_weights(law, exponents)
        peak = float(weights.max())
        total = float(np.exp(weights - peak).sum()) if peak > -math.inf else 0.0
    value = peak + math.log(total) if total > 0 else -math.inf
    size = float(max(abs(exponents[0]), abs(exponents[-1])))
    return value + UNIT_ROUNDOFF * (128.0 + 8.0 * size)
