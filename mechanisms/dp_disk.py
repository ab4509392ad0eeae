"""DP-DiSK: DP-SGD on a simplified Kalman filter's gradient.

The gradients of each record at θ_t and at θ_t + γ d_(t-1) are combined as
c g(θ_t + γ d_(t-1)) + (1-c) g(θ_t), c = (1-κ)/(κγ). Both points are released values. The
combination is clipped to C, summed, and noised with σC, so one record moves the sum by at most C
for any c. The filter g̃_t = (1-κ) g̃_(t-1) + κ (release) reads releases only.

Two other forms are in use and are refused. Clipping the two gradients first and combining the sums
moves the release by up to (|c| + |1-c|) C. Dividing σ by √(c² + (1-c)²), as a public implementation
does, adds other noise than is accounted.

Reference: arXiv:2410.03883.
"""

from __future__ import annotations

import math

from affidavit.mechanisms.protocol import Mechanism, Obligation
from affidavit.plan import Plan, Reason

DEFAULT_KAPPA, DEFAULT_GAMMA = 0.7, 0.5
"""Published defaults of the gain and the look-ahead."""


def lookahead_weight(plan: Plan) -> float:
    """Return c = (1-κ)/(κγ), the weight of the gradient at the point ahead."""
    kappa, gamma = plan.optimizer.kappa or DEFAULT_KAPPA, plan.optimizer.gamma or DEFAULT_GAMMA
    return (1 - kappa) / (kappa * gamma)


def _check(plan: Plan) -> list[Reason]:
    optimizer, c = plan.optimizer, lookahead_weight(plan)
    result = []
    if optimizer.combine == "after_clipping":
        result.append(
            _unsound(
                "combine",
                "the two gradients are clipped before they are combined, so the sums move by up to "
                f"(|c| + |1-c|) C = {abs(c) + abs(1 - c):.4g} C with c = (1-κ)/(κγ) = {c:.4g}, "
                "not by C.",
                "Combine each record's two gradients before clipping: combine: before_clipping.",
            )
        )
    if optimizer.noise_divisor == "filter_norm":
        norm = math.hypot(c, 1 - c)
        result.append(
            _unsound(
                "noise_divisor",
                f"dividing the noise by √(c² + (1-c)²) = {norm:.4g} leaves {1 / norm:.4g} σ, but "
                "the sensitivity of a clipped combination is C for every filter.",
                "Add noise σC undivided: noise_divisor: one.",
            )
        )
    return result


def _unsound(field: str, message: str, remedy: str) -> Reason:
    return Reason(
        code="unsound_optimizer", pointer=f"/optimizer/{field}", message=message, remedy=remedy
    )


MECHANISM = Mechanism(
    name="dp_disk",
    title="DP-DiSK",
    releases="the sum of per-record combined gradients, clipped after combining, plus noise σC",
    sensitivity="C for one record, because its combination is clipped as a whole",
    proof="Triangle inequality for a clipped sum; both gradients are of the same record",
    post_processing=(
        "the Kalman filter of the noisy means",
        "the point ahead θ_t + γ d_(t-1), made of released values",
        "momentum or Adam on the filtered mean",
    ),
    obligations=(
        Obligation(
            code="combine_before_clipping",
            text="each record's two gradients are combined before the one clipping, and noise of "
            "the plan's multiplier times the clip norm is added undivided",
        ),
    ),
    sources=("Zhang, Bu, Balle, Hong, Razaviyayn and Mirrokni, arXiv:2410.03883",),
    check=_check,
)
