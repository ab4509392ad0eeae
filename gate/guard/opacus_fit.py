"""Whether what Opacus' ``make_private`` made is what was certified, before the first release.

Everything is read from the objects themselves, by Opacus' own attribute names; classes are
known by name along their bases, so that Opacus is not imported. A class whose releases the guard
cannot see whole (several processes, adaptive clipping) is refused.

``make_private`` rounds: of N records in a loader of batch size B it takes q = 1/⌈N/B⌉ and divides
by ⌊qN⌋. Where that is all that differs from the certified q and B, the guard sets both to what
was certified (``aligned``); any other difference stops the run.

>>> class WeightedRandomSampler: pass
>>> class BatchSampler: sampler = WeightedRandomSampler()
>>> described(BatchSampler())
'BatchSampler of WeightedRandomSampler'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from affidavit.gate.guard.bound import Bound
from affidavit.gate.guard.stopping import GuardStop

SEVERAL = ("DistributedDPOptimizer", "DistributedDPOptimizerFastGradientClipping",
           "FSDPOptimizerFastGradientClipping", "SimpleDistributedPerLayerOptimizer")  # fmt: skip
POISSON = "UniformWithReplacementSampler"
CLOSE = Fraction(1, 10**9)


def bases(value: Any) -> tuple[str, ...]:
    """The names of a value's class and of all its bases."""
    return tuple(kind.__name__ for kind in type(value).__mro__)


def require_optimizer(bound: Bound, engine: Any, optimizer: Any) -> None:
    """An optimiser of Opacus that takes its first step, in one process, clipping as certified.

    Raises ``GuardStop`` for any other.
    """
    names = bases(optimizer)
    if "DPOptimizer" not in names:
        raise GuardStop(
            "tensor_not_noised",
            f"the optimizer is a plain {names[0]}: it adds no noise.",
            "Give the optimizer that make_private returned.",
        )
    if several := next((name for name in names if name in SEVERAL), None):
        raise GuardStop(
            "unsupported",
            f"{several} draws lots and noise in several processes, of which the guard sees one.",
            "Train in one process, or with affidavit train, which certifies several.",
        )
    if "AdaClipDPOptimizer" in names or hasattr(optimizer, "_adjusted_noise_multiplier"):
        raise GuardStop(
            "unsupported",
            "the clip norm is adapted to the data, which is one more release a step.",
            "Use a fixed clip norm.",
        )
    if len(engine.accountant) > 0:
        raise GuardStop(
            "already_trained",
            "the privacy engine has accounted for steps already, which are in no record.",
            "Call guard.opacus before the first step, with an engine of its own.",
        )
    per_layer = "DPPerLayerOptimizer" in names
    flat = (
        bound.phase.clipping == "flat"
        or sum(release.count for release in bound.phase.releases) == 1
    )
    if per_layer == flat:
        how = ("per layer", "one norm over all") if per_layer else ("by one norm", "blocks")
        raise GuardStop(
            "other_blocks",
            f"Opacus clips {how[0]}, and {how[1]} was certified.",
            'Choose clipping="flat" or "per_layer" in make_private as certified.',
        )
    if optimizer.loss_reduction != "mean":
        raise GuardStop(
            "other_divisor",
            f'loss_reduction is "{optimizer.loss_reduction}": sums are not divided by B.',
            'Use loss_reduction="mean".',
        )


def poisson_sampler(bound: Bound, loader: Any) -> Any:
    """The loader's own Poisson sampler over the certified number of records.

    Raises ``GuardStop`` for any other.
    """
    certified = bound.phase.sampling.scheme
    if certified != "poisson":
        raise GuardStop(
            "unsupported",
            f"{certified} was certified, and the guard holds Opacus to poisson alone.",
            "Certify the plan for poisson, or use guard.Guard in your own loop.",
        )
    sampler: Any = getattr(loader, "batch_sampler", None)
    if "BatchSplittingSampler" in bases(sampler):
        sampler = sampler.sampler
    if POISSON not in bases(sampler):
        raise GuardStop(
            "other_sampler",
            f"lots are drawn by {described(sampler)}, and poisson was certified.",
            "Leave poisson_sampling=True in make_private, and give the loader that it returns.",
        )
    size = bound.plan.dataset.size
    for found in (sampler.num_samples, len(loader.dataset)):
        if found != size:
            raise GuardStop(
                "dataset_size",
                f"the data has {found} records, and {size} were certified.",
                "Give the data that was meant, or certify the plan for this size.",
            )
    return sampler


def described(sampler: Any) -> str:
    """A sampler by its class, and by that of the one inside it."""
    inner = getattr(sampler, "sampler", None)
    name = type(sampler).__name__
    return name if inner is None else f"{name} of {type(inner).__name__}"


def aligned(bound: Bound, optimizer: Any, sampler: Any) -> tuple[str, ...]:
    """Undo Opacus' rounding of q and B, and say so; raises ``GuardStop`` for other ones."""
    q, lot = bound.probability, bound.divisor
    size = sampler.num_samples
    rate = Fraction(sampler.sample_rate)
    rounded = {Fraction(1, max(1, whole)) for whole in (math.ceil(size / lot), int(size / lot))}
    if min(abs(rate - item) / item for item in {q, *rounded}) > CLOSE:
        raise GuardStop(
            "other_probability",
            f"a record is in a lot with probability {float(rate):.6g}, and {float(q):.6g} was "
            "certified.",
            f"Opacus takes 1/len(data_loader): give make_private a loader of batch size "
            f"{math.ceil(lot)} over the data, without a sampler that changes its length.",
        )
    divisor = float(optimizer.expected_batch_size)
    if divisor not in {float(lot), float(int(size * sampler.sample_rate))}:
        raise GuardStop(
            "other_divisor",
            f"sums are divided by {divisor:g}, and {float(lot):g} was certified.",
            "Leave expected_batch_size as make_private sets it.",
        )
    notes = []
    certified = float(q) if Fraction(float(q)) <= q else math.nextafter(float(q), 0)
    if abs(rate - q) > CLOSE * q:
        notes.append(f"sampling probability set to {certified:.9g}, from {float(rate):.9g}.")
    if divisor != float(lot):
        notes.append(f"divisor set to {float(lot):g}, from {divisor:g}.")
    sampler.sample_rate = certified
    optimizer.expected_batch_size = int(lot) if lot.denominator == 1 else float(lot)
    return tuple(notes)


def clips_of(optimizer: Any, tensors: Mapping[str, str], named: Sequence[str]) -> dict[str, float]:
    """The largest clip norm of each release as the optimiser has it now."""
    norms = getattr(optimizer, "max_grad_norms", None)
    each = [optimizer.max_grad_norm] * len(named) if norms is None else list(norms)
    found: dict[str, float] = {}
    for name, norm in zip(named, each, strict=True):
        release = tensors[name]
        found[release] = max(found.get(release, 0.0), float(norm))
    return found
