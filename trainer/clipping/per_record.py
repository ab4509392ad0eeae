"""Any module, one record at a time: what no kernel knows still has per-record gradients.

A module that uses parameters in a way of its own (a scale, a class token, a bias of positions,
experts) is run by ``vmap`` over the records, each with a copy of those parameters. What it
computes for a record is then a function of that record alone, by construction, and the gradient of
a copy is that record's. Layers inside it that have a kernel leave the ``vmap`` and run for all
records at once. A module that ``vmap`` cannot run (its control flow depends on data) is run record
by record, with copies of all parameters inside it.

The cost: a microbatch's gradients of those parameters are formed in full, as many numbers as
parameters times records. For scales, tokens and biases that is little. For large tensors use a
smaller microbatch, or register a kernel (``affidavit.trainer.clipping.kernels``).
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
from affidavit.trainer.clipping.hooks import GradientHook, Lot, MixedRecords
from affidavit.trainer.clipping.layers import Gradients, outside_autocast
from affidavit.trainer.clipping.requirements import UnsupportedModel
from affidavit.trainer.distributed.shards import is_sharded


class Copies(Function):
    """A parameter once for each record, (n, *shape); the gradient of the copies is caught."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, records: int, tap: GradientHook) -> Tensor:
        """Views, not copies: nothing is written."""
        ctx.tap = tap
        return parameter.expand(records, *parameter.shape)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Every record's gradient as it is."""
        item = grad if grad.ndim > 1 else grad.unsqueeze(1)
        ctx.tap.receive(DenseFactors.of(item), len(item))
        return None, None, None


class Outside(Function):
    """A function of tensors that leaves the ``vmap`` around it and sees every record at once."""

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *values: Tensor) -> tuple[Tensor, ...]:
        """Never reached from within ``vmap``, where one of ``values`` is of a record."""
        return run(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept here: ``run`` has a graph of its own."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, run: Callable[..., tuple[Tensor, ...]], *values: Tensor
    ) -> tuple[tuple[Tensor, ...], Any]:
        """``run`` on values whose first dimension is the records, (n, ...)."""
        whole = [
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for dim, value in zip(in_dims[1:], values, strict=True)
        ]
        result = run(*whole)
        return result, tuple(0 for _ in result)


def leave(run: Callable[..., Any], lot: Lot, inputs: Any, *, rows: bool) -> Any:
    """``run(*args, **named)`` outside of the ``vmap`` at hand; ``inputs`` are (args, named).

    ``run`` sees (n, ...) and returns the like. With ``rows`` what has rows of a record, (k, ...),
    becomes (n k, ...), and is rows again in what is returned.
    """
    flat, spec = tree_flatten(inputs)
    places = [place for place, value in enumerate(flat) if isinstance(value, Tensor)]
    assert lot.anchor is not None  # set where the vmap began
    shapes: list[Any] = []

    def outside(*values: Tensor) -> tuple[Tensor, ...]:
        filled = list(flat)
        for place, value in zip(places, values[1:], strict=True):
            filled[place] = value.flatten(0, 1) if rows and value.ndim > 2 else value
        args, named = tree_unflatten(filled, spec)
        with lot.left():
            result, shape = tree_flatten(run(*args, **named))
        shapes.append((shape, [isinstance(item, Tensor) for item in result], result))
        wide = rows and any(value.ndim > 2 for value in values[1:])
        tensors = [_rows(item, lot.records) if wide else item for item in result if _is(item)]
        # A module may write into what a layer returns, which autograd refuses of a view here.
        return tuple(item.clone() if item._is_view() else item for item in tensors)

    result = iter(Outside.apply(outside, lot.anchor, *(flat[place] for place in places)))
    shape, tensors, others = shapes[-1]
    whole = [next(result) if of else other for of, other in zip(tensors, others, strict=True)]
    return tree_unflatten(whole, shape)


