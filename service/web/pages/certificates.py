"""``/certificates``: the current issues, with search and facets.

The search matches the start of a certificate id or plan digest if the text is hexadecimal, and
otherwise the start of a plan or data set name. Facets narrow the search, and each facet value is
counted with the other facets applied. Only the newest ``MAX_COUNTED`` certificates are counted, so
that the cost of a page does not grow with the table. Pages use cursors. Certificates are sorted
newest first; expired ones by latest expiry, unless the search is by mechanism or requester.

ε bands use the certified upper bound and ignore δ, adjacency and unit: two certificates of one
band are not necessarily comparable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator, Field
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    case,
    func,
    or_,
    select,
)

from affidavit.plan import OptimizerName
from affidavit.service.certificates.issue_status import (
    REJECTED,
    REVOKED,
    SUPERSEDED,
    key_revoked_at,
    same_issue,
    status_at,
)
from affidavit.service.core.database import (
    any_of,
    page_of,
)
from affidavit.service.core.wire_models import QueryModel, Verdict
from affidavit.service.tables.certificates import (
    approvals,
    certificate_facets,
    certificates,
    revocations,
)
from affidavit.service.tables.keys import revoked_keys
from affidavit.service.web.dependencies import TheServices
from affidavit.service.web.pages.access import Reader
from affidavit.service.web.pages.response import (
    page,
    respond,
)
from affidavit.service.web.pages.text import short_id

PATH = "/certificates"
PAGE_SIZE = 50
MAX_COUNTED = 2000
"""The newest certificates that are counted; counts of more have a plus sign."""
EXPIRING_SOON = timedelta(days=30)
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{4,64})")

Band = Literal["to_1", "to_3", "to_8", "above_8", "none"]
Ends = Literal["over", "soon", "later"]
Time = Literal["created_at", "not_after"]
StatusFilter = Literal[
    "active", "awaiting_approval", "expired", "rejected", "revoked", "key_revoked"
]

_EPSILON, _NOT_AFTER = certificates.c.epsilon_upper, certificates.c.not_after
BANDS: dict[Band, tuple[str, ColumnElement[bool]]] = {
    "to_1": ("ε ≤ 1", _EPSILON <= 1.0),
    "to_3": ("1 < ε ≤ 3", and_(_EPSILON > 1.0, _EPSILON <= 3.0)),
    "to_8": ("3 < ε ≤ 8", and_(_EPSILON > 3.0, _EPSILON <= 8.0)),
    "above_8": ("ε > 8", _EPSILON > 8.0),
    "none": ("no ε", _EPSILON.is_(None)),
}
"""The label and the condition of each band."""
ENDS: dict[Ends, str] = {
    "over": "expired",
    "soon": "expires within 30 days",
    "later": "expires later",
}


EMPTY = BeforeValidator(lambda value: None if value == "" else value)
"""Converts an empty form field to None."""


class CertificateSearch(QueryModel):
    """The parameters of the page; unknown ones are refused, not ignored."""

    q: Annotated[str | None, Field(max_length=128), EMPTY] = None
    dataset: Annotated[str | None, Field(max_length=64), EMPTY] = None
    requester: Annotated[str | None, Field(max_length=255), EMPTY] = None
    verdict: Annotated[Verdict | None, EMPTY] = None
    status: Annotated[StatusFilter | None, EMPTY] = None
    epsilon: Annotated[Band | None, EMPTY] = None
    mechanism: Annotated[OptimizerName | None, EMPTY] = None
    ends: Annotated[Ends | None, EMPTY] = None
    cursor: Annotated[str | None, Field(max_length=512), EMPTY] = None

    @property
    def filters(self) -> dict[str, str]:
        """The filters of the list by parameter."""
        values = self.model_dump(exclude_none=True, exclude={"cursor"})
        return {name: str(value) for name, value in values.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateList:
    """A page of the list; ``total`` has a plus sign if not all certificates were counted.

    ``order`` is the column by which the rows are sorted, in descending order.
    """

    order: Time
    certificates: Sequence[Row[Any]]
    total: str
    facets: tuple[dict[str, Any], ...]
    filters: dict[str, str]
    next: str | None
    mechanisms: tuple[str, ...] = get_args(OptimizerName)


def certificate_list(
    connection: Connection, search: CertificateSearch, now: datetime
) -> CertificateList:
    """Return the page of ``search``; raises ``InvalidCursor``."""
    keys = select(revoked_keys.c.key_id).where(revoked_keys.c.since <= now)
    revoked = connection.scalars(keys).all() if search.status == "key_revoked" else ()
    query = page_query(search, now, revoked)
    rows, following = page_of(connection, query, _sort_key(search), search.cursor, PAGE_SIZE)
    unfaceted = search.model_copy(update=dict.fromkeys(_VALUES))
    tally = _tally(connection, tally_query(unfaceted, now, revoked))
    # Few of the newest may match, so matches are counted separately.
    exact = tally
    if tally.is_partial and unfaceted != search:
        exact = _tally(connection, tally_query(search, now, revoked))
    return CertificateList(
        order=_time_column(search),
        certificates=rows,
        total=exact.count(search.filters),
        facets=tuple(_facets(search, tally)),
        filters=search.filters,
        next=following,
    )


def page_query(search: CertificateSearch, now: datetime, revoked: Sequence[str]) -> Select[Any]:
    """Return the query of all pages.

    ``revoked`` are the ids of revoked keys, which the database needs to estimate their rows and to
    choose an index.
    """
    return (
        select(
            *(certificates.c[name] for name in _COLUMNS),
            *certificate_facets.c,
            status_at(now).label("status"),
        )
        .select_from(_join_facets(outer=True))
        .where(*conditions_of(search, now, revoked))
    )


def tally_query(search: CertificateSearch, now: datetime, revoked: Sequence[str]) -> Select[Any]:
    """Return the query that counts the newest by verdict, ε band and validity."""
    newest = (
        select(
            certificates.c.verdict.label("verdict"),
            case(*((inside, band) for band, (_, inside) in BANDS.items())).label("epsilon"),
            case(*((inside, ends) for ends, inside in _validity_conditions(now).items())).label(
                "ends"
            ),
        )
        .select_from(_join_facets(outer=False) if _by_facets(search) else certificates)
        .where(*conditions_of(search, now, revoked))
        .order_by(_sort_key(search)[0].desc())
        .limit(MAX_COUNTED + 1)
        .subquery()
    )
    values = [newest.c[name] for name in _VALUES]
    return select(*values, func.count().label("number")).group_by(*values)


_COLUMNS = (
    *("id", "issue", "untrusted", "name", "dataset", "verdict", "epsilon_upper", "delta"),
    *("adjacency", "plan_digest", "created_at", "not_after"),
)


def _by_facets(search: CertificateSearch) -> bool:
    return search.mechanism is not None or search.requester is not None


def _sort_key(search: CertificateSearch) -> tuple[ColumnElement[Any], ...]:
    """Return the sort key, in the table whose index reads only the shown rows."""
    columns, facets = certificates.c, certificate_facets.c
    if _by_facets(search):
        return facets.created_at, facets.certificate_id, facets.untrusted
    return columns[_time_column(search)], columns.id, columns.untrusted


def _time_column(search: CertificateSearch) -> Time:
    """Return the time column by which the list is sorted."""
    # Expired certificates are old, and rare among the newest.
    expired = search.ends == "over" or search.status == "expired"
    return "not_after" if expired and not _by_facets(search) else "created_at"


def _join_facets(*, outer: bool) -> Any:
    return certificates.join(certificate_facets, same_issue(certificate_facets), isouter=outer)


def conditions_of(
    search: CertificateSearch, now: datetime, revoked: Sequence[str] = ()
) -> list[ColumnElement[bool]]:
    """Return the conditions of the rows that match ``search``; ``revoked`` are key ids."""
    conditions: list[ColumnElement[bool]] = [~SUPERSEDED]
    columns, facets = certificates.c, certificate_facets.c
    for column, value in (
        (columns.verdict, search.verdict),
        (columns.dataset, search.dataset),
        (facets.mechanism, search.mechanism),
        (facets.requester, search.requester),
    ):
        if value is not None:
            conditions.append(column == value)
    if search.q is not None:
        conditions.append(_matches_prefix(search.q.strip()))
    if search.epsilon is not None:
        conditions.append(BANDS[search.epsilon][1])
    if search.ends is not None:
        conditions.append(_validity_conditions(now)[search.ends])
    if search.status is not None:
        conditions += _status_conditions(search.status, now, revoked)
    return conditions


def _matches_prefix(text: str) -> ColumnElement[bool]:
    columns = certificates.c
    if match := _HEX.fullmatch(text):
        start = f"sha256:{match[1]}"
        return or_(*(column.startswith(start) for column in (columns.id, columns.plan_digest)))
    names = (columns.name, columns.dataset)
    return or_(*(column.startswith(text, autoescape=True) for column in names))


def _validity_conditions(now: datetime) -> dict[Ends, ColumnElement[bool]]:
    """Return the condition of each validity."""
    return {
        "over": now > _NOT_AFTER,
        "soon": and_(now <= _NOT_AFTER, now + EXPIRING_SOON > _NOT_AFTER),
        "later": now + EXPIRING_SOON <= _NOT_AFTER,
    }


def _status_conditions(
    status: StatusFilter, now: datetime, revoked: Sequence[str]
) -> list[ColumnElement[bool]]:
    """Return the conditions of a status, equal to ``status_at`` but with an index for each."""
    columns = certificates.c
    is_pending = columns.approvals_given < columns.approvals_required
    undecided = [~REVOKED, ~REJECTED, ~key_revoked_at(now)]
    match status:
        case "revoked":
            return [any_of(columns.id, select(revocations.c.certificate_id)), REVOKED]
        case "rejected":
            rejected = select(approvals.c.certificate_id).where(approvals.c.decision == "reject")
            return [any_of(columns.id, rejected), ~REVOKED, REJECTED]
        case "key_revoked":
            return [columns.key_id.in_(revoked), ~REVOKED, ~REJECTED]
        case "expired":
            return [*undecided, columns.not_after < now]
        case "awaiting_approval":
            return [*undecided, columns.not_after >= now, is_pending]
        case "active":
            return [*undecided, columns.not_after >= now, ~is_pending]


# ---- facets -------------------------------------------------------------------------

_VALUES: dict[str, tuple[str, dict[str, str]]] = {
    "verdict": ("Verdict", {arg: arg.replace("_", "-") for arg in get_args(Verdict)}),
    "epsilon": ("ε", {str(band): text for band, (text, _) in BANDS.items()}),
    "ends": ("Validity", {str(ends): text for ends, text in ENDS.items()}),
}
"""Labels of the counted facets and of their values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tally:
    """Counts by verdict, ε band and validity; ``is_partial`` if not all were counted."""

    numbers: Mapping[tuple[str, ...], int]
    is_partial: bool

    def count(self, chosen: Mapping[str, str]) -> str:
        """Return the number of certificates with the ``chosen`` facet values."""
        number = sum(
            number
            for values, number in self.numbers.items()
            if all(
                chosen.get(name, value) == value
                for name, value in zip(_VALUES, values, strict=True)
            )
        )
        return f"{min(number, MAX_COUNTED):,}" + "+" * self.is_partial


