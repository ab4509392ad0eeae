"""Two plans side by side: which guarantee is stronger, and which single change moved it.

Two guarantees are ranked only if their numbers mean the same: one privacy unit, one adjacency, one
δ, one confidence, and both proved. Otherwise the comparison says why not, and what would make them
comparable.

The first guarantee is the stronger one if its upper bound lies below the other's lower bound. If
the brackets overlap, or both plans had their noise solved for one target, the two are reported as
indistinguishable.

To show which change moved ε, each change is made alone to the first plan and the result is
certified (``affidavit.plan.diff``). Effects of single changes do not add up. If the plans leave
the noise open, ε stays at its target and the noise multiplier moves.

The *attribution* makes the changes one after the other, and divides the difference of the two
upper bounds of ε among them. The contributions add up to the difference, and depend on the order.

>>> from affidavit.plan.parse import plan_from
>>> one = {"version": 1, "adjacency": "add_remove", "sampling": {"scheme": "full_batch"},
...        "steps": 10, "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
...        "target": {"delta": 1e-5}}
>>> result = compare_plans(plan_from(one), plan_from({**one, "steps": 40}))
>>> result.ranking, [(effect.change.pointer, effect.moved) for effect in result.effects]
('first', [('/steps', 'raised')])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from affidavit.accountants import Bracket, decimal_up
from affidavit.assessment.assessment import Assessment, interval
from affidavit.assessment.certification import certify
from affidavit.plan import (
    ABSENT,
    Change,
    MalformedPlan,
    Plan,
    Reason,
    apply_changes,
    digest,
    find_changes,
    html_table,
    split_into_steps,
)

SOLVED_NOISE_TOLERANCE, SOLVED_EPSILON_TOLERANCE = 2e-4, 1e-3
"""Relative differences that are insignificant if the noise was solved for: the solution is on the
safe side by up to 0.01 % of the noise, and ε is below its target accordingly."""

Movement = Literal["raised", "lowered", "unmoved", "not_told_apart"]
Ranking = Literal["first", "second", "not_told_apart"]
Assess = Callable[[Plan], Assessment]

MAX_VALUE_CHARACTERS = 60
"""The longest value that a notebook shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeEffect:
    """The first plan after one change: its assessment, or the ``reasons`` why there is none.

    ``moved`` and ``noise_moved`` are the movements of ε and of the joint noise multiplier, or None
    if there are no two comparable numbers.
    """

    change: Change
    assessment: Assessment | None
    reasons: tuple[Reason, ...] = ()
    moved: Movement | None = None
    noise_moved: Movement | None = None

    @property
    def epsilon_text(self) -> str | None:
        """The bound of ε after this change alone, rounded up, or the verdict without one."""
        result = self.assessment
        return None if result is None else result.epsilon_text or result.verdict

    @property
    def noise_text(self) -> str | None:
        """The joint noise multiplier after this change alone, to six digits."""
        return None if self.assessment is None else self.assessment.joint_text

    @property
    def reasons_text(self) -> str:
        """The messages of the reasons, in one text."""
        return " ".join(reason.message for reason in self.reasons)

    def as_dict(self) -> dict[str, Any]:
        """Return the change as JSON data."""
        result = self.assessment
        return {
            "pointer": self.change.pointer,
            "before": _shown(self.change.before),
            "after": _shown(self.change.after),
            "verdict": None if result is None else result.verdict,
            "epsilon": None if result is None else interval(result.epsilon),
            "delta": None if result is None else interval(result.delta),
            "joint_noise_multiplier": None if result is None else result.joint,
            "epsilon_moved": self.moved,
            "noise_moved": self.noise_moved,
            "reasons": [reason.as_dict() for reason in self.reasons],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What ``changes`` add to the upper bound of ε, after all earlier contributions."""

    changes: tuple[Change, ...]
    before: Assessment
    after: Assessment

    @property
    def difference(self) -> Decimal:
        """The difference of the two upper bounds as they are printed; sums are exact."""
        before, after = (Decimal(item.epsilon_text or "NaN") for item in (self.before, self.after))
        return (after - before) or Decimal(0)

    def as_dict(self) -> dict[str, Any]:
        """Return the contribution as JSON data."""
        return {
            "pointers": [change.pointer for change in self.changes],
            "epsilon": interval(self.after.epsilon),
            "difference": float(self.difference),
        }


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlanComparison:
    """Two certified plans and the effect of every change between them, including those of texts.

    ``contributions`` lead from the first to the second, and are empty if the two are not ranked.
    """

    first: Assessment
    second: Assessment
    effects: tuple[ChangeEffect, ...]
    contributions: tuple[Contribution, ...] = ()

    @property
    def obstacles(self) -> tuple[Reason, ...]:
        """The reasons why the two guarantees are not ranked; empty if they are."""
        return obstacles(self.first, self.second)

    @property
    def ranking(self) -> Ranking | None:
        """The stronger guarantee, that is the smaller ε; None if they are not ranked."""
        if self.obstacles:
            return None
        match _epsilon_movement(self.first, self.second):
            case "raised":
                return "first"
            case "lowered":
                return "second"
        return "not_told_apart"

    @property
    def strongest(self) -> ChangeEffect | None:
        """The single change that moved ε most, up or down; None if none did."""
        effects = [effect for effect in self.effects if effect.moved in _SIGNIFICANT]
        return _strongest(effects, self.first, lambda item: getattr(item.epsilon, "upper", None))

    @property
    def strongest_on_noise(self) -> ChangeEffect | None:
        """The single change that moved the joint noise multiplier most; None if none did."""
        effects = [effect for effect in self.effects if effect.noise_moved in _SIGNIFICANT]
        return _strongest(effects, self.first, lambda item: item.joint)

    @property
    def act_together(self) -> bool:
        """Whether all changes together move ε in a direction in which none of them does alone."""
        direction = {"first": "raised", "second": "lowered"}.get(self.ranking or "")
        return direction is not None and all(item.moved != direction for item in self.effects)

    def __repr__(self) -> str:
        return f"<{self.sentence}>"

    def _repr_html_(self) -> str:
        return html_table(
            (
                (item.change.pointer, *item.change.texts(MAX_VALUE_CHARACTERS), item.epsilon_text)
                for item in self.effects
            ),
            headings=("field", "first", "second", "ε of this change alone"),
            title=self.sentence,
        )

    @property
    def sentence(self) -> str:
        """The comparison in a sentence or two."""
        if self.obstacles:
            causes = "; ".join(reason.message.rstrip(".") for reason in self.obstacles)
            return f"The guarantees are not ranked: {causes}."
        first, second = _epsilons(self.first, self.second)
        numbers = f"ε ≤ {decimal_up(first.upper, 6)} and ε ≤ {decimal_up(second.upper, 6)}"
        delta = decimal_up(_delta(self.first), 6)
        where = f"at δ = {delta} ({self.first.adjacency}, per {self.first.unit})"
        if self.ranking == "not_told_apart":
            return f"The guarantees are indistinguishable: {numbers} {where}."
        return f"The {self.ranking} guarantee is stronger: {numbers} {where}."

    def as_document(self) -> dict[str, Any]:
        """Return the JSON document of ``affidavit compare``."""
        strongest, noisiest = self.strongest, self.strongest_on_noise
        return {
            "ranking": self.ranking,
            "sentence": self.sentence,
            "obstacles": [reason.as_dict() for reason in self.obstacles],
            "first": self.first.as_result(),
            "second": self.second.as_result(),
            "changes": [effect.as_dict() for effect in self.effects],
            "strongest": {
                "epsilon": None if strongest is None else strongest.change.pointer,
                "noise": None if noisiest is None else noisiest.change.pointer,
            },
            "act_together": self.act_together,
            "attribution": [item.as_dict() for item in self.contributions],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeTrial:
    """A change with the plan that it results in, or the ``reasons`` why there is none."""

    change: Change
    plan: Plan | None
    reasons: tuple[Reason, ...] = ()


def change_trials(first: Plan, second: Plan) -> tuple[ChangeTrial, ...]:
    """Make every change between two plans alone to the first; nothing is accounted yet."""
    return tuple(_trial(first, change) for change in find_changes(first, second))


def path_trials(first: Plan, second: Plan) -> tuple[tuple[tuple[Change, ...], Plan], ...]:
    """Return the intermediate plans of the attribution, each with its further changes."""
    return split_into_steps(first, second)[:-1]


def comparison_of(
    first: Assessment,
    second: Assessment,
    tried: Sequence[tuple[ChangeTrial, Assessment | None]],
    path: Sequence[tuple[Sequence[Change], Assessment | None]] = (),
) -> PlanComparison:
    """Return the comparison of two assessed plans.

    ``tried`` has the assessment of each trial's plan, ``path`` of each plan of ``path_trials``.
    """
    effects = tuple(_effect(first, trial, assessment) for trial, assessment in tried)
    effective = [effect.change for effect in effects if not effect.change.is_text_only]
    contributions: tuple[Contribution, ...] = ()
    if effective and not obstacles(first, second):
        contributions = tuple(_contributions(first, second, effective, path))
    return PlanComparison(first=first, second=second, effects=effects, contributions=contributions)


def _contributions(
    first: Assessment,
    second: Assessment,
    effective: Sequence[Change],
    path: Sequence[tuple[Sequence[Change], Assessment | None]],
) -> Iterator[Contribution]:
    """Yield the contributions; a change without a comparable bound counts with the next one."""
    before, pending = first, list(effective)
    made: list[Change] = []
    for step, after in path:
        made.extend(step)
        if after is None or obstacles(first, after):
            continue
        yield Contribution(changes=tuple(made), before=before, after=after)
        pending = [change for change in pending if change not in made]
        before, made = after, []
    yield Contribution(changes=tuple(pending), before=before, after=second)


def compare_plans(first: Plan, second: Plan, assess: Assess | None = None) -> PlanComparison:
    """Certify both plans, every single change between them, and the plans of the attribution.

    ``assess`` certifies a plan; by default one engine does, as in ``check``.
    """
    assess_plan = assess or (lambda plan: certify(plan, second_opinion=False))
    known: dict[str, Assessment] = {}

    def once(plan: Plan) -> Assessment:
        identity = digest(plan)
        if identity not in known:
            known[identity] = assess_plan(plan)
        return known[identity]

    return comparison_of(
        once(first),
        once(second),
        [
            (item, None if item.plan is None else once(item.plan))
            for item in change_trials(first, second)
        ],
        [(made, once(plan)) for made, plan in path_trials(first, second)],
    )


def obstacles(first: Assessment, second: Assessment) -> tuple[Reason, ...]:
    """Return the reasons why the guarantees of two assessments cannot be ranked."""
    unproved = tuple(
        _unproved(which, result)
        for which, result in (("first", first), ("second", second))
        if result.epsilon is None or result.delta is None or result.verdict not in _PROVED_VERDICTS
    )
    return unproved or tuple(_differences(first, second))


_SIGNIFICANT = ("raised", "lowered")
_PROVED_VERDICTS = ("certified", "under_noised", "unproved")
"""The verdicts with a proved bound, whether or not it meets the target."""


def _differences(first: Assessment, second: Assessment) -> Iterator[Reason]:
    if first.unit != second.unit:
        yield Reason(
            code="different_unit",
            pointer="/dataset/unit",
            message=f"the first protects one {first.unit}, the second one {second.unit}.",
            remedy="Set the same dataset.unit in both plans.",
        )
    if first.adjacency != second.adjacency:
        yield Reason(
            code="different_adjacency",
            pointer="/adjacency",
            message=f"the first holds for {first.adjacency}, the second for "
            f"{second.adjacency}, so their ε are not comparable.",
            remedy="Set the same adjacency in both plans.",
        )
    if _delta(first) != _delta(second):
        yield Reason(
            code="different_delta",
            pointer="/target/delta",
            message=f"the first holds at δ = {decimal_up(_delta(first), 6)}, the second at "
            f"δ = {decimal_up(_delta(second), 6)}.",
            remedy="Set the same target.delta in both plans.",
        )
    if first.level != second.level:
        yield Reason(
            code="different_confidence",
            message=f"the first holds {first.confidence or 'for certain'}, "
            f"the second {second.confidence or 'for certain'}.",
            remedy="Choose sampling and noise whose guarantee holds without a confidence.",
        )


def _unproved(which: str, assessment: Assessment) -> Reason:
    cause = assessment.reasons[0].message if assessment.reasons else "no finite bound is proved."
    return Reason(
        code="nothing_claimed",
        message=f"the {which} plan has no proved guarantee ({assessment.verdict}): {cause}",
        remedy=assessment.reasons[0].remedy if assessment.reasons else "Change the plan.",
    )


def _trial(first: Plan, change: Change) -> ChangeTrial:
    if change.is_text_only:
        return ChangeTrial(change=change, plan=None)
    try:
        return ChangeTrial(change=change, plan=apply_changes(first, change))
    except MalformedPlan as error:
        return ChangeTrial(change=change, plan=None, reasons=error.reasons)


def _effect(first: Assessment, trial: ChangeTrial, assessment: Assessment | None) -> ChangeEffect:
    if assessment is None:
        return ChangeEffect(change=trial.change, assessment=None, reasons=trial.reasons)
    return ChangeEffect(
        change=trial.change,
        assessment=assessment,
        reasons=assessment.reasons if assessment.epsilon is None else (),
        moved=None if obstacles(first, assessment) else _epsilon_movement(first, assessment),
        noise_moved=_noise_movement(first, assessment),
    )


def _epsilon_movement(first: Assessment, second: Assessment) -> Movement:
    before, after = _epsilons(first, second)
    if before == after:
        return "unmoved"
    difference = abs(after.upper - before.upper)
    is_near = difference <= SOLVED_EPSILON_TOLERANCE * max(before.upper, after.upper)
    if is_near and _is_solved(first) and _is_solved(second):
        return "not_told_apart"
    if before.upper < after.lower:
        return "raised"
    return "lowered" if after.upper < before.lower else "not_told_apart"


def _is_solved(assessment: Assessment) -> bool:
    return any(release.given is None for release in assessment.releases)


def _noise_movement(first: Assessment, second: Assessment) -> Movement | None:
    before, after = first.joint, second.joint
    if before is None or after is None:
        return None
    if before == after:
        return "unmoved"
    is_near = abs(after - before) <= SOLVED_NOISE_TOLERANCE * max(before, after)
    if is_near and (_is_solved(first) or _is_solved(second)):
        return "not_told_apart"
    return "raised" if after > before else "lowered"


def _epsilons(first: Assessment, second: Assessment) -> tuple[Bracket, Bracket]:
    assert first.epsilon is not None
    assert second.epsilon is not None
    return first.epsilon, second.epsilon


def _strongest(
    effects: Sequence[ChangeEffect], first: Assessment, number: Callable[[Assessment], float | None]
) -> ChangeEffect | None:
    """Return the effect that moved ``number`` most from its value in ``first``, up or down."""

    def distance(effect: ChangeEffect) -> float:
        after = effect.assessment and number(effect.assessment)
        return abs((after or 0.0) - (number(first) or 0.0))

    return max(effects, key=distance, default=None)


def _delta(assessment: Assessment) -> float:
    assert assessment.delta is not None
    return assessment.delta.upper


def _shown(value: Any) -> Any:
    return None if value is ABSENT else value
