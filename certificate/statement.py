"""The statement that is signed: an in-toto Statement v1 about one plan.

Its subject is the plan, by digest. Its predicate has the verdict with its reasons, the guarantee,
the required noise, the engines and their results, the trainer's obligations, and the plan itself.
Numbers of the guarantee are decimal strings rounded outward, so that no JSON reader can make an
upper bound smaller.

References: in-toto Attestation Framework v1, spec/v1/statement.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, get_args

from affidavit.accountants import Bracket, decimal_down, decimal_up, engine_versions
from affidavit.certificate.assessment import Assessment, Confidence, Verdict
from affidavit.certificate.dsse import in_toto
from affidavit.certificate.keys.key import format_instant
from affidavit.certificate.policy.document import BUILT_IN, Policy
from affidavit.certificate.policy.evaluation import (
    BUILT_IN_EVALUATION,
    NO_APPROVALS,
    Approvals,
    PolicyEvaluation,
)
from affidavit.certificate.runs.step_requirements import certified_plan
from affidavit.mechanisms import joint_noise_multiplier
from affidavit.plan import MalformedPlan, digest_of

PREDICATE_TYPE = "https://affidavit.dev/dp-certificate/v1"
CRITICAL = ("verdict", "guarantee", "validity", "obligations", "approvals")
"""The predicate fields that a verifier must understand to accept a certificate."""


def address(
    plan_digest: str,
    policy: Policy = BUILT_IN,
    waivers: Iterable[str] = (),
    team: str | None = None,
) -> str:
    """Return the content address of plan, policy, waivers in force, engines and ``team``.

    It is known before any accounting, so that a repeated request finds the stored certificate.
    """
    requested = {
        "plan": plan_digest,
        "policy": policy.reference(),
        "accountants": engine_versions(),
    }
    granted = sorted(waivers)
    more = {**({"waivers": granted} if granted else {}), **({} if team is None else {"team": team})}
    return digest_of({**requested, **more})


def statement(
    assessment: Assessment,
    *,
    requester: str,
    issued_at: datetime,
    untrusted: bool,
    approvals: Approvals = NO_APPROVALS,
    evaluation: PolicyEvaluation = BUILT_IN_EVALUATION,
    team: str | None = None,
) -> dict[str, Any]:
    """Return the statement about ``assessment`` and its policy ``evaluation``, as JSON data."""
    waivers = (waiver.id for waiver in evaluation.in_force)
    predicate = {
        "certificate_id": address(assessment.plan_digest, evaluation.policy, waivers, team),
        "verdict": assessment.verdict,
        "reasons": [reason.as_dict() for reason in assessment.reasons],
        "guarantee": _guarantee(assessment),
        "noise_multiplier": _noise(assessment),
        "sensitivity": _up(assessment.sensitivity),
        "strategies": [
            {
                **entry,
                "sensitivity": _up(entry["sensitivity"]),
                "rms_error": _up(entry["rms_error"]),
                "max_error": _up(entry["max_error"]),
            }
            for entry in assessment.strategies
        ],
        "sampling": [
            {**entry, "probability": _up(entry["probability"])} for entry in assessment.sampling
        ],
        "accountants": [
            {
                "name": opinion.name,
                "version": opinion.version,
                "epsilon": _interval(opinion.epsilon),
                **_confidence(opinion.confidence),
            }
            for opinion in assessment.accountants
        ],
        "engines": engine_versions(),
        "obligations": list(assessment.obligations),
        "assumptions": list(assessment.assumptions),
        "warnings": [asdict(warning) for warning in assessment.warnings],
        "plan": assessment.plan,
        **_groups(assessment),
        **evaluation.as_dict(),
        "requester": requester,
        "approvals": approvals.as_document(),
        "validity": {
            "not_before": format_instant(issued_at),
            "not_after": format_instant(evaluation.not_after(issued_at)),
        },
        "untrusted": untrusted,
        "critical": list(CRITICAL),
    }
    subject = {"plan": assessment.plan_digest.removeprefix("sha256:")}
    return in_toto(subject, PREDICATE_TYPE, predicate)


def is_readable(predicate: Mapping[str, Any]) -> bool:
    """Whether the fields that every reader uses have the form that ``statement`` gives them."""
    verdict, guarantee = predicate["verdict"], predicate["guarantee"]
    if verdict not in get_args(Verdict) or not isinstance(predicate.get("requester"), str):
        return False
    try:
        if not all(isinstance(item["code"], str) for item in predicate["obligations"]):
            return False
        if guarantee is None:
            return bool(verdict != "certified")
        ends = ("lower", "upper")
        bounds = [guarantee[name][end] for name in ("epsilon", "delta") for end in ends]
        bounds.append("0" if guarantee["mu"] is None else guarantee["mu"])
        if not all(isinstance(text, str) for text in (guarantee["adjacency"], *bounds)):
            return False
        epsilon_lower, epsilon_upper, delta_lower, delta_upper, mu = map(float, bounds)
    except (KeyError, TypeError, ValueError):
        return False
    ordered = 0 <= epsilon_lower <= epsilon_upper and 0 <= delta_lower <= delta_upper and mu >= 0
    # A refused or undecided plan may have no finite bound.
    may_be_unbounded = verdict in ("refused", "undecided")
    return ordered and (may_be_unbounded or (epsilon_upper < math.inf and delta_upper < 1))


def follows_from_plan(predicate: Mapping[str, Any]) -> bool:
    """Whether the guarantee has the plan's neighbours and noise, and meets its target if certified.

    Only the accountants can check more. A plan that this release cannot read is accepted.
    """
    try:
        if predicate["guarantee"] is None:
            return True
        plan, guarantee = certified_plan(dict(predicate)), predicate["guarantee"]
        if (guarantee["adjacency"], guarantee["unit"]) != (plan.adjacency, plan.dataset.unit):
            return False
        if predicate["verdict"] == "certified":
            for name in ("epsilon", "delta"):
                target = getattr(plan.target, name)
                bound = float(guarantee[name]["upper"])
                if target is not None and bound > float(decimal_up(target)):
                    return False
        stated = predicate["noise_multiplier"]["joint"]
        joints = map(joint_noise_multiplier, plan.phases)
        return stated is None or all(joint is None or float(stated) <= joint for joint in joints)
    except MalformedPlan:
        return True
    except (KeyError, TypeError, ValueError):
        return False


def _guarantee(assessment: Assessment) -> dict[str, Any] | None:
    if assessment.epsilon is None or assessment.delta is None:
        return None
    return {
        "epsilon": _interval(assessment.epsilon),
        "delta": _interval(assessment.delta),
        "target": {
            "epsilon": _up(assessment.target_epsilon),
            "delta": _up(assessment.target_delta),
        },
        "adjacency": assessment.adjacency,
        "unit": assessment.unit,
        **_confidence(assessment.confidence),
        "mu": _up(assessment.mu),
        "trajectory": "all_iterates",
    }


def _groups(assessment: Assessment) -> dict[str, Any]:
    """Return the proved bounds of groups; empty if there are none."""
    proved = [
        {
            "records": bound.records,
            "relation": bound.relation,
            "epsilon": _interval(bound.epsilon),
            **_confidence(bound.confidence),
        }
        for bound in assessment.groups
        if bound.epsilon is not None
    ]
    return {"groups": proved} if proved else {}


def _confidence(confidence: Confidence | None) -> dict[str, str]:
    """Return the confidence level, rounded down, and the seed; empty for a certain bound."""
    if confidence is None:
        return {}
    return {"confidence": decimal_down(confidence.level), "seed": confidence.seed}


def _noise(assessment: Assessment) -> dict[str, Any]:
    return {
        "joint": None if assessment.joint is None else decimal_down(assessment.joint),
        "releases": [
            {
                **({} if release.phase is None else {"phase": release.phase}),
                "name": release.name,
                "count": release.count,
                "required": _up(release.required),
                "given": None if release.given is None else decimal_down(release.given),
            }
            for release in assessment.releases
        ],
    }


def _interval(bracket: Bracket) -> dict[str, str]:
    return {"lower": decimal_down(bracket.lower), "upper": decimal_up(bracket.upper)}


def _up(value: float | None) -> str | None:
    return None if value is None else decimal_up(value)
