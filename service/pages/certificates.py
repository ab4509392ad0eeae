"""``/certificates``: the current issues, searched, filtered and saved as searches."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from affidavit.service.pages.access import Reader
from affidavit.service.pages.certificate_search import (
    CertificateLine,
    CertificateSearch,
    certificate_list,
)
from affidavit.service.pages.forms import SubmittedForm
from affidavit.service.pages.renderers import Rows
from affidavit.service.pages.response import action, page, respond, see_other
from affidavit.service.pages.saved_views import PAGE as PATH
from affidavit.service.pages.saved_views import InvalidSavedView, forget, save, saved_by
from affidavit.service.problems import Problem
from affidavit.service.services import TheServices

MOST_FIELDS = 20

router = APIRouter()


@page(router, PATH)
def certificates(
    request: Request,
    actor: Reader,
    services: TheServices,
    search: Annotated[CertificateSearch, Query()],
) -> Response:
    """A page of the list, with the reader's saved searches."""
    with services.engine.connect() as connection:
        view = certificate_list(connection, search, services.clock.now())
    view = replace(view, views=saved_by(services.engine, actor.name))
    return respond(
        request,
        view,
        template="certificates.html",
        rows=Rows(CertificateLine, view.lines),
    )


@action(router, f"{PATH}/views")
def save_view(actor: Reader, services: TheServices, form: SubmittedForm) -> Response:
    """Save a search under a name."""
    query = _search_query(form.get("query"))
    try:
        save(services.engine, actor.name, form.get("name"), query, services.clock.now())
    except InvalidSavedView as error:
        raise Problem(422, "not_kept", str(error)) from None
    return see_other(f"{PATH}?{query}")


@action(router, f"{PATH}/views/{{view_id}}/forget")
def delete_view(
    actor: Reader, services: TheServices, view_id: str, form: SubmittedForm
) -> Response:
    """Delete one's own saved search."""
    query = _search_query(form.get("query"))
    forget(services.engine, actor.name, view_id)
    return see_other(f"{PATH}?{query}" if query else PATH)


def _search_query(query: str) -> str:
    """``query`` as the page reads it, without its cursor. Raises ``Problem``."""
    try:
        fields = dict(parse_qsl(query, max_num_fields=MOST_FIELDS))
        search = CertificateSearch.model_validate(fields)
    except (ValueError, ValidationError):
        raise Problem(422, "not_a_search", "this is not a search of this page.") from None
    return urlencode(search.filters)
