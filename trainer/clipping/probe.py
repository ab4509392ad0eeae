"""A probe: run a model to see whether it keeps records apart.

A layer can be called with time, not records, in its first dimension; a loss can compare
the records of a lot; a module can keep running sums of what it sees. Before training,
``probe`` runs the model on a few made-up records and refuses it, by name, where

* the loss of a record changes when another record is replaced, with the same random draws, or
  where there are fewer or many more (in evaluation mode, and in training mode where that draws
  nothing; what evaluation mode draws is then the same for every record), or its gradient does;
* the loss of one record has a gradient in another's row, whatever is run one record at a time,
  a record's gradient changes with the losses of others, or is not the one that autograd takes
  of that record by itself;
* a second pass has other losses, or a buffer or parameter changes in a pass: something of the
  data stays;
* a trainable tensor is not used at all, or one that is not the model's is.

It can only falsify: a model may mix records in a way that these inputs do not show. Give
it records that differ. Gradients, the training mode, buffers and the random state are left
as they were.

>>> from affidavit.trainer.clipping.private import BlockSpec
>>> model = nn.Linear(3, 1, bias=False)
>>> private = PrivateModel(model, [BlockSpec(name="all", clip_norm=1.0, names=("weight",))])
>>> x = torch.arange(9.0).view(3, 3)
>>> probe(private, lambda rows: model(x[rows]).square().sum(1))
{'weight': 1}
>>> probe(private, lambda rows: (model(x[rows]) - model(x[rows]).mean(0)).square().sum(1))
Traceback (most recent call last):
    ...
affidavit.trainer.clipping.hooks.MixedRecords: the loss of a record changes by ...
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from affidavit.trainer.clipping.hooks import MixedRecords
from affidavit.trainer.clipping.per_record import first_line
from affidavit.trainer.clipping.private import PrivateModel, evaluating
from affidavit.trainer.clipping.requirements import UnsupportedModel
from affidavit.trainer.distributed.shards import is_sharded
from affidavit.trainer.numerics import NARROW

FEWER, MORE = 2, 3
"""How many records the probe runs."""

ROWS, REPLACED = torch.arange(MORE), torch.tensor([0, 1, 0])
"""The records that it runs, and the same with another in place of the last."""

SEEDS = 8
"""Draws for which records are tried: what mixes them may do so now and then only."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
NARROW_TOLERANCE = 0.05
"""How far a loss may move, relative to itself, by another order of summation alone."""

Losses = Callable[[Tensor], Tensor]
"""The losses, shape (n,), of the made-up records with these numbers, (n,), below ``MORE``."""


