"""DP-SGD with a low-pass filter: the noisy means are smoothed before the update.

The filter is causal and linear with public coefficients, so that it acts on released
values alone.
"""

from affidavit.mechanisms.protocol import JOINT, JOINT_PROOF, Mechanism

MECHANISM = Mechanism(
    name="dp_sgd_lowpass",
    title="DP-SGD with a low-pass filter",
    releases="the sum of clipped per-record gradients plus Gaussian noise, flat or per block",
    sensitivity=JOINT,
    proof=JOINT_PROOF,
    post_processing=(
        "a causal low-pass filter of public decay on the noisy mean",
        "momentum and weight decay",
    ),
    sources=(
        "arXiv:1607.00133, Algorithm 1",
        "Zhang, Bu, Hong and Razaviyayn, DOPPLER, NeurIPS 2024",
    ),
)
