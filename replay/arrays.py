"""Tensors, arrays and numbers in nested containers, of whatever library.

>>> [name for name, _ in leaves({"w": [1.0, 2.0], "b": 3.0})]
["['w'][0]", "['w'][1]", "['b']"]
>>> with_leaves({"w": [1.0, 2.0], "b": 3.0}, iter(np.array([5.0, 6.0, 7.0])))
{'w': [5.0, 6.0], 'b': 7.0}
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np


class Traced(BaseException):
    """JAX traces the function that makes a release, so its values are not there to be read."""

    @classmethod
    def refuse(cls, values: Iterable[Any]) -> None:
        """Raise if one of ``values`` is a tracer of JAX."""
        jax = sys.modules.get("jax")
        if jax is not None and any(isinstance(value, jax.core.Tracer) for value in values):
            raise cls("replay reads no release inside of jax.vmap, jax.grad or jax.pmap")


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Return the tensors, arrays and numbers in ``value``, with their places."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from leaves(item, f"{name}[{place}]")
    else:
        yield name or "the release", value


def with_leaves(value: Any, arrays: Iterator[Any]) -> Any:
    """Return ``value`` with its leaves replaced by ``arrays``, in their types."""
    if isinstance(value, dict):
        return type(value)({key: with_leaves(item, arrays) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_leaves(item, arrays) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(with_leaves(item, arrays) for item in value)
    array = next(arrays)
    if hasattr(value, "new_tensor"):
        return value.new_tensor(array).reshape(value.shape)
    if hasattr(value, "dtype"):
        made = np.asarray(array, dtype=str(value.dtype)).reshape(value.shape)
        return made if isinstance(value, np.ndarray) else value * 0 + made
    return type(value)(array)


def local_part(tensor: Any) -> Any:
    """Return this process's part of a sharded tensor, and any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def array_of(value: Any) -> Any:
    """Return a copy of a tensor, array or number as an array; bfloat16 becomes float32."""
    if hasattr(value, "detach"):
        item = local_part(value.detach()).cpu()
        return (item.float() if str(item.dtype) == "torch.bfloat16" else item).numpy().copy()
    Traced.refuse([value])
    if "bfloat16" in str(getattr(value, "dtype", "")):
        value = value.astype("float32")
    return np.array(value)
