"""Readings: the values of common accountants for an account, and their agreement with claims.

Each reading is one number and the possible deviation of its usual program. Readings are quick,
because a diagnosis needs hundreds, and **none is a bound**: certified numbers come from
``affidavit.assessment.certification`` alone.

=============  =======================================================================
reading        accountant
=============  =======================================================================
``gaussian``   the exact curve of one Gaussian mechanism, if nothing is sampled
``rdp``        Rényi orders of dp_accounting, improved conversion
``rdp_opacus`` Rényi orders of Opacus, improved conversion
``rdp_classic`` Rényi orders, the conversion of the moments accountant
``pld``        the tight value, as by dp_accounting's privacy loss distributions
``prv``        the tight value, as by Opacus' and Microsoft's PRV accountants
``gdp_clt``    the central-limit approximation; a mistake in itself
``basic``      classical Gaussian mechanism, amplified, ε summed
``advanced``   the same under advanced composition
=============  =======================================================================

A claim of 7.98 stands for everything that rounds to it. A reading agrees with it

* ``exactly``, if it rounds to the claim, half up or half down;
* ``cut``, if the claim is the reading truncated, or rounded up, at its last digit;
* ``nearly``, if the reading is less precise than the claim: the noise multiplier was itself rounded
  before it was printed, or the program's documented error is larger.

A claimed noise multiplier is compared through the ε that it is meant to reach: calibration stops a
little below its target, and the claim's own rounding moves ε by twice as much.

References: Dwork and Roth, "The Algorithmic Foundations of Differential Privacy" (2014),
Theorems 3.16, 3.20 and A.1; Bu, Dong, Long and Su, arXiv:1911.11607 (central limit);
Gopi, Lee and Wutschitz, arXiv:2106.02848 (PRV); Mironov, arXiv:1702.07476; Mironov, Talwar and
Zhang, arXiv:1908.10530; Canonne, Kamath and Steinke, arXiv:2004.00010, Proposition 12 (Rényi).

Two Rényi accountants are reproduced to their last printed digit: Opacus (orders 1.1 to 10.9 and 12
to 63) and dp_accounting (the same with 11, 128, 256, 512 and 1024). Both convert to (ε, δ) by the
improved bound; the classic conversion of the moments accountant is a separate reading. The moments
are summed in closed form at whole orders, and by the trapezoid rule, which converges geometrically
for them, at fractional ones.

dp_accounting adds the absolute values of an alternating series at fractional orders and is higher
there, by up to a few per cent; the library itself is called only if the difference could decide
(``library_epsilon``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, log_ndtr, logsumexp

from affidavit.accountants import (
    AccountantError,
    Bracket,
    FourierAccountant,
    GaussianCurve,
    approximate_epsilon,
)
from affidavit.assessment.diagnosis.accountant_inputs import (
    Part,
    Parts,
    event_of,
)
from affidavit.plan import Claim, Plan

Array = npt.NDArray[np.float64]

MIN_ROUNDED_DIGITS, MAX_ROUNDED_DIGITS = 4, 7
"""A noise multiplier with this many digits was calibrated and then rounded; a shorter one was
chosen by hand, and a longer one is exact."""
ELASTICITY = 3.0
"""The relative change of ε per relative change of the noise multiplier; 1 to 2.5 in practice."""
CALIBRATION_TOLERANCE = 5e-3
"""How far below its target a calibration may stop, relatively; Opacus stops 0.01 below."""
DOUBLE_TOLERANCE = 1e-9
"""The relative tolerance for decimals that are compared as doubles."""


class Agreement(IntEnum):
    """The agreement of a reading with a claim, best first."""

    EXACTLY = 0
    CUT = 1
    APPROXIMATELY = 2

    @property
    def word(self) -> str:
        """The agreement in one word, as documents have it."""
        return "nearly" if self is Agreement.APPROXIMATELY else self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedEpsilon:
    """A claim as a range of ε: ``value`` with the unit of its last digit.

    ``noise_uncertainty`` is the relative uncertainty from rounded noise multipliers of the plan,
    and ``shortfall`` how far below ``value`` a reading may be, relatively, for another reason.
    """

    value: float
    unit: float
    noise_uncertainty: float
    shortfall: float = 0.0

    @classmethod
    def of(cls, claim: Claim, plan: Plan) -> ClaimedEpsilon:
        """Return the claimed range of ε of ``claim`` about ``plan``.

        Raises ``ValueError`` if σ is claimed and the plan has no ``target.epsilon``.
        """
        if claim.epsilon is not None:
            uncertainty = ELASTICITY * _noise_rounding(plan)
            return cls(
                value=float(claim.number), unit=float(claim.unit), noise_uncertainty=uncertainty
            )
        if plan.target.epsilon is None:
            raise ValueError("a claimed noise multiplier needs a target.epsilon")
        target = plan.target.epsilon
        relative = float(claim.unit / claim.number)
        return cls(
            value=target,
            unit=ELASTICITY * relative * target,
            noise_uncertainty=0.0,
            shortfall=CALIBRATION_TOLERANCE,
        )

    @property
    def precision(self) -> float:
        """The unit of the last digit over the value: 1e-4 for "7.980"."""
        return self.unit / self.value

    def agreement(self, reading: float, below: float = 0.0, above: float = 0.0) -> Agreement | None:
        """Return how ``reading``, whose program may be off by [-below, +above], agrees."""
        tolerance = DOUBLE_TOLERANCE * self.value
        excess = reading - self.value
        if abs(excess) <= self.unit / 2 + tolerance:
            return Agreement.EXACTLY
        if abs(excess) < self.unit + tolerance:
            return Agreement.CUT
        margin = self.unit / 2 + self.noise_uncertainty * reading + tolerance
        if -margin - above - self.shortfall * self.value <= excess <= margin + below:
            return Agreement.APPROXIMATELY
        return None

    def agreeing_range(self, above: float = 0.0) -> tuple[float, float]:
        """Return a range with all readings that may agree."""
        margin = self.unit + 2 * self.noise_uncertainty * self.value + above
        margin += DOUBLE_TOLERANCE * self.value
        return self.value * (1 - self.shortfall) - margin, self.value + margin


def _noise_rounding(plan: Plan) -> float:
    """Return half a unit in the last digit of the plan's most rounded noise, relatively."""
    result = 0.0
    for phase in plan.phases:
        for release in phase.releases:
            provided = release.noise_multiplier or release.noise_std
            if provided is None:
                continue
            number = Decimal(repr(provided)).normalize()
            if MIN_ROUNDED_DIGITS <= len(number.as_tuple().digits) <= MAX_ROUNDED_DIGITS:
                half = Decimal(5).scaleb(int(number.as_tuple().exponent) - 1)
                result = max(result, float(half / number))
    return result


