"""Judging a plan that was found: certified, or a finding that says why not and what to do.

An under-noised plan is held against the known mistakes: if its noise, or its target, is the
number that one of them leads to, the finding names it and stands at the field that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from affidavit.accountants import decimal_up
from affidavit.certificate import Assessment, certify
from affidavit.certificate.policy import BUILT_IN, Budget, Policy
from affidavit.certificate.policy import judge as judge_by
from affidavit.gate.checking.finding import Finding
from affidavit.gate.checking.fixes import fixes_for
from affidavit.gate.checking.source import Source
from affidavit.gate.checking.verdict import Judged, unreadable
from affidavit.gate.exits import OF_VERDICT
from affidavit.gate.report import headline
from affidavit.plan import Claim, MalformedPlan, Plan, Reason, pointer_to, unanswerable

FINE = 1.5e-3
"""Relative precision, in ε, below which a number says enough to tell by which mistake it came:
about four digits of a noise multiplier. A round number meets some wrong derivation by chance."""


def judge(source: Source, *, second_opinion: bool = False, policy: Policy | None = None) -> Judged:
    """What is to be said about the plan in ``source``, under ``policy``."""
    try:
        plan = source.plan()
    except MalformedPlan as error:
        unread = unreadable(source.file, error.reasons, source.name)
        return replace(unread, findings=(*_assumed(source), *unread.findings))
    rules = policy or BUILT_IN
    asked_twice = second_opinion or rules.second_opinion == "required"
    found = certify(plan, second_opinion=asked_twice)
    # No ledger is asked here; whether that blocks is the policy's own word.
    budget: Budget = "fits" if rules.on_outage == "warn" else "unknown"
    under, judgement = judge_by(plan, found, rules, budget=budget)
    return Judged(
        file=source.file,
        name=source.name,
        exit=OF_VERDICT[under.verdict],
        findings=(
            *_findings(source, plan, found),
            *_findings_of_policy(source, under.reasons[len(found.reasons) :], rules),
        ),
        result=under.as_result() | ({} if policy is None else judgement.as_dict()),
        headline=headline(under),
    )


def _findings_of_policy(
    source: Source, reasons: tuple[Reason, ...], policy: Policy
) -> Iterator[Finding]:
    yield from (Finding.of(source.file, item) for item in source.locate(reasons))
    if policy.budget == "required" and policy.on_outage == "warn":
        yield Finding(
            file=source.file,
            rule="policy_budget",
            level="warning",
            message=f"no ledger was asked whether the run fits a budget, as the policy "
            f"{policy.name} wants.",
        )


def _assumed(source: Source) -> Iterator[Finding]:
    for item in source.assumed:
        yield Finding(file=source.file, rule="assumed", level="note", message=item)


def _findings(source: Source, plan: Plan, found: Assessment) -> Iterator[Finding]:
    yield from _assumed(source)
    yield from (
        Finding(file=source.file, rule=warning.code, level="warning", message=warning.message)
        for warning in found.warnings
    )
    codes = {reason.code for reason in found.reasons}
    if codes == {"under_noised"}:
        yield _under_noised(source, plan, found)
    elif "claim_below_certified" in codes:
        yield _wrong_claim(source, plan, found)
    else:
        yield from (Finding.of(source.file, item) for item in source.locate(found.reasons))


def _under_noised(source: Source, plan: Plan, found: Assessment) -> Finding:
    (reason,) = found.reasons
    mistake, pointer = _explained(plan) or (None, None)
    fixes = fixes_for(source, plan, found)
    where = pointer or _noise_of(source, plan) or reason.pointer
    (placed,) = source.locate((replace(reason, pointer=where, line=None, column=None),))
    remedy = "; ".join(fix.description for fix in fixes)
    return replace(
        Finding.of(source.file, placed),
        remedy=f"{remedy[0].upper()}{remedy[1:]}." if remedy else reason.remedy,
        mistake=mistake,
        numbers=_numbers(found),
        fixes=fixes,
    )


def _wrong_claim(source: Source, plan: Plan, found: Assessment) -> Finding:
    """The claim with the mistakes behind it, as one finding at the claim."""
    first = next(reason for reason in found.reasons if reason.code == "claim_below_certified")
    after = found.reasons[found.reasons.index(first) + 1 :]
    (placed,) = source.locate((first,))
    return replace(
        Finding.of(source.file, placed),
        remedy=" ".join(item.remedy for item in after) or first.remedy,
        mistake=" + ".join(entry.code for entry in after) or None,
        numbers=_numbers(found),
        fixes=fixes_for(source, plan, found) if found.target_epsilon is not None else (),
    )


def _explained(plan: Plan) -> tuple[str, str] | None:
    """The known mistakes that lead to the plan's noise or target, and where the first stands."""
    # Most plans are right, and need not wait for what explains mistakes to load.
    from affidavit.certificate.diagnosis import ClaimedEpsilon, diagnose

    for claim in _claims(plan):
        if tuple(unanswerable(claim, plan)) or ClaimedEpsilon.of(claim, plan).precision > FINE:
            continue
        found = diagnose(plan, claim)
        # Two mistakes at once explain more numbers by chance than one does.
        if (
            found.explanations
            and (best := found.explanations[0])
            and (len(best.mistakes) == 1 or len(found.explanations) == 1)
        ):
            return " + ".join(best.mistakes), found.as_steps(best)[0]["pointer"]
    return None


def _claims(plan: Plan) -> Iterator[Claim]:
    """What the plan says without saying it: that its one noise multiplier meets its target."""
    given = {release.noise_multiplier for phase in plan.phases for release in phase.releases}
    if len(given) == 1 and (sigma := given.pop()) is not None:
        yield Claim(noise_multiplier=repr(sigma))
    if plan.target.epsilon is not None:
        yield Claim(epsilon=plan.target.epsilon)


def _noise_of(source: Source, plan: Plan) -> str | None:
    """The pointer of the first noise that the plan gives."""
    phases = [("phases", index) for index in range(len(plan.phases))]
    for base, phase in zip(phases if "phases" in source.data else [()], plan.phases, strict=False):
        for index, release in enumerate(phase.releases):
            field = "noise_std" if release.noise_std is not None else "noise_multiplier"
            if release.has_noise:
                return pointer_to(*base, "releases", index, field)
    return None


def _numbers(found: Assessment) -> dict[str, str | float | None]:
    if found.epsilon is None:
        return {}
    return {
        "epsilon_upper": decimal_up(found.epsilon.upper),
        "target_epsilon": found.target_epsilon,
        "delta": found.target_delta,
        "joint_noise_multiplier": found.joint,
    }
