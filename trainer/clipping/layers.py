"""Layers whose backward pass hands per-record gradients to hooks.

There is one ``autograd.Function`` for each kind of use: a matrix product, a look-up, and a
normalisation's scale and shift. (Convolutions and recurrent layers have their own files.)
The forward pass is the layer's own. The backward pass returns the gradient of the inputs unchanged
and hands the parameters' share to their hooks, so that autograd never sees a gradient of a
parameter. Unlike PyTorch's module hooks, functions survive the recomputation of activations. Their
backward passes run outside autocast: only tensors that arrive in bfloat16 are in bfloat16.

Calling such a function takes longer than a small layer itself. There, the layer's own operation
runs with detached parameters, and a hook of its node in the graph receives the gradient of its
output (``receive_gradient``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from affidavit.trainer.clipping import device_operations
from affidavit.trainer.clipping.ghost_norm import (
    DenseFactors,
    EmbeddingFactors,
    LinearFactors,
    StepFactors,
    require_record_dimension,
    sum_over_steps,
)
from affidavit.trainer.clipping.hooks import GradientHook
from affidavit.trainer.distributed.shards import is_sharded, local_tensor
from affidavit.trainer.errors import MixedRecords, UnsupportedModel

OptionalHook = GradientHook | None
Hooks = dict[str, GradientHook]
Gradients = tuple[Tensor | None, ...]


def outside_autocast(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Run ``backward`` with each product in the type of its operands.

    ``accumulate`` disables autocast around the whole pass, but only in its own thread. The backward
    pass of an accelerator runs in another thread.
    """

    @wraps(backward)
    def run(ctx: Any, grad: Tensor) -> Gradients:
        with torch.autocast(grad.device.type, enabled=False):
            return backward(ctx, grad)

    return run


def flatten_steps(values: Tensor) -> Tensor:
    """Return values (n, ..., d) as (n, T, d)."""
    if values.ndim == 2:
        return values.unsqueeze(1)
    return values.flatten(1, -2)


def group_by_record(values: Tensor, records: int) -> Tensor:
    """Return values (n k, ...), with k consecutive rows per record, as (n, k, ...).

    (n, ...) stays.
    """
    if len(values) == records or len(values) % records:
        return values
    return values.unflatten(0, (records, -1))


def to_autocast_type(values: Tensor) -> Tensor:
    """Convert ``values`` to the type of a matrix product under autocast. The shape stays."""
    kind = values.device.type
    if torch.is_autocast_enabled(kind) and values.is_floating_point():
        return values.to(torch.get_autocast_dtype(kind))
    return values


def receive_sum(hook: OptionalHook, values: Tensor, dims: int) -> None:
    """Hand each record's sum of ``values`` over its steps to the hook, if there is one.

    ``values`` have shape (n, ..., *shape), where ``dims`` counts the parameter's dimensions.
    """
    if hook is not None:
        hook.receive(DenseFactors(sum_over_steps(values, dims)), len(values))


def weight_and_bias_hooks(hooks: Hooks) -> tuple[OptionalHook, OptionalHook]:
    """Return the hooks of a weight and a bias."""
    return hooks.get("weight"), hooks.get("bias")


MAX_LIGHT = 1 << 15
"""Entries of inputs and of parameters up to which a layer runs without a function of its own."""


