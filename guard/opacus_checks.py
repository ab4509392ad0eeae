"""Check before the first release that the result of ``make_private`` matches the certificate.

The values are read from the attributes of Opacus' objects. Classes are recognised by the names of
their bases, so that Opacus need not be imported. Classes whose releases the guard cannot observe
(several processes, adaptive clipping) are refused.

``make_private`` rounds: for N records in a loader of batch size B it uses q = 1/⌈N/B⌉ and divides
by ⌊qN⌋. ``align_sampling`` sets both to the certified values if only this rounding differs; any
other difference stops the run.

>>> class WeightedRandomSampler: pass
>>> class BatchSampler: sampler = WeightedRandomSampler()
>>> describe_sampler(BatchSampler())
'BatchSampler of WeightedRandomSampler'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from affidavit.guard.certified_run import CertifiedRun
from affidavit.guard.errors import GuardStop

DISTRIBUTED_OPTIMIZERS = ("DistributedDPOptimizer", "DistributedDPOptimizerFastGradientClipping",
           "FSDPOptimizerFastGradientClipping", "SimpleDistributedPerLayerOptimizer")  # fmt: skip
POISSON_SAMPLER = "UniformWithReplacementSampler"
TOLERANCE = Fraction(1, 10**9)


def class_names(value: Any) -> tuple[str, ...]:
    """Return the names of a value's class and of its bases."""
    return tuple(kind.__name__ for kind in type(value).__mro__)


def require_optimizer(certified: CertifiedRun, engine: Any, optimizer: Any) -> None:
    """Require a fresh Opacus optimiser in one process that clips as certified.

    Raises ``GuardStop`` otherwise.
    """
    names = class_names(optimizer)
    if "DPOptimizer" not in names:
        raise GuardStop(
            "tensor_not_noised",
            f"the optimizer is a plain {names[0]}: it adds no noise.",
            "Give the optimizer that make_private returned.",
        )
    if several := next((name for name in names if name in DISTRIBUTED_OPTIMIZERS), None):
        raise GuardStop(
            "unsupported",
            f"{several} draws lots and noise in several processes, but the guard only sees one.",
            "Train in one process, or with affidavit train, which supports several.",
        )
    if "AdaClipDPOptimizer" in names or hasattr(optimizer, "_adjusted_noise_multiplier"):
        raise GuardStop(
            "unsupported",
            "adaptive clipping makes an additional release in each step.",
            "Use a fixed clip norm.",
        )
    if len(engine.accountant) > 0:
        raise GuardStop(
            "already_trained",
            "the privacy engine has already accounted for steps that no record contains.",
            "Call guard.opacus before the first step, with a new engine.",
        )
    per_layer = "DPPerLayerOptimizer" in names
    flat = (
        certified.phase.clipping == "flat"
        or sum(release.count for release in certified.phase.releases) == 1
    )
    if per_layer == flat:
        actual, certified_as = ("per layer", "one norm") if per_layer else ("by one norm", "blocks")
        raise GuardStop(
            "other_blocks",
            f"Opacus clips {actual}, but {certified_as} was certified.",
            'Choose clipping="flat" or "per_layer" in make_private as certified.',
        )
    if optimizer.loss_reduction != "mean":
        raise GuardStop(
            "other_divisor",
            f'loss_reduction is "{optimizer.loss_reduction}": sums are not divided by B.',
            'Use loss_reduction="mean".',
        )


def poisson_sampler(certified: CertifiedRun, loader: Any) -> Any:
    """Return the loader's Poisson sampler over the certified number of records.

    Raises ``GuardStop`` for any other sampler.
    """
    scheme = certified.phase.sampling.scheme
    if scheme != "poisson":
        raise GuardStop(
            "unsupported",
            f"{scheme} was certified, but with Opacus the guard only supports poisson.",
            "Certify the plan for poisson, or use guard.Guard in your own loop.",
        )
    sampler: Any = getattr(loader, "batch_sampler", None)
    if "BatchSplittingSampler" in class_names(sampler):
        sampler = sampler.sampler
    if POISSON_SAMPLER not in class_names(sampler):
        raise GuardStop(
            "other_sampler",
            f"lots are drawn by {describe_sampler(sampler)}, but poisson was certified.",
            "Leave poisson_sampling=True in make_private, and give the loader that it returns.",
        )
    for records in (sampler.num_samples, len(loader.dataset)):
        certified.require_size(records)
    return sampler


def describe_sampler(sampler: Any) -> str:
    """Return the class name of a sampler, and that of its inner sampler."""
    inner = getattr(sampler, "sampler", None)
    name = type(sampler).__name__
    return name if inner is None else f"{name} of {type(inner).__name__}"


def align_sampling(
    certified: CertifiedRun, engine: Any, optimizer: Any, sampler: Any
) -> tuple[str, ...]:
    """Undo Opacus' rounding of q and B, and return notes; raises ``GuardStop`` otherwise.

    Opacus' accountant charges that q too, unless the loop has replaced its hook.
    """
    q, lot = certified.probability, certified.divisor
    size = sampler.num_samples
    rate = Fraction(sampler.sample_rate)
    rounded = {Fraction(1, max(1, batches)) for batches in (math.ceil(size / lot), int(size / lot))}
    if min(abs(rate - value) / value for value in {q, *rounded}) > TOLERANCE:
        raise GuardStop(
            "other_probability",
            f"the sampling probability is {float(rate):.6g}, but {float(q):.6g} was certified.",
            f"Opacus takes 1/len(data_loader): give make_private a loader of batch size "
            f"{math.ceil(lot)} over the data, without a sampler that changes its length.",
        )
    divisor = float(optimizer.expected_batch_size)
    if divisor not in {float(lot), float(int(size * sampler.sample_rate))}:
        raise GuardStop(
            "other_divisor",
            f"sums are divided by {divisor:g}, but {float(lot):g} was certified.",
            "Leave expected_batch_size as make_private sets it.",
        )
    notes = []
    nearest = float(q) if Fraction(float(q)) <= q else math.nextafter(float(q), 0)
    if abs(rate - q) > TOLERANCE * q:
        hook = getattr(optimizer, "step_hook", None)
        if getattr(hook, "__module__", "").startswith("opacus.accountants"):
            optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(nearest))
        notes.append(f"sampling probability set to {nearest:.9g}, from {float(rate):.9g}.")
    if divisor != float(lot):
        notes.append(f"divisor set to {float(lot):g}, from {divisor:g}.")
    sampler.sample_rate = nearest
    optimizer.expected_batch_size = int(lot) if lot.denominator == 1 else float(lot)
    return tuple(notes)


def clip_norms(
    optimizer: Any, tensors: Mapping[str, str], named: Sequence[str]
) -> dict[str, float]:
    """Return the current largest clip norm of each release."""
    norms = getattr(optimizer, "max_grad_norms", None)
    per_tensor = [optimizer.max_grad_norm] * len(named) if norms is None else list(norms)
    largest: dict[str, float] = {}
    for name, norm in zip(named, per_tensor, strict=True):
        release = tensors[name]
        largest[release] = max(largest.get(release, 0.0), float(norm))
    return largest
