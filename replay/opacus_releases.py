"""The releases of Opacus: the sums before noise, the noise, and what its accountant charges.

Each class of optimiser that adds noise is wrapped where it does. The outermost call is the release.
A subclass or an assignment that replaces ``add_noise`` is not a release, so what it does to the
parameters counts as not private. Under the guard, its noise is the release's: it replaces that of
``add_noise``, which it calls in the first steps alone.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from affidavit.replay.arrays import array_of
from affidavit.replay.datasets import all_subclasses
from affidavit.replay.recorder import Recorder
from affidavit.replay.torch_state import TorchState, digest_of


def install(recorder: Recorder, state: TorchState) -> None:
    """Record the releases of Opacus' optimisers from now on."""
    base = importlib.import_module("opacus.optimizers").DPOptimizer
    optimizers: list[Any] = []
    active: set[int] = set()

    def public_numbers() -> Iterator[tuple[str, str]]:
        for optimizer in optimizers:
            for name in ("max_grad_norm", "noise_multiplier", "expected_batch_size"):
                yield f"{type(optimizer).__name__}.{name}", digest_of(getattr(optimizer, name))

    state.extra.append(public_numbers)
    init = base.__init__

    @functools.wraps(init)
    def noting(owner: Any, *args: Any, **kwargs: Any) -> None:
        init(owner, *args, **kwargs)
        optimizers.append(owner)

    base.__init__ = noting

    def released(owner: Any, add_noise: Callable[[], None]) -> None:
        if id(owner) in active:
            add_noise()
            return
        active.add(id(owner))
        try:
            _release(recorder, state, owner, add_noise)
        finally:
            active.discard(id(owner))

    def wrap(kind: Any, name: str, optimizer_of: Callable[[Any], Any]) -> None:
        original = getattr(kind, name)

        @functools.wraps(original)
        def add_noise(owner: Any) -> None:
            released(optimizer_of(owner), lambda: original(owner))

        setattr(kind, name, add_noise)

    for kind in (base, *all_subclasses(base)):
        if "add_noise" in kind.__dict__:
            wrap(kind, "add_noise", lambda owner: owner)
    if "affidavit.guard" in sys.modules:
        guarded = importlib.import_module("affidavit.guard.opacus_run").OpacusRun
        wrap(guarded, "_guarded_noise", lambda owner: owner._optimizer)
    _watch_accountants(recorder)


def _release(
    recorder: Recorder, state: TorchState, optimizer: Any, add_noise: Callable[[], None]
) -> None:
    torch = importlib.import_module("torch")
    recorder.begin_release()
    parameters = list(optimizer.params)
    names = state.names_of(parameters)
    sums = [array_of(parameter.summed_grad) for parameter in parameters]
    norms = getattr(optimizer, "max_grad_norms", None)
    clip_norm = float(optimizer.max_grad_norm) if norms is None else [float(norm) for norm in norms]
    std = float(optimizer.noise_multiplier) * float(optimizer.max_grad_norm)
    has_count = hasattr(optimizer, "unclipped_num_std")
    if has_count and optimizer.noise_multiplier > 0:
        sigma, of_count = float(optimizer.noise_multiplier), float(optimizer.unclipped_num_std)
        std = (sigma**-2 - (2 * of_count) ** -2) ** -0.5 * float(optimizer.max_grad_norm)
    parts = _parts_of_records(parameters, clip_norm)
    add_noise()
    if has_count:
        count = recorder.repeated("noisy count", {"unclipped": float(optimizer.unclipped_num)})
        optimizer.unclipped_num = optimizer.unclipped_num * 0 + count["unclipped"]  # a tensor
    noisy = [array_of(parameter.grad) for parameter in parameters]
    first = recorder.release(
        origin=f"{type(optimizer).__name__}.add_noise",
        names=names,
        sums=sums,
        noisy=noisy,
        clip_norm=clip_norm,
        noise_std=std,
        parts=parts,
    )
    if first is not None:
        with torch.no_grad():
            for parameter, item in zip(parameters, first, strict=True):
                parameter.grad.copy_(torch.from_numpy(item).to(parameter.grad.dtype))
    recorder.align_generators()


def _parts_of_records(
    parameters: list[Any], clip_norm: float | list[float]
) -> list[list[float]] | None:
    """Return the norm of what each record adds to each tensor, in clip norms.

    None if the gradients of all records of the batch are not there, as with ghost clipping.
    """
    torch = importlib.import_module("torch")
    samples: list[Any] = [getattr(parameter, "grad_sample", None) for parameter in parameters]
    if not samples or not all(isinstance(item, torch.Tensor) and len(item) for item in samples):
        return None
    norms = torch.stack([item.detach().reshape(len(item), -1).norm(dim=1) for item in samples], 1)
    scaled = norms.double() / torch.tensor(clip_norm)
    together = scaled if isinstance(clip_norm, list) else scaled.norm(dim=1, keepdim=True)
    parts: list[list[float]] = (scaled / together.clamp(min=1)).tolist()
    return parts


def _watch_accountants(recorder: Recorder) -> None:
    kinds = importlib.import_module("opacus.accountants")
    for kind in all_subclasses(kinds.IAccountant):
        if "step" not in kind.__dict__:
            continue
        original = kind.step

        @functools.wraps(original)
        def step(owner: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            arguments = dict(zip(("noise_multiplier", "sample_rate"), args, strict=False)) | kwargs
            numbers = {
                name: None if arguments.get(name) is None else float(arguments[name])
                for name in ("noise_multiplier", "sample_rate")
            }
            recorder.add("accounted", **numbers)
            return _original(owner, *args, **kwargs)

        kind.step = step
    for kind in all_subclasses(kinds.IAccountant):
        if "get_epsilon" in kind.__dict__ and kind.__module__.startswith("opacus."):
            kind.get_epsilon = _computed_once(recorder, kind.get_epsilon)


def _computed_once(recorder: Recorder, get_epsilon: Any) -> Any:
    """Return ``get_epsilon`` with what the first run computed: it takes up to seconds each time."""

    @functools.wraps(get_epsilon)
    def epsilon(owner: Any, *args: Any, **kwargs: Any) -> Any:
        key = f"{type(owner).__name__} {owner.history!r} {args!r} {kwargs!r}"
        return recorder.once(key, lambda: get_epsilon(owner, *args, **kwargs))

    return epsilon
