"""Evaluate a plan: certify it, and turn every problem into a finding with a remedy.

An under-noised plan is compared with the known mistakes. If a mistake leads to its noise or target,
the finding names the mistake and points at the wrong field.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from affidavit.accountants import decimal_up
from affidavit.assessment import (
    CLAIM_CODES,
    Assessment,
    certify,
    compare_plans,
)
from affidavit.gate.checking.finding import (
    CheckResult,
    GateFinding,
    UnreadableBase,
    unreadable_result,
)
from affidavit.gate.checking.fixes import find_fixes
from affidavit.gate.checking.source import Source
from affidavit.gate.exit_codes import exit_of_verdict
from affidavit.plan import (
    Claim,
    MalformedPlan,
    Plan,
    PlanError,
    Reason,
    find_claim_conflicts,
    plan_from,
    pointer_to,
    printable,
)

if TYPE_CHECKING:
    from affidavit.certificate.policy import Policy

MAX_PRECISION = 1.5e-3
"""Relative precision in ε at which a number identifies a mistake: about four digits of a noise
multiplier. A round number would match a mistake by chance."""


def evaluate(
    source: Source, *, second_opinion: bool = False, policy: Policy | None = None
) -> CheckResult:
    """Certify the plan in ``source``, and apply ``policy``."""
    try:
        plan = source.plan()
    except MalformedPlan as error:
        result = unreadable_result(source.file, error.reasons, source.name)
        return replace(result, findings=(*_assumed(source), *result.findings))
    second_opinion |= policy is not None and policy.second_opinion == "required"
    assessment = certify(plan, second_opinion=second_opinion)
    assessed, policy_result = assessment, None
    if policy is not None:
        # Imported here because policies are models that load slowly, and most checks have none.
        from affidavit.certificate.policy import Budget, evaluate_policy
        from affidavit.certificate.requirements import with_requirements

        assessment = with_requirements(assessment, policy)
        # No ledger is available here; the policy's on_outage decides whether that blocks.
        budget: Budget = "fits" if policy.on_outage == "warn" else "unknown"
        assessed, policy_result = evaluate_policy(plan, assessment, policy, budget=budget)
    broken = _broken_obligations(source, plan)
    open_uses: tuple[Reason, ...] = ()
    if broken and assessed.verdict == "certified":
        assessed = replace(assessed, verdict="refused")
    elif source.open_uses and assessed.verdict == "certified":
        open_uses = _open_uses(source)
        assessed = replace(assessed, verdict="undecided")
    policy_reasons = assessed.reasons[len(assessment.reasons) :]
    assessed = replace(assessed, reasons=(*assessed.reasons, *broken, *open_uses))
    return CheckResult(
        file=source.file,
        name=source.name,
        exit=exit_of_verdict(assessed.verdict, assessed.codes),
        findings=(
            *_findings(source, plan, assessment),
            *_policy_findings(source, policy_reasons, policy),
            *(GateFinding.of(source.file, reason) for reason in (*broken, *open_uses)),
        ),
        result=assessed.as_result() | ({} if policy_result is None else policy_result.as_dict()),
        headline=" ".join((assessed.headline, *_sum_with(source))),
        adds_up=bool(source.adds_to),
    )


def _sum_with(source: Source) -> Iterator[str]:
    """Yield that ε of a script's other private calls adds up with the plan's, if it has others."""
    if source.adds_to:
        lines = f"line{'s' * (len(source.adds_to) > 1)} {', '.join(map(str, source.adds_to))}"
        yield (
            "This is of one private call: for records that others train on too, ε and δ add up "
            f"with those of {lines}."
        )


def _broken_obligations(source: Source, plan: Plan) -> tuple[Reason, ...]:
    """Return the obligations that the library of an imported plan does not fulfil."""
    schemes = {phase.sampling.scheme for phase in plan.phases}
    broken = (item for item in source.broken if item.applies(plan.adjacency, schemes))
    return source.locate(tuple(item.reason() for item in broken))


def _open_uses(source: Source) -> tuple[Reason, ...]:
    """Return the questions that a script leaves open, each at its line."""
    return tuple(
        Reason(
            code="open_use",
            pointer="",
            message=f"it is not known what a use of a private object does: {use.message}",
            remedy="If it spends nothing, releases no records and computes each record by itself, "
            'say why in a comment at the end of that line: "# affidavit: harmless=REASON". To see '
            'what it does with a record, run "affidavit replay -- python FILE".',
            line=use.line,
            column=1,
        )
        for use in source.open_uses
    )


def _policy_findings(
    source: Source, reasons: tuple[Reason, ...], policy: Policy | None
) -> Iterator[GateFinding]:
    yield from (GateFinding.of(source.file, reason) for reason in source.locate(reasons))
    if policy is not None and policy.budget == "required" and policy.on_outage == "warn":
        yield GateFinding(
            file=source.file,
            rule="policy_budget",
            level="warning",
            message=f"the policy {policy.name} requires a budget check, which needs the service.",
        )


def _assumed(source: Source) -> Iterator[GateFinding]:
    for assumption in (*source.assumed, *_sum_with(source)):
        yield GateFinding(file=source.file, rule="assumed", level="note", message=assumption)


def _findings(source: Source, plan: Plan, assessment: Assessment) -> Iterator[GateFinding]:
    yield from _assumed(source)
    yield from (
        GateFinding(file=source.file, rule=warning.code, level="warning", message=warning.message)
        for warning in assessment.warnings
    )
    codes = assessment.codes
    claim = next((number for number, code in enumerate(codes) if code in CLAIM_CODES), len(codes))
    reasons = assessment.reasons[:claim]
    if len(reasons) == 1 and reasons[0].code in ("under_noised", "unproved"):
        yield _under_noised_finding(source, plan, assessment)
    else:
        yield from (GateFinding.of(source.file, reason) for reason in source.locate(reasons))
    if claim < len(codes):
        yield _claim_finding(source, plan, assessment, claim)


def _under_noised_finding(source: Source, plan: Plan, assessment: Assessment) -> GateFinding:
    reason = assessment.reasons[0]
    mistake, pointer = _explain(plan) or (None, None)
    fixes = find_fixes(source, plan, assessment)
    pointer = pointer or _noise_pointer(source, plan) or reason.pointer
    (placed,) = source.locate((replace(reason, pointer=pointer, line=None, column=None),))
    remedy = "; ".join(fix.description for fix in fixes)
    return replace(
        GateFinding.of(source.file, placed),
        remedy=f"{remedy[0].upper()}{remedy[1:]}." if remedy else reason.remedy,
        mistake=mistake,
        numbers=_numbers(assessment),
        fixes=fixes,
    )


def _claim_finding(source: Source, plan: Plan, assessment: Assessment, number: int) -> GateFinding:
    """Return the finding of reason ``number``, at the claim, with the mistakes that follow it."""
    first, *after = assessment.reasons[number:]
    (placed,) = source.locate((first,))
    return replace(
        GateFinding.of(source.file, placed),
        remedy=" ".join(reason.remedy for reason in after) or first.remedy,
        mistake=" + ".join(reason.code for reason in after) or None,
        numbers=_numbers(assessment),
        fixes=find_fixes(source, plan, assessment) if number == 0 else (),
    )


def _explain(plan: Plan) -> tuple[str, str] | None:
    """Return the known mistakes that lead to the plan's noise or target, and a pointer."""
    # Imported here because it is slow and most plans are correct.
    from affidavit.assessment.diagnose import diagnose
    from affidavit.assessment.diagnosis import ClaimedEpsilon

    for claim in _implicit_claims(plan):
        if (
            tuple(find_claim_conflicts(claim, plan))
            or ClaimedEpsilon.of(claim, plan).precision > MAX_PRECISION
        ):
            continue
        diagnosis = diagnose(plan, claim)
        # Pairs of mistakes match more numbers by chance than single ones.
        if (
            diagnosis.explanations
            and (best := diagnosis.explanations[0])
            and (len(best.mistakes) == 1 or len(diagnosis.explanations) == 1)
        ):
            return " + ".join(best.mistakes), diagnosis.as_steps(best)[0]["pointer"]
    return None


