"""The data sets and loaders of a run: which records each lot reads, and the changed record.

Data sets are numbered in the order of their making, so that a later run of the same program finds
the same record. A changed record is changed where its data set stores it, at the end of
``__init__``: a row of each tensor, array and list that has as many rows as records. If the
arrays come from a file, they are changed when they are loaded, before anything else sees them. A
data set that stores no rows has the record changed whenever ``__getitem__`` returns it.

A removed record is masked in the lots that were drawn, so that all draws stay aligned.

Loaders read in the training process. Passes over a loader end after ``job.lots`` lots, and
lots are thinned to ``job.lot_records`` records.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from affidavit.replay.randomness import generators_state, set_generators
from affidavit.replay.recorder import Event, Recorder
from affidavit.replay.settings import Neighbour
from affidavit.replay.torch_state import digest_of

HUGE = 1000.0
"""Factor of an outlier's values over the largest value of its array."""


class Records:
    """Numbers data sets, changes or masks the neighbour's record, and records lots."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._datasets: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._in_init: set[int] = set()
        self._private: list[Any] = []
        self._marked: MarkedRows | None = None
        self._trained: dict[int, tuple[list[tuple[int, int]], list[int], Any]] = {}
        self._sources: list[list[Any]] = []
        self._changed: set[int | None] = set()
        self.masked: tuple[int, list[int]] | None = None
        """Records of the last lot before masking, and the places of the others."""
        at = self._neighbour
        if at is not None and at.variables and at.kind != "removed":
            self._change_variables(at)

    @property
    def _neighbour(self) -> Neighbour | None:
        return self._recorder.job.neighbour

    def _stop_before(self, *, dataset: int | None = None, source: int | None = None) -> None:
        """Let the run stop if it is to stop before this data set or loaded array."""
        pause = self._recorder.job.pause
        if pause is not None and (dataset in pause.datasets or source in pause.sources):
            self._recorder.stop()

    def install(self) -> None:
        """Note PyTorch's data sets, loaders and lots from now on."""
        data = importlib.import_module("torch.utils.data")
        self._wrap_datasets(data.Dataset)
        self._wrap_loader(data.DataLoader)
        self._wrap_sampler(data.BatchSampler)
        fetch = importlib.import_module("torch.utils.data._utils.fetch")
        self._wrap_fetch(fetch._MapDatasetFetcher)
        for module, names in (
            ("torch", ("load",)),
            ("numpy", ("load", "loadtxt", "genfromtxt")),
        ):
            for name in names:
                self._wrap_source(importlib.import_module(module), name)
        if "opacus" in sys.modules:
            samplers = importlib.import_module("opacus.utils.uniform_sampler")
            self._wrap_sampler(samplers.UniformWithReplacementSampler)
            self._wrap_sampler(samplers.DistributedUniformWithReplacementSampler)
            engine = importlib.import_module("opacus.privacy_engine").PrivacyEngine
            prepare = engine._prepare_data_loader

            @functools.wraps(prepare)
            def preparing(owner: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
                self.mark_private(data_loader.dataset)
                return prepare(owner, data_loader, *args, **kwargs)

            engine._prepare_data_loader = preparing

    def mark_private(self, dataset: Any) -> None:
        """Note that ``dataset`` is the one that is protected."""
        self.number(dataset)
        if not any(item is dataset for item in self._private):
            self._private.append(dataset)

    @property
    def are_marked(self) -> bool:
        """Whether the records are known from a line of the loop, or from what draws its lots."""
        return bool(self._private)

    def marked(self, data: tuple[Any, ...]) -> Any:
        """Note records that a line of the loop marks, and return them with the change."""
        if len(data) == 1 and not is_array(data[0]) and not isinstance(data[0], list):
            self.mark_private(data[0])
            return data
        self._marked = rows = MarkedRows(data)
        self.mark_private(rows)
        at = self._neighbour
        if at is not None and at.drops and at.dataset == self.number(rows):
            return tuple(without_row(column, at.record) for column in data)
        return tuple(rows.columns[place] for place in range(len(data)))

    def mark_variables(
        self, size: int, other_shapes: Collection[tuple[int, ...]], *, is_removable: bool = True
    ) -> None:
        """Note that the loop's variables with ``size`` rows are the records, unless it marks these.

        Arrays of ``other_shapes`` are no records. Lots can be without one that ``is_removable``.
        """
        if self._marked is not None and len(self._marked) == size:
            return
        found: dict[str, list[Any]] = {}
        for frame in self._recorder.lines.frames():
            for name, value in list(frame.f_locals.items()):
                held = [item for item in arrays_of(value, size) if item.shape not in other_shapes]
                if held:
                    found.setdefault(f"{frame.f_code.co_qualname}.{name}", held)
        if not found:
            raise RuntimeError(
                f"replay saw no variable with the {size} records that the lots are drawn from: "
                "mark them, x, y = affidavit.records(x, y)"
            )
        self._marked = rows = MarkedRows(tuple(item for held in found.values() for item in held))
        rows.variables, rows.is_removable = list(found), is_removable
        self.mark_private(rows)

    def _change_variables(self, at: Neighbour) -> None:
        """Change the record in each variable before the first line that may read it."""
        lines, rest = self._recorder.lines, dict(enumerate(at.variables))
        changed: set[int] = set()

        def change(frame: FrameType) -> None:
            for order, variable in list(rest.items()):
                function, _, name = variable.rpartition(".")
                if function != frame.f_code.co_qualname or name not in frame.f_locals:
                    continue
                for column, item in enumerate(arrays_of(frame.f_locals[name], at.size), order):
                    rest.pop(order, None)
                    view = memory_of(item)
                    address = np.asarray(view).ctypes.data
                    if address not in changed and not change_array(view, at, column):
                        raise NotChanged(f"in {name}, which is read-only")
                    changed.add(address)
            if not rest:
                lines.before_line = None

        lines.before_line = change

    def marked_lot(
        self, places: Any, rate: float | None = None, *, is_thinned: bool = False
    ) -> Any:
        """Record a lot of the marked rows, and return its places without the removed record."""
        if self._marked is None:
            return places
        self._recorder.align_generators()
        number = self.number(self._marked)
        drawn = [int(place) for place in places]
        sampler = SimpleNamespace(sample_rate=rate, num_samples=len(self._marked))
        self._add_draw(drawn, sampler)
        if is_thinned:
            stride = max(1, -(-len(drawn) // self._recorder.job.lot_records))
            places, drawn = places[::stride], drawn[::stride]
        lot = [(number, place) for place in drawn]
        self._recorder.add("lot", records=lot, is_private=True)
        at = self._neighbour
        if at is None or at.kind != "removed" or at.dataset != number or at.record not in drawn:
            return places
        remaining = [order for order, place in enumerate(drawn) if place != at.record]
        if is_array(places):
            return places[remaining]
        return type(places)(places[order] for order in remaining)

    def trained_lot(
        self, dataset: Any, step: int, places: list[int], max_records: int, rate: float | None
    ) -> list[int]:
        """Return which of a lot's records the trainer reads: the first few, without the removed.

        ``rate`` is that of the plan's Poisson lots, None in other schemes.
        """
        thinned = places[: min(max_records, self._recorder.job.lot_records)]
        roots = [self.root_of(dataset, place) for place in thinned]
        sampler = SimpleNamespace(sample_rate=rate, num_samples=len(dataset))
        self._trained[step] = roots, places, sampler
        at = self._neighbour
        removed = (at.dataset, at.record) if at is not None and at.kind == "removed" else None
        remaining = [order for order, root in enumerate(roots) if root != removed]
        self.masked = (len(roots), remaining) if len(remaining) < len(roots) else None
        return remaining

    def add_trained_lot(self, step: int) -> None:
        """Record the lot of a step of the trainer, which may have been drawn ahead."""
        roots, places, sampler = self._trained.pop(step)
        self._add_draw(places, sampler)
        self._recorder.add("lot", records=roots, is_private=True)

    def number(self, dataset: Any) -> int:
        """Return the number of ``dataset``, which is new if no class hook has seen it."""
        if id(dataset) not in self._numbers:
            self._made(dataset)
        return self._numbers[id(dataset)]

    def to_json(self) -> dict[str, Any]:
        """Return the private data sets' records, which sources hold them, and what else is read."""
        is_first = self._recorder.job.first is None
        return {
            "private": [self._describe(dataset) for dataset in self._private],
            "outside": sorted(self._outside()) if is_first else [],
            "datasets": [type(dataset).__name__ for dataset in self._datasets],
        }

    def _describe(self, dataset: Any) -> dict[str, Any]:
        size = len(dataset)
        places = range(0, size, max(1, size // 64))
        members = [self.root_of(dataset, place) for place in places]
        root, _ = members[0] if members else (self.number(dataset), 0)
        sources = self._sources_of(self._datasets[root])
        return {
            "name": type(self._datasets[root]).__name__,
            "size": size,
            "members": members,
            "rows": self._rows_of(dataset, root),
            "copies": list(self._copies_of(root)),
            "sources": sources,
            "variables": [] if sources else getattr(dataset, "variables", []),
            "is_removable": getattr(dataset, "is_removable", True),
        }

    def _copies_of(self, root: int) -> Iterator[int]:
        """Yield the other data sets with the rows of ``root``: a file may be read twice."""
        if self._recorder.job.first is not None:
            return
        own = [rows for _, _, rows in row_holders(self._datasets[root]) if is_array(rows)]
        for number, dataset in enumerate(self._datasets):
            rows = [rows for _, _, rows in row_holders(dataset) if is_array(rows)]
            is_alike = len(rows) == len(own) > 0 and all(map(same_values, own, rows))
            if is_alike and number != root:
                yield number

    def _rows_of(self, dataset: Any, root: int) -> list[int]:
        """Return the places in ``root`` of a data set that is a part of it, none if it is whole."""
        if self._recorder.job.first is not None or len(dataset) == size_of(self._datasets[root]):
            return []
        roots = (self.root_of(dataset, place) for place in range(len(dataset)))
        return sorted({place for number, place in roots if number == root})

    def _outside(self) -> Iterator[tuple[int, int]]:
        """Yield the records that are read, of the same storage as private ones, and are none."""
        rows: dict[int, set[int] | None] = {}
        for dataset in self._private:
            root, _ = self.root_of(dataset, 0) if len(dataset) else (self.number(dataset), 0)
            part = self._rows_of(dataset, root)
            rows[root] = {*(rows.get(root) or ()), *part} if part else None
        read = {item for event in self._recorder.events if event["kind"] == "lot"
                for item in event["records"]}  # fmt: skip
        for number, place in read:
            if (private := rows.get(number)) is not None and place not in private:
                yield number, place

    def root_of(self, dataset: Any, place: int) -> tuple[int, int]:
        """Return the data set that stores record ``place`` of ``dataset``, and its place there."""
        while True:
            if hasattr(dataset, "cumulative_sizes") and hasattr(dataset, "datasets"):
                ends = [0, *dataset.cumulative_sizes]
                part = next(at for at, end in enumerate(ends[1:]) if place < end)
                dataset, place = dataset.datasets[part], place - ends[part]
            elif hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
                dataset, place = dataset.dataset, int(dataset.indices[place])
            elif size_of(inner := getattr(dataset, "dataset", None)) == size_of(dataset) != -1:
                dataset = inner
            else:
                return self.number(dataset), int(place)

    def _made(self, dataset: Any) -> None:
        self._numbers[id(dataset)] = number = len(self._datasets)
        self._datasets.append(dataset)
        self._stop_before(dataset=number)
        at = self._neighbour
        if at is None or number not in (at.dataset, *at.copies) or at.kind == "removed":
            return
        if at.sources or at.variables:
            return
        with self._recorder.lines.reading():  # its lines run in no other run
            rows = list(row_holders(dataset))
            if isinstance(dataset, list):
                change_row(None, 0, dataset, at)
            elif rows:
                for column, (holder, key, rows_of) in enumerate(rows):
                    address = address_of(rows_of)
                    if address is None or address not in self._changed:
                        self._changed.add(address)
                        change_row(holder, key, rows_of, at, column)
            else:
                self._change_items(dataset, at)

    def _change_items(self, dataset: Any, at: Neighbour) -> None:
        """Change the record whenever ``dataset`` returns it, alone or with others."""
        kind, size = type(dataset), len(dataset)
        get = kind.__getitem__
        rows = (at.rows or range(size)) if at.kind == "mixed" else (at.record,)

        def item_at(place: int) -> Any:
            item, drawn = get(dataset, place), generators_state()
            with self._recorder.lines.reading():
                if at.kind != "mixed":
                    changed = changed_item(item, get(dataset, at.other), at)
                else:
                    order = rows.index(place)
                    changed = mixed_item(lambda far: get(dataset, rows[(order + far) % len(rows)]))
            set_generators(drawn)  # the records that are read beside draw nothing
            return changed

        def read(owner: Any, place: Any) -> Any:
            if owner is not dataset:
                return get(owner, place)
            places = places_in(place, size)
            if isinstance(places, int):
                return item_at(places) if places in rows else get(owner, place)
            value = get(owner, place)
            for order, one in enumerate(places):
                if one in rows:
                    value = with_item(value, order, item_at(one), place)
            return value

        kind.__getitem__ = read
        for name in ("__getitems__", "__iter__"):  # which may read past __getitem__
            if (original := getattr(kind, name, None)) is not None:
                setattr(kind, name, _one_by_one(original, dataset, size))

    def _wrap_datasets(self, base: Any) -> None:
        records = self

        def wrap(kind: Any) -> None:
            if "__init__" not in kind.__dict__:
                return
            original = kind.__init__

            @functools.wraps(original)
            def init(owner: Any, *args: Any, **kwargs: Any) -> None:
                outermost = id(owner) not in records._in_init
                records._in_init.add(id(owner))
                original(owner, *args, **kwargs)
                if outermost:
                    records._in_init.discard(id(owner))
                    if size_of(owner) > 0:
                        records.number(owner)

            kind.__init__ = init

        def subclass(kind: Any, /, **kwargs: Any) -> None:
            super(base, kind).__init_subclass__(**kwargs)
            wrap(kind)

        for kind in all_subclasses(base):
            wrap(kind)
        base.__init_subclass__ = classmethod(subclass)

    def _wrap_loader(self, loader: Any) -> None:
        original, signature = loader.__init__, inspect.signature(loader.__init__)
        inline = {
            "num_workers": 0,
            "timeout": 0,
            "pin_memory": False,
            "prefetch_factor": None,
            "persistent_workers": False,
            "multiprocessing_context": None,
        }

        @functools.wraps(original)
        def init(owner: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(owner, *args, **kwargs)
            for name, value in inline.items():
                if name in bound.arguments:
                    bound.arguments[name] = value
            if size_of(bound.arguments["dataset"]) > 0:
                self.number(bound.arguments["dataset"])
            original(*bound.args, **bound.kwargs)

        loader.__init__ = init
        index_sampler = loader._index_sampler.fget

        def short(owner: Any) -> Any:
            sampler = index_sampler(owner)
            if getattr(type(sampler).__iter__, "_is_short", False) or isinstance(sampler, Short):
                return sampler
            of_trainer = type(owner.dataset).__module__.startswith("affidavit.trainer")
            if of_trainer or type(sampler).__name__ == "BatchSplittingSampler":
                return sampler
            return Short(self, sampler)

        loader._index_sampler = property(short)

    def _wrap_sampler(self, sampler: Any) -> None:
        original = sampler.__iter__

        @functools.wraps(original)
        def draw(owner: Any) -> Iterator[Any]:
            yield from self.shortened(lambda: original(owner), owner)

        draw._is_short = True  # type: ignore[attr-defined]
        sampler.__iter__ = draw

    def shortened(self, begin: Callable[[], Iterator[Any]], sampler: Any) -> Iterator[Any]:
        """Yield the first lots of a pass of ``sampler``, thinned."""
        job = self._recorder.job
        self._recorder.align_generators()
        if getattr(sampler, "sample_rate", None) is not None:
            self._recorder.add("pass", lots=len(sampler))
        lots = begin()
        for _ in range(job.lots):
            self._recorder.align_generators()
            if (lot := next(lots, None)) is None:
                return
            if is_array(lot):  # as Opacus' distributed sampler yields
                lot = lot.tolist()
            if isinstance(lot, list | tuple):
                self._add_draw(lot, sampler)
                stride = max(1, -(-len(lot) // job.lot_records))
                lot = lot[::stride]
            yield lot

    def _add_draw(self, lot: Sequence[Any], sampler: Any) -> None:
        rate = getattr(sampler, "sample_rate", None)
        self._recorder.add(
            "draw",
            size=len(lot),
            rate=None if rate is None else float(rate),
            records=getattr(sampler, "num_samples", None),
            places=digest_of(repr(lot)),
        )

    def _wrap_fetch(self, fetcher: Any) -> None:
        original = fetcher.fetch

        @functools.wraps(original)
        def fetch(owner: Any, places: Any) -> Any:
            dataset, lot = owner.dataset, places
            if type(dataset).__module__.startswith("affidavit.trainer"):
                with self._recorder.lines.reading():
                    return original(owner, places)
            is_lot = owner.auto_collation
            roots = [self.root_of(dataset, place) for place in (lot if is_lot else [lot])]
            private = any(dataset is item for item in self._private)
            event = self._recorder.add("lot", records=roots, is_private=private)
            at = self._neighbour
            masked = None
            if is_lot and at is not None and at.kind == "removed":
                remaining = [i for i, root in enumerate(roots) if root != (at.dataset, at.record)]
                empties = hasattr(owner.collate_fn, "sample_empty_shapes")
                if len(remaining) < len(roots) and (remaining or empties):
                    masked = (len(roots), remaining)
            self.masked = None
            with self._recorder.lines.reading(), self._watched_batch(owner, event, masked):
                return original(owner, places)

        fetcher.fetch = fetch

    @contextmanager
    def _watched_batch(
        self, fetcher: Any, event: Event, masked: tuple[int, list[int]] | None
    ) -> Iterator[None]:
        """Note the longest and the shortest record of a batch, and leave the masked one out of it.

        That one is read all the same, because reading may draw.
        """
        collate = fetcher.collate_fn

        def collated(items: list[Any]) -> Any:
            lengths = list(map(length_of, items))
            for name, length in zip(("longest", "shortest"), (max, min), strict=True):
                if lengths and lengths.count(length(lengths)) == 1:
                    event[name] = event["records"][lengths.index(length(lengths))]
            self.masked = masked
            return collate(items if masked is None else [items[order] for order in masked[1]])

        if fetcher.auto_collation:
            fetcher.collate_fn = collated
        try:
            yield
        finally:
            fetcher.collate_fn = collate

    def _wrap_source(self, module: Any, name: str) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            arrays = list(arrays_in(value))
            if arrays:
                self._stop_before(source=len(self._sources))
                at = self._neighbour
                if at is not None and len(self._sources) in at.sources and at.kind != "removed":
                    for column, item in enumerate(arrays):
                        if len(item) > max(at.record, at.other, *at.rows):
                            change_array(item, at, column)
                self._sources.append(arrays)
            return value

        setattr(module, name, load)

    def _sources_of(self, root: Any) -> list[int]:
        """Return the loaded arrays with a row for each record of ``root``.

        Several data sets of one size are told apart by their values.
        """
        size = size_of(root)
        held = [rows for _, _, rows in row_holders(root) if is_array(rows)]
        alike = [
            number
            for number, arrays in enumerate(self._sources)
            if any(len(item) == size for item in arrays)
        ]
        exact = [
            number
            for number in alike
            if any(same_values(one, other) for one in self._sources[number] for other in held)
        ]
        sizes = [size_of(dataset) for dataset in self._datasets if list(row_holders(dataset))]
        return exact or (alike if sizes.count(size) == 1 else [])


class NotChanged(BaseException):
    """Replay cannot change a record in place of the run; no ``except Exception`` catches it."""


class MarkedRows:
    """The arrays or lists of one row for each record that a line of the loop marks."""

    def __init__(self, columns: tuple[Any, ...]) -> None:
        self.columns = dict(enumerate(columns))
        self.variables: list[str] = []
        self.is_removable = True
        self._size = len(columns[0])

    def __len__(self) -> int:
        return self._size


class Short:
    """A sampler of the user's, whose passes are short and whose lots are thinned."""

    def __init__(self, records: Records, sampler: Any) -> None:
        self._records, self._sampler = records, sampler

    def __iter__(self) -> Iterator[Any]:
        return self._records.shortened(lambda: iter(self._sampler), self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def all_subclasses(kind: Any) -> Iterator[Any]:
    """Return all classes below ``kind``."""
    for child in type.__subclasses__(kind):
        yield child
        yield from all_subclasses(child)


def size_of(dataset: Any) -> int:
    """Return the number of records, or -1 if there is none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return -1


def is_array(value: Any) -> bool:
    """Whether ``value`` is a tensor or array with rows."""
    ndim = getattr(value, "ndim", 0)
    is_tensor = hasattr(value, "dtype") and hasattr(value, "shape")
    return is_tensor and isinstance(ndim, int) and ndim > 0  # NumPy itself has a function ndim


def arrays_in(value: Any) -> Iterator[Any]:
    """Return the tensors and arrays of a loaded value."""
    if is_array(value):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays_in(item)
    elif isinstance(value, list | tuple):
        for item in value[:64]:
            yield from arrays_in(item)


def arrays_of(value: Any, size: int) -> list[Any]:
    """Return the arrays with ``size`` rows in a variable: a container or an object that holds some.

    Keys of random numbers and orders of the rows are no records.
    """
    if isinstance(value, ModuleType | type):
        return []
    is_object = hasattr(value, "__dict__") and not is_array(value)
    held = filter(is_array, vars(value).values()) if is_object else arrays_in(value)
    return [
        item
        for item in held
        if len(item) == size and "key<" not in str(item.dtype) and not is_order(item)
    ]


def row_keys(columns: Sequence[Any]) -> Iterator[int]:
    """Yield a hash of the values of each row of all columns."""
    arrays = [np.ascontiguousarray(column).reshape(len(column), -1) for column in columns]
    for place in range(len(columns[0])):
        yield hash(b"".join(item[place].tobytes() for item in arrays))


def places_of_keys(keys: Iterable[int]) -> dict[int, list[int]]:
    """Return the places of each of the keys."""
    places: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def same_as_first(before: Iterable[list[int]], matches: Iterable[list[int]]) -> list[int]:
    """Return a place of each row, of equal rows that of the first run.

    They may be those of a record and of its replacement.
    """
    return [
        first[0] if {*first} & {*equal} else equal[0]
        for first, equal in zip(before, matches, strict=False)
    ]


def is_order(rows: Any) -> bool:
    """Whether an array has each of the places of its rows once."""
    if rows.ndim != 1 or "int" not in str(rows.dtype):
        return False
    return np.array_equal(np.sort(np.asarray(rows)), np.arange(len(rows)))


def memory_of(rows: Any) -> Any:
    """Return an array of JAX or TensorFlow as one that can be changed in place, and others."""
    if hasattr(rows, "unsafe_buffer_pointer"):
        values, address = np.asarray(rows), rows.unsafe_buffer_pointer()
    elif hasattr(rows, "_numpy"):
        values = rows._numpy()
        address = values.ctypes.data
    else:
        return rows
    memory: Any = (ctypes.c_char * values.nbytes).from_address(address)
    return np.ndarray(values.shape, values.dtype, memory)


def row_holders(dataset: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Return what holds one row for each record: the container, its key, the rows."""
    size = size_of(dataset)
    values = getattr(dataset, "__dict__", {})
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        return
    for key, value in list(values.items()):
        if isinstance(value, tuple) and value and all(is_array(item) for item in value):
            yield from ((None, None, item) for item in value if len(item) == size)
        elif isinstance(value, dict):
            yield from ((value, k, v) for k, v in value.items() if _has_rows(v, size))
        elif _has_rows(value, size):
            yield values, key, value


def _has_rows(value: Any, size: int) -> bool:
    return (is_array(value) or isinstance(value, list)) and len(value) == size


def change_row(holder: Any, key: Any, rows: Any, at: Neighbour, column: int = 0) -> None:
    """Change the neighbour's record in ``rows``, in place where that is possible."""
    if isinstance(rows, list):
        if at.kind == "mixed":
            places = at.rows or range(len(rows))
            mixed = list(_mixed_rows([rows[place] for place in places], column))
            for place, item in zip(places, mixed, strict=True):
                rows[place] = item
        else:
            item = rows[at.record]
            if at.kind == "outlier":
                item = max((item, *rows), key=length_of)
            rows[at.record] = changed_item(item, rows[at.other], at)
    elif not change_array(memory_of(rows), at, column):
        copy = rows.copy()
        change_array(copy, at, column)
        holder[key] = copy


def length_of(record: Any) -> int:
    """Return the length of a record's longest part, or -1."""
    is_dict, is_tuple = isinstance(record, dict), isinstance(record, tuple)
    parts = record.values() if is_dict else record if is_tuple else (record,)
    return max(map(size_of, parts), default=-1)


def address_of(rows: Any) -> int | None:
    """Return where rows that are changed in place are stored, or None."""
    if isinstance(rows, list):
        return id(rows)
    if hasattr(rows, "data_ptr"):
        return int(rows.data_ptr())
    is_writable = getattr(getattr(rows, "flags", None), "writeable", True)
    return int(np.asarray(rows).ctypes.data) if is_writable else None


def without_row(rows: Any, record: int) -> Any:
    """Return ``rows`` without one of them."""
    if isinstance(rows, list):
        return rows[:record] + rows[record + 1 :]
    return rows[[place for place in range(len(rows)) if place != record]]


def _mixed_rows(rows: list[Any], column: int) -> Iterator[Any]:
    for place in range(len(rows)):
        yield mixed_item(partial(_at_shift, rows, place), column)


def _at_shift(rows: Any, place: int, shift: int) -> Any:
    return rows[(place + shift) % len(rows)]


def change_array(rows: Any, at: Neighbour, column: int = 0) -> bool:
    """Change the neighbour's rows of a tensor or array; False if it is read-only.

    In a mixed data set the columns are rolled by different numbers of rows.
    """
    if not getattr(getattr(rows, "flags", None), "writeable", True):
        return False
    target = rows.detach() if hasattr(rows, "detach") else rows
    if at.kind == "mixed":
        places = list(at.rows or range(len(target)))
        shift = (column + 1) % len(places)
        target[places] = target[places[shift:] + places[:shift]]
    else:
        target[at.record] = changed_row(target, at)
    return True


def mixed_item(get: Callable[[int], Any], column: int = 0) -> Any:
    """Return a record whose parts come from the records at different shifts.

    Parts that have other lengths there, such as the words and the mask of a text, stay together.
    """
    item = get(column + 1)
    if isinstance(item, tuple | list) and type(item) in (tuple, list):
        keys: list[Any] = list(range(len(item)))
    elif isinstance(item, dict):
        keys = list(item)
    else:
        return item
    others = [_part(get(order + 1), key, item[key]) for order, key in enumerate(keys)]
    sizes = [(size_of(item[key]), size_of(other)) for key, other in zip(keys, others, strict=True)]
    if any(own != other for own, other in sizes):
        others = [
            other if own == -1 else item[key]
            for key, other, (own, _) in zip(keys, others, sizes, strict=True)
        ]
    return dict(zip(keys, others, strict=True)) if isinstance(item, dict) else type(item)(others)


def _part(item: Any, key: Any, default: Any) -> Any:
    return item.get(key, default) if isinstance(item, dict) else item[key]


def places_in(index: Any, size: int) -> Any:
    """Return the place or places that ``index`` picks of ``size`` records; a name picks all."""
    if isinstance(index, str):
        return range(size)
    if isinstance(index, slice):
        return range(*index.indices(size))
    with suppress(TypeError):
        place = operator.index(index)
        return place + size if place < 0 else place
    return [int(place) % size for place in index]


def with_item(value: Any, order: int, item: Any, index: Any) -> Any:
    """Return several records as a data set returned them, with ``item`` at ``order``.

    They are a list of records, or columns with one entry for each; ``index`` may name a column.
    Raises ``NotChanged``.
    """
    if isinstance(index, str):
        if not isinstance(item, dict) or index not in item:
            raise NotChanged(f"in {index}, which no single record has")
        item = item[index]
    elif isinstance(value, dict):
        return {key: with_item(rows, order, item[key], None) for key, rows in value.items()}
    if is_array(value):
        value = value.clone() if hasattr(value, "clone") else value.copy()
    elif size_of(value) > order:
        value = list(value)
    else:
        raise NotChanged(f"of several that a {type(value).__name__} holds")
    value[order] = item
    return value


def _one_by_one(original: Any, dataset: Any, size: int) -> Callable[..., Any]:
    """Return a method that reads the items of ``dataset`` by its ``__getitem__``."""

    @functools.wraps(original)
    def read(owner: Any, *args: Any) -> Any:
        if owner is not dataset:
            return original(owner, *args)
        (places,) = args or (range(size),)
        items = (owner[place] for place in places)
        return list(items) if args else items

    return read


def changed_row(rows: Any, at: Neighbour) -> Any:
    """Return the row that the neighbour's record gets."""
    row, other = rows[at.record], rows[at.other]
    is_label = rows.ndim == 1 and "float" not in str(rows.dtype)
    if (
        at.kind == "outlier"
        and is_label
        and any(name in str(rows.dtype) for name in ("int", "bool"))
    ):
        return rows.min() if row == rows.max() else rows.max()  # another label, if there is one
    if at.kind == "replaced" or (at.kind == "outlier" and is_label):
        return other.clone() if hasattr(other, "clone") else other.copy()
    if at.kind == "zeroed":
        return row if is_label else row * 0
    if at.kind == "not_finite":
        return row * math.nan if "float" in str(rows.dtype) else row
    if "float" in str(rows.dtype):
        size = abs(rows).max()
        return row * 0 + HUGE * (size + (size == 0))
    return row * 0 + rows.max()  # pixels or tokens


def changed_item(item: Any, other: Any, at: Neighbour) -> Any:
    """Return what the neighbour's record is instead of ``item``."""
    if at.kind == "replaced":
        return other
    if isinstance(item, tuple | list):
        parts = [changed_item(one, two, at) for one, two in zip(item, other, strict=False)]
        if len(parts) < len(item) or (parts and not isinstance(item[0], tuple | list | dict)):
            parts += item[len(parts) :]
        return type(item)(parts) if type(item) in (tuple, list) else item
    if isinstance(item, dict):
        return {key: changed_item(item[key], other.get(key, item[key]), at) for key in item}
    if is_array(item):
        if at.kind == "zeroed":
            return item * 0
        if at.kind == "not_finite":
            return item * math.nan if "float" in str(item.dtype) else item
        return item * 0 + (HUGE if "float" in str(item.dtype) else item.max())
    if isinstance(item, float):
        return {"zeroed": 0.0, "not_finite": math.nan}.get(at.kind, HUGE)
    return item if at.kind in ("zeroed", "not_finite") else other


def same_values(one: Any, other: Any) -> bool:
    """Whether two arrays share memory or have equal values."""
    if len(one) != len(other) or tuple(one.shape) != tuple(other.shape):
        return False
    try:
        return bool((one == other).all())
    except (TypeError, RuntimeError, AttributeError):
        return False


def kept_rows(records: Records, item: Any) -> tuple[int, Sequence[int]] | None:
    """Return the rows of a lot before masking and those that remain, if ``item`` has these."""
    masked = records.masked
    if masked is None or not is_array(item) or item.shape[0] != len(masked[1]):
        return None
    return masked
