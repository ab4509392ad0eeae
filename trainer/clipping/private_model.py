"""A model whose backward pass forms clipped sums instead of gradients of parameters.

``PrivateModel`` takes a module and the blocks of its trainable tensors, checks that each tensor is
in exactly one block and belongs to layers that keep records apart, and hooks into the uses of the
tensors. ``accumulate`` runs one microbatch: it sums one loss per record, and clips in one backward
pass.

>>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
>>> blocks = [BlockSpec(name=name, clip_norm=1.0, names=(name,))
...           for name, _ in model.named_parameters()]
>>> private = PrivateModel(model, blocks)
>>> x = torch.ones(5, 3)
>>> losses = private.accumulate(lambda: model(x).sum(1), records=5)
>>> bool(private.sums()["0.weight"].norm() <= 5)
True

A tensor that is used several times (a layer that is called twice, a tied output head) is clipped by
the exact norm of the sum of its uses. If its ``BlockSpec`` has ``uses``, each use is clipped by
itself, which costs the sum of their clip norms.

Parameters may have any floating type; sums are float32 or float64. Activations may be recomputed
(``torch.utils.checkpoint``, both kinds). ``torch.compile`` compiles what is between hooked layers.

Layers without a kernel run one record at a time (``per_record``). If a model uses a parameter
outside of the module that holds it, or gives a layer something other than records, ``probe``
detects it and runs the surrounding module one record at a time.

A step that fails leaves all sums unchanged. Batch normalisation and other layers that mix records
are rejected, and so are tensors in no block or in two.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.utils.parametrize
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from affidavit.trainer.clipping.ghost_norm import accumulation_type
from affidavit.trainer.clipping.hooks import (
    LOSS_TAKES_GRADIENT,
    ClippingBlock,
    GradientHook,
    Microbatch,
    PendingUses,
    TrainedTensor,
    position_weighted_sum,
)
from affidavit.trainer.clipping.invariants import (
    DrawState,
    ForeignLeaves,
    PlainAttributes,
    Reprobed,
    Reprobing,
    RowTracker,
    count_draws,
    other_states,
    read_graph,
    relative_tolerance,
    require_even_rows,
    reset_attributes,
)
from affidavit.trainer.clipping.layer_registry import Kernel, find_kernel
from affidavit.trainer.clipping.per_record import PerRecordModule, first_line, run_outside_vmap
from affidavit.trainer.clipping.requirements import BlockSpec, require_partition, require_supported
from affidavit.trainer.distributed.shards import Bucket, TensorParallel, is_sharded, local_tensor
from affidavit.trainer.errors import MixedRecords, UnsupportedModel
from affidavit.trainer.norm_bounds import (
    HALF_TYPES,
    joint_norm,
    require_true_float32,
    rounding_bound,
)

HOLDERS = (nn.ParameterList, nn.ParameterDict, nn.utils.parametrize.ParametrizationList)
"""Modules that only hold parameters, which the module around them uses."""

CLIP_TOLERANCE = 1e-6
"""Relative error of the norm of what a record adds, which is computed again from rounded parts."""


class PrivateModel:
    """``model`` with a hook on each use of a trainable tensor; ``detach`` removes the hooks.

    Raises ``UnsupportedModel`` if the model or the blocks cannot be trained privately.
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
        self._microbatch = Microbatch()
        self._bucket, self._parallel = Bucket(), tensor_parallel
        self._tensors = {n: self._build_tensor(n, p) for n, p in trainable.items()}
        self._per_record: set[str] = set()
        self._without_kernels: set[str] = set()
        self._outer_units: set[str] = set()
        self._moved_owners: dict[int, str] = {}
        self._folded_paths: set[str] = set()
        self._masked_sizes: dict[int, set[int]] = {}
        self._has_picked_rows = False
        self._tracker: RowTracker | None = None
        self._is_distributed = tensor_parallel is not None or any(
            map(is_sharded, trainable.values())
        )
        self._foreign = ForeignLeaves(tuple(trainable.values()))
        self._reprobing = Reprobing()
        self._attributes, self._draws = PlainAttributes(model), DrawState()
        self._sums: dict[str, Tensor] = {}
        self._is_hidden = self._counts_unclipped = False
        self._attach()

    def _build_tensor(self, name: str, parameter: nn.Parameter) -> TrainedTensor:
        parallel = self._parallel
        by_rows = is_sharded(parameter) and not (parallel and parallel.is_whole_mesh)
        return TrainedTensor(
            name=name,
            parameter=parameter,
            shape=tuple(
                parameter.shape
                if parallel is None
                else parallel.cut_shapes.get(name, parameter.shape)
            ),
            bucket=self._bucket if by_rows else None,
            contributes=parallel is None or parallel.contributes(name),
        )

    def _attach(self) -> None:
        self._blocks: dict[tuple[str, str], ClippingBlock] = {}
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._outer_units = set()
        modules = dict(self.model.named_modules())
        by_id = {id(target.parameter): target for target in self._tensors.values()}
        kernels: dict[str, tuple[Kernel, dict[str, GradientHook]]] = {}
        units: dict[str, dict[tuple[nn.Module, str], GradientHook]] = {
            path: {}
            for path in self._per_record | self._without_kernels
            if self._find_outer(path) in (path, None)
        }
        for path, layer in modules.items():
            targets = {
                name: by_id[id(parameter)]
                for name, parameter in layer.named_parameters(recurse=False)
                if id(parameter) in by_id
            }
            require_supported(path, layer, tuple(targets))
            owner = self._find_owner(path, modules, targets)
            kernel = (
                find_kernel(layer) if owner == path and path not in self._without_kernels else None
            )
            if kernel is not None and path not in self._moved_owners.values():
                kernels[path] = kernel, {n: self._build_hook(path, t) for n, t in targets.items()}
                continue
            for name, target in targets.items():
                units.setdefault(owner, {})[layer, name] = self._build_hook(owner, target)
        self._require_uses()
        active = [*kernels, *units]
        for path, (kernel, hooks) in kernels.items():
            if hooks:
                self._forwards.append(
                    (modules[path], partial(self._run_kernel, path, modules[path], kernel, hooks))
                )
        for path, unit_hooks in units.items():
            inner = any(other != path and _is_inside(other, path) for other in active)
            if inner:
                self._outer_units.add(path)
            unit = PerRecordModule(
                path=path, module=modules[path], hooks=unit_hooks, has_no_kernels=not inner
            )
            self._forwards.append((modules[path], partial(self._run_unit, path, unit)))
        for layer, run in self._forwards:
            layer.forward = run
        self._is_hidden = False
        self._hide_from_compiler()

    def _find_owner(
        self, path: str, modules: dict[str, nn.Module], targets: dict[str, TrainedTensor]
    ) -> str:
        """Return the path of the module that uses the tensors held by the module at ``path``."""
        while path and isinstance(modules[path], HOLDERS):
            path = path.rpartition(".")[0]
        above = path.rpartition(".")[0]
        if path and isinstance(modules[above], nn.MultiheadAttention):
            path = above
        for target in targets.values():
            path = self._moved_owners.get(id(target.parameter), path)
        outer = self._find_outer(path)
        return path if outer is None else outer

    def _find_outer(self, path: str) -> str | None:
        """Return the module around ``path`` that runs one record at a time with all inside it."""
        around = (
            outer for outer in self._without_kernels if path == outer or _is_inside(path, outer)
        )
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

    def run_outer_per_record(self, error: Exception) -> bool:
        """Run the module around the layer that failed with ``error`` one record at a time.

        If that fails because of kernels inside it, the module runs without them. Returns False if
        ``error`` names no layer, or if all modules around it already run so.
        """
        if isinstance(error, UnsupportedModel) and error.outside:
            for name in error.outside:
                target = self._tensors[name]
                before = self._moved_owners.get(id(target.parameter), name.rpartition(".")[0])
                if not before:
                    return False
                self._moved_owners[id(target.parameter)] = before.rpartition(".")[0]
        elif isinstance(error, MixedRecords) and error.path is not None:
            fails_with_kernels = self._outer_units if error.kernels_failed else set[str]()
            path: str | None = error.path
            if path not in fails_with_kernels:
                path = _parent(error.path)
                while path in self._per_record - fails_with_kernels:
                    path = _parent(path)
            if path is None:
                return False
            (self._without_kernels if path in fails_with_kernels else self._per_record).add(path)
        else:
            return False
        self.detach()
        self._attach()
        return True

    def _hide_from_compiler(self) -> None:
        """Exclude hooked layers from ``torch.compile``, if its (large) package is loaded."""
        if not self._is_hidden and "torch._dynamo" in sys.modules:
            self._is_hidden = True
            for layer, run in self._forwards:
                layer.forward = torch.compiler.disable(run)

    def _build_hook(self, path: str, target: TrainedTensor) -> GradientHook:
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
            ClippingBlock(
                name=name,
                clip_norm=clip_norm,
                counts_unclipped=self._counts_unclipped,
                is_shared=self._parallel is not None,
            ),
        )
        return GradientHook(target=target, block=block, microbatch=self._microbatch, path=path)

    def _run_kernel(
        self,
        path: str,
        layer: nn.Module,
        kernel: Kernel,
        hooks: dict[str, GradientHook],
        *inputs: Any,
        **kwargs: Any,
    ) -> Any:
        microbatch = self._microbatch
        if inputs and isinstance(inputs[0], Tensor):
            microbatch.is_half |= inputs[0].dtype in HALF_TYPES
            microbatch.is_half |= torch.is_autocast_enabled(inputs[0].device.type)
        if not microbatch.records or microbatch.is_observing:
            return type(layer).forward(layer, *inputs, **kwargs)
        for hook in hooks.values():
            hook.count()
        try:
            if microbatch.in_vmap:
                run = partial(kernel, layer, hooks, microbatch.records)
                return run_outside_vmap(run, microbatch, (inputs, kwargs), rows=True)
            self._check_rows(path, layer, inputs)
            return kernel(layer, hooks, microbatch.records, *inputs, **kwargs)
        except Exception as error:
            attributed = self._attribute_error(error, path)
            if attributed is error:
                raise
            raise attributed from error

    def _attribute_error(
        self, error: Exception, path: str, unit: PerRecordModule | None = None
    ) -> Exception:
        """Attribute ``error`` in a probe to the way ``path`` runs; unmodified, it ran before.

        In the backward pass, a checkpoint ends its recomputation by an exception of its own.
        """
        match error:
            case MixedRecords():
                if error.path is None:
                    error.path, error.kernels_failed = path, True
                return error
            case UnsupportedModel() | torch.OutOfMemoryError():
                return error
        if not self._microbatch.is_probing or self._microbatch.in_backward:
            return error
        if unit is not None:
            return unit.build_error(error)
        return MixedRecords(
            f"{path} cannot be run for all records at once: {first_line(error)} Keep the "
            "records in the first dimension, or freeze it.",
            path=path,
            kernels_failed=True,
        )

    def _run_unit(self, path: str, unit: PerRecordModule, *inputs: Any, **kwargs: Any) -> Any:
        microbatch = self._microbatch
        if microbatch.is_observing:
            unit.observe((inputs, kwargs), microbatch.records)
        if not microbatch.records or microbatch.is_observing:
            return type(unit.module).forward(unit.module, *inputs, **kwargs)
        try:
            if microbatch.in_vmap:
                run = partial(unit.run, microbatch, all_inputs=True)
                return run_outside_vmap(
                    lambda *i, **n: run((i, n)), microbatch, (inputs, kwargs), rows=False
                )
            self._require_even_rows(path, tree_leaves((inputs, kwargs)))
            with nullcontext() if self._tracker is None else self._tracker.paused():
                return unit.run(microbatch, (inputs, kwargs))
        except Exception as error:
            attributed = self._attribute_error(error, path, unit)
            if attributed is error:
                raise
            raise attributed from error

    def _require_even_rows(self, path: str, values: Sequence[Any]) -> None:
        """Raise ``MixedRecords`` if a mask picked more rows of one record than of another."""
        self._has_picked_rows |= require_even_rows(self._tracker, path, values)

    def _check_rows(self, path: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note that several rows belong to a record; only a probe can tell which ones."""
        records = self._microbatch.records
        if self._tracker is not None:
            self._require_even_rows(path, inputs)
        if isinstance(layer, nn.RNNBase) or not inputs or not isinstance(inputs[0], Tensor):
            return
        rows = len(inputs[0]) if inputs[0].ndim else 0
        if rows in (0, 1, records) or rows % records or path in self._folded_paths:
            return
        if self._microbatch.probe_rows is None:
            raise MixedRecords(
                f"{path}: the layer sees {rows} rows for {records} records, and it is "
                "unknown whose they are. Probe the model first (trainer.clipping.probe), or keep "
                "the records in the first dimension.",
                path=path,
            )
        if rows in self._masked_sizes.get(records, ()):
            raise MixedRecords(
                f"{path}: the layer sees {rows} rows that a mask picked for {records} records. "
                "Others may have more or fewer, and it is unknown whose a row is. Keep the records "
                "in the first dimension, and mask the losses instead of packing rows.",
                path=path,
            )
        self._folded_paths.add(path)

    def set_clip_norms(self, blocks: Sequence[BlockSpec]) -> None:
        """Clip by the norms of ``blocks`` from now on, which are the same blocks otherwise.

        Raises ``UnsupportedModel`` for other blocks and for norms out of range.
        """
        require_partition({name: of.parameter for name, of in self._tensors.items()}, blocks)
        before = {(spec.name, spec.names, tuple(spec.uses)) for spec in self.specs}
        if before != {(spec.name, spec.names, tuple(spec.uses)) for spec in blocks}:
            raise UnsupportedModel("the blocks changed; only clip norms may change.")
        self.specs = tuple(blocks)
        for spec in blocks:
            for path in spec.uses or ("",):
                self._blocks[spec.name, path].clip_norm = spec.uses.get(path, spec.clip_norm)

    def accumulate(
        self,
        losses: Callable[[], Tensor],
        *,
        records: int,
        idle: bool = False,
        losses_of: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Add one microbatch to the clipped sums and return its losses, detached.

        ``losses`` runs the model and returns one loss for each of ``records`` records, shape
        (records,). An empty microbatch adds nothing. Records of an ``idle`` microbatch are made up,
        so that other ranks can run theirs, and add nothing. ``losses_of`` returns the losses of a
        microbatch of the records with the numbers (records,), to probe the microbatch again. Raises
        ``MixedRecords`` and ``UnsupportedModel``; then nothing was added.
        """
        if records == 0:
            return torch.zeros(0)
        require_true_float32()
        may_reprobe = losses_of is not None and not idle and not self._is_distributed
        draws = self._draws.save() if may_reprobe else None
        attributes = self._attributes.copy() if may_reprobe else []
        with self._running(records, idle=idle):
            before = self._stored_versions()
            with self._set_gradients_aside():
                result = self._backward(losses)
                with torch.no_grad(), torch.autocast(result.device.type, enabled=False):
                    pending = PendingUses(self._blocks.values())
                    pending.clip(self._joint_norms(pending))
                    self._bucket.flush()
                self._require_hooked()
            self._require_unchanged_versions(before)
            is_half = self._microbatch.is_half
            totals = {name: target.total for name, target in self._tensors.items()}
        if draws is not None:
            assert losses_of is not None
            after = self._draws.save()
            moved = count_draws(draws, after)
            passes = self._reprobing.count_passes(
                graph=self._graph,
                attributes=self._attributes.sign(),
                draws=(records, self._graph, moved),
            )
            probed = Reprobed(
                losses_of=losses_of, losses=result, draws=draws, is_half=is_half, passes=passes
            )
            drawn = random.SystemRandom()
            places = drawn.sample(range(records), min(passes, records))
            first = drawn.getrandbits(1)
            for number, place in enumerate(places):
                try:
                    with self._attributes.restored():
                        if (first + number) % 2:  # as it was before the microbatch
                            reset_attributes(attributes)
                        self._probe_again(probed, place, moves=number == 2 and not any(moved))
                finally:
                    self._draws.restore(after)
        added = {name: total for name, total in totals.items() if total is not None}
        if both := added.keys() & self._sums.keys():
            names = [name for name in added if name in both]
            torch._foreach_add_([self._sums[n] for n in names], [added[n] for n in names])
        self._sums |= {name: total for name, total in added.items() if name not in self._sums}
        return result

    def _probe_again(self, probed: Reprobed, place: int, *, moves: bool) -> None:
        """Probe a microbatch for what others do to the record at ``place``.

        Others are replaced by one of them, drawn at random. If it ``moves``, they are also in other
        places, and one is left out. Raises ``MixedRecords``.
        """
        rows, at = probed.replace_others(place, moves=moves)
        compares_gradients = not moves and probed.compares_gradients()
        unclipped = {key: block.unclipped for key, block in self._blocks.items()}
        self._draws.restore(probed.draws)
        with self._set_gradients_aside(), self._running(len(rows)):
            microbatch = self._microbatch
            microbatch.only, microbatch.is_reprobe = at, True
            if compares_gradients:
                microbatch.probe_rows = []
            others_before = other_states()
            again = self._backward(partial(probed.losses_of, rows), at)
            gradients = microbatch.probe_rows
            with torch.no_grad(), torch.autocast(again.device.type, enabled=False):
                pending = PendingUses(self._blocks.values())
                pending.require_own_rows(at)
                pending.clip()
                for key, block in self._blocks.items():
                    block.unclipped = unclipped[key]
            added = {name: of.total for name, of in self._tensors.items() if of.total is not None}
        self._require_clipped(added)
        if self._draws.note_others(probed.draws, others_before):
            return  # its draws were others than the first time
        before = probed.losses[rows]
        if not moves:
            stayed = rows == torch.arange(len(rows))
            before, again = before[stayed], again[stayed]
        tolerance = relative_tolerance(before.dtype, is_half=probed.is_half or moves)
        scale = torch.maximum(before.abs(), probed.losses.abs().mean())
        if bool(((before - again).abs() > tolerance * scale).any()):
            raise MixedRecords(
                "the loss of a record changes when the other records of a microbatch are replaced: "
                "the model or the losses began to mix records, or keep state of their inputs. "
                "Compute each record's loss from that record alone, in every step."
            )
        if gradients is not None:
            self._draws.restore(probed.draws)
            together = self._collect_rows(
                partial(probed.losses_of, torch.arange(len(rows))), len(rows), place, together=True
            )
            self._require_same_gradient(gradients, together, tolerance)

    def _require_same_gradient(
        self,
        alone: list[tuple[GradientHook, Tensor]],
        together: list[tuple[GradientHook, Tensor]],
        tolerance: float,
    ) -> None:
        """Raise ``MixedRecords`` if a record's gradient differs with other records and losses."""
        one, other = (self._sums_of_rows(rows, 1) for rows in (alone, together))
        for name, (sums, sizes) in one.items():
            if not bool(((sums - other[name][0]).abs() <= tolerance * sizes).all()):
                raise MixedRecords(
                    f"{name}: the gradient of a record changes when the other records of a "
                    "microbatch are replaced. Look for hooks and backward passes that compare "
                    "records, and compute each record's loss from that record alone."
                )

    def _require_clipped(self, added: dict[str, Tensor]) -> None:
        """Raise ``MixedRecords`` if what one record adds is longer than its clip norms."""
        for spec in self.specs:
            parts = [added[name].double().norm() for name in spec.names if name in added]
            if parts and float(torch.stack(parts).norm()) > spec.clip_norm * (1 + CLIP_TOLERANCE):
                raise MixedRecords(
                    f"block {spec.name}: a record adds more than its clip norm to the sum. Look "
                    "for code that changes gradients in the backward pass, or the trainer's norms.",
                    code="clip_norm_exceeded",
                )

    def _stored_versions(self) -> dict[tuple[nn.Module, str], tuple[int, int] | None]:
        """Return the identity and version of each stored tensor, by its module and name.

        Tensors that are sharded now have None: each pass gathers and frees them.
        """
        return {
            (layer, name): None
            if self._is_distributed and is_sharded(item)
            else (id(item), 0 if item.is_inference() else item._version)
            for layer in self.model.modules()
            for stored in (layer._parameters, layer._buffers)
            if stored
            for name, item in stored.items()
            if item is not None and name not in layer._non_persistent_buffers_set
        }

    def _require_unchanged_versions(
        self, before: Mapping[tuple[nn.Module, str], tuple[int, int] | None]
    ) -> None:
        """Raise ``UnsupportedModel`` if a stored tensor was written to since ``before``."""
        now = self._stored_versions()
        if now == before:
            return
        paths = {layer: path for path, layer in self.model.named_modules()}
        self.require_unwritten(
            f"{paths[layer]}.{name}".lstrip(".")
            for (layer, name), item in now.items()
            if item is not None and before.get((layer, name), ()) not in (None, item)
        )

    def require_unwritten(self, names: Iterable[str]) -> None:
        """Raise ``UnsupportedModel`` if a forward pass wrote to the tensors ``names``."""
        if changed := sorted(names):
            remedy = "Remove such statistics, and change weights after optimizer.step()."
            if all(name.endswith(("_u", "_v")) for name in changed):
                remedy = (
                    "Remove spectral_norm (remove_spectral_norm, remove_parametrizations). To "
                    "bound the weights, divide them by their norms after optimizer.step(), and "
                    "call run.accept_weights()."
                )
            raise UnsupportedModel(
                f"{', '.join(changed)}: changes in a forward pass, and would store statistics of "
                f"raw data. {remedy}"
            )

    def _joint_norms(self, pending: PendingUses) -> dict[ClippingBlock, Tensor] | None:
        """Return the norms over all ranks that have a part; None if no other rank has one."""
        if self._parallel is None or not (local_norms := pending.norms()):
            return None
        joint = joint_norm(self._parallel.gather(torch.stack(list(local_norms.values()))))
        return {
            block: norms.to(item.dtype) * (1 + rounding_bound(4, item.dtype))
            for (block, item), norms in zip(local_norms.items(), joint, strict=True)
        }

    def _backward(self, losses: Callable[[], Tensor], only: int | None = None) -> Tensor:
        """Return the detached losses after a backward pass of all of them, or of ``only``'s."""
        self._hide_from_compiler()
        with torch.enable_grad():
            with self._tracking():
                result = losses()
            self._require_losses(result)
            if not self._is_distributed:  # fully_shard has two parameters for one tensor
                leaves, self._graph = read_graph(result)
                self._foreign.note(leaves)
            self._microbatch.in_backward = True  # from here on, layers recompute activations
            try:
                with torch.autocast(result.device.type, enabled=False):
                    (result if only is None else result[only]).sum().backward()
            finally:
                self._foreign.discard_gradients()
        return result.detach()

    @contextmanager
    def _tracking(self) -> Iterator[None]:
        """Follow the rows that a mask picks: in a probe, and where a probe saw that it does."""
        if not self._microbatch.is_probing and not self._has_picked_rows:
            yield
            return
        self._tracker = RowTracker(self._microbatch.records)
        try:
            with self._tracker:
                yield
        finally:
            self._tracker = None

    def _require_losses(self, losses: Tensor) -> None:
        if losses.shape != (self._microbatch.records,):
            raise MixedRecords(
                f"the loss has shape {tuple(losses.shape)}; return one value for each of the "
                f"{self._microbatch.records} records, not their mean."
            )

    def sums(self) -> dict[str, Tensor]:
        """Return the sums by name, each of its parameter's shape, in float32 or float64.

        For a sharded parameter, it is the local rows of the sum over all ranks.
        """
        return {
            name: self._sums[name]
            if name in self._sums
            else torch.zeros_like(local_tensor(of.parameter), dtype=accumulation_type(of.parameter))
            for name, of in self._tensors.items()
        }

    def require_no_gradients(self) -> None:
        """Raise ``UnsupportedModel`` if another backward pass left a gradient."""
        for name, target in self._tensors.items():
            grad = target.parameter.grad
            if grad is not None and bool(local_tensor(grad).any()):
                raise UnsupportedModel(
                    f"{name} has a gradient from a loss outside the run, which is not trained "
                    "on. Include every term in the losses of the records, or set the gradient "
                    "to None after using it.",
                    code="foreign_gradient",
                )

    def clear_sums(self) -> None:
        """Discard the sums, to begin a lot."""
        self._sums.clear()

    def count_unclipped(self) -> None:
        """From now on, count the records of each block whose norm is at most the clip norm.

        Raises ``UnsupportedModel`` for a tensor whose uses are clipped separately.
        """
        for spec in self.specs:
            if spec.uses:
                raise UnsupportedModel(
                    f"block {spec.name}: each use of its tensor is clipped separately, so its clip "
                    "norms cannot be adapted. Remove uses or adaptive_clipping_quantile."
                )
        self._counts_unclipped = True
        for block in self._blocks.values():
            block.counts_unclipped = True

    def take_unclipped_counts(self) -> dict[str, int]:
        """Return the counts since the last call, by block, and reset them."""
        result = {}
        for (name, _), block in self._blocks.items():
            result[name], block.unclipped = block.unclipped, 0
        return result

    def observe(self, losses: Callable[[], Tensor], *, records: int) -> bool:
        """Run the unmodified model and note which inputs of its modules belong to records.

        ``losses`` returns shape (records,). Returns whether the model ran in a half type. Raises
        ``UnsupportedModel`` if the losses take a gradient.
        """
        self._microbatch.is_observing = True
        try:
            with RowTracker(records) as tracker:
                self.losses(losses, records=records)
            self._masked_sizes[records] = tracker.sizes
            return self._microbatch.is_half
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise UnsupportedModel(LOSS_TAKES_GRADIENT) from error
        finally:
            self._microbatch.is_observing = False

    def losses(self, losses: Callable[[], Tensor], *, records: int) -> Tensor:
        """Return the losses, shape (records,), with layers running as in training."""
        with self._running(records), torch.no_grad():
            result = losses()
            self._require_losses(result)
            return result

    def uses(self, losses: Callable[[], Tensor], *, records: int) -> dict[str, int]:
        """Count the uses of each trainable tensor, by name, in a training or evaluation pass.

        ``losses`` returns shape (records,). Gradients are restored, and no sums are kept. Raises
        ``UnsupportedModel`` if a tensor is used in neither mode.
        """
        result = dict.fromkeys(self._tensors, 0)
        modes: list[AbstractContextManager[None]] = [nullcontext(), evaluation_mode(self.model)]
        for mode in modes:
            with mode:
                self.accumulate(losses, records=records)
            for name, target in self._tensors.items():
                result[name] = result[name] or target.received
        self.clear_sums()
        self._require_used(result)
        return result

    def require_independent_gradients(
        self, losses: Callable[[], Tensor], *, records: int, tolerance: float
    ) -> None:
        """Raise ``MixedRecords`` if a record's gradients differ from those of its loss alone.

        ``losses`` returns shape (records,), with the same random draws in each call. Gradients may
        differ by ``tolerance``. They are restored.
        """
        separate = [self._collect_rows(losses, records, only) for only in range(records)]
        together = self._collect_rows(losses, records)
        self._require_equal_on_ranks(together, tolerance)
        for only, rows in enumerate(separate):
            largest = max((float(row[0, 1]) for _, row in rows), default=0.0)
            for (hook, row), (_, all_rows) in zip(rows, together, strict=True):
                gap = float((row[0] - all_rows[only]).abs().max())
                if not gap <= tolerance * (float(row[0, 1]) + largest / 1000):
                    raise MixedRecords(
                        f"{hook.target.name}: the gradient of a record depends on the losses of "
                        "others: a gradient hook or a backward pass above the layer compares "
                        "records. Make it treat each row separately.",
                        path=hook.path,
                    )

    def _require_equal_on_ranks(
        self, rows: list[tuple[GradientHook, Tensor]], tolerance: float
    ) -> None:
        """Raise ``UnsupportedModel`` if ranks differ in a gradient that each has in full."""
        if self._parallel is None:
            return
        for hook, row in rows:
            if hook.target.name in self._parallel.cut_shapes:
                continue
            first, *others = self._parallel.gather(row)
            scale = float(first[:, 1].max()) * hook.target.parameter.numel() ** 0.5
            if any(not float((first - other).abs().max()) <= tolerance * scale for other in others):
                raise UnsupportedModel(
                    f"{hook.target.name}: each rank of tensor parallelism has another gradient, "
                    "because its layer sees only a part of a record (of the sequence or the "
                    "heads). Give it whole activations (output_layouts=Replicate()), or freeze "
                    "the tensor."
                )

    def require_autograd_gradients(
        self, losses: Callable[[Tensor], Tensor], records: Tensor, *, tolerance: float
    ) -> None:
        """Raise ``UnsupportedModel`` if a hook's gradient differs from autograd's.

        ``losses`` returns the losses of ``records`` (n,) or of one of them. Only a weighted sum of
        each tensor's gradient is compared. Gradients are restored.
        """
        rows = self.gradients(partial(losses, records), records=len(records))
        with self._set_gradients_aside(), torch.enable_grad():
            for place, record in enumerate(records):
                losses(record[None]).sum().backward()  # reentrant checkpoints need backward()
                for name, target in self._tensors.items():
                    grad, target.parameter.grad = target.parameter.grad, None
                    if grad is not None and not bool(grad.isfinite().all()):
                        raise UnsupportedModel(
                            f"{target.name}: the gradient of a record is nan or infinite, though "
                            "its loss is not. Look for a branch of torch.where that is not taken, "
                            "a root or logarithm of zero, or a softmax of masked entries alone. In "
                            "float64, masks overflow in a softmax that is in float32 (Longformer): "
                            "train such a model in float32."
                        )
                    gap, size = rows[name][:, place].tolist()
                    gap -= 0.0 if grad is None else float(position_weighted_sum(grad.double()))
                    if not abs(gap) <= tolerance * size:
                        raise UnsupportedModel(
                            f"{name}: run one record at a time, its layer's gradient "
                            "differs from autograd's. Remove gradient hooks from the model, or "
                            "freeze the tensor.",
                            outside=(name,),
                        )

    def gradients(self, losses: Callable[[], Tensor], *, records: int) -> dict[str, Tensor]:
        """Return a weighted sum of each record's gradient, and its possible size; (2, n) by name.

        ``losses`` returns shape (records,). Gradients are restored.
        """
        return self._sums_of_rows(self._collect_rows(losses, records), records)

    def _sums_of_rows(
        self, rows: Iterable[tuple[GradientHook, Tensor]], records: int
    ) -> dict[str, Tensor]:
        result = {name: torch.zeros(2, records, dtype=torch.float64) for name in self._tensors}
        for hook, row in rows:
            result[hook.target.name] += row.T.cpu()
        least = max(float(item[1].max()) for item in result.values()) / 100
        for name, (_, size) in result.items():
            size.mul_(self._tensors[name].parameter.numel() ** 0.5).add_(least)
        return result

    def _collect_rows(
        self,
        losses: Callable[[], Tensor],
        records: int,
        only: int | None = None,
        *,
        together: bool = False,
    ) -> list[tuple[GradientHook, Tensor]]:
        """Return sums and norms of each record's gradient, or of ``only``'s; (n, 2) or (1, 2).

        ``only``'s loss is differentiated alone, or ``together`` with those of the others.
        """
        with self._set_gradients_aside(), self._running(records):
            rows: list[tuple[GradientHook, Tensor]] = []
            self._microbatch.only, self._microbatch.probe_rows = only, rows
            self._microbatch.is_together = together
            self._backward(losses, None if together else only)
            self._require_hooked()
            return rows

    def _require_hooked(self) -> None:
        outside = [t.name for t in self._tensors.values() if t.parameter.grad is not None]
        if outside:
            raise UnsupportedModel(
                f"{', '.join(outside)}: used outside its layer as well, where per-record gradients "
                "are unknown. Call the layer itself; use a tensor that only the losses read (a "
                "temperature) in the model's forward; or freeze the tensor.",
                outside=tuple(outside),
            )
        # The sum of a tensor that a pass leaves out (a layer dropped at random) is zero. Ranks that
        # add sums together, and counts of unclipped records, need each tensor in each pass.
        self._require_used(
            {
                target.name: target.received
                for target in self._tensors.values()
                if self._counts_unclipped or is_sharded(target.parameter)
            }
        )

    def _require_used(self, uses: dict[str, int]) -> None:
        silent = [name for name, times in uses.items() if not times]
        if silent:
            raise UnsupportedModel(
                f"no gradient was received for {', '.join(silent)}: the model does not use the "
                "tensor in its layer. Call the layer itself, or freeze the tensor."
            )

    @contextmanager
    def _running(self, records: int, *, idle: bool = False) -> Iterator[None]:
        self._microbatch.begin(records)
        for target in self._tensors.values():
            target.received, target.idle = 0, idle
        try:
            yield
        finally:
            self._microbatch.end()
            self._bucket.clear()
            for block in self._blocks.values():
                block.clear()
            for target in self._tensors.values():
                target.total = None

    @contextmanager
    def _set_gradients_aside(self) -> Iterator[None]:
        """Set gradients aside: a gradient that autograd stores meanwhile bypassed the hooks."""
        gradients = [(item.parameter, item.parameter.grad) for item in self._tensors.values()]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in gradients:
                parameter.grad = grad

    def detach(self) -> None:
        """Restore the forward method of the layers."""
        for layer, _ in self._forwards:
            layer.__dict__.pop("forward", None)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch ``model`` to evaluation mode, and restore the mode of each layer afterwards.

    Recurrent layers run without cuDNN, whose backward pass needs training mode.
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


def _parent(path: str) -> str | None:
    """Return the path of the module around ``path``, or None for the model itself."""
    return path.rpartition(".")[0] if path else None


def _is_inside(path: str, above: str) -> bool:
    return not above or path.startswith(f"{above}.")
