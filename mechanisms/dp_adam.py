"""DP-Adam: clip each record's gradient, sum, add noise, and update from the noisy mean."""

from affidavit.mechanisms.protocol import JOINT, JOINT_PROOF, Mechanism

MECHANISM = Mechanism(
    name="dp_adam",
    title="DP-Adam",
    releases="the sum of clipped per-record gradients plus Gaussian noise, flat or per block",
    sensitivity=JOINT,
    proof=JOINT_PROOF,
    post_processing=(
        "both Adam moments, their bias correction and the update, all computed from the noisy mean",
    ),
    sources=("arXiv:1607.00133", "arXiv:1412.6980"),
)
