"""The view of one certificate, which its page and technical documentation show.

The numbers of the guarantee are the signed ones, rounded outward. Status, approvals and runs
change after signing and are read from the database.

The checklist follows NIST SP 800-226, which asks more of a claim of differential privacy than its
ε: the privacy unit, whom to trust, how noise is generated, what leaks beside the output. Each item
has one of three marks:

``checked``
    proved by the accounting, verified here, or found in the record of a conforming run;
``declared``
    stated in the plan or left to the trainer, and not verified;
``open``
    not covered by this certificate.

The bundle is verified while the page is rendered, with the steps of ``affidavit verify`` and this
service's own keys. This convinces nobody else, so each step shows the command that repeats it
offline with keys from a source that the reader trusts.

Reference: NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees
(March 2025), the privacy pyramid and its hazards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, Row, select

from affidavit.assessment import explain_guarantee, goal_of, verdict_sentence
from affidavit.certificate import (
    Check,
    brackets_meet,
    checks_of,
    verify,
)
from affidavit.service.certificates.decisions import Issue, history
from affidavit.service.certificates.issue_status import SUPERSEDED
from affidavit.service.certificates.store import StoredCertificate
from affidavit.service.core.wire_models import Status
from affidavit.service.log.reader import with_log_part
from affidavit.service.runs import repository
from affidavit.service.runs.repository import StoredRun
from affidavit.service.tables.certificates import certificates
from affidavit.service.web.dependencies import Services
from affidavit.service.web.pages.runs import read_provenance
from affidavit.service.web.pages.text import (
    ADJACENCIES,
    capitalized,
    decimal,
    round_up,
)
from affidavit.trust import (
    STEPS,
    PublicKey,
    TrustedKeys,
    VerificationError,
    read_keyset,
    statement_in,
)
from affidavit.trust.log import Inclusion

# ---- the signed statement ------------------------------------------------------------


def sentence(predicate: Mapping[str, Any]) -> str:
    """Return the verdict in one sentence."""
    codes = [reason["code"] for reason in predicate["reasons"]]
    guarantee, target, words = predicate["guarantee"], None, None
    if guarantee is not None:
        target = guarantee["target"]["epsilon"]
        words = (
            f"ε ≤ {round_up(guarantee['epsilon']['upper'])} at "
            f"δ = {round_up(guarantee['delta']['upper'])}{_confidence(guarantee)} "
            f"({ADJACENCIES[guarantee['adjacency']]}, per {guarantee['unit']})"
        )
    goal = goal_of(predicate["plan"], None if target is None else decimal(float(target)), codes)
    return verdict_sentence(predicate["verdict"], words, goal, codes)


def _confidence(guarantee: Mapping[str, Any]) -> str:
    confidence = guarantee.get("confidence")
    return "" if confidence is None else f" with confidence {confidence}"


def engines(predicate: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the engines, the decisive one first, each with how it agrees with that one."""
    accountants = predicate["accountants"]
    for number, accountant in enumerate(accountants):
        meets = brackets_meet(accountants[0]["epsilon"], accountant["epsilon"])
        yield accountant, "decides" if not number else "meets" if meets else "near"


Mark = Literal["checked", "declared", "open"]
SAMPLING = frozenset(
    {"sampler_of_the_plan", "cryptographic_generator", "empty_lot_counts", "one_lot_for_all_blocks"}
)
"""Obligations about sampling; all others are about clipping and noise."""
DEPLOYMENT = (
    (
        "Hyperparameters",
        "Were choices made by looking at the data?",
        "Only what the plan lists under extra is counted; other tuning is not.",
    ),
    (
        "Side channels",
        "Do time, memory or logs reveal something?",
        "Time and memory of a run are not bounded. Run records hold no realised lot sizes or "
        "norms; other logs are the trainer's.",
    ),
    (
        "Security and access",
        "Who may read the data and the weights?",
        "Not part of this certificate.",
    ),
    (
        "Data collection",
        "Was the data collected and stored as promised?",
        "Not part of this certificate.",
    ),
    (
        "Utility and bias",
        "Does the noise hurt some groups more?",
        "Not examined: a privacy guarantee does not imply anything about it.",
    ),
)


@dataclass(frozen=True, slots=True)
class Item:
    """One question of the checklist, its answer, its mark and the source of the answer."""

    topic: str
    question: str
    answer: str
    mark: Mark
    by: str


def checklist(predicate: Mapping[str, Any], conformant_run: str | None) -> tuple[Item, ...]:
    """Return the checklist of a statement; ``conformant_run`` is the id of a conforming run."""
    return (
        *_guarantee(predicate),
        *_mechanism(predicate, conformant_run),
        Item(
            "Trust model",
            "Who sees the raw data?",
            "The trainer: this is the central model. Releases are protected, the training "
            "machine is not.",
            "declared",
            "plan",
        ),
        *(Item(*texts, "open", "deployment") for texts in DEPLOYMENT),
    )


