"""DP-Matrix, single-epoch, with the convergence-aware weighting in its objective.

The weighting Λ_τ enters the objective that the strategy is chosen by. The noise that is
injected stays C⁻¹ z: an implementation that weights the noise as well adds up to about √τ
too little of it.
"""

from affidavit.mechanisms.correlated import FIXED_ORDER, check_objective, with_correlated_noise
from affidavit.mechanisms.protocol import CORRELATED

MECHANISM = with_correlated_noise(
    name="dp_matrix_se_lambda",
    title="DP-Matrix, single-epoch, convergence-aware",
    post_processing=("the update from the noisy means, with momentum", "the choice of strategy"),
    noise=CORRELATED,
    sources=(
        "arXiv:2202.08312 (fixed point)",
        "arXiv:2302.01463 (Λ_τ)",
    ),
    example={
        **FIXED_ORDER,
        "steps": 20,
        "noise": {"kind": "dense", "convergence_aware": {"tau": 10}},
    },
    check=lambda plan: check_objective(plan, convergence_aware=True),
)
