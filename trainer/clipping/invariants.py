"""What the probe established, held in every microbatch of a run.

A probe sees the model and its losses before the first step. Later a switch may bring in a layer, a
term or a hook, and a mask may pick other rows. So each microbatch is compared with what was
known before it:

* ``read_graph`` walks the autograd graph once. It finds tensors that would get a gradient and are
  not the run's (``ForeignLeaves``), and counts the operations. A graph that no earlier microbatch
  had, like a changed attribute of a module or another number of random draws, means that the
  program may have changed.
* ``RowTracker`` follows the rows that a mask picks to the layers that take them for records.
* ``Reprobing`` decides which microbatches are probed again, by ``PrivateModel``: those whose
  program may have changed, and others at random.

A microbatch is probed again by a second pass with the same random draws, in which others take the
place of all records but one, drawn at random, or of a half of them. The losses of those that stay
must stay, the gradient of that one must reach no other record's rows, and what it adds to the sums
must not exceed its clip norm. In some of these passes its gradient must be what it was. For a new
program that draws nothing, another pass has the records in other places, and one record less.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from affidavit.trainer.errors import MixedRecords, UnsupportedModel

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
HALF_TOLERANCE = 0.05
"""Relative change of a loss that another order of summation may cause."""

REPROBED_SHARE = 1 / 96
"""Share of the microbatches that are probed again at random. Each costs as much as 1.6 to 2."""

FIRST_REPROBED = 2
"""Microbatches at the beginning that are probed again; the k-th after them with this over k."""

GRADIENTS_SHARE = 1 / 4
"""Share of these in which the gradient of a record is compared too, which takes another pass."""

PROGRAMS, PROGRAMS_SHARE = 8, 1 / 512
"""Changes of each kind that are probed at once: so many, and later so large a share."""

NOISE_MESSAGE = "so it would get no noise. Make it a parameter of the model, or detach it."

ACCUMULATE = "AccumulateGrad"


def relative_tolerance(dtype: torch.dtype, *, is_half: bool) -> float:
    """Return the relative change of a loss of ``dtype`` that rounding may cause."""
    return HALF_TOLERANCE if is_half else TOLERANCE.get(dtype, HALF_TOLERANCE)


def read_graph(losses: Tensor) -> tuple[dict[int, Tensor], int]:
    """Return the tensors in which a backward pass leaves a gradient, and a hash of the graph.

    Equal hashes mean equally many operations of each kind after each other kind. ``losses`` have
    any shape.
    """
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    pairs: list[tuple[type, type]] = []
    pending: list[Any] = [] if losses.grad_fn is None else [losses.grad_fn]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = type(node)
        if kind.__name__ == ACCUMULATE:
            leaves[id(node.variable)] = node.variable
            continue
        for inner, _ in node.next_functions:
            if inner is not None:
                pairs.append((kind, type(inner)))
                pending.append(inner)
    return leaves, hash(frozenset(Counter(pairs).items()))


class ForeignLeaves:
    """Tensors outside of the run that get gradients of raw losses.

    An activation that requires a gradient is one too, and lives for one pass. Its gradient is
    discarded, so that no raw gradient outlasts a pass even if it is none.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        self._known = {id(item) for item in known}
        self._earlier: dict[int, Any] = {}
        self._now: list[Tensor] = []

    def note(self, leaves: dict[int, Tensor]) -> None:
        """Note the ``leaves`` of a pass, of any shape, before its backward pass.

        Raises ``UnsupportedModel`` for parameters, and for tensors of an earlier pass.
        """
        self._now = [item for key, item in leaves.items() if key not in self._known]
        for item in self._now:
            earlier = self._earlier.get(id(item))
            if isinstance(item, nn.Parameter) or (earlier is not None and earlier() is item):
                raise foreign_tensor(item)

    def discard_gradients(self) -> None:
        """Discard the gradients of the noted leaves, after the backward pass."""
        self._earlier = {key: item for key, item in self._earlier.items() if item() is not None}
        for item in self._now:
            if item.grad is not None:
                item.grad = None
                self._earlier[id(item)] = weakref.ref(item)
        self._now = []


