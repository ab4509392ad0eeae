"""Tensors that steps use and no noise reaches: frozen parameters, buffers, an optimiser's state.

A loop may fill them between steps with values of raw records: a centre of features, a whitening
matrix, a momentum. Later steps would then depend on those records beyond their clipped
contributions. Buffers that are not saved are left out, because modules cache in them.

>>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
>>> _ = model[0].requires_grad_(False)
>>> optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
>>> optimizer.state[model[1].bias]["momentum_buffer"] = torch.zeros(1)
>>> tensors = UntrainedTensors(model, optimizer)
>>> tensors.accept()
>>> _ = model[0].bias.add_(1.0), optimizer.state[model[1].bias]["momentum_buffer"].add_(1.0)
>>> tensors.find_changed()
['0.bias', "optimizer.state[0]['momentum_buffer']"]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from affidavit.trainer.distributed.shards import is_sharded
from affidavit.trainer.norm_bounds import checksum

Mark = tuple[int, int]
"""The identity and version of a tensor."""


class UntrainedTensors:
    """Those of ``model`` and ``optimizer``; shards are left out, which each pass moves."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        groups = optimizer.param_groups
        self._trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        self._marks: dict[str, Mark] = {}
        self._checksums: dict[str, int] = {}
        self._state: dict[tuple[int, str], Mark] = {}

    def accept(self) -> None:
        """Note all of them as they are."""
        for name, item in self._stored():
            if (mark := _mark(item)) != self._marks.get(name):
                self._marks[name], self._checksums[name] = mark, _checksum(item)
        self.accept_state()

    def accept_state(self) -> None:
        """Note the optimiser's state after its step, in which only it wrote."""
        self._state = self._marks_of_state()

    def find_changed(self) -> list[str]:
        """Return the names of those that changed since they were noted.

        Frozen parameters and buffers may have been swapped, and restored.
        """
        result = []
        for name, item in self._stored():
            if (mark := _mark(item)) != self._marks.get(name):
                if _checksum(item) == self._checksums.get(name):
                    self._marks[name] = mark
                else:
                    result.append(name)
        for (place, key), mark in self._marks_of_state().items():
            if mark != self._state.get((place, key)):
                result.append(f"optimizer.state[{place}][{key!r}]")
        return result

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        for path, layer in self._model.named_modules():
            for stored in (layer._parameters, layer._buffers):
                for name, item in stored.items():
                    if item is None or item.requires_grad or id(item) in self._trained:
                        continue
                    if is_sharded(item) or item.is_meta:
                        continue
                    if name not in layer._non_persistent_buffers_set:
                        yield f"{path}.{name}".lstrip("."), item

    def _marks_of_state(self) -> dict[tuple[int, str], Mark]:
        return {
            (place, key): _mark(item)
            for place, of in enumerate(self._optimizer.state.values())
            for key, item in of.items()
            if isinstance(item, Tensor)
        }


def _mark(item: Tensor) -> Mark:
    return id(item), 0 if item.is_inference() else item._version


def _checksum(item: Tensor) -> int:
    """Return a number that tells other contents, or for packed contents another version."""
    is_plain = type(item) in (Tensor, nn.Parameter) and item.dtype.itemsize <= 8
    return int(checksum(item)) if is_plain else hash(_mark(item))
