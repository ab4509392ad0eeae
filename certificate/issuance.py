"""Issue certificates: write the statement about an assessment, sign it, and write its bundle.

The statement is an in-toto Statement v1. Its subject is the plan, by digest. Its predicate has the
verdict with its reasons, the guarantee, the required noise, the engines and their results, the
trainer's obligations, and the plan itself. Numbers of the guarantee are decimal strings rounded
outward, so that no JSON reader can make an upper bound smaller.

A bundle is one JSON document: the DSSE envelope and the name of its format. It is written once and
stored as bytes. Everything in it is either signed or compared with the signed part, so that every
changed byte is detected.

A certificate may be issued more than once: when it has expired, when its key was revoked, or when
approvals were added. Each issue has its number and the digest of the envelope that it supersedes,
so that the issues of an id form a chain.

References: in-toto Attestation Framework v1, spec/v1/statement.md.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Protocol, get_args

from affidavit.accountants import Bracket, decimal_down, decimal_up, engine_versions
from affidavit.assessment import Assessment, certified_plan
from affidavit.assessment.assessment import Confidence, Verdict
from affidavit.certificate.policy.document import BUILT_IN, Policy
from affidavit.certificate.policy.evaluation import (
    BUILT_IN_EVALUATION,
    NO_APPROVALS,
    Approvals,
    PolicyEvaluation,
)
from affidavit.certificate.policy.waiver import Waiver
from affidavit.mechanisms import joint_noise_multiplier
from affidavit.plan import MalformedPlan, canonical_json, digest_of
from affidavit.trust import (
    SigningPort,
    format_instant,
    now_in_seconds,
    sign_envelope,
)
from affidavit.trust.dsse import in_toto

PREDICATE_TYPE = "https://affidavit.dev/dp-certificate/v1"
CRITICAL = ("verdict", "guarantee", "validity", "obligations", "approvals")
"""The predicate fields that a verifier must understand to accept a certificate."""


def certificate_id(
    plan_digest: str,
    policy: Policy = BUILT_IN,
    waivers: Iterable[Waiver] = (),
    team: str | None = None,
) -> str:
    """Return the content address of plan, policy, waivers in force, engines and ``team``.

    It is known before any accounting, so that a repeated request finds the stored certificate.
    """
    granted = sorted(waiver.id for waiver in waivers)
    return _id_of(plan_digest, policy.reference(), engine_versions(), granted, team)


def is_of_team(predicate: Mapping[str, Any], team: str | None) -> bool:
    """Whether a certificate's id is the one that its plan has in ``team``.

    Certificates of earlier releases, which do not state the waivers in force, may be of any team.
    """
    if "waivers" not in predicate:
        return True
    plan, stated = digest_of(predicate["plan"]), predicate["waivers"]
    expected = _id_of(plan, predicate["policy"], predicate["engines"], stated, team)
    return bool(predicate["certificate_id"] == expected)


def _id_of(
    plan_digest: str, policy: Mapping[str, Any], engines: Any, waivers: Any, team: str | None
) -> str:
    requested = {"plan": plan_digest, "policy": policy, "accountants": engines}
    if waivers:
        requested["waivers"] = waivers
    if team is not None:
        requested["team"] = team
    return digest_of(requested)


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
    predicate = {
        "certificate_id": certificate_id(
            assessment.plan_digest, evaluation.policy, evaluation.in_force, team
        ),
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
        "waivers": sorted(waiver.id for waiver in evaluation.in_force),
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
        for stated in (predicate["obligations"], predicate["reasons"]):
            if not isinstance(stated, list) or not all(
                isinstance(item["code"], str) for item in stated
            ):
                return False
        if guarantee is None:
            return bool(verdict != "certified")
        ends = ("lower", "upper")
        bounds = [guarantee[name][end] for name in ("epsilon", "delta") for end in ends]
        bounds.append("0" if guarantee["mu"] is None else guarantee["mu"])
        if "gaussian_bound" in guarantee:
            gaussian = guarantee["gaussian_bound"]
            bounds += [gaussian[name] for name in ("mu", "remainder", "regret")]
        if not all(isinstance(text, str) for text in (guarantee["adjacency"], *bounds)):
            return False
        epsilon_lower, epsilon_upper, delta_lower, delta_upper, *others = map(_number, bounds)
    except (KeyError, TypeError, ValueError):
        return False
    ordered = 0 <= epsilon_lower <= epsilon_upper and 0 <= delta_lower <= delta_upper
    # A refused or undecided plan may have no finite bound.
    may_be_unbounded = verdict in ("refused", "undecided")
    ordered = ordered and all(value >= 0 for value in others)
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
                bound = _number(guarantee[name]["upper"])
                if target is not None and bound > float(decimal_up(target)):
                    return False
        stated = predicate["noise_multiplier"]["joint"]
        multiplier = 0.0 if stated is None else _number(stated)
        joints = map(joint_noise_multiplier, plan.phases)
        return all(joint is None or multiplier <= joint for joint in joints)
    except MalformedPlan:
        return True
    except (KeyError, TypeError, ValueError):
        return False


_DECIMAL = re.compile(
    r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|[-+]?inf(?:inity)?|[-+]?nan",
    re.ASCII | re.IGNORECASE,
)


def _number(value: Any) -> float:
    """Return the number that a statement has, which ``float`` reads in more forms than others do.

    Raises ``ValueError`` and ``TypeError``.
    """
    if isinstance(value, bool):
        raise TypeError("not a number")
    if isinstance(value, str) and _DECIMAL.fullmatch(value) is None:
        raise ValueError("not a decimal number")
    return float(value)


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
        **_gaussian_bound(assessment),
        "trajectory": "all_iterates",
    }


def _gaussian_bound(assessment: Assessment) -> dict[str, Any]:
    """Return the Gaussian curve that bounds the guarantee; empty if none was requested."""
    if assessment.gaussian is None:
        return {}
    bound = asdict(assessment.gaussian)
    return {"gaussian_bound": {name: decimal_up(value) for name, value in bound.items()}}


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


# ---- issuing ----------------------------------------------------------------------------

BUNDLE_TYPE = "application/vnd.affidavit.bundle.v1+json"

UNTRUSTED = {
    "code": "untrusted",
    "message": "UNTRUSTED: signed with a development key that nobody vouches for. Create a key "
    "with `affidavit keys new` and POST the plan again.",
}


class PreviousIssue(Protocol):
    """The superseded issue: its number, counted from 1, and the digest of its envelope."""

    @property
    def issue(self) -> int: ...  # noqa: D102

    @property
    def envelope_digest(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A signed statement; ``bundle`` is the exact bytes to store and to distribute."""

    id: str
    statement: dict[str, Any]
    bundle: bytes
    untrusted: bool
    envelope_digest: str

    def __repr__(self) -> str:
        return f"<Certificate {self.id}: {self.statement['predicate']['verdict']}>"

    def as_result(self, assessment: Assessment) -> dict[str, Any]:
        """Return the result document of ``assessment`` with its certificate."""
        predicate = self.statement["predicate"]
        result = assessment.as_result() | {key: predicate[key] for key in ("policy", "waived")}
        if self.untrusted:
            result["warnings"] = [*result["warnings"], UNTRUSTED]
        return {**result, "certificate": {"id": self.id, "bundle": json.loads(self.bundle)}}


