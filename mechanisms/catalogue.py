"""The catalogue: the privacy description of every optimiser that may be certified.

Optimisers that differ only in their post-processing are entries of this table. ``dp_disk`` and
``dp_dice``, with a bound or a refused form of their own, have a file. An installed package adds a
mechanism by an entry point of the group ``affidavit.mechanisms`` that names its ``Mechanism``.

**Correlated noise.** The release of step t is the clipped sum plus row t of N z, with independent
rows z. N is lower triangular with strategy C = N⁻¹, so later gradients may depend on earlier
releases, and the whole run is one Gaussian mechanism with μ = sens(C)/σ. The certified sensitivity
is that of the injected N under the participations of the plan, whatever N was optimised for. For
DP-CorrMom that is the *inverse* of the filter w_t = z_t - λ z_(t-1) (κ = √((1-λ^(2T))/(1-λ²)) for
one participation), never √(1+λ²); steps are not amplified by sampling.

**Convergence-aware.** The weighting Λ_τ enters the objective of the strategy. The injected noise
stays C⁻¹ z: an implementation that weights the noise as well adds up to about √τ too little.

**DP-Muon.** Each hidden matrix is a block, and the remaining tensors are one auxiliary block. All
blocks of a step come from one lot and are accounted jointly. Momentum and orthogonalisation act on
the noisy releases only. The probes of DP-MuonBC are data-independent randomness around released
values, so its guarantee is that of DP-Muon for any number of probes.

**DP-AdamBC.** In expectation the noise adds Φ = (σC/B)² to each entry of the second moment. Φ is a
public constant, so subtracting it is post-processing.

References: Denisov, McMahan, Rush, Smith and Thakurta, arXiv:2202.08312, Theorem 2.1
(adaptivity); Choquette-Choo, McMahan, Rush and Thakurta, arXiv:2211.06530 (participation);
those of each mechanism are its ``sources``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from affidavit.mechanisms import dp_dice, dp_disk
from affidavit.mechanisms.protocol import CORRELATED, JOINT, JOINT_PROOF, Mechanism, Obligation
from affidavit.plan import Dense, Plan, Reason, installed_extensions, load_extension

CLIPPED_SUM = partial(
    Mechanism,
    releases="the sum of clipped per-record gradients plus Gaussian noise, flat or per block",
    sensitivity=JOINT,
    proof=JOINT_PROOF,
)
"""One clipped and noised sum per step, which is all that the optimiser reads."""

ONE_LOT = Obligation(
    code="one_lot_for_all_blocks",
    text="the matrices and the auxiliary tensors are clipped, summed and noised from the same "
    "lot, each with noise of its own",
)
PER_MATRIX = partial(
    Mechanism,
    releases="one clipped and noised sum per matrix, and one for the auxiliary tensors",
    sensitivity="C_g for block g; blocks of one step are joint",
    proof=JOINT_PROOF,
    needs_auxiliary_block=True,
    clipping="per matrix in Frobenius norm; a flat norm over all tensors is accounted as one block",
    example={
        "releases": [
            {"name": "hidden", "count": 4, "clip_norm": 0.1, "noise_multiplier": 4},
            {"name": "auxiliary", "clip_norm": 0.1, "noise_multiplier": 4},
        ]
    },
)
"""One block per hidden matrix and one for the other tensors."""

INJECTED = Obligation(
    code="inject_the_strategy",
    text="the noise of the run is exactly N z for the plan's noise matrix N, with one z of "
    "independent rows for the whole run",
)
CORRELATED_SUM = partial(
    Mechanism,
    releases="each step's clipped sum plus that step's row of the correlated noise N z",
    sensitivity="sens(N⁻¹) C over the record's participations; blocks of one step are joint, "
    "as σ_joint",
    proof="arXiv:2202.08312, Theorem 2.1, and arXiv:2211.06530, section 2; computed from the N "
    "that is injected",
    obligations=(INJECTED,),
)
"""One clipped sum per step with the noise of a strategy."""

CYCLIC_EXAMPLE: Mapping[str, Any] = {
    "adjacency": "zero_out",
    "sampling": {"scheme": "cyclic", "lot_size": 100},
}
"""The sampling of examples whose participation follows from a fixed order."""


def _anti_correlated(name: str, title: str, post_processing: tuple[str, ...]) -> Mechanism:
    return CORRELATED_SUM(
        name=name,
        title=title,
        post_processing=post_processing,
        noise=frozenset({"bidiagonal"}),
        sources=("Wang, An Optimization View of DP LLM Fine-tuning, Theorems 7 to 9",),
        example={**CYCLIC_EXAMPLE, "noise": {"kind": "bidiagonal", "lambda": 0.9}},
    )


def _dp_matrix(name: str, title: str, *sources: str, lot_size: int, tau: int | None) -> Mechanism:
    """Return DP-Matrix; ``tau`` is the horizon of the weighting in its example."""
    noise = {"kind": "dense"} | ({} if tau is None else {"convergence_aware": {"tau": tau}})
    return CORRELATED_SUM(
        name=name,
        title=title,
        post_processing=(
            "the update from the noisy means, with momentum",
            "the choice of strategy",
        ),
        noise=CORRELATED,
        sources=sources,
        example={
            **CYCLIC_EXAMPLE,
            "steps": 20,
            "sampling": {"scheme": "cyclic", "lot_size": lot_size},
            "noise": noise,
        },
        check=partial(_check_objective, convergence_aware=tau is not None),
    )


def _check_objective(plan: Plan, *, convergence_aware: bool) -> list[Reason]:
    """Return the conflicts between the objective of a dense strategy and the optimiser name."""
    return [
        Reason(
            code="conflict",
            pointer=plan.pointer(index, "noise", "convergence_aware"),
            message=f"{plan.optimizer.name} is defined "
            f"{'with' if convergence_aware else 'without'} the convergence-aware weighting.",
            remedy="Give noise.convergence_aware with its tau."
            if convergence_aware
            else f"Remove convergence_aware, or name {plan.optimizer.name}_lambda.",
        )
        for index, phase in enumerate(plan.phases)
        if isinstance(phase.noise, Dense)
        and (phase.noise.convergence_aware is not None) != convergence_aware
    ]


OPTIMIZERS: tuple[Mechanism, ...] = (
    CLIPPED_SUM(
        name="dp_sgd",
        title="DP-SGD",
        post_processing=(
            "momentum and weight decay on the noisy mean",
            "learning-rate schedules of the step number or of released values",
        ),
        sources=("arXiv:1607.00133, Algorithm 1",),
    ),
    CLIPPED_SUM(
        name="dp_sgd_lowpass",
        title="DP-SGD with a low-pass filter",
        post_processing=(
            "a causal low-pass filter of public decay on the noisy mean",
            "momentum and weight decay",
        ),
        sources=(
            "arXiv:1607.00133, Algorithm 1",
            "Zhang, Bu, Hong and Razaviyayn, DOPPLER, NeurIPS 2024",
        ),
    ),
    CLIPPED_SUM(
        name="dp_adam",
        title="DP-Adam",
        post_processing=(
            "both Adam moments, their bias correction and the update, all computed from the "
            "noisy mean",
        ),
        sources=("arXiv:1607.00133", "arXiv:1412.6980"),
    ),
    CLIPPED_SUM(
        name="dp_adamw",
        title="DP-AdamW",
        post_processing=(
            "both Adam moments computed from the noisy mean",
            "decoupled weight decay of public strength",
        ),
        sources=("arXiv:1607.00133", "arXiv:1711.05101"),
    ),
    CLIPPED_SUM(
        name="dp_adambc",
        title="DP-AdamBC",
        post_processing=(
            "both Adam moments computed from the noisy mean",
            "subtraction of the public constant Φ = (σC/B)² from the second moment, and its floor",
        ),
        sources=("Tang, Shpilevskiy and Lécuyer, arXiv:2312.14334",),
    ),
    CLIPPED_SUM(
        name="dp_adam_floor",
        title="DP-Adam with a floor",
        post_processing=(
            "both Adam moments computed from the noisy mean",
            "a public lower bound on the second moment",
        ),
        sources=("arXiv:2312.14334",),
    ),
    CLIPPED_SUM(
        name="dp_adam_lowpass",
        title="DP-Adam with a first-moment low-pass",
        post_processing=(
            "both Adam moments computed from the noisy mean",
            "a further causal moving average of public decay on the first moment",
        ),
        sources=(
            "arXiv:1607.00133",
            "Wang, An Optimization View of DP LLM Fine-tuning (dp-adam-lp)",
        ),
    ),
    PER_MATRIX(
        name="dp_muon",
        title="DP-Muon",
        post_processing=(
            "heavy-ball momentum of the noisy means",
            "Newton-Schulz iterations, from either start",
            "the auxiliary update (Adam) of the noisy auxiliary block",
        ),
        obligations=(ONE_LOT,),
        sources=("arXiv:2605.12994v1, Algorithm 1 and Theorem 2.1",),
    ),
    PER_MATRIX(
        name="dp_muonbc",
        title="DP-MuonBC",
        post_processing=(
            "normalised momentum of the noisy means",
            "Newton-Schulz iterations and their bias correction by Gaussian probes",
            "the auxiliary update (Adam) of the noisy auxiliary block",
        ),
        obligations=(
            ONE_LOT,
            Obligation(
                code="probes_independent_of_noise",
                text="the probes of the bias correction are drawn independently of the data and "
                "of the noise in the releases",
            ),
        ),
        sources=("arXiv:2605.12994v1, section 4 and appendix C",),
    ),
    _anti_correlated(
        "dp_corrmom",
        "DP-CorrMom",
        (
            "momentum or Adam moments of the noisy means",
            "learning rates that depend on released values",
        ),
    ),
    _anti_correlated(
        "dp_corrsgd", "DP-CorrSGD", ("the update from the noisy means", "weight decay")
    ),
    dp_disk.MECHANISM,
    dp_dice.MECHANISM,
    _dp_matrix(
        "dp_matrix_se",
        "DP-Matrix, single-epoch",
        "arXiv:2202.08312 (fixed point)",
        lot_size=100,
        tau=None,
    ),
    _dp_matrix(
        "dp_matrix_se_lambda",
        "DP-Matrix, single-epoch, convergence-aware",
        "arXiv:2202.08312 (fixed point)",
        "arXiv:2302.01463 (Λ_τ)",
        lot_size=100,
        tau=10,
    ),
    _dp_matrix(
        "dp_matrix_me",
        "DP-Matrix, multi-epoch",
        "arXiv:2211.06530 (dual)",
        lot_size=1000,
        tau=None,
    ),
    _dp_matrix(
        "dp_matrix_me_lambda",
        "DP-Matrix, multi-epoch, convergence-aware",
        "arXiv:2211.06530 (dual)",
        "arXiv:2302.01463 (Λ_τ)",
        lot_size=1000,
        tau=10,
    ),
)

DENOISE = Mechanism(
    name="denoise",
    kind="wrapper",
    title="Singular-value denoising of any optimiser",
    releases="nothing: it reads what the optimiser's mechanism releases",
    sensitivity="that of the optimiser it is used with",
    proof="Post-processing of a release with public constants",
    post_processing=(
        "shrinkage of the singular values of each released mean that is a matrix",
        "its threshold, and scaling back to the released norm",
    ),
    clipping="that of the optimiser it is used with",
    sources=(
        "Sample-efficient DP fine-tuning via gradient matrix denoising, equations 3 to 9",
        "arXiv:1007.4148",
    ),
    example={"optimizer": {"name": "dp_adam", "denoise": True}},
)
"""Post-processing of any optimiser, sampler and noise."""

MECHANISMS: dict[str, Mechanism] = {optimizer.name: optimizer for optimizer in OPTIMIZERS}
"""The optimisers of this package, by name."""


def mechanism(name: str) -> Mechanism:
    """Return the mechanism of an optimiser."""
    return MECHANISMS[name] if name in MECHANISMS else _installed(name)


def optimizers() -> dict[str, Mechanism]:
    """Return every optimiser by name, those of installed packages last."""
    added = sorted(installed_extensions("affidavit.mechanisms").keys() - MECHANISMS.keys())
    return {**MECHANISMS, **{name: _installed(name) for name in added}}


def all_mechanisms() -> dict[str, Mechanism]:
    """Return the optimisers and the wrappers by name."""
    return {**optimizers(), DENOISE.name: DENOISE}


def _installed(name: str) -> Mechanism:
    added: Mechanism = load_extension("affidavit.mechanisms", name)
    return added
