"""Teams: row-level access rules for every statement of the service.

Every object belongs to a team. An authenticated request sets ``TEAM`` to its caller's team. For
callers of the whole organisation and for the service's own work it is ``None``, and all rows are
visible. Otherwise each table of ``RULES`` contains only the team's rows: connections compile the
rule into every ``SELECT`` (``confine``), on SQLite and PostgreSQL alike, so that no query can omit
it. Lists, counts and searches do not include the objects of other teams.

PostgreSQL also enforces the rules by row-level security (``install``) for the service's role: a
connection names its team in ``SETTING``, and sees nothing if it names none. Owners of tables and
superusers are exempt.

A data set belongs to the team of its ledgers. Other teams use it with a grant
(``dataset_grants``), which shows them the whole ledger, because it determines what they may spend.

References: PostgreSQL, Row Security Policies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import Field
from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.exc import OperationalError

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
"""Valid team names, which are inserted into SQL statements without quoting."""
DEFAULT = "default"
"""The team of callers without a team, and of rows from before teams existed."""
ALL_TEAMS = "*"
"""Value of ``SETTING`` for connections that see every row."""
SETTING = "affidavit.team"

TEAM: ContextVar[str | None] = ContextVar("affidavit_team", default=None)
"""The team whose rows new connections show; None for all."""

_TEAM = "{team}"


def _refers_to_team(parent: str, key: str, value: str) -> str:
    """Return the rule of rows that refer by ``value`` to the ``key`` of a team's row."""
    return (
        f"EXISTS (SELECT 1 FROM {parent} AS subject WHERE subject.{key} = {value}"
        f" AND subject.team = {_TEAM})"
    )


def _ledger(name: str) -> str:
    """Return the rule of ledgers: the team's own, and those that a grant makes visible.

    A grant to reserve makes a ledger visible permanently, because it contains the team's runs.
    """
    return (
        f"({name}.team = {_TEAM} OR EXISTS (SELECT 1 FROM dataset_grants AS given"
        f" WHERE given.dataset = {name}.dataset AND given.team = {_TEAM}"
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
    **{name: f"{name}.team = {_TEAM}" for name in ("certificates", "runs", "waivers")},
    **{
        name: _refers_to_team("certificates", "id", f"{name}.certificate_id")
        for name in ("certificate_facets", "requests", "approvals", "revocations", "waiver_uses")
    },
    **{
        name: _refers_to_team("runs", "id", f"{name}.run_id")
        for name in ("run_events", "run_leases", "run_records", "run_tests")
    },
    "waiver_revocations": _refers_to_team("waivers", "waiver_id", "waiver_revocations.waiver_id"),
    "ledgers": _ledger("ledgers"),
    "reservations": _of_ledger("reservations"),
    "ledger_events": _of_ledger("ledger_events"),
    "dataset_grants": f"dataset_grants.team = {_TEAM}",
}
"""The rows of each table that a team sees; other tables belong to the organisation."""


def team_in_id(team: str) -> str | None:
    """Return the team as part of certificate ids; None for ``DEFAULT``, whose ids lack it."""
    return None if team == DEFAULT else team


@contextmanager
def acting_for(team: str | None) -> Iterator[None]:
    """Restrict connections that are opened in a block to a team's rows; None for all rows."""
    before = TEAM.set(team)
    try:
        yield
    finally:
        TEAM.reset(before)


def may_see(team: str) -> bool:
    """Return whether rows of ``team`` are visible now."""
    return TEAM.get() in (None, team)


# ---- every statement ------------------------------------------------------------------

_OPTION = "affidavit_team"
_PLACEHOLDER = "'affidavit:team'"
_CONFINED = {"affidavit:confined": None}
"""A map without effect, which makes the statement distinct in SQLAlchemy's cache."""


def confine(engine: Engine) -> None:
    """Restrict each new connection of ``engine`` to the rows of ``TEAM``."""
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
            return f"(SELECT * FROM {text} WHERE {rule.replace(_TEAM, _PLACEHOLDER)}){named}"

    engine.dialect.statement_compiler = Compiler
    event.listen(engine, "engine_connect", _open)
    event.listen(engine, "before_cursor_execute", _name_team, retval=True)


def _open(connection: Connection) -> None:
    team = TEAM.get()
    if connection.dialect.name == "postgresql":
        _set_team(connection, team or ALL_TEAMS)
    if team is not None:
        connection.execution_options(schema_translate_map=_CONFINED, **{_OPTION: team})


def _set_team(connection: Connection, team: str) -> None:
    """Set the team on the server, unless the connection has set it already."""
    if connection.info.get(_OPTION) == team:
        return
    driver: Any = connection.connection.dbapi_connection
    try:
        before = driver.autocommit
        driver.autocommit = True  # a rollback would undo it
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
    return (statement if team is None else statement.replace(_PLACEHOLDER, f"'{team}'")), parameters


# ---- PostgreSQL -----------------------------------------------------------------------


def install(connection: Connection) -> None:
    """Enforce the rules by row-level security; for PostgreSQL, as the owner of the tables."""
    setting = f"current_setting('{SETTING}', true)"
    for table, rule in RULES.items():
        for statement in (
            f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            f"DROP POLICY IF EXISTS {table}_of_team ON {table}",
            f"CREATE POLICY {table}_of_team ON {table} "
            f"USING ({setting} = '{ALL_TEAMS}' OR ({rule.replace(_TEAM, setting)}))",
        ):
            connection.exec_driver_sql(statement)


TeamName = Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
