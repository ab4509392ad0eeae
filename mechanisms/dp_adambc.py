"""DP-AdamBC: clip each record's gradient, sum, add noise, and update from the noisy mean.

The noise adds Φ = (σC/B)² to each entry of the second moment in expectation; Φ is a public
constant, so that subtracting it costs nothing.
"""

from affidavit.mechanisms.protocol import JOINT, JOINT_PROOF, Mechanism

MECHANISM = Mechanism(
    name="dp_adambc",
    title="DP-AdamBC",
    releases="the sum of clipped per-record gradients plus Gaussian noise, flat or per block",
    sensitivity=JOINT,
    proof=JOINT_PROOF,
    post_processing=(
        "both Adam moments computed from the noisy mean",
        "subtraction of the public constant Φ = (σC/B)² from the second moment, and its floor",
    ),
    sources=("Tang, Shpilevskiy and Lécuyer, arXiv:2312.14334",),
)