_FRACTIONAL = np.array([1 + tenth / 10 for tenth in range(1, 100) if tenth % 10])
_WHOLE = np.array([*range(2, 64), 128, 256, 512, 1024], dtype=np.float64)
_ORDERS = np.concatenate([_FRACTIONAL, _WHOLE])
_IS_OPACUS_ORDER = (_ORDERS < 64) & (_ORDERS != 11)
_IS_WHOLE_ORDER = np.floor(_ORDERS) == _ORDERS
_NODES_PER_SIGMA = 4
_RANGE_IN_SIGMAS = 13.0
_MAX_NODES = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Renyi:
    """ε of one run at δ, in nats, by each list of orders and conversion.

    ``library`` is a range that contains dp_accounting's own value.
    """

    opacus: float
    classic: float
    library: tuple[float, float]


def renyi(parts: Parts, delta: float) -> Renyi | None:
    """Return the Rényi readings of ``parts``, or None if a part has no such bound."""
    total = np.zeros_like(_ORDERS)
    for part, times in parts:
        rate = _divergence(part)
        if rate is None:
            return None
        total += times * rate
    improved = total + np.log1p(-1 / _ORDERS)
    improved -= (math.log(delta) + np.log(_ORDERS)) / (_ORDERS - 1)
    classic = total - math.log(delta) / (_ORDERS - 1)
    return Renyi(
        opacus=_minimum(improved[_IS_OPACUS_ORDER]),
        classic=_minimum(classic[_IS_OPACUS_ORDER]),
        library=(_minimum(improved), _minimum(improved[_IS_WHOLE_ORDER])),
    )


