"""What the list of certificates shows: a search, its facets and their counts.

A search is by beginnings: of a certificate's id or its plan's digest where it is hexadecimal,
else of a plan's or data set's name. Facets narrow it further, and each value of a facet is
counted with the other facets as they are. Only the newest ``COUNTED`` are counted, so that a page
costs the same however many certificates there are; pages are cut by place. The newest stand first,
and of those that have ended the last to end; where a team or a mechanism is asked for, the newest.

ε bands are by the certified upper bound and say nothing about δ, adjacency or unit: two
certificates of one band may not mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import isfinite
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    and_,
    case,
    func,
    or_,
    select,
    tuple_,
)

from affidavit.accountants import decimal_up
from affidavit.plan import OptimizerName
from affidavit.service.cursors import cursor_at, read_cursor
from affidavit.service.keysets.keyset_tables import revoked_keys
from affidavit.service.lifecycle.lifecycle_tables import approvals, revocations
from affidavit.service.lifecycle.standing import (
    REJECTED,
    REVOKED,
    SUPERSEDED,
    Status,
    key_revoked_at,
    status_at,
)
from affidavit.service.pages.one_of import one_of
from affidavit.service.pages.saved_views import SavedView
from affidavit.service.tables import certificate_facets, certificates

LISTED = 50
COUNTED = 2000
"""The newest certificates that are counted; where there are more the page says so."""
SOON = timedelta(days=30)
DIGITS = 6
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{4,64})")
_CURSOR = (str, bool)

Verdict = Literal["certified", "under_noised", "refused", "undecided"]
Band = Literal["to_1", "to_3", "to_8", "above_8", "none"]
Ends = Literal["over", "soon", "later"]
Time = Literal["created_at", "not_after"]
Standing = Literal["active", "awaiting_approval", "expired", "rejected", "revoked", "key_revoked"]

BANDS: dict[Band, str] = {
    "to_1": "ε ≤ 1",
    "to_3": "1 < ε ≤ 3",
    "to_8": "3 < ε ≤ 8",
    "above_8": "ε > 8",
    "none": "no ε is claimed",
}
ENDS: dict[Ends, str] = {
    "over": "has ended",
    "soon": "ends within 30 days",
    "later": "ends later",
}
_LIMITS: dict[Band, tuple[float, float]] = {
    "to_1": (-1.0, 1.0),
    "to_3": (1.0, 3.0),
    "to_8": (3.0, 8.0),
    "above_8": (8.0, float("inf")),
}


def _nothing(value: Any) -> Any:
    """A field of a form that was left empty is none."""
    return None if value == "" else value


class Wanted(BaseModel):
    """The parameters of the page; one that is not known is refused, not passed over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    q: Annotated[Annotated[str, Field(max_length=128)] | None, BeforeValidator(_nothing)] = None
    dataset: Annotated[Annotated[str, Field(max_length=64)] | None, BeforeValidator(_nothing)] = (
        None
    )
    requester: Annotated[
        Annotated[str, Field(max_length=255)] | None, BeforeValidator(_nothing)
    ] = None
    verdict: Annotated[Verdict | None, BeforeValidator(_nothing)] = None
    standing: Annotated[Standing | None, BeforeValidator(_nothing)] = None
    epsilon: Annotated[Band | None, BeforeValidator(_nothing)] = None
    mechanism: Annotated[OptimizerName | None, BeforeValidator(_nothing)] = None
    ends: Annotated[Ends | None, BeforeValidator(_nothing)] = None
    cursor: Annotated[Annotated[str, Field(max_length=512)] | None, BeforeValidator(_nothing)] = (
        None
    )

    @property
    def narrowing(self) -> dict[str, str]:
        """What narrows the list, by the name of its parameter."""
        given = self.model_dump(exclude_none=True, exclude={"cursor"})
        return {name: str(value) for name, value in given.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateLine:
    """A certificate in one line; ε and δ are decimals rounded up, ε an upper bound in nats."""

    id: str
    issue: int
    untrusted: bool
    name: str | None
    dataset: str | None
    verdict: str
    status: Status
    epsilon_at_most: str | None
    delta: str | None
    adjacency: str
    mechanism: str | None
    requester: str | None
    plan_digest: str
    created_at: datetime
    not_after: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A value of a facet; ``count`` has a plus where there are more than were counted."""

    value: str
    label: str
    count: str
    chosen: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Facet:
    """A facet with its values."""

    name: str
    label: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateList:
    """A page of the list; ``total`` has a plus where there are more than were counted.

    ``order`` is the time by which the lines stand, the latest first.
    """

    order: Time
    lines: tuple[CertificateLine, ...]
    total: str
    facets: tuple[Facet, ...]
    wanted: dict[str, str]
    next: str | None
    mechanisms: tuple[str, ...] = get_args(OptimizerName)
    views: tuple[SavedView, ...] = ()


def certificate_list(connection: Connection, wanted: Wanted, now: datetime) -> CertificateList:
    """The page that is ``wanted``; raises ``InvalidCursor``."""
    keys = select(revoked_keys.c.key_id).where(revoked_keys.c.since <= now)
    revoked = connection.scalars(keys).all() if wanted.standing == "key_revoked" else ()
    rows = connection.execute(page_query(wanted, now, revoked)).mappings().all()
    shown = rows[:LISTED]
    last = shown[-1] if len(rows) > LISTED else None
    rest = wanted.model_copy(update=dict.fromkeys(_VALUES))
    tally = _tally(connection, tally_query(rest, now, revoked))
    # Of the newest there may be few that are wanted: those are counted for themselves.
    exact = tally
    if tally.cut and rest != wanted:
        exact = _tally(connection, tally_query(wanted, now, revoked))
    return CertificateList(
        order=_time(wanted),
        lines=tuple(_line(row) for row in shown),
        total=exact.with_each(wanted.narrowing),
        facets=tuple(_facets(wanted, tally)),
        wanted=wanted.narrowing,
        next=None
        if last is None
        else cursor_at(last[_time(wanted)], last["id"], last["untrusted"]),
    )


def page_query(wanted: Wanted, now: datetime, revoked: Sequence[str]) -> Select[Any]:
    """The rows of a page and one more, in their order.

    ``revoked`` are the ids of keys: the database knows how many rows each of them signed, and
    reads by the key or by the time.
    """
    place = _place(wanted)
    facets = certificate_facets.c
    query = (
        select(
            *(certificates.c[name] for name in _COLUMNS),
            facets.mechanism,
            facets.requester,
            status_at(now).label("status"),
        )
        .select_from(_joined(outer=True))
        .where(*_conditions(wanted, now, revoked))
    )
    if wanted.cursor is not None:
        after = read_cursor(wanted.cursor, *_CURSOR)
        types = [column.type for column in place]
        query = query.where(tuple_(*place) < tuple_(*after, types=types))
    return query.order_by(*(column.desc() for column in place)).limit(LISTED + 1)


def tally_query(wanted: Wanted, now: datetime, revoked: Sequence[str]) -> Select[Any]:
    """How many of each verdict, band and end there are together, of the newest ``COUNTED``."""
    kept = certificates.c
    newest = (
        select(
            kept.verdict.label("verdict"),
            _band_of(kept.epsilon_upper).label("epsilon"),
            _end_of(kept.not_after, now).label("ends"),
        )
        .select_from(_joined(outer=False) if _by_facets(wanted) else certificates)
        .where(*_conditions(wanted, now, revoked))
        .order_by(_place(wanted)[0].desc())
        .limit(COUNTED + 1)
        .subquery()
    )
    values = [newest.c[name] for name in _VALUES]
    return select(*values, func.count().label("number")).group_by(*values)


_COLUMNS = (
    "id",
    "issue",
    "untrusted",
    "name",
    "dataset",
    "verdict",
    "epsilon_upper",
    "delta",
    "adjacency",
    "plan_digest",
    "created_at",
    "not_after",
)


def _by_facets(wanted: Wanted) -> bool:
    return wanted.mechanism is not None or wanted.requester is not None


def _place(wanted: Wanted) -> tuple[ColumnElement[Any], ...]:
    """What a list is in the order of, in the table whose index reads no more than it shows."""
    kept, facets = certificates.c, certificate_facets.c
    if _by_facets(wanted):
        return facets.created_at, facets.certificate_id, facets.untrusted
    return kept[_time(wanted)], kept.id, kept.untrusted


def _time(wanted: Wanted) -> Time:
    """The column of the times that a list is in the order of."""
    # What has ended lies far back among what was made.
    ended = wanted.ends == "over" or wanted.standing == "expired"
    return "not_after" if ended and not _by_facets(wanted) else "created_at"


def _joined(*, outer: bool) -> Any:
    facets = certificate_facets.c
    same = and_(
        facets.certificate_id == certificates.c.id,
        facets.untrusted == certificates.c.untrusted,
        facets.issue == certificates.c.issue,
    )
    return certificates.join(certificate_facets, same, isouter=outer)


def _conditions(wanted: Wanted, now: datetime, revoked: Sequence[str]) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = [~SUPERSEDED]
    kept, facets = certificates.c, certificate_facets.c
    for column, value in (
        (kept.verdict, wanted.verdict),
        (kept.dataset, wanted.dataset),
        (facets.mechanism, wanted.mechanism),
        (facets.requester, wanted.requester),
    ):
        if value is not None:
            found.append(column == value)
    if wanted.q is not None:
        found.append(_begins(wanted.q.strip()))
    if wanted.epsilon is not None:
        found.append(_banded(wanted.epsilon))
    if wanted.ends is not None:
        found += _ending(wanted.ends, now)
    if wanted.standing is not None:
        found += _standing(wanted.standing, now, revoked)
    return found


def _begins(text: str) -> ColumnElement[bool]:
    kept = certificates.c
    if found := _HEX.fullmatch(text):
        start = f"sha256:{found[1]}"
        return or_(*(column.startswith(start) for column in (kept.id, kept.plan_digest)))
    columns = (kept.name, kept.dataset)
    return or_(*(column.startswith(text, autoescape=True) for column in columns))


def _banded(band: Band) -> ColumnElement[bool]:
    epsilon = certificates.c.epsilon_upper
    if band == "none":
        return epsilon.is_(None)
    low, high = _LIMITS[band]
    return epsilon > low if high == float("inf") else and_(epsilon > low, epsilon <= high)


def _band_of(epsilon: ColumnElement[float]) -> ColumnElement[str]:
    below = [(epsilon <= most, band) for band, (_, most) in _LIMITS.items() if isfinite(most)]
    return case((epsilon.is_(None), "none"), *below, else_="above_8")


def _end_of(end: ColumnElement[datetime], now: datetime) -> ColumnElement[str]:
    return case((end < now, "over"), (end < now + SOON, "soon"), else_="later")


def _ending(ends: Ends, now: datetime) -> list[ColumnElement[bool]]:
    end = certificates.c.not_after
    match ends:
        case "over":
            return [end < now]
        case "soon":
            return [end >= now, end < now + SOON]
        case _:
            return [end >= now + SOON]


def _standing(
    standing: Standing, now: datetime, revoked: Sequence[str]
) -> list[ColumnElement[bool]]:
    """As ``status_at`` has it, in parts of which each has its index."""
    kept = certificates.c
    waits = kept.approvals_given < kept.approvals_required
    undecided = [~REVOKED, ~REJECTED, ~key_revoked_at(now)]
    match standing:
        case "revoked":
            return [one_of(kept.id, select(revocations.c.certificate_id)), REVOKED]
        case "rejected":
            rejected = select(approvals.c.certificate_id).where(approvals.c.decision == "reject")
            return [one_of(kept.id, rejected), ~REVOKED, REJECTED]
        case "key_revoked":
            return [kept.key_id.in_(revoked), ~REVOKED, ~REJECTED]
        case "expired":
            return [*undecided, kept.not_after < now]
        case "awaiting_approval":
            return [*undecided, kept.not_after >= now, waits]
        case "active":
            return [*undecided, kept.not_after >= now, ~waits]


def _line(row: RowMapping) -> CertificateLine:
    same = {name: row[name] for name in CertificateLine.__dataclass_fields__ if name in row}
    return CertificateLine(
        **{
            **same,
            "status": Status(row["status"]),
            "epsilon_at_most": _up(row["epsilon_upper"]),
            "delta": _up(row["delta"]),
        }
    )


def _up(value: float | None) -> str | None:
    return None if value is None else decimal_up(value, DIGITS)


# ---- facets -------------------------------------------------------------------------

_VALUES: dict[str, tuple[str, dict[str, str]]] = {
    "verdict": ("Verdict", {arg: arg.replace("_", "-") for arg in get_args(Verdict)}),
    "epsilon": ("ε, at most", {str(band): text for band, text in BANDS.items()}),
    "ends": ("Validity", {str(ends): text for ends, text in ENDS.items()}),
}
"""Facets whose values are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tally:
    """Numbers by verdict, band and end; ``cut`` where there are more than were looked at."""

    numbers: Mapping[tuple[str, ...], int]
    cut: bool

    def with_each(self, chosen: Mapping[str, str]) -> str:
        """How many have what is ``chosen`` of the counted facets."""
        number = sum(
            number
            for values, number in self.numbers.items()
            if all(
                chosen.get(name, value) == value
                for name, value in zip(_VALUES, values, strict=True)
            )
        )
        shown = min(number, COUNTED)
        return f"{shown:,}+" if self.cut else f"{shown:,}"


def _tally(connection: Connection, query: Select[Any]) -> _Tally:
    rows = connection.execute(query).all()
    numbers = {tuple(row[:-1]): int(row[-1]) for row in rows}
    return _Tally(numbers=numbers, cut=sum(numbers.values()) > COUNTED)


def _facets(wanted: Wanted, tally: _Tally) -> Iterator[Facet]:
    chosen = wanted.narrowing
    for name, (label, values) in _VALUES.items():
        yield Facet(
            name=name,
            label=label,
            choices=tuple(
                Choice(
                    value=value,
                    label=text,
                    count=tally.with_each({**chosen, name: value}),
                    chosen=chosen.get(name) == value,
                )
                for value, text in values.items()
            ),
        )


def with_views(found: CertificateList, views: tuple[SavedView, ...]) -> CertificateList:
    """``found`` with what somebody keeps."""
    return replace(found, views=views)
