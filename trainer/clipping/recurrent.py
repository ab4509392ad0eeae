"""Recurrent layers: one product of all inputs, and one factor for all steps of a state.

The states of a record depend on each other, so autograd takes the steps one after the other, with
fixed recurrent weights. Zeros are added to the result of each step; their gradient (n, T, ·) is the
other factor of the recurrent weights' gradient

    G_i = Σ_t δ_{i,t}ᵀ h_{i,t-1},

which has the form of a linear layer's. An LSTM of T steps costs T small products forward and
backward, like in PyTorch without cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from affidavit.trainer.clipping.ghost_norm import LinearFactors
from affidavit.trainer.clipping.layers import (
    Gradients,
    Hooks,
    LinearUse,
    OptionalHook,
    outside_autocast,
    receive_sum,
    to_autocast_type,
)
from affidavit.trainer.errors import MixedRecords

State = tuple[Tensor, ...]


class HookedZeros(Function):
    """Zeros (n, T, out) whose gradient goes to hooks; the inputs (n, T, in) are filled in later."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int, int],
        inputs: list[Tensor],
        hooks: tuple[OptionalHook, OptionalHook],
    ) -> Tensor:
        """Return zeros; the gradient belongs to ``weight`` and ``bias``."""
        ctx.inputs, ctx.hooks = inputs, hooks
        del bias
        return weight.new_zeros(shape)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, delta: Tensor) -> Gradients:
        """Hand over factors of the weight and per-record gradients of the bias."""
        weight_hook, bias_hook = ctx.hooks
        if weight_hook is not None:
            item = torch.stack([step.detach() for step in ctx.inputs], 1)
            weight_hook.receive(LinearFactors(item, delta), len(delta))
        receive_sum(bias_hook, delta, 1)
        return None, None, None, None, None


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    z = torch.sigmoid(xz + hz)
    return ((1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * state[0],)


CELLS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": lambda x, h, _: (torch.tanh(x + h),),
    "RNN_RELU": lambda x, h, _: (torch.relu(x + h),),
}


def run_recurrent(
    layer: nn.RNNBase, hooks: Hooks, records: int, x: Any, hx: Any = None
) -> tuple[Tensor, Any]:
    """Run an LSTM, GRU or RNN on x (n, T, in), or (T, n, in) if it is not ``batch_first``.

    Raises ``MixedRecords`` for packed sequences and for other shapes.
    """
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise MixedRecords(
            f"a {type(layer).__name__} needs a tensor of records, steps and entries. Give padded "
            "sequences (torch.nn.utils.rnn.pad_packed_sequence), not packed ones."
        )
    x = x if layer.batch_first else x.transpose(0, 1)
    if len(x) != records:
        raise MixedRecords(
            f"a {type(layer).__name__} sees {len(x)} sequences for {records} records; set "
            "batch_first=True if records come first."
        )
    first: State = () if hx is None else (hx if isinstance(hx, tuple) else (hx,))
    ends: list[State] = []
    both = ("", "_reverse") if layer.bidirectional else ("",)
    for depth in range(layer.num_layers):
        outputs = []
        for way, suffix in enumerate(both):
            start = tuple(item[depth * len(both) + way] for item in first)
            output, end = _run_direction(layer, hooks, f"_l{depth}{suffix}", x, start)
            outputs.append(output)
            ends.append(end)
        x = torch.cat(outputs, -1)
        if layer.dropout and depth < layer.num_layers - 1:
            x = functional.dropout(x, layer.dropout, layer.training)
    last = tuple(torch.stack(items) for items in zip(*ends, strict=True))
    return (x if layer.batch_first else x.transpose(0, 1)), last if len(last) > 1 else last[0]


def _run_direction(
    layer: nn.RNNBase, hooks: Hooks, suffix: str, x: Tensor, start: State
) -> tuple[Tensor, State]:
    def of(name: str) -> tuple[Any, OptionalHook]:
        return getattr(layer, name + suffix, None), hooks.get(name + suffix)

    (w, w_hook), (b, b_hook) = of("weight_ih"), of("bias_ih")
    (u, u_hook), (c, c_hook) = of("weight_hh"), of("bias_hh")
    (p, p_hook) = of("weight_hr")
    inputs = LinearUse.apply(x, w, b, (w_hook, b_hook), len(x))
    steps = x.shape[1]
    states: list[Tensor] = []
    cells: list[Tensor] = []
    extra = HookedZeros.apply(u, c, (len(x), steps, len(u)), states, (u_hook, c_hook))
    projected = None
    if p is not None:
        projected = HookedZeros.apply(p, None, (len(x), steps, len(p)), cells, (p_hook, None))
        p = p.detach()
    u, c = u.detach(), None if c is None else c.detach()
    if not start:
        wide = x.new_zeros(len(x), layer.hidden_size, dtype=inputs.dtype)
        narrow = wide if p is None else wide[:, : len(p)]
        start = (narrow, wide) if layer.mode == "LSTM" else (narrow,)
    state = start
    order = range(steps - 1, -1, -1) if suffix.endswith("_reverse") else range(steps)
    previous, inner, out = ([x] * steps for _ in range(3))  # each is replaced below
    for t in order:
        previous[t] = to_autocast_type(state[0])
        h = functional.linear(previous[t], u, c) + extra[:, t]
        state = CELLS[layer.mode](inputs[:, t], h, state)
        if projected is not None:
            inner[t] = to_autocast_type(state[0])
            state = (functional.linear(inner[t], p) + projected[:, t], *state[1:])
        out[t] = state[0]
    states.extend(previous)
    cells.extend(inner if projected is not None else ())
    return torch.stack(out, 1), state


RECURRENT = {nn.LSTM: run_recurrent, nn.GRU: run_recurrent, nn.RNN: run_recurrent}