def _minimum(values: Array) -> float:
    return max(0.0, float(values.min()))


@lru_cache(maxsize=20_000)
def _divergence(part: Part) -> Array | None:
    """Return the Rényi divergence of one release at every order; shape (orders,)."""
    if part.pair == "without_replacement" or not 0.05 <= part.noise_multiplier < 1e9:
        return None
    sigma, q = _as_add_remove(part).noise_multiplier, part.probability
    if q is None or q >= 1:
        result: Array = _ORDERS / (2 * sigma * sigma)
        return result
    moments = np.concatenate([_fractional_moments(q, sigma), _whole_moments(q, sigma)])
    divergence: Array = np.maximum(0.0, moments / (_ORDERS - 1))
    return divergence


def _fractional_moments(q: float, sigma: float) -> Array:
    """Return log E[((1-q) + q e^L)^α] under N(0, σ²), L = (2x - 1) / 2σ², by the trapezoid rule."""
    low, high = -_RANGE_IN_SIGMAS * sigma, _FRACTIONAL[-1] + _RANGE_IN_SIGMAS * sigma
    step = max(sigma / _NODES_PER_SIGMA, (high - low) / _MAX_NODES)
    nodes = np.arange(low, high, step)
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * nodes - 1) / (2 * sigma**2))
    exponents = np.outer(_FRACTIONAL, ratio)
    exponents -= nodes**2 / (2 * sigma**2)
    peak = exponents.max(axis=1)
    np.exp(exponents - peak[:, None], out=exponents)
    moments: Array = peak + np.log(
        exponents.sum(axis=1) * (step / (sigma * math.sqrt(2 * math.pi)))
    )
    return moments


_TERMS = np.arange(1025.0)
_LOG_BINOMIALS = [
    gammaln(order + 1)
    - gammaln(_TERMS[: int(order) + 1] + 1)
    - gammaln(order - _TERMS[: int(order) + 1] + 1)
    for order in _WHOLE
]
_SMALL = np.full((62, 64), -np.inf)
for _row, _each in enumerate(_LOG_BINOMIALS[:62]):
    _SMALL[_row, : len(_each)] = _each


def _whole_moments(q: float, sigma: float) -> Array:
    """Return log Σ binom(α, i) q^i (1-q)^(α-i) e^((i² - i) / 2σ²) at every whole order."""
    log_q, log_p = math.log(q), math.log1p(-q)
    steep = (_TERMS**2 - _TERMS) / (2 * sigma**2) + _TERMS * (log_q - log_p)
    small = logsumexp(_SMALL + steep[:64], axis=1)
    large = [
        float(logsumexp(binomials + steep[: len(binomials)])) for binomials in _LOG_BINOMIALS[62:]
    ]
    moments: Array = np.concatenate([small, large]) + _WHOLE * log_p
    return moments


def library_epsilon(parts: Parts, delta: float) -> float | None:
    """Return dp_accounting's own value, which is higher at fractional orders."""
    from affidavit.accountants import RdpAccountant  # slow to import, and seldom needed

    converted = tuple((_as_add_remove(part), times) for part, times in parts)
    with contextlib.suppress(AccountantError, ArithmeticError, ValueError):
        return RdpAccountant().curve(event_of(converted)).epsilon(delta).upper
    return None


def _as_add_remove(part: Part) -> Part:
    """Treat the replacement of a record as adding or removing one at twice the distance."""
    if part.pair != "replace_one":
        return part
    return replace(part, pair="add_remove", noise_multiplier=part.noise_multiplier / 2)


