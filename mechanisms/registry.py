"""The optimisers that may be certified; a new one is a file and a line here."""

from __future__ import annotations

from affidavit.mechanisms import (
    denoise,
    dp_adam,
    dp_adam_floor,
    dp_adam_lowpass,
    dp_adambc,
    dp_adamw,
    dp_corrmom,
    dp_corrsgd,
    dp_dice,
    dp_disk,
    dp_matrix_me,
    dp_matrix_me_lambda,
    dp_matrix_se,
    dp_matrix_se_lambda,
    dp_muon,
    dp_muonbc,
    dp_sgd,
    dp_sgd_lowpass,
)
from affidavit.mechanisms.protocol import Mechanism
from affidavit.plan import OptimizerName

MECHANISMS: dict[str, Mechanism] = {
    module.MECHANISM.name: module.MECHANISM
    for module in (
        dp_sgd,
        dp_sgd_lowpass,
        dp_adam,
        dp_adamw,
        dp_adambc,
        dp_adam_floor,
        dp_adam_lowpass,
        dp_muon,
        dp_muonbc,
        dp_corrmom,
        dp_corrsgd,
        dp_disk,
        dp_dice,
        dp_matrix_se,
        dp_matrix_se_lambda,
        dp_matrix_me,
        dp_matrix_me_lambda,
    )
}


def mechanism(name: OptimizerName) -> Mechanism:
    """The mechanism of an optimiser; every name that a plan may give has one."""
    return MECHANISMS[name]


def catalogue() -> dict[str, Mechanism]:
    """Everything that is described: the optimisers, and what wraps any of them."""
    return {**MECHANISMS, denoise.MECHANISM.name: denoise.MECHANISM}