def foreign_tensor(tensor: Tensor) -> UnsupportedModel:
    """Return the error for a trained ``tensor`` of any shape that the model does not have."""
    return UnsupportedModel(
        f"the losses train a tensor of shape {tuple(tensor.shape)} that the model does not "
        f"have, {NOISE_MESSAGE}",
        code="foreign_tensor",
    )


ROWS_OF_FIRST = ("index_add", "index_copy", "index_put", "index_fill", "scatter", "copy_")
"""Operations, by a part of their name, whose result has the rows of their first argument."""


class RowTracker(TorchDispatchMode):
    """Follows rows that were picked by their values, of a microbatch of ``records`` records.

    ``sizes`` has the numbers of rows that were picked. Tensors are known by their storage, because
    views are other objects here. They are held until the pass ends, so that no storage returns.
    """

    supports_higher_order_operators = True

    def __init__(self, records: int) -> None:
        super().__init__()
        self.sizes: set[int] = set()
        self._records = records
        self._picked: dict[int, tuple[Tensor, int, bool]] = {}
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow nothing in the block: a module runs there one record at a time."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def find_picked(self, value: Tensor) -> bool | None:
        """Return whether each record has equally many rows of ``value``; None if none was picked.

        Shape (rows, ...).
        """
        if not value.ndim or not (key := _storage_key(value)) or key not in self._picked:
            return None
        _, rows, is_even = self._picked[key]
        return is_even if len(value) and rows % len(value) == 0 else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operation unchanged."""
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        is_even = self._picks(func, args)
        if is_even is not None:
            for item in tree_leaves(result):
                if isinstance(item, Tensor) and item.ndim:
                    self.sizes.add(len(item))
                    self._note(item, is_even)
        elif self._picked:
            self._follow(func, args, kwargs, result)
        return result

    def _picks(self, func: Any, args: Any) -> bool | None:
        """Return whether ``func`` picks equally many rows of each record; None if it picks none."""
        if func is torch.ops.aten.index.Tensor:
            masks = [
                item
                for item in args[1]
                if item is not None and item.dtype in (torch.bool, torch.uint8)
            ]
            if not masks:
                return None
            return self._is_even(masks[0]) if args[1][0] is masks[0] else False
        if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
            return None
        if func in (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default):
            return self._is_even(args[-1])
        return False

    def _is_even(self, mask: Tensor) -> bool:
        if not mask.ndim or not len(mask) or len(mask) % self._records:
            return False
        counts = (mask != 0).reshape(self._records, -1).sum(1)
        return bool((counts == counts[0]).all())

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs = args[:1] if any(part in func.name() for part in ROWS_OF_FIRST) else (args, kwargs)
        for value in tree_leaves(inputs):
            if isinstance(value, Tensor) and (is_even := self.find_picked(value)) is not None:
                for item in tree_leaves(result):
                    if isinstance(item, Tensor) and item.ndim and len(item) == len(value):
                        self._note(item, is_even)

    def _note(self, item: Tensor, is_even: bool) -> None:
        if not (key := _storage_key(item)):
            return
        before = self._picked.get(key)
        rows = len(item) if before is None else before[1]
        self._picked[key] = item, rows, is_even and (before is None or before[2])


TOTALS = ("sum", "mean", "count_nonzero")


class RowTotals(TorchDispatchMode):
    """Notes the totals of rows, sums and counts over the first axis: the rows of each, in order.

    Where ``left_out`` has a number, so many of the last rows are taken for zeros.
    """

    supports_higher_order_operators = True

    def __init__(self, left_out: Sequence[int] = ()) -> None:
        super().__init__()
        self.rows: list[int] = []
        self._left_out = left_out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operation unchanged, unless it forms a total that leaves rows out."""
        result = func(*args, **(kwargs or {}))
        if func._schema.name.partition("::")[2] not in TOTALS or not args[0].ndim:
            return result
        axis = args[1] if len(args) > 1 else ()
        axes = {axis} if isinstance(axis, int) else {*(axis or ())}
        if result.ndim and not axes & {0, -args[0].ndim}:
            return result
        place = len(self.rows)
        self.rows.append(len(args[0]))
        if place < len(self._left_out) and (count := self._left_out[place]):
            values = args[0].clone()
            values[-count:] = 0
            return func(values, *args[1:], **(kwargs or {}))
        return result


