"""The tensors that a private PyTorch run trains, and the noise of its releases.

Opacus' optimiser knows its own parameters but not their model. If the model's other parameters
are in a second, plain optimiser (matrices under Muon, biases under AdamW), they are released
without noise, and Opacus does not notice. The guard therefore finds the modules of this process
that hold a parameter of the optimiser, and covers all of their parameters.

Equal states of PyTorch's generator produce equal noise, so the guard compares states. Its own
noise is drawn in float64 from a new ChaCha20 stream for each release, and added to the clipped
sums like Opacus' own.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from affidavit.gate.guard.errors import GuardStop
from affidavit.gate.guard.sampler import Stream

WRAPPED = "_module."
"""Prefix of parameter names in Opacus' GradSampleModule."""

GHOST = "GradSampleModuleFastGradientClipping"


class TrainedModel:
    """The models that hold ``parameters``; only ``module``, if one is given."""

    def __init__(self, parameters: Iterable[Any], module: Any | None) -> None:
        self._own = list(parameters)
        own = {id(parameter) for parameter in self._own}
        self._roots = [
            root
            for root in (_roots() if module is None else [module])
            if any(id(parameter) in own for parameter in root.parameters())
        ]

    def tensors(self) -> dict[int, tuple[str, Any]]:
        """The current name and tensor of every parameter, by identity."""
        tensors: dict[int, tuple[str, Any]] = {}
        for root in self._roots:
            for name, tensor in root.named_parameters():
                tensors.setdefault(id(tensor), (name.removeprefix(WRAPPED), tensor))
        for index, tensor in enumerate(self._own):
            tensors.setdefault(id(tensor), (f"parameter {index}", tensor))
        return tensors

    def clip_norms(self) -> list[float]:
        """The clip norms of ghost clipping, which are in modules instead of the optimiser."""
        return [
            float(module.max_grad_norm)
            for root in self._roots
            for module in root.modules()
            if any(kind.__name__ == GHOST for kind in type(module).__mro__)
        ]


def _roots() -> list[Any]:
    """Top-level modules of this process, largest first."""
    kind = sys.modules["torch"].nn.Module
    modules = [value for value in gc.get_objects() if issubclass(type(value), kind)]
    inner = {
        id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()
    }
    roots = [module for module in modules if id(module) not in inner]
    return sorted(roots, key=lambda module: -sum(1 for _ in module.modules()))


def require_all_noised(model: TrainedModel, parameters: Iterable[Any]) -> None:
    """Raise ``GuardStop`` unless every trainable tensor is in the private optimiser."""
    noised = {id(parameter) for parameter in parameters}
    plain = [
        name
        for key, (name, item) in model.tensors().items()
        if item.requires_grad and key not in noised
    ]
    if plain:
        some = ", ".join(plain[:4]) + (f" and {len(plain) - 4} more" if len(plain) > 4 else "")
        raise GuardStop(
            "tensor_not_noised",
            f"{some}: trainable but not in the private optimizer, so they get no noise.",
            "Give make_private one optimizer over all trainable parameters, or freeze these "
            "(requires_grad_(False)); pass module= if these belong to another model.",
        )


def add_noise(
    stream: Stream, std: float, names: Sequence[str], tensors: Sequence[Any], *, replacing: bool
) -> None:
    """Set each tensor's ``grad`` to its clipped sum plus noise of ``std``.

    With ``replacing`` Opacus has already added its own noise and marked the sums as used.

    Raises ``GuardStop`` for a sum that is missing, stale or not finite.
    """
    torch = sys.modules["torch"]
    for name, item in zip(names, tensors, strict=True):
        total = item.summed_grad
        if total is None or (hasattr(total, "_processed") and not replacing):
            raise GuardStop(
                "accumulation",
                f"{name} has no new sum for this release.",
                "Call optimizer.zero_grad() after each step, and train every tensor.",
            )
        if not bool(total.isfinite().all()):
            raise GuardStop(
                "non_finite",
                f"the sum of {name} is not finite, which reveals a record.",
                "Let records whose gradient is not finite contribute zero.",
            )
        noise = torch.from_numpy(std * stream.normal(total.numel())).to(total)
        item.grad = (total + noise.view_as(total)).view_as(item)
        total._processed = True


def state_of(optimizer: Any, tensor: Any) -> bytes | None:
    """The state of Opacus' noise generator; None if it has none."""
    torch, source = sys.modules["torch"], optimizer.generator
    if source is None and tensor.device.type == "cpu":
        state = torch.get_rng_state()
    elif source is None:
        state = getattr(torch, tensor.device.type).get_rng_state(tensor.device)
    else:
        try:
            state = source.get_state()
        except RuntimeError:  # the operating system's generator has no state
            return None
    return bytes(state.cpu().numpy().tobytes())


def generator_of(optimizer: Any) -> str:
    """The name of Opacus' generator in a run record."""
    return "torchcsprng" if optimizer.secure_mode else "torch"
