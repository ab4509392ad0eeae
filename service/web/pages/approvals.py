"""``/approvals``: certificates that await approval, and the form for a decision.

Approvers see both guarantees and the changed fields of the plan, compared with the last usable
certificate of the same plan name and data set, if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import Connection, select

from affidavit.plan import find_changes, plan_from
from affidavit.service.certificates.decisions import (
    DecisionRefused,
    DecisionRequest,
    approve,
    history,
)
from affidavit.service.certificates.issue_status import REVOKED, SUPERSEDED
from affidavit.service.certificates.store import StoredCertificate, current, get
from affidavit.service.core.database import page_of
from affidavit.service.core.errors import MalformedRequest
from affidavit.service.core.wire_models import Status
from affidavit.service.tables.certificates import certificates, requests
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.pages.access import Approver, Reader
from affidavit.service.web.pages.certificates import CertificateSearch, conditions_of
from affidavit.service.web.pages.forms import SubmittedForm
from affidavit.service.web.pages.plan_form import label_of
from affidavit.service.web.pages.response import (
    action,
    page,
    respond,
    see_other,
)
from affidavit.service.web.pages.text import messages_of, round_up
from affidavit.service.web.routing import CertificateId
from affidavit.trust import statement_in

router = APIRouter()

AWAITING = CertificateSearch(status="awaiting_approval")
COLUMNS = (
    *("id", "untrusted", "name", "dataset", "verdict", "epsilon_upper", "delta", "adjacency"),
    *("approvals_given", "approvals_required", "created_at", "not_after"),
)
PAGE_SIZE = 50
MAX_REQUESTERS = 5
MAX_VALUE_LENGTH = 2000
"""Longest value on the page, in characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldChange:
    """A changed field with its label; a value is None if the plan lacks the field."""

    field: str
    pointer: str
    before: str | None
    after: str | None