def _implicit_claims(plan: Plan) -> Iterator[Claim]:
    """Yield the plan's implicit claims: its only noise multiplier, and its target."""
    multipliers = {release.noise_multiplier for phase in plan.phases for release in phase.releases}
    if len(multipliers) == 1 and (sigma := multipliers.pop()) is not None:
        yield Claim(noise_multiplier=repr(sigma))
    if plan.target.epsilon is not None:
        yield Claim(epsilon=plan.target.epsilon)


def _noise_pointer(source: Source, plan: Plan) -> str | None:
    """Return the pointer of the first noise in the plan."""
    phases = [("phases", index) for index in range(len(plan.phases))]
    for base, phase in zip(phases if "phases" in source.data else [()], plan.phases, strict=False):
        for index, release in enumerate(phase.releases):
            field = "noise_std" if release.noise_std is not None else "noise_multiplier"
            if release.has_noise:
                return pointer_to(*base, "releases", index, field)
    return None


def _numbers(assessment: Assessment) -> dict[str, str | float | None]:
    if assessment.epsilon is None:
        return {}
    return {
        "epsilon_upper": decimal_up(assessment.epsilon.upper),
        "target_epsilon": assessment.target_epsilon,
        "delta": assessment.target_delta,
        "joint_noise_multiplier": assessment.joint,
    }


