"""What optimisers with correlated noise share: one statement, one obligation, one example.

The release of step t is the clipped sum plus row t of N z, z with independent rows. As N
is lower triangular with strategy C = N⁻¹, later gradients may depend on earlier releases,
and the whole run is one Gaussian mechanism with μ = sens(C)/σ. The sensitivity that is
certified is always that of the N that the plan injects.

References: Denisov, McMahan, Rush, Smith and Thakurta, arXiv:2202.08312, Theorem 2.1
(adaptivity); Choquette-Choo, McMahan, Rush and Thakurta, arXiv:2211.06530 (participation).
"""

from collections.abc import Mapping
from typing import Any

from affidavit.mechanisms.protocol import Mechanism, Obligation
from affidavit.plan import Plan, Reason

RELEASE = "each step's clipped sum plus that step's row of the correlated noise N z"
BY_STRATEGY = (
    "sens(N⁻¹) C over the record's participations; blocks of one step are joint, as σ_joint"
)
STRATEGY_PROOF = (
    "arXiv:2202.08312, Theorem 2.1, and arXiv:2211.06530, section 2; computed from the N "
    "that is injected"
)
INJECTED = Obligation(
    code="inject_the_strategy",
    text="the noise of the run is exactly N z for the plan's noise matrix N, with one z of "
    "independent rows for the whole run",
)
FIXED_ORDER: Mapping[str, Any] = {
    "adjacency": "zero_out",
    "sampling": {"scheme": "cyclic", "lot_size": 100},
}
"""Lots in a fixed order, from which participation follows."""


def with_correlated_noise(**own: Any) -> Mechanism:
    """An optimiser whose noise is a strategy's, with what is its ``own``."""
    return Mechanism(
        releases=RELEASE,
        sensitivity=BY_STRATEGY,
        proof=STRATEGY_PROOF,
        obliges=(INJECTED,),
        **own,
    )


def check_objective(plan: Plan, *, convergence_aware: bool) -> list[Reason]:
    """Whether a dense strategy's objective is the one that the optimiser's name promises."""
    return [
        Reason(
            code="conflict",
            pointer=plan.pointer(index, "noise", "convergence_aware"),
            message=f"{plan.optimizer.name} is defined "
            f"{'with' if convergence_aware else 'without'} the convergence-aware weighting.",
            remedy="Give noise.convergence_aware with its tau."
            if convergence_aware
            else f"Remove convergence_aware, or name {plan.optimizer.name}_lambda.",
        )
        for index, phase in enumerate(plan.phases)
        if phase.noise.kind == "dense"
        and (phase.noise.convergence_aware is not None) != convergence_aware
    ]
