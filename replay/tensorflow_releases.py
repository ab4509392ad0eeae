"""The releases of TF Privacy: the sums that its queries and models add noise to, and the results.

TensorFlow runs without graphs. A release of a ``GaussianSumQuery`` (the ``DPKeras`` optimisers) is
a sum of clipped gradients. One of a vectorised optimiser or of ``DPModel`` is the mean that the
optimiser gets: its clip norm and noise are those of a sum, divided by the number of microbatches.

A batch of ``tf.data``, which is also what ``fit`` reads, has the records whose rows it repeats. The
records are the rows of the variables of the loop that have as many as the array that was passed to
``fit`` or ``from_tensor_slices``. Batches are thinned to whole microbatches. They are never shorter
by a removed record, because the number of microbatches must divide them.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from affidavit.replay.datasets import (
    Records,
    is_array,
    places_of_keys,
    row_keys,
    same_as_first,
)
from affidavit.replay.recorder import Recorder
from affidavit.replay.torch_state import alive, digest_of, note_after


def install(recorder: Recorder, records: Records) -> TensorFlowState:
    """Record the releases of TF Privacy and its lots from now on."""
    tf: Any = importlib.import_module("tensorflow")
    tf.config.run_functions_eagerly(True)
    tf.random.set_seed(0)
    state = TensorFlowState(tf)
    batches = _Batches(tf, recorder, records, state)
    batches.watch()
    _Releases(tf, recorder, state, batches).watch()
    return state


class TensorFlowState:
    """The models and optimisers of Keras that are alive, in the order of their making."""

    def __init__(self, tf: Any) -> None:
        self._tf = tf
        self._models: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._loose: dict[int, Any] = {}
        optimizers = tf.keras.optimizers
        for kind, noted in (
            (tf.keras.Model, self._models),
            (optimizers.Optimizer, self._optimizers),
            (optimizers.legacy.Optimizer, self._optimizers),
            (tf.compat.v1.train.Optimizer, self._optimizers),
        ):
            note_after(kind, "__init__", noted)

    def note(self, variables: Iterable[Any]) -> None:
        """Note variables that a release is for: no model may hold them."""
        self._loose |= {id(item): item for item in variables}

    @property
    def private(self) -> list[Any]:
        """The models and optimisers of TF Privacy."""
        made = (*alive(self._optimizers), *alive(self._models))
        return [item for item in made if hasattr(item, "_num_microbatches")]

    def names(self) -> dict[int, str]:
        """Return the names of all weights by ``id``."""
        return {id(item): name for name, item in self._weights().items()}

    def shapes(self) -> set[tuple[int, ...]]:
        """Return the shapes of all weights."""
        return {tuple(item.shape) for item in self._weights().values()}

    def _weights(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        seen: set[int] = set()
        of_models = (item for model in alive(self._models) for item in _weights_of(model))
        for item in (*of_models, *self._loose.values()):
            if id(item) not in seen:
                seen.add(id(item))
                name = item.name.removesuffix(":0")
                number = 1 + sum(other.partition("#")[0] == name for other in made)
                made[name if number == 1 else f"{name}#{number}"] = item
        return made

    def digests(self) -> dict[str, str]:
        """Return a digest of each weight, and of each optimiser's variables and settings."""
        weights = self._weights()
        result = {name: digest_of(item.numpy()) for name, item in weights.items()}
        own = {id(item) for item in weights.values()}
        for number, optimizer in enumerate(alive(self._optimizers), 1):
            name = f"{type(optimizer).__name__}{'' if number == 1 else f'#{number}'}"
            variables = optimizer.variables
            for item in variables() if callable(variables) else variables:
                if id(item) not in own:
                    result[f"{name}.{item.name.removesuffix(':0')}"] = digest_of(item.numpy())
            is_old = isinstance(optimizer, self._tf.compat.v1.train.Optimizer)
            settings = {} if is_old else optimizer.get_config()
            for key, value in settings.items():
                result[f"{name}.{key}"] = digest_of(value)
            query = self._tf.nest.flatten(getattr(optimizer, "_global_state", None))
            result[f"{name}.query"] = digest_of([np.asarray(item) for item in query])
        return result

    def value(self, key: str) -> str:
        """Return the digest of one weight, or of an optimiser's variable or setting."""
        weight = self._weights().get(key)
        return self.digests().get(key, "") if weight is None else digest_of(weight.numpy())


