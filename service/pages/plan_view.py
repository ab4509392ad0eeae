"""What the page of a new plan shows: the form, what is wrong in it, and what it would get.

Nothing of it is a certificate: the plan is accounted as ``check`` does, judged by the policy of
its data set, and forgotten. What is shown is what would be signed if it were submitted now.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from affidavit.accountants import decimal_down, decimal_up
from affidavit.certificate import Assessment
from affidavit.plan import Reason, digest
from affidavit.service.pages.plan_form import RELEASE, SECTIONS, Checked, Field, PlanForm
from affidavit.service.pages.templating import words
from affidavit.service.use_cases.preview_plan import Preview

DIGITS = 6
Mode = Literal["form", "yaml"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldView:
    """A field as it is shown, with what stands in it and what is wrong with that."""

    name: str
    id: str
    label: str
    kind: str
    hint: str
    choices: tuple[tuple[str, str], ...]
    value: str
    errors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionView:
    """Fields under one heading."""

    title: str
    about: str
    fields: tuple[FieldView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseLine:
    """A release's noise multiplier, as the plan gives it and as its target requires it."""

    name: str
    count: int
    given: str | None
    required: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """What a plan would get; ε and δ are decimals rounded up."""

    verdict: str
    sentence: str
    epsilon: str | None
    epsilon_lower: str | None
    delta: str | None
    adjacency: str
    unit: str
    joint: str | None
    noise: tuple[NoiseLine, ...]
    engine: str | None
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]
    policy: str
    waived: tuple[str, ...]
    approvals: int
    budget: str | None
    fits: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewPlan:
    """The page; ``answer`` stands where the plan was accounted, ``trouble`` where it was not.

    ``part`` says that the form stands on the screen already, and is told of its mistakes.
    """

    mode: Mode
    sections: tuple[SectionView, ...]
    releases: tuple[SectionView, ...]
    yaml: str
    readable: bool
    typed: bool
    reasons: tuple[Reason, ...]
    elsewhere: tuple[Reason, ...]
    curl: str
    digest: str | None
    answer: Answered | None = None
    trouble: str | None = None
    no_curve: str | None = None
    part: bool = False


def new_plan(
    mode: Mode, form: PlanForm, yaml: str, checked: Checked, base: str, *, typed: bool = True
) -> NewPlan:
    """The page of what was typed; ``base`` is the service's own address."""
    return NewPlan(
        mode=mode,
        sections=tuple(
            SectionView(
                title=section.title,
                about=section.about,
                fields=tuple(_field(one, one.name, form, checked) for one in section.fields),
            )
            for section in SECTIONS
        ),
        releases=tuple(_release(row, form, checked) for row in range(form.releases)),
        yaml=yaml,
        readable=checked.plan is not None,
        typed=typed,
        reasons=checked.reasons,
        elsewhere=checked.elsewhere if mode == "form" else checked.reasons,
        curl=curl_of(base),
        digest=None if checked.plan is None else digest(checked.plan),
    )


def answered(draft: Preview) -> Answered:
    """What a draft came to."""
    found = draft.assessment
    ledger = draft.ledger
    return Answered(
        verdict=found.verdict,
        sentence=sentence_of(found),
        epsilon=_epsilon(found),
        epsilon_lower=None if found.epsilon is None else decimal_down(found.epsilon.lower, DIGITS),
        delta=None if found.delta is None else decimal_up(found.delta.upper, DIGITS),
        adjacency=found.adjacency,
        unit=found.unit,
        # Rounded up, for it may be copied to where noise is set.
        joint=None if found.joint is None else decimal_up(found.joint, DIGITS),
        noise=tuple(
            NoiseLine(
                name=release.name,
                count=release.count,
                given=None if release.given is None else f"{release.given:.6g}",
                required=None if release.required is None else decimal_up(release.required, DIGITS),
            )
            for release in found.releases
        ),
        engine=found.accountants[0].name if found.accountants else None,
        reasons=found.reasons,
        warnings=tuple(warning.message for warning in found.warnings),
        assumptions=found.assumptions,
        policy=f"{draft.policy.name} v{draft.policy.version}",
        waived=tuple(item.reason.code for item in draft.judgement.waived),
        approvals=draft.policy.approvals,
        budget=None if ledger is None else _budget(ledger),
        fits=None if ledger is None else bool(ledger["fits"]),
    )


def sentence_of(found: Assessment) -> str:
    """The verdict in one sentence, with everything that its number needs to be understood."""
    if found.epsilon is None or found.delta is None or not math.isfinite(found.epsilon.upper):
        return "Refused: nothing may be claimed about this plan."
    epsilon, delta = decimal_up(found.epsilon.upper, DIGITS), decimal_up(found.delta.upper, DIGITS)
    chance = "" if found.confidence is None else f", {found.confidence}"
    bound = f"ε ≤ {epsilon} at δ = {delta} ({words(found.adjacency)}, per {found.unit}{chance})"
    match found.verdict:
        case "certified":
            return f"Would be certified: {bound}."
        case "under_noised":
            target = found.target_epsilon
            less = "less is claimed" if target is None else f"ε = {target:g} is asked"
            return f"Under-noised: {bound} is proved, and {less}."
        case "undecided":
            return "Undecided: two engines contradict each other, and nothing is claimed."
        case _:
            return f"Refused by the policy, though {bound} is proved."


def curl_of(base: str) -> str:
    """The command that submits the plan from a shell; ``base`` is quoted, whatever it is."""
    address = shlex.quote(f"{base.rstrip('/')}/v1/certificates")
    return (
        f"curl -sS {address} -H 'Content-Type: application/yaml' "
        '-H "Authorization: Bearer $AFFIDAVIT_TOKEN" --data-binary @plan.yaml'
    )


def _field(one: Field, name: str, form: PlanForm, checked: Checked) -> FieldView:
    found = checked.at_field.get(name, ())
    return FieldView(
        name=name,
        id="f-" + name.replace(".", "-").replace("_", "-"),
        label=one.label,
        kind=one.kind,
        hint=one.hint,
        choices=one.choices,
        value=form.value(name),
        errors=tuple(f"{item.message} {item.remedy}" for item in found),
    )


def _release(row: int, form: PlanForm, checked: Checked) -> SectionView:
    fields = tuple(_field(one, f"releases.{row}.{one.name}", form, checked) for one in RELEASE)
    return SectionView(title=f"Release {row + 1}", about="", fields=fields)


def _epsilon(found: Assessment) -> str | None:
    if found.epsilon is None or not math.isfinite(found.epsilon.upper):
        return None
    return decimal_up(found.epsilon.upper, DIGITS)


def _budget(ledger: Mapping[str, object]) -> str:
    """Where the budget stands, in words."""
    budget, spent, after = ledger["budget"], ledger["spent"], ledger["with_this_run"]
    assert isinstance(budget, Mapping)
    assert isinstance(spent, Mapping)
    said = f"{spent['epsilon']} of ε = {budget['epsilon']} is spent"
    if isinstance(after, Mapping):
        return f"{said}; with this run {after['epsilon']}"
    return said
