"""Which tensors a private run of PyTorch trains, found without being told the model.

Opacus' optimiser knows its own parameters, and not the model that they are of. A model whose
other trainable parameters stand in a second, plain optimiser (matrices under Muon, biases
under AdamW) releases those without noise, and nothing in Opacus says so. The guard looks for
the modules of this process that hold a parameter of the optimiser, and takes all of
their parameters.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

from affidavit.gate.guard.stopping import GuardStop

WRAPPED = "_module."
"""What Opacus' GradSampleModule puts in front of a parameter's name."""

GHOST = "GradSampleModuleFastGradientClipping"


class TrainedModel:
    """The models that hold ``parameters``; only ``module``, if one is given."""

    def __init__(self, parameters: Iterable[Any], module: Any | None) -> None:
        self._own = list(parameters)
        wanted = {id(item) for item in self._own}
        self._roots = [
            root
            for root in (_roots() if module is None else [module])
            if any(id(parameter) in wanted for parameter in root.parameters())
        ]

    def tensors(self) -> dict[int, tuple[str, Any]]:
        """Name and tensor of every parameter as it is now, by identity."""
        found: dict[int, tuple[str, Any]] = {}
        for root in self._roots:
            for name, each in root.named_parameters():
                found.setdefault(id(each), (name.removeprefix(WRAPPED), each))
        for place, each in enumerate(self._own):
            found.setdefault(id(each), (f"parameter {place}", each))
        return found

    def clip_norms(self) -> list[float]:
        """The norms that ghost clipping clips to, which its modules keep and not the optimiser."""
        return [
            float(module.max_grad_norm)
            for root in self._roots
            for module in root.modules()
            if any(kind.__name__ == GHOST for kind in type(module).__mro__)
        ]


def _roots() -> list[Any]:
    """The live modules that are part of no other, the widest first."""
    kind = sys.modules["torch"].nn.Module
    modules = [item for item in gc.get_objects() if issubclass(type(item), kind)]
    inner = {
        id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()
    }
    roots = [entry for entry in modules if id(entry) not in inner]
    return sorted(roots, key=lambda each: -sum(1 for _ in each.modules()))


def require_all_noised(model: TrainedModel, parameters: Iterable[Any]) -> None:
    """Raise ``GuardStop`` unless every trainable tensor is one of the private optimiser's."""
    noised = {id(parameter) for parameter in parameters}
    plain = [
        name
        for key, (name, each) in model.tensors().items()
        if each.requires_grad and key not in noised
    ]
    if plain:
        some = ", ".join(plain[:4]) + (f" and {len(plain) - 4} more" if len(plain) > 4 else "")
        raise GuardStop(
            "tensor_not_noised",
            f"{some}: trainable, and not under the private optimizer, which alone adds noise.",
            "Give make_private one optimizer over all trainable parameters, or freeze these "
            "(requires_grad_(False)); module= says which model it is, if these are of another.",
        )