class _Attention(TorchFunctionMode):
    """Attention inside a ``vmap``, for all records at once.

    Its fast kernels have no rule for ``vmap``.
    """

    def __init__(self, lot: Lot) -> None:
        super().__init__()
        self._lot = lot

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Anything else as it is."""
        named = kwargs or {}
        if func is not functional.scaled_dot_product_attention or not self._lot.inside:
            return func(*args, **named)
        return self._attended(*args, **named)

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        lot, anchor = self._lot, self._lot.anchor
        assert anchor is not None  # set where the vmap began
        masks = () if attn_mask is None else (attn_mask,)

        def outside(_: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            q, k, v = (item.flatten(0, -4) for item in values[:3])
            mask = None
            if masks:
                (mask,) = values[3:]
                missing = values[0].ndim - mask.ndim
                mask = mask.view(len(mask), *([1] * missing), *mask.shape[1:])
                mask = mask.expand(*values[0].shape[:-3], *mask.shape[-3:]).flatten(0, -4)
            with lot.left():
                result = functional.scaled_dot_product_attention(q, k, v, mask, *rest, **named)
            return (result.view(*values[0].shape[:-1], v.shape[-1]),)

        (result,) = Outside.apply(outside, anchor, query, key, value, *masks)
        return result


def first_line(error: Exception) -> str:
    """Of its message, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _hides_tensors(value: Any) -> bool:
    return not _is(value) and any(map(_is, getattr(value, "__dict__", {}).values()))


def _rows(value: Tensor, records: int) -> Tensor:
    return value.unflatten(0, (records, -1))