PLD_RELATIVE_ERROR, PLD_ERROR_NATS = 1e-3, 2e-4
PRV_ERROR_NATS = 0.01
"""How far above the tight value the programs may report."""
MANY_SAMPLINGS = 20.0
"""The expected samplings of a record above which the saddle point is accurate."""
SADDLE_POINT_ERROR, MAX_RARE_RATIO = 0.15, 5.0
"""The relative error of the saddle point for many samplings, and its largest ratio to the tight
value if the loss consists of a few rare jumps."""
COARSE_WIDTH = 0.02
FINEST_WIDTH, FINEST_RARE_WIDTH = 2e-5, 1e-4
"""The relative widths of a tight value; below the last one rare jumps take seconds."""
GAUSSIAN_NOISE = 300.0
"""The noise multiplier above which a sampled step is Gaussian to every printed digit."""
MIN_MU, MAX_MU = 1e-7, 1e6
"""The range of μ in which a Gaussian curve is evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One accountant's ε of an account; its program may report ``above`` more or ``below`` less.

    ε and its deviations are in nats; ``cost`` is how unusual the accountant is, in nats.
    """

    accountant: str
    epsilon: float
    cost: float
    below: float = 0.0
    above: float = 0.0


def readings(
    parts: Parts, delta: float, judgement: ClaimedEpsilon, effort: Effort
) -> Iterator[Reading]:
    """Yield every reading of ``parts`` that is worth comparing with the claim."""
    if not parts:
        return
    if all(part.probability is None for part, _ in parts):
        mu = math.sqrt(math.fsum(n / part.noise_multiplier**2 for part, n in parts))
        if MIN_MU <= mu <= MAX_MU:
            epsilon = GaussianCurve(mu=mu).epsilon(delta).upper
            yield Reading(accountant="gaussian", epsilon=epsilon, cost=0.0)
    result = renyi(parts, delta)
    if result is not None:
        rdp, whole_orders = result.library
        low, high = judgement.agreeing_range()
        if rdp < whole_orders and rdp <= high and low <= whole_orders:
            rdp = library_epsilon(parts, delta) or rdp
        yield Reading(accountant="rdp", epsilon=rdp, cost=0.2)
        yield Reading(accountant="rdp_opacus", epsilon=result.opacus, cost=0.6)
        yield Reading(accountant="rdp_classic", epsilon=result.classic, cost=2.0)
    if any(part.probability is not None for part, _ in parts):
        upper = math.inf if result is None else result.opacus
        yield from _tight_readings(parts, delta, judgement, upper, effort)
    yield from _textbook_readings(parts, delta)


def central_limit(parts: Parts, delta: float) -> Iterator[Reading]:
    """Yield the central-limit values of a sampled run, for Poisson and for uniform sampling."""
    for formula in (_poisson_mu_squared, _uniform_mu_squared):
        if all(part.noise_multiplier > 0.1 and part.pair == "add_remove" for part, _ in parts):
            mu = math.sqrt(math.fsum(times * formula(part) for part, times in parts))
            if MIN_MU <= mu <= MAX_MU:
                epsilon = GaussianCurve(mu=mu).epsilon(delta).upper
                yield Reading(accountant="gdp_clt", epsilon=epsilon, cost=0.0)


def _poisson_mu_squared(part: Part) -> float:
    """Return μ² of one step, by the variance of its loss."""
    if part.probability is None:
        return part.noise_multiplier**-2
    return part.probability**2 * math.expm1(part.noise_multiplier**-2)


def _uniform_mu_squared(part: Part) -> float:
    """Return μ² of one step under uniform sampling, as Opacus computes it."""
    if part.probability is None:
        return part.noise_multiplier**-2
    inverse = 1 / part.noise_multiplier
    growth = math.exp(inverse**2 + float(log_ndtr(1.5 * inverse)))
    return 2 * part.probability**2 * (growth + 3 * math.exp(float(log_ndtr(-inverse / 2))) - 2)


