"""DP-Adam with a low-pass filter on the first moment, which is already private."""

from affidavit.mechanisms.protocol import JOINT, JOINT_PROOF, Mechanism

MECHANISM = Mechanism(
    name="dp_adam_lowpass",
    title="DP-Adam with a first-moment low-pass",
    releases="the sum of clipped per-record gradients plus Gaussian noise, flat or per block",
    sensitivity=JOINT,
    proof=JOINT_PROOF,
    post_processing=(
        "both Adam moments computed from the noisy mean",
        "a further causal moving average of public decay on the first moment",
    ),
    sources=("arXiv:1607.00133", "Wang, An Optimization View of DP LLM Fine-tuning (dp-adam-lp)"),
)
