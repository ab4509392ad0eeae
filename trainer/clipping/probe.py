"""A probe that runs a model on made-up records to see whether it mixes records.

A layer can be called with time instead of records in its first dimension, a loss can compare
the records of a lot, and a module can keep running sums of its inputs. Before training,
``probe`` runs the model on a few made-up records and rejects it, by name, if

* the loss of a record, or its gradient, changes when another record is replaced, or with fewer or
  many more records. This is checked with the same random draws in evaluation mode, where each
  record gets the same draws, and in training mode if it draws nothing there;
* the loss of one record has a gradient in another's row with any choice of modules that run one
  record at a time, a record's gradient changes with the losses of others, or it differs from
  autograd's gradient of that record alone;
* a second pass has other losses, a pass changes a buffer or parameter, or losses change with the
  records that the model saw first: the model stores data;
* a trainable tensor is not used, or the losses train a tensor that is not the model's.

A probe can only falsify: a model may mix records in a way that these inputs do not show. Use
records that differ. Gradients, the training mode, buffers and the random state are restored.

>>> from affidavit.trainer.clipping.requirements import BlockSpec
>>> model = nn.Linear(3, 1, bias=False)
>>> private = PrivateModel(model, [BlockSpec(name="all", clip_norm=1.0, names=("weight",))])
>>> x = torch.arange(9.0).view(3, 3)
>>> probe(private, lambda rows: model(x[rows]).square().sum(1))
{'weight': 1}
>>> probe(private, lambda rows: (model(x[rows]) - model(x[rows]).mean(0)).square().sum(1))
Traceback (most recent call last):
    ...
affidavit.trainer.errors.MixedRecords: the loss of a record changes by ...
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
from torch.utils.data import get_worker_info

from affidavit.trainer.clipping.invariants import (
    AttributeCopies,
    PlainAttributes,
    RowTotals,
    foreign_tensor,
    read_graph,
    relative_tolerance,
    reset_attributes,
    rows_of_each_record,
)
from affidavit.trainer.clipping.per_record import first_line
from affidavit.trainer.clipping.private_model import PrivateModel, evaluation_mode
from affidavit.trainer.distributed.shards import is_sharded
from affidavit.trainer.errors import MixedRecords, UnsupportedModel
from affidavit.trainer.norm_bounds import HALF_TYPES

MIN_PROBE_RECORDS, PROBE_RECORDS = 2, 3
"""Numbers of records that the probe runs."""

RECORDS, REPLACED_RECORDS = torch.arange(PROBE_RECORDS), torch.tensor([0, 1, 0])
"""The records of the probe, and the same with the last one replaced by the first."""

PROBE_SEEDS = 8
"""Number of random draws to try, because records may be mixed only in some of them."""

Losses = Callable[[Tensor], Tensor]
"""Returns the losses, shape (n,), of the made-up records with the numbers (n,) below
``PROBE_RECORDS``.
"""


def probe(
    private: PrivateModel,
    losses: Losses,
    *,
    isolated: Losses | None = None,
    max_records: int = PROBE_RECORDS,
) -> dict[str, int]:
    """Return how often each trainable tensor is used in a pass, by name.

    ``isolated`` returns the losses of a batch that is made of these records only, with its own
    padding. ``max_records`` is the size of the largest microbatch. Raises ``MixedRecords`` and
    ``UnsupportedModel``.
    """
    seeded, isolated = _fix_draws(losses, nullcontext), isolated or losses
    crowd = RECORDS.repeat(-(-max_records // PROBE_RECORDS))[: max(max_records, PROBE_RECORDS)]
    crowds = [
        (crowd + first) % PROBE_RECORDS for first in range(PROBE_RECORDS)
    ]  # each record is single in one
    with _restore_state(private.model) as (buffers, attributes):
        fresh, before = random_state(), _state(private.model)
        is_half = private.observe(partial(losses, RECORDS), records=PROBE_RECORDS)
        is_half |= any(item.dtype in HALF_TYPES for item in private.model.parameters())
        private.require_unwritten(
            name
            for name, item in _state(private.model).items()
            if name not in before or not _is_same(item, before[name])
        )
        sharded = any(is_sharded(item) for item in private.model.parameters())
        with torch.enable_grad():
            first, second = seeded(RECORDS), seeded(RECORDS)
        if not first.requires_grad:
            raise UnsupportedModel(
                "the losses have no gradient: they are detached, integers, or computed without "
                "autograd. Return them as the model's outputs give them."
            )
        if not bool(first.isfinite().all()):
            raise UnsupportedModel("the loss of a record is nan or infinite. Return finite losses.")
        draws = random_state() != fresh
        if not sharded:  # fully_shard has two parameters for one tensor
            _require_own_tensors(private.model, read_graph(first)[0], read_graph(second)[0])
        with torch.no_grad():
            first = first.detach()
            _require_equal_losses(first, second, is_half, STATE)
            _reset_buffers(buffers)
            reset_attributes(attributes)
            seeded(REPLACED_RECORDS)
            _require_equal_losses(first, seeded(RECORDS), is_half, FIRST_STATE)
            for seed in range(PROBE_SEEDS if draws else 1):
                one, other = (
                    _fix_draws(losses, nullcontext, seed)(at) for at in (RECORDS, REPLACED_RECORDS)
                )
                _require_equal_losses(
                    one[:MIN_PROBE_RECORDS], other[:MIN_PROBE_RECORDS], is_half, MIXING
                )
            _require_own_totals(seeded, first, is_half)
            if not draws:
                _require_equal_losses(
                    first[:MIN_PROBE_RECORDS], losses(RECORDS[:MIN_PROBE_RECORDS]), is_half, MIXING
                )
                for crowd in crowds:
                    _require_equal_losses(first[crowd], losses(crowd), is_half, CROWDING)
            with evaluation_mode(private.model):
                evaluated = seeded(RECORDS)
                if random_state() != fresh:
                    losses, isolated = (
                        _fix_draws(losses, _DrawsPerRecord),
                        _fix_draws(isolated, _DrawsPerRecord),
                    )
                    evaluated = losses(RECORDS)
                for row in RECORDS:
                    _require_equal_losses(evaluated[row], isolated(row[None]), is_half, MIXING)
                for crowd in crowds:
                    _require_equal_losses(evaluated[crowd], losses(crowd), is_half, CROWDING)
        tolerance = relative_tolerance(torch.float32, is_half=is_half)
        _find_per_record_modules(private, seeded, tolerance, reference=None if sharded else losses)
        gradients = private.gradients(partial(seeded, RECORDS), records=PROBE_RECORDS)
        others = private.gradients(partial(seeded, REPLACED_RECORDS), records=PROBE_RECORDS)
        _require_equal_gradients(gradients, others, RECORDS[:MIN_PROBE_RECORDS], tolerance)
        with evaluation_mode(private.model):
            gradients = private.gradients(partial(losses, RECORDS), records=PROBE_RECORDS)
            for row in RECORDS:
                others = private.gradients(partial(isolated, row[None]), records=1)
                _require_equal_gradients(gradients, others, row[None], tolerance)
        result = private.uses(partial(seeded, RECORDS), records=PROBE_RECORDS)
        with evaluation_mode(private.model), torch.no_grad():
            _require_equal_losses(
                private.losses(partial(losses, RECORDS), records=PROBE_RECORDS),
                evaluated,
                is_half,
                "when its layers are run one record at a time: a module compares records, or "
                "takes an input of another shape for records",
            )
    return result


MIXING = (
    "when another record is replaced or left out of the lot: the model, the loss or its padding "
    "mixes records (statistics or comparisons over the batch, packed sequences)"
)
TOTAL = (
    "when a sum or count over the batch leaves out another record: divide by the tokens of the "
    "record, or by a constant, instead of those of the batch"
)
CROWDING = (
    "in a microbatch of full size: records displace each other (experts with a capacity for all of "
    "them)"
)
FIRST_STATE = (
    "when the model saw other records first: it keeps statistics of the first records that it sees "
    "(an initialisation by data)"
)
STATE = "in a second pass with the same random draws: the model keeps state of its inputs"


def _require_own_tensors(
    model: nn.Module, first: dict[int, Tensor], second: dict[int, Tensor]
) -> None:
    """Raise ``UnsupportedModel`` if losses train tensors that ``model`` does not have.

    Such a tensor is a leaf of both passes. A leaf of one pass is an activation.
    """
    for key in first.keys() & second.keys() - {id(item) for item in model.parameters()}:
        raise foreign_tensor(first[key])


def _require_own_totals(losses: Losses, before: Tensor, is_half: bool) -> None:
    """Raise ``MixedRecords`` if losses depend on a total over records, like tokens of a batch.

    Records of one length have one total, whatever their values: the last record's part is left out
    of each. A reduced size may fit no shape, where the losses say nothing. ``before`` has shape
    (n,).
    """
    with RowTotals() as few:
        losses(RECORDS[:MIN_PROBE_RECORDS])
    with RowTotals() as more:
        losses(RECORDS)
    left_out = rows_of_each_record(few.rows, more.rows, MIN_PROBE_RECORDS)
    if not any(left_out):
        return
    try:
        with RowTotals(left_out):
            after = losses(RECORDS)
    except (RuntimeError, ValueError, IndexError):
        return
    rows = slice(MIN_PROBE_RECORDS)
    _require_equal_losses(before[rows], after[rows], is_half, TOTAL)


UNKNOWN_LAYER = "a layer"
"""A path inside the model, for an error between two layers."""


def _find_per_record_modules(
    private: PrivateModel, losses: Losses, tolerance: float, *, reference: Losses | None
) -> None:
    """Find the fewest modules to run one record at a time for each record to have its own row.

    Gradients are compared with autograd's of ``reference``. Raises ``MixedRecords`` and
    ``UnsupportedModel`` if no choice of modules works.
    """
    while True:
        try:
            for records in (MIN_PROBE_RECORDS, PROBE_RECORDS):
                private.observe(partial(losses, RECORDS[:records]), records=records)
            for records in (MIN_PROBE_RECORDS, PROBE_RECORDS):
                private.require_independent_gradients(
                    partial(losses, RECORDS[:records]), records=records, tolerance=tolerance
                )
            if reference is not None:
                with evaluation_mode(private.model):
                    private.require_autograd_gradients(reference, RECORDS, tolerance=tolerance)
        except (MixedRecords, UnsupportedModel) as error:
            if not private.run_outer_per_record(error):
                raise
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # raised between layers, by a tensor of another shape
            if not private.run_outer_per_record(
                MixedRecords(str(error), path=UNKNOWN_LAYER, kernels_failed=True)
            ):
                raise MixedRecords(
                    f"the model runs by itself, but not for each record: {first_line(error)} Give "
                    "every module the records in the first dimension, and freeze the others."
                ) from error
        else:
            return


def _require_equal_losses(one: Tensor, other: Tensor, is_half: bool, why: str) -> None:
    moved = (one - other).abs().double() / (1e-30 + one.abs().double())
    tolerance = relative_tolerance(one.dtype, is_half=is_half)
    if not bool((moved <= tolerance).all()):
        raise MixedRecords(
            f"the loss of a record changes by {float(moved.max()):.1e} of itself {why}. Compute "
            "each record's loss from that record alone."
        )


def _require_equal_gradients(
    before: dict[str, Tensor], after: dict[str, Tensor], rows: Tensor, tolerance: float
) -> None:
    """Raise ``MixedRecords`` if the gradients of ``rows``, (m,), differ from the first ones of
    ``after``.

    A loss may hide a difference that its gradient shows, for example behind a last layer of zeros.
    Both have shape (2, n).
    """
    for name, item in before.items():
        sums, sizes = item[:, rows]
        if not bool(((sums - after[name][0, : len(rows)]).abs() <= tolerance * sizes).all()):
            raise MixedRecords(
                f"{name}: the gradient of a record changes {MIXING}. Compute each record's loss "
                "from that record alone."
            )


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether both are equal, or one is unknown."""
    if one is None or other is None:
        return True
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _state(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers, and the sum of each parameter; None for a tensor that is sharded now.

    Buffers that are not saved may be caches, which a model fills when it runs first.
    """
    state: dict[str, Tensor | None] = {
        f"{path}.{name}".lstrip("."): item.clone()
        for path, layer in model.named_modules()
        for name, item in layer._buffers.items()
        if item is not None and name not in layer._non_persistent_buffers_set
    }
    for name, item in model.named_parameters():
        if item.is_floating_point() and item.dtype.itemsize > 1:
            state[name] = None if is_sharded(item) else item.detach().sum()
    return state


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed PyTorch's generators, those of devices if they are in use."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def random_state() -> Any:
    """Return the state of the generators of Python, NumPy and PyTorch, for comparisons."""
    numpys: Any = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torchs = [item.numpy().tobytes() for item in (torch.get_rng_state(), *devices)]
    return random.getstate(), numpys[1].tobytes(), numpys[2], torchs


def _fix_draws(
    losses: Losses, way: Callable[[], AbstractContextManager[Any]], seed: int = 0
) -> Losses:
    """Return ``losses`` with the same random draws in each call, run inside ``way``."""

    @wraps(losses)
    def run(rows: Tensor) -> Tensor:
        _seed(seed)
        with way():
            return losses(rows)

    return run


class _DrawsPerRecord(TorchDispatchMode):
    """Makes draws depend only on the number of earlier draws and, in each row, on that row."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call any other operation unchanged."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        self._calls += 1
        seed_torch(self._calls)
        kwargs |= zip((item.name for item in func._schema.arguments), args, strict=False)
        tensors = [item for item in kwargs.values() if isinstance(item, Tensor)]
        rows: Any = kwargs["size"] if "size" in kwargs else tensors[0].shape if tensors else ()
        if len(func._schema.returns) != 1 or not len(rows):
            return func(**kwargs)

        def row(place: int) -> Any:
            seed_torch(self._calls)
            own = {
                name: item[place : place + 1]
                if isinstance(item, Tensor) and item.shape[:1] == rows[:1]
                else item
                for name, item in kwargs.items()
            }
            return func(**own | ({"size": [1, *rows[1:]]} if "size" in kwargs else {}))

        drawn = [row(place) for place in range(rows[0])]
        return tensors[0] if func._schema.is_mutable else torch.cat(drawn)


@contextmanager
def fixed_draws(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and PyTorch with ``seed`` for the block, and restore them afterwards."""
    draws = random.getstate(), np.random.get_state()
    devices = None if get_worker_info() is None else ()  # a forked worker has no device
    with torch.random.fork_rng(devices):
        try:
            _seed(seed)
            yield
        finally:
            random.setstate(draws[0])
            np.random.set_state(draws[1])


Buffers = list[tuple[nn.Module, dict[str, Tensor | None], dict[str, Tensor]]]
"""The buffers of modules, with clones of them."""


def _copy_buffers(model: nn.Module) -> Buffers:
    return [
        (
            layer,
            dict(layer._buffers),
            {name: item.clone() for name, item in layer._buffers.items() if item is not None},
        )
        for layer in model.modules()
        if layer._buffers
    ]


def _reset_buffers(buffers: Buffers) -> None:
    for layer, before, clones in buffers:
        for name, item in before.items():
            layer._buffers[name] = item
            if item is not None:
                item.data.copy_(clones[name])


@contextmanager
def _restore_state(model: nn.Module) -> Iterator[tuple[Buffers, AttributeCopies]]:
    """Yield the state of ``model`` before the block, and restore it afterwards."""
    before = _copy_buffers(model), PlainAttributes(model).copy()
    with fixed_draws(0):
        try:
            yield before
        finally:
            _reset_buffers(before[0])
            reset_attributes(before[1])
