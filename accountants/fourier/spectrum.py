"""The transform of a composition of tilted lattice laws, with a bound of its error.

Tilting a measure by exp(λ l) and dividing by its total gives a law π; the transform of the
composition is the product of the laws' transforms to their counts. It is formed from
logarithms, and frequencies at which it is negligible are left out.

With a ``cut``, every law is split in two, π = s + r, the losses up to the cut and those
above, and what is transformed is the composition with at least one loss above it:

    Π (S + R)^T - Π S^T = Π S^T (exp(Σ T log1p(R / S)) - 1),

in this form, so that its error is relative to itself. Where a rare loss alone makes δ no
tilt is good for the composition as a whole, but each of its two parts has one that is.

Errors bounded here, with u = 2**-53:

* each forward transform of n points: 2-norm at most 16 u log2(n) times that of its input,
  and a rounding for each of the rows that wrapping adds up to make that
  ([1] Theorem 24.2 gives 7 u for radix 2 with rounded twiddles; doubled for mixed radix);
  T-fold in the product, and times Σ T |r|₁ for the errors of S when there is a cut;
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
from numpy.typing import NDArray
from scipy import fft

from affidavit.accountants.cyclic import folded, transform_error
from affidavit.accountants.fourier.lattice import LatticeMeasure
from affidavit.accountants.fourier.normal_masses import UNIT_ROUNDOFF, Array

Complex = NDArray[np.complex128]

_NEGLIGIBLE = 1e-24
"""Frequencies whose composed transform is below this share of it are left out."""
_SMALLEST_SUM = 1e-200
"""Below this a sum may have lost terms to underflow, and is taken in logarithms instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TiltedLaw:
    """One tilted law, split at the cut, how often it runs, and what tilting it cost.

    ``common`` and ``rare``, which sum to one, have the shape (n,) of ``losses`` (nats). The
    measure was exp(``log_total``) times as much; ``relative`` is the error that tilting makes.
    """

    losses: Array
    common: Array
    rare: Array | None
    count: int
    log_total: float
    relative: float

    @classmethod
    def of(
        cls, measure: LatticeMeasure, count: int, order: float, cut: float | None
    ) -> TiltedLaw | None:
        """``measure`` tilted by ``order``, split at ``cut`` (nats); None if it has no mass."""
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
            # The sample missed a peak by more than a double's range.
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
            relative=count * UNIT_ROUNDOFF * (64.0 + 4.0 * size),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectrum:
    """The composed transform at the frequencies ``kept`` of ``size`` points.

    ``error`` bounds the 2-norm error of the composed law, ``sizes`` times the unit of
    rounding times 64 + 16 · steps the rounding of ``values``. Arrays have shape (m,).
    """

    kept: NDArray[np.intp]
    values: Complex
    sizes: Array
    error: float
    left_out: float


