"""The least Gaussian curve that bounds a plan's guarantee at every ε, for its certificate.

A run that is exactly one Gaussian mechanism is its own bound. Any other is sampled by the engine
that decides it, and bounded between and beyond the samples
(``affidavit.accountants.least_gaussian``). A remainder above ``MAX_REMAINDER`` and a guarantee that
holds with a confidence give no bound: what a policy compares holds at every ε.
"""

from __future__ import annotations

from dataclasses import replace

from affidavit.accountants import (
    AccountantError,
    Adjustable,
    GaussianBound,
    accountant,
    gaussian_bound,
    sample_trade_off,
)
from affidavit.assessment.assessment import Assessment
from affidavit.assessment.calibration import Solver, lower_open
from affidavit.assessment.privacy_curves import PROFILE_WIDTH, SAMPLED
from affidavit.assessment.step_requirements import PlanNotClosed, closed_plan
from affidavit.plan import Reason, RefusedPlan

MAX_REMAINDER = 1e-11
"""The largest probability that is added to the Gaussian δ at every ε."""
_UNBOUNDED = Reason(
    code="no_gaussian_bound",
    message=f"no Gaussian curve is proved to bound δ at every ε but for {MAX_REMAINDER:g}.",
    remedy="Compare ε at the δ that matters.",
)


def with_gaussian_bound(assessment: Assessment) -> Assessment:
    """Add the least Gaussian curve that bounds the guarantee, or the reason why there is none.

    Without a guarantee nothing is added.

    Guarantees
        * δ(ε) of the run is at most δ_μ(ε) plus the remainder, at every ε >= 0.
    """
    if assessment.verdict not in ("certified", "under_noised", "unproved"):
        return assessment
    if assessment.mu is not None:
        return replace(
            assessment, gaussian=GaussianBound(mu=assessment.mu, remainder=0.0, regret=0.0)
        )
    try:
        return replace(assessment, gaussian=_least_bound(assessment))
    except RefusedPlan as refusal:
        problem = refusal.reasons[0]
    except AccountantError as refusal:
        problem = Reason(code=refusal.code, message=refusal.message, remedy=refusal.remedy)
    except PlanNotClosed:
        problem = next(iter(assessment.reasons), _UNBOUNDED)
    return replace(assessment, gaussian_problem=problem)


def _least_bound(assessment: Assessment) -> GaussianBound:
    """Sample and bound the curve of the engine that decides; raises what refuses it."""
    if assessment.confidence is not None:
        raise RefusedPlan(SAMPLED)
    engine = accountant(assessment.accountants[0].name)
    lowered = lower_open(closed_plan(assessment))
    curve = Solver(lowered=lowered, engine=engine).bracketing_curve(lowered)
    dense = curve.with_width(PROFILE_WIDTH) if isinstance(curve, Adjustable) else curve
    bound = gaussian_bound(sample_trade_off(dense), dense)
    if bound is None or bound.remainder > MAX_REMAINDER:
        raise RefusedPlan(_UNBOUNDED)
    return bound
