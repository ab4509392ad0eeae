"""Obligations: what the trainer must do for the certificate to be about its run.

A guarantee holds for the mechanism that was accounted, not for the script that was
meant. Every certificate lists what its trainer has to keep; ``checked_by`` says whether
a trainer that reads certificates checks it, or whether it is declared by whoever runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from affidavit.mechanisms.lowering import Lowered


@dataclass(frozen=True, kw_only=True, slots=True)
class Obligation:
    """One thing that the trainer must do, by a stable code."""

    code: str
    text: str
    checked_by: Literal["trainer", "declared"] = "declared"

    def as_dict(self) -> dict[str, str]:
        """The obligation as it stands in a certificate."""
        return {"code": self.code, "text": self.text, "checked_by": self.checked_by}


ALWAYS = (
    Obligation(
        code="clip_each_record",
        text="each record's contribution to each block is clipped to that block's l2 norm, "
        "the norm computed in at least float32",
    ),
    Obligation(
        code="every_tensor_in_one_block",
        text="every trainable tensor is in exactly one block of the plan, or is frozen",
    ),
    Obligation(
        code="noise_once_per_lot",
        text="noise is added once to the sum over the lot, whatever the microbatches and devices",
    ),
    Obligation(
        code="cryptographic_generator",
        text="sampling and noise come from a cryptographic generator, freshly keyed for each run",
    ),
    Obligation(
        code="empty_lot_counts",
        text="a lot without records still releases noise and counts as a step",
    ),
    Obligation(
        code="non_finite_is_zero",
        text="a record whose gradient is not finite contributes zero",
    ),
    Obligation(
        code="no_mixing_of_records",
        text="no layer or loss mixes records (no batch normalisation, in-batch loss or packing)",
    ),
    Obligation(
        code="charge_every_step",
        text="no more steps are run than certified; a repeated step is charged again and never "
        "reuses its noise",
    ),
)


def obligations(lowered: Lowered) -> tuple[Obligation, ...]:
    """What a trainer of this plan must keep, the sampler first."""
    assumptions = dict.fromkeys(phase.sampled.assumption for phase in lowered.phases)
    samplers = tuple(
        Obligation(code="sampler_of_the_plan", text=assumption) for assumption in assumptions
    )
    return samplers + ALWAYS