# ---- changes


MAX_VALUE_LENGTH = 200
"""Longest changed value that is shown, in characters."""


def describe_changes(source: Source, base: str) -> list[str]:
    """Return one line per field changed since ``base``, with ε; raises ``UnreadableBase``."""
    raw = _read_base(source.file, base)
    name = printable(source.name)
    before = None if raw is None else source.find_same(raw)
    if before is None:
        return [f"{name}: not found in {base}."]
    try:
        comparison = compare_plans(plan_from(before.data), plan_from(source.data))
    except PlanError as error:
        return [f"{name}: not compared: {printable(str(error))}"]
    first, second = comparison.first, comparison.second
    before_text = _bound(first.epsilon_text, first.verdict)
    lines = [f"{name}: {before_text} -> {_bound(second.epsilon_text, second.verdict)}"]
    strongest = (comparison.strongest, comparison.strongest_on_noise)
    for effect in sorted(comparison.effects, key=lambda effect: effect not in strongest):
        result, pointer = effect.assessment, effect.change.pointer
        bound = (
            _bound(None, None) if result is None else _bound(result.epsilon_text, result.verdict)
        )
        values = " -> ".join(text or "nothing" for text in effect.change.texts(MAX_VALUE_LENGTH))
        line = source.line_of(pointer)
        place = "" if line is None else f" (line {line})"
        change = f"  {pointer}: {values}{place}"
        lines.append(printable(f"{change}; this change alone: {effect.reasons_text or bound}"))
    return lines


def _bound(epsilon: str | None, verdict: str | None) -> str:
    return verdict or "no effect" if epsilon is None else f"ε ≤ {epsilon}"


def _read_base(file: str, base: str) -> bytes | None:
    """Read ``file`` at ``base``; None if it did not exist. Raises ``UnreadableBase``."""
    try:
        if Path(base).is_file():
            return Path(base).read_bytes()
    except OSError as error:
        raise UnreadableBase(f"cannot read {base}: {error.strerror}") from None
    if base.startswith("-"):
        raise UnreadableBase(f"{base} is neither a file nor a commit")
    folder = Path(file).resolve().parent
    commit = _git(
        folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}"
    )
    if commit.returncode != 0:
        raise UnreadableBase(f"{base} is neither a file nor a commit of the repository of {file}")
    name = f"{commit.stdout.decode().strip()}:./{Path(file).name}"
    content = _git(folder, "show", "--end-of-options", name)
    return content.stdout if content.returncode == 0 else None


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        # A folder of the repository may have the form of another one, with its own commits.
        command = ["git", "-c", "safe.bareRepository=explicit", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, check=False)
    except OSError as error:
        raise UnreadableBase(f"cannot run git: {error.strerror}") from None
