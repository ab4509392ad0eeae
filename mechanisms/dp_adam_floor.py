"""DP-Adam with a floor: clip, sum, add noise, and update above a public second moment."""

from affidavit.mechanisms.protocol import JOINT, JOINT_PROOF, Mechanism

MECHANISM = Mechanism(
    name="dp_adam_floor",
    title="DP-Adam with a floor",
    releases="the sum of clipped per-record gradients plus Gaussian noise, flat or per block",
    sensitivity=JOINT,
    proof=JOINT_PROOF,
    post_processing=(
        "both Adam moments computed from the noisy mean",
        "a public lower bound on the second moment",
    ),
    sources=("arXiv:2312.14334",),
)