def rows_of_each_record(rows: Sequence[int], more_rows: Sequence[int], records: int) -> list[int]:
    """Return how many rows of each total belong to a record; 0 if they are not the records'.

    ``rows`` are those of a pass over ``records`` records, ``more_rows`` of one with a record more.
    """
    if len(rows) != len(more_rows):
        return []
    return [
        more - few if few == records * (more - few) else 0
        for few, more in zip(rows, more_rows, strict=True)
    ]


def _storage_key(value: Tensor) -> int:
    """Return what identifies the storage of ``value``; 0 if it has none."""
    try:
        return value.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def require_even_rows(tracker: RowTracker | None, path: str, values: Sequence[Any]) -> bool:
    """Return whether a mask picked the rows of ``values``, equally many of each record.

    Raises ``MixedRecords`` if it picked more of one record than of another.
    """
    if tracker is None:
        return False
    picked = [tracker.find_picked(value) for value in values if isinstance(value, Tensor)]
    if False in picked:
        raise MixedRecords(
            f"{path or 'the model'}: a mask picked the rows that the layer sees, and more of one "
            "record than of another, so it is unknown whose a row is. Keep the records in the "
            "first dimension, and mask the losses instead of packing rows.",
            path=path,
            code="rows_of_a_mask",
        )
    return True in picked


PLAIN = (bool, int, float, str, NoneType, FunctionType, BuiltinFunctionType)
"""Types of attributes that switch what a module does."""


class PlainAttributes:
    """The attributes of ``PLAIN`` types of the modules of ``model``, ``training`` among them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sizes = -1
        self._watched: list[tuple[dict[str, Any], list[str]]] = []

    def _list(self) -> None:
        """List them again if a module got another one."""
        if self._sizes != sum(len(values) for values, _ in self._watched):
            self._watched = [
                (
                    layer.__dict__,
                    [key for key, item in layer.__dict__.items() if type(item) in PLAIN],
                )
                for layer in self._model.modules()
            ]
            self._sizes = sum(len(values) for values, _ in self._watched)

    def sign(self) -> int:
        """Return a hash of their values."""
        self._list()
        values = [values.get(key) for values, keys in self._watched for key in keys]
        try:
            return hash(tuple(values))
        except TypeError:  # a value that cannot be hashed took the place of a plain one
            return hash(tuple(map(id, values)))

    def copy(self) -> AttributeCopies:
        """Return all attributes of each module, with a copy of them."""
        self._list()
        return [(values, values.copy()) for values, _ in self._watched]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore all attributes after the block."""
        copies = self.copy()
        try:
            yield
        finally:
            for values, before in copies:
                _remove_new(values, before)
                values.update(before)


AttributeCopies = list[tuple[dict[str, Any], dict[str, Any]]]
"""The attributes of modules, each with a copy of them."""


def reset_attributes(copies: AttributeCopies) -> None:
    """Reset plain attributes to those of ``copies``, and remove those that are new since then.

    What a module kept of the records that it saw first, it then takes from the next ones.
    """
    for values, before in copies:
        _remove_new(values, before)
        values.update(
            {key: item for key, item in before.items() if type(item) in PLAIN and key != FORWARD}
        )


FORWARD = "forward"
"""The attribute by which a ``PrivateModel`` runs a layer."""


def _remove_new(values: dict[str, Any], before: dict[str, Any]) -> None:
    for key in [key for key in values if key not in before and key != FORWARD]:
        del values[key]


Draws = tuple[list[Tensor], Any]
"""The state of PyTorch's generators, and of Python's and NumPy's or None."""


