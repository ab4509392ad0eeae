"""Convolutions whose backward pass hands per-record gradients to hooks.

In one and two dimensions, the kernel's gradient is a product of patches, whose norm needs no full
gradient. For three dimensions, transposed convolutions and groups, the gradients of a microbatch
are formed: kernel entries times records.
>>> x, w = torch.randn(4, 2, 5, 5, 5), torch.randn(3, 2, 2, 2, 2)
>>> geometry = Geometry((1, 1, 1), (0, 0, 0), (1, 1, 1), False, (0, 0, 0), 1)
>>> kernel_gradients(x, w, torch.ones(4, 3, 4, 4, 4), geometry).shape
torch.Size([4, 3, 2, 2, 2, 2])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import vmap
from torch.nn import functional

from affidavit.trainer.clipping.ghost_norm import DenseFactors, LinearFactors, form_products
from affidavit.trainer.clipping.layers import (
    Gradients,
    Hooks,
    OptionalHook,
    group_by_record,
    outside_autocast,
    receive_sum,
    to_autocast_type,
    weight_and_bias_hooks,
)
from affidavit.trainer.norm_bounds import upcast

MAX_PATCHES, PATCHES_AT_ONCE = 1 << 17, 1 << 20
"""Entries of a record's patches above which the CPU convolves each record, and entries of patches
that it forms at once."""


class Geometry(NamedTuple):
    """The arguments of ``torch.convolution`` other than its tensors, one number per dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


class ConvolutionUse(Function):
    """A convolution or its transpose; x (n, channels, ...), one to three dimensions."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        hooks: tuple[OptionalHook, OptionalHook],
        records: int,
    ) -> Tensor:
        """Convolve x with the kernel."""
        x = to_autocast_type(x)
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.hooks, ctx.records = geometry, hooks, records
        if bias is not None:
            bias = bias.to(x.dtype)
        return torch.convolution(x, weight.to(x.dtype), bias, *geometry)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """Hand over gradients of kernel and bias; return the gradient of x."""
        x, weight = ctx.saved_tensors
        gx = None
        if ctx.needs_input_grad[0]:
            gx, _, _ = torch.ops.aten.convolution_backward(
                gy, x, weight.to(gy.dtype), None, *ctx.geometry, [True, False, False]
            )
        weight_hook, bias_hook = ctx.hooks
        steps = group_by_record(gy.flatten(2).mT, ctx.records)
        if weight_hook is not None:
            weight_hook.receive(_factors(x, weight, gy, steps, ctx.geometry), len(steps))
        receive_sum(bias_hook, steps, 1)
        return gx, None, None, None, None, None


def _factors(
    x: Tensor, weight: Tensor, gy: Tensor, steps: Tensor, geometry: Geometry
) -> LinearFactors | DenseFactors:
    if weight.ndim > 4 or geometry.transposed or geometry.groups > 1:
        full = group_by_record(kernel_gradients(x, weight, gy, geometry), len(steps))
        return DenseFactors(full if full.ndim == weight.ndim + 1 else full.sum(1))
    return PatchFactors(x, weight, gy, geometry, len(steps))


class PatchFactors(LinearFactors):
    """G_i = B_iᵀ A_i, where A_i are the patches of the input, which are formed only if needed.

    If each G_i is formed anyway, the CPU takes the patches of a few records at a time, or
    convolves one record after the other if it has many.
    """

    owned = True, True

    def __init__(
        self, x: Tensor, weight: Tensor, gy: Tensor, geometry: Geometry, records: int
    ) -> None:
        self.x, self.weight, self.gy = x, weight, gy
        self.geometry, self.records = geometry, records

    @cached_property
    def pair(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # formed only if needed
        """Patches (n, T, in) and output gradients (n, T, out)."""
        return self._form_pair(self.x, self.gy, self.records)

    def _form_pair(self, x: Tensor, gy: Tensor, records: int) -> tuple[Tensor, Tensor]:
        weight = self.weight
        stride, padding, dilation = self.geometry[:3]
        if weight.ndim == 3:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        patches = functional.unfold(x, weight.shape[2:], dilation, padding, stride).mT
        steps = group_by_record(gy.flatten(2).mT, records)
        return group_by_record(patches, records).flatten(1, -2), steps.flatten(1, -2)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, in and out."""
        steps = self.gy.numel() // (self.records * len(self.weight))
        return steps, self.weight[0].numel(), len(self.weight)

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        return self.x.device

    @property
    def waits(self) -> bool:
        """Never: patches are not formed to find out how many there are."""
        return False

    def _products(self) -> Iterator[Tensor]:
        if self.device.type != "cpu":
            yield from super()._products()
        elif self.sizes[0] * self.sizes[1] > MAX_PATCHES:
            rows = len(self.x) // self.records
            for x, gy in zip(upcast(self.x).split(rows), upcast(self.gy).split(rows), strict=True):
                yield kernel_gradient(x, self.weight, gy, self.geometry).flatten(1).unsqueeze(0)
        else:
            for pair in self._pairs():
                yield from form_products(*pair)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        records = min(self.records, max(1, PATCHES_AT_ONCE // (self.sizes[0] * self.sizes[1])))
        rows = records * (len(self.x) // self.records)
        for x, gy in zip(self.x.split(rows), self.gy.split(rows), strict=True):
            yield self._form_pair(x, gy, len(x) * records // rows)


def kernel_gradient(x: Tensor, weight: Tensor, gy: Tensor, geometry: Geometry) -> Tensor:
    """Return the kernel's gradient of all rows of x and gy together, in the shape of ``weight``."""
    _, result, _ = torch.ops.aten.convolution_backward(
        gy, x, weight.to(x.dtype), None, *geometry, [False, True, False]
    )
    return result


def kernel_gradients(x: Tensor, weight: Tensor, gy: Tensor, geometry: Geometry) -> Tensor:
    """Return the kernel's gradient of each row of x and gy, (n, *kernel)."""
    wide, grad = upcast(x), upcast(gy)

    def of_one(a: Tensor, b: Tensor) -> Tensor:
        return kernel_gradient(a.unsqueeze(0), weight, b.unsqueeze(0), geometry)

    return vmap(of_one)(wide, grad)


# ---- one forward function for each kind of module ------------------------------------


def run_convolution(layer: Any, hooks: Hooks, records: int, x: Tensor) -> Tensor:
    """Run a convolution of x (n, channels, ...) with any padding."""
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * len(layer.kernel_size)
    none = (0,) * len(layer.kernel_size)
    geometry = Geometry(layer.stride, padding, layer.dilation, False, none, layer.groups)
    return ConvolutionUse.apply(
        x, layer.weight, layer.bias, geometry, weight_and_bias_hooks(hooks), records
    )


def run_transposed_convolution(
    layer: Any, hooks: Hooks, records: int, x: Tensor, output_size: list[int] | None = None
) -> Tensor:
    """Run a transposed convolution of x (n, channels, ...)."""
    more = layer._output_padding(
        x,
        output_size,
        layer.stride,
        layer.padding,
        layer.kernel_size,
        len(layer.kernel_size),
        layer.dilation,
    )
    geometry = Geometry(
        layer.stride, layer.padding, layer.dilation, True, tuple(more), layer.groups
    )
    return ConvolutionUse.apply(
        x, layer.weight, layer.bias, geometry, weight_and_bias_hooks(hooks), records
    )


CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), run_convolution),
    nn.ConvTranspose1d: run_transposed_convolution,
    nn.ConvTranspose2d: run_transposed_convolution,
    nn.ConvTranspose3d: run_transposed_convolution,
}
