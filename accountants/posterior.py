"""What an observer may come to believe about one record, from a privacy curve.

An observer holds a record to be in the data with probability π, knows all others, and sees
everything that is released. Let P be the law of the release with the record and Q without
(or the reverse; the curve is the larger of both).

* ``guess``: how often the best guess is right. A test with rates TPR and FPR is right with
  probability π TPR + (1 - π)(1 - FPR), and the best has (1 - π) + π h((1 - π)/π) for π <= 1/2,
  where h(γ) = sup_S P(S) - γ Q(S) = δ(log γ); for π > 1/2 the two are exchanged. It is an
  average over what may be released, and tight.
* ``belief``: what the observer may believe after one release, except with probability τ.
  By Bayes the odds of π are multiplied by e^L, with L = log P/Q, so that a belief above
  π e^t / (1 - π + π e^t) needs L > t. Since δ(ε) = E_P (1 - e^(ε - L))_+ is at least
  P(L > t) (1 - e^(ε - t)) for every ε < t, it is enough that δ(ε) <= c τ with
  t = ε - log(1 - c), for any 0 < c < 1. Q(L > t) is smaller still. An (ε, δ) guarantee alone
  bounds P(L > ε) by nothing below 1.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> round(guess(GaussianCurve(mu=1.0), 0.5).upper, 4)
0.6915
>>> t = odds_exponent(GaussianCurve(mu=1.0), 1e-5)
>>> round(t, 2), round(belief(0.5, t), 4)
(4.96, 0.993)

References: Kasiviswanathan and Smith, arXiv:0803.3946 (Bayesian reading of privacy, and the
tail of the loss); Humphries et al., arXiv:2010.12112 (membership inference at a prior).
"""

from __future__ import annotations

import math

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.protocol import AccountantError, PrivacyCurve

SHARES = (0.05, 0.2, 0.5)
"""The c that are tried; each gives a bound and the least is returned."""
ROUNDING = 1e-14


def guess(curve: PrivacyCurve, prior: float) -> Bracket:
    """The probability that the best guess about the record is right, at ``prior`` in (0, 1).

    Raises ``ValueError`` for another prior.
    """
    _require_prior(prior)
    rarer, commoner = min(prior, 1 - prior), max(prior, 1 - prior)
    # h moves by at most the rounding of γ, and 1 - π by that of the subtraction.
    known = curve.delta(math.log(commoner / rarer))
    return Bracket(
        lower=max(commoner, commoner + rarer * known.lower - ROUNDING),
        upper=min(1.0, commoner + rarer * known.upper + ROUNDING),
    )


def belief(prior: float, exponent: float) -> float:
    """The belief that odds of ``prior`` times e^``exponent`` (nats) are, rounded up.

    A probability, of a prior in (0, 1); raises ``ValueError`` for another.
    """
    _require_prior(prior)
    odds = prior / (1 - prior) * math.exp(min(700.0, exponent))
    return min(1.0, odds / (1 + odds) * (1 + 1e-12))


def odds_exponent(curve: PrivacyCurve, probability: float) -> float:
    """t (nats) such that the odds rise by more than e^t with ``probability`` at most.

    Infinite where the accountant bounds nothing.

    Raises ``ValueError`` unless the probability lies strictly between 0 and 1.
    """
    if not 0 < probability < 1:
        raise ValueError(f"a probability lies strictly between 0 and 1, got {probability!r}")
    best = math.inf
    for share in SHARES:
        try:
            epsilon = curve.epsilon(share * probability * (1 - ROUNDING)).upper
        except AccountantError:
            continue
        best = min(best, (epsilon - math.log1p(-share)) * (1 + ROUNDING))
    return best


def _require_prior(prior: float) -> None:
    if not 0 < prior < 1:
        raise ValueError(f"a prior lies strictly between 0 and 1, got {prior!r}")