def composed(laws: Sequence[TiltedLaw], size: int) -> Spectrum:
    """The transform, of ``size`` points, of the composition; with rare parts, of what has one."""
    if any(law.rare is not None for law in laws):
        return _with_a_rare_loss(laws, size)
    kept = np.arange(size // 2 + 1)
    log_product: Complex = np.zeros(kept.size, dtype=np.complex128)
    error = worst = 0.0
    for law in laws:
        wrapped = folded(law.common, size)
        one = transform_error(wrapped, law.common.size)
        error += law.count * one
        worst += law.count * one * math.sqrt(size)
        spectrum = fft.rfft(wrapped)[kept]
        # No factor exceeds 1 by more than the error above, so that what is negligible
        # after some measures stays so after all.
        log_size = log_product.real + law.count * _log_abs(spectrum)
        large = np.flatnonzero(log_size > math.log(_NEGLIGIBLE))
        kept = kept[large]
        log_product = log_product[large] + law.count * np.log(spectrum[large])
    # (|F| + e)^T <= 1 + ... <= e^{Te}: how far the errors of T factors can reinforce.
    growth = math.exp(min(700.0, worst))
    values = np.exp(log_product)
    return Spectrum(
        kept=kept,
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
        common = fft.rfft(wrapped)
        common[common == 0] = 1e-300
        logs = law.count * _log_abs(common)
        log_common += logs
        rare = None
        if law.rare is not None:
            wrapped = folded(law.rare, size)
            one = transform_error(wrapped, law.rare.size)
            error += law.count * one
            worst += law.count * one * math.sqrt(size)
            rare = fft.rfft(wrapped)
            logs = law.count * _log_abs(common + rare)
        log_both += logs
        pairs.append((common, rare))
    least = _NEGLIGIBLE * min(1.0, weight)
    kept = np.flatnonzero(np.maximum(log_common, log_both) > math.log(least / 2))
    base: Complex = np.zeros(kept.size, dtype=np.complex128)
    both, ratio, ratio_size = base.copy(), base.copy(), np.zeros(kept.size)
    for law, (common, rare) in zip(laws, pairs, strict=True):
        logs = law.count * np.log(common[kept])
        base += logs
        if rare is None:
            both += logs
            continue
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            # Where the quotient is large it is not used.
            quotient = rare[kept] / common[kept]
            both += law.count * np.log(common[kept] + rare[kept])
            ratio += law.count * _log1p(quotient)
            ratio_size += law.count * np.abs(quotient)
    near = ratio_size < 1.0
    values: Complex = np.zeros(kept.size, dtype=np.complex128)
    sizes = np.zeros(kept.size)
    common = np.exp(base)
    values[near] = common[near] * _expm1(ratio[near])
    sizes[near] = 2.0 * np.abs(common[near]) * ratio_size[near]
    together = np.nan_to_num(np.exp(both[~near]))
    values[~near] = together - common[~near]
    sizes[~near] = np.abs(together) + np.abs(common[~near])
    growth = math.exp(min(700.0, worst))
    return Spectrum(
        kept=kept,
        values=values,
        sizes=2.0 * sizes,
        error=error * growth * growth,
        left_out=least * growth,
    )


def log_moment(laws: Sequence[TiltedLaw], order: float) -> float:
    """log of the composed law's moment at a further tilt (1/nat), raised by its rounding.

    With rare parts, of the composition with at least one rare loss.
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
    """The transform's length, at least ``points``, for a window of so many."""
    return int(fft.next_fast_len(max(32, points), real=True))


def _log_abs(z: Complex) -> Array:
    with np.errstate(divide="ignore"):
        logs: Array = 0.5 * np.log(z.real**2 + z.imag**2)
    return logs


def _log1p(z: Complex) -> Complex:
    """log(1 + z), whose error is a few roundings of |z| where |z| is small."""
    x, y = z.real, z.imag
    logs: Complex = 0.5 * np.log1p(x * (2 + x) + y * y) + 1j * np.arctan2(y, 1 + x)
    return logs


def _expm1(z: Complex) -> Complex:
    """exp(z) - 1, whose error is a few roundings of |z| where |z| is small."""
    x, y = z.real, z.imag
    growth = np.exp(x)
    values: Complex = np.expm1(x) - 2 * growth * np.sin(y / 2) ** 2 + 1j * growth * np.sin(y)
    return values


def _log_weights(masses: Array, exponents: Array) -> Array:
    """log(mass) + exponent; -inf where there is no mass."""
    with np.errstate(divide="ignore"):
        weights: Array = exponents + np.log(masses)
    return weights


def _log_sum(law: Array, losses: Array, order: float) -> float:
    """log Σ law · exp(order · losses), raised by its own rounding."""
    exponents = order * losses
    peak = float(exponents.max())
    total = float(law @ np.exp(exponents - peak))
    if total < _SMALLEST_SUM:
        # The law is nothing where the exponential is largest: weigh the two together.
        weights = _log_weights(law, exponents)
        peak = float(weights.max())
        total = float(np.exp(weights - peak).sum()) if peak > -math.inf else 0.0
    value = peak + math.log(total) if total > 0 else -math.inf
    size = float(max(abs(exponents[0]), abs(exponents[-1])))
    return value + UNIT_ROUNDOFF * (128.0 + 8.0 * size)
