"""DP-Muon: per-matrix clipping and noise, momentum, Newton-Schulz orthogonalisation.

Each hidden matrix is a block of its own and the remaining tensors are one auxiliary
block; all blocks of a step come from one lot and are accounted jointly (Theorem 2.1 of
the paper). Momentum and the orthogonalisation act on the noisy releases only.
"""

from affidavit.mechanisms.protocol import JOINT_PROOF, Mechanism, Obligation

ONE_LOT = Obligation(
    code="one_lot_for_all_blocks",
    text="the matrices and the auxiliary tensors are clipped, summed and noised from the same "
    "lot, each with noise of its own",
)
BLOCKS = [
    {"name": "hidden", "count": 4, "clip_norm": 0.1, "noise_multiplier": 4},
    {"name": "auxiliary", "clip_norm": 0.1, "noise_multiplier": 4},
]

MECHANISM = Mechanism(
    name="dp_muon",
    title="DP-Muon",
    releases="one clipped and noised sum per matrix, and one for the auxiliary tensors",
    sensitivity="C_g for block g; blocks of one step are joint",
    proof=JOINT_PROOF,
    post_processing=(
        "heavy-ball momentum of the noisy means",
        "Newton-Schulz iterations, from either start",
        "the auxiliary update (Adam) of the noisy auxiliary block",
    ),
    obliges=(ONE_LOT,),
    needs_auxiliary_block=True,
    clipping="per matrix in Frobenius norm; a flat norm over all tensors is accounted as one block",
    sources=("arXiv:2605.12994v1, Algorithm 1 and Theorem 2.1",),
    example={"releases": BLOCKS},
)
