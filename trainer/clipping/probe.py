"""A probe: run a model to see whether it keeps records apart.

A layer can be called with time, not records, in its first dimension; a loss can compare
the records of a lot; a module can keep running sums of what it sees. Before training,
``probe`` runs the model on a few made-up records and refuses it, by name, where

* the loss of a record changes when another record is replaced, with the same random draws, or
  where there are fewer or many more (in evaluation mode, and in training mode where that draws
  nothing);
* the loss of one record has a gradient in another's row, whatever is run one record at a time,
  a record's gradient changes with the losses of others, or is not the one that autograd takes
  of that record by itself;
* a second pass has other losses, or a buffer changes in a pass: something of the data stays;
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
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from affidavit.trainer.clipping.hooks import MixedRecords
from affidavit.trainer.clipping.private import PrivateModel, evaluating
from affidavit.trainer.clipping.requirements import UnsupportedModel
from affidavit.trainer.numerics import NARROW
from affidavit.trainer.shards import is_sharded

FEWER, MORE = 2, 3
"""How many records the probe runs."""

ROWS, REPLACED = torch.arange(MORE), torch.tensor([0, 1, 0])
"""The records that it runs, and the same with another in place of the last."""

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
    drawn, alone = _drawn_alike(losses), alone or losses
    crowd = ROWS.repeat(-(-most // MORE))[: max(most, MORE)]
    with _left_as_it_was(private.model):
        buffers = {name: item.clone() for name, item in private.model.named_buffers()}
        narrow = private.observe(partial(losses, ROWS), records=MORE)
        narrow |= any(item.dtype in NARROW for item in private.model.parameters())
        changed = [
            name
            for name, item in private.model.named_buffers()
            if name not in buffers or not _same(item, buffers[name])
        ]
        if changed:
            raise UnsupportedModel(
                f"{', '.join(sorted(changed))}: changes in a forward pass, and would store "
                "statistics of raw data. Remove such statistics."
            )
        sharded = any(is_sharded(item) for item in private.model.parameters())
        if not sharded:  # fully_shard has two parameters for one tensor
            _require_own_tensors(private.model, losses)
        with torch.no_grad():
            _require_near(drawn(ROWS), drawn(ROWS), narrow, STATEFUL)
            _require_near(drawn(ROWS)[:FEWER], drawn(REPLACED)[:FEWER], narrow, MIXED)
            if torch.equal(losses(ROWS), losses(ROWS)):
                _require_near(losses(ROWS)[:FEWER], losses(ROWS[:FEWER]), narrow, MIXED)
                _require_near(losses(ROWS)[crowd], losses(crowd), narrow, CROWDED)
            with evaluating(private.model):
                _require_near(losses(ROWS)[:FEWER], alone(ROWS[:FEWER]), narrow, MIXED)
                _require_near(losses(ROWS)[crowd], losses(crowd), narrow, CROWDED)
        tolerance = NARROW_TOLERANCE if narrow else TOLERANCE[torch.float32]
        _find_owners(private, drawn, tolerance, true=None if sharded else losses)
        result = private.uses(lambda: losses(ROWS), records=MORE)
        with evaluating(private.model), torch.no_grad():
            _require_near(
                private.losses(partial(losses, ROWS), records=MORE),
                losses(ROWS),
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


def _require_own_tensors(model: nn.Module, losses: Losses) -> None:
    """Raise ``UnsupportedModel`` where losses train what ``model`` does not have.

    Such a tensor is a leaf of two passes. A leaf of one is an activation.
    """
    own = {id(item) for item in model.parameters()}
    with torch.enable_grad():
        first, second = (_leaves(losses(ROWS)) for _ in range(2))
    for key in first.keys() & second.keys() - own:
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
                raise
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


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _drawn_alike(losses: Losses) -> Losses:
    """``losses`` with the same random draws each time."""

    @wraps(losses)
    def run(rows: Tensor) -> Tensor:
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        return losses(rows)

    return run


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    state = {name: item.clone() for name, item in model.named_buffers()}
    draws = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(draws[0])
            np.random.set_state(draws[1])
            for name, item in model.named_buffers():
                if name in state:
                    item.data.copy_(state[name])
