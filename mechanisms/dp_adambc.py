"""DP-AdamBC: clip each record's gradient, sum, add noise, and update from the noisy mean."""

from affidavit.mechanisms.mechanism import Mechanism

MECHANISM = Mechanism(
    name="dp_adambc",
    title="DP-AdamBC",
    releases="the sum of clipped per-record gradients plus Gaussian noise, flat or per block",
    sensitivity="C for flat clipping, C_g for block g; blocks of one step are joint",
    post_processing=(
        "both Adam moments computed from the noisy mean",
        "subtraction of the public constant Φ = (σC/B)² from the second moment, and its floor",
    ),
    sources=("Tang, Shpilevskiy and Lécuyer, arXiv:2312.14334",),
)
