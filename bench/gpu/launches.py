"""Count what a private microbatch and step ask of a GPU, without one.

The models of ``run.py``, at their real sizes and under bfloat16 autocast, run on
tensors without contents, and take the ways that they take on a GPU. Each operation that starts a
kernel is counted with the bytes that it reads and writes (a tensor that it gets twice is read once)
and its multiplications. ``_foreach`` operations are counted by the launches that PyTorch cuts them
into. The same is counted for a plain microbatch.

The time is a model: a kernel takes the longest of its bytes at ``BYTES_PER_SECOND``, of its
multiplications at ``PRODUCTS_PER_SECOND``, and of ``SECONDS_PER_LAUNCH``. ``make bench-gpu-model``
runs it; by hand, with ``PYTHONPATH=.``:

    python bench/gpu/launches.py            the table
    python bench/gpu/launches.py --where    with the trainer's functions that launch most
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from graph import traced_microbatch
from run import CASES, TINY, Case, Model, model_of
from run import private as private_step
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from affidavit.trainer.clipping import ghost_norm, kernel_sizes
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.noise.noise_statistics import NoiseTest
from affidavit.trainer.noise.source import NoiseSource
from affidavit.trainer.norm_bounds import upcast

TRAINER = str(Path(ghost_norm.__file__).parents[1])

BYTES_PER_SECOND, SECONDS_PER_LAUNCH = 4e12, 5e-6
PRODUCTS_PER_SECOND = {torch.bfloat16: 3e14, torch.float32: 2.5e13, torch.float64: 2.5e13}

FREE = frozenset(
    [
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "diagonal",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "is_same_size",
        "lift_fresh",
        "narrow",
        "new_empty",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unfold",
        "unsqueeze",
        "view",
        "view_as_complex",
        "view_as_real",
    ]
)
"""Operations that start no kernel."""

WAITS = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "item", "equal"))
"""Operations for which a processor waits for the device."""

FOREACH_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
FOREACH_CHUNKS, FOREACH_CHUNK = 320, 65536
"""Most tensors and chunks of entries in one launch (ATen's MultiTensorApply.cuh), by lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Launches of one operation; ``place`` is the trainer's function that called it."""

    name: str
    place: str
    count: int
    bytes: int
    seconds: float


class Count(TorchDispatchMode):
    """Counts the launches inside it; ``waits`` has the operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.waits: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in WAITS:
            self.waits.append(f"{name} in {_place()}")
            return result
        if name == "zero_records_":
            written = [args[1]]  # records are lost so seldom that no more than this is touched
        elif name in ("add_bmm_", "gram_of_rows_", "at_once_"):
            written = [args[0]]
        elif name.startswith("_foreach") and name.endswith("_"):
            written = list(args[0])
        else:
            written = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        if name not in FREE and written:
            read = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
            if name == "zero_records_":
                read = written
            elif name == "gram_of_rows_":
                read = [args[1]]
            sizes = {_identity(item): item.numel() * item.element_size() for item in read}
            moved = sum(sizes.values()) + sum(
                item.numel() * item.element_size() for item in written
            )
            products, dtype = _products(name, read)
            count = _launches(name, args)
            busy = max(moved / BYTES_PER_SECOND, products / PRODUCTS_PER_SECOND[dtype])
            self.launches.append(
                Launch(
                    name=name,
                    place=_place(),
                    count=count,
                    bytes=moved,
                    seconds=max(busy, count * SECONDS_PER_LAUNCH),
                )
            )
        return result

    @property
    def count(self) -> int:
        """The number of launches."""
        return sum(item.count for item in self.launches)

    @property
    def bytes(self) -> int:
        """The bytes that they read and write."""
        return sum(item.bytes for item in self.launches)

    @property
    def seconds(self) -> float:
        """The modelled time."""
        return sum(item.seconds for item in self.launches)

    def by_place(self) -> list[tuple[str, int, float, float]]:
        """Return launches, gigabytes and milliseconds of each function, the longest first."""
        found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for item in self.launches:
            row = found[item.place]
            row[0] += item.count
            row[1] += item.bytes / 1e9
            row[2] += item.seconds * 1e3
        rows = [(place, int(n), moved, ms) for place, (n, moved, ms) in found.items()]
        return sorted(rows, key=lambda row: -row[3])


def _identity(item: Tensor) -> tuple[int, int, int]:
    return item.untyped_storage()._cdata, item.storage_offset(), item.numel()


def _place() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(TRAINER):
            return f"{path[len(TRAINER) + 1 :]} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd and the model"


def _products(name: str, read: Sequence[Tensor]) -> tuple[float, torch.dtype]:
    """Return the multiplications of a matrix product or of attention, and their type."""
    if name in ("squares_of_products", "sums_of_products"):
        a, b = read[:2]
        return a.numel() * b.shape[-1], a.dtype
    if name == "gram_of_rows_":
        return read[0].numel() * read[0].shape[1], read[0].dtype
    if name in ("mm", "addmm", "bmm", "baddbmm", "add_bmm_"):
        a, b = [item for item in read if item.ndim >= 2][-2:]
        return a.numel() * b.shape[-1], a.dtype
    if name.startswith("_scaled_dot_product") and read[0].ndim == 4:
        n, heads, steps, width = read[0].shape
        return n * heads * steps**2 * width * (2.5 if "backward" in name else 1), torch.bfloat16
    return 0.0, torch.float32


def _launches(name: str, args: Sequence[Any]) -> int:
    """Return how many kernels an operation starts."""
    if name.startswith("_foreach"):
        return _foreach_launches(name, args)
    if name == "layer_norm_backward":  # the sums of several pieces are added up
        return 1 + (args[0].shape[1] > kernel_sizes.PIECE)
    return 2 if name == "squares_of_products" else 1


def _foreach_launches(name: str, args: Sequence[Any]) -> int:
    lists = [of for of in args if isinstance(of, list | tuple) and of and isinstance(of[0], Tensor)]
    most = FOREACH_TENSORS[len(lists) + (not name.endswith("_"))]
    launches, tensors, chunks = 1, 0, 0
    for item in lists[0]:
        tensors += 1
        chunks += math.ceil(item.numel() / FOREACH_CHUNK)
        launches += chunks // FOREACH_CHUNKS
        chunks %= FOREACH_CHUNKS
        if tensors == most:
            launches, tensors, chunks = launches + 1, 0, 0
    return launches


def _bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    if ghost_norm.are_bfloat16(a, b):
        return torch.bmm(a, b, out_dtype=torch.float32, out=out)
    return torch.bmm(upcast(a), upcast(b), out=out)


_LIBRARY = torch.library.Library("bench", "DEF")
_LIBRARY.define("add_bmm_(Tensor(a!) total, Tensor a, Tensor b) -> ()")
torch.library.register_fake("bench::add_bmm_", lambda *_: None, lib=_LIBRARY)


_LIBRARY.define("at_once_(Tensor(a!) result) -> ()")
torch.library.impl("bench::at_once_", "CPU", lambda _: None, lib=_LIBRARY)


def _add_bmm(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    torch.ops.bench.add_bmm_(total, a, b)  # baddbmm, for which PyTorch has no shapes by out_dtype
    return total


def _mm(a: Tensor, b: Tensor) -> Tensor:
    narrow = ghost_norm.are_bfloat16(a, b)
    return torch.mm(a, b, out_dtype=torch.float32) if narrow else upcast(a) @ upcast(b)


@contextmanager
def without_contents() -> Iterator[None]:
    """Compute with tensors without contents, which take the ways of those on a GPU."""
    with ExitStack() as stack:
        for name, value in (
            ("PROCESSORS", frozenset()),
            ("BFLOAT16_DEVICES", frozenset({"cpu"})),
            ("MOVE_COSTS", {}),
            ("CHUNK_ENTRIES", {}),
            ("batched_matmul", _bmm),
            ("add_batched_matmul_", _add_bmm),
            ("matmul", _mm),
            ("has_kernels", lambda _: True),
        ):
            stack.enter_context(patch.object(ghost_norm, name, value))
        for kind in (nn.Linear, nn.Embedding):
            stack.enter_context(patch.object(kind, "reset_parameters", lambda _: None))
        stack.enter_context(patch.object(nn.Module, "to", lambda self, _: self))
        stack.enter_context(patch("examples.train.gpt2.initialize", lambda *_, **__: None))
        stack.callback(ghost_norm.constants.cache_clear)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _private(model: Model) -> PrivateModel:
    names = [group.names for of in model.blocks().values() for group in of]
    specs = [BlockSpec(name=str(n), clip_norm=0.1, names=of) for n, of in enumerate(names)]
    return PrivateModel(model.module, specs)


def _losses(model: Model, batch: tuple[Tensor, ...]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.losses(batch[:2])


def microbatches(case: Case) -> tuple[Count, Count]:
    """Count a plain and a private microbatch; each adds to what another of its lot left."""
    with without_contents():
        model = model_of(case, "cpu")
        records, shape = case.microbatch, (case.microbatch, case.size + 1)
        batch = torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.bool)
        if case.has_images:
            batch = torch.zeros(records, 3, case.size, case.size), batch[0][:, 0]
        losses = partial(_losses, model, batch)
        (losses().sum() / case.lot).backward()
        with Count() as plain:
            (losses().sum() / case.lot).backward()
        for parameter in model.module.parameters():
            parameter.grad = None
        private = _private(model)
        private.accumulate(losses, records=records)
        with Count() as counted:
            private.accumulate(losses, records=records)
    return plain, counted


def graph_of_microbatch(
    model: Model, batch: tuple[Tensor, ...], losses: Callable[..., Tensor] = _losses
) -> tuple[GraphModule, PrivateModel]:
    """Return the graph from ``batch`` to the losses and clipped sums of a private microbatch.

    ``batch`` has tokens and whether they count, (n, T + 1), and what else ``losses`` needs. Also
    returns what it was traced from.
    """
    private = _private(model)
    return traced_microbatch(private, lambda *of: losses(model, of), batch), private


def step_launches() -> dict[str, int]:
    """Count the rest of a step of GPT-2's 149 tensors, which are small here, by its parts.

    Noise and the sums of its test are those of a GPU: one kernel each.
    """
    case = Case(
        model="GPT-2", size=8, lot=8, microbatch=8, repeats=1, shape={**TINY, "n_layer": 12}
    )
    step, state = private_step(case, "cpu")
    step()
    parts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with Count() as found:
                result = function(*args, **kwargs)
            parts[name] += found.count
            return result

        return run

    def at_once(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with _disable_current_modes():
                result = function(*args)
            torch.ops.bench.at_once_(result if isinstance(result, Tensor) else torch.zeros(1))
            return result

        return run

    with ExitStack() as stack:
        for owner, name in ((NoiseTest, "read"), (NoiseSource, "add_to")):
            stack.enter_context(patch.object(owner, name, at_once(getattr(owner, name))))
        for owner, name in (
            (state.noise_test, "read"),
            (state.noise_test, "observe"),
            (state, "_update"),
            (state, "_require_finite"),
            (state, "release"),
        ):
            stack.enter_context(patch.object(owner, name, counted(name, getattr(owner, name))))
        step()
    return dict(parts)


def main(arguments: Sequence[str]) -> int:
    """Write the table."""
    sys.stdout.write(f"{'':44} {'launches':>17} {'GB':>17} {'model, ms':>17}\n")
    for case in CASES:
        plain, private = microbatches(case)
        pairs = (
            (private.count, plain.count),
            (private.bytes / 1e9, plain.bytes / 1e9),
            (private.seconds * 1e3, plain.seconds * 1e3),
        )
        cells = " ".join(f"{a:6.0f}/{b:<5.0f}{a / b:5.2f}" for a, b in pairs)
        sys.stdout.write(f"{case.name:44} {cells}\n")
        if "--where" in arguments:
            for place, count, moved, ms in private.by_place()[:24]:
                sys.stdout.write(f"    {count:6d} {moved:8.2f} GB {ms:8.2f} ms  {place}\n")
    sys.stdout.write(f"the rest of a step of 149 tensors: {step_launches()}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
