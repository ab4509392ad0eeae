"""Kernels: layers whose per-record gradients are computed for all records at once.

A kernel is ``run(layer, hooks, records, *inputs)``: the forward pass of ``layer`` in autograd
functions that hand factors (``affidavit.trainer.clipping.ghost_norm``) to ``hooks``, by parameter
name. A subclass that keeps its parent's ``forward`` uses its parent's kernel. Other layers run one
record at a time (``affidavit.trainer.clipping.per_record``).

``register_kernel`` adds a kernel for your own layer after comparing it with ``vmap(grad)``.
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
from affidavit.trainer.clipping.hooks import ClippingBlock, GradientHook, Microbatch, TrainedTensor
from affidavit.trainer.clipping.layers import (
    Hooks,
    run_embedding,
    run_group_norm,
    run_layer_norm,
    run_linear,
    run_rms_norm,
    scale_and_shift,
)
from affidavit.trainer.clipping.recurrent import RECURRENT
from affidavit.trainer.distributed.shards import gather_full
from affidavit.trainer.norm_bounds import HALF_TYPES

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
"""Kernels by the class of the layer."""

KERNELS_BY_NAME: dict[str, Kernel] = {
    "transformers.pytorch_utils.Conv1D": partial(run_linear, flipped=True)
}
"""Kernels by the full name of a class whose package may not be installed."""

WEIGHTS = ((0.5, 2.0), (2.0, -2.0), (0.0, 0.0), (-30.0, 30.0))
"""Ends of the ranges of weights at which a normalisation is compared with a scale."""

SCALE_ERROR, HALF_ERROR = 1e-4, 1e-2
"""Differences from a scale that rounding may cause, relative and absolute."""

MAX_RELATIVE_ERROR = 1e-9
"""Relative difference from ``vmap(grad)`` in float64 that a registered kernel may have."""


class KernelRefused(ValueError):
    """A kernel's gradients differ from its layer's gradients; the message says where."""


def find_kernel(layer: nn.Module) -> Kernel | None:
    """Return the kernel of ``layer``, or None if the layer has to run one record at a time."""
    kind = type(layer)
    if kind.__bases__[0].__name__ == "FSDPModule":
        kind = kind.__bases__[1]  # the layer's own class, before fully_shard
    if isinstance(layer, nn.RMSNorm) and len(layer.normalized_shape) != 1:
        return None
    if kind in KERNELS:
        return KERNELS[kind]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in KERNELS_BY_NAME:
        return KERNELS_BY_NAME[name]
    if hasattr(layer, "parametrizations"):
        return None
    for base, kernel in KERNELS.items():
        if isinstance(layer, base) and all(
            getattr(kind, method, None) is getattr(base, method, None)
            for method in ("forward", "_conv_forward", "_output_padding")
        ):
            return kernel
    if len(inspect.signature(kind.forward).parameters) != 2:
        return None  # a second input, such as a gate, could invalidate the comparison below
    try:
        with torch.no_grad():
            return _find_scale_kernel(layer) or _find_look_up_kernel(layer)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None


def _find_scale_kernel(layer: nn.Module) -> Kernel | None:
    """Return a kernel for any library's normalisation with result z ⊙ w or z ⊙ (1 + w).

    The layer is run and compared.
    """
    parameters = dict(layer.named_parameters(recurse=False))
    if "Norm" not in type(layer).__name__ or parameters.keys() != {"weight"}:
        return None
    weight = parameters["weight"]
    if weight.ndim != 1 or any(True for _ in layer.children()) or weight.device.type == "meta":
        return None
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(3, len(weight), generator=drawn).to(weight.device, weight.dtype)
    # Zero, negative and large weights too, to which training leads.
    weights = [torch.linspace(*ends, len(weight)).to(x) for ends in WEIGHTS]
    results = [functional_call(layer, {"weight": item}, (x,)) for item in weights]
    tolerance = HALF_ERROR if weight.dtype in HALF_TYPES else SCALE_ERROR
    for shift in (0.0, 1.0):
        z = functional_call(layer, {"weight": torch.full_like(x[0], 1 - shift)}, (x,))
        if all(
            got.shape == x.shape
            and torch.allclose(got, z * (shift + item), rtol=tolerance, atol=tolerance)
            for got, item in zip(results, weights, strict=True)
        ):
            return partial(_run_scaled, shift=shift)
    return None


def _find_look_up_kernel(layer: nn.Module) -> Kernel | None:
    """Return a kernel for a look-up with scaled rows (Gemma, BART).

    The layer is run and compared.
    """
    if not isinstance(layer, nn.Embedding) or layer.weight.device.type == "meta":
        return None
    ids = torch.arange(min(8, len(layer.weight)), device=layer.weight.device).unsqueeze(0)
    weight = gather_full(layer.weight)
    rows = weight[ids].double()
    got = functional_call(layer, {"weight": weight}, (ids,)).double()
    factor = float((got * rows).sum() / rows.square().sum())
    other = functional_call(layer, {"weight": -3 * weight}, (ids,)).double()
    is_scaled = got.shape == rows.shape and all(
        torch.allclose(result, factor * table, rtol=1e-2)
        for result, table in ((got, rows), (other, -3 * rows))
    )
    return partial(_run_look_up, factor=factor) if is_scaled else None


def _run_look_up(layer: Any, hooks: Hooks, records: int, ids: Tensor, *, factor: float) -> Tensor:
    return run_embedding(layer, hooks, records, ids) * factor


def _run_scaled(layer: Any, hooks: Hooks, records: int, x: Tensor, *, shift: float) -> Tensor:
    weight = layer.weight
    one = torch.full_like(weight.detach(), 1 - shift)
    layer._parameters["weight"] = one
    try:
        z = type(layer).forward(layer, x)
    finally:
        layer._parameters["weight"] = weight
    scale = weight + shift if shift else weight
    return scale_and_shift(z, scale, None, (hooks["weight"], None), records).to(z.dtype)


def register_kernel(
    kind: type[nn.Module], kernel: Kernel, layer: nn.Module, *inputs: Tensor
) -> None:
    """Use ``kernel`` for all layers of class ``kind``, if it agrees with ``vmap(grad)``.

    ``layer`` is an example of the class, and ``inputs`` are its arguments, each with at least two
    records in the first dimension. They are compared in float64: the kernel's output, the gradient
    of its inputs and each record's gradient of each parameter must agree.

    Raises ``KernelRefused``.
    """
    records = len(inputs[0])
    if type(layer) is not kind or records < 2:
        raise KernelRefused(
            f"{kind.__name__}: give a layer of exactly this class and at least two records."
        )
    layer = copy.deepcopy(layer).double()
    values = [item.double() if item.is_floating_point() else item for item in inputs]
    expected = _reference_gradients(layer, values)
    for i in range(records):
        got = _kernel_gradients(layer, kernel, values, only=i)
        for name, full in expected.items():
            gradient = got.get(name)
            if gradient is None:
                raise KernelRefused(f"{kind.__name__}: the kernel received no gradient of {name}.")
            size = float(full[i].abs().max()) + 1e-30
            if (
                gradient.shape != full[i].shape
                or float((gradient - full[i]).abs().max()) > MAX_RELATIVE_ERROR * size
            ):
                raise KernelRefused(
                    f"{kind.__name__}: for record {i} the kernel's gradient of {name} differs from "
                    "vmap(grad). Its factors must depend on that record alone."
                )
    KERNELS[kind] = kernel


def _probe_loss(output: Tensor) -> Tensor:
    return output.flatten(1).sin().sum(1)


def _reference_gradients(layer: nn.Module, values: list[Tensor]) -> dict[str, Tensor]:
    parameters = {name: item.detach() for name, item in layer.named_parameters()}

    def record_loss(parameters: dict[str, Tensor], *record: Tensor) -> Tensor:
        rows = tuple(value.unsqueeze(0) for value in record)
        return _probe_loss(functional_call(layer, parameters, rows))[0]

    return vmap(grad(record_loss), in_dims=(None, *(0 for _ in values)))(parameters, *values)


def _kernel_gradients(
    layer: nn.Module, kernel: Kernel, values: list[Tensor], *, only: int
) -> dict[str, Tensor]:
    """Return the gradients that the kernel gives for record ``only``."""
    microbatch = Microbatch(records=len(values[0]), in_backward=True)
    hooks = {}
    for name, parameter in layer.named_parameters():
        block = ClippingBlock(name=name, clip_norm=1e9, uses=2)
        hooks[name] = GradientHook(
            target=TrainedTensor(name=name, parameter=parameter), block=block, microbatch=microbatch
        )
    output = kernel(layer, hooks, microbatch.records, *values)
    _probe_loss(output).sum().backward()
    weights = torch.zeros(microbatch.records, dtype=torch.float64)
    weights[only] = 1
    return {
        name: hook.block.pending[0][1].weighted_sum(weights).view_as(hook.target.parameter)
        for name, hook in hooks.items()
        if len(hook.block.pending) == 1
    }