class DrawState:
    """Saves and restores random draws, of Python and NumPy only once losses were seen to use them.

    Their states take longer to copy than a small model's pass.
    """

    def __init__(self) -> None:
        self._saves_others = False

    def save(self) -> Draws:
        """Return the state of the generators."""
        devices = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        others = (random.getstate(), np.random.get_state()) if self._saves_others else None
        return [torch.get_rng_state(), *devices], others

    def restore(self, draws: Draws) -> None:
        """Restore what ``save`` returned."""
        torch.set_rng_state(draws[0][0])
        for state in draws[0][1:]:
            torch.cuda.set_rng_state(state)
        if draws[1] is not None:
            random.setstate(draws[1][0])
            np.random.set_state(draws[1][1])

    def note_others(self, draws: Draws, before: Any) -> bool:
        """Return whether a pass drew from Python or NumPy after ``draws`` left their states out.

        ``before`` are their states before the pass. They are saved from now on.
        """
        drew = _places(before) != _places(other_states())
        self._saves_others |= drew
        return drew and draws[1] is None


def _counters(state: Tensor) -> Any:
    """Return the numbers in a generator's ``state``, (bytes,), that count what was drawn."""
    return state.numpy()[8:24].view(np.int64)


def other_states() -> tuple[Any, Any]:
    """Return the states of the generators of Python and NumPy."""
    return random.getstate(), np.random.get_state()


def _places(states: tuple[Any, Any]) -> tuple[int, ...]:
    return states[0][1][-1], states[1][2]


def count_draws(before: Draws, after: Draws) -> tuple[int, ...]:
    """Return how far each generator moved, up to multiples of the length of its state.

    Each state has shape (bytes,).
    """
    moved = [
        place
        for new, old in zip(after[0], before[0], strict=True)
        for place in (_counters(new) - _counters(old)).tolist()
    ]
    if before[1] is not None and after[1] is not None:
        pairs = zip(_places(after[1]), _places(before[1]), strict=True)
        moved += [last - first for last, first in pairs]
    return tuple(item % 624 for item in moved)


@dataclass(eq=False)
class Reprobing:
    """The microbatches that are probed again: some at random, and new programs.

    The random choice is no part of the run's keyed streams, so that it changes nothing else.
    """

    _random: random.Random = field(default_factory=random.SystemRandom)
    _known: dict[str, set[object]] = field(default_factory=dict)
    _passes: int = 0

    def count_passes(self, **program: object) -> int:
        """Return how often this microbatch is probed again, for other records each time.

        It ran as ``program``, signs by their kinds.
        """
        self._passes += 1
        is_new = False
        for kind, sign in program.items():
            known = self._known.setdefault(kind, set())
            if sign not in known and len(known) < PROGRAMS + self._passes * PROGRAMS_SHARE:
                known.add(sign)
                is_new = True
        share = max(REPROBED_SHARE, FIRST_REPROBED / self._passes)
        return 3 * is_new or int(self._random.random() < share)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reprobed:
    """A microbatch with ``losses`` (n,) that is probed again, with the draws that it began with.

    ``losses_of`` returns the losses of a microbatch of its records by their numbers.
    """

    losses_of: Callable[[Tensor], Tensor]
    losses: Tensor
    draws: Draws
    is_half: bool
    passes: int
    _random: random.Random = field(default_factory=random.SystemRandom)

    def replace_others(self, place: int, *, moves: bool) -> tuple[Tensor, int]:
        """Return the numbers of the records of a pass, (m,), and where the one at ``place`` is.

        All others are one of them, or about a half of them stay. If it ``moves``, they are shuffled
        and one is left out.
        """
        count, drawn = len(self.losses), self._random
        other = drawn.choice([row for row in range(count) if row != place or count < 3])
        if moves:
            rows = drawn.sample(range(count), count)
            if count > 1:
                rows.remove(other if other != place else 1 - place)
            return torch.tensor(rows), rows.index(place)
        keeps = drawn.getrandbits(1)
        rows = [row if keeps and drawn.getrandbits(1) else other for row in range(count)]
        rows[place] = place
        return torch.tensor(rows), place

    def compares_gradients(self) -> bool:
        """Return whether the gradient of a record is compared as well, in a pass of its own."""
        return self.passes > 1 or self._random.random() < GRADIENTS_SHARE
