"""The plan of a certificate is the requested one with the signed solution."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from affidavit.assessment import PlanNotClosed, certified_plan, certify
from affidavit.certificate.issuance import issue
from affidavit.plan import Plan
from affidavit.trust import SigningKey

PlanOf = Callable[..., Plan]
PHASE: dict[str, Any] = {"sampling": {"scheme": "full_batch"}, "steps": 10}
OPEN: list[dict[str, Any]] = [
    {"name": "hidden", "clip_norm": 1, "count": 3},
    {"name": "head", "clip_norm": 0.5},
]


def signed(plan: Plan, key: SigningKey) -> dict[str, Any]:
    """The predicate of ``plan``'s certificate."""
    result = issue(
        certify(plan, second_opinion=False), key, requester="tests", issued_at=datetime.now(UTC)
    )
    predicate: dict[str, Any] = json.loads(json.dumps(result.statement["predicate"]))
    return predicate


def sigmas(plan: Plan) -> list[list[float | None]]:
    return [[release.noise_multiplier for release in phase.releases] for phase in plan.phases]


def test_noise_that_was_solved_for_is_the_noise_that_was_signed(
    plan_of: PlanOf, key: SigningKey
) -> None:
    requested = plan_of(releases=OPEN)
    predicate = signed(requested, key)
    closed = certified_plan(predicate)
    entries = {item["name"]: item for item in predicate["noise_multiplier"]["releases"]}
    assert sigmas(closed) == [[float(entries[name]["required"]) for name in ("hidden", "head")]]
    # All else is as it was asked, and the noise suffices without another digit.
    assert [release.clip_norm for release in closed.phases[0].releases] == [1, 0.5]
    assert closed.model_copy(update={"phases": requested.phases}) == requested
    result = certify(closed, second_opinion=False)
    assert result.verdict == "certified"
    assert result.epsilon is not None
    assert 7.99 < result.epsilon.upper <= 8


def test_each_phase_has_the_noise_of_its_own_entries(plan_of: PlanOf) -> None:
    """Releases of all phases share their names, and what is given stays."""
    provided = [{**item, "noise_multiplier": 30.0} for item in OPEN]
    phases = [{**PHASE, "releases": releases} for releases in (provided, OPEN, OPEN)]
    plan = plan_of(sampling=..., steps=..., releases=..., phases=phases)
    entries = [
        {"phase": phase, "name": name, "required": required}
        for phase, name, required in (
            (2, "head", "9.5"),
            (1, "hidden", 7),
            (0, "head", 1),
            (1, "head", 8.25),
            (2, "hidden", 6),
        )
    ]
    predicate = {
        "plan": plan.model_dump(mode="json", exclude_none=True, by_alias=True),
        "sampling": [{}, {}, {}],
        "noise_multiplier": {"releases": entries},
    }
    assert sigmas(certified_plan(predicate)) == [[30.0, 30.0], [7.0, 8.25], [6.0, 9.5]]
    sigma = entries.pop(0)
    for instead in ([], [7], [{**sigma, "required": "inf"}], [{**sigma, "required": 0}]):
        predicate["noise_multiplier"] = {"releases": entries + instead}
        with pytest.raises(PlanNotClosed):
            certified_plan(predicate)


@pytest.mark.parametrize(
    ("changes", "lost"), [({"releases": OPEN}, "noise_multiplier"), ({"steps": None}, "sampling")]
)
def test_a_certificate_that_lost_what_was_open_closes_nothing(
    plan_of: PlanOf, key: SigningKey, changes: dict[str, Any], lost: str
) -> None:
    predicate = signed(plan_of(**changes), key)
    assert certified_plan(predicate).phases[0].steps is not None
    for instead in (None, [], {}, "x"):
        with pytest.raises(PlanNotClosed):
            certified_plan({**predicate, lost: instead})


def test_a_closed_plan_is_its_own(plan_of: PlanOf, key: SigningKey) -> None:
    assert certified_plan(signed(plan_of(), key)) == plan_of()