def is_light(x: Tensor, weight: Tensor) -> bool:
    """Return whether x (n, ...) and ``weight`` are small, and nothing but autograd keeps x.

    Hooks of saved tensors (checkpoints, offloading) need a function that saves x by them, and
    ``torch.func`` has graphs of its own.
    """
    return (
        type(x) is Tensor
        and x.ndim > 1
        and x.requires_grad
        and x.device.type == "cpu"
        and x.numel() <= MAX_LIGHT
        and weight.numel() <= MAX_LIGHT
        and torch.is_grad_enabled()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def receive_gradient(
    y: Tensor, saved: Tensor | None, receive: Callable[[Tensor, Tensor | None], None]
) -> Tensor:
    """Return y, whose gradient ``receive`` gets with ``saved`` in the backward pass.

    Both have any shape. The hook runs after those of the tensor y, which may change the gradient.
    """
    version = 0 if saved is None else saved._version

    def run(grads: tuple[Tensor | None, ...]) -> None:
        if grads[0] is None:
            return
        if saved is not None and saved._version != version:
            raise RuntimeError(
                "the input of a layer was modified by an in-place operation before its gradient "
                "was computed. Use the operation that returns a new tensor."
            )
        receive(grads[0], saved)

    assert y.grad_fn is not None  # x requires a gradient
    y.grad_fn.register_prehook(run)
    return y


class LinearUse(Function):
    """y = x Wᵀ + b, or x W + b if W is ``flipped``; x (n, ..., in), W (out, in)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hooks: tuple[OptionalHook, OptionalHook],
        records: int,
        flipped: bool = False,
    ) -> Tensor:
        """Run the layer, and save what the hooks need."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            hook = hooks[0] or hooks[1]
            if hook is not None and x.dtype == torch.float32:
                x = hook.microbatch.narrowed_input(x, torch.get_autocast_dtype(kind))
            x = to_autocast_type(x)
            weight, bias = (
                _narrowed(item, hook, x.dtype)
                for item, hook in zip((weight, bias), hooks, strict=True)
            )
        ctx.save_for_backward(x if hooks[0] is not None else None, weight)
        ctx.hooks, ctx.records, ctx.flipped = hooks, records, flipped
        return functional.linear(x, weight.t() if flipped else weight, bias)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """Hand over factors of W and gradients of b; return the gradient of x."""
        gy = gy.contiguous()  # it is read several times, and may be transposed
        x, weight = ctx.saved_tensors
        weight_hook, bias_hook = ctx.hooks
        weight = weight.t() if ctx.flipped else weight
        gx = gy @ weight.to(gy.dtype) if ctx.needs_input_grad[0] else None
        gy = group_by_record(gy, ctx.records)
        if weight_hook is not None:
            pair = flatten_steps(group_by_record(x, ctx.records)), flatten_steps(gy)
            owned = ctx.needs_input_grad[0], True  # an input without a gradient may be the data
            if ctx.flipped:
                pair, owned = (pair[1], pair[0]), (owned[1], owned[0])
            weight_hook.receive(LinearFactors(*pair, owned=owned), len(gy))
        receive_sum(bias_hook, gy, 1)
        return gx, None, None, None, None, None


def _narrowed(parameter: Tensor | None, hook: OptionalHook, dtype: torch.dtype) -> Any:
    """Return ``parameter`` in the type of a matrix product under autocast, of the same shape."""
    if parameter is None or parameter.dtype != torch.float32:
        return parameter
    if hook is None or hook.target.parameter is not parameter:
        return parameter.to(dtype)
    return hook.microbatch.narrowed(hook.target, dtype)


class EmbeddingUse(Function):
    """A look-up of rows of a table by ids (n, ...)."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, hook: GradientHook, records: int
    ) -> Tensor:
        """Return the rows of the table at ``ids``."""
        ctx.save_for_backward(ids)
        ctx.hook, ctx.rows, ctx.padding, ctx.records = hook, len(weight), padding, records
        return functional.embedding(ids, weight)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """Hand over factors of the table; ids have no gradient, and padding adds nothing."""
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            gy = gy.masked_fill((ids == ctx.padding).unsqueeze(-1), 0)
        ids, gy = group_by_record(ids, ctx.records), group_by_record(gy, ctx.records)
        b = gy.unsqueeze(1) if ids.ndim == 1 else gy.flatten(1, -2)
        factors = EmbeddingFactors.build(ids.reshape(len(ids), -1), b, ctx.rows)
        ctx.hook.receive(factors, len(ids))
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
        hooks: tuple[OptionalHook, OptionalHook],
        records: int,
    ) -> Tensor:
        """Run in float32 under autocast, like PyTorch."""
        x = x.float() if torch.is_autocast_enabled(x.device.type) else x
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.hooks, ctx.records = hooks, records
        return y

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """Hand over gradients of weight and bias; return the gradient of x."""
        gy = gy.contiguous()
        x, weight, mean, rstd = ctx.saved_tensors
        require_record_dimension(gy, weight.ndim)
        n = len(gy) if len(gy) % ctx.records else ctx.records
        values = [item.reshape(n, -1, weight.numel()) for item in (x, gy)]
        gx, sums = device_operations.layer_norm_backward(
            values[0], mean.reshape(n, -1), rstd.reshape(n, -1), values[1], weight.flatten()
        )
        of_both = sums.view(n, 2, *weight.shape).unbind(1)
        for hook, item in zip(ctx.hooks, of_both[::-1], strict=True):
            if hook is not None:
                hook.receive(DenseFactors(item), len(item))
        return gx.view_as(x), None, None, None, None, None


class ScaleUse(Function):
    """y = z ⊙ w + b with w and b along dimension ``dim`` of z (n, ...)."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dim: int,
        hooks: tuple[OptionalHook, OptionalHook],
        records: int,
    ) -> Tensor:
        """Scale and shift z; either may be missing."""
        ctx.save_for_backward(z if hooks[0] is not None else None, weight)
        ctx.hooks, ctx.dim, ctx.records = hooks, dim, records
        y = z if weight is None else z * _broadcast_along(weight, z, dim)
        return y if bias is None else y + _broadcast_along(bias, z, dim)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """Hand over gradients of w and b; return the gradient of z."""
        z, weight = ctx.saved_tensors
        gx = gy if weight is None else gy * _broadcast_along(weight, gy, ctx.dim)
        weight_hook, bias_hook = ctx.hooks
        if weight_hook is not None:
            receive_sum(weight_hook, group_by_record((gy * z).movedim(ctx.dim, -1), ctx.records), 1)
        receive_sum(bias_hook, group_by_record(gy.movedim(ctx.dim, -1), ctx.records), 1)
        return gx, None, None, None, None, None


