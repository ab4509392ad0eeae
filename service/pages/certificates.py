"""``/certificates``: the current issues, searched, narrowed and kept as views."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from affidavit.service.cursors import InvalidCursor
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import action, answer, page, see_other
from affidavit.service.pages.certificate_search import (
    CertificateLine,
    Wanted,
    certificate_list,
    with_views,
)
from affidavit.service.pages.forms import TheForm
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.pages.saved_views import NotKept, SavedViews
from affidavit.service.problems import Problem, invalid_cursor
from affidavit.service.services import Services, TheServices

PATH = "/certificates"
MOST_FIELDS = 20

router = APIRouter()
Reader = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT)]
"""Whoever may see certificates; the same actors as for the API."""


@page(router, PATH)
def certificates(
    request: Request, actor: Reader, services: TheServices, wanted: Annotated[Wanted, Query()]
) -> Response:
    """A page of the list, with what the reader keeps."""
    try:
        with services.engine.connect() as connection:
            found = certificate_list(connection, wanted, datetime.now(UTC))
    except InvalidCursor as error:
        raise invalid_cursor(error) from None
    view = with_views(found, _views(services).of(actor.name))
    return answer(
        request,
        view,
        template="certificates.html",
        rows=Rows(CertificateLine, view.lines),
        fragment="results",
    )


@action(router, f"{PATH}/views")
def keep_view(actor: Reader, services: TheServices, form: TheForm) -> Response:
    """Keep a search under a name."""
    query = _searched(form.get("query"))
    try:
        _views(services).keep(actor.name, form.get("name"), query, datetime.now(UTC))
    except NotKept as error:
        raise Problem(422, "not_kept", str(error)) from None
    return see_other(f"{PATH}?{query}")


@action(router, f"{PATH}/views/{{view_id}}/forget")
def forget_view(actor: Reader, services: TheServices, view_id: str, form: TheForm) -> Response:
    """Forget one of one's own."""
    query = _searched(form.get("query"))
    _views(services).forget(actor.name, view_id)
    return see_other(f"{PATH}?{query}" if query else PATH)


def _views(services: Services) -> SavedViews:
    return SavedViews(services.engine, PATH)


def _searched(query: str) -> str:
    """``query`` as the page reads it, without its place; raises the problem of any other."""
    try:
        wanted = Wanted.model_validate(dict(parse_qsl(query, max_num_fields=MOST_FIELDS)))
    except (ValueError, ValidationError):
        raise Problem(422, "not_a_search", "this is not a search of this page.") from None
    return urlencode(wanted.narrowing)
