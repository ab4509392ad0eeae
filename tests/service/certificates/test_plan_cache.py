"""What is remembered of plans: what their bytes say, and no more of them than may be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from affidavit.certificate.policy import Policy
from affidavit.plan import MalformedPlan, Syntax
from affidavit.service.certificates import submit_plan
from affidavit.service.certificates.submit_plan import CachedPlan, PlanCache
from affidavit.service.policies.policy_set import CertificationRequest, PolicySet


def read(plans: PlanCache, body: bytes, syntax: Syntax = "json") -> CachedPlan:
    return asyncio.run(plans(body, syntax))


def body_of(plan: Any, **changes: Any) -> bytes:
    return json.dumps(plan(**changes)).encode()


def test_the_same_bytes_are_read_once(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, body = PlanCache(), body_of(plan)
    first = read(plans, body)
    monkeypatch.setattr(submit_plan, "parse_plan", None)
    assert read(plans, body) is first


def test_the_same_bytes_in_another_syntax_are_another_body(plan: Any) -> None:
    plans, body = PlanCache(), body_of(plan)
    assert read(plans, body, "yaml") is not read(plans, body)


def test_what_cannot_be_read_is_refused_every_time() -> None:
    plans = PlanCache()
    for _ in range(2):
        with pytest.raises(MalformedPlan):
            read(plans, b'{"version": 1}')


def test_no_more_bytes_are_kept_than_may_be(plan: Any) -> None:
    bodies = [body_of(plan, steps=number) for number in range(10, 20)]
    plans = PlanCache(max_bytes=3 * len(bodies[0]))
    stored = [read(plans, body) for body in bodies]
    again = [read(plans, item) for item in bodies[-3:]]
    assert all(one is other for one, other in zip(again, stored[-3:], strict=True))
    assert read(plans, bodies[0]) is not stored[0]


def test_a_large_body_is_not_kept(plan: Any) -> None:
    plans = PlanCache()
    body = body_of(plan) + b" " * submit_plan.MAX_BODY_BYTES
    assert read(plans, body) is not read(plans, body)


def test_the_id_follows_from_the_policies_in_force(plan: Any) -> None:
    known = read(PlanCache(), body_of(plan))
    strict = Policy(schema_version=1, name="house", version=1, datasets=("toy",), epsilon_cap=1.0)
    ids = []
    for rules in (PolicySet(), PolicySet(), PolicySet((1, 0, 0), {"house": strict}), PolicySet()):
        ids.append(known.request_under(rules, "token:ci").id)
        assert ids[-1] == CertificationRequest.under(rules, known.plan, "token:ci").id
    assert ids[0] == ids[1] == ids[3] != ids[2]
