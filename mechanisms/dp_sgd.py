"""DP-SGD: clip each record's gradient, sum, add noise, and update from the noisy mean."""

from affidavit.mechanisms.mechanism import Mechanism

MECHANISM = Mechanism(
    name="dp_sgd",
    title="DP-SGD",
    releases="the sum of clipped per-record gradients plus Gaussian noise, flat or per block",
    sensitivity="C for flat clipping, C_g for block g; blocks of one step are joint",
    post_processing=(
        "momentum and weight decay on the noisy mean",
        "learning-rate schedules of the step number",
    ),
    sources=("arXiv:1607.00133, Algorithm 1",),
)
