"""What the page of one certificate shows, read off its signed bytes and from beside them.

Numbers of the guarantee are those that were signed, shortened outward. What may change, where
it stands, who approved, which runs used it, is read from the database at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from affidavit.accountants import decimal_down, decimal_up
from affidavit.certificate.log import Inclusion
from affidavit.certificate.policy import refused_by_policy
from affidavit.service.lifecycle.history import history
from affidavit.service.lifecycle.issuing import statement_of
from affidavit.service.lifecycle.standing import Status
from affidavit.service.log.reader import with_inclusion
from affidavit.service.log.stored_tree import LogDamaged
from affidavit.service.pages.certificate_standing import (
    IssueShown,
    WaivedShown,
    issue_shown,
    standing,
    waived_shown,
)
from affidavit.service.pages.checklist import ADJACENCIES, Item, checklist
from affidavit.service.pages.run_view import record_said
from affidavit.service.pages.verification_view import Verification, trusted, verification
from affidavit.service.runs import rows
from affidavit.service.runs.rows import Run
from affidavit.service.services import Services
from affidavit.service.store import StoredCertificate

DIGITS = 6
MOST_RUNS = 20
UNITS = {"example": "record", "user": "user"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarantee:
    """What is proved: ε in nats between its bounds at δ; all are decimals rounded outward."""

    epsilon_at_most: str
    epsilon_at_least: str
    delta: str
    adjacency: str
    unit: str
    confidence: str | None
    target_epsilon: str | None
    target_delta: str | None
    mu: str | None

    @property
    def words(self) -> str:
        """The guarantee in one line, with everything that it means nothing without."""
        chance = "" if self.confidence is None else f" with confidence {self.confidence}"
        return (
            f"ε ≤ {self.epsilon_at_most} at δ = {self.delta}{chance} "
            f"({self.adjacency}, per {self.unit})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The noise multiplier of one release, over its clip norm on the sum."""

    release: str
    blocks: int
    given: str | None
    required: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One engine's bracket of ε at the certificate's δ."""

    name: str
    version: str
    at_least: str
    at_most: str
    decides: bool
    agrees: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonShown:
    """Why nothing, or not this, may be claimed; and what to do."""

    code: str
    pointer: str
    message: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunShown:
    """A run of this certificate, and the weights that came of it."""

    id: str
    state: str
    steps: int | None
    record: str | None
    weights: str | None
    requested_by: str
    changed_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateView:
    """One certificate, whole."""

    id: str
    issue: int
    untrusted: bool
    name: str | None
    verdict: str
    status: Status
    sentence: str
    standing: str | None
    guarantee: Guarantee | None
    joint_noise: str | None
    noise: tuple[Noise, ...]
    sampling: tuple[dict[str, Any], ...]
    strategies: tuple[dict[str, Any], ...]
    engines: tuple[Engine, ...]
    agreement: str
    reasons: tuple[ReasonShown, ...]
    warnings: tuple[dict[str, str], ...]
    plan: dict[str, Any]
    plan_digest: str
    dataset: str | None
    mechanism: str
    claim: str | None
    policy: dict[str, Any]
    waived: tuple[WaivedShown, ...]
    ledger: dict[str, Any] | None
    requester: str
    created_at: datetime
    not_after: datetime
    key_id: str
    envelope_digest: str
    leaf: int | None
    tree_size: int | None
    verification: Verification
    checklist: tuple[Item, ...]
    runs: tuple[RunShown, ...]
    issues: tuple[IssueShown, ...]
    may_be_approved: bool

    @property
    def plan_text(self) -> str:
        """The plan as indented JSON."""
        return json.dumps(self.plan, indent=2, ensure_ascii=False)

    @property
    def steps_run(self) -> int | None:
        """The steps that the latest run which ended was charged."""
        return next((run.steps for run in self.runs if run.steps is not None), None)


def certificate_view(
    services: Services, found: StoredCertificate, now: datetime
) -> CertificateView:
    """The page of ``found``."""
    predicate = statement_of(found)["predicate"]
    with services.engine.connect() as connection:
        wanted = rows.Filters(certificate_id=found.id)
        runs = rows.page(connection, wanted, None, MOST_RUNS)
    place = _place(services, found)
    plan = predicate["plan"]
    issues = tuple(issue_shown(item) for item in history(services.engine, found.id))
    said = standing(found, issues)
    revoked = said if found.status is Status.REVOKED else None
    bundle = with_inclusion(services.log, found.bundle)
    guarantee = _guarantee(predicate)
    engines = _engines(predicate)
    conformant = next((run.id for run in runs if run.state == "settled"), None)
    return CertificateView(
        id=found.id,
        issue=found.issue,
        untrusted=found.untrusted,
        name=found.name,
        verdict=found.verdict,
        status=found.status,
        sentence=sentence(predicate, guarantee),
        standing=said,
        guarantee=guarantee,
        joint_noise=predicate["noise_multiplier"]["joint"],
        noise=tuple(_noise(entry) for entry in predicate["noise_multiplier"]["releases"]),
        sampling=tuple(predicate["sampling"]),
        strategies=tuple(predicate["strategies"]),
        engines=engines,
        agreement=agreement(engines),
        reasons=tuple(_reason(element) for element in predicate["reasons"]),
        warnings=tuple(predicate["warnings"]),
        plan=plan,
        plan_digest=found.plan_digest,
        dataset=found.dataset,
        mechanism=plan.get("optimizer", {}).get("name", "dp_sgd"),
        claim=_claim(plan),
        policy=dict(predicate["policy"]),
        waived=tuple(waived_shown(member) for member in predicate["waived"]),
        ledger=predicate.get("ledger"),
        requester=predicate["requester"],
        created_at=found.created_at,
        not_after=found.not_after,
        key_id=found.key_id,
        envelope_digest=found.envelope_digest,
        leaf=None if place is None else place.leaf_index,
        tree_size=None if place is None else place.tree_size,
        verification=verification(bundle, trusted(services), now, revoked),
        checklist=checklist(predicate, conformant),
        runs=tuple(_run(item) for item in runs),
        issues=issues,
        may_be_approved=found.status is Status.AWAITING_APPROVAL,
    )


def sentence(predicate: Mapping[str, Any], guarantee: Guarantee | None) -> str:
    """The verdict in one sentence; a lower bound is never its answer."""
    codes = [item["code"] for item in predicate["reasons"]]
    by_policy = refused_by_policy(predicate["verdict"], codes)
    match predicate["verdict"]:
        case "certified" if guarantee is not None:
            return f"Certified: {guarantee.words}."
        case "under_noised" if guarantee is not None:
            asked = _asked(predicate["plan"], guarantee)
            return f"Too little noise: only {guarantee.words} is proved, and {asked}."
        case "refused" if guarantee is not None and by_policy:
            return f"Refused by the policy, though {guarantee.words} is proved."
        case "undecided":
            return "Undecided: independent engines contradict each other, and nothing is claimed."
        case _:
            return "Refused: nothing may be claimed about this plan."


def _asked(plan: Mapping[str, Any], guarantee: Guarantee) -> str:
    if guarantee.target_epsilon is not None:
        return f"ε = {guarantee.target_epsilon} is asked"
    claimed = _claim(plan)
    return "more is claimed" if claimed is None else f"ε = {claimed} is claimed"


def agreement(engines: tuple[Engine, ...]) -> str:
    """How the engines agree, in one sentence."""
    if not engines:
        return "No engine was asked: the plan was refused before any accounting."
    if len(engines) == 1:
        return "One engine covers this plan; there is no independent second opinion."
    others = [engine for engine in engines if not engine.decides]
    if all(other.agrees == "meets" for other in others):
        return f"{len(engines)} independent engines agree: their brackets of ε meet."
    return (
        "The engines agree to within the documented accuracy of the second; where brackets do not "
        "meet, the one that decides is ours, which is proved on both sides."
    )


def _guarantee(predicate: Mapping[str, Any]) -> Guarantee | None:
    said = predicate["guarantee"]
    if said is None:
        return None
    return Guarantee(
        epsilon_at_most=_up(said["epsilon"]["upper"]),
        epsilon_at_least=_down(said["epsilon"]["lower"]),
        delta=_up(said["delta"]["upper"]),
        adjacency=ADJACENCIES.get(said["adjacency"], said["adjacency"]),
        unit=UNITS.get(said["unit"], said["unit"]),
        confidence=said.get("confidence"),
        target_epsilon=_shown(said["target"]["epsilon"]),
        target_delta=_shown(said["target"]["delta"]),
        mu=None if said["mu"] is None else _up(said["mu"]),
    )


def _noise(said: Mapping[str, Any]) -> Noise:
    name = said["name"] if "phase" not in said else f"phase {said['phase'] + 1}, {said['name']}"
    return Noise(
        release=name,
        blocks=said["count"],
        given=None if said["given"] is None else _down(said["given"], 7),
        required=None if said["required"] is None else _up(said["required"], 7),
    )


def _engines(predicate: Mapping[str, Any]) -> tuple[Engine, ...]:
    said = predicate["accountants"]
    return tuple(
        Engine(
            name=each["name"],
            version=each["version"],
            at_least=_down(each["epsilon"]["lower"], 8),
            at_most=_up(each["epsilon"]["upper"], 8),
            decides=number == 0,
            agrees="decides" if number == 0 else _meets(said[0]["epsilon"], each["epsilon"]),
        )
        for number, each in enumerate(said)
    )


def _meets(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    apart = float(one["upper"]) < float(other["lower"]) or float(other["upper"]) < float(
        one["lower"]
    )
    return "near" if apart else "meets"


def _reason(said: Mapping[str, Any]) -> ReasonShown:
    return ReasonShown(
        code=said["code"],
        pointer=said.get("pointer", ""),
        message=said["message"],
        remedy=said.get("remedy", ""),
    )


def _claim(plan: Mapping[str, Any]) -> str | None:
    said = (plan.get("claim") or {}).get("epsilon")
    return None if said is None else str(said)


def _place(services: Services, found: StoredCertificate) -> Inclusion | None:
    try:
        return services.log.inclusion_of(found.bundle)
    except LogDamaged:
        return None


def _run(run: Run) -> RunShown:
    outcome = run.outcome or {}
    record = record_said(outcome.get("provenance"))
    return RunShown(
        id=run.id,
        state=run.state,
        steps=outcome.get("steps_charged"),
        record=outcome.get("record"),
        weights=None if record is None else record.subject_digest,
        requested_by=run.requested_by,
        changed_at=run.changed_at,
    )


def _up(text: str, digits: int = DIGITS) -> str:
    return decimal_up(float(text), digits)


def _down(text: str, digits: int = DIGITS) -> str:
    return decimal_down(float(text), digits)


def _shown(text: str | None) -> str | None:
    return None if text is None else f"{float(text):g}"
