"""Readings: the accountants that people use, asked about an account.

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
Gopi, Lee and Wutschitz, arXiv:2106.02848 (PRV).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from scipy.special import log_ndtr

from affidavit.accountants import (
    AccountantError,
    Bracket,
    FourierAccountant,
    GaussianCurve,
    approximate_epsilon,
)
from affidavit.certificate.diagnosis.account import Part, Parts, event_of
from affidavit.certificate.diagnosis.agreement import ClaimedEpsilon
from affidavit.certificate.diagnosis.renyi import library_epsilon, renyi

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
    """How many tight values a search may still compute; each takes 50 ms a kind of release."""

    left: int

    def bracket(
        self, parts: Parts, delta: float, least: float, most: float, precision: float
    ) -> Bracket | None:
        """The tight value, coarsely where that rules out ``least`` to ``most``; None if spent."""
        if self.left <= 0:
            return None
        self.left -= len(parts)
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