@page(router, "/approvals")
def approvals(
    request: Request,
    _: Reader,
    services: TheServices,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """List certificates that await approval, newest first."""
    with services.engine.connect() as connection:
        view = pending(connection, services.clock.now(), cursor)
    return respond(request, view, template="approvals.html")


@page(router, "/approvals/{certificate_id}")
def approval(
    request: Request, _: Reader, services: TheServices, certificate_id: CertificateId
) -> Response:
    """Show a certificate with its changes, and the form for a decision if it is pending."""
    return _respond(request, services, certificate_id)


@action(router, "/approvals/{certificate_id}")
def decide(
    request: Request,
    actor: Approver,
    services: TheServices,
    certificate_id: CertificateId,
    form: SubmittedForm,
) -> Response:
    """Approve or reject the envelope, with the same function as the API."""
    fields = {name: form.get(name) for name in ("decision", "envelope", "comment")}
    try:
        decision = DecisionRequest.from_data(fields)
        about = (certificate_id, decision, actor, services.clock.now())
        _, issued = approve(services.engine, services.keyring, *about)
    except MalformedRequest as error:
        wrong, status = messages_of(error.reasons), 422
    except DecisionRefused as error:
        wrong, status = f"{error} ({error.code})", error.status
    else:
        done = "issued" if issued else "approved"
        if decision.decision == "reject":
            done = "rejected"
        return see_other(f"/approvals/{certificate_id}", done=done)
    comment = form.get("comment")
    return _respond(request, services, certificate_id, status, wrong=wrong, comment=comment)


def pending(connection: Connection, now: datetime, cursor: str | None) -> dict[str, Any]:
    """Return certificates that await approval, newest first; raises ``InvalidCursor``."""
    sort_key = (certificates.c.created_at, certificates.c.id, certificates.c.untrusted)
    query = select(*(certificates.c[name] for name in COLUMNS)).where(*conditions_of(AWAITING, now))
    rows, following = page_of(connection, query, sort_key, cursor, PAGE_SIZE)
    return {"certificates": rows, "next": following}


def approval_request(connection: Connection, certificate_id: str) -> dict[str, Any]:
    """Return the details of a certificate that a decision depends on; raises ``Problem``."""
    certificate = get(connection, certificate_id)
    base = _previous_certificate(connection, certificate)
    predicate = statement_in(certificate.bundle)["predicate"]
    return {
        "certificate": certificate,
        "guarantee": _guarantee(certificate),
        "base": None if base is None else _guarantee(base),
        "guarantees": () if base is None else _compared(_guarantee(base), _guarantee(certificate)),
        "changes": () if base is None else plan_changes(base, certificate),
        "requesters": _requesters(connection, certificate),
        "policy": f"{predicate['policy']['name']} v{predicate['policy']['version']}",
        "waivers": tuple(f"{w['code']}: {w['waiver']['reason']}" for w in predicate["waived"]),
        "warnings": tuple(warning["message"] for warning in predicate["warnings"]),
    }


def plan_changes(before: StoredCertificate, after: StoredCertificate) -> tuple[FieldChange, ...]:
    """Return the fields in which the plans of two certificates differ."""
    first, second = (
        plan_from(statement_in(certificate.bundle)["predicate"]["plan"])
        for certificate in (before, after)
    )
    return tuple(
        FieldChange(
            field=label_of(change.pointer), pointer=change.pointer, before=before, after=after
        )
        for change in find_changes(first, second)
        for before, after in [change.texts(MAX_VALUE_LENGTH)]
    )


def _previous_certificate(
    connection: Connection, certificate: StoredCertificate
) -> StoredCertificate | None:
    """Return the last usable certificate of the same plan name and data set before this one."""
    if certificate.name is None:
        return None
    query = (
        select(certificates.c.id)
        .where(
            certificates.c.name == certificate.name,
            certificates.c.dataset == certificate.dataset,
            certificates.c.id != certificate.id,
            certificates.c.created_at < certificate.created_at,
            certificates.c.verdict == "certified",
            certificates.c.approvals_given >= certificates.c.approvals_required,
            ~SUPERSEDED,
            ~REVOKED,
        )
        .order_by(certificates.c.created_at.desc())
        .limit(1)
    )
    base = connection.execute(query).scalar()
    return None if base is None else current(connection, base)


def _guarantee(certificate: StoredCertificate) -> dict[str, Any]:
    """Return the parts of a certificate's guarantee that are compared."""
    predicate = statement_in(certificate.bundle)["predicate"]
    noise = (predicate.get("noise_multiplier") or {}).get("joint")
    return {
        "id": certificate.id,
        "verdict": certificate.verdict,
        "epsilon": round_up(certificate.epsilon_upper),
        "delta": round_up(certificate.delta),
        "adjacency": certificate.adjacency,
        "unit": predicate["plan"]["dataset"]["unit"],
        "noise": None if noise is None else f"{float(noise):.6g}",
        "created_at": certificate.created_at,
    }


COMPARED = (
    ("epsilon", "ε ≤", -1),
    ("delta", "δ", -1),
    ("adjacency", "Adjacency", 0),
    ("unit", "Privacy unit", 0),
    ("noise", "Joint σ", 1),
)
"""The compared fields of a guarantee, their labels, and whether more is better."""


def _compared(before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, str], ...]:
    """Return the fields that differ; ``tone`` is good or bad where one value is better.

    ε is comparable only at one δ, adjacency and unit.
    """
    comparable = all(before[name] == after[name] for name in ("adjacency", "unit"))
    lines = []
    for name, label, sign in COMPARED:
        old, new = before[name], after[name]
        if old == new:
            continue
        tone = ""
        same_delta = name != "epsilon" or before["delta"] == after["delta"]
        if sign and comparable and same_delta and None not in (old, new):
            tone = "good" if sign * (float(new) - float(old)) > 0 else "bad"
        texts = {"before": old or "none", "after": new or "none"}
        lines.append({"field": label, "tone": tone, **texts})
    return tuple(lines)


def _requesters(connection: Connection, certificate: StoredCertificate) -> tuple[str, ...]:
    query = (
        select(requests.c.requester)
        .where(requests.c.certificate_id == certificate.id)
        .distinct()
        .limit(MAX_REQUESTERS)
    )
    return tuple(sorted(connection.execute(query).scalars()))


def _respond(
    request: Request, services: Services, certificate_id: str, status: int = 200, **form: Any
) -> Response:
    """Show a pending approval, with the submitted ``form`` and its error."""
    with services.engine.connect() as connection:
        approval = approval_request(connection, certificate_id)
    is_open = approval["certificate"].status is Status.AWAITING_APPROVAL
    issues = tuple(history(services.engine, certificate_id))
    view = {"request": approval, "issues": issues, "open": is_open, "wrong": None, "comment": ""}
    view |= form
    return respond(request, view, template="approval.html", status=status)