@dataclass(eq=False)
class Unit:
    """A module that is run one record at a time, with the parameters ``taps`` are of.

    ``taps`` has them by the module that holds them and their name in it; ``leaf`` says that no
    module inside it has a kernel. ``seen`` has the sizes of each input's first dimension at two
    numbers of records, from which it is known whether an input is of records at all.
    """

    path: str
    module: nn.Module
    taps: dict[tuple[nn.Module, str], GradientHook]
    leaf: bool
    seen: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    one_by_one: bool = False

    @property
    def _where(self) -> str:
        return f"{self.path or 'the model'} ({type(self.module).__name__})"

    def observe(self, inputs: Any, records: int) -> None:
        """Note the sizes of inputs at this number of records."""
        for place, value in enumerate(tree_flatten(inputs)[0]):
            if isinstance(value, Tensor) and value.ndim:
                self.seen.setdefault(place, set()).add((records, len(value)))

    def _of_records(self, place: int, value: Any, records: int) -> bool:
        if not isinstance(value, Tensor) or not value.ndim or len(value) % records:
            return False
        seen = self.seen.get(place)
        if not seen or len({of for of, _ in seen}) < 2:
            return len(value) == records
        return all(rows % of == 0 for of, rows in seen) and len({r // n for n, r in seen}) == 1

    def run(self, lot: Lot, inputs: Any, *, everything: bool = False) -> Any:
        """The module on ``inputs``, (args, named), with the records in the first dimension.

        ``everything`` is of records, (n, ...), and so is what is returned, where a module that is
        run one record at a time itself was left.
        Raises ``MixedRecords`` where it cannot be run for a record by itself.
        """
        flat, spec = tree_flatten(inputs)
        places = [
            place
            for place, value in enumerate(flat)
            if (_is(value) if everything else self._of_records(place, value, lot.records))
        ]
        if not places and not everything:
            raise MixedRecords(
                f"{self._where}: none of its inputs has one row for "
                "each record, so per-record gradients are unknown. Give it the "
                "records in the first dimension; pad them to one length instead of packing several "
                "into a row.",
                path=self.path,
            )
        rows = [flat[place] for place in places]
        rows = rows if everything else [_rows(item, lot.records) for item in rows]
        if any(is_sharded(holder._parameters[name]) for holder, name in self.taps):
            raise UnsupportedModel(
                f"{self._where} uses parameters of a module inside it "
                "that fully_shard or parallelize_module sharded separately. Do not shard it."
            )
        copies = [
            Copies.apply(holder._parameters[name], lot.records, tap)
            for (holder, name), tap in self.taps.items()
        ]
        for tap in self.taps.values():
            tap.count()

        def of_one(anchor: Tensor | None, values: Sequence[Tensor], own: Sequence[Tensor]) -> Any:
            filled = list(flat)
            for place, value in zip(places, values, strict=True):
                filled[place] = value
            args, named = tree_unflatten(filled, spec)
            held = lot.inside, lot.anchor
            lot.inside, lot.anchor = anchor is not None, anchor
            try:
                with self._standing_in(own), _Attention(lot), self._math_attention():
                    return type(self.module).forward(self.module, *args, **named)
            finally:
                lot.inside, lot.anchor = held

        result, spec = self._vmapped(of_one, lot, rows, copies)
        if not everything:
            result = [_joined(item) if _is(item) else item for item in result]
        return tree_unflatten(result, spec)

    def _vmapped(
        self, of_one: Callable[..., Any], lot: Lot, rows: list[Tensor], copies: list[Tensor]
    ) -> tuple[list[Any], Any]:
        shapes: list[Any] = []
        device = (*rows, *copies)[0].device

        def tensors(anchor: Tensor | None, values: Any, own: Any) -> tuple[Tensor, ...]:
            result, spec = tree_flatten(of_one(anchor, values, own))
            if hidden := [item for item in result if _hides_tensors(item)]:
                raise MixedRecords(
                    f"{self._where} returns a {type(hidden[0]).__name__}, whose tensors are "
                    "hidden. Return tensors, or tuples or dictionaries of them.",
                    path=self.path,
                )
            shapes.append((spec, result))
            return tuple(item for item in result if isinstance(item, Tensor))

        if not self.one_by_one:
            try:
                anchor = torch.zeros(lot.records, device=device)
                with _without_performance_warnings(), _without_recomputation():
                    out = vmap(tensors, randomness="different")(anchor, rows, copies)
                return _filled(iter(out), *shapes[-1])
            except MixedRecords:
                raise
            except (RuntimeError, ValueError, TypeError) as error:
                if not self.leaf:
                    raise self.not_run(error) from error
                self.one_by_one = True
        singles = zip(*(item.unbind(0) for item in (*rows, *copies)), strict=True)
        parts = [tensors(None, item[: len(rows)], item[len(rows) :]) for item in singles]
        return _filled(iter([torch.stack(part) for part in zip(*parts, strict=True)]), *shapes[-1])

    def not_run(self, error: Exception) -> MixedRecords:
        """That ``error`` came of running the module one record at a time."""
        return MixedRecords(
            f"{self._where} cannot be run one record at a time: {first_line(error)} Register a "
            "kernel for it, or freeze its own parameters.",
            path=self.path,
            whole=not self.leaf,
        )

    def _math_attention(self) -> AbstractContextManager[Any]:
        # Its attention is called where ``_Attention`` does not see it.
        whole = isinstance(self.module, nn.MultiheadAttention)
        return sdpa_kernel(SDPBackend.MATH) if whole else nullcontext()

    @contextmanager
    def _standing_in(self, own: Sequence[Any]) -> Iterator[None]:
        before: list[Any] = [holder._parameters[name] for holder, name in self.taps]
        for (holder, name), value in zip(self.taps, own, strict=True):
            holder._parameters[name] = value
        try:
            yield
        finally:
            for (holder, name), value in zip(self.taps, before, strict=True):
                holder._parameters[name] = value


@contextmanager
def _without_performance_warnings() -> Iterator[None]:
    """A function without a rule for ``vmap`` runs record by record, which is what is promised."""
    enable: Any = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    enable(False)
    try:
        yield
    finally:
        enable(True)


@contextmanager
def _without_recomputation() -> Iterator[None]:
    """An error where a checkpoint begins: vmap is over where it recomputes activations."""
    hooks: Any = torch._C._autograd
    before = hooks._saved_tensors_hooks_get_disabled_error_message()
    hooks._saved_tensors_hooks_disable("activations are recomputed after vmap.", False)
    try:
        yield
    finally:
        hooks._saved_tensors_hooks_enable()
        if before is not None:
            hooks._saved_tensors_hooks_disable(before, False)


def _filled(out: Iterator[Tensor], spec: Any, result: list[Any]) -> tuple[list[Any], Any]:
    return [next(out) if _is(item) else item for item in result], spec


def _joined(value: Tensor) -> Tensor:
    return value.flatten(0, 1) if value.ndim > 1 else value
