"""A model whose backward pass makes clipped sums, and no gradient of a parameter.

``PrivateModel`` takes a module and the blocks of its trainable tensors, checks that every
one of them is in exactly one block and belongs to layers that keep records apart, and
puts taps on them. ``accumulate`` then runs one microbatch: the losses come one for each
record, are summed, and one backward pass clips.

>>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
>>> blocks = [BlockSpec(name=name, clip_norm=1.0, names=(name,))
...           for name, _ in model.named_parameters()]
>>> private = PrivateModel(model, blocks)
>>> x = torch.ones(5, 3)
>>> losses = private.accumulate(lambda: model(x).sum(1), records=5)
>>> bool(private.sums()["0.weight"].norm() <= 5)
True

A tensor that is used several times (a layer that is called twice, a tied output head) is
clipped by the exact norm of the sum of its uses, or, where its ``BlockSpec`` has ``uses``,
each use by itself, which costs the sum of their clip norms
(``affidavit.trainer.clipping.hooks`` has the third rule).

Parameters may be in any floating type. Sums are in float32 or float64. Activations may be
recomputed (``torch.utils.checkpoint``, both kinds). Under ``torch.compile`` the layers that
have taps run as they are, and what lies between them is compiled.

Layers without a kernel are run one record at a time (``per_record``). Where a model uses a
parameter in another module than the one that holds it, or hands a layer something else than
records, ``probe`` notices, and has the module around it run one record at a time.

A step that fails leaves every sum as it was. Refused by name: batch normalisation and
other layers that mix records, and tensors in no block or in two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.utils.parametrize
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from affidavit.trainer.clipping.ghost_norm import accumulated_in
from affidavit.trainer.clipping.hooks import (
    TAKES_GRADIENTS,
    Block,
    GradientHook,
    Lot,
    MixedRecords,
    Target,
    told_apart,
)
from affidavit.trainer.clipping.kernels import Kernel, kernel_of
from affidavit.trainer.clipping.per_record import Unit, first_line, leave
from affidavit.trainer.clipping.requirements import (
    BlockSpec,
    UnsupportedModel,
    require_partition,
    require_supported,
)
from affidavit.trainer.distributed.shards import Bucket, TensorParallel, is_sharded, local
from affidavit.trainer.numerics import NARROW, joint_norm, require_true_float32, rounding

HOLDERS = (nn.ParameterList, nn.ParameterDict, nn.utils.parametrize.ParametrizationList)
"""Modules that only hold parameters; the module around them uses them."""

__all__ = ["BlockSpec", "MixedRecords", "PrivateModel", "UnsupportedModel"]


class PrivateModel:
    """``model`` with a tap on every use of a trainable tensor; undone by ``detach``.

    Raises ``UnsupportedModel`` where the model or the blocks cannot be trained privately.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[BlockSpec],
        *,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        self.model = model
        self.specs = tuple(blocks)
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        require_partition(trainable, self.specs)
        self._lot = Lot()
        self._bucket, self._parallel = Bucket(), tensor_parallel
        self._targets = {n: self._target(n, p) for n, p in trainable.items()}
        self._per_record: set[str] = set()
        self._whole: set[str] = set()
        self._boxes: set[str] = set()
        self._lifted: dict[int, str] = {}
        self._folds: set[str] = set()
        self._picked: dict[int, set[int]] = {}
        self._sums: dict[str, Tensor] = {}
        self._hidden = self._counted = False
        self._attach()

    def _target(self, name: str, parameter: nn.Parameter) -> Target:
        of = self._parallel
        by_rows = is_sharded(parameter) and not (of and of.alone)
        return Target(
            name=name,
            parameter=parameter,
            shape=tuple(parameter.shape if of is None else of.cut.get(name, parameter.shape)),
            bucket=self._bucket if by_rows else None,
            adds=of is None or of.adds(name),
        )

    def _attach(self) -> None:
        self._blocks: dict[tuple[str, str], Block] = {}
        self._runs: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._boxes = set()
        modules = dict(self.model.named_modules())
        by_id = {id(target.parameter): target for target in self._targets.values()}
        kernels: dict[str, tuple[Kernel, dict[str, GradientHook]]] = {}
        units: dict[str, dict[tuple[nn.Module, str], GradientHook]] = {
            path: {} for path in self._per_record | self._whole if self._above(path) in (path, None)
        }
        for path, layer in modules.items():
            targets = {
                name: by_id[id(parameter)]
                for name, parameter in layer.named_parameters(recurse=False)
                if id(parameter) in by_id
            }
            require_supported(path, layer, tuple(targets))
            owner = self._owner(path, modules, targets)
            kernel = kernel_of(layer) if owner == path and path not in self._whole else None
            if kernel is not None and path not in self._lifted.values():
                kernels[path] = kernel, {n: self._tap(path, t) for n, t in targets.items()}
                continue
            for name, target in targets.items():
                units.setdefault(owner, {})[layer, name] = self._tap(owner, target)
        self._require_uses()
        active = [*kernels, *units]
        for path, (kernel, taps) in kernels.items():
            if taps:
                self._runs.append((modules[path], partial(self._run, path, kernel, taps)))
        for path, own in units.items():
            inner = any(other != path and _within(other, path) for other in active)
            if inner:
                self._boxes.add(path)
            unit = Unit(path=path, module=modules[path], taps=own, leaf=not inner)
            self._runs.append((modules[path], partial(self._run_unit, path, unit)))
        for layer, run in self._runs:
            layer.forward = run
        self._hidden = False
        self._hide_from_compiler()

    def _owner(self, path: str, modules: dict[str, nn.Module], targets: dict[str, Target]) -> str:
        """The module that uses the tensors which the module at ``path`` holds."""
        while path and isinstance(modules[path], HOLDERS):
            path = path.rpartition(".")[0]
        above = path.rpartition(".")[0]
        if path and isinstance(modules[above], nn.MultiheadAttention):
            path = above
        for target in targets.values():
            path = self._lifted.get(id(target.parameter), path)
        whole = self._above(path)
        return path if whole is None else whole

    def _above(self, path: str) -> str | None:
        """The module around ``path`` that is run record by record with all that is inside it."""
        around = (whole for whole in self._whole if path == whole or _within(path, whole))
        return min(around, key=len, default=None)

    def _require_uses(self) -> None:
        for spec in self.specs:
            unknown = sorted(
                set(spec.uses) - {use for name, use in self._blocks if name == spec.name}
            )
            if unknown:
                raise UnsupportedModel(
                    f"block {spec.name}: {', '.join(unknown)} is not a layer that uses its tensor."
                )

    def widen(self, error: Exception) -> bool:
        """Run the module around the layer that ``error`` is about one record at a time.

        Where that fails for the kernels inside it, it is run so with all that it has. False where
        ``error`` is about no layer, or every module around it is run so already.
        """
        if isinstance(error, UnsupportedModel) and error.outside:
            for name in error.outside:
                target = self._targets[name]
                before = self._lifted.get(id(target.parameter), name.rpartition(".")[0])
                if not before:
                    return False
                self._lifted[id(target.parameter)] = before.rpartition(".")[0]
        elif isinstance(error, MixedRecords) and error.path is not None:
            path: str | None = error.path
            if not (error.whole and path in self._boxes):
                path = _around(error.path)
                while path in self._per_record and not (error.whole and path in self._boxes):
                    path = _around(path)
            if path is None:
                return False
            (self._whole if error.whole and path in self._boxes else self._per_record).add(path)
        else:
            return False
        self.detach()
        self._attach()
        return True

    def _hide_from_compiler(self) -> None:
        """Have ``torch.compile`` leave taps alone, once its (large) package is loaded at all."""
        if not self._hidden and "torch._dynamo" in sys.modules:
            self._hidden = True
            for layer, run in self._runs:
                layer.forward = torch.compiler.disable(run)

    def _tap(self, path: str, target: Target) -> GradientHook:
        (spec,) = (spec for spec in self.specs if target.name in spec.names)
        if spec.uses and path not in spec.uses:
            raise UnsupportedModel(
                f"block {spec.name}: {path} uses {target.name} too, but has no clip norm in uses."
            )
        key = (spec.name, path if spec.uses else "")
        clip_norm = spec.uses.get(path, spec.clip_norm)
        name = f"{spec.name} ({path})" if spec.uses else spec.name
        block = self._blocks.setdefault(
            key,
            Block(
                name=name,
                clip_norm=clip_norm,
                counted=self._counted,
                shared=self._parallel is not None,
            ),
        )
        return GradientHook(target=target, block=block, lot=self._lot, path=path)

    def _run(
        self, path: str, kernel: Kernel, taps: dict[str, GradientHook], *inputs: Any, **named: Any
    ) -> Any:
        layer, lot = self.model.get_submodule(path), self._lot
        if inputs and isinstance(inputs[0], Tensor):
            lot.narrow |= inputs[0].dtype in NARROW
            lot.narrow |= torch.is_autocast_enabled(inputs[0].device.type)
        if not lot.records or lot.observing:
            return type(layer).forward(layer, *inputs, **named)
        for tap in taps.values():
            tap.count()
        run = partial(kernel, layer, taps, lot.records)
        with self._blamed_on(path):
            if lot.inside:
                return leave(run, lot, (inputs, named), rows=True)
            self._note_folds(path, layer, inputs)
            return run(*inputs, **named)

    @contextmanager
    def _blamed_on(self, path: str, unit: Unit | None = None) -> Iterator[None]:
        """While the model is probed an error is of how ``path`` is run: as it is, it ran before.

        In the backward pass a checkpoint ends its recomputation by an exception of its own.
        """
        try:
            yield
        except MixedRecords as error:
            if error.path is None:
                error.path, error.whole = path, True
            raise
        except (UnsupportedModel, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._lot.rows is None or self._lot.backward:
                raise
            if unit is not None:
                raise unit.not_run(error) from error
            raise MixedRecords(
                f"{path} cannot be run for all records at once: {first_line(error)} Keep the "
                "records in the first dimension, or freeze it.",
                path=path,
                whole=True,
            ) from error

    def _run_unit(self, path: str, unit: Unit, *inputs: Any, **named: Any) -> Any:
        lot = self._lot
        if lot.observing:
            unit.observe((inputs, named), lot.records)
        if not lot.records or lot.observing:
            return type(unit.module).forward(unit.module, *inputs, **named)
        with self._blamed_on(path, unit):
            if lot.inside:
                run = partial(unit.run, lot, everything=True)
                return leave(lambda *i, **n: run((i, n)), lot, (inputs, named), rows=False)
            return unit.run(lot, (inputs, named))

    def _note_folds(self, path: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Several rows a record are taken where the probe has seen whose they are."""
        records = self._lot.records
        if isinstance(layer, nn.RNNBase) or not inputs or not isinstance(inputs[0], Tensor):
            return
        rows = len(inputs[0]) if inputs[0].ndim else 0
        if rows in (0, 1, records) or rows % records or path in self._folds:
            return
        if self._lot.rows is None:
            raise MixedRecords(
                f"{path}: the layer sees {rows} rows for {records} records, and it is "
                "unknown whose they are. Probe the model first (trainer.clipping.probe), or keep "
                "the records in the first dimension.",
                path=path,
            )
        if rows in self._picked.get(records, ()):
            raise MixedRecords(
                f"{path}: the layer sees {rows} rows that a mask picked for {records} records. "
                "Others may have more or fewer, and it is unknown whose a row is. Keep the records "
                "in the first dimension, and mask the losses instead of packing rows.",
                path=path,
            )
        self._folds.add(path)

    def set_clip_norms(self, blocks: Sequence[BlockSpec]) -> None:
        """Clip by the norms of ``blocks`` from now on; they are the same blocks otherwise.

        Raises ``UnsupportedModel`` for other blocks and for norms out of range.
        """
        require_partition({name: of.parameter for name, of in self._targets.items()}, blocks)
        before = {(spec.name, spec.names, tuple(spec.uses)) for spec in self.specs}
        if before != {(spec.name, spec.names, tuple(spec.uses)) for spec in blocks}:
            raise UnsupportedModel("the blocks changed; only clip norms may change.")
        self.specs = tuple(blocks)
        for spec in blocks:
            for path in spec.uses or ("",):
                self._blocks[spec.name, path].clip_norm = spec.uses.get(path, spec.clip_norm)

    def accumulate(
        self, losses: Callable[[], Tensor], *, records: int, idle: bool = False
    ) -> Tensor:
        """Add one microbatch to the clipped sums; the losses, detached.

        ``losses`` runs the model and returns one loss for each of ``records`` records,
        shape (records,). An empty microbatch adds nothing. Where ``idle`` the records are
        made up, for other ranks that run their own, and nothing is added.
        Raises ``MixedRecords`` and
        ``UnsupportedModel``, and then nothing was added.
        """
        if records == 0:
            return torch.zeros(0)
        require_true_float32()
        with self._lot_of(records, idle=idle):
            before = self._stored()
            with self._gradients_set_aside():
                result = self._backward(losses)
                with torch.no_grad(), torch.autocast(result.device.type, enabled=False):
                    for block, norms in self._joint_norms():
                        block.finish(norms)
                    self._bucket.flush()
                self._require_caught()
            self.require_unwritten(
                name
                for name, item in self._stored().items()
                if item is not None and before.get(name, ()) not in (None, item)
            )
            for name, target in self._targets.items():
                if (total := target.total) is not None:
                    self._sums[name] = self._sums[name].add_(total) if name in self._sums else total
        return result

    def _stored(self) -> dict[str, tuple[int, int] | None]:
        """Which tensors the weights of the run would have, and how often they were written to.

        None for those that are sharded now: they are gathered and freed in every pass.
        """
        return {
            f"{path}.{name}".lstrip("."): None
            if is_sharded(item)
            else (id(item), 0 if item.is_inference() else item._version)
            for path, layer in self.model.named_modules()
            for name, item in (*layer._parameters.items(), *layer._buffers.items())
            if item is not None and name not in layer._non_persistent_buffers_set
        }

    def require_unwritten(self, names: Iterable[str]) -> None:
        """Raise ``UnsupportedModel`` for tensors ``names`` that a forward pass wrote to."""
        if changed := sorted(names):
            raise UnsupportedModel(
                f"{', '.join(changed)}: changes in a forward pass, and would store statistics of "
                "raw data. Remove such statistics, and change weights after optimizer.step()."
            )

    def _joint_norms(self) -> Iterator[tuple[Block, Tensor | None]]:
        """Blocks with their norms over all ranks that have a part of them, by one collective."""
        blocks = [block for block in self._blocks.values() if block.pending]
        if self._parallel is None or not blocks:
            yield from ((block, None) for block in blocks)
            return
        own = [block.norms() for block in blocks]
        joint = joint_norm(self._parallel.gathered(torch.stack(own)))
        for block, norms, item in zip(blocks, joint, own, strict=True):
            yield block, norms.to(item.dtype) * (1 + rounding(4, item.dtype))

    def _backward(self, losses: Callable[[], Tensor], only: int | None = None) -> Tensor:
        """The losses, detached, after the backward pass of all of them, or of ``only``'s."""
        self._hide_from_compiler()
        with torch.enable_grad():
            result = losses()
            self._require_losses(result)
            self._lot.backward = True  # a layer that runs from here on computes activations again
            with torch.autocast(result.device.type, enabled=False):
                (result if only is None else result[only]).sum().backward()
        return result.detach()

    def _require_losses(self, losses: Tensor) -> None:
        if losses.shape != (self._lot.records,):
            raise MixedRecords(
                f"the loss has shape {tuple(losses.shape)}; return one value for each of the "
                f"{self._lot.records} records, not their mean."
            )

    def sums(self) -> dict[str, Tensor]:
        """The sums so far by name, each of its parameter's shape, in float32 or float64.

        Of a sharded parameter they are the rows that are here, of the sum over all ranks.
        """
        return {
            name: self._sums[name]
            if name in self._sums
            else torch.zeros_like(local(of.parameter), dtype=accumulated_in(of.parameter))
            for name, of in self._targets.items()
        }

    def require_no_gradients(self) -> None:
        """Raise ``UnsupportedModel`` if another backward pass left a gradient."""
        for name, target in self._targets.items():
            grad = target.parameter.grad
            if grad is not None and bool(local(grad).any()):
                raise UnsupportedModel(
                    f"{name} has a gradient from a loss outside the run, which is not trained "
                    "on. Include every term in the losses of the records, or set the gradient "
                    "to None after using it."
                )

    def forget_sums(self) -> None:
        """Begin a lot."""
        self._sums.clear()

    def count_within(self) -> None:
        """From now on count, by block, the records whose norm is at most the clip norm.

        Raises ``UnsupportedModel`` for a tensor of which each use is clipped by itself.
        """
        for spec in self.specs:
            if spec.uses:
                raise UnsupportedModel(
                    f"block {spec.name}: each use of its tensor is clipped separately, so its clip "
                    "norms cannot be adapted. Remove uses or adaptive_clipping_quantile."
                )
        self._counted = True
        for block in self._blocks.values():
            block.counted = True

    def take_within(self) -> dict[str, int]:
        """The counts since the last call, by block."""
        result = {}
        for (name, _), block in self._blocks.items():
            result[name], block.within = block.within, 0
        return result

    def observe(self, losses: Callable[[], Tensor], *, records: int) -> bool:
        """Run the model as it is, and note which inputs of its modules are of records.

        ``losses`` gives one of shape (records,). Returns whether it ran under autocast. Raises
        ``UnsupportedModel`` where the losses take a gradient.
        """
        self._lot.observing = True
        try:
            with _Picks() as picks:
                self.losses(losses, records=records)
            self._picked[records] = picks.sizes
            return self._lot.narrow
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise UnsupportedModel(TAKES_GRADIENTS) from error
        finally:
            self._lot.observing = False

    def losses(self, losses: Callable[[], Tensor], *, records: int) -> Tensor:
        """The losses, shape (records,), of layers that run as they do in training."""
        with self._lot_of(records), torch.no_grad():
            result = losses()
            self._require_losses(result)
            return result

    def uses(self, losses: Callable[[], Tensor], *, records: int) -> dict[str, int]:
        """How often each trainable tensor is used, by name, in one pass or when evaluated.

        ``losses`` gives one of shape (records,). Gradients are left as they were, and no sums.
        Raises ``UnsupportedModel`` where a tensor is used in neither.
        """
        result = dict.fromkeys(self._targets, 0)
        modes: list[AbstractContextManager[None]] = [nullcontext(), evaluating(self.model)]
        for mode in modes:
            with mode:
                self.accumulate(losses, records=records)
            for name, target in self._targets.items():
                result[name] = result[name] or target.caught
        self.forget_sums()
        self._require_used(result)
        return result

    def require_own(self, losses: Callable[[], Tensor], *, records: int, tolerance: float) -> None:
        """Raise ``MixedRecords`` if a record's gradients are not those of its loss alone.

        ``losses`` gives one of shape (records,), and draws the same at random each time; gradients
        may differ by ``tolerance``. They are left as they were.
        """
        alone = [self._rows(losses, records, only) for only in range(records)]
        together = self._rows(losses, records)
        self._require_alike(together, tolerance)
        for only, rows in enumerate(alone):
            largest = max((float(row[0, 1]) for _, row in rows), default=0.0)
            for (tap, row), (_, all_rows) in zip(rows, together, strict=True):
                gap = float((row[0] - all_rows[only]).abs().max())
                if not gap <= tolerance * (float(row[0, 1]) + largest / 1000):
                    raise MixedRecords(
                        f"{tap.target.name}: the gradient of a record depends on the losses of "
                        "others: a gradient hook or a backward pass above the layer compares "
                        "records. Make it treat each row separately.",
                        path=tap.path,
                    )

    def _require_alike(self, rows: list[tuple[GradientHook, Tensor]], tolerance: float) -> None:
        """Raise ``UnsupportedModel`` where ranks differ in a gradient that each has whole."""
        if self._parallel is None:
            return
        for tap, row in rows:
            if tap.target.name in self._parallel.cut:
                continue
            first, *others = self._parallel.gathered(row)
            scale = float(first[:, 1].max()) * tap.target.parameter.numel() ** 0.5
            if any(not float((first - other).abs().max()) <= tolerance * scale for other in others):
                raise UnsupportedModel(
                    f"{tap.target.name}: each rank of tensor parallelism has another gradient, "
                    "because its layer sees only a part of a record (of the sequence or the "
                    "heads). Give it whole activations (output_layouts=Replicate()), or freeze "
                    "the tensor."
                )

    def require_true(
        self, losses: Callable[[Tensor], Tensor], records: Tensor, *, tolerance: float
    ) -> None:
        """Raise ``UnsupportedModel`` if a tap's gradient differs from autograd's.

        ``losses`` gives those of ``records`` (n,), or of one of them, which is compared. Only a
        sum of each tensor's gradient is. Gradients are left as they were.
        """
        rows = self.gradients(partial(losses, records), records=len(records))
        with self._gradients_set_aside(), torch.enable_grad():
            for place, record in enumerate(records):
                losses(record[None]).sum().backward()  # a reentrant checkpoint takes no other way
                for name, target in self._targets.items():
                    grad, target.parameter.grad = target.parameter.grad, None
                    if grad is not None and not bool(grad.isfinite().all()):
                        raise UnsupportedModel(
                            f"{target.name}: the gradient of a record is nan or infinite, though "
                            "its loss is not. Look for a branch of torch.where that is not taken, "
                            "or a root or logarithm of zero."
                        )
                    gap, most = rows[name][:, place].tolist()
                    gap -= 0.0 if grad is None else float(told_apart(grad.double()))
                    if not abs(gap) <= tolerance * most:
                        raise UnsupportedModel(
                            f"{name}: run one record at a time, its layer's gradient "
                            "differs from autograd's. Remove gradient hooks from the model, or "
                            "freeze the tensor.",
                            outside=(name,),
                        )

    def gradients(self, losses: Callable[[], Tensor], *, records: int) -> dict[str, Tensor]:
        """Of each tensor a sum of each record's gradient, and how large it may be; (2, n).

        ``losses`` gives one of shape (records,). Gradients are left as they were.
        """
        result = {name: torch.zeros(2, records, dtype=torch.float64) for name in self._targets}
        for tap, row in self._rows(losses, records):
            result[tap.target.name] += row.T.cpu()
        least = max(float(item[1].max()) for item in result.values()) / 100
        for name, (_, size) in result.items():
            size.mul_(self._targets[name].parameter.numel() ** 0.5).add_(least)
        return result

    def _rows(
        self, losses: Callable[[], Tensor], records: int, only: int | None = None
    ) -> list[tuple[GradientHook, Tensor]]:
        with self._gradients_set_aside(), self._lot_of(records):
            rows: list[tuple[GradientHook, Tensor]] = []
            self._lot.only, self._lot.rows = only, rows
            self._backward(losses, only)
            self._require_caught()
            return rows

    def _require_caught(self) -> None:
        outside = [t.name for t in self._targets.values() if t.parameter.grad is not None]
        if outside:
            raise UnsupportedModel(
                f"{', '.join(outside)}: used outside its layer as well, where per-record gradients "
                "are unknown. Call the layer itself, or freeze the tensor.",
                outside=tuple(outside),
            )
        # Of what a pass leaves out (a layer that is dropped at random) the sum is zero. Ranks that
        # add it up together, and counts of records within a clip norm, need it in every pass.
        self._require_used(
            {
                target.name: target.caught
                for target in self._targets.values()
                if self._counted or is_sharded(target.parameter)
            }
        )

    def _require_used(self, uses: dict[str, int]) -> None:
        silent = [name for name, times in uses.items() if not times]
        if silent:
            raise UnsupportedModel(
                f"no gradient was caught for {', '.join(silent)}: the model does not use the "
                "tensor in its layer. Call the layer itself, or freeze the tensor."
            )

    @contextmanager
    def _lot_of(self, records: int, *, idle: bool = False) -> Iterator[None]:
        self._lot.records, self._lot.backward, self._lot.narrow = records, False, False
        for target in self._targets.values():
            target.caught, target.idle = 0, idle
        try:
            yield
        finally:
            self._lot.records, self._lot.only, self._lot.rows = 0, None, None
            self._bucket.clear()
            for block in self._blocks.values():
                block.clear()
            for target in self._targets.values():
                target.total = None

    @contextmanager
    def _gradients_set_aside(self) -> Iterator[None]:
        """Whatever autograd puts into ``grad`` meanwhile did not pass through a tap."""
        held = [(target.parameter, target.parameter.grad) for target in self._targets.values()]
        for parameter, _ in held:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in held:
                parameter.grad = grad

    def detach(self) -> None:
        """Give the layers their own forward back."""
        for layer, _ in self._runs:
            layer.__dict__.pop("forward", None)


class _Picks(TorchDispatchMode):
    """The ``sizes`` of what operations return whose number of rows depends on values."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any operation as it is."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index.Tensor:
            picks = any(item is not None and item.dtype == torch.bool for item in args[1])
        else:
            picks = torch.Tag.dynamic_output_shape in getattr(func, "tags", ())
        if picks:
            self.sizes |= {len(item) for item in tree_leaves(result) if item.ndim}
        return result


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode, and afterwards every layer into its former mode.

    Recurrent layers do without cuDNN, which has no backward pass for them in that mode.
    """
    modes = {layer: layer.training for layer in model.modules()}
    cudnn = torch.backends.cudnn.enabled
    try:
        model.eval()
        if any(isinstance(layer, nn.RNNBase) for layer in modes):
            torch.backends.cudnn.enabled = False
        yield
    finally:
        torch.backends.cudnn.enabled = cudnn
        for layer, mode in modes.items():
            layer.training = mode


def _around(path: str) -> str | None:
    """The path of the module that holds the one at ``path``; none does the model."""
    return path.rpartition(".")[0] if path else None


def _within(path: str, above: str) -> bool:
    return not above or path.startswith(f"{above}.")
