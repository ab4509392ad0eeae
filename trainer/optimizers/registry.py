"""The registry of optimisers.

A new optimiser is a file and a line here, or a rule of ``entrywise``. The optimiser of another
package's mechanism is an entry point ``affidavit.optimizers``.

The names are those of ``affidavit.mechanisms.catalogue``: everything that can be certified can be
trained. ``optimizer_of`` refuses what the mechanism refuses, so no uncertified form of an optimiser
runs (DP-DiSK that combines after clipping, DP-Dice without its clip norm).

>>> OPTIMIZERS["dp_muon"].__name__
'Muon'
"""

from __future__ import annotations

from collections.abc import Callable

from affidavit.mechanisms import mechanism
from affidavit.plan import RefusedPlan, installed_extensions, load_extension
from affidavit.trainer.optimizers.base import DPOptimizer
from affidavit.trainer.optimizers.disk import DiSK
from affidavit.trainer.optimizers.entrywise import RULES, EntryWise
from affidavit.trainer.optimizers.inputs import OptimizerInputs, refuse_optimizer
from affidavit.trainer.optimizers.muon import Muon, MuonBC

OPTIMIZERS: dict[str, Callable[[OptimizerInputs], DPOptimizer]] = {
    **dict.fromkeys(RULES, EntryWise),
    "dp_muon": Muon,
    "dp_muonbc": MuonBC,
    "dp_disk": DiSK,
}


def optimizer_of(inputs: OptimizerInputs) -> DPOptimizer:
    """Return the optimiser of a closed, certified plan; raises ``RefusedPlan``."""
    name = inputs.settings.name
    if result := mechanism(name).find_mismatches(inputs.plan):
        raise RefusedPlan(*result)
    if name in OPTIMIZERS:
        return OPTIMIZERS[name](inputs)
    if name not in installed_extensions("affidavit.optimizers"):
        raise refuse_optimizer(
            "unsupported",
            "name",
            f"{name} is a mechanism of another package, which installs no optimiser by that name.",
            "Install one as an entry point of affidavit.optimizers, or train with that package.",
        )
    if inputs.shards is not None:
        raise refuse_optimizer(
            "unsupported",
            "name",
            f"{name} is an optimiser of another package, which supports whole tensors only.",
            "Remove fully_shard.",
        )
    optimizer: DPOptimizer = load_extension("affidavit.optimizers", name)(inputs)
    return optimizer
