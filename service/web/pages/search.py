"""``/search``: objects and pages whose name or id starts with a text.

A single exact hit is opened at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import Connection, select

from affidavit.service.core.clock import now_of
from affidavit.service.identity.actor import Actor
from affidavit.service.policies.policy_set import PolicySet
from affidavit.service.tables.ledger import ledgers, reservations
from affidavit.service.tables.runs import run_leases, runs
from affidavit.service.web.dependencies import TheServices
from affidavit.service.web.pages.access import Anyone
from affidavit.service.web.pages.certificates import CertificateSearch, certificate_list
from affidavit.service.web.pages.response import (
    page,
    respond,
    see_other,
)
from affidavit.service.web.pages.templating import GROUPS, may_open
from affidavit.service.web.pages.text import round_up

router = APIRouter()

MAX_HITS = 10
"""Hits of each kind."""
MAX_TEXT_LENGTH = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """An object with its page; ``whole`` if the text is its full name or id."""

    kind: str
    path: str
    label: str
    detail: str
    whole: bool


@page(router, "/search")
def search(
    request: Request,
    actor: Anyone,
    services: TheServices,
    q: Annotated[str, Query(max_length=MAX_TEXT_LENGTH)] = "",
) -> Response:
    """Search certificates, data sets, runs, policies and pages that start with ``q``."""
    text = q.strip()
    hits: tuple[Hit, ...] = ()
    if text:
        rules = services.policies.policy_set()
        with services.engine.connect() as connection:
            hits = tuple(hits_of(connection, rules, actor, text))
    exact = [hit for hit in hits if hit.whole]
    if len(hits) == 1 or len(exact) == 1:
        return see_other((exact or hits)[0].path)
    view = {"text": text, "hits": hits}
    return respond(request, view, template="search.html")


def hits_of(connection: Connection, rules: PolicySet, actor: Actor, text: str) -> Iterator[Hit]:
    """Yield the hits that ``actor`` may see."""
    for kind, path, name, detail in _find_all(connection, rules, actor, text):
        whole = text in (name, path.rsplit("/", 1)[-1])
        yield Hit(kind=kind, path=path, label=name, detail=detail, whole=whole)


def _find_all(
    connection: Connection, rules: PolicySet, actor: Actor, text: str
) -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, path, name and detail of each hit."""
    if may_open(actor, "/certificates"):
        listed = certificate_list(connection, CertificateSearch(q=text), now_of(connection))
        for line in listed.certificates[:MAX_HITS]:
            epsilon = round_up(line.epsilon_upper)
            bound = "" if epsilon is None else f"ε ≤ {epsilon}, "
            detail = f"{line.verdict.replace('_', '-')}, {bound}{line.created_at:%Y-%m-%d}"
            yield "Certificate", f"/certificates/{line.id}", line.name or line.id, detail
    budgets = (
        select(ledgers.c.dataset)
        .where(ledgers.c.dataset.startswith(text, autoescape=True))
        .group_by(ledgers.c.dataset)
        .order_by(ledgers.c.dataset)
    )
    for name in connection.scalars(budgets.limit(MAX_HITS)):
        yield "Data set", f"/datasets/{name}", name, "budget"
    matching = (
        select(runs.c.id, run_leases.c.state, reservations.c.name)
        .join(run_leases, run_leases.c.run_id == runs.c.id)
        .join(reservations, reservations.c.id == runs.c.reservation_id)
        .where(runs.c.id.startswith(text.lower(), autoescape=True))
        .order_by(runs.c.id)
    )
    for row in connection.execute(matching.limit(MAX_HITS)):
        named = f"{row.name} {row.id[:8]}" if row.name else row.id
        yield "Run", f"/runs/{row.id}", named, row.state
    if may_open(actor, "/policies"):
        for policy in rules.policies.values():
            if policy.name.startswith(text):
                path = f"/policies/{policy.name}/{policy.version}"
                yield "Policy", path, policy.name, f"version {policy.version}, active"
    for place in (place for group in GROUPS for place in group.places):
        if place.label.lower().startswith(text.lower()) and may_open(actor, place.path):
            yield "Page", place.path, place.label, ""
