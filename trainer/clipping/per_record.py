"""Run any module one record at a time, for per-record gradients without a kernel.

A module with its own use of parameters (a scale, a class token, a position bias, experts) is run
by ``vmap`` over the records, each with its own copy of those parameters. The result for a record
is then a function of that record alone, by construction, and the gradient of a copy is that
record's gradient. Layers inside the module that have a kernel leave the ``vmap`` and run for all
records at once. A module that ``vmap`` cannot run, because its control flow depends on data, is run
in a loop over the records, with copies of all parameters inside it.

The gradients of those parameters are formed in full: parameters times records of the microbatch.
This is little for scales, tokens and biases. For large tensors use a smaller microbatch, or
register a kernel (``affidavit.trainer.clipping.layer_registry``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from affidavit.trainer.clipping.ghost_norm import DenseFactors
from affidavit.trainer.clipping.hooks import GradientHook, Microbatch
from affidavit.trainer.clipping.layers import Gradients, outside_autocast
from affidavit.trainer.distributed.shards import is_sharded
from affidavit.trainer.errors import MixedRecords, UnsupportedModel


class RecordCopies(Function):
    """A parameter repeated for each record, (n, *shape); the hook receives its gradients."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, records: int, hook: GradientHook) -> Tensor:
        """Expand the parameter, without copying it."""
        ctx.hook = hook
        return parameter.expand(records, *parameter.shape)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Hand each record's gradient to the hook."""
        item = grad if grad.ndim > 1 else grad.unsqueeze(1)
        ctx.hook.receive(DenseFactors(item), len(item))
        return None, None, None


