"""Contradictions: fields that are each valid and cannot all be meant.

A plan that says one thing twice, or half of a thing, has no meaning that an accountant
may choose. Each rule here names the field to change and what to write instead. Whether
a well-formed plan can be *certified* is not decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from affidavit.plan import additional_releases, asked, correlated, optimizer
from affidavit.plan.claim import unanswerable
from affidavit.plan.diagnostics import Reason
from affidavit.plan.schedule import steps
from affidavit.plan.types import LARGEST_INTEGER

if TYPE_CHECKING:
    from affidavit.plan.document import Phase, Plan

BY_PROBABILITY = frozenset({"poisson", "truncated_poisson"})
"""Schemes that a sampling probability describes fully."""


def contradictions(plan: Plan) -> tuple[Reason, ...]:
    """Every contradiction in ``plan``, in the order of its fields."""
    found = [*_version(plan), *_unit(plan)]
    for index, phase in enumerate(plan.phases):
        found += [*_length(plan, index, phase), *_sampling(plan, index, phase)]
        found += [*_noise(plan, index, phase), *_blocks(plan, index, phase)]
    found += [*asked.contradictions(plan), *additional_releases.contradictions(plan)]
    found += [*correlated.contradictions(plan), *optimizer.misplaced(plan)]
    found += [*_target(plan), *_allocation(plan)]
    found += () if plan.claim is None else unanswerable(plan.claim, plan)
    return tuple(found) or tuple(_horizon(plan))


def _version(plan: Plan) -> Iterator[Reason]:
    if plan.version != 1:
        yield _wrong("/version", f"schema version {plan.version} is not known.", "Write 1.")


def _unit(plan: Plan) -> Iterator[Reason]:
    pointer = "/dataset/contributions_per_user"
    given = plan.dataset.contributions_per_user is not None
    if plan.dataset.unit == "user" and not given:
        yield _missing(
            pointer,
            "user-level privacy needs the most records of one user.",
            "Give contributions_per_user.",
        )
    if plan.dataset.unit == "example" and given:
        yield _conflict(
            pointer,
            "contributions_per_user is given for example-level privacy.",
            "Remove it, or write unit: user.",
        )


def _length(plan: Plan, index: int, phase: Phase) -> Iterator[Reason]:
    pointer = plan.pointer(index, "steps")
    if phase.steps is not None and phase.epochs is not None:
        yield _conflict(pointer, "both steps and epochs are given.", "Keep one of the two.")
    if phase.steps is None and phase.epochs is None:
        if "steps" not in phase.model_fields_set:
            yield _missing(
                pointer,
                "the length of training is not given.",
                "Give steps or epochs, or steps: null to ask for the most that fit.",
            )
        elif len(plan.phases) > 1:
            yield _conflict(
                pointer,
                "steps: null is asked of one phase among several.",
                "Give the steps of every phase.",
            )
        elif plan.asks_for_noise:
            yield _conflict(
                pointer, "both the steps and the noise are left open.", "Give one of the two."
            )


def _horizon(plan: Plan) -> Iterator[Reason]:
    """Steps that are counted exactly; asked last, because it reads the other fields."""
    for index, phase in enumerate(plan.phases):
        if phase.epochs is not None and (steps(plan, phase) or 0) > LARGEST_INTEGER:
            yield _wrong(
                plan.pointer(index, "epochs"),
                "these epochs come to more than 2^53 - 1 steps.",
                "Give fewer epochs.",
            )


def _sampling(plan: Plan, index: int, phase: Phase) -> Iterator[Reason]:
    sampling = phase.sampling
    at_lot, at_probability = (
        plan.pointer(index, "sampling", name) for name in ("lot_size", "probability")
    )
    if sampling.scheme == "full_batch":
        if sampling.lot_size is not None or sampling.probability is not None:
            yield _conflict(
                plan.pointer(index, "sampling"),
                "full_batch uses every record; a lot size says otherwise.",
                "Remove lot_size and probability.",
            )
    elif sampling.lot_size is not None and sampling.probability is not None:
        yield _conflict(
            at_probability, "both lot_size and probability are given.", "Keep one of the two."
        )
    elif sampling.probability is not None and sampling.scheme not in BY_PROBABILITY:
        yield _conflict(
            at_probability,
            f"{sampling.scheme} has a lot size, not a probability.",
            "Give lot_size.",
        )
    elif (
        sampling.lot_size is None
        and sampling.probability is None
        and not (asked.asks_for_lot_size(phase) or asked.asks_for_probability(phase))
    ):
        yield _missing(
            at_lot,
            "the size of a lot is not given.",
            "Give lot_size, or for Poisson sampling probability.",
        )
    if sampling.lot_size is not None:
        size = plan.dataset.size
        if size is None:
            yield _missing(
                "/dataset/size",
                "lot_size needs the size of the data set.",
                "Give dataset.size, or for Poisson sampling probability.",
            )
        elif sampling.lot_size > size:
            yield _conflict(
                at_lot,
                f"a lot of {sampling.lot_size} is larger than the data set of {size}.",
                "Correct one of the two.",
            )
    unsized = sampling.lot_size is None and plan.dataset.size is None
    if sampling.scheme == "truncated_poisson" and unsized:
        yield _missing(
            "/dataset/size",
            "how often a lot is cut depends on the size of the data set.",
            "Give dataset.size.",
        )
    if sampling.bins_drawn is not None:
        pointer = plan.pointer(index, "sampling", "bins_drawn")
        if sampling.scheme != "balls_in_bins":
            yield _conflict(
                pointer,
                f"bins_drawn belongs to balls_in_bins, not {sampling.scheme}.",
                "Remove it or change the scheme.",
            )
        elif sampling.bins_drawn == "each_epoch" and phase.noise.kind != "independent":
            yield _conflict(
                pointer,
                "noise that is correlated across epochs is accounted for bins that are kept.",
                "Write bins_drawn: once, or use independent noise.",
            )
    for name, scheme, value in (
        ("max_lot_size", "truncated_poisson", sampling.max_lot_size),
        ("groups", "cyclic_poisson", sampling.groups),
    ):
        pointer = plan.pointer(index, "sampling", name)
        if sampling.scheme == scheme and value is None:
            yield _missing(pointer, f"{scheme} needs {name}.", f"Give {name}.")
        if sampling.scheme != scheme and value is not None:
            yield _conflict(
                pointer,
                f"{name} belongs to {scheme}, not {sampling.scheme}.",
                "Remove it or change the scheme.",
            )


def _noise(plan: Plan, index: int, phase: Phase) -> Iterator[Reason]:
    for place, release in enumerate(phase.releases):
        if release.noise_multiplier is not None and release.noise_std is not None:
            yield _conflict(
                plan.pointer(index, "releases", place, "noise_std"),
                "both noise_multiplier and noise_std are given.",
                "Keep one of the two.",
            )
    given = {release.has_noise for release in phase.releases}
    if len(given) > 1:
        place = next(i for i, release in enumerate(phase.releases) if not release.has_noise)
        yield _missing(
            plan.pointer(index, "releases", place, "noise_multiplier"),
            "some releases of a step have noise and this one has none.",
            "Give the noise of every release, or of none to have it solved for.",
        )
    noise = phase.noise
    if noise.kind == "matrix" and (noise.rows is None) == (noise.file is None):
        yield _conflict(
            plan.pointer(index, "noise"),
            "a noise matrix is given by rows or by file, one of the two.",
            "Give rows, or file with its sha256.",
        )
    if noise.kind == "matrix" and noise.file is not None and noise.sha256 is None:
        yield _missing(
            plan.pointer(index, "noise", "sha256"),
            "a file may change; its digest is not given.",
            "Give its sha256.",
        )
    if noise.kind == "blt" and (noise.buffers is None) == (noise.decays is None):
        yield _conflict(
            plan.pointer(index, "noise"),
            "a BLT has decays and scales, or buffers to be optimised.",
            "Give one of the two.",
        )
    if noise.kind == "blt" and len(noise.decays or ()) != len(noise.scales or ()):
        yield _conflict(
            plan.pointer(index, "noise", "scales"),
            "a BLT has as many scales as decays.",
            "Give one scale a decay.",
        )


def _blocks(plan: Plan, index: int, phase: Phase) -> Iterator[Reason]:
    counts = Counter(release.name for release in phase.releases)
    for place, release in enumerate(phase.releases):
        if counts[release.name] > 1:
            yield _conflict(
                plan.pointer(index, "releases", place, "name"),
                f"the name {release.name} is used twice.",
                "Give each its own.",
            )
            return
    norms = {release.clip_norm for release in phase.releases}
    if phase.clipping == "flat" and len(norms) > 1:
        yield _conflict(
            plan.pointer(index, "clipping"),
            "flat clipping has one clip norm over all blocks, and several are given.",
            "Give every release the same clip_norm.",
        )


def _target(plan: Plan) -> Iterator[Reason]:
    epsilon, delta = plan.target.epsilon, plan.target.delta
    if epsilon is None and delta is None:
        yield _missing(
            "/target",
            "neither epsilon nor delta is given.",
            "Give delta to be told epsilon, or both to have them checked.",
        )
    elif epsilon is None or delta is None:
        missing = "epsilon" if epsilon is None else "delta"
        if plan.asks_for_noise:
            yield _missing(
                f"/target/{missing}",
                "solving for noise needs both epsilon and delta.",
                f"Give target.{missing}, or the noise.",
            )
        elif plan.asks_for_steps:
            yield _missing(
                f"/target/{missing}",
                "solving for steps needs both epsilon and delta.",
                f"Give target.{missing}, or the steps.",
            )


def _allocation(plan: Plan) -> Iterator[Reason]:
    wanted = {"proportional": "weight", "optimal": "dimension"}.get(plan.allocation)
    if wanted is None or not plan.asks_for_noise:
        return
    for index, phase in enumerate(plan.phases):
        for place, release in enumerate(phase.releases):
            if getattr(release, wanted) is None:
                yield _missing(
                    plan.pointer(index, "releases", place, wanted),
                    f"the {plan.allocation} allocation needs the {wanted} of every release.",
                    f"Give {wanted}, or use allocation: uniform.",
                )


def _conflict(pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code="conflict", pointer=pointer, message=message, remedy=remedy)


def _missing(pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code="missing_field", pointer=pointer, message=message, remedy=remedy)


def _wrong(pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code="invalid_value", pointer=pointer, message=message, remedy=remedy)