class _Batches:
    """The batches of ``tf.data``, and which records they have."""

    def __init__(
        self, tf: Any, recorder: Recorder, records: Records, state: TensorFlowState
    ) -> None:
        self._tf, self._recorder, self._records, self._state = tf, recorder, records, state
        self._sources: list[Any] = []
        """Arrays with a row of each record, as ``fit`` or ``from_tensor_slices`` got them."""
        self._places: dict[tuple[int, str], dict[int, list[int]]] = {}
        self._microbatches: dict[tuple[int, int], int | None] = {}
        self._number = 0
        self._reads_all = self._scores = False
        self._private: int | None = None
        self._last: tuple[int, list[int]] | None = None

    def watch(self) -> None:
        """Note data sets and the batches drawn from them, from now on."""
        tf, keras = self._tf, self._tf.keras
        adapter = importlib.import_module("keras.src.engine.data_adapter").DataHandler
        layer = importlib.import_module(
            "keras.src.engine.base_preprocessing_layer"
        ).PreprocessingLayer
        model, slices = keras.Model, tf.data.Dataset.from_tensor_slices
        fit, begin, steps = model.fit, tf.data.Dataset.__iter__, adapter.steps

        @functools.wraps(fit)
        def fitting(owner: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._note(x)
            return fit(owner, x, *args, **kwargs)

        @functools.wraps(slices)
        def from_tensor_slices(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(tensors)
            return slices(tensors, *args, **kwargs)

        @functools.wraps(begin)
        def iterate(owner: Any) -> Any:
            by_keras = str(sys._getframe(1).f_globals.get("__name__")).startswith("keras.")
            return self._drawn(begin(owner), None if by_keras else self._recorder.job.lots)

        @functools.wraps(steps)
        def few_steps(owner: Any) -> Iterator[int]:
            yield from itertools.islice(
                steps(owner), None if self._reads_all else self._recorder.job.lots
            )

        model.fit, adapter.steps = fitting, few_steps
        model.evaluate = self._during("_scores", model.evaluate)
        model.predict = self._during("_reads_all", model.predict)
        layer.adapt = self._during("_reads_all", layer.adapt)  # a statistic of all records
        tf.data.Dataset.from_tensor_slices = staticmethod(from_tensor_slices)
        tf.data.Dataset.__iter__ = iterate

    def _during(self, flag: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that draws no lots."""

        @functools.wraps(method)
        def during(*args: Any, **kwargs: Any) -> Any:
            before = getattr(self, flag)
            setattr(self, flag, True)
            try:
                return method(*args, **kwargs)
            finally:
                setattr(self, flag, before)

        return during

    def _note(self, tensors: Any) -> None:
        rows = next(filter(is_array, self._tf.nest.flatten(tensors)), None)
        if rows is not None:
            self._sources.append(rows)

    def _drawn(self, batches: Iterator[Any], most: int | None) -> Iterator[Any]:
        for batch in itertools.islice(batches, most):
            rows = next(filter(is_array, self._tf.nest.flatten(batch)), None)
            is_no_lot = rows is None or self._reads_all or self._scores
            lot = None if is_no_lot else self._lot_of(np.asarray(rows))
            if lot is None:
                yield batch
                continue
            source, places = lot
            size = self._thinned(len(places))
            self._last = source, places[:size]
            yield self._tf.nest.map_structure(lambda item, size=size: item[:size], batch)

    def _thinned(self, size: int) -> int:
        """Return the number of records of as many whole microbatches as a run has time for."""
        most = self._recorder.job.lot_records
        for owner in self._state.private:
            key = id(owner), size
            count = self._microbatches.setdefault(key, owner._num_microbatches)
            if count is not None and size % count == 0:
                per_microbatch = size // count
                owner._num_microbatches = max(1, min(count, most // per_microbatch))
                most = per_microbatch * owner._num_microbatches
        return min(size, most)

    def _lot_of(self, rows: Any) -> tuple[int, list[int]] | None:
        """Return the number of the array that has all ``rows``, and their places there."""
        self._number += 1
        for source, known in enumerate(self._sources):
            if tuple(known.shape[1:]) != rows.shape[1:]:
                continue
            places = self._places_in(source, rows.dtype)
            matches = [places.get(key, []) for key in row_keys([rows])]
            if all(matches):
                name = f"batch {self._number} of array {source}"
                before = self._recorder.once(name, functools.partial(list, matches))
                return source, same_as_first(before, matches)
        return None

    def _places_in(self, source: int, dtype: Any) -> dict[int, list[int]]:
        key = source, str(dtype)
        if key not in self._places:
            rows = np.asarray(self._sources[source]).astype(dtype)
            self._places[key] = places_of_keys(row_keys([rows]))
        return self._places[key]

    @property
    def size(self) -> int:
        """The number of records of the last batch."""
        return 0 if self._last is None else len(self._last[1])

    def add_lot(self) -> None:
        """Record the batch that a release is made of."""
        if self._last is None:
            raise RuntimeError(
                "replay knows no record of the batch of this release: pass arrays of all records "
                "to fit() or from_tensor_slices(), and change them before that"
            )
        source, places = self._last
        if self._private is None:
            self._private = source
            self._records.mark_variables(
                len(self._sources[source]), self._state.shapes(), is_removable=False
            )
        if source == self._private:
            self._records.marked_lot(places)


class _Releases:
    """The places where TF Privacy adds noise."""

    def __init__(
        self, tf: Any, recorder: Recorder, state: TensorFlowState, batches: _Batches
    ) -> None:
        self._tf, self._recorder, self._state, self._batches = tf, recorder, state, batches
        self._names: list[str] = []
        self._noises: list[Any] | None = None
        """The noise that is drawn for the present release."""
        self._clipped: list[list[Any]] = []
        """What each microbatch adds to the tensors of the present release."""
        self._model: Any = None
        """The model whose step it is."""

    def watch(self) -> None:
        """Note releases from now on."""
        self._watch_noise()
        self._watch_queries()
        for module, name, method in (
            ("dp_optimizer", "compute_gradients", self._naming),
            ("dp_optimizer_keras", "_compute_gradients", self._naming),
            ("dp_optimizer_keras_vectorized", "_compute_gradients", self._of_optimizer),
            ("dp_optimizer_keras_sparse", "_compute_gradients", _refusing),
            ("dp_optimizer_vectorized", "compute_gradients", _refusing),
        ):
            made = importlib.import_module(f"tensorflow_privacy.privacy.optimizers.{module}")
            for kind in vars(made).values():
                if isinstance(kind, type) and name in vars(kind):
                    setattr(kind, name, method(vars(kind)[name]))
        models = importlib.import_module("tensorflow_privacy.privacy.keras_models.dp_keras_model")
        for kind in (models.DPModel, models.DPSequential):
            kind.train_step = self._of_model(kind.train_step)
        optimizers = self._tf.keras.optimizers
        for kind in (optimizers.Optimizer, optimizers.legacy.Optimizer):
            kind.apply_gradients = self._applying(kind.apply_gradients)

    def _watch_noise(self) -> None:
        normal = self._tf.random.normal

        @functools.wraps(normal)
        def draw(*args: Any, **kwargs: Any) -> Any:
            drawn = normal(*args, **kwargs)
            if self._noises is not None and hasattr(drawn, "numpy"):  # not while it is traced
                self._noises.append(drawn)
            return drawn

        self._tf.random.normal = draw
        map_rows = self._tf.vectorized_map

        @functools.wraps(map_rows)
        def vectorized_map(*args: Any, **kwargs: Any) -> Any:
            mapped = map_rows(*args, **kwargs)
            rows = self._tf.nest.flatten(mapped)
            if self._noises is not None and all(hasattr(item, "numpy") for item in rows):
                self._clipped = [list(row) for row in zip(*rows, strict=True)]
            return mapped

        self._tf.vectorized_map = vectorized_map

    def _watch_queries(self) -> None:
        module: Any = importlib.import_module("tensorflow_privacy.privacy.dp_query.gaussian_query")
        query = module.GaussianSumQuery
        noised, preprocess = query.get_noised_result, query.preprocess_record

        @functools.wraps(preprocess)
        def preprocess_record(owner: Any, params: Any, record: Any) -> Any:
            clipped = preprocess(owner, params, record)
            self._clipped.append(self._tf.nest.flatten(clipped))
            return clipped

        @functools.wraps(noised)
        def get_noised_result(owner: Any, sample_state: Any, global_state: Any) -> Any:
            result, *rest = noised(owner, sample_state, global_state)
            released = self._release(
                "GaussianSumQuery",
                sums=self._tf.nest.flatten(sample_state),
                noisy=self._tf.nest.flatten(result),
                clip_norm=(clip_norm := float(global_state.l2_norm_clip)),
                noise_std=float(global_state.stddev),
                most=clip_norm,
            )
            return self._tf.nest.pack_sequence_as(result, released), *rest

        query.get_noised_result = get_noised_result
        query.preprocess_record = preprocess_record

    def _naming(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def compute_gradients(
            owner: Any, loss: Any, var_list: Any = None, *args: Any, **kw: Any
        ) -> Any:
            if var_list is not None and not callable(var_list):
                self._name(var_list)
            return compute(owner, loss, var_list, *args, **kw)

        return compute_gradients

    def _name(self, variables: Any) -> None:
        variables = self._tf.nest.flatten(variables)
        self._state.note(variables)
        names = self._state.names()
        self._names = [names[id(item)] for item in variables]

    def _of_optimizer(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def compute_gradients(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self._noises = []
            pairs = compute(owner, *args, **kwargs)
            return self._mean_released(owner, pairs, is_of_mean=False)

        return compute_gradients

    def _of_model(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train_step)
        def step(owner: Any, data: Any) -> Any:
            self._model, self._noises = owner, []
            return train_step(owner, data)

        return step

    def _applying(self, apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(apply_gradients)
        def apply(owner: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            model, self._model = self._model, None
            if model is not None:
                is_of_mean = model._enable_fast_peg_computation and "sum" not in str(
                    getattr(model.loss, "reduction", "")
                ).replace("sum_over_batch_size", "")
                grads_and_vars = self._mean_released(
                    model, list(grads_and_vars), is_of_mean=is_of_mean
                )
            return apply_gradients(owner, grads_and_vars, *args, **kwargs)

        return apply

    def _mean_released(
        self, owner: Any, pairs: list[tuple[Any, Any]], *, is_of_mean: bool
    ) -> list[tuple[Any, Any]]:
        """Record the noisy means that an optimiser gets, and return what it is to get."""
        noises, self._noises = self._noises or [], None
        means, variables = map(list, zip(*pairs, strict=True))
        self._name(variables)
        count = owner._num_microbatches or self._batches.size
        scale = 1 if is_of_mean else count
        if owner._noise_multiplier == 0:
            noises = [self._tf.zeros_like(item) for item in means]
        released = self._release(
            "VectorizedDPKerasOptimizer" if hasattr(owner, "learning_rate") else "DPModel",
            sums=[mean - noise / scale for mean, noise in zip(means, noises, strict=True)],
            noisy=means,
            clip_norm=float(owner._l2_norm_clip) / count,
            noise_std=float(owner._l2_norm_clip * owner._noise_multiplier) / count,
            most=float(owner._l2_norm_clip),
        )
        return list(zip(released, variables, strict=True))

    def _release(
        self,
        origin: str,
        *,
        sums: list[Any],
        noisy: list[Any],
        clip_norm: float,
        noise_std: float,
        most: float,
    ) -> list[Any]:
        """Record a release, and return the noisy tensors of the first run in place of its own.

        ``most`` is the clip norm of what a microbatch adds.
        """
        if not self._tf.executing_eagerly():
            raise RuntimeError("replay reads no release inside of a graph, such as an Estimator's")
        self._batches.add_lot()
        self._recorder.begin_release()
        names = self._names if len(self._names) == len(sums) else [
            f"value {number}" for number in range(len(sums))
        ]  # fmt: skip
        first = self._recorder.release(
            origin=f"tensorflow_privacy.{origin}",
            names=names,
            sums=[np.asarray(item) for item in sums],
            noisy=[np.asarray(item) for item in noisy],
            clip_norm=clip_norm,
            noise_std=noise_std,
            parts=[
                [float(np.linalg.norm(item)) / most for item in parts]
                for parts in self._clipped
                if len(parts) == len(sums)
            ],
        )
        self._clipped = []
        if first is None:
            return noisy
        return [self._tf.constant(one, own.dtype) for one, own in zip(first, noisy, strict=True)]


def _refusing(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def compute_gradients(*_: Any, **__: Any) -> Any:
        raise RuntimeError("replay does not know the releases of this optimiser of TF Privacy")

    return compute_gradients


def _weights_of(model: Any) -> list[Any]:
    try:
        weights: list[Any] = model.weights
    except ValueError:  # it has none yet
        return []
    return weights
