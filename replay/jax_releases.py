"""The releases of jax-privacy: the sums that its noise transforms get, and what they return.

The clipped gradient and the noise are compiled, and what is around them runs in Python. The
parameters at which gradients are clipped are the state that is compared. The bound of a release is
that of the last clipped gradient. Of correlated noise only the sensitivity is tested.

Lots are those of the batch selection strategies. They draw places of records, so the records are
the rows of the variables of the loop that have as many. The batches of another loader are found
where they are clipped: their rows are rows of variables of the loop.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from affidavit.replay import jax_tracing
from affidavit.replay.arrays import Traced, array_of
from affidavit.replay.datasets import (
    Records,
    all_subclasses,
    arrays_in,
    places_of_keys,
    row_keys,
    same_as_first,
)
from affidavit.replay.recorder import Recorder
from affidavit.replay.torch_state import digest_of


def install(recorder: Recorder, records: Records) -> JaxState:
    """Record marked releases in JAX, and those and the lots of jax-privacy, from now on."""
    jax = importlib.import_module("jax")
    compile_function = jax.jit
    jax_tracing.install(jax, recorder.job)
    state = JaxState(jax, recorder)
    if "jax_privacy" in sys.modules:
        _watch_package(jax, compile_function, state, _Batches(jax, records, state))
        _watch_lots(records, state)
        _solve_once(recorder)
    return state


def _watch_package(jax: Any, compile_function: Any, state: JaxState, batches: _Batches) -> None:
    package: Any = importlib.import_module("jax_privacy")
    clipping: Any = importlib.import_module("jax_privacy.clipping")
    clipping.clipped_grad = package.clipped_grad = _watched_gradient(
        jax, clipping.clipped_grad, compile_function, state, batches
    )
    noise = importlib.import_module("jax_privacy.noise_addition")
    for kind in ("dense", "streaming"):
        name = f"_{kind}_matrix_factorization_privatizer"
        setattr(noise, name, _watched_noise(jax, getattr(noise, name), compile_function, state))


class JaxState:
    """The parameters at which gradients are clipped, and the variables that hold them."""

    def __init__(self, jax: Any, recorder: Recorder) -> None:
        self._tree, self.recorder = jax.tree_util, recorder
        self._is_traced = lambda leaf: isinstance(leaf, jax.core.Tracer)
        self._parameters: dict[str, Any] = {}
        self._file = Path(recorder.job.first or recorder.job.out) / "parameters.json"
        if recorder.job.first is None:
            self._file.write_text("[]")
        self._variables: list[str] = json.loads(self._file.read_text())
        self.bound: float | None = None
        """The most, in l2, that a record adds to the clipped gradient."""

    def named(self, tree: Any) -> dict[str, Any]:
        """Return the leaves of ``tree`` by name."""
        paths, _ = self._tree.tree_flatten_with_path(tree)
        key = functools.partial(self._tree.keystr, simple=True, separator=".")
        return {key(path) or "the parameter": leaf for path, leaf in paths}

    def note(self, tree: Any) -> None:
        """Note the parameters, and in the first run which variables of the loop hold them."""
        self._parameters = self.named(tree)
        if self.recorder.job.first is not None:
            return
        first = next(iter(self._parameters.values()), None)
        self._variables = [
            f"{frame.f_code.co_qualname}.{name}"
            for frame in self.recorder.lines.frames()
            for name, value in list(frame.f_locals.items())
            if next(iter(self._tree.tree_leaves(value)), self) is first
        ]
        self._file.write_text(json.dumps(self._variables))

    def refresh(self) -> None:
        """Note the present parameters, which no later gradient may be taken at."""
        if (tree := self._held()) is not None:
            self._parameters = self.named(tree)

    def shapes(self) -> set[tuple[int, ...]]:
        """Return the shapes of the parameters."""
        return {leaf.shape for leaf in self._parameters.values()}

    def digests(self) -> dict[str, str]:
        """Return a digest of each parameter."""
        return {name: digest_of(np.asarray(leaf)) for name, leaf in self._parameters.items()}

    def value(self, key: str) -> str:
        """Return the digest of a parameter in the innermost variable that holds it."""
        leaf = self.named(self._held()).get(key)
        return "" if leaf is None else digest_of(np.asarray(leaf))

    def _held(self) -> Any:
        for frame in self.recorder.lines.frames():
            for variable in self._variables:
                function, _, name = variable.rpartition(".")
                if function != frame.f_code.co_qualname or name not in frame.f_locals:
                    continue
                held = frame.f_locals[name]
                if not any(map(self._is_traced, self._tree.tree_leaves(held))):
                    return held
        return None


class _Batches:
    """The batches of a loader that replay does not know, found by the values of their rows."""

    def __init__(self, jax: Any, records: Records, state: JaxState) -> None:
        self._tree, self._records, self._state = jax.tree_util, records, state
        self._are_marked: bool | None = None
        self._places: dict[int, list[int]] = {}

    def masked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch_argnums: int | Sequence[int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record the lot in the batch of a call, and return its arguments without a removed record.

        The lots of a strategy, and those that a line of the loop marks, are recorded before.
        """
        numbers = [batch_argnums] if isinstance(batch_argnums, int) else list(batch_argnums)
        columns = self._tree.tree_leaves([args[number] for number in numbers])
        if self._are_marked is None:
            self._are_marked = self._records.are_marked
            if not self._are_marked:
                self._find(columns)
        if not self._places:
            return args, kwargs
        matches = [self._places.get(key, [-1]) for key in row_keys(columns)]
        before = self._state.recorder.repeated(
            "batch", {str(row): equal for row, equal in enumerate(matches)}
        )
        drawn = same_as_first(before.values(), matches)
        remaining = set(self._records.marked_lot([place for place in drawn if place >= 0]))
        rows = [row for row, place in enumerate(drawn) if place < 0 or place in remaining]
        if len(rows) == len(drawn):
            return args, kwargs
        places = np.array(rows, dtype=int)
        changed = list(args)
        for number in numbers:
            changed[number] = self._tree.tree_map(lambda leaf: leaf[places], args[number])
        if (padding := kwargs.get("is_padding_example")) is not None:
            kwargs = kwargs | {"is_padding_example": padding[places]}
        return tuple(changed), kwargs

    def _find(self, columns: list[Any]) -> None:
        """Find variables of the loop with more rows than the batch, and its first rows in them."""
        firsts = [np.asarray(column)[:8] for column in columns]
        held: dict[int, list[Any]] = {}
        for frame in self._state.recorder.lines.frames():
            for value in list(frame.f_locals.values()):
                for item in arrays_in(value):
                    if len(item) > len(columns[0]):
                        held.setdefault(len(item), []).append(item)
        for size in sorted(held, reverse=True):
            chosen = [max(held[size], key=partial(_common_rows, rows)) for rows in firsts]
            if all(map(_common_rows, firsts, chosen)):
                self._records.mark_variables(size, self._state.shapes())
                self._places = places_of_keys(row_keys(chosen))
                return


