"""Curves: all that a plan's guarantee says, beside one ε at one δ, as one document.

Everything is converted from the privacy curve of the engine that decides the certificate,
for the plan with nothing open. Ends are proved and rounded outward; what a method does not
bound is null. The Gaussian-DP μ and the zCDP ρ stand only where the run is exactly one
Gaussian mechanism; a central-limit μ is not a bound and stands nowhere.

``CurveDocument.digest`` is the sha256 of the document's RFC 8785 canonical JSON, so that a
stored curve can be told from another.

Units: ε, Rényi divergence and ``odds_exponent`` in nats; δ, rates and priors are probabilities.

References: Dong, Roth and Su, arXiv:1905.02383 (μ, trade-off); those of each conversion stand
in its module of ``affidavit.accountants``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from affidavit.accountants import (
    AccountantError,
    Adjustable,
    Bracket,
    Sampling,
    TradeOff,
    accountant,
    belief,
    guess,
    odds_exponent,
    sample,
)
from affidavit.certificate.assessment import Assessment, interval
from affidavit.certificate.certification import certify
from affidavit.certificate.solving import Solver, lower_open
from affidavit.plan import Event, Plan, Reason, digest_of

DELTAS = tuple(10.0**-exponent for exponent in range(3, 13))
EPSILONS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 16.0)
ALPHAS = (1e-4, 1e-3, 0.01, 0.05, *(index / 20 for index in range(2, 20)), 0.99, 0.999)
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
PRIORS = (0.001, 0.01, 0.1, 0.5)
WHOLE_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 63, 128, 256)
PROFILE_WIDTH = 5e-4
"""Relative width of δ in the dense profile: little in an error of type II, and much time."""

Progress = Callable[[str, int], None]
"""Told what is computed and how many points of it there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """The curves of one plan, closed, by the engine that decides about it.

    ``epsilon_of`` has pairs of δ and ε, ``delta_of`` of ε and δ, ``renyi`` of an order and a
    divergence, ``guesses`` of a prior and the probability of a right guess.
    """

    assessment: Assessment
    engine: dict[str, str]
    delta: float
    """At which the target is drawn, and with which probability a belief may be passed."""
    epsilon_of: tuple[tuple[float, Bracket], ...]
    delta_of: tuple[tuple[float, Bracket], ...]
    trade_off: TradeOff
    renyi: tuple[tuple[float, float], ...]
    guesses: tuple[tuple[float, Bracket], ...]
    odds_exponent: float
    """The odds of a belief rise by more than e to this with probability ``delta`` at most."""

    @property
    def mu(self) -> float | None:
        """The Gaussian-DP parameter, where the run is exactly one Gaussian mechanism."""
        return self.assessment.mu

    @property
    def rho(self) -> float | None:
        """The zCDP parameter μ²/2, where the run is exactly one Gaussian mechanism."""
        return None if self.mu is None else _rho(self.mu)

    def as_document(self) -> dict[str, Any]:
        """The document, with its digest."""
        found = self._content()
        return {**found, "digest": digest_of(found)}

    @property
    def digest(self) -> str:
        """sha256 of the document."""
        return digest_of(self._content())

    def _content(self) -> dict[str, Any]:
        asked = self.assessment
        return {
            "plan_digest": asked.plan_digest,
            "verdict": asked.verdict,
            "accountant": self.engine,
            "adjacency": asked.adjacency,
            "unit": asked.unit,
            "target": {"epsilon": asked.target_epsilon, "delta": asked.target_delta},
            "epsilon_at_delta": [
                {"delta": delta, "epsilon": interval(found)} for delta, found in self.epsilon_of
            ],
            "delta_at_epsilon": [
                {"epsilon": epsilon, "delta": interval(found)} for epsilon, found in self.delta_of
            ],
            "mu": self.mu,
            "rho": self.rho,
            "renyi": {
                "exact": self.mu is not None,
                "divergence_at_order": [
                    {"order": order, "upper": upper} for order, upper in self.renyi
                ],
            },
            "trade_off": [
                {"type_one": alpha, "type_two": interval(self.trade_off.type_two(alpha))}
                for alpha in ALPHAS
            ],
            "advantage": interval(self.trade_off.advantage),
            "true_positive_rate": [
                {
                    "false_positive_rate": rate,
                    "true_positive_rate": interval(self.trade_off.true_positive_rate(rate)),
                }
                for rate in FALSE_POSITIVE_RATES
            ],
            "posterior": [
                {
                    "prior": prior,
                    "right_guess": interval(right),
                    "belief": {
                        "upper": belief(prior, self.odds_exponent),
                        "except_with_probability": self.delta,
                    },
                }
                for prior, right in self.guesses
            ],
            "profile": [
                {"epsilon": epsilon, "delta": interval(found)}
                for epsilon, found in zip(
                    self.trade_off.epsilons, self.trade_off.deltas, strict=True
                )
            ],
        }


