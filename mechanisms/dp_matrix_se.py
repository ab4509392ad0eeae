"""DP-Matrix, single-epoch: a strategy optimal for records that take part once.

A strategy is certified by its own sensitivity under the participations that the plan
really has, whatever it was optimised for.
"""

from affidavit.mechanisms.correlated import FIXED_ORDER, check_objective, with_correlated_noise
from affidavit.mechanisms.protocol import CORRELATED

MECHANISM = with_correlated_noise(
    name="dp_matrix_se",
    title="DP-Matrix, single-epoch",
    post_processing=("the update from the noisy means, with momentum", "the choice of strategy"),
    noise=CORRELATED,
    sources=("arXiv:2202.08312 (fixed point)",),
    example={**FIXED_ORDER, "steps": 20, "noise": {"kind": "dense"}},
    check=lambda plan: check_objective(plan, convergence_aware=False),
)