def _common_rows(rows: Any, others: Any) -> int:
    """Return how many of a few rows an array has."""
    if rows.shape[1:] != others.shape[1:] or str(rows.dtype) != str(others.dtype):
        return 0
    values = np.asarray(others)
    return sum(bool((values == row).reshape(len(values), -1).all(1).any()) for row in rows)


def _watched_gradient(
    jax: Any, original: Any, compile_function: Any, state: JaxState, batches: _Batches
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def clipped_grad(fun: Any, argnums: Any = 0, *args: Any, **kwargs: Any) -> Any:
        made = original(fun, argnums, *args, **kwargs)
        bound = signature.bind(fun, argnums, *args, **kwargs)
        bound.apply_defaults()
        of_batch = bound.arguments["batch_argnums"]
        field = dataclasses.fields(made)[0].name
        function = getattr(made, field)
        compiled = compile_function(function)
        state.bound = float(made.l2_norm_bound)

        @functools.wraps(function)
        def gradient(*args: Any, **kwargs: Any) -> Any:
            leaves = jax.tree.leaves((args, kwargs))
            Traced.refuse(leaves)
            one = isinstance(argnums, int)
            state.note(args[argnums] if one else [args[place] for place in argnums])
            state.bound = float(made.l2_norm_bound)
            args, kwargs = batches.masked(args, kwargs, of_batch)
            are_arrays = all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)
            with jax.disable_jit(False):
                if not are_arrays:
                    return function(*args, **kwargs)
                return _evaluated(jax, compiled, state.recorder, args, kwargs)

        return dataclasses.replace(made, **{field: gradient})

    return clipped_grad


