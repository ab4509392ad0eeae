"""DP-CorrSGD: the anti-correlated noise of DP-CorrMom on plain SGD.

The parameters are then the prefix sums of the releases, for which this noise is made; the
guarantee is DP-CorrMom's.
"""

from affidavit.mechanisms.correlated import FIXED_ORDER, with_correlated_noise

MECHANISM = with_correlated_noise(
    name="dp_corrsgd",
    title="DP-CorrSGD",
    post_processing=("the update from the noisy means", "weight decay"),
    noise=frozenset({"bidiagonal"}),
    sources=("Wang, An Optimization View of DP LLM Fine-tuning, Theorems 7 to 9",),
    example={**FIXED_ORDER, "noise": {"kind": "bidiagonal", "lambda": 0.9}},
)
