"""What the pages of policies and waivers show: the rules in force, and what others would break.

The simulator judges certificates by a draft, newest first and a page at a time, from what they
say; nothing is accounted anew and nothing is kept. A question such as "what if the cap were 4"
is a draft of the next version of a policy with that one rule changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from affidavit.accountants import decimal_up
from affidavit.certificate.policy import BUILT_IN, MalformedPolicy, Policy, parse_policy
from affidavit.plan import Reason
from affidavit.service.pages.plan_form import yaml_of
from affidavit.service.policies.answers import waiver_answer
from affidavit.service.policies.rulebook import Rulebook
from affidavit.service.policies.simulate import Simulated
from affidavit.service.policies.store import KeptPolicy, KeptWaiver

DIGITS = 6
DRAFT = "draft"
"""The name of a draft that is made of the built-in policy, whose own name is reserved."""
ASKED = ("epsilon_cap", "delta_cap", "approvals", "valid_days", "second_opinion", "budget")
"""Rules that the simulator's form asks for; any other is changed in the draft itself."""
NUMBERS = frozenset({"epsilon_cap", "delta_cap", "approvals", "valid_days"})


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLine:
    """A version of a policy in one line; the built-in one was set by nobody, and never."""

    name: str
    version: int
    digest: str
    datasets: tuple[str, ...]
    active: bool
    epsilon_cap: float | None
    delta_cap: float | None
    approvals: int
    budget: str
    valid_days: int
    created_by: str | None
    created_at: datetime | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """Every version, newest first."""

    lines: tuple[PolicyLine, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleLine:
    """A rule of a version, and what it was in the version before; None where it is not there."""

    rule: str
    value: str | None
    before: str | None
    changed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyPage:
    """One version with its rules beside those of the version before it."""

    line: PolicyLine
    rules: tuple[RuleLine, ...]
    yaml: str
    versions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WaiverLine:
    """A waiver in one line."""

    id: str
    status: str
    rule: str
    plan_digest: str | None
    dataset: str | None
    policy: str
    owner: str
    reason: str
    granted_by: str
    granted_at: str
    expires_at: str
    revoked_by: str | None
    revoked_because: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Waivers:
    """Every waiver, newest first."""

    lines: tuple[WaiverLine, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeLine:
    """A certificate whose verdict would be another under the draft."""

    certificate: str
    name: str | None
    dataset: str | None
    epsilon: str | None
    delta: str | None
    verdict: str
    would_be: str
    codes: tuple[str, ...]
    messages: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A draft and what a page of certificates would become; ``reasons`` where it is none.

    ``judged`` certificates came under the draft on this page.
    """

    yaml: str
    asked: Mapping[str, str]
    of_policy: str
    known: tuple[str, ...]
    reasons: tuple[Reason, ...] = ()
    judged: int | None = None
    lines: tuple[ChangeLine, ...] = ()
    next: str | None = None


def policies(kept: list[KeptPolicy], rules: Rulebook) -> Policies:
    """Every version, the built-in one last."""
    lines = [_line(item.policy, item, rules) for item in kept]
    return Policies(lines=(*lines, _line(BUILT_IN, None, rules)))


def policy_page(
    kept: list[KeptPolicy], rules: Rulebook, name: str, version: int
) -> PolicyPage | None:
    """One version of a policy; None if there is none."""
    known: dict[int, KeptPolicy | None] = {
        item.policy.version: item for item in kept if item.policy.name == name
    }
    if name == BUILT_IN.name:
        known = {BUILT_IN.version: None}
    if version not in known:
        return None
    found = known[version]
    former = known.get(version - 1)
    policy = BUILT_IN if found is None else found.policy
    return PolicyPage(
        line=_line(policy, found, rules),
        rules=_rules(policy, None if former is None else former.policy),
        yaml=yaml_of(policy.as_document()),
        versions=tuple(sorted(known, reverse=True)),
    )


def waivers(kept: list[KeptWaiver], named: Mapping[str, str], now: datetime) -> Waivers:
    """Every waiver; ``named`` are policies by their digest."""
    return Waivers(lines=tuple(_waiver(item, named, now) for item in kept))


def policy_names(kept: list[KeptPolicy]) -> dict[str, str]:
    """What people call each version, by its digest."""
    found = {item.policy.digest(): item.policy for item in kept} | {BUILT_IN.digest(): BUILT_IN}
    return {digest: f"{each.name} v{each.version}" for digest, each in found.items()}


def draft_of(rules: Rulebook, name: str | None, asked: Mapping[str, str]) -> str:
    """The YAML of the next version of an active policy, or of the default, with ``asked`` changed.

    A rule that was asked for as nothing is left out.
    """
    policy = rules.policies.get(name or "", rules.default)
    document = policy.as_document()
    if policy == BUILT_IN:
        document |= {"name": DRAFT, "version": 1}
    else:
        document["version"] = policy.version + 1
    for rule in ASKED:
        given = asked.get(rule, "").strip()
        if given:
            document[rule] = _number(given) if rule in NUMBERS else given
    return yaml_of(document)


def read_draft(yaml: str) -> tuple[Policy | None, tuple[Reason, ...]]:
    """The draft that ``yaml`` says, or the reasons why it is none."""
    try:
        return parse_policy(yaml.encode("utf-8", "replace"), "yaml"), ()
    except MalformedPolicy as error:
        return None, error.reasons


def changes_of(found: Simulated) -> tuple[ChangeLine, ...]:
    """The certificates that would get another verdict."""
    return tuple(
        ChangeLine(
            certificate=change.certificate.id,
            name=change.certificate.name,
            dataset=change.certificate.dataset,
            epsilon=_up(change.certificate.epsilon_upper),
            delta=_up(change.certificate.delta),
            verdict=change.certificate.verdict,
            would_be=change.verdict,
            codes=tuple(reason.code for reason in change.reasons),
            messages=tuple(reason.message for reason in change.reasons),
        )
        for change in found.changes
    )


def _line(policy: Policy, kept: KeptPolicy | None, rules: Rulebook) -> PolicyLine:
    return PolicyLine(
        name=policy.name,
        version=policy.version,
        digest=policy.digest(),
        datasets=("all others",) if policy.datasets == "default" else policy.datasets,
        active=rules.is_active(policy),
        epsilon_cap=policy.epsilon_cap,
        delta_cap=policy.delta_cap,
        approvals=policy.approvals,
        budget=policy.budget,
        valid_days=policy.valid_days,
        created_by=None if kept is None else kept.created_by,
        created_at=None if kept is None else kept.created_at,
    )


_NO_RULES = frozenset({"schema_version", "name", "version"})


def _rules(policy: Policy, former: Policy | None) -> tuple[RuleLine, ...]:
    now = policy.as_document()
    before = {} if former is None else former.as_document()
    return tuple(
        RuleLine(
            rule=name,
            value=_written(now.get(name)),
            before=_written(before.get(name)),
            changed=former is not None and now.get(name) != before.get(name),
        )
        for name in Policy.model_fields
        if name not in _NO_RULES and (name in now or name in before)
    )


def _waiver(kept: KeptWaiver, named: Mapping[str, str], now: datetime) -> WaiverLine:
    waiver = kept.waiver
    return WaiverLine(
        id=waiver.id,
        status=waiver_answer(kept, now)["status"].replace("_", " "),
        rule=waiver.rule,
        plan_digest=waiver.plan_digest,
        dataset=waiver.dataset,
        policy=named.get(waiver.policy, waiver.policy),
        owner=waiver.owner,
        reason=waiver.reason,
        granted_by=waiver.created_by,
        granted_at=waiver.created_at,
        expires_at=waiver.expires_at,
        revoked_by=kept.revoked_by,
        revoked_because=kept.revoked_because,
    )


def _written(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value) or "none"
    return json.dumps(value, ensure_ascii=False)


def _number(given: str) -> Any:
    """A number where ``given`` is one; else the text, which the reader refuses by its name."""
    try:
        found = float(given)
    except ValueError:
        return given
    return int(found) if found.is_integer() and abs(found) < 2**53 else found


def _up(value: float | None) -> str | None:
    return None if value is None else decimal_up(value, DIGITS)
