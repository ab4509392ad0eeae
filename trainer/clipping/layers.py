"""Layers whose backward pass hands per-record gradients to taps.

One ``autograd.Function`` for each kind of use: a matrix product, a look-up, a
normalisation's scale and shift (convolutions and recurrent layers have files of their own).
The forward pass is the layer's own; the backward pass sends the gradient of the inputs on as it is
and gives the parameters' share
to their taps, so that autograd itself never sees a gradient of a parameter. As functions
(not hooks) they survive recomputation of activations. Their backward passes run outside
autocast: only what reached them in bfloat16 is in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from affidavit.trainer.clipping.ghost_norm import (
    DenseFactors,
    EmbeddingFactors,
    LinearFactors,
    accumulated_in,
)
from affidavit.trainer.clipping.hooks import GradientHook, MixedRecords
from affidavit.trainer.clipping.requirements import UnsupportedModel
from affidavit.trainer.distributed.shards import is_sharded, local
from affidavit.trainer.numerics import widened

MaybeTap = GradientHook | None
Taps = dict[str, GradientHook]
Gradients = tuple[Tensor | None, ...]


def outside_autocast(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """``backward`` with every product in the type of its operands.

    ``accumulate`` does the same around the whole pass, but for the thread that it runs in; the
    backward pass of an accelerator has a thread of its own.
    """

    @wraps(backward)
    def run(ctx: Any, grad: Tensor) -> Gradients:
        with torch.autocast(grad.device.type, enabled=False):
            return backward(ctx, grad)

    return run


def as_steps(values: Tensor) -> Tensor:
    """(n, ..., d) as (n, T, d)."""
    if values.ndim == 2:
        return values.unsqueeze(1)
    return values.flatten(1, -2)


def by_record(values: Tensor, records: int) -> Tensor:
    """(n, ...) as it is; (n k, ...) with k rows of each record in turn as (n, k, ...)."""
    if len(values) == records or len(values) % records:
        return values
    return values.unflatten(0, (records, -1))


def in_autocast_type(values: Tensor) -> Tensor:
    """``values`` in the type that a matrix product would use here. The shape stays."""
    kind = values.device.type
    if torch.is_autocast_enabled(kind) and values.is_floating_point():
        return values.to(torch.get_autocast_dtype(kind))
    return values


def summed_over_steps(values: Tensor, dims: int) -> Tensor:
    """(n, ..., *shape) summed to (n, *shape) over all but the first and last ``dims``.

    Raises ``MixedRecords`` where there is no dimension of records.
    """
    if values.ndim <= dims:
        raise MixedRecords(
            f"a layer's output of shape {tuple(values.shape)} has no dimension of records; keep "
            "records in the first dimension."
        )
    middle = tuple(range(1, values.ndim - dims))
    return values.sum(middle, dtype=accumulated_in(values)) if middle else widened(values)


def catch(tap: MaybeTap, values: Tensor, dims: int) -> None:
    """Hand ``tap``, if there is one, each record's sum of ``values`` over its steps.

    They have shape (n, ..., *shape), with ``dims`` dimensions of the parameter last.
    """
    if tap is not None:
        tap.receive(DenseFactors.of(summed_over_steps(values, dims)), len(values))


def both_taps(taps: Taps) -> tuple[MaybeTap, MaybeTap]:
    """Those of a weight and a bias."""
    return taps.get("weight"), taps.get("bias")


class LinearUse(Function):
    """y = x Wᵀ + b, or x W + b where W is ``flipped``; x (n, ..., in), W (out, in)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        taps: tuple[MaybeTap, MaybeTap],
        records: int,
        flipped: bool = False,
    ) -> Tensor:
        """x, W and b of the layer; what its taps need is kept."""
        x = in_autocast_type(x)
        ctx.save_for_backward(x if taps[0] is not None else None, weight)
        ctx.taps, ctx.records, ctx.flipped = taps, records, flipped
        return functional.linear(x, weight.t() if flipped else weight, bias)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """Factors of W, per-record gradients of b, and the gradient of x."""
        gy = gy.contiguous()  # it is read several times; a loss may hand it over transposed
        x, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.taps
        weight = weight.t() if ctx.flipped else weight
        gx = gy @ weight.to(gy.dtype) if ctx.needs_input_grad[0] else None
        gy = by_record(gy, ctx.records)
        if of_weight is not None:
            pair = as_steps(by_record(x, ctx.records)), as_steps(gy)
            of_weight.receive(LinearFactors.of(*(pair[::-1] if ctx.flipped else pair)), len(gy))
        catch(of_bias, gy, 1)
        return gx, None, None, None, None, None


