"""The optimisers that may be certified; a new one is a file and a line here."""

from __future__ import annotations

from affidavit.mechanisms import (
    dp_adam,
    dp_adam_floor,
    dp_adambc,
    dp_adamw,
    dp_muon,
    dp_muonbc,
    dp_sgd,
)
from affidavit.mechanisms.mechanism import Mechanism
from affidavit.plan.reasons import Reason, RefusedPlan

MECHANISMS: dict[str, Mechanism] = {
    module.MECHANISM.name: module.MECHANISM
    for module in (
        dp_sgd,
        dp_adam,
        dp_adamw,
        dp_adambc,
        dp_adam_floor,
        dp_muon,
        dp_muonbc,
    )
}

UNSOUND = {
    "dp_dice": (
        "the error state of DP-Dice is built from raw gradients and carries a record into "
        "every later release, so that no subsampled accountant covers it, and neither of "
        "the bounds that would has been proved here."
    ),
}
"""Optimisers for which no claim is known to be true, with the reason."""


def mechanism(name: str) -> Mechanism:
    """The mechanism of an optimiser; raises ``RefusedPlan`` where there is none."""
    if name in UNSOUND:
        raise RefusedPlan(
            Reason(
                code="unsound_optimizer",
                pointer="/optimizer/name",
                message=UNSOUND[name],
                remedy="Use an optimiser whose state is built from released values only.",
            )
        )
    if name not in MECHANISMS:
        raise RefusedPlan(
            Reason(
                code="unsupported",
                pointer="/optimizer/name",
                message=f"{name} is not supported yet.",
                remedy="Supported: " + ", ".join(MECHANISMS) + ".",
            )
        )
    return MECHANISMS[name]
