"""A probe: what only running a model shows of whether it keeps records apart.

A layer can be called with time, not records, in its first dimension; a loss can compare
the records of a lot; a module can keep running sums of what it sees. Before training,
``probe`` runs the model on a few made-up records and refuses it, by name, where

* the loss of a record changes when another record is left out (asked in evaluation mode,
  and in training mode as well where that draws nothing at random);
* the loss of one record has a gradient in another's row, whatever is run one record at a time;
* a buffer changes in a forward pass;
* a trainable tensor is not used at all.

It can only falsify: a model may mix records in a way that these inputs do not show. Give
it records that differ. Gradients, the training mode, buffers and the random state are left
as they were.

>>> from affidavit.trainer.clipping.private import BlockSpec
>>> model = nn.Linear(3, 1, bias=False)
>>> private = PrivateModel(model, [BlockSpec(name="all", clip_norm=1.0, names=("weight",))])
>>> x = torch.arange(9.0).view(3, 3)
>>> probe(private, lambda n: model(x[:n]).square().sum(1))
{'weight': 1}
>>> probe(private, lambda n: (model(x[:n]) - model(x[:n]).mean(0)).square().sum(1))
Traceback (most recent call last):
    ...
affidavit.trainer.clipping.hooks.MixedRecords: the loss of a record changes by ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from affidavit.trainer.clipping.hooks import MixedRecords
from affidavit.trainer.clipping.private import PrivateModel
from affidavit.trainer.clipping.requirements import UnsupportedModel
from affidavit.trainer.numerics import NARROW

FEWER, MORE = 2, 3
"""How many records the probe runs."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
NARROW_TOLERANCE = 0.05
"""How far a loss may move, relative to itself, by another order of summation alone."""

Losses = Callable[[int], Tensor]
"""The losses, shape (n,), of the first n of at least ``MORE`` made-up records."""


def probe(private: PrivateModel, losses: Losses) -> dict[str, int]:
    """How often each trainable tensor is used in a pass, by name.

    Raises ``MixedRecords`` and ``UnsupportedModel``.
    """
    with _left_as_it_was(private.model):
        buffers = {name: item.clone() for name, item in private.model.named_buffers()}
        narrow = private.observe(partial(losses, MORE), records=MORE)
        narrow |= any(item.dtype in NARROW for item in private.model.parameters())
        changed = [
            name
            for name, item in private.model.named_buffers()
            if name not in buffers or not _same(item, buffers[name])
        ]
        if changed:
            raise UnsupportedModel(
                f"{', '.join(sorted(changed))}: changes in a forward pass, and would keep what it "
                "saw of raw data. Leave such statistics out."
            )
        with torch.no_grad():
            repeats = torch.equal(losses(MORE), losses(MORE))
            if repeats:
                _require_apart(losses, narrow=narrow)
            with _evaluating(private.model):
                _require_apart(losses, narrow=narrow)
        _find_owners(private, losses)
        result = private.uses(lambda: losses(MORE), records=MORE)
        with _evaluating(private.model), torch.no_grad():
            _require_near(
                private.losses(partial(losses, MORE), records=MORE),
                losses(MORE),
                narrow,
                "when its layers are run one record at a time: a module compares records, or "
                "takes an input of another shape for records",
            )
    return result


def _find_owners(private: PrivateModel, losses: Losses) -> None:
    """Each record's gradients in its own row, with as few modules run one by one as will do.

    Raises ``MixedRecords`` and ``UnsupportedModel`` where none will do.
    """
    while True:
        try:
            for records in (FEWER, MORE):
                private.observe(partial(losses, records), records=records)
            for records in (FEWER, MORE):
                private.require_own(partial(losses, records), records=records)
        except (MixedRecords, UnsupportedModel) as error:
            if not private.widen(error):
                raise
        else:
            return


def _require_apart(losses: Losses, *, narrow: bool) -> None:
    _require_near(
        losses(MORE)[:FEWER],
        losses(FEWER),
        narrow,
        "when another record is left out of the lot: the model or the loss mixes records "
        "(statistics or comparisons over the batch, packed sequences)",
    )


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


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {layer: layer.training for layer in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    state = {name: item.clone() for name, item in model.named_buffers()}
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for name, item in model.named_buffers():
                if name in state:
                    item.data.copy_(state[name])
