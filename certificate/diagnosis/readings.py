"""Readings: the answers of accountants that people use to an account.

Each reading is one number and how far its usual program may be from it. They are quick,
because hundreds are asked for a diagnosis, and **none is a bound**: what is certified comes
from ``affidavit.certificate.certification`` alone.

=============  =======================================================================
reading        what people run
=============  =======================================================================
``gaussian``   the exact curve of one Gaussian mechanism, where nothing is sampled
``rdp``        Rényi orders of dp_accounting, improved conversion
``rdp_opacus`` Rényi orders of Opacus, improved conversion
``rdp_classic`` Rényi orders, the conversion of the moments accountant
``pld``        the tight value, as dp_accounting's distributions give it
``prv``        the tight value, as Opacus' and Microsoft's PRV accountant report it
``gdp_clt``    the central-limit approximation; a mistake in itself
``basic``      classical Gaussian mechanism, amplified, ε summed
``advanced``   the same under advanced composition
=============  =======================================================================

References: Dwork and Roth, "The Algorithmic Foundations of Differential Privacy" (2014),
Theorems 3.16, 3.20 and A.1; Bu, Dong, Long and Su, arXiv:1911.11607 (central limit);
Gopi, Lee and Wutschitz, arXiv:2106.02848 (PRV); Mironov, arXiv:1702.07476; Mironov, Talwar and
Zhang, arXiv:1908.10530; Canonne, Kamath and Steinke, arXiv:2004.00010, Proposition 12 (Rényi).

Of Rényi accounting two programs are imitated to their last printed digit: Opacus (orders 1.1 to
10.9 and 12 to 63) and dp_accounting (the same with 11, 128, 256, 512 and 1024). Both convert to
(ε, δ) by the improved bound; the classic conversion of the moments accountant is kept as a reading
of its own. The moments are summed in closed form at whole orders and by the trapezoid rule, which
converges geometrically for them, at fractional ones.

dp_accounting adds the absolute values of an alternating series at fractional orders and
so comes out higher there, by up to some per cent; the library itself computes only where the
difference could decide (``library_epsilon``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
from affidavit.certificate.diagnosis.account import Part, Parts, event_of
from affidavit.certificate.diagnosis.agreement import ClaimedEpsilon

Array = npt.NDArray[np.float64]

_FRACTIONAL = np.array([1 + tenth / 10 for tenth in range(1, 100) if tenth % 10])
_WHOLE = np.array([*range(2, 64), 128, 256, 512, 1024], dtype=np.float64)
_ORDERS = np.concatenate([_FRACTIONAL, _WHOLE])
_OPACUS = (_ORDERS < 64) & (_ORDERS != 11)
_WHOLE_ONLY = np.floor(_ORDERS) == _ORDERS
_NODES_A_SIGMA = 4
_REACH = 13.0
_MAX_NODES = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Renyi:
    """ε of one run at δ, in nats, by each list of orders and conversion.

    ``library`` is the range in which dp_accounting's own value lies.
    """

    opacus: float
    classic: float
    library: tuple[float, float]


def renyi(parts: Parts, delta: float) -> Renyi | None:
    """The readings of ``parts``; None where one of them has no such bound."""
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
        opacus=_least(improved[_OPACUS]),
        classic=_least(classic[_OPACUS]),
        library=(_least(improved), _least(improved[_WHOLE_ONLY])),
    )


def _least(values: Array) -> float:
    return max(0.0, float(values.min()))


@lru_cache(maxsize=20_000)
def _divergence(part: Part) -> Array | None:
    """Rényi divergence of one release at every order."""
    if part.pair == "without_replacement" or not 0.05 <= part.noise_multiplier < 1e9:
        return None
    sigma, q = _as_read(part).noise_multiplier, part.probability
    if q is None or q >= 1:
        result: Array = _ORDERS / (2 * sigma * sigma)
        return result
    moments = np.concatenate([_fractional_moments(q, sigma), _whole_moments(q, sigma)])
    divergence: Array = np.maximum(0.0, moments / (_ORDERS - 1))
    return divergence


def _fractional_moments(q: float, sigma: float) -> Array:
    """log E[((1-q) + q e^L)^α] under N(0, σ²), L = (2x - 1) / 2σ², by the trapezoid rule."""
    low, high = -_REACH * sigma, _FRACTIONAL[-1] + _REACH * sigma
    step = max(sigma / _NODES_A_SIGMA, (high - low) / _MAX_NODES)
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
    """log Σ binom(α, i) q^i (1-q)^(α-i) e^((i² - i) / 2σ²) at every whole order."""
    log_q, log_p = math.log(q), math.log1p(-q)
    steep = (_TERMS**2 - _TERMS) / (2 * sigma**2) + _TERMS * (log_q - log_p)
    small = logsumexp(_SMALL + steep[:64], axis=1)
    large = [
        float(logsumexp(binomials + steep[: len(binomials)])) for binomials in _LOG_BINOMIALS[62:]
    ]
    moments: Array = np.concatenate([small, large]) + _WHOLE * log_p
    return moments


def library_epsilon(parts: Parts, delta: float) -> float | None:
    """What dp_accounting answers, whose fractional orders are higher than they need be."""
    from affidavit.accountants import RdpAccountant  # slow to load, and seldom needed

    read = tuple((_as_read(part), times) for part, times in parts)
    with contextlib.suppress(AccountantError, ArithmeticError, ValueError):
        return RdpAccountant().curve(event_of(read)).epsilon(delta).upper
    return None


def _as_read(part: Part) -> Part:
    """Replacing a record under Poisson sampling as adding or removing one at twice the distance."""
    if part.pair != "replace_one":
        return part
    return replace(part, pair="add_remove", noise_multiplier=part.noise_multiplier / 2)


PLD_ERROR, PLD_GRID = 1e-3, 2e-4
PRV_ERROR = 0.01
"""How far above the tight value their programs may report: relatively, or in nats."""
ROUGH, MANY, ROUGH_IF_FEW = 0.15, 20.0, 5.0
"""How far the saddle point may be from the tight value, relatively, for a record that is sampled
at least ``MANY`` times, and how many times too large it may be where loss is a few rare jumps."""
COARSEST_WIDTH = 0.02
FINEST_WIDTH, FINEST_WIDTH_IF_FEW = 2e-5, 1e-4
"""Relative width of a tight value; below the second, rare jumps take seconds."""
QUIET_NOISE = 300.0
"""Above this noise multiplier a sampled step is Gaussian to every digit printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One accountant's ε of an account; its program says up to ``above`` more, ``below`` less.

    All four numbers are in nats; ``cost`` is how unusual the accountant is.
    """

    accountant: str
    epsilon: float
    cost: float
    below: float = 0.0
    above: float = 0.0


def readings(
    parts: Parts, delta: float, judgement: ClaimedEpsilon, effort: Effort
) -> Iterator[Reading]:
    """Every reading of ``parts`` that is worth comparing with the claim."""
    if not parts:
        return
    if all(part.probability is None for part, _ in parts):
        mu = math.sqrt(math.fsum(n / part.noise_multiplier**2 for part, n in parts))
        if 1e-7 <= mu <= 1e6:
            yield Reading(
                accountant="gaussian", epsilon=GaussianCurve(mu=mu).epsilon(delta).upper, cost=0.0
            )
    result = renyi(parts, delta)
    if result is not None:
        low, high = result.library
        least, most = judgement.furthest()
        if (
            low < high
            and low <= most
            and least <= high
            and (exact := library_epsilon(parts, delta))
        ):
            low = exact
        yield Reading(accountant="rdp", epsilon=low, cost=0.2)
        yield Reading(accountant="rdp_opacus", epsilon=result.opacus, cost=0.6)
        yield Reading(accountant="rdp_classic", epsilon=result.classic, cost=2.0)
    if any(part.probability is not None for part, _ in parts):
        roof = math.inf if result is None else result.opacus
        yield from _tight(parts, delta, judgement, roof, effort)
    yield from _textbook(parts, delta)


def central_limit(parts: Parts, delta: float) -> Iterator[Reading]:
    """The central-limit values of a sampled run, for Poisson and for uniform sampling."""
    for formula in (_poisson_mu, _uniform_mu):
        if all(part.noise_multiplier > 0.1 and part.pair == "add_remove" for part, _ in parts):
            mu = math.sqrt(math.fsum(times * formula(part) for part, times in parts))
            if 1e-7 <= mu <= 1e6:
                epsilon = GaussianCurve(mu=mu).epsilon(delta).upper
                yield Reading(accountant="gdp_clt", epsilon=epsilon, cost=0.0)


def _poisson_mu(part: Part) -> float:
    """μ² of one step, by the variance of its loss."""
    if part.probability is None:
        return part.noise_multiplier**-2
    return part.probability**2 * math.expm1(part.noise_multiplier**-2)


def _uniform_mu(part: Part) -> float:
    """μ² of one step under uniform sampling, as Opacus computes it."""
    if part.probability is None:
        return part.noise_multiplier**-2
    inverse = 1 / part.noise_multiplier
    growth = math.exp(inverse**2 + float(log_ndtr(1.5 * inverse)))
    return 2 * part.probability**2 * (growth + 3 * math.exp(float(log_ndtr(-inverse / 2))) - 2)


def _tight(
    parts: Parts, delta: float, judgement: ClaimedEpsilon, roof: float, effort: Effort
) -> Iterator[Reading]:
    """The tight value, computed only where it may be the one that was claimed."""
    least, most = judgement.furthest(max(PLD_ERROR * judgement.value, PRV_ERROR))
    if roof < least:
        return
    quiet = _quiet(parts, delta)
    if quiet is not None:
        bracket: Bracket | None = Bracket(lower=quiet, upper=quiet)
    else:
        rough = _rough(parts, delta)
        over = 1 + ROUGH if _many(parts) else ROUGH_IF_FEW
        if rough is None or rough < least * (1 - ROUGH) - 0.02 or rough > most * over + 0.02:
            return
        bracket = effort.bracket(parts, delta, least, most, judgement.precision)
    if bracket is None or bracket.upper < least or bracket.lower > most:
        return
    middle, half = (bracket.lower + bracket.upper) / 2, bracket.width / 2
    yield Reading(
        accountant="pld",
        epsilon=middle,
        cost=0.3,
        below=half,
        above=half + max(PLD_ERROR * middle, PLD_GRID),
    )
    yield Reading(accountant="prv", epsilon=middle, cost=1.2, below=half, above=half + PRV_ERROR)


@dataclass(kw_only=True, slots=True)
class Effort:
    """How many tight values a search may still compute; each takes 50 ms a kind of release.

    ``is_cut_short`` once it asked for more.
    """

    left: int
    is_cut_short: bool = False
    _computed: set[tuple[Parts, float]] = field(default_factory=set)

    def bracket(
        self, parts: Parts, delta: float, least: float, most: float, precision: float
    ) -> Bracket | None:
        """The tight value, coarsely where that rules out ``least`` to ``most``; None if spent."""
        if (parts, delta) not in self._computed:
            if self.left <= 0:
                self.is_cut_short = True
                return None
            self.left -= len(parts)
            self._computed.add((parts, delta))
        result = _bracket(parts, delta, COARSEST_WIDTH)
        if result is None or result.upper < least or result.lower > most:
            return result
        finest = FINEST_WIDTH if _many(parts) else FINEST_WIDTH_IF_FEW
        return _bracket(parts, delta, min(0.01, max(finest, precision / 4)))


@lru_cache(maxsize=20_000)
def _rough(parts: Parts, delta: float) -> float | None:
    with contextlib.suppress(AccountantError, ArithmeticError, ValueError):
        return approximate_epsilon(event_of(parts), delta)
    return None


def _many(parts: Parts) -> bool:
    """Whether a record is sampled so often that the saddle point is near the tight value."""
    return sum(times * (part.probability or 1.0) for part, times in parts) > MANY


@lru_cache(maxsize=20_000)
def _bracket(parts: Parts, delta: float, width: float) -> Bracket | None:
    with contextlib.suppress(AccountantError, ArithmeticError, ValueError):
        return FourierAccountant(relative_width=width).curve(event_of(parts)).epsilon(delta)
    return None


def _quiet(parts: Parts, delta: float) -> float | None:
    """The value of very noisy steps, by their first two moments."""
    if any(part.noise_multiplier < QUIET_NOISE or part.pair != "add_remove" for part, _ in parts):
        return None
    mu = math.sqrt(math.fsum(times * _poisson_mu(part) for part, times in parts))
    return GaussianCurve(mu=mu).epsilon(delta).upper if 1e-7 <= mu <= 1e6 else 0.0


def _textbook(parts: Parts, delta: float) -> Iterator[Reading]:
    """Basic and advanced composition of the classical Gaussian mechanism, amplified."""
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