def _guarantee(predicate: Mapping[str, Any]) -> Iterator[Item]:
    plan = predicate["plan"]
    proved = predicate["guarantee"] is not None
    # A plan without a guarantee was refused before accounting.
    source: tuple[Mark, str] = ("checked", "accounting") if proved else ("open", "no proof")
    engines = ", ".join(engine["name"] for engine in predicate["accountants"]) or "none"
    yield Item(
        "Privacy parameters",
        "Is ε an upper bound, at which δ?",
        f"ε is bounded from above at the given δ by {engines}." if proved else "No ε is certified.",
        *source,
    )
    dataset = plan["dataset"]
    contributions, sharing = (
        dataset.get(name) for name in ("contributions_per_user", "users_per_record")
    )
    yield Item(
        "Unit of privacy",
        "What does one unit hold?",
        f"One {dataset['unit']}"
        + (f" with at most {contributions} records" if contributions else "")
        + (f", each of up to {sharing} users, which are public" if sharing else "")
        + ". The plan states that the data set consists of such units.",
        "declared",
        "plan",
    )
    adjacency = ADJACENCIES[plan["adjacency"]]
    yield Item(
        "Adjacency",
        "Which data sets count as neighbours?",
        f"{adjacency}, used in every step of the proof."
        if proved
        else f"{adjacency}, according to the plan.",
        *(source if proved else ("declared", "plan")),
    )
    others = "counted by its ledger"
    if predicate.get("ledger") is None:
        others = "not counted: the data set has no budget here"
    yield Item(
        "Composition",
        "Is every release counted?",
        f"All steps and all intermediate models are counted. Other runs on this data set are "
        f"{others}."
        if proved
        else "Nothing was accounted.",
        *source,
    )


def _mechanism(predicate: Mapping[str, Any], run: str | None) -> Iterator[Item]:
    for obligation in sorted(predicate["obligations"], key=lambda o: o["code"] not in SAMPLING):
        by_trainer = obligation["checked_by"] == "trainer"
        source = "trainer, when run" if run is None else f"record of run {run}"
        yield Item(
            "Sampling" if obligation["code"] in SAMPLING else "Clipping and noise",
            obligation["code"].replace("_", " ").capitalize() + ":",
            obligation["text"] + ".",
            "checked" if by_trainer and run is not None else "declared",
            source if by_trainer else "trainer",
        )
    for assumption in predicate["assumptions"]:
        if assumption.startswith("noise is exactly Gaussian"):
            yield Item(
                "Floating-point arithmetic",
                "Can rounding leak?",
                f"{capitalized(assumption)}.",
                "declared",
                "assumption",
            )


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
STATUS_STEP = len(STEPS)
"""The step that checks for revocation."""


def trusted_keys(services: Services, now: datetime) -> TrustedKeys:
    """Return this service's keys at ``now``, with the revocations of the newest keyset.

    A trust policy is for third parties: what it requires of the log and of its witnesses means
    nothing if the service itself says so.
    """
    newest = services.keysets.newest()
    since = {} if newest is None else read_keyset(newest).keyset.revoked_since()
    keys = map(PublicKey.from_record, services.key_records())
    own = tuple(replace(key, revoked_from=since.get(key.key_id)) for key in keys)
    return TrustedKeys(own, policy=None, at=now)


def verification(bundle: bytes, trusted: TrustedKeys, revoked: str | None) -> dict[str, Any]:
    """Verify ``bundle`` with ``trusted`` keys and return the result of each step.

    ``adds`` are the options of a step's command in addition to the basic ones; ``code`` and
    ``remedy`` describe a failure. ``revoked`` is the reason of a revocation in the service's
    records, or None.
    """
    states: dict[int, tuple[State, str]] = {}
    error: VerificationError | None = None
    try:
        result = verify(bundle, trusted)
        if revoked is not None:
            raise VerificationError(STATUS_STEP, "revoked", revoked, "Do not use it.")
    except VerificationError as failure:
        error = failure
        states = dict.fromkeys(range(1, error.step), ("passed", ""))
        states[error.step] = ("failed", error.message)
    else:
        for number, _, detail in result.steps:
            states[number] = ("unchecked" if number in result.unchecked else "passed", detail)
        states[STATUS_STEP] = ("passed", "not revoked, by the records of this service")
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
"""Runs that are shown, newest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateView:
    """A certificate with everything that its page shows.

    ``predicate`` is the signed statement, whose numbers the page rounds outward. ``place`` is the
    place in the log, and ``neighbour`` the id and name of the certificate that the page offers for
    comparison.
    """

    certificate: StoredCertificate
    predicate: Mapping[str, Any]
    sentence: str
    standing: str | None
    meaning: tuple[str, ...]
    engines: tuple[tuple[dict[str, Any], str], ...]
    checks: tuple[Check, ...]
    place: Inclusion | None
    verification: dict[str, Any]
    checklist: tuple[Item, ...]
    runs: tuple[StoredRun, ...]
    issues: tuple[Issue, ...]
    neighbour: Row[Any, Any] | None
    approved_by: tuple[str, ...]

    @property
    def mechanism(self) -> str:
        """The plan's optimiser."""
        return str(self.predicate["plan"].get("optimizer", {}).get("name", "dp_sgd"))

    @property
    def plan_text(self) -> str:
        """The plan as indented JSON."""
        return json.dumps(self.predicate["plan"], indent=2, ensure_ascii=False)

    @property
    def steps_run(self) -> int | None:
        """The charged steps of the latest run that ended."""
        charged = (run.steps.charged for run in self.runs)
        return next((steps for steps in charged if steps is not None), None)

    def weights(self, run: StoredRun) -> str | None:
        """Return the digest of the weights that a run released."""
        record = read_provenance(run.provenance)
        return None if record is None else record.subject_digest