def _evaluated(
    jax: Any, compiled: Any, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a compiled function, or return what the first run's call with the same arrays did.

    Most lots have no changed record. Constants are in the text of the program, or beside it; what
    it calls back or writes to is not, and a generator's keys have no values that can be stored.
    """
    traced = compiled.trace(*args, **kwargs)
    text = traced.lower().as_text()
    arrays = jax.tree.leaves((args, kwargs, traced.jaxpr.consts))
    results, structure = jax.tree.flatten(traced.out_info)
    has_keys = any(
        jax.numpy.issubdtype(item.dtype, jax.dtypes.extended) for item in (*arrays, *results)
    )
    if has_keys or traced.jaxpr.effects or "callback" in text:
        return compiled(*args, **kwargs)
    values = recorder.once(
        f"gradient {digest_of([text, *map(np.asarray, arrays)])}",
        lambda: [np.asarray(leaf) for leaf in jax.tree.leaves(compiled(*args, **kwargs))],
    )
    return jax.tree.unflatten(structure, map(jax.numpy.asarray, values))


def _watched_noise(
    jax: Any, original: Any, compile_function: Any, state: JaxState
) -> Callable[..., Any]:
    recorder = state.recorder

    @functools.wraps(original)
    def privatizer(noising_matrix: Any, *, stddev: float, **options: Any) -> Any:
        made = original(noising_matrix, stddev=stddev, **options)
        compiled = compile_function(made.update)

        @functools.cache
        def independent_factor() -> float | None:
            key, steps = f"noise of release {recorder.releases}", recorder.job.steps
            factor: float | None = recorder.once(key, lambda: _diagonal_of(noising_matrix, steps))
            return factor

        def init(params: Any) -> Any:
            if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
                state.note(params)
            return made.init(params)

        def update(sum_of_clipped_grads: Any, noise_state: Any, params: Any = None) -> Any:
            del params  # as in optax
            names = state.named(sum_of_clipped_grads)
            sums = [array_of(leaf) for leaf in names.values()]
            if state.bound is None:
                raise RuntimeError(
                    "no jax_privacy.clipped_grad was made, which states how much a record may move "
                    "this release: mark it, affidavit.release(sums, noisy, clip_norm=C)"
                )
            recorder.begin_release()
            with jax.disable_jit(False), recorder.lines.paused():
                factor = independent_factor()
                noisy, noise_state = compiled(sum_of_clipped_grads, noise_state)
            first = recorder.release(
                origin="jax_privacy.noise_addition",
                names=list(names),
                sums=sums,
                noisy=[array_of(leaf) for leaf in jax.tree.leaves(noisy)],
                clip_norm=state.bound,
                noise_std=None if factor is None else factor * float(stddev),
            )
            if first is not None:
                own, structure = jax.tree.flatten(noisy)
                placed = (
                    jax.numpy.asarray(item, leaf.dtype)
                    for item, leaf in zip(first, own, strict=True)
                )
                noisy = jax.tree.unflatten(structure, placed)
            recorder.align_generators()
            return noisy, noise_state

        return made._replace(init=init, update=update)

    return privatizer


def _diagonal_of(noising_matrix: Any, steps: int) -> float | None:
    """Return the factor of noise that is independent and equal in all steps, or None."""
    materialize = getattr(noising_matrix, "materialize", None)
    rows = np.asarray(noising_matrix if materialize is None else materialize(steps))[:steps, :steps]
    is_constant = np.array_equal(rows, rows[0, 0] * np.eye(len(rows)))
    return abs(float(rows[0, 0])) if is_constant else None


def _watch_lots(records: Records, state: JaxState) -> None:
    """Find the records that the strategies draw from, and mask the removed one in their lots."""
    selection = importlib.import_module("jax_privacy.batch_selection")

    def wrap(kind: Any) -> None:
        original = kind.batch_iterator

        @functools.wraps(original)
        def batch_iterator(owner: Any, num_examples: int, rng: Any = None) -> Iterator[Any]:
            records.mark_variables(num_examples, state.shapes())
            cut = getattr(owner, "truncated_batch_size", None) is not None
            rate = None if cut else getattr(owner, "sampling_prob", None)
            rate = None if rate is None else rate / getattr(owner, "cycle_length", 1)
            return lots(original(owner, num_examples, rng), rate)

        kind.batch_iterator = batch_iterator

    def lots(drawn: Iterator[Any], rate: float | None) -> Iterator[Any]:
        for lot in drawn:
            yield records.marked_lot(lot, rate, is_thinned=True)
        state.refresh()

    for kind in all_subclasses(selection.BatchSelectionStrategy):
        if "batch_iterator" in kind.__dict__:
            wrap(kind)


def _solve_once(recorder: Recorder) -> None:
    """Let a run take the noise and strategy that the first run solved for, in seconds each."""
    toeplitz: Any = importlib.import_module("jax_privacy.matrix_factorization.toeplitz")
    optimize = toeplitz.optimize_banded_toeplitz
    accounting: Any = importlib.import_module("dp_accounting")
    calibrate = accounting.calibrate_dp_mechanism
    names = ("make_fresh_accountant", "make_event_from_param")

    @functools.wraps(calibrate)
    def calibrated(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(names, args, strict=False)) | kwargs
        accountant, event = values[names[0]](), values[names[1]](1.0)
        settings = [item for item in map(repr, vars(accountant).items()) if " at 0x" not in item]
        others = [repr(item) for name, item in values.items() if name not in names]
        key = f"{type(accountant).__name__} {settings} {event!r} {others} {args[2:]!r}"
        return recorder.once(key, lambda: calibrate(*args, **kwargs))

    @functools.wraps(optimize)
    def optimized(*args: Any, **kwargs: Any) -> Any:
        if any(not isinstance(item, int) for item in (*args, *kwargs.values())):
            return optimize(*args, **kwargs)
        return recorder.once(f"strategy {args!r} {kwargs!r}", lambda: optimize(*args, **kwargs))

    accounting.calibrate_dp_mechanism = calibrated
    toeplitz.optimize_banded_toeplitz = optimized