class EmbeddingUse(Function):
    """Rows of a table; ids (n, ...)."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, tap: GradientHook, records: int
    ) -> Tensor:
        """The rows of the table at ``ids``."""
        ctx.save_for_backward(ids)
        ctx.tap, ctx.rows, ctx.padding, ctx.records = tap, len(weight), padding, records
        return functional.embedding(ids, weight)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """Factors of the table; ids have no gradient, and padding adds nothing."""
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            gy = gy.masked_fill((ids == ctx.padding).unsqueeze(-1), 0)
        ids, gy = by_record(ids, ctx.records), by_record(gy, ctx.records)
        b = gy.unsqueeze(1) if ids.ndim == 1 else gy.flatten(1, -2)
        factors = EmbeddingFactors.of(ids.reshape(len(ids), -1), b, ctx.rows)
        ctx.tap.receive(factors, len(ids))
        return None, None, None, None, None


class LayerNormUse(Function):
    """Layer normalisation over the last ``len(shape)`` dimensions."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        taps: tuple[MaybeTap, MaybeTap],
        records: int,
    ) -> Tensor:
        """In float32 under autocast, as PyTorch does it."""
        x = x.float() if torch.is_autocast_enabled(x.device.type) else x
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.taps, ctx.records = taps, records
        return y

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """Per-record gradients of weight and bias, and the gradient of x."""
        gy = gy.contiguous()
        x, weight, mean, rstd = ctx.saved_tensors
        gx, _, _ = torch.ops.aten.native_layer_norm_backward(
            gy, x, weight.shape, mean, rstd, weight, None, [True, False, False]
        )
        of_weight, of_bias = ctx.taps
        if of_weight is not None:
            item = by_record((x - mean).mul_(rstd).mul_(gy), ctx.records)
            catch(of_weight, item, weight.ndim)
        catch(of_bias, by_record(gy, ctx.records), weight.ndim)
        return gx, None, None, None, None, None


