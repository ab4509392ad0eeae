"""Kernels: layers whose per-record gradients are computed for all records at once.

A kernel is ``run(layer, taps, records, *inputs)``: the forward pass of ``layer`` as autograd
functions that hand factors (``affidavit.trainer.clipping.ghost_norm``) to ``taps``, by the name of
the parameter. A subclass that does not change ``forward`` has its parent's. Every other layer
is run one record at a time (``affidavit.trainer.clipping.per_record``).

``register_kernel`` adds one for a layer of your own, and holds it against ``vmap(grad)`` first.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from affidavit.trainer.clipping.convolutions import CONVOLUTIONS
from affidavit.trainer.clipping.hooks import Block, GradientHook, Lot, Target
from affidavit.trainer.clipping.layers import (
    ScaleUse,
    Taps,
    run_embedding,
    run_group_norm,
    run_layer_norm,
    run_linear,
    run_rms_norm,
)
from affidavit.trainer.clipping.recurrent import RECURRENT
from affidavit.trainer.distributed.shards import whole

Kernel = Callable[..., Any]

KERNELS: dict[type[nn.Module], Kernel] = {
    nn.Linear: run_linear,
    nn.Embedding: run_embedding,
    nn.LayerNorm: run_layer_norm,
    nn.RMSNorm: run_rms_norm,
    nn.GroupNorm: run_group_norm,
    **CONVOLUTIONS,
    **RECURRENT,
}
"""By the class of the layer."""

BY_NAME: dict[str, Kernel] = {
    "transformers.pytorch_utils.Conv1D": partial(run_linear, flipped=True)
}
"""By the class's full name, where its package need not be installed."""

AGREEMENT = 1e-9
"""How far a registered kernel may differ from ``vmap(grad)`` in float64, relative to it."""


class KernelRefused(ValueError):
    """A kernel whose gradients differ from its layer's; the message says where."""


def kernel_of(layer: nn.Module) -> Kernel | None:
    """The kernel of ``layer``, or None if it has to run one record at a time."""
    kind = type(layer)
    if kind.__bases__[0].__name__ == "FSDPModule":
        kind = kind.__bases__[1]  # the layer's own class, before fully_shard
    if isinstance(layer, nn.RMSNorm) and len(layer.normalized_shape) != 1:
        return None
    if kind in KERNELS:
        return KERNELS[kind]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in BY_NAME:
        return BY_NAME[name]
    if hasattr(layer, "parametrizations"):
        return None
    for base, kernel in KERNELS.items():
        if isinstance(layer, base) and all(
            getattr(kind, method, None) is getattr(base, method, None)
            for method in ("forward", "_conv_forward", "_output_padding")
        ):
            return kernel
    if len(inspect.signature(kind.forward).parameters) != 2:
        return None  # a second input, such as a gate, could change what the comparison saw
    try:
        with torch.no_grad():
            return _scale_of(layer) or _look_up_of(layer)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None


def _scale_of(layer: nn.Module) -> Kernel | None:
    """A normalisation of any library whose result is z ⊙ w or z ⊙ (1 + w), tried and compared."""
    own = dict(layer.named_parameters(recurse=False))
    if "Norm" not in type(layer).__name__ or own.keys() != {"weight"}:
        return None
    weight = own["weight"]
    if weight.ndim != 1 or any(True for _ in layer.children()) or weight.device.type == "meta":
        return None
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(3, len(weight), generator=drawn).to(weight.device, weight.dtype)
    got = functional_call(layer, {"weight": torch.linspace(0.5, 2, len(weight)).to(x)}, (x,))
    for shift in (0.0, 1.0):
        z = functional_call(layer, {"weight": torch.full_like(x[0], 1 - shift)}, (x,))
        expected = z * (shift + torch.linspace(0.5, 2, len(weight)).to(x))
        if got.shape == x.shape and torch.allclose(got, expected, rtol=1e-2):
            return partial(_run_scaled, shift=shift)
    return None


