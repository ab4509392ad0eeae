"""One certificate as its page shows it.

The numbers of the guarantee are the signed ones, rounded outward. What changes after signing,
its status, approvals and runs, is read from the database at the same time.

The bundle is verified while the page is rendered: each step passed, failed or was not reached.
It is the verification of ``affidavit verify``, with this service's own keys, so it convinces
nobody else: every step comes with the command that repeats it offline with keys from a source
that the reader trusts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, select

from affidavit.certificate import (
    STEPS,
    Approvals,
    PublicKey,
    VerificationError,
    read_keyset,
    verify,
)
from affidavit.service.certificate_store import StoredCertificate
from affidavit.service.certificate_tables import certificates
from affidavit.service.dependencies import Services
from affidavit.service.lifecycle.decisions import history
from affidavit.service.lifecycle.issuance import statement_of
from affidavit.service.lifecycle.models import Issue
from affidavit.service.lifecycle.status import SUPERSEDED, Status
from affidavit.service.log.reader import joined
from affidavit.service.pages.response import view_of
from affidavit.service.pages.runs import read_provenance
from affidavit.service.pages.statement import (
    Engine,
    Guarantee,
    Item,
    Noise,
    agreement,
    checklist,
    claim_of,
    engines_of,
    guarantee_of,
    noise_of,
    sentence,
)
from affidavit.service.pages.text import down, up
from affidavit.service.runs import repository
from affidavit.service.runs.repository import StoredRun

# ---- verification --------------------------------------------------------------------

State = Literal["passed", "failed", "unchecked", "not_reached"]
VERIFY = "affidavit verify bundle.json --keys keys.json --status status.json"
OPTIONS: dict[int, str] = {
    7: " --plan plan.yaml",
    10: " --require-log",
    11: " --require-log",
    12: " --require-log",
    13: " --require-status",
}
"""Options that make the command check a step more strictly."""
STATUS = len(STEPS)
"""The step that checks for revocation."""


def trusted_keys(services: Services) -> tuple[PublicKey, ...]:
    """This service's keys, with the revocations of the newest keyset."""
    newest = services.keysets.newest()
    since = {} if newest is None else read_keyset(newest).keyset.revoked_since()
    keys = map(PublicKey.from_record, services.key_records())
    return tuple(replace(key, revoked_from=since.get(key.key_id)) for key in keys)


def verification(
    bundle: bytes, trusted: Iterable[PublicKey], now: datetime, revoked: str | None
) -> dict[str, Any]:
    """``bundle`` verified with ``trusted`` keys at ``now``.

    ``adds`` are the options of a step's command beyond those of the basic one; ``code`` and
    ``remedy`` say why one failed. ``revoked`` says why it was revoked, if it was: this service
    knows from its own records what a status list tells others.
    """
    states: dict[int, tuple[State, str]] = {}
    error: VerificationError | None = None
    try:
        result = verify(bundle, trusted, now=now)
        if revoked is not None:
            raise VerificationError(STATUS, "revoked", revoked, "Do not use it.")
    except VerificationError as failure:
        error = failure
        states = dict.fromkeys(range(1, error.step), ("passed", ""))
        states[error.step] = ("failed", error.message)
    else:
        for number, _, detail in result.steps:
            states[number] = ("unchecked" if number in result.unchecked else "passed", detail)
        states[STATUS] = ("passed", "not revoked, by the records of this service")
    return {
        "passed": error is None,
        "steps": tuple(
            {
                "number": number,
                "name": name,
                "state": state,
                "detail": detail,
                "command": VERIFY + OPTIONS.get(number, ""),
                "adds": OPTIONS.get(number, "").strip(),
            }
            for number, name in enumerate(STEPS, 1)
            for state, detail in [states.get(number, ("not_reached", ""))]
        ),
        "code": None if error is None else error.code,
        "remedy": None if error is None else error.remedy,
    }


# ---- the view ------------------------------------------------------------------------

