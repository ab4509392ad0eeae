"""Convolutions whose backward pass hands per-record gradients to taps.

In one and two dimensions the kernel's gradient is a product of patches, so that its norm needs no
gradient in full. In three dimensions, for transposed convolutions and for groups, the gradients
of a microbatch are formed: they are as many as kernel entries times records.

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

from affidavit.trainer.clipping.ghost_norm import DenseFactors, LinearFactors
from affidavit.trainer.clipping.layers import (
    Gradients,
    MaybeTap,
    Taps,
    both_taps,
    by_record,
    catch,
    in_autocast_type,
    outside_autocast,
)
from affidavit.trainer.numerics import widened


class Geometry(NamedTuple):
    """Arguments of ``torch.convolution`` beside its tensors, one number a dimension."""

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
        taps: tuple[MaybeTap, MaybeTap],
        records: int,
    ) -> Tensor:
        """x convolved with the kernel as ``geometry`` says."""
        x = in_autocast_type(x)
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.taps, ctx.records = geometry, taps, records
        if bias is not None:
            bias = bias.to(x.dtype)
        return torch.convolution(x, weight.to(x.dtype), bias, *geometry)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """Per-record gradients of kernel and bias, and the gradient of x."""
        x, weight = ctx.saved_tensors
        gx = None
        if ctx.needs_input_grad[0]:
            gx, _, _ = torch.ops.aten.convolution_backward(
                gy, x, weight.to(gy.dtype), None, *ctx.geometry, [True, False, False]
            )
        of_weight, of_bias = ctx.taps
        steps = by_record(gy.flatten(2).mT, ctx.records)
        if of_weight is not None:
            of_weight.receive(_factors(x, weight, gy, steps, ctx.geometry), len(steps))
        catch(of_bias, steps, 1)
        return gx, None, None, None, None, None


def _factors(
    x: Tensor, weight: Tensor, gy: Tensor, steps: Tensor, geometry: Geometry
) -> LinearFactors | DenseFactors:
    if weight.ndim > 4 or geometry.transposed or geometry.groups > 1:
        full = by_record(kernel_gradients(x, weight, gy, geometry), len(steps))
        return DenseFactors.of(full if full.ndim == weight.ndim + 1 else full.sum(1))
    return PatchFactors(x, weight, gy, geometry, len(steps))


class PatchFactors(LinearFactors):
    """G_i = B_iᵀ A_i with A_i the patches of the input, which are made where they are needed.

    A processor convolves one record after the other where each G_i is formed anyway.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, gy: Tensor, geometry: Geometry, records: int
    ) -> None:
        self.__dict__.update(x=x, weight=weight, gy=gy, geometry=geometry, records=records)

    x: Tensor
    weight: Tensor
    gy: Tensor
    geometry: Geometry
    records: int

    @cached_property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Patches (n, T, in) and output gradients (n, T, out)."""
        x, weight = self.x, self.weight
        stride, padding, dilation = self.geometry[:3]
        if weight.ndim == 3:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        patches = functional.unfold(x, weight.shape[2:], dilation, padding, stride).mT
        steps = by_record(self.gy.flatten(2).mT, self.records)
        return by_record(patches, self.records).flatten(1, -2), steps.flatten(1, -2)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        steps = self.gy.numel() // (self.records * len(self.weight))
        return steps, self.weight[0].numel(), len(self.weight)

    @property
    def _device(self) -> torch.device:
        return self.x.device

    def _products(self) -> Iterator[Tensor]:
        if self._device.type != "cpu":
            yield from super()._products()
            return
        rows = len(self.x) // self.records
        for x, gy in zip(widened(self.x).split(rows), widened(self.gy).split(rows), strict=True):
            yield kernel_gradient(x, self.weight, gy, self.geometry).flatten(1).unsqueeze(0)


def kernel_gradient(x: Tensor, weight: Tensor, gy: Tensor, geometry: Geometry) -> Tensor:
    """The kernel's gradient of all rows of x and gy together, in the shape of ``weight``."""
    _, result, _ = torch.ops.aten.convolution_backward(
        gy, x, weight.to(x.dtype), None, *geometry, [False, True, False]
    )
    return result


def kernel_gradients(x: Tensor, weight: Tensor, gy: Tensor, geometry: Geometry) -> Tensor:
    """The kernel's gradient of every row of x and gy, (n, *kernel)."""
    wide, grad = widened(x), widened(gy)

    def of_one(a: Tensor, b: Tensor) -> Tensor:
        return kernel_gradient(a.unsqueeze(0), weight, b.unsqueeze(0), geometry)

    return vmap(of_one)(wide, grad)


# ---- one forward for each kind of module ---------------------------------------------


def run_convolution(layer: Any, taps: Taps, records: int, x: Tensor) -> Tensor:
    """A convolution of x (n, channels, ...) with any padding."""
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * len(layer.kernel_size)
    none = (0,) * len(layer.kernel_size)
    geometry = Geometry(layer.stride, padding, layer.dilation, False, none, layer.groups)
    return ConvolutionUse.apply(x, layer.weight, layer.bias, geometry, both_taps(taps), records)


def run_transposed_convolution(
    layer: Any, taps: Taps, records: int, x: Tensor, output_size: list[int] | None = None
) -> Tensor:
    """A transposed convolution of x (n, channels, ...)."""
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
    return ConvolutionUse.apply(x, layer.weight, layer.bias, geometry, both_taps(taps), records)


CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), run_convolution),
    nn.ConvTranspose1d: run_transposed_convolution,
    nn.ConvTranspose2d: run_transposed_convolution,
    nn.ConvTranspose3d: run_transposed_convolution,
}
