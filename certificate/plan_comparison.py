"""Two plans side by side: which guarantee is stronger, and which single change moved it.

Two guarantees are ranked only if their numbers mean the same: one privacy unit, one
adjacency, one δ, both certain or of one confidence, and both proved. Otherwise the comparison
says why not, and what would make them comparable. An ε at another δ is another statement, and
"add or remove one record" protects against something else than "replace one", so that the
smaller of two such numbers says nothing.

A ranking rests on the brackets. The first guarantee is the stronger one if its upper bound lies
below the other's lower bound. If the brackets overlap, or both plans had their noise solved
for one target, the two are reported as indistinguishable.

To show which change moved ε, each change is made alone to the first plan and the result is
certified (``affidavit.plan.diff``). Effects of single changes do not add up, and a change that
cannot be made alone says why. If the plans leave the noise open, ε stays at its target and the
noise multiplier moves.

The *attribution* makes the changes one after the other, and divides the difference of the two
upper bounds of ε among them: what each adds to the bound before it. Their sum is the whole
difference. Another order divides it otherwise.

>>> from affidavit.plan.parse import plan_from
>>> one = {"version": 1, "adjacency": "add_remove", "sampling": {"scheme": "full_batch"},
...        "steps": 10, "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
...        "target": {"delta": 1e-5}}
>>> result = compare_plans(plan_from(one), plan_from({**one, "steps": 40}))
>>> result.ranking, [(item.change.pointer, item.moved) for item in result.alone]
('first', [('/steps', 'raised')])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from affidavit.accountants import Bracket, decimal_up
from affidavit.certificate.assessment import Assessment, html_table, interval
from affidavit.certificate.certification import certify
from affidavit.plan import (
    ABSENT,
    Change,
    MalformedPlan,
    Plan,
    Reason,
    apply_changes,
    digest,
    find_changes,
    split_into_steps,
)

SOLVED_NOISE, SOLVED_EPSILON = 2e-4, 1e-3
"""Relative differences that are insignificant if the noise was solved for: the solution is on the
safe side by up to 0.01 % of the noise, and ε is below its target accordingly."""

Movement = Literal["raised", "lowered", "unmoved", "not_told_apart"]
Ranking = Literal["first", "second", "not_told_apart"]
Assess = Callable[[Plan], Assessment]


LONGEST_SHOWN = 60
"""Characters of a value in a notebook."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeEffect:
    """The first plan after one change: its assessment, or ``reasons`` why it cannot be made.

    ``moved`` and ``noise_moved`` say what the change did to ε and to the joint noise
    multiplier, and are None if the two numbers do not mean the same or do not exist.
    """

    change: Change
    assessment: Assessment | None
    reasons: tuple[Reason, ...] = ()
    moved: Movement | None = None
    noise_moved: Movement | None = None

    @property
    def alone(self) -> str | None:
        """The bound of ε after this change alone, rounded up, or the verdict without one."""
        result = self.assessment
        return None if result is None else result.epsilon_text or result.verdict

    @property
    def noise(self) -> str | None:
        """The joint noise multiplier after this change, to six digits."""
        return None if self.assessment is None else self.assessment.joint_text

    @property
    def why_not(self) -> str:
        """Why there is no such bound; empty where there is."""
        return " ".join(reason.message for reason in self.reasons)

    def as_dict(self) -> dict[str, Any]:
        """The change in the JSON document."""
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
    """What ``changes`` add to the upper bound of ε, after all contributions before it."""

    changes: tuple[Change, ...]
    before: Assessment
    after: Assessment

    @property
    def difference(self) -> Decimal:
        """The difference of the two upper bounds as they are printed; sums are exact."""
        before, after = (Decimal(item.epsilon_text or "NaN") for item in (self.before, self.after))
        return (after - before) or Decimal(0)

    def as_dict(self) -> dict[str, Any]:
        """The contribution in the JSON document."""
        return {
            "pointers": [change.pointer for change in self.changes],
            "epsilon": interval(self.after.epsilon),
            "difference": float(self.difference),
        }


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlanComparison:
    """Two certified plans; ``alone`` has every change, including those of texts.

    ``contributions`` lead from the first to the second, and are empty if the two are not ranked.
    """

    first: Assessment
    second: Assessment
    alone: tuple[ChangeEffect, ...]
    contributions: tuple[Contribution, ...] = ()

    @property
    def obstacles(self) -> tuple[Reason, ...]:
        """Why the two guarantees are not ranked; empty if they are."""
        return obstacles(self.first, self.second)

    @property
    def ranking(self) -> Ranking | None:
        """Whose guarantee is stronger, that is whose ε is smaller; None if they are not ranked."""
        if self.obstacles:
            return None
        return _RANKING.get(_moved(self.first, self.second), "not_told_apart")

    @property
    def strongest(self) -> ChangeEffect | None:
        """The single change that moved ε furthest, up or down; None if none did."""
        effects = [item for item in self.alone if item.moved in _FAR]
        return _furthest(effects, self.first, lambda result: getattr(result.epsilon, "upper", None))

    @property
    def strongest_on_noise(self) -> ChangeEffect | None:
        """The single change that moved the joint noise multiplier furthest."""
        effects = [item for item in self.alone if item.noise_moved in _FAR]
        return _furthest(effects, self.first, lambda result: result.joint)

    @property
    def act_together(self) -> bool:
        """Whether all changes move ε in a way that none of them does alone."""
        way = {"first": "raised", "second": "lowered"}.get(self.ranking or "")
        return way is not None and all(item.moved != way for item in self.alone)

    def __repr__(self) -> str:
        return f"<{self.sentence}>"

    def _repr_html_(self) -> str:
        return html_table(
            (
                (item.change.pointer, *item.change.texts(LONGEST_SHOWN), item.alone)
                for item in self.alone
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
        delta, about = decimal_up(_delta(self.first), 6), self.first
        where = f"at δ = {delta} ({about.adjacency}, per {about.unit})"
        says = {
            "first": f"The first guarantee is stronger: {numbers} {where}.",
            "second": f"The second guarantee is stronger: {numbers} {where}.",
            "not_told_apart": f"The guarantees are indistinguishable: {numbers} {where}.",
        }
        assert self.ranking is not None
        return says[self.ranking]

    def as_document(self) -> dict[str, Any]:
        """The JSON document of ``affidavit compare``."""
        strongest, noisiest = self.strongest, self.strongest_on_noise
        return {
            "ranking": self.ranking,
            "sentence": self.sentence,
            "obstacles": [reason.as_dict() for reason in self.obstacles],
            "first": self.first.as_result(),
            "second": self.second.as_result(),
            "changes": [item.as_dict() for item in self.alone],
            "strongest": {
                "epsilon": None if strongest is None else strongest.change.pointer,
                "noise": None if noisiest is None else noisiest.change.pointer,
            },
            "act_together": self.act_together,
            "attribution": [item.as_dict() for item in self.contributions],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeTrial:
    """A change with the plan that it leads to, or with ``reasons`` why it leads to none."""

    change: Change
    plan: Plan | None
    reasons: tuple[Reason, ...] = ()


def change_trials(first: Plan, second: Plan) -> tuple[ChangeTrial, ...]:
    """Every change between two plans, made alone to the first; nothing is accounted yet."""
    return tuple(_trial(first, change) for change in find_changes(first, second))


def path_trials(first: Plan, second: Plan) -> tuple[tuple[tuple[Change, ...], Plan], ...]:
    """The plans of the attribution between the two, each with the changes that lead to it."""
    return split_into_steps(first, second)[:-1]


def comparison_of(
    first: Assessment,
    second: Assessment,
    tried: Sequence[tuple[ChangeTrial, Assessment | None]],
    path: Sequence[tuple[Sequence[Change], Assessment | None]] = (),
) -> PlanComparison:
    """The comparison, from the assessments of both plans, each trial's plan and ``path``'s."""
    alone = tuple(_alone(first, *item) for item in tried)
    effective = [item.change for item in alone if not item.change.is_text_only]
    contributions: tuple[Contribution, ...] = ()
    if effective and not obstacles(first, second):
        contributions = tuple(_contributions(first, second, effective, path))
    return PlanComparison(first=first, second=second, alone=alone, contributions=contributions)


def _contributions(
    first: Assessment,
    second: Assessment,
    effective: Sequence[Change],
    path: Sequence[tuple[Sequence[Change], Assessment | None]],
) -> Iterator[Contribution]:
    """Changes whose bound means what the ends' do; others count with the next that has one."""
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
    """Certify both plans, every single change between them, and the way that they lead.

    Without ``assess`` one engine certifies each plan, as in ``check``.
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
    """Why the guarantees of two assessments cannot be ranked, each with its remedy."""
    unproved = tuple(
        _unproved(which, result)
        for which, result in (("first", first), ("second", second))
        if result.epsilon is None or result.delta is None or result.verdict not in _PROVED
    )
    return unproved or tuple(_meanings(first, second))


_RANKING: dict[Movement, Ranking] = {"raised": "first", "lowered": "second"}
_FAR = ("raised", "lowered")
_PROVED = ("certified", "under_noised", "unproved")
"""Verdicts with a proved bound, whether or not it meets the target."""


def _meanings(first: Assessment, second: Assessment) -> Iterator[Reason]:
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
            message=f"the first holds {_chance(first)}, the second {_chance(second)}.",
            remedy="Choose sampling and noise whose guarantee holds without a confidence.",
        )


def _unproved(which: str, assessment: Assessment) -> Reason:
    why = assessment.reasons[0].message if assessment.reasons else "no finite bound is proved."
    return Reason(
        code="nothing_claimed",
        message=f"the {which} plan has no proved guarantee ({assessment.verdict}): {why}",
        remedy=assessment.reasons[0].remedy if assessment.reasons else "Change the plan.",
    )


def _trial(first: Plan, change: Change) -> ChangeTrial:
    if change.is_text_only:
        return ChangeTrial(change=change, plan=None)
    try:
        return ChangeTrial(change=change, plan=apply_changes(first, change))
    except MalformedPlan as error:
        return ChangeTrial(change=change, plan=None, reasons=error.reasons)


def _alone(first: Assessment, trial: ChangeTrial, assessment: Assessment | None) -> ChangeEffect:
    if assessment is None:
        return ChangeEffect(change=trial.change, assessment=None, reasons=trial.reasons)
    return ChangeEffect(
        change=trial.change,
        assessment=assessment,
        reasons=assessment.reasons if assessment.epsilon is None else (),
        moved=None if obstacles(first, assessment) else _moved(first, assessment),
        noise_moved=_noise_moved(first, assessment),
    )


def _moved(first: Assessment, second: Assessment) -> Movement:
    before, after = _epsilons(first, second)
    if before == after:
        return "unmoved"
    near = abs(after.upper - before.upper) <= SOLVED_EPSILON * max(before.upper, after.upper)
    if near and _is_solved(first) and _is_solved(second):
        return "not_told_apart"
    if before.upper < after.lower:
        return "raised"
    return "lowered" if after.upper < before.lower else "not_told_apart"


def _is_solved(assessment: Assessment) -> bool:
    return any(release.given is None for release in assessment.releases)


def _noise_moved(first: Assessment, second: Assessment) -> Movement | None:
    before, after = first.joint, second.joint
    if before is None or after is None:
        return None
    if before == after:
        return "unmoved"
    near = abs(after - before) <= SOLVED_NOISE * max(before, after)
    if near and (_is_solved(first) or _is_solved(second)):
        return "not_told_apart"
    return "raised" if after > before else "lowered"


def _epsilons(first: Assessment, second: Assessment) -> tuple[Bracket, Bracket]:
    assert first.epsilon is not None
    assert second.epsilon is not None
    return first.epsilon, second.epsilon


def _furthest(
    effects: Sequence[ChangeEffect], first: Assessment, of: Callable[[Assessment], float | None]
) -> ChangeEffect | None:
    """The effect that moved a number furthest from that of ``first``, up or down."""

    def distance(effect: ChangeEffect) -> float:
        after = effect.assessment and of(effect.assessment)
        return abs((after or 0.0) - (of(first) or 0.0))

    return max(effects, key=distance, default=None)


def _delta(assessment: Assessment) -> float:
    assert assessment.delta is not None
    return assessment.delta.upper


def _chance(assessment: Assessment) -> str:
    return "for certain" if assessment.confidence is None else str(assessment.confidence)


def _shown(value: Any) -> Any:
    return None if value is ABSENT else value