def probe(
    private: PrivateModel, losses: Losses, *, alone: Losses | None = None, most: int = MORE
) -> dict[str, int]:
    """How often each trainable tensor is used in a pass, by name.

    ``alone`` is ``losses`` with a batch made of these records only, whatever it is padded to, and
    ``most`` the size of the largest microbatch. Raises ``MixedRecords`` and ``UnsupportedModel``.
    """
    drawn, alone = _drawn(losses, nullcontext), alone or losses
    crowd = ROWS.repeat(-(-most // MORE))[: max(most, MORE)]
    crowds = [(crowd + first) % MORE for first in range(MORE)]  # a record by itself ties with none
    with _left_as_it_was(private.model):
        fresh, before = random_state(), _state(private.model)
        narrow = private.observe(partial(losses, ROWS), records=MORE)
        narrow |= any(item.dtype in NARROW for item in private.model.parameters())
        private.require_unwritten(
            name
            for name, item in _state(private.model).items()
            if name not in before or not _same(item, before[name])
        )
        sharded = any(is_sharded(item) for item in private.model.parameters())
        with torch.enable_grad():
            first, second = drawn(ROWS), drawn(ROWS)
        if not first.requires_grad:
            raise UnsupportedModel(
                "the losses have no gradient: they are detached, integers, or computed without "
                "autograd. Return them as the model's outputs give them."
            )
        if not bool(first.isfinite().all()):
            raise UnsupportedModel("the loss of a record is nan or infinite. Return finite losses.")
        draws = random_state() != fresh
        if not sharded:  # fully_shard has two parameters for one tensor
            _require_own_tensors(private.model, _leaves(first), _leaves(second))
        with torch.no_grad():
            first = first.detach()
            _require_near(first, second, narrow, STATEFUL)
            for seed in range(SEEDS if draws else 1):
                one, other = (_drawn(losses, nullcontext, seed)(at) for at in (ROWS, REPLACED))
                _require_near(one[:FEWER], other[:FEWER], narrow, MIXED)
            if not draws:
                _require_near(first[:FEWER], losses(ROWS[:FEWER]), narrow, MIXED)
                for crowd in crowds:
                    _require_near(first[crowd], losses(crowd), narrow, CROWDED)
            with evaluating(private.model):
                whole = drawn(ROWS)
                if random_state() != fresh:
                    losses, alone = _drawn(losses, _DrawsByRow), _drawn(alone, _DrawsByRow)
                    whole = losses(ROWS)
                for row in ROWS:
                    _require_near(whole[row], alone(row[None]), narrow, MIXED)
                for crowd in crowds:
                    _require_near(whole[crowd], losses(crowd), narrow, CROWDED)
        tolerance = NARROW_TOLERANCE if narrow else TOLERANCE[torch.float32]
        _find_owners(private, drawn, tolerance, true=None if sharded else losses)
        gradients = private.gradients(partial(drawn, ROWS), records=MORE)
        others = private.gradients(partial(drawn, REPLACED), records=MORE)
        _require_unmoved(gradients, others, ROWS[:FEWER], tolerance)
        with evaluating(private.model):
            gradients = private.gradients(partial(losses, ROWS), records=MORE)
            for row in ROWS:
                others = private.gradients(partial(alone, row[None]), records=1)
                _require_unmoved(gradients, others, row[None], tolerance)
        result = private.uses(partial(drawn, ROWS), records=MORE)
        with evaluating(private.model), torch.no_grad():
            _require_near(
                private.losses(partial(losses, ROWS), records=MORE),
                whole,
                narrow,
                "when its layers are run one record at a time: a module compares records, or "
                "takes an input of another shape for records",
            )
    return result


MIXED = (
    "when another record is replaced or left out of the lot: the model, the loss or its padding "
    "mixes records (statistics or comparisons over the batch, packed sequences)"
)
CROWDED = (
    "in a microbatch of full size: records displace each other (experts with a capacity for all of "
    "them)"
)
STATEFUL = "in a second pass with the same random draws: the model keeps state of its inputs"


def _require_own_tensors(
    model: nn.Module, first: dict[int, Tensor], second: dict[int, Tensor]
) -> None:
    """Raise ``UnsupportedModel`` where losses train what ``model`` does not have.

    Such a tensor is a leaf of both passes. A leaf of one is an activation.
    """
    for key in first.keys() & second.keys() - {id(item) for item in model.parameters()}:
        raise UnsupportedModel(
            f"the losses train a tensor of shape {tuple(first[key].shape)} that the model does not "
            "have, so it would get no noise. Make it a parameter of the model, or detach it."
        )


def _leaves(losses: Tensor) -> dict[int, Tensor]:
    """The tensors that a backward pass would leave a gradient in."""
    result: dict[int, Tensor] = {}
    seen: set[Any] = set()
    left: list[Any] = [losses.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            result[id(leaf)] = leaf
        left += [inner for inner, _ in node.next_functions]
    return result


BETWEEN = "a layer"
"""Any path that is the model's only by being in it."""


def _find_owners(
    private: PrivateModel, losses: Losses, tolerance: float, *, true: Losses | None
) -> None:
    """Each record's gradients in its own row, with as few modules run one by one as will do.

    They are compared with autograd's of ``true``. Raises ``MixedRecords`` and
    ``UnsupportedModel`` where none will do.
    """
    while True:
        try:
            for records in (FEWER, MORE):
                private.observe(partial(losses, ROWS[:records]), records=records)
            for records in (FEWER, MORE):
                private.require_own(
                    partial(losses, ROWS[:records]), records=records, tolerance=tolerance
                )
            if true is not None:
                with evaluating(private.model):
                    private.require_true(true, ROWS, tolerance=tolerance)
        except (MixedRecords, UnsupportedModel) as error:
            if not private.widen(error):
                raise
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # between layers, which gave something of another shape
            if not private.widen(MixedRecords(str(error), path=BETWEEN, whole=True)):
                raise MixedRecords(
                    f"the model runs by itself, but not for each record: {first_line(error)} Give "
                    "every module the records in the first dimension, and freeze the others."
                ) from error
        else:
            return


def _require_near(one: Tensor, other: Tensor, narrow: bool, why: str) -> None:
    moved = (one - other).abs().double() / (1e-30 + one.abs().double())
    tolerance = NARROW_TOLERANCE if narrow else TOLERANCE.get(one.dtype, NARROW_TOLERANCE)
    if not bool((moved <= tolerance).all()):
        raise MixedRecords(
            f"the loss of a record changes by {float(moved.max()):.1e} of itself {why}. Compute "
            "each record's loss from that record alone."
        )


def _require_unmoved(
    before: dict[str, Tensor], after: dict[str, Tensor], rows: Tensor, tolerance: float
) -> None:
    """Raise ``MixedRecords`` where the gradients of ``rows``, (m,), are not the first of ``after``.

    A loss may hide what its gradient shows: behind a last layer of zeros, say. Both have (2, n).
    """
    for name, item in before.items():
        sums, most = item[:, rows]
        if not bool(((sums - after[name][0, : len(rows)]).abs() <= tolerance * most).all()):
            raise MixedRecords(
                f"{name}: the gradient of a record changes {MIXED}. Compute each record's loss "
                "from that record alone."
            )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are equal, or one is not known."""
    if one is None or other is None:
        return True
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _state(model: nn.Module) -> dict[str, Tensor | None]:
    """Buffers, and the sum of each parameter; None for one that is sharded now."""
    state: dict[str, Tensor | None] = {name: item.clone() for name, item in model.named_buffers()}
    for name, item in model.named_parameters():
        if item.is_floating_point() and item.dtype.itemsize > 1:
            state[name] = None if is_sharded(item) else item.detach().sum()
    return state


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    _seed_torch(seed)


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def random_state() -> Any:
    """What the next draws of Python, NumPy and PyTorch follow from; to be compared."""
    numpys: Any = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torchs = [item.numpy().tobytes() for item in (torch.get_rng_state(), *devices)]
    return random.getstate(), numpys[1].tobytes(), numpys[2], torchs


def _drawn(losses: Losses, way: Callable[[], AbstractContextManager[Any]], seed: int = 0) -> Losses:
    """``losses`` with the same random draws each time, in ``way``."""

    @wraps(losses)
    def run(rows: Tensor) -> Tensor:
        _seed(seed)
        with way():
            return losses(rows)

    return run


class _DrawsByRow(TorchDispatchMode):
    """What is drawn depends on how often it was before, and in each row on that row alone."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Anything else as it is."""
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **named)
        self._calls += 1
        _seed_torch(self._calls)
        named |= zip((item.name for item in func._schema.arguments), args, strict=False)
        tensors = [item for item in named.values() if isinstance(item, Tensor)]
        rows: Any = named["size"] if "size" in named else tensors[0].shape if tensors else ()
        if len(func._schema.returns) != 1 or not len(rows):
            return func(**named)

        def row(place: int) -> Any:
            _seed_torch(self._calls)
            own = {
                name: item[place : place + 1]
                if isinstance(item, Tensor) and item.shape[:1] == rows[:1]
                else item
                for name, item in named.items()
            }
            return func(**own | ({"size": [1, *rows[1:]]} if "size" in named else {}))

        drawn = [row(place) for place in range(rows[0])]
        return tensors[0] if func._schema.is_mutable else torch.cat(drawn)


@contextmanager
def same_draws(seed: int) -> Iterator[None]:
    """What Python, NumPy and PyTorch draw from ``seed``; later draws are as without it."""
    draws = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            _seed(seed)
            yield
        finally:
            random.setstate(draws[0])
            np.random.set_state(draws[1])


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    state = {name: item.clone() for name, item in model.named_buffers()}
    with same_draws(0):
        try:
            yield
        finally:
            for name, item in model.named_buffers():
                if name in state:
                    item.data.copy_(state[name])