def _tally(connection: Connection, query: Select[Any]) -> _Tally:
    rows = connection.execute(query).all()
    numbers = {tuple(row[:-1]): int(row[-1]) for row in rows}
    return _Tally(numbers=numbers, is_partial=sum(numbers.values()) > MAX_COUNTED)


def _facets(search: CertificateSearch, tally: _Tally) -> Iterator[dict[str, Any]]:
    """Yield the facets with their values and counts."""
    chosen = search.filters
    for name, (label, values) in _VALUES.items():
        choices = [
            {
                "value": value,
                "label": text,
                "count": tally.count({**chosen, name: value}),
                "chosen": chosen.get(name) == value,
            }
            for value, text in values.items()
        ]
        yield {"name": name, "label": label, "choices": choices}


# ---- the page ------------------------------------------------------------------------

router = APIRouter()


MAX_CHOICES = 50
"""The latest issues among which a form lets one choose."""


def certified_choices(
    connection: Connection, dataset: str | None = None
) -> tuple[tuple[str, str], ...]:
    """Return the latest certified plans, of ``dataset`` if one is named: ids, names with dates."""
    condition = certificates.c.verdict == "certified"
    if dataset is not None:
        condition &= certificates.c.dataset == dataset
    return _choices(connection, certificates.c.id, condition)


def refused_choices(connection: Connection) -> tuple[tuple[str, str], ...]:
    """Return the latest refused plans: their digests, and their names with dates."""
    return _choices(connection, certificates.c.plan_digest, certificates.c.verdict == "refused")


def _choices(
    connection: Connection, identity: Column[str], condition: ColumnElement[bool]
) -> tuple[tuple[str, str], ...]:
    columns = (identity.label("identity"), certificates.c.name, certificates.c.created_at)
    query = select(*columns).where(condition).order_by(certificates.c.created_at.desc())
    latest: dict[str, str] = {}
    for row in connection.execute(query.limit(MAX_CHOICES)):
        name = row.name or short_id(row.identity)
        latest.setdefault(row.identity, f"{name}, {row.created_at:%Y-%m-%d}")
    return tuple(latest.items())


@page(router, PATH)
def certificates_page(
    request: Request,
    _: Reader,
    services: TheServices,
    search: Annotated[CertificateSearch, Query()],
) -> Response:
    """List certificates."""
    with services.engine.connect() as connection:
        view = certificate_list(connection, search, services.clock.now())
    return respond(request, view, template="certificates.html")
