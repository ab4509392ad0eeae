"""DP-SGD: clip each record's gradient, sum, add noise, and update from the noisy mean."""

from affidavit.mechanisms.protocol import JOINT, JOINT_PROOF, Mechanism

MECHANISM = Mechanism(
    name="dp_sgd",
    title="DP-SGD",
    releases="the sum of clipped per-record gradients plus Gaussian noise, flat or per block",
    sensitivity=JOINT,
    proof=JOINT_PROOF,
    post_processing=(
        "momentum and weight decay on the noisy mean",
        "learning-rate schedules of the step number or of released values",
    ),
    sources=("arXiv:1607.00133, Algorithm 1",),
)