def issue(
    assessment: Assessment,
    key: SigningPort,
    *,
    requester: str,
    issued_at: datetime,
    evaluation: PolicyEvaluation = BUILT_IN_EVALUATION,
    previous: PreviousIssue | None = None,
    ledger: Mapping[str, Any] | None = None,
    team: str | None = None,
) -> Certificate:
    """Sign the assessment of a plan; a development key makes it ``untrusted``.

    ``evaluation`` is what ``evaluate_policy`` returned with ``assessment``. A verdict other than
    ``certified`` needs no approval, because such a certificate allows nothing. ``ledger`` is the
    current state of the data set's budget, if it has one. ``team`` is part of the id.
    """
    document = statement(
        assessment,
        requester=requester,
        issued_at=issued_at,
        untrusted=key.public.development,
        approvals=Approvals(
            evaluation.policy.approvals if assessment.verdict == "certified" else 0
        ),
        evaluation=evaluation,
        team=team,
    )
    document["predicate"]["ledger"] = None if ledger is None else dict(ledger)
    if assessment.proof is not None:
        document["predicate"]["proof"] = assessment.proof
    return _sign(document, key, previous)


def issue_here(
    assessment: Assessment,
    key: SigningPort,
    evaluation: PolicyEvaluation = BUILT_IN_EVALUATION,
    requester: str | None = None,
) -> Certificate:
    """Sign the assessment of a plan now, for ``requester`` or the user of this machine."""
    user = requester or f"{os.environ.get('USER') or os.environ.get('LOGNAME') or 'unknown'}@local"
    return issue(assessment, key, requester=user, issued_at=now_in_seconds(), evaluation=evaluation)


def issue_approved(
    pending: Mapping[str, Any],
    key: SigningPort,
    *,
    approvals: Approvals,
    issued_at: datetime,
    previous: PreviousIssue,
) -> Certificate:
    """Sign the statement ``pending`` again with its approvals, as the issue after ``previous``.

    The end of its validity stays the same.
    """
    predicate = pending["predicate"]
    changes = {
        "approvals": approvals.as_document(),
        "validity": {**predicate["validity"], "not_before": format_instant(issued_at)},
        "untrusted": key.public.development,
    }
    return _sign({**pending, "predicate": {**predicate, **changes}}, key, previous)


def _sign(
    document: dict[str, Any], key: SigningPort, previous: PreviousIssue | None
) -> Certificate:
    """Sign ``document`` as the issue after ``previous``, or as the first one.

    A certificate is valid no longer than the window of a key that is for certificates.
    """
    chain = {
        "issue": 1 if previous is None else previous.issue + 1,
        "supersedes": None if previous is None else previous.envelope_digest,
    }
    predicate = document["predicate"]
    validity = dict(predicate["validity"])
    if key.public.roles is not None:
        validity["not_after"] = min(validity["not_after"], format_instant(key.public.not_after))
    document = {**document, "predicate": {**predicate, "validity": validity, **chain}}
    envelope = sign_envelope(canonical_json(document), key)
    return Certificate(
        id=document["predicate"]["certificate_id"],
        statement=document,
        bundle=canonical_json({"bundleType": BUNDLE_TYPE, "envelope": envelope.as_document()}),
        untrusted=key.public.development,
        envelope_digest=envelope.digest,
    )
