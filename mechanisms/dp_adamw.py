"""DP-AdamW: clip each record's gradient, sum, add noise, and update from the noisy mean."""

from affidavit.mechanisms.protocol import JOINT, JOINT_PROOF, Mechanism

MECHANISM = Mechanism(
    name="dp_adamw",
    title="DP-AdamW",
    releases="the sum of clipped per-record gradients plus Gaussian noise, flat or per block",
    sensitivity=JOINT,
    proof=JOINT_PROOF,
    post_processing=(
        "both Adam moments computed from the noisy mean",
        "decoupled weight decay of public strength",
    ),
    sources=("arXiv:1607.00133", "arXiv:1711.05101"),
)
