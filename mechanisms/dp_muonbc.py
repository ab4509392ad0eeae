"""DP-MuonBC: DP-Muon whose orthogonalised momentum is corrected for the noise's bias.

The probes that estimate the bias are drawn from data-independent randomness around
released values, so that the guarantee is DP-Muon's for any number of probes.
"""

from affidavit.mechanisms.mechanism import Mechanism

MECHANISM = Mechanism(
    name="dp_muonbc",
    title="DP-MuonBC",
    releases="one clipped and noised sum per matrix, and one for the auxiliary tensors",
    sensitivity="C_g for block g; blocks of one step are joint",
    post_processing=(
        "normalised momentum of the noisy means",
        "Newton-Schulz iterations and their bias correction by Gaussian probes",
        "the auxiliary update (Adam) of the noisy auxiliary block",
    ),
    needs_auxiliary_block=True,
    sources=("arXiv:2605.12994v1, section 4",),
)
