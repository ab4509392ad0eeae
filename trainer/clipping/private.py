"""A model whose backward pass leaves clipped sums in ``parameter.grad``.

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
>>> bool(model[0].weight.grad.norm() <= 5)
True

A tensor that is used several times (a layer that is called twice, a tied output head) is
clipped by the exact norm of the sum of its uses, or, where its ``BlockSpec`` has ``uses``,
each use by itself, which costs the sum of their clip norms
(``affidavit.trainer.clipping.tied_weights`` has the third rule).

Parameters are float32 or float64; inputs may be in bfloat16 by autocast. Activations may be
recomputed (``torch.utils.checkpoint``, both kinds). Under ``torch.compile`` the layers that
have taps run as they are, and what lies between them is compiled.

A step that fails leaves every gradient as it was. Refused by name: batch normalisation and
other layers that mix records, layers with parameters of a kind that is not known here,
tensors in no block or in two, and tensors used outside their layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from affidavit.trainer.clipping.hooks import Block, GradientHook, Lot, MixedRecords, Target
from affidavit.trainer.clipping.layers import RUNS
from affidavit.trainer.clipping.requirements import (
    BlockSpec,
    UnsupportedModel,
    require_partition,
    require_supported,
)
from affidavit.trainer.numerics import require_true_float32

__all__ = ["BlockSpec", "MixedRecords", "PrivateModel", "UnsupportedModel"]


class PrivateModel:
    """``model`` with a tap on every use of a trainable tensor; undone by ``detach``.

    Raises ``UnsupportedModel`` where the model or the blocks cannot be trained privately.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[BlockSpec]) -> None:
        self.model = model
        self.specs = tuple(blocks)
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        require_partition(trainable, self.specs)
        self._lot = Lot()
        self._targets = {id(p): Target(name=n, parameter=p) for n, p in trainable.items()}
        self._blocks: dict[tuple[str, str], Block] = {}
        self._runs: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        self._hidden = False
        self._attach({name: spec for spec in self.specs for name in spec.names})

    def _attach(self, spec_of: dict[str, BlockSpec]) -> None:
        for path, layer in self.model.named_modules():
            targets = {
                name: self._targets[id(parameter)]
                for name, parameter in layer.named_parameters(recurse=False)
                if id(parameter) in self._targets
            }
            require_supported(path, layer, tuple(targets))
            if targets:
                taps = {
                    name: self._tap(path, target, spec_of[target.name])
                    for name, target in targets.items()
                }
                self._runs.append((layer, partial(self._run, layer, taps)))
        for spec in self.specs:
            unknown = sorted(
                set(spec.uses) - {use for name, use in self._blocks if name == spec.name}
            )
            if unknown:
                raise UnsupportedModel(
                    f"block {spec.name}: {', '.join(unknown)} is no layer that uses its tensor."
                )
        for layer, run in self._runs:
            layer.forward = run

    def _hide_from_compiler(self) -> None:
        """Have ``torch.compile`` leave taps alone, once its (large) package is loaded at all."""
        if not self._hidden and "torch._dynamo" in sys.modules:
            self._hidden = True
            for layer, run in self._runs:
                layer.forward = torch.compiler.disable(run)

    def _tap(self, path: str, target: Target, spec: BlockSpec) -> GradientHook:
        if spec.uses and path not in spec.uses:
            raise UnsupportedModel(
                f"block {spec.name}: {path} uses {target.name} too, and has no clip norm in uses."
            )
        key = (spec.name, path if spec.uses else "")
        clip_norm = spec.uses.get(path, spec.clip_norm)
        name = f"{spec.name} ({path})" if spec.uses else spec.name
        block = self._blocks.setdefault(key, Block(name=name, clip_norm=clip_norm))
        return GradientHook(target=target, block=block, lot=self._lot)

    def _run(
        self, layer: nn.Module, taps: dict[str, GradientHook], *inputs: Any, **named: Any
    ) -> Tensor:
        if not self._lot.records:
            return type(layer).forward(layer, *inputs, **named)
        (x,) = (*inputs, *named.values())
        for tap in taps.values():
            tap.count()
        self._lot.narrow |= torch.is_autocast_enabled(x.device.type)
        return RUNS[type(layer)](layer, taps, self._lot.records, x)

    def set_clip_norms(self, blocks: Sequence[BlockSpec]) -> None:
        """Clip by the norms of ``blocks`` from now on; they are the same blocks otherwise.

        Raises ``UnsupportedModel`` for other blocks and for norms out of range.
        """
        require_partition({t.name: t.parameter for t in self._targets.values()}, blocks)
        before = {(spec.name, spec.names, tuple(spec.uses)) for spec in self.specs}
        if before != {(spec.name, spec.names, tuple(spec.uses)) for spec in blocks}:
            raise UnsupportedModel("these are other blocks; only clip norms may change.")
        self.specs = tuple(blocks)
        for spec in blocks:
            for path in spec.uses or ("",):
                self._blocks[spec.name, path].clip_norm = spec.uses.get(path, spec.clip_norm)

    def accumulate(self, losses: Callable[[], Tensor], *, records: int) -> Tensor:
        """Add the clipped sums of one microbatch to the gradients; the losses, detached.

        ``losses`` runs the model and returns one loss for each of ``records`` records,
        shape (records,). An empty microbatch adds nothing. Raises ``MixedRecords`` and
        ``UnsupportedModel``, and then nothing was added.
        """
        if records == 0:
            return torch.zeros(0)
        require_true_float32()
        self._hide_from_compiler()
        with self._lot_of(records):
            result = losses()
            if result.shape != (records,):
                raise MixedRecords(
                    f"the loss has shape {tuple(result.shape)}; return one value for each of the "
                    f"{records} records, not their mean."
                )
            with self._gradients_set_aside():
                self._lot.backward = True
                with torch.autocast(result.device.type, enabled=False):
                    result.sum().backward()
                    with torch.no_grad():
                        for block in self._blocks.values():
                            block.finish()
                self._require_caught()
            for target in self._targets.values():
                _add(target)
        return result.detach()

    def uses(self, losses: Callable[[], Tensor], *, records: int) -> dict[str, int]:
        """How often each trainable tensor is used in one pass, by name; gradients are kept.

        ``losses`` gives one of shape (records,).
        """
        before = {name: target.parameter.grad for name, target in self._by_name().items()}
        for target in self._targets.values():
            target.parameter.grad = None
        try:
            self.accumulate(losses, records=records)
            return {name: target.caught for name, target in self._by_name().items()}
        finally:
            for name, target in self._by_name().items():
                target.parameter.grad = before[name]

    @property
    def saw_narrow_types(self) -> bool:
        """Whether the last pass ran under autocast."""
        return self._lot.narrow

    def _by_name(self) -> dict[str, Target]:
        return {target.name: target for target in self._targets.values()}

    def _require_caught(self) -> None:
        outside = [t.name for t in self._targets.values() if t.parameter.grad is not None]
        if outside:
            raise UnsupportedModel(
                f"{', '.join(outside)}: used outside its layer as well, where no record's share is "
                "known. Call the layer itself, or freeze the tensor."
            )
        silent = [target.name for target in self._targets.values() if not target.caught]
        if silent:
            raise UnsupportedModel(
                f"no gradient was caught for {', '.join(silent)}: the model does not use the "
                "tensor in its layer. Call the layer itself, or freeze the tensor."
            )

    @contextmanager
    def _lot_of(self, records: int) -> Iterator[None]:
        self._lot.records, self._lot.backward, self._lot.narrow = records, False, False
        for target in self._targets.values():
            target.caught = 0
        try:
            yield
        finally:
            self._lot.records = 0
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
        for layer in self.model.modules():
            layer.__dict__.pop("forward", None)


def _add(target: Target) -> None:
    if target.parameter.grad is None:
        target.parameter.grad = target.total
    elif target.total is not None:
        target.parameter.grad.add_(target.total)