def _look_up_of(layer: nn.Module) -> Kernel | None:
    """A look-up whose rows are multiplied with one number (Gemma, BART), tried and compared."""
    if not isinstance(layer, nn.Embedding) or layer.weight.device.type == "meta":
        return None
    ids = torch.arange(min(8, len(layer.weight)), device=layer.weight.device).unsqueeze(0)
    weight = whole(layer.weight)
    rows = weight[ids].double()
    got = functional_call(layer, {"weight": weight}, (ids,)).double()
    factor = float((got * rows).sum() / rows.square().sum())
    alike = got.shape == rows.shape and torch.allclose(got, factor * rows, rtol=1e-2)
    return partial(_run_look_up, factor=factor) if alike else None


def _run_look_up(layer: Any, taps: Taps, records: int, ids: Tensor, *, factor: float) -> Tensor:
    return run_embedding(layer, taps, records, ids) * factor


def _run_scaled(layer: Any, taps: Taps, records: int, x: Tensor, *, shift: float) -> Tensor:
    weight = layer.weight
    one = torch.full_like(weight.detach(), 1 - shift)
    layer._parameters["weight"] = one
    try:
        z = type(layer).forward(layer, x)
    finally:
        layer._parameters["weight"] = weight
    scale = weight + shift if shift else weight
    return ScaleUse.apply(z, scale, None, -1, (taps["weight"], None), records).to(z.dtype)


def register_kernel(
    kind: type[nn.Module], kernel: Kernel, layer: nn.Module, *inputs: Tensor
) -> None:
    """Use ``kernel`` for every layer of class ``kind``, once it agrees with ``vmap(grad)``.

    ``layer`` is one of that class and ``inputs`` what it is called with, each with at least two
    records in the first dimension. Both are taken in float64. The kernel's output, the gradient
    of its inputs and each record's gradient of every parameter must agree.

    Raises ``KernelRefused``.
    """
    records = len(inputs[0])
    if type(layer) is not kind or records < 2:
        raise KernelRefused(
            f"{kind.__name__}: give a layer of exactly this class and at least two records."
        )
    layer = copy.deepcopy(layer).double()
    values = [item.double() if item.is_floating_point() else item for item in inputs]
    expected = _reference(layer, values)
    for i in range(records):
        got = _by_kernel(layer, kernel, values, only=i)
        for name, full in expected.items():
            here = got.get(name)
            if here is None:
                raise KernelRefused(f"{kind.__name__}: the kernel caught no gradient of {name}.")
            size = float(full[i].abs().max()) + 1e-30
            if (
                here.shape != full[i].shape
                or float((here - full[i]).abs().max()) > AGREEMENT * size
            ):
                raise KernelRefused(
                    f"{kind.__name__}: for record {i} the kernel's gradient of {name} differs from "
                    "vmap(grad). Its factors must depend on that record alone."
                )
    KERNELS[kind] = kernel


def _probe_loss(output: Tensor) -> Tensor:
    return output.flatten(1).sin().sum(1)


def _reference(layer: nn.Module, values: list[Tensor]) -> dict[str, Tensor]:
    own = {name: item.detach() for name, item in layer.named_parameters()}

    def of_one(parameters: dict[str, Tensor], *item: Tensor) -> Tensor:
        rows = tuple(value.unsqueeze(0) for value in item)
        return _probe_loss(functional_call(layer, parameters, rows))[0]

    return vmap(grad(of_one), in_dims=(None, *(0 for _ in values)))(own, *values)


def _by_kernel(
    layer: nn.Module, kernel: Kernel, values: list[Tensor], *, only: int
) -> dict[str, Tensor]:
    """Σ_j w_j G_j of the kernel at w = 1 for record ``only`` and 0 for others."""
    lot = Lot(records=len(values[0]), backward=True)
    taps = {}
    for name, parameter in layer.named_parameters():
        block = Block(name=name, clip_norm=1e9, uses=2)
        taps[name] = GradientHook(
            target=Target(name=name, parameter=parameter), block=block, lot=lot
        )
    output = kernel(layer, taps, lot.records, *values)
    _probe_loss(output).sum().backward()
    weights = torch.zeros(lot.records, dtype=torch.float64)
    weights[only] = 1
    return {
        name: tap.block.pending[0][1].weighted_sum(weights).view_as(tap.target.parameter)
        for name, tap in taps.items()
        if len(tap.block.pending) == 1
    }
