"""Functions under ``jax.jit`` that make a release run without it, line by line.

So the release's values can be read, and a report can name its lines. Tracing ends with ``Traced``
where a release is made; then the function, or the loop of ``jax.lax``, runs in Python.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from affidavit.replay.arrays import Traced
from affidavit.replay.settings import Job

CONTROL_FLOW = ("scan", "map", "fori_loop", "while_loop", "cond", "switch")


def install(jax: Any, job: Job) -> None:
    """Change ``jax.jit`` and the loops of ``jax.lax`` from now on."""
    _share_compiled(jax, job)
    jax.jit = _unless_released(jax, jax.jit)
    for name in CONTROL_FLOW:
        setattr(jax.lax, name, _by_python(jax, getattr(jax.lax, name)))


def _share_compiled(jax: Any, job: Job) -> None:
    """Let a run find what the first run compiled."""
    folder = Path(job.out) / "compiled"
    if job.first is not None:
        shutil.copytree(Path(job.first) / "compiled", folder)
    folder.mkdir(exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # its paths alter the keys
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _unless_released(jax: Any, compile_function: Any) -> Any:
    """Return ``jax.jit``, which leaves a function that makes a release as it is."""

    def as_array(leaf: Any) -> Any:
        return jax.numpy.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    @functools.wraps(compile_function)
    def jit(function: Any = None, /, **options: Any) -> Any:
        if function is None:
            return functools.partial(jit, **options)
        compiled, released = compile_function(function, **options), False

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal released
            if not released:
                try:
                    return compiled(*args, **kwargs)
                except Traced:
                    released = True
            args, kwargs = jax.tree.map(as_array, (args, kwargs))
            return function(*args, **kwargs)

        for name in ("lower", "trace", "eval_shape", "clear_cache"):
            setattr(call, name, getattr(compiled, name, None))
        return call

    return jit


def _by_python(jax: Any, original: Any) -> Any:
    """Return a loop or branch of ``jax.lax``, which runs in Python if it makes a release."""

    @functools.wraps(original)
    def control(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Traced:
            with jax.disable_jit():
                return original(*args, **kwargs)

    return control