def _tight_readings(
    parts: Parts, delta: float, judgement: ClaimedEpsilon, upper: float, effort: Effort
) -> Iterator[Reading]:
    """Yield the tight value, which is computed only if it may be the claimed one.

    ``upper`` is a known upper bound of it.
    """
    low, high = judgement.agreeing_range(max(PLD_RELATIVE_ERROR * judgement.value, PRV_ERROR_NATS))
    if upper < low:
        return
    gaussian = _gaussian_limit(parts, delta)
    if gaussian is not None:
        bracket: Bracket | None = Bracket(lower=gaussian, upper=gaussian)
    else:
        estimate = _estimate(parts, delta)
        ratio = 1 + SADDLE_POINT_ERROR if _is_often_sampled(parts) else MAX_RARE_RATIO
        if (
            estimate is None
            or estimate < low * (1 - SADDLE_POINT_ERROR) - 0.02
            or estimate > high * ratio + 0.02
        ):
            return
        bracket = effort.bracket(parts, delta, low, high, judgement.precision)
    if bracket is None or bracket.upper < low or bracket.lower > high:
        return
    middle, half = (bracket.lower + bracket.upper) / 2, bracket.width / 2
    pld = half + max(PLD_RELATIVE_ERROR * middle, PLD_ERROR_NATS)
    prv = half + PRV_ERROR_NATS
    yield Reading(accountant="pld", epsilon=middle, cost=0.3, below=half, above=pld)
    yield Reading(accountant="prv", epsilon=middle, cost=1.2, below=half, above=prv)


@dataclass(kw_only=True, slots=True)
class Effort:
    """The number of tight values that a search may still compute, at 50 ms a kind of release.

    ``is_cut_short`` is True if the search needed more.
    """

    left: int
    is_cut_short: bool = False
    _computed: set[tuple[Parts, float]] = field(default_factory=set)

    def bracket(
        self, parts: Parts, delta: float, low: float, high: float, precision: float
    ) -> Bracket | None:
        """Return the tight value, or None if no effort is left.

        The bracket is coarse if it lies outside ``low`` to ``high``.
        """
        if (parts, delta) not in self._computed:
            if self.left <= 0:
                self.is_cut_short = True
                return None
            self.left -= len(parts)
            self._computed.add((parts, delta))
        result = _bracket(parts, delta, COARSE_WIDTH)
        if result is None or result.upper < low or result.lower > high:
            return result
        finest = FINEST_WIDTH if _is_often_sampled(parts) else FINEST_RARE_WIDTH
        return _bracket(parts, delta, min(0.01, max(finest, precision / 4)))


@lru_cache(maxsize=20_000)
def _estimate(parts: Parts, delta: float) -> float | None:
    with contextlib.suppress(AccountantError, ArithmeticError, ValueError):
        return approximate_epsilon(event_of(parts), delta)
    return None


def _is_often_sampled(parts: Parts) -> bool:
    """Whether a record is sampled so often that the saddle point is near the tight value."""
    return sum(times * (part.probability or 1.0) for part, times in parts) > MANY_SAMPLINGS


@lru_cache(maxsize=20_000)
def _bracket(parts: Parts, delta: float, width: float) -> Bracket | None:
    with contextlib.suppress(AccountantError, ArithmeticError, ValueError):
        return FourierAccountant(relative_width=width).curve(event_of(parts)).epsilon(delta)
    return None


def _gaussian_limit(parts: Parts, delta: float) -> float | None:
    """Return ε of very noisy steps by their first two moments, or None for other steps."""
    if any(
        part.noise_multiplier < GAUSSIAN_NOISE or part.pair != "add_remove" for part, _ in parts
    ):
        return None
    mu = math.sqrt(math.fsum(times * _poisson_mu_squared(part) for part, times in parts))
    return GaussianCurve(mu=mu).epsilon(delta).upper if MIN_MU <= mu <= MAX_MU else 0.0


def _textbook_readings(parts: Parts, delta: float) -> Iterator[Reading]:
    """Yield basic and advanced composition of the classical Gaussian mechanism, amplified."""
    if len(parts) != 1:
        return
    ((part, times),) = parts
    q = part.probability or 1.0
    sigma = part.noise_multiplier / (1.0 if part.pair == "add_remove" else 2.0)
    for name, share in (("basic", delta / times), ("advanced", delta / (2 * times))):
        one = math.sqrt(2 * math.log(1.25 * max(q / share, 1.0))) / sigma
        if one > 50:
            continue
        step = math.log1p(q * math.expm1(one))
        total = times * step
        if name == "advanced":
            total = step * math.sqrt(2 * times * math.log(2 / delta)) + total * math.expm1(step)
        yield Reading(accountant=name, epsilon=total, cost=3.0)
