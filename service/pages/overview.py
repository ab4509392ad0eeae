"""``/``: what needs somebody, first."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Request, Response

from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.log.audit import snapshot
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import answer, page
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.pages.overview_view import Item, overview_view
from affidavit.service.services import TheServices
from affidavit.service.use_cases.check_readiness import check_readiness

router = APIRouter()


@page(router, "/")
def overview(
    request: Request, actor: Annotated[Actor, page_actor(*Scope)], services: TheServices
) -> Response:
    """The overview, to whoever is known."""
    ready = check_readiness(
        services.engine,
        services.head,
        services.keyring,
        services.sequencer.problem,
        services.log_watch,
    )
    rules = services.policies.rulebook()
    with snapshot(services.engine) as connection:
        view = overview_view(connection, rules, actor, ready.reasons, datetime.now(UTC))
    return answer(
        request, view, template="overview.html", rows=Rows(Item, view.items), title="overview"
    )
