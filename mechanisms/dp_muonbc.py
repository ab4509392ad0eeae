"""DP-MuonBC: DP-Muon whose orthogonalised momentum is corrected for the noise's bias.

The probes that estimate the bias are drawn from data-independent randomness around
released values, so that the guarantee is DP-Muon's for any number of probes.
"""

from affidavit.mechanisms.dp_muon import BLOCKS, ONE_LOT
from affidavit.mechanisms.protocol import JOINT_PROOF, Mechanism, Obligation

MECHANISM = Mechanism(
    name="dp_muonbc",
    title="DP-MuonBC",
    releases="one clipped and noised sum per matrix, and one for the auxiliary tensors",
    sensitivity="C_g for block g; blocks of one step are joint",
    proof=JOINT_PROOF,
    post_processing=(
        "normalised momentum of the noisy means",
        "Newton-Schulz iterations and their bias correction by Gaussian probes",
        "the auxiliary update (Adam) of the noisy auxiliary block",
    ),
    obliges=(
        ONE_LOT,
        Obligation(
            code="probes_independent_of_noise",
            text="the probes of the bias correction are drawn independently of the data and of "
            "the noise in the releases",
        ),
    ),
    needs_auxiliary_block=True,
    clipping="per matrix in Frobenius norm; a flat norm over all tensors is accounted as one block",
    sources=("arXiv:2605.12994v1, section 4 and appendix C",),
    example={"releases": BLOCKS},
)
