"""Validators: fields that are each valid and contradict each other.

A plan that gives a quantity twice, or only half of it, is ambiguous. Each check names the field to
change and what to write instead. The forms of noise, a participation and a workload check their
own fields (``affidavit.plan.strategies``). Whether a well-formed plan can be *certified* is not
decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from affidavit.plan.diagnostics import Reason, conflict, invalid_value, missing_field, pointer_to
from affidavit.plan.document import (
    Claim,
    ClippingQuantile,
    LaplaceMetric,
    Metric,
    Phase,
    PlanDocument,
    Selection,
)
from affidavit.plan.limits import MAX_INTEGER
from affidavit.plan.optimizer import OPTIMIZER_FIELDS, optimizer_fields
from affidavit.plan.schedule import steps
from affidavit.plan.vocabulary import BY_PROBABILITY, NO_EPOCHS, REQUIRED_FIELDS


def find_conflicts(plan: PlanDocument) -> tuple[Reason, ...]:
    """Return every contradiction in ``plan``, in the order of its fields."""
    reasons = [*_version(plan), *_privacy_unit(plan)]
    for index, phase in enumerate(plan.phases):
        reasons += [*_length(plan, index, phase), *_lot(plan, index, phase)]
        reasons += [*_scheme(plan, index, phase), *_release_noise(plan, index, phase)]
        reasons += _blocks(plan, index, phase)
    reasons += [*_unknowns(plan), *_additional_releases(plan)]
    for index, phase in enumerate(plan.phases):
        reasons += phase.noise.check(partial(plan.pointer, index, "noise"))
        if phase.participation is not None:
            reasons += phase.participation.check(partial(plan.pointer, index, "participation"))
    if plan.workload is not None:
        reasons += plan.workload.check(partial(pointer_to, "workload"))
    reasons += [*_optimizer(plan), *_target(plan), *_allocation(plan), *_canaries(plan)]
    if plan.claim is not None:
        reasons += find_claim_conflicts(plan.claim, plan)
    return tuple(reasons) or tuple(_step_limit(plan))


def _canaries(plan: PlanDocument) -> Iterator[Reason]:
    """An audit tests the presence of records, and its canaries are records of the data set."""
    if plan.canaries is None:
        return
    count, guesses, size = plan.canaries.count, plan.canaries.guesses, plan.dataset.size
    if plan.adjacency == "replace_one":
        yield conflict(
            "/canaries",
            "canaries test whether a record takes part, and under replace_one neighbours differ in "
            "more than that.",
            "Write adjacency: add_remove or zero_out, or remove canaries.",
        )
    if size is None:
        yield missing_field(
            "/dataset/size",
            "canaries need the size of the data set.",
            "Give dataset.size, including the canaries.",
        )
    elif count > size:
        yield conflict(
            "/canaries/count",
            f"the data set has {size} records, including the canaries, but there are {count} "
            "canaries.",
            "Add them to dataset.size.",
        )
    if guesses is not None and (guesses % 2 or guesses > count):
        yield invalid_value(
            "/canaries/guesses",
            f"guesses must be even and at most the {count} canaries.",
            "Give an even number up to the count, or leave it out.",
        )


def _version(plan: PlanDocument) -> Iterator[Reason]:
    if plan.version != 1:
        yield invalid_value("/version", f"schema version {plan.version} is not known.", "Write 1.")


def _privacy_unit(plan: PlanDocument) -> Iterator[Reason]:
    pointer = "/dataset/contributions_per_user"
    provided = plan.dataset.contributions_per_user is not None
    if plan.dataset.unit == "user" and not provided:
        yield missing_field(
            pointer,
            "user-level privacy needs contributions_per_user.",
            "Give contributions_per_user.",
        )
    if plan.dataset.unit == "example" and provided:
        yield conflict(
            pointer,
            "contributions_per_user is given for example-level privacy.",
            "Remove it, or write unit: user.",
        )
    if plan.dataset.unit == "example" and plan.dataset.users_per_record is not None:
        yield conflict(
            "/dataset/users_per_record",
            "users_per_record is given for example-level privacy, which does not ask whose a "
            "record is.",
            "Remove it, or write unit: user.",
        )


def _length(plan: PlanDocument, index: int, phase: Phase) -> Iterator[Reason]:
    pointer = plan.pointer(index, "steps")
    if phase.steps is not None and phase.epochs is not None:
        yield conflict(pointer, "both steps and epochs are given.", "Keep one of the two.")
    if phase.asks_for_steps and "steps" not in phase.model_fields_set:
        yield missing_field(
            pointer,
            "the length of training is missing.",
            "Give steps or epochs, or steps: null to ask for the most that fit.",
        )


def _step_limit(plan: PlanDocument) -> Iterator[Reason]:
    """The steps are counted exactly. This is checked last, because it reads the other fields."""
    for index, phase in enumerate(plan.phases):
        if phase.epochs is not None and (steps(plan, phase) or 0) > MAX_INTEGER:
            yield invalid_value(
                plan.pointer(index, "epochs"),
                "these epochs come to more than 2^53 - 1 steps.",
                "Give fewer epochs.",
            )


def _lot(plan: PlanDocument, index: int, phase: Phase) -> Iterator[Reason]:
    """The lot size or the sampling probability, and the data set size that it needs."""
    sampling, size = phase.sampling, plan.dataset.size
    at_lot, at_probability = (
        plan.pointer(index, "sampling", name) for name in ("lot_size", "probability")
    )
    if sampling.scheme == "full_batch":
        if sampling.lot_size is not None or sampling.probability is not None:
            yield conflict(
                plan.pointer(index, "sampling"),
                "full_batch uses every record and takes no lot size.",
                "Remove lot_size and probability.",
            )
    elif sampling.scheme == "random_allocation":
        if sampling.lot_size is not None or sampling.probability is not None:
            yield conflict(
                plan.pointer(index, "sampling"),
                "random_allocation takes the participations of a record, which give the expected "
                "lot size N k / T.",
                "Remove lot_size and probability.",
            )
    elif sampling.lot_size is not None and sampling.probability is not None:
        yield conflict(
            at_probability, "both lot_size and probability are given.", "Keep one of the two."
        )
    elif sampling.probability is not None and sampling.scheme not in BY_PROBABILITY:
        yield conflict(
            at_probability,
            f"{sampling.scheme} takes a lot size, not a probability.",
            "Give lot_size.",
        )
    elif (
        sampling.lot_size is None
        and sampling.probability is None
        and not (phase.asks_for_lot_size or phase.asks_for_probability)
    ):
        yield missing_field(
            at_lot,
            "the lot size is missing.",
            "Give lot_size, or for Poisson sampling probability.",
        )
    if sampling.lot_size is not None and size is None:
        yield missing_field(
            "/dataset/size",
            "lot_size needs the size of the data set.",
            "Give dataset.size, or for Poisson sampling probability.",
        )
    elif sampling.lot_size is not None and size is not None and sampling.lot_size > size:
        yield conflict(
            at_lot,
            f"a lot of {sampling.lot_size} is larger than the data set of {size}.",
            "Correct one of the two.",
        )
    if sampling.scheme == "truncated_poisson" and sampling.lot_size is None and size is None:
        yield missing_field(
            "/dataset/size", "truncated lots need the size of the data set.", "Give dataset.size."
        )


def _scheme(plan: PlanDocument, index: int, phase: Phase) -> Iterator[Reason]:
    """Fields of one sampling scheme only."""
    sampling = phase.sampling
    if sampling.bins_drawn is not None:
        pointer = plan.pointer(index, "sampling", "bins_drawn")
        if sampling.scheme != "balls_in_bins":
            yield conflict(
                pointer,
                f"bins_drawn belongs to balls_in_bins, not {sampling.scheme}.",
                "Remove it or change the scheme.",
            )
        elif sampling.bins_drawn == "each_epoch" and phase.noise.kind != "independent":
            yield conflict(
                pointer,
                "with correlated noise, only bins that are drawn once are accounted.",
                "Write bins_drawn: once, or use independent noise.",
            )
    if sampling.drop_last is not None:
        pointer = plan.pointer(index, "sampling", "drop_last")
        if sampling.scheme != "shuffled":
            yield conflict(
                pointer,
                f"drop_last belongs to shuffled, not {sampling.scheme}.",
                "Remove it or change the scheme.",
            )
        elif not sampling.drop_last and (
            phase.noise.kind != "independent" or phase.participation is not None
        ):
            yield conflict(
                pointer,
                "with correlated noise or a participation, only lots of one size are accounted.",
                "Write drop_last: true, or use independent noise without a participation.",
            )
    if sampling.scheme == "random_allocation" and sampling.participations is not None:
        if phase.steps is None:
            yield missing_field(
                plan.pointer(index, "steps"),
                "random_allocation draws the steps of a record from all steps of the phase.",
                "Give steps, not epochs: each record takes part exactly participations times.",
            )
        elif sampling.participations > phase.steps:
            yield conflict(
                plan.pointer(index, "sampling", "participations"),
                f"a record cannot take part in {sampling.participations} of {phase.steps} steps.",
                "Correct one of the two.",
            )
    if getattr(phase.noise, "restart", False) and sampling.scheme in NO_EPOCHS:
        yield conflict(
            plan.pointer(index, "noise", "restart"),
            f"a new tree begins with each epoch, and {sampling.scheme} lots have none.",
            "Remove it, or change the scheme.",
        )
    for scheme, name in REQUIRED_FIELDS.items():
        value = getattr(sampling, name)
        pointer = plan.pointer(index, "sampling", name)
        if sampling.scheme == scheme and value is None:
            yield missing_field(pointer, f"{scheme} needs {name}.", f"Give {name}.")
        if sampling.scheme != scheme and value is not None:
            yield conflict(
                pointer,
                f"{name} belongs to {scheme}, not {sampling.scheme}.",
                "Remove it or change the scheme.",
            )


def _release_noise(plan: PlanDocument, index: int, phase: Phase) -> Iterator[Reason]:
    for place, release in enumerate(phase.releases):
        if release.noise_multiplier is not None and release.noise_std is not None:
            yield conflict(
                plan.pointer(index, "releases", place, "noise_std"),
                "both noise_multiplier and noise_std are given.",
                "Keep one of the two.",
            )
    without = [place for place, release in enumerate(phase.releases) if not release.has_noise]
    if 0 < len(without) < len(phase.releases):
        yield missing_field(
            plan.pointer(index, "releases", without[0], "noise_multiplier"),
            "this release has no noise, but others of the step do.",
            "Give noise for every release, or for none to solve for it.",
        )


def _blocks(plan: PlanDocument, index: int, phase: Phase) -> Iterator[Reason]:
    counts = Counter(release.name for release in phase.releases)
    for place, release in enumerate(phase.releases):
        if counts[release.name] > 1:
            yield conflict(
                plan.pointer(index, "releases", place, "name"),
                f"the name {release.name} is given twice.",
                "Give each its own name.",
            )
            return
    norms = {release.clip_norm for release in phase.releases}
    if phase.clipping == "flat" and len(norms) > 1:
        yield conflict(
            plan.pointer(index, "clipping"),
            "flat clipping takes one clip norm, but several are given.",
            "Give every release the same clip_norm.",
        )


def _unknowns(plan: PlanDocument) -> Iterator[Reason]:
    """Only one quantity is solved for, in a plan with one phase and a full target."""
    for index, phase in enumerate(plan.phases):
        if phase.asks_for_steps and "steps" in phase.model_fields_set:
            yield from _unknown(plan, "steps", "steps", plan.pointer(index, "steps"))
        for name, words, is_open in (
            ("lot_size", "lot size", phase.asks_for_lot_size),
            ("probability", "sampling probability", phase.asks_for_probability),
        ):
            if is_open:
                yield from _unknown(plan, name, words, plan.pointer(index, "sampling", name))
        if phase.asks_for_probability and phase.epochs is not None:
            yield conflict(
                plan.pointer(index, "epochs"),
                "epochs cannot be converted to steps if the probability is solved for.",
                "Give steps instead.",
            )
    if plan.asks_for_lot_size and plan.dataset.size is None:
        yield missing_field(
            "/dataset/size",
            "the largest lot size needs the size of the data set.",
            "Give dataset.size, or ask for probability: null.",
        )


def _unknown(plan: PlanDocument, name: str, words: str, pointer: str) -> Iterator[Reason]:
    if len(plan.phases) > 1:
        yield conflict(
            pointer,
            f"{name}: null cannot be used with several phases.",
            f"Give the {words} of every phase.",
        )
    elif name != "steps" and plan.asks_for_lot_size and plan.asks_for_probability:
        if name == "probability":
            yield conflict(
                pointer,
                "the lot size and the probability cannot both be solved for.",
                "Remove one of the two.",
            )
    elif plan.asks_for_noise or (plan.asks_for_steps and name != "steps"):
        other = "noise" if plan.asks_for_noise else "steps"
        yield conflict(
            pointer,
            f"the {words} and the {other} cannot both be solved for.",
            "Give one of the two.",
        )


def _additional_releases(plan: PlanDocument) -> Iterator[Reason]:
    kinds: Counter[str] = Counter(release.kind for release in plan.extra)
    names: set[str] = set()
    for index, release in enumerate(plan.extra):
        at = f"/extra/{index}"
        if release.name in names:
            yield conflict(
                f"{at}/name", f"the name {release.name} is given twice.", "Give each its own name."
            )
        names.add(release.name)
        if isinstance(release, Selection):
            yield from _selection_shape(release, f"{at}/shape")
            if kinds[release.kind] > 1:
                yield conflict(
                    f"{at}/kind", "repeat_and_select can be given only once.", "Keep one of them."
                )
        if (
            isinstance(release, Metric | LaplaceMetric)
            and release.each_repetition is not None
            and not kinds["repeat_and_select"]
        ):
            yield conflict(
                f"{at}/each_repetition",
                "each_repetition needs a repeat_and_select event, and there is none.",
                "Remove it, or add the repeat_and_select event.",
            )
    if any(isinstance(release, ClippingQuantile) for release in plan.extra):
        yield from _adaptive_clip_norm(plan)


def _selection_shape(selection: Selection, pointer: str) -> Iterator[Reason]:
    has_shape = selection.distribution == "truncated_negative_binomial"
    if has_shape and selection.shape is None:
        yield missing_field(
            pointer,
            "a truncated negative binomial needs a shape.",
            "Give shape, or distribution: geometric (shape 1) or logarithmic (shape 0).",
        )
    if not has_shape and selection.shape is not None:
        yield conflict(
            pointer,
            f"{selection.distribution} has no shape.",
            "Remove shape, or write distribution: truncated_negative_binomial.",
        )


def _adaptive_clip_norm(plan: PlanDocument) -> Iterator[Reason]:
    for index, phase in enumerate(plan.phases):
        for place, release in enumerate(phase.releases):
            if release.noise_std is not None:
                yield conflict(
                    plan.pointer(index, "releases", place, "noise_std"),
                    "the clip norm is adapted during training, so noise of a fixed "
                    "standard deviation has no fixed noise multiplier.",
                    "Give noise_multiplier; the noise then follows the clip norm.",
                )
                return


def _optimizer(plan: PlanDocument) -> Iterator[Reason]:
    """Fields that the optimiser does not have, and a pre-clip norm below the clip norm."""
    optimizer = plan.optimizer
    fields = optimizer_fields(optimizer.name)
    for field in type(optimizer).model_fields:
        if field not in fields and getattr(optimizer, field) is not None:
            owners = [name for name, accepted in OPTIMIZER_FIELDS.items() if field in accepted]
            yield conflict(
                pointer_to("optimizer", field),
                f"{optimizer.name} has no {field}.",
                f"Remove it; it belongs to {', '.join(owners)}.",
            )
    pre_clip_norm = optimizer.pre_clip_norm
    norms = [release.clip_norm for phase in plan.phases for release in phase.releases]
    if pre_clip_norm is not None and any(pre_clip_norm < norm for norm in norms):
        yield conflict(
            "/optimizer/pre_clip_norm",
            "pre_clip_norm is below clip_norm, so it would be the effective clip norm: records are "
            "clipped to pre_clip_norm first.",
            "Give a pre_clip_norm of at least clip_norm.",
        )


def _target(plan: PlanDocument) -> Iterator[Reason]:
    if plan.target.epsilon is None and plan.target.delta is None:
        yield missing_field(
            "/target",
            "neither epsilon nor delta is given.",
            "Give delta to get epsilon, or both to check them.",
        )
        return
    unknowns = {
        "noise": plan.asks_for_noise,
        "steps": plan.asks_for_steps,
        "lot size": plan.asks_for_lot_size,
        "sampling probability": plan.asks_for_probability,
    }
    words = next((words for words, is_open in unknowns.items() if is_open), None)
    for field in ("epsilon", "delta"):
        if words is not None and getattr(plan.target, field) is None:
            yield missing_field(
                f"/target/{field}",
                f"solving for the {words} needs both epsilon and delta.",
                f"Give target.{field}, or the {words}.",
            )


def _allocation(plan: PlanDocument) -> Iterator[Reason]:
    field = {"proportional": "weight", "optimal": "dimension"}.get(plan.allocation)
    if field is None or not plan.asks_for_noise:
        return
    for index, phase in enumerate(plan.phases):
        for place, release in enumerate(phase.releases):
            if getattr(release, field) is None:
                yield missing_field(
                    plan.pointer(index, "releases", place, field),
                    f"the {plan.allocation} allocation needs the {field} of every release.",
                    f"Give {field}, or use allocation: uniform.",
                )


def find_claim_conflicts(claim: Claim, plan: PlanDocument) -> Iterator[Reason]:
    """Yield why ``claim`` cannot be compared with ``plan``: what either of them leaves open."""
    if (claim.epsilon is None) == (claim.noise_multiplier is None):
        yield _claim_conflict(
            "/claim",
            "a claim takes exactly one number.",
            "Give claim.epsilon or claim.noise_multiplier.",
        )
        return
    if plan.is_open and not plan.asks_for_noise:
        yield _claim_conflict(
            "/target",
            "a claim needs a plan without open steps or sampling.",
            "Give its steps and sampling.",
        )
    if plan.target.delta is None:
        yield _claim_conflict("/target/delta", "a claimed ε needs a δ.", "Give target.delta.")
    if claim.noise_multiplier is not None and plan.target.epsilon is None:
        yield _claim_conflict(
            "/target/epsilon",
            "a claimed noise multiplier needs the ε that it should meet.",
            "Give target.epsilon.",
        )
    if claim.epsilon is not None and plan.asks_for_noise:
        yield _claim_conflict(
            plan.pointer(0, "releases", 0, "noise_multiplier"),
            "a claimed ε needs the noise of the plan.",
            "Give the noise, or claim a noise_multiplier.",
        )


def _claim_conflict(pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code="claim_unanswerable", pointer=pointer, message=message, remedy=remedy)
