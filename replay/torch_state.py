"""Digests of all state of PyTorch in this process: models, optimisers, schedulers.

Modules, optimisers and schedulers are noted when they are made, copied or unpickled, and named by
their class and, after the first of a class, its number: ``Net.fc.weight``, ``Net#2.fc.weight``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from affidavit.replay.arrays import local_part

PREFIX = "_module."
"""Prefix of names in Opacus' wrapped model."""


_modules: list[weakref.ref[Any]] = []
_optimizers: list[weakref.ref[Any]] = []
_schedulers: list[weakref.ref[Any]] = []


@cache
def note_objects() -> None:
    """Note modules, optimisers and schedulers from now on.

    Changing ``nn.Module`` takes a fifth of a second, so it is done once, before the runs fork.
    """
    nn = importlib.import_module("torch.nn")
    optim = importlib.import_module("torch.optim")
    note_after(nn.Module, "__init__", _modules)
    note_after(nn.Module, "__setstate__", _modules)
    note_after(optim.Optimizer, "__init__", _optimizers)
    note_after(optim.lr_scheduler.LRScheduler, "__init__", _schedulers)


class TorchState:
    """The modules, optimisers and schedulers that are alive, in the order of their making."""

    def __init__(self) -> None:
        note_objects()
        self._modules, self._optimizers, self._schedulers = _modules, _optimizers, _schedulers
        self._at_release: list[Any] = []
        self.extra: list[Callable[[], Iterator[tuple[str, str]]]] = []

    def keep(self) -> None:
        """Keep what is alive at a release, so that it can be compared after the loop's end."""
        of_all = (self._modules, self._optimizers, self._schedulers)
        self._at_release = [item for references in of_all for item in alive(references)]

    def tensors(self) -> dict[str, Any]:
        """Return all parameters and buffers by name; each tensor has one name."""
        modules = list(alive(self._modules))
        inner = {id(child) for module in modules for child in module._modules.values()}
        tensors: dict[str, Any] = {}
        seen: set[int] = set()
        numbers: dict[str, int] = {}
        for root in (module for module in modules if id(module) not in inner):
            name = type(root).__name__
            if name.startswith("GradSampleModule"):
                name = type(root._module).__name__
            numbers[name] = numbers.get(name, 0) + 1
            prefix = name if numbers[name] == 1 else f"{name}#{numbers[name]}"
            for place, tensor in (*root.named_parameters(), *root.named_buffers()):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    tensors[f"{prefix}.{place.removeprefix(PREFIX)}"] = tensor
        loose = 0
        for optimizer in alive(self._optimizers):
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    if id(tensor) not in seen:
                        seen.add(id(tensor))
                        loose += 1
                        tensors[f"{type(optimizer).__name__}.tensor {loose}"] = tensor
        return tensors

    def names_of(self, parameters: list[Any]) -> list[str]:
        """Return the names of ``parameters``."""
        names = {id(tensor): name for name, tensor in self.tensors().items()}
        return [names.get(id(item), f"parameter {place}") for place, item in enumerate(parameters)]

    def digests(self) -> dict[str, str]:
        """Return a digest of each parameter, buffer, optimiser and scheduler."""
        tensors = self.tensors()
        result = {name: digest_of(tensor) for name, tensor in tensors.items()}
        names = {id(tensor): name for name, tensor in tensors.items()}
        for optimizer in alive(self._optimizers):
            kind = type(optimizer).__name__
            for place, group in enumerate(optimizer.param_groups):
                settings = {key: value for key, value in group.items() if key != "params"}
                for key, value in settings.items():
                    result[f"{kind}.param_groups[{place}].{key}"] = digest_of(value)
            for parameter, state in list(optimizer.state.items()):
                name = names.get(id(parameter), "a tensor")
                result[f"{kind}.state of {name}"] = digest_of(state)
        for scheduler in alive(self._schedulers):
            for key, value in scheduler.state_dict().items():
                result[f"{type(scheduler).__name__}.{key}"] = digest_of(value)
        for more in self.extra:
            result.update(more())
        return result


def alive(references: list[weakref.ref[Any]]) -> Iterator[Any]:
    """Return the objects that still exist."""
    return (item for reference in references if (item := reference()) is not None)


def note_after(kind: Any, method: str, references: list[weakref.ref[Any]]) -> None:
    """Let ``method`` of ``kind`` add its object to ``references``."""
    original = getattr(kind, method)

    @functools.wraps(original)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not any(reference() is self for reference in references):
            references.append(weakref.ref(self))
        return result

    setattr(kind, method, noting)


def digest_of(value: Any) -> str:
    """Return a digest of a tensor, array, number or container of them; functions are left out."""
    digest = hashlib.blake2b(digest_size=12)
    _update(digest, value)
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        item = local_part(value.detach())
        digest.update(f"{item.dtype} {tuple(item.shape)} ".encode())
        if item.numel() and not item.is_meta:
            flat = item.cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes"):
        digest.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            digest.update(f"{key}: ".encode())
            _update(digest, item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            _update(digest, item)
    elif isinstance(value, str | bytes | int | float | complex | bool | type(None)):
        digest.update(json.dumps(repr(value)).encode())
    else:
        digest.update(type(value).__name__.encode())
