"""The registry of optimisers; a new one is a file and a line here, or a rule of ``entrywise``.

The optimiser of another package's mechanism is an entry point ``affidavit.optimizers``.

The names are those of ``affidavit.mechanisms.catalogue``: what may be certified can be
trained. ``optimizer_of`` refuses what the mechanism itself refuses, so that a form that was
never certified (DP-DiSK combining after clipping, DP-Dice without its clip) does not run.

>>> OPTIMIZERS["dp_muon"].__name__
'Muon'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import Parameter

from affidavit.mechanisms import mechanism
from affidavit.mechanisms.strategies import Strategy
from affidavit.plan import Plan, RefusedPlan, extension, installed
from affidavit.trainer.distributed.shards import Shards
from affidavit.trainer.optimizers.base import DPOptimizer
from affidavit.trainer.optimizers.disk import DiSK
from affidavit.trainer.optimizers.entrywise import RULES, EntryWise
from affidavit.trainer.optimizers.inputs import OptimizerInputs, optimizer_inputs, refused
from affidavit.trainer.optimizers.muon import Muon, MuonBC

OPTIMIZERS: dict[str, Callable[[OptimizerInputs], DPOptimizer]] = {
    **dict.fromkeys(RULES, EntryWise),
    "dp_muon": Muon,
    "dp_muonbc": MuonBC,
    "dp_disk": DiSK,
}


def optimizer_of(
    plan: Plan,
    tensors: Mapping[str, Mapping[str, Parameter]],
    *,
    strategies: Sequence[Strategy | None] | None = None,
    probe_key: bytes | None = None,
    newton_schulz_dtype: torch.dtype | None = None,
    shards: Shards | None = None,
) -> DPOptimizer:
    """The optimiser of a closed, certified plan.

    ``tensors`` maps each release of the plan to the trainable tensors of all its blocks, by
    name. ``strategies`` has what is injected in each phase (None: independent noise).
    ``probe_key``, 32 bytes, is for ``dp_muonbc`` alone; ``newton_schulz_dtype`` trades digits of
    the orthogonalisation for speed (``torch.bfloat16`` on a GPU). With ``shards`` the tensors are
    their rows that are here. Raises ``RefusedPlan``.
    """
    if result := mechanism(plan.optimizer.name).unmet(plan):
        raise RefusedPlan(*result)
    name = plan.optimizer.name
    if name in OPTIMIZERS:
        optimizer = OPTIMIZERS[name]
    elif name in installed("affidavit.optimizers") and shards is not None:
        raise refused(
            "unsupported",
            "name",
            f"{name} is an optimiser of another package, which supports whole tensors only.",
            "Remove fully_shard.",
        )
    elif name in installed("affidavit.optimizers"):
        optimizer = extension("affidavit.optimizers", name)
    else:
        raise refused(
            "unsupported",
            "name",
            f"{name} is a mechanism of another package, which installs no optimiser by that name.",
            "Install one as an entry point of affidavit.optimizers, or train with that package.",
        )
    return optimizer(
        optimizer_inputs(
            plan,
            tensors,
            strategies=strategies,
            probe_key=probe_key,
            newton_schulz_dtype=newton_schulz_dtype,
            shards=shards,
        )
    )