def certificate_view(
    services: Services, certificate: StoredCertificate, now: datetime
) -> CertificateView:
    """Return the view of ``certificate``."""
    predicate = statement_in(certificate.bundle)["predicate"]
    with services.engine.connect() as connection:
        runs, _ = repository.page(connection, None, MAX_RUNS, certificate_id=certificate.id)
        neighbour = _neighbour(connection, certificate)
    place = services.log.part_of(certificate.bundle)
    issues = tuple(history(services.engine, certificate.id))
    unusable = explain_unusable(certificate, issues)
    revoked = unusable if certificate.status is Status.REVOKED else None
    bundle, guarantee = with_log_part(certificate.bundle, place), predicate["guarantee"]
    conformant = next((run.id for run in runs if run.state == "settled"), None)
    return CertificateView(
        certificate=certificate,
        predicate=predicate,
        sentence=sentence(predicate),
        standing=unusable,
        meaning=() if guarantee is None else explain_guarantee(guarantee),
        engines=tuple(engines(predicate)),
        checks=checks_of(predicate),
        place=place,
        verification=verification(bundle, trusted_keys(services, now), revoked),
        checklist=checklist(predicate, conformant),
        runs=tuple(runs),
        issues=issues,
        neighbour=neighbour,
        approved_by=_approved_by(certificate, issues),
    )


def _neighbour(connection: Connection, certificate: StoredCertificate) -> Row[Any, Any] | None:
    """Return the latest other certificate with the same name, or else the same data set.

    It has an ε and the same adjacency.
    """
    table = certificates.c
    for column, value in ((table.name, certificate.name), (table.dataset, certificate.dataset)):
        query = (
            select(table.id, table.name)
            .where(column == value, table.id != certificate.id, table.epsilon_upper.is_not(None))
            .where(~SUPERSEDED, table.adjacency == certificate.adjacency)
            .order_by(table.created_at.desc())
            .limit(1)
        )
        if (row := connection.execute(query).first()) is not None:
            return row
    return None


def _approved_by(certificate: StoredCertificate, issues: tuple[Issue, ...]) -> tuple[str, ...]:
    """Return who approved the issue in force or the pending one."""
    return tuple(
        decision.approver
        for issue in issues
        if (issue.issue, issue.untrusted) == (certificate.issue, certificate.untrusted)
        for decision in issue.approvals.decisions
        if decision.decision == "approve"
    )


def explain_unusable(certificate: StoredCertificate, issues: tuple[Issue, ...]) -> str | None:
    """Return why the certificate may not be used and what to do, or None if it may."""
    match certificate.status:
        case Status.AWAITING_APPROVAL:
            approvals, required = certificate.approvals_given, certificate.approvals_required
            return f"It has {approvals} of {required} required approvals."
        case Status.EXPIRED:
            return f"It expired on {certificate.not_after:%Y-%m-%d}; submit the plan again."
        case Status.KEY_REVOKED:
            return "The key that signed it was revoked; submit the plan again."
        case Status.SUPERSEDED:
            return "A later issue supersedes it."
        case Status.REVOKED:
            return _explain_decision(
                issues, "revocation", "Revoked by {revoked_by}: {reason} ({code})."
            )
        case Status.REJECTED:
            return _explain_decision(issues, "rejection", "Rejected by {approver}: {comment}")
        case Status.ACTIVE:
            return None


def _explain_decision(issues: tuple[Issue, ...], kind: str, template: str) -> str:
    for issue in issues:
        rejections = (item for item in issue.approvals.decisions if item.decision == "reject")
        decision = issue.revocation if kind == "revocation" else next(rejections, None)
        if decision is not None:
            return template.format(**{"comment": "no reason was given", **decision.model_dump()})
    return template.split(" by ", maxsplit=1)[0] + "."