class OutsideVmap(Function):
    """A function of tensors that leaves the surrounding ``vmap`` and sees all records at once."""

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *values: Tensor) -> tuple[Tensor, ...]:
        """Run the function; never reached inside ``vmap``, where a value belongs to a record."""
        return run(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: ``run`` has its own graph."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, run: Callable[..., tuple[Tensor, ...]], *values: Tensor
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Run the function on values whose first dimension is the records, (n, ...)."""
        batches = [
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for dim, value in zip(in_dims[1:], values, strict=True)
        ]
        result = run(*batches)
        return result, tuple(0 for _ in result)


def run_outside_vmap(
    run: Callable[..., Any], microbatch: Microbatch, inputs: Any, *, rows: bool
) -> Any:
    """Call ``run(*args, **kwargs)`` outside of the current ``vmap``; ``inputs`` are (args, kwargs).

    ``run`` gets and returns tensors (n, ...). With ``rows``, tensors with rows of a record,
    (k, ...), become (n k, ...), and the results are split into rows again.
    """
    flat, spec = tree_flatten(inputs)
    places = [place for place, value in enumerate(flat) if isinstance(value, Tensor)]
    assert microbatch.anchor is not None  # set when the vmap began
    shapes: list[Any] = []

    def outside(*values: Tensor) -> tuple[Tensor, ...]:
        filled = list(flat)
        for place, value in zip(places, values[1:], strict=True):
            filled[place] = value.flatten(0, 1) if rows and value.ndim > 2 else value
        args, kwargs = tree_unflatten(filled, spec)
        with microbatch.outside_vmap():
            result, shape = tree_flatten(run(*args, **kwargs))
        shapes.append((shape, [isinstance(item, Tensor) for item in result], result))
        wide = rows and any(value.ndim > 2 for value in values[1:])
        tensors = [
            _split_records(item, microbatch.records) if wide else item
            for item in result
            if _is_tensor(item)
        ]
        # The module may write into a layer's result, which autograd forbids for a view here.
        return tuple(item.clone() if item._is_view() else item for item in tensors)

    result = iter(OutsideVmap.apply(outside, microbatch.anchor, *(flat[place] for place in places)))
    shape, tensors, others = shapes[-1]
    values = [
        next(result) if is_tensor else other
        for is_tensor, other in zip(tensors, others, strict=True)
    ]
    return tree_unflatten(values, shape)


class _BatchedAttention(TorchFunctionMode):
    """Run attention inside a ``vmap`` for all records at once.

    The fast attention kernels have no ``vmap`` rule.
    """

    def __init__(self, microbatch: Microbatch) -> None:
        super().__init__()
        self._microbatch = microbatch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call any other function unchanged."""
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention or not self._microbatch.in_vmap:
            return func(*args, **kwargs)
        return self._run_attention(*args, **kwargs)

    def _run_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Tensor:
        microbatch, anchor = self._microbatch, self._microbatch.anchor
        assert anchor is not None  # set when the vmap began
        masks = () if attn_mask is None else (attn_mask,)

        def outside(_: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            q, k, v = (item.flatten(0, -4) for item in values[:3])
            mask = None
            if masks:
                (mask,) = values[3:]
                missing = values[0].ndim - mask.ndim
                mask = mask.view(len(mask), *([1] * missing), *mask.shape[1:])
                mask = mask.expand(*values[0].shape[:-3], *mask.shape[-3:]).flatten(0, -4)
            with microbatch.outside_vmap():
                result = functional.scaled_dot_product_attention(q, k, v, mask, *rest, **kwargs)
            return (result.view(*values[0].shape[:-1], v.shape[-1]),)

        (result,) = OutsideVmap.apply(outside, anchor, query, key, value, *masks)
        return result


def first_line(error: Exception) -> str:
    """Return the first line of the message, or the class name if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _hides_tensors(value: Any) -> bool:
    return not _is_tensor(value) and any(map(_is_tensor, getattr(value, "__dict__", {}).values()))


def _split_records(value: Tensor, records: int) -> Tensor:
    return value.unflatten(0, (records, -1))


@dataclass(eq=False)
class PerRecordModule:
    """A module that is run one record at a time, with hooks for its parameters.

    ``hooks`` has the hooks by the holding module and the parameter's name in it. ``has_no_kernels``
    tells that no module inside has a kernel. ``observed_sizes`` has the size of each input's first
    dimension at two numbers of records, which shows whether the input belongs to records.
    """

    path: str
    module: nn.Module
    hooks: dict[tuple[nn.Module, str], GradientHook]
    has_no_kernels: bool
    observed_sizes: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    uses_loop: bool = False

    @property
    def _description(self) -> str:
        return f"{self.path or 'the model'} ({type(self.module).__name__})"

    def observe(self, inputs: Any, records: int) -> None:
        """Note the sizes of the inputs at this number of records."""
        for place, value in enumerate(tree_flatten(inputs)[0]):
            if isinstance(value, Tensor) and value.ndim:
                self.observed_sizes.setdefault(place, set()).add((records, len(value)))

    def _has_records(self, place: int, value: Any, records: int) -> bool:
        if not isinstance(value, Tensor) or not value.ndim or len(value) % records:
            return False
        observed_sizes = self.observed_sizes.get(place)
        if not observed_sizes or len({of for of, _ in observed_sizes}) < 2:
            return len(value) == records
        return (
            all(rows % of == 0 for of, rows in observed_sizes)
            and len({r // n for n, r in observed_sizes}) == 1
        )

    def run(self, microbatch: Microbatch, inputs: Any, *, all_inputs: bool = False) -> Any:
        """Run the module on ``inputs``, (args, kwargs), with the records in the first dimension.

        With ``all_inputs``, all tensors belong to records, (n, ...), and so do the results: the
        module runs outside of the ``vmap`` of a module around it.
        Raises ``MixedRecords`` if it cannot run one record at a time.
        """
        flat, spec = tree_flatten(inputs)
        places = [
            place
            for place, value in enumerate(flat)
            if (
                _is_tensor(value)
                if all_inputs
                else self._has_records(place, value, microbatch.records)
            )
        ]
        if not places and not all_inputs:
            raise MixedRecords(
                f"{self._description}: none of its inputs has one row for "
                "each record, so per-record gradients are unknown. Give it the "
                "records in the first dimension, and transpose its output where a loss has time "
                "first (ctc_loss); pad them to one length instead of packing several into a row.",
                path=self.path,
            )
        rows = [flat[place] for place in places]
        rows = rows if all_inputs else [_split_records(item, microbatch.records) for item in rows]
        if any(is_sharded(holder._parameters[name]) for holder, name in self.hooks):
            raise UnsupportedModel(
                f"{self._description} uses parameters of a module inside it "
                "that fully_shard or parallelize_module sharded separately. Do not shard it."
            )
        copies = [
            RecordCopies.apply(holder._parameters[name], microbatch.records, hook)
            for (holder, name), hook in self.hooks.items()
        ]
        for hook in self.hooks.values():
            hook.count()

        def run_record(
            anchor: Tensor | None, values: Sequence[Tensor], parameters: Sequence[Tensor]
        ) -> Any:
            filled = list(flat)
            for place, value in zip(places, values, strict=True):
                filled[place] = value
            args, kwargs = tree_unflatten(filled, spec)
            before = microbatch.in_vmap, microbatch.anchor
            microbatch.in_vmap, microbatch.anchor = anchor is not None, anchor
            try:
                with (
                    self._replace_parameters(parameters),
                    _BatchedAttention(microbatch),
                    self._math_attention(),
                ):
                    return type(self.module).forward(self.module, *args, **kwargs)
            finally:
                microbatch.in_vmap, microbatch.anchor = before

        result, spec = self._run_vmap(run_record, microbatch, rows, copies)
        if not all_inputs:
            result = [_merge_records(item) if _is_tensor(item) else item for item in result]
        return tree_unflatten(result, spec)

    def _run_vmap(
        self,
        run_record: Callable[..., Any],
        microbatch: Microbatch,
        rows: list[Tensor],
        copies: list[Tensor],
    ) -> tuple[list[Any], Any]:
        shapes: list[Any] = []
        device = (*rows, *copies)[0].device

        def run_tensors(anchor: Tensor | None, values: Any, parameters: Any) -> tuple[Tensor, ...]:
            result, spec = tree_flatten(run_record(anchor, values, parameters))
            if hidden := [item for item in result if _hides_tensors(item)]:
                raise MixedRecords(
                    f"{self._description} returns a {type(hidden[0]).__name__}, whose tensors are "
                    "hidden. Return tensors, or tuples or dictionaries of them.",
                    path=self.path,
                )
            shapes.append((spec, result))
            return tuple(item for item in result if isinstance(item, Tensor))

        if not self.uses_loop:
            try:
                anchor = torch.zeros(microbatch.records, device=device)
                with _silence_fallback_warnings(), _forbid_recomputation():
                    out = vmap(run_tensors, randomness="different")(anchor, rows, copies)
                return _fill_tensors(iter(out), *shapes[-1])
            except MixedRecords:
                raise
            except (RuntimeError, ValueError, TypeError) as error:
                if not self.has_no_kernels:
                    raise self.build_error(error) from error
                self.uses_loop = True
        singles = zip(*(item.unbind(0) for item in (*rows, *copies)), strict=True)
        parts = [run_tensors(None, item[: len(rows)], item[len(rows) :]) for item in singles]
        return _fill_tensors(
            iter([torch.stack(part) for part in zip(*parts, strict=True)]), *shapes[-1]
        )

    def build_error(self, error: Exception) -> MixedRecords:
        """Return the error for a module that fails with ``error`` one record at a time."""
        return MixedRecords(
            f"{self._description} cannot be run one record at a time: {first_line(error)} Register "
            "a kernel for it, or freeze its own parameters.",
            path=self.path,
            kernels_failed=not self.has_no_kernels,
        )

    def _math_attention(self) -> AbstractContextManager[Any]:
        # MultiheadAttention calls a function that ``_BatchedAttention`` does not intercept.
        is_attention = isinstance(self.module, nn.MultiheadAttention)
        return sdpa_kernel(SDPBackend.MATH) if is_attention else nullcontext()

    @contextmanager
    def _replace_parameters(self, values: Sequence[Any]) -> Iterator[None]:
        before: list[Any] = [holder._parameters[name] for holder, name in self.hooks]
        for (holder, name), value in zip(self.hooks, values, strict=True):
            holder._parameters[name] = value
        try:
            yield
        finally:
            for (holder, name), value in zip(self.hooks, before, strict=True):
                holder._parameters[name] = value


@contextmanager
def _silence_fallback_warnings() -> Iterator[None]:
    """Silence warnings that a function without a ``vmap`` rule runs record by record."""
    enable: Any = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    enable(False)
    try:
        yield
    finally:
        enable(True)


@contextmanager
def _forbid_recomputation() -> Iterator[None]:
    """Raise an error where a checkpoint begins: it would recompute activations after the vmap."""
    hooks: Any = torch._C._autograd
    before = hooks._saved_tensors_hooks_get_disabled_error_message()
    hooks._saved_tensors_hooks_disable("activations are recomputed after vmap.", False)
    try:
        yield
    finally:
        hooks._saved_tensors_hooks_enable()
        if before is not None:
            hooks._saved_tensors_hooks_disable(before, False)


def _fill_tensors(out: Iterator[Tensor], spec: Any, result: list[Any]) -> tuple[list[Any], Any]:
    return [next(out) if _is_tensor(item) else item for item in result], spec


def _merge_records(value: Tensor) -> Tensor:
    return value.flatten(0, 1) if value.ndim > 1 else value