def scale_and_shift(
    z: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    hooks: tuple[OptionalHook, OptionalHook],
    records: int,
) -> Tensor:
    """Return z ⊙ w + b for z (n, ..., d), and w and b (d,)."""
    if not is_light(z, weight):
        return ScaleUse.apply(z, weight, bias, -1, hooks, records)
    y = z * weight.detach() if bias is None else torch.addcmul(bias.detach(), z, weight.detach())

    def receive(gy: Tensor, z: Tensor | None) -> None:
        gy = group_by_record(gy, records)
        if hooks[0] is not None and z is not None:
            hooks[0].receive(StepFactors(gy, group_by_record(z, records)), len(gy))
        if hooks[1] is not None:
            hooks[1].receive(StepFactors(gy), len(gy))

    return receive_gradient(y, None if hooks[0] is None else z.detach(), receive)


def _broadcast_along(values: Tensor, like: Tensor, dim: int) -> Tensor:
    shape = [1] * like.ndim
    shape[dim] = -1
    return values.view(shape)


# ---- one forward function for each kind of module ------------------------------------


def run_linear(
    layer: Any, hooks: Hooks, records: int, x: Tensor, *, flipped: bool = False
) -> Tensor:
    """Run a linear layer on x (n, ..., in), with W (out, in), or (in, out) if ``flipped``.

    Raises ``MixedRecords`` without a dimension of records.
    """
    if x.ndim < 2:
        raise MixedRecords(
            f"a linear layer got an input of shape {tuple(x.shape)}, without a dimension of "
            "records; keep records in the first dimension."
        )
    both = weight_and_bias_hooks(hooks)
    if is_sharded(layer.weight):
        return _run_parallel_linear(layer, both, records, x)
    if not is_light(x, layer.weight):
        return LinearUse.apply(x, layer.weight, layer.bias, both, records, flipped)
    x = to_autocast_type(x)
    bias = None if layer.bias is None else layer.bias.detach()
    weight = layer.weight.detach()
    y = functional.linear(x, weight.t() if flipped else weight, bias)

    def receive(gy: Tensor, x: Tensor | None) -> None:
        gy = flatten_steps(group_by_record(gy, records))
        if both[0] is not None and x is not None:
            pair = flatten_steps(group_by_record(x, records)), gy
            both[0].receive(LinearFactors(*(pair[::-1] if flipped else pair)), len(gy))
        if both[1] is not None:
            both[1].receive(StepFactors(gy), len(gy))

    return receive_gradient(y, None if both[0] is None else x.detach(), receive)