MAX_RUNS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run of this certificate, and the weights that it released."""

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
    proof: tuple[str, ...]
    """The statements of the signed proof."""
    groups: tuple[dict[str, Any], ...]
    agreement: str
    reasons: tuple[dict[str, Any], ...]
    warnings: tuple[dict[str, str], ...]
    plan: dict[str, Any]
    plan_digest: str
    dataset: str | None
    mechanism: str
    claim: str | None
    policy: dict[str, Any]
    waived: tuple[dict[str, Any], ...]
    ledger: dict[str, Any] | None
    requester: str
    created_at: datetime
    not_after: datetime
    key_id: str
    envelope_digest: str
    leaf: int | None
    tree_size: int | None
    verification: dict[str, Any]
    checklist: tuple[Item, ...]
    runs: tuple[RunView, ...]
    issues: tuple[Issue, ...]
    may_be_approved: bool
    neighbour: dict[str, Any] | None
    """The certificate that this one is compared with first: its id and name."""
    approved_by: tuple[str, ...]
    approvals_required: int

    @property
    def plan_text(self) -> str:
        """The plan as indented JSON."""
        return json.dumps(self.plan, indent=2, ensure_ascii=False)

    @property
    def steps_run(self) -> int | None:
        """The steps that the latest run which ended was charged."""
        return next((run.steps for run in self.runs if run.steps is not None), None)


def certificate_view(
    services: Services, certificate: StoredCertificate, now: datetime
) -> CertificateView:
    """The page of ``certificate``."""
    predicate = statement_of(certificate)["predicate"]
    with services.engine.connect() as connection:
        runs, _ = repository.page(connection, None, MAX_RUNS, certificate_id=certificate.id)
        neighbour = _neighbour(connection, certificate)
    place = services.log.part_of(certificate.bundle)
    plan = predicate["plan"]
    issues = tuple(history(services.engine, certificate.id))
    unusable = standing(certificate, issues)
    revoked = unusable if certificate.status is Status.REVOKED else None
    bundle = joined(certificate.bundle, place)
    guarantee = guarantee_of(predicate)
    engines = engines_of(predicate)
    conformant = next((run.id for run in runs if run.state == "settled"), None)
    return view_of(
        CertificateView,
        certificate,
        sentence=sentence(predicate, guarantee),
        standing=unusable,
        guarantee=guarantee,
        joint_noise=down(predicate["noise_multiplier"]["joint"]),
        noise=tuple(map(noise_of, predicate["noise_multiplier"]["releases"])),
        sampling=tuple(predicate["sampling"]),
        strategies=tuple(predicate["strategies"]),
        engines=engines,
        proof=tuple((predicate.get("proof") or {}).get("statements", ())),
        groups=tuple(
            {**bound, "epsilon_at_most": up(bound["epsilon"]["upper"])}
            for bound in predicate.get("groups", ())
        ),
        agreement=agreement(engines),
        reasons=tuple({"pointer": "", "remedy": "", **why} for why in predicate["reasons"]),
        warnings=tuple(predicate["warnings"]),
        plan=plan,
        mechanism=plan.get("optimizer", {}).get("name", "dp_sgd"),
        claim=claim_of(plan),
        policy=dict(predicate["policy"]),
        waived=tuple(map(_waived, predicate["waived"])),
        ledger=predicate.get("ledger"),
        requester=predicate["requester"],
        leaf=None if place is None else place.leaf_index,
        tree_size=None if place is None else place.tree_size,
        verification=verification(bundle, trusted_keys(services), now, revoked),
        checklist=checklist(predicate, conformant),
        runs=tuple(map(_run, runs)),
        issues=issues,
        neighbour=neighbour,
        may_be_approved=certificate.status is Status.AWAITING_APPROVAL,
        approved_by=_approved_by(certificate, predicate, issues),
    )


def _neighbour(
    connection: Connection, certificate: StoredCertificate
) -> dict[str, str | None] | None:
    """The latest other certificate of the same name, else data set, in the same adjacency."""
    table = certificates.c
    for column, value in ((table.name, certificate.name), (table.dataset, certificate.dataset)):
        query = (
            select(table.id, table.name)
            .where(column == value, table.id != certificate.id, table.epsilon_upper.is_not(None))
            .where(~SUPERSEDED, table.adjacency == certificate.adjacency)
            .order_by(table.created_at.desc())
            .limit(1)
        )
        if row := connection.execute(query).mappings().first():
            return {"id": row["id"], "name": row["name"]}
    return None


def _approved_by(
    certificate: StoredCertificate, predicate: Mapping[str, Any], issues: tuple[Issue, ...]
) -> tuple[str, ...]:
    """Who approved: the signed approvals, or those that a pending issue has so far."""
    if signed := tuple(approval.name for approval in Approvals.of(predicate).given):
        return signed
    return tuple(
        decision.approver
        for issue in issues
        if (issue.issue, issue.untrusted) == (certificate.issue, certificate.untrusted)
        for decision in issue.approvals.decisions
        if decision.decision == "approve"
    )


def standing(certificate: StoredCertificate, issues: tuple[Issue, ...]) -> str | None:
    """Why the certificate may not be used, and what to do; None if it may."""
    match certificate.status:
        case Status.AWAITING_APPROVAL:
            given, required = certificate.approvals_given, certificate.approvals_required
            return f"It has {given} of {required} required approvals."
        case Status.EXPIRED:
            return f"It expired on {certificate.not_after:%Y-%m-%d}; submit the plan again."
        case Status.KEY_REVOKED:
            return "The key that signed it was revoked; submit the plan again."
        case Status.SUPERSEDED:
            return "A later issue supersedes it."
        case Status.REVOKED:
            return _because(issues, "revocation", "Revoked by {revoked_by}: {reason} ({code}).")
        case Status.REJECTED:
            return _because(issues, "rejection", "Rejected by {approver}: {comment}")
        case Status.ACTIVE:
            return None


def _because(issues: tuple[Issue, ...], what: str, words: str) -> str:
    for issue in issues:
        rejections = (each for each in issue.approvals.decisions if each.decision == "reject")
        decision = issue.revocation if what == "revocation" else next(rejections, None)
        if decision is not None:
            return words.format(**{"comment": "no reason was given", **decision.model_dump()})
    return words.split(" by ", maxsplit=1)[0] + "."


def _waived(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule of the policy that this certificate breaks with a waiver."""
    waiver = rule["waiver"]
    terms = {name: waiver[name] for name in ("reason", "owner", "granted_by", "expires")}
    return {"code": rule["code"], "message": rule["message"], "waiver": waiver["id"], **terms}


def _run(run: StoredRun) -> RunView:
    outcome = run.outcome or {}
    record = read_provenance(outcome.get("provenance"))
    return view_of(
        RunView,
        run,
        steps=outcome.get("steps_charged"),
        record=outcome.get("record"),
        weights=None if record is None else record.subject_digest,
    )
