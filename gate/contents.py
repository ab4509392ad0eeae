"""What a verified certificate says, in lines for a person: ``affidavit verify --show``.

A bundle is signed bytes, which nobody reads as they are. These lines are the predicate's
fields in the order in which somebody who is to rely on them asks: about what, for whom, how
much, under which conditions, decided by whom and until when. Nothing is worked out here,
and only what has passed verification is shown.

    >>> print(*contents({"verdict": "refused", "plan": {"name": "a", "dataset": {"name": "b"}},
    ...     "guarantee": None, "reasons": [{"code": "no_theorem", "message": "None is known."}],
    ...     "validity": {"not_before": "2026-01-01", "not_after": "2027-01-01"}}), sep="\\n")
    plan: a, on data set b
    guarantee: none
    because: no_theorem: None is known.
    valid: 2026-01-01 to 2027-01-01

References: docs/reference/certificate.md has every field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from affidavit.gate.report import printable

NEIGHBOURS = {
    "add_remove": "{unit} is added or removed",
    "replace_one": "{unit} is replaced by another",
    "zero_out": "{unit} contributes nothing",
}
"""How neighbouring data sets differ, in words."""


def contents(predicate: Mapping[str, Any]) -> list[str]:
    """The lines; fields that say nothing are left out.

    ``predicate`` is that of a statement that was verified. ε is in nats, δ a probability and
    noise in clip norms, in the digits of the statement. What a later release wrote in a form
    unknown to this one is told of as such, and never raises.
    """
    lines: list[str] = []
    for about, part in PARTS.items():
        try:
            lines += part(predicate)
        except (AttributeError, KeyError, TypeError, ValueError):
            lines.append(f"{about}: in a form that this release cannot show; see --json")
    return [printable(line) for line in lines]


def _subject(said: Mapping[str, Any]) -> Iterator[str]:
    plan = said["plan"]
    dataset = plan.get("dataset") or {}
    size = f" of {dataset['size']} records" if dataset.get("size") else ""
    on = f", on data set {dataset['name']}{size}" if dataset.get("name") else ""
    yield f"plan: {plan.get('name', 'without a name')}{on}"


def _guarantee(said: Mapping[str, Any]) -> Iterator[str]:
    found = said["guarantee"]
    if found is None:
        yield "guarantee: none"
        return
    unit = f"one {found['unit']}"
    neighbours = NEIGHBOURS.get(found["adjacency"], "{unit}").format(unit=unit)
    yield f"protects: {unit}; neighbouring data sets: {neighbours} ({found['adjacency']})"
    level = found.get("confidence")
    chance = "" if level is None else f", with confidence {level}"
    yield f"guarantee: {_ends('ε', found['epsilon'])}, {_ends('δ', found['delta'])}{chance}"
    target = found["target"]
    signs = (("epsilon", "ε"), ("delta", "δ"))
    if asked := [f"{sign} = {target[name]}" for name, sign in signs if target[name] is not None]:
        yield f"asked for: {', '.join(asked)}"


def _ends(sign: str, ends: Mapping[str, str]) -> str:
    lower, upper = ends["lower"], ends["upper"]
    return f"{sign} = {upper}" if lower == upper else f"{sign} between {lower} and {upper}"


def _run(said: Mapping[str, Any]) -> Iterator[str]:
    for phase in said.get("sampling", ()):
        rate = "" if phase["probability"] is None else f", q = {phase['probability']}"
        yield f"sampling: {phase['scheme']}{rate}, {phase['steps']} steps"
    for item in said.get("noise_multiplier", {}).get("releases", ()):
        given = item["required"] if item["given"] is None else item["given"]
        blocks = "" if item["count"] == 1 else f", each of {item['count']} blocks"
        yield f"noise: {item['name']}{blocks}: {given} clip norms"


def _reasons(said: Mapping[str, Any]) -> Iterator[str]:
    for field, title in (("reasons", "because"), ("warnings", "warning"), ("waived", "waived")):
        for item in said.get(field, ()):
            waiver = item.get("waiver")
            by = f" (by {waiver['granted_by']}: {waiver['reason']})" if waiver else ""
            yield f"{title}: {item['code']}: {item['message']}{by}"


def _conditions(said: Mapping[str, Any]) -> Iterator[str]:
    for duty in said.get("obligations", ()):
        who = "the trainer checks it" if duty["checked_by"] == "trainer" else "only declared"
        yield f"obligation ({who}): {duty['text']}"
    for item in said.get("assumptions", ()):
        yield f"assumed: {item}"


def _responsible(said: Mapping[str, Any]) -> Iterator[str]:
    for engine in said.get("accountants", ()):
        yield f"accounted by: {engine['name']} {engine['version']}"
    if policy := said.get("policy"):
        yield f"policy: {policy['name']}, version {policy['version']}"
    if requester := said.get("requester"):
        yield f"requested by: {requester}"
    if approvals := said.get("approvals"):
        given = ", ".join(approval["name"] for approval in approvals["given"])
        yield f"approvals: {approvals['required']} required{given and ', given by ' + given}"
    validity = said["validity"]
    yield f"valid: {validity['not_before']} to {validity['not_after']}"


PARTS: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "plan": _subject,
    "guarantee": _guarantee,
    "sampling and noise": _run,
    "reasons": _reasons,
    "obligations": _conditions,
    "who and when": _responsible,
}
"""What the lines are about, in their order."""