def _run_parallel_linear(
    layer: Any, hooks: tuple[OptionalHook, OptionalHook], records: int, x: Any
) -> Any:
    """Run this rank's part of a layer that is cut by tensor parallelism.

    A layer that is cut by its outputs (``ColwiseParallel``) gets all of x, and has a part of y. One
    that is cut by its inputs (``RowwiseParallel``) gets a part of x, and has a term of y, to which
    one rank adds the bias. The layer's own hooks turn x into a ``DTensor`` and exchange y.
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
    weight, bias = _local_leaf(layer.weight), None if bias is None else _local_leaf(bias)
    if by_outputs:
        x = x.to_local(grad_placements=[Partial()])
        y = LinearUse.apply(x, weight, bias, hooks, records)
        return DTensor.from_local(y, mesh, [Shard(y.ndim - 1)], run_check=False)
    if bias is not None and mesh.get_local_rank():
        bias = bias * 0
    y = LinearUse.apply(x.to_local(), weight, bias, hooks, records)
    return DTensor.from_local(y, mesh, [Partial()], run_check=False)


def _local_leaf(parameter: Any) -> Tensor:
    """Return the local part of ``parameter`` without its autograd history.

    Before PyTorch 2.13, a gradient of None becomes zeros there, as if the tensor had other uses.
    """
    return local_tensor(parameter).requires_grad_(parameter.requires_grad)


def run_embedding(layer: nn.Embedding, hooks: Hooks, records: int, ids: Tensor) -> Tensor:
    """Run an embedding; ids of shape (1, T), for example positions, apply to every record.

    Ids of one dimension are refused, because T positions look like n records if T = n.
    """
    if ids.ndim == 1:
        raise MixedRecords(
            "an embedding got ids of one dimension, which may be records or positions; give "
            "(n, 1) for records, (1, T) for positions."
        )
    if len(ids) == 1:
        ids = ids.expand(records, *ids.shape[1:])
    return EmbeddingUse.apply(ids, layer.weight, layer.padding_idx, hooks["weight"], records)


def run_layer_norm(layer: nn.LayerNorm, hooks: Hooks, records: int, x: Tensor) -> Tensor:
    """Run layer normalisation of x (n, ..., *shape)."""
    both = weight_and_bias_hooks(hooks)
    if len(layer.normalized_shape) > 1 or not is_light(x, layer.weight):
        return LayerNormUse.apply(x, layer.weight, layer.bias, layer.eps, both, records)
    x = x.float() if torch.is_autocast_enabled(x.device.type) else x
    z = functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    return scale_and_shift(z, layer.weight, layer.bias, both, records)


def run_rms_norm(layer: nn.RMSNorm, hooks: Hooks, records: int, x: Tensor) -> Tensor:
    """Run root-mean-square normalisation of x (n, ..., *shape), in float32 under autocast."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.float()
    z = functional.rms_norm(x, layer.normalized_shape, None, layer.eps)
    return scale_and_shift(z, layer.weight, None, weight_and_bias_hooks(hooks), records)


def run_group_norm(layer: nn.GroupNorm, hooks: Hooks, records: int, x: Tensor) -> Tensor:
    """Run group normalisation of x (n, channels, ...), each record by itself."""
    z = functional.group_norm(x, layer.num_groups, None, None, layer.eps)
    return ScaleUse.apply(z, layer.weight, layer.bias, 1, weight_and_bias_hooks(hooks), records)
