"""DP-CorrMom: anti-correlated noise on Adam's first-moment path.

The noise of step t is w_t = z_t - λ z_(t-1) with z_0 = 0, so that prefix sums of the
releases carry less of it. What one record can show is set by the *inverse* of that filter:
the run is one Gaussian mechanism whose sensitivity is that of the strategy C = L⁻¹ under
the record's participations (κ = √((1-λ^(2T))/(1-λ²)) for one), never √(1+λ²). Steps are
not amplified by sampling.
"""

from affidavit.mechanisms.correlated import FIXED_ORDER, with_correlated_noise

MECHANISM = with_correlated_noise(
    name="dp_corrmom",
    title="DP-CorrMom",
    post_processing=(
        "momentum or Adam moments of the noisy means",
        "learning rates that depend on released values",
    ),
    noise=frozenset({"bidiagonal"}),
    sources=("Wang, An Optimization View of DP LLM Fine-tuning, Theorems 7 to 9",),
    example={**FIXED_ORDER, "noise": {"kind": "bidiagonal", "lambda": 0.9}},
)
