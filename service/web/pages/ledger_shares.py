"""Who uses a budget: what the runs of a person, team, plan, model or month add to the ε in use.

Costs do not add up, because the privacy filter composes all runs and converts to ε once. A share is
therefore the ε by which the use would fall without these runs; shares need not sum to the use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import Connection

from affidavit.accountants import decimal_up
from affidavit.service.ledger import repository
from affidavit.service.ledger.state import StoredLedger, StoredReservation
from affidavit.service.ledger.wire_models import marginal_epsilon

Grouping = Literal["person", "team", "plan", "model", "month"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
MAX_RUNS = 2000
"""The latest reservations that are shared out."""
MAX_SHARES = 12
"""Groups on the page; the others are one more."""
_GROUP_OF: dict[Grouping, Callable[[StoredReservation], str]] = {
    "person": lambda run: run.reserved_by,
    "team": lambda run: run.team,
    "plan": lambda run: run.name or "without a name",
    "model": lambda run: run.model or "not stated",
    "month": lambda run: f"{run.reserved_at:%Y-%m}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The runs of a group, and what they add to the ε in use; None if that is not bounded."""

    name: str
    runs: int
    adds: str | None


def shares_of(
    connection: Connection, ledger: StoredLedger, grouping: Grouping
) -> tuple[Share, ...]:
    """Return the shares of a ledger's latest runs, the largest first."""
    numbered = repository.reservations_before(connection, ledger.id, None, MAX_RUNS)
    runs = [run for _, run in numbered if run.state != "released"]
    groups: dict[str, list[StoredReservation]] = defaultdict(list)
    for run in runs:
        groups[_GROUP_OF[grouping](run)].append(run)
    shares = sorted(
        (_share(ledger, name, members) for name, members in groups.items()),
        key=lambda share: (-float(share.adds or "inf"), share.name),
    )
    if len(shares) > MAX_SHARES:
        names = {share.name for share in shares[: MAX_SHARES - 1]}
        rest = [run for name, members in groups.items() if name not in names for run in members]
        shares = [*shares[: MAX_SHARES - 1], _share(ledger, "all others", rest)]
    return tuple(shares)


def _share(ledger: StoredLedger, name: str, runs: Sequence[StoredReservation]) -> Share:
    adds = marginal_epsilon(ledger, *runs)
    return Share(name=name, runs=len(runs), adds=None if adds is None else decimal_up(adds, 4))