class ScaleUse(Function):
    """y = z ⊙ w + b with w and b along dimension ``dim`` of z (n, ...)."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dim: int,
        taps: tuple[MaybeTap, MaybeTap],
        records: int,
    ) -> Tensor:
        """Scaled and shifted; either may be missing."""
        ctx.save_for_backward(z if taps[0] is not None else None, weight)
        ctx.taps, ctx.dim, ctx.records = taps, dim, records
        y = z if weight is None else z * _along(weight, z, dim)
        return y if bias is None else y + _along(bias, z, dim)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """Per-record gradients of w and b, and the gradient of z."""
        z, weight = ctx.saved_tensors
        gx = gy if weight is None else gy * _along(weight, gy, ctx.dim)
        of_weight, of_bias = ctx.taps
        if of_weight is not None:
            catch(of_weight, by_record((gy * z).movedim(ctx.dim, -1), ctx.records), 1)
        catch(of_bias, by_record(gy.movedim(ctx.dim, -1), ctx.records), 1)
        return gx, None, None, None, None, None


def _along(values: Tensor, like: Tensor, dim: int) -> Tensor:
    shape = [1] * like.ndim
    shape[dim] = -1
    return values.view(shape)


# ---- one forward for each kind of module ---------------------------------------------


def run_linear(layer: Any, taps: Taps, records: int, x: Tensor, *, flipped: bool = False) -> Tensor:
    """A linear layer on x (n, ..., in), with W (out, in), or (in, out) where ``flipped``.

    Raises ``MixedRecords`` without a dimension of records.
    """
    if x.ndim < 2:
        raise MixedRecords(
            f"a linear layer got an input of shape {tuple(x.shape)}, without a dimension of "
            "records; keep records in the first dimension."
        )
    if is_sharded(layer.weight):
        return _parallel_linear(layer, both_taps(taps), records, x)
    return LinearUse.apply(x, layer.weight, layer.bias, both_taps(taps), records, flipped)


def _parallel_linear(layer: Any, taps: tuple[MaybeTap, MaybeTap], records: int, x: Any) -> Any:
    """A layer that tensor parallelism cut, on this rank's part.

    Cut by its outputs (``ColwiseParallel``) it sees all of x, and has a part of y; cut by its
    inputs (``RowwiseParallel``) it sees a part of x, and has a term of y, to which one rank adds
    the bias. The hooks of the layer made x a ``DTensor``, and exchange y.
    """
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh, bias = layer.weight.device_mesh, layer.bias
    by_outputs = layer.weight.placements[0].is_shard(0)
    (kind,) = x.placements if is_sharded(x) else (None,)
    if kind is None or not (kind.is_replicate() if by_outputs else kind.is_shard(x.ndim - 1)):
        raise UnsupportedModel(
            f"a linear layer of shape {tuple(layer.weight.shape)} that is sharded over ranks got "
            f"an input with placement {kind}. Shard it by parallelize_module, with ColwiseParallel "
            "or RowwiseParallel, whose hooks place the input."
        )
    weight, bias = _leaf(layer.weight), None if bias is None else _leaf(bias)
    if by_outputs:
        x = x.to_local(grad_placements=[Partial()])
        y = LinearUse.apply(x, weight, bias, taps, records)
        return DTensor.from_local(y, mesh, [Shard(y.ndim - 1)], run_check=False)
    if bias is not None and mesh.get_local_rank():
        bias = bias * 0
    y = LinearUse.apply(x.to_local(), weight, bias, taps, records)
    return DTensor.from_local(y, mesh, [Partial()], run_check=False)


def _leaf(parameter: Any) -> Tensor:
    """The part of ``parameter`` that is here, without its way back.

    Before PyTorch 2.13 a gradient of None becomes zeros there, as if the tensor had other uses.
    """
    return local(parameter).requires_grad_(parameter.requires_grad)


def run_embedding(layer: nn.Embedding, taps: Taps, records: int, ids: Tensor) -> Tensor:
    """Ids of shape (1, T), positions say, are taken for every record.

    One dimension is refused: T positions and n records would look alike where T = n.
    """
    if ids.ndim == 1:
        raise MixedRecords(
            "an embedding got ids of one dimension, which may be records or positions; give "
            "(n, 1) for records, (1, T) for positions."
        )
    if len(ids) == 1:
        ids = ids.expand(records, *ids.shape[1:])
    return EmbeddingUse.apply(ids, layer.weight, layer.padding_idx, taps["weight"], records)


def run_layer_norm(layer: nn.LayerNorm, taps: Taps, records: int, x: Tensor) -> Tensor:
    """Layer normalisation of x (n, ..., *shape)."""
    taken = both_taps(taps)
    return LayerNormUse.apply(x, layer.weight, layer.bias, layer.eps, taken, records)


def run_rms_norm(layer: nn.RMSNorm, taps: Taps, records: int, x: Tensor) -> Tensor:
    """Root-mean-square normalisation of x (n, ..., *shape), in float32 under autocast."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.float()
    z = functional.rms_norm(x, layer.normalized_shape, None, layer.eps)
    return ScaleUse.apply(z, layer.weight, None, -1, both_taps(taps), records)


def run_group_norm(layer: nn.GroupNorm, taps: Taps, records: int, x: Tensor) -> Tensor:
    """Group normalisation of x (n, channels, ...), each record by itself."""
    z = functional.group_norm(x, layer.num_groups, None, None, layer.eps)
    return ScaleUse.apply(z, layer.weight, layer.bias, 1, both_taps(taps), records)
