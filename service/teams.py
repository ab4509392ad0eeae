"""Teams: who sees which rows, as one rule for each table, for every statement of the service.

Every object belongs to a team. A request sets ``TEAM`` to the team of its caller once they are
authenticated; what the service does for nobody in particular, and for callers of the organisation,
leaves it ``None`` and sees everything. While it is set, each table of ``RULES`` is read as if it
held the team's rows alone: a connection that is opened then compiles every ``SELECT`` so
(``confine``), on SQLite and PostgreSQL alike, so that no query can forget to. Objects of others
are then not found, in lists, counts and searches too.

PostgreSQL enforces the same rules by row-level security (``install``), for the role that
the service works as: its connections name the team in ``SETTING``, and one that names none sees
nothing. The owner of the tables and superusers are not held by it.

A data set belongs to the team of its ledgers. Others use it by a grant (``dataset_grants``), which
shows them the whole ledger, because what they may spend depends on all of it.

References: PostgreSQL, Row Security Policies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.exc import OperationalError

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
"""Names of teams. They stand in statements as they are."""
DEFAULT = "default"
"""The team of whoever has none, and of all that was stored before there were teams."""
EVERY = "*"
"""What ``SETTING`` is where every row may be seen; no team's name."""
SETTING = "affidavit.team"

TEAM: ContextVar[str | None] = ContextVar("affidavit_team", default=None)
"""Whose rows connections show that are opened now; None for all."""

_ME = "{me}"


def _of(parent: str, key: str, value: str) -> str:
    """Of rows whose ``value`` is the ``key`` of something that belongs to a team."""
    return (
        f"EXISTS (SELECT 1 FROM {parent} AS subject WHERE subject.{key} = {value}"
        f" AND subject.team = {_ME})"
    )


def _ledger(name: str) -> str:
    """Its own, one that it may read now, and one that it was ever allowed to reserve from.

    In the last its runs stand.
    """
    return (
        f"({name}.team = {_ME} OR EXISTS (SELECT 1 FROM dataset_grants AS given"
        f" WHERE given.dataset = {name}.dataset AND given.team = {_ME}"
        " AND (given.may = 'reserve' OR (given.may = 'read' AND NOT EXISTS"
        " (SELECT 1 FROM dataset_grants AS later WHERE later.dataset = given.dataset"
        " AND later.team = given.team AND later.id > given.id)))))"
    )


def _of_ledger(table: str) -> str:
    return (
        f"EXISTS (SELECT 1 FROM ledgers AS book WHERE book.id = {table}.ledger_id"
        f" AND {_ledger('book')})"
    )


RULES = {
    **{name: f"{name}.team = {_ME}" for name in ("certificates", "runs", "waivers")},
    **{
        name: _of("certificates", "id", f"{name}.certificate_id")
        for name in ("certificate_facets", "requests", "approvals", "revocations", "waiver_uses")
    },
    **{
        name: _of("runs", "id", f"{name}.run_id")
        for name in ("run_events", "run_leases", "run_records")
    },
    "waiver_revocations": _of("waivers", "waiver_id", "waiver_revocations.waiver_id"),
    "ledgers": _ledger("ledgers"),
    "reservations": _of_ledger("reservations"),
    "ledger_events": _of_ledger("ledger_events"),
    "dataset_grants": f"dataset_grants.team = {_ME}",
}
"""Which rows of each table a team sees. Other tables are the organisation's."""


def in_id(team: str) -> str | None:
    """What ids of certificates are made of beside the rest; those of ``DEFAULT`` stay."""
    return None if team == DEFAULT else team


@contextmanager
def acting_for(team: str | None) -> Iterator[None]:
    """Let connections that are opened in a block show that team's rows; all of them for None."""
    before = TEAM.set(team)
    try:
        yield
    finally:
        TEAM.reset(before)


def may_see(team: str) -> bool:
    """Whether rows of ``team`` are shown now."""
    return TEAM.get() in (None, team)


# ---- every statement ------------------------------------------------------------------

_OPTION = "affidavit_team"
_MARK = "'affidavit:team'"
_CONFINED = {"affidavit:confined": None}
"""No schema is called so; that there is a map makes the statement another one in the cache."""


def confine(engine: Engine) -> None:
    """Make connections of ``engine`` show what ``TEAM`` says when they are opened."""
    compiler: Any = engine.dialect.statement_compiler

    class Compiler(compiler):  # type: ignore[misc]  # the dialect's own
        def visit_table(self, table: Table, **options: Any) -> str:
            text = str(super().visit_table(table, **options))
            rule = RULES.get(table.name)
            read = options.get("asfrom") and not options.get("iscrud")
            if rule is None or not read or not getattr(self, "schema_translate_map", None):
                return text
            alias = options.get("enclosing_alias")
            named = "" if alias is not None and alias.element is table else f" AS {text}"
            return f"(SELECT * FROM {text} WHERE {rule.replace(_ME, _MARK)}){named}"

    engine.dialect.statement_compiler = Compiler
    event.listen(engine, "engine_connect", _open)
    event.listen(engine, "before_cursor_execute", _name_team, retval=True)


def _open(connection: Connection) -> None:
    team = TEAM.get()
    if connection.dialect.name == "postgresql":
        _tell(connection, team or EVERY)
    if team is not None:
        connection.execution_options(schema_translate_map=_CONFINED, **{_OPTION: team})


def _tell(connection: Connection, team: str) -> None:
    """Say it to the server, unless it was the last that this connection said."""
    if connection.info.get(_OPTION) == team:
        return
    driver: Any = connection.connection.dbapi_connection
    try:
        before = driver.autocommit
        driver.autocommit = True  # said in a transaction that is undone it would be undone too
        driver.execute("SELECT set_config(%s, %s, false)", (SETTING, team))
        driver.autocommit = before
    except connection.dialect.loaded_dbapi.Error as error:
        connection.invalidate()
        connection.close()
        raise OperationalError("set_config", None, error) from None
    connection.info[_OPTION] = team


def _name_team(
    connection: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any
) -> tuple[str, Any]:
    team = connection.get_execution_options().get(_OPTION)
    return (statement if team is None else statement.replace(_MARK, f"'{team}'")), parameters


# ---- PostgreSQL -----------------------------------------------------------------------


def install(connection: Connection) -> None:
    """Enforce the rules by row-level security; PostgreSQL only, by the owner of the tables."""
    setting = f"current_setting('{SETTING}', true)"
    for table, rule in RULES.items():
        for statement in (
            f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            f"DROP POLICY IF EXISTS {table}_of_team ON {table}",
            f"CREATE POLICY {table}_of_team ON {table} "
            f"USING ({setting} = '{EVERY}' OR ({rule.replace(_ME, setting)}))",
        ):
            connection.exec_driver_sql(statement)