def curves(
    plan: Plan, *, engine: str | None = None, progress: Progress = lambda _what, _points: None
) -> Curves | Assessment:
    """The curves of ``plan``, or its assessment where nothing may be claimed about it."""
    progress("certificate", 0)
    assessment = certify(plan, engine=engine, second_opinion=False)
    if assessment.verdict in ("refused", "undecided") or assessment.delta is None:
        return assessment
    chosen = accountant(assessment.accountants[0].name)
    if isinstance(chosen, Sampling):
        return replace(assessment, verdict="refused", reasons=(_SAMPLED,))
    solver = Solver(lowered=lower_open(plan), engine=chosen)
    event = solver.closed().event()
    curve = solver.curve(event)
    delta = assessment.delta.upper
    epsilon_of = _ask(curve.epsilon, {*DELTAS, delta})
    delta_of = _ask(curve.delta, _epsilons(assessment))
    dense = curve.with_width(PROFILE_WIDTH) if isinstance(curve, Adjustable) else curve
    trade_off = sample(dense, progress=lambda points: progress("profile", points))
    return Curves(
        assessment=assessment,
        engine={"name": chosen.name, "version": chosen.version},
        delta=delta,
        epsilon_of=tuple(reversed(epsilon_of)),
        delta_of=delta_of,
        trade_off=trade_off.refined(dict(delta_of)),
        renyi=_renyi(event, assessment.mu),
        guesses=_ask(lambda prior: guess(curve, prior), PRIORS),
        odds_exponent=odds_exponent(curve, delta),
    )


_SAMPLED = Reason(
    code="unsupported",
    pointer="",
    message="the guarantee of this plan is a sampled bound at one δ; each point of a whole curve "
    "would take seconds and hold with a confidence of its own.",
    remedy="Ask `certify` for ε at the δ that matters.",
)


def _epsilons(assessment: Assessment) -> set[float]:
    target = assessment.target_epsilon
    return set(EPSILONS) if target is None else {*EPSILONS, target}


def _ask(
    question: Callable[[float], Bracket], values: Iterable[float]
) -> tuple[tuple[float, Bracket], ...]:
    """What the engine answers at each of ``values`` in order; what it refuses is unknown."""
    found = []
    for value in sorted(values):
        try:
            found.append((value, question(value)))
        except AccountantError:
            continue
    return tuple(found)


def _renyi(event: Event, mu: float | None) -> tuple[tuple[float, float], ...]:
    """Rényi divergences at whole orders: α μ²/2 of a Gaussian, bounds of others; or none."""
    if mu is not None:
        return tuple((order, order * _rho(mu)) for order in WHOLE_ORDERS)
    # Its library takes a second to import, which who draws no curve need not wait for.
    from affidavit.accountants import RdpAccountant

    try:
        found = dict(RdpAccountant().curve(event).divergences())
    except AccountantError:
        return ()
    return tuple((order, found[order]) for order in WHOLE_ORDERS if order in found)


def _rho(mu: float) -> float:
    """μ²/2, rounded up."""
    return mu * mu / 2 * (1 + 1e-15)
