"""Teams: nobody reads or reserves across them, on every route there is, unless it was granted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, insert, make_url, select, text
from sqlalchemy.exc import ProgrammingError

from affidavit.service.audit.audit import audit
from affidavit.service.core.database import (
    open_engine,
    reader,
    snapshot,
    writer,
)
from affidavit.service.core.errors import SettingsError
from affidavit.service.core.teams import RULES, acting_for
from affidavit.service.identity.openid import ProviderTokens
from affidavit.service.identity.provider import read_provider
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenError, TokenRepository
from affidavit.service.operation.database_admin import grant_application, metadata
from affidavit.service.settings import Settings
from affidavit.service.tables.ledger import dataset_grants
from affidavit.trust import KeyStore, format_instant
from tests.service.conftest import ONCE
from tests.service.identity.test_access import ROWS
from tests.support.database_owner import statements, with_user

OF_A_TEAM = (Scope.SUBMIT, Scope.APPROVE, Scope.WORK)
EARLIER = "ada-secret-plan", "ada-secret-data"
"""What stands in everything of the team ada: names of a plan and a data set."""
POLICY = {
    "schema_version": 1,
    "name": "house",
    "version": 1,
    "datasets": "default",
    "epsilon_cap": 0.5,
    "delta_cap": 1e-4,
}
NOWHERE = {
    "certificate_id": f"sha256:{'0' * 64}",
    "waiver_id": f"sha256:{'0' * 64}",
    "reservation_id": "00000000-0000-4000-8000-000000000000",
    "run_id": "00000000-0000-4000-8000-000000000000",
    "dataset": "no-such-data",
    "name": "no-such-data",
}


@dataclass
class Town:
    """A service on a network with two teams, ada and bob, and people of no team."""

    client: Any
    settings: Settings
    document: Callable[..., dict[str, Any]]
    tokens: dict[str, str] = field(default_factory=dict)

    def ask(self, who: str, method: str, path: str, body: Any = None, **headers: str) -> Any:
        sent = {"authorization": f"Bearer {self.tokens[who]}", "accept": "application/json"}
        content = {"json": body} if path.startswith("/v1/") else {"data": body}
        return self.client.request(
            method, path, headers={**sent, **headers}, follow_redirects=False, **content
        )

    def certify(self, who: str, **changes: Any) -> Any:
        return self.ask(who, "POST", "/v1/certificates", self.document(**changes))

    def id_of(self, answer: Any) -> str:
        return str(answer.json()["certificate"]["id"])

    def budget(self, dataset: str, **more: Any) -> Any:
        body = {"adjacency": "add_remove", "epsilon": 50, "delta": 1e-4, **more}
        return self.ask("admin", "POST", f"/v1/ledgers/{dataset}/budget", body)

    def reserve(self, who: str, dataset: str, certificate: str, **headers: str) -> Any:
        path = f"/v1/ledgers/{dataset}/reservations"
        return self.ask(who, "POST", path, {"certificate": certificate}, **headers)

    def grant(self, dataset: str, team: str, may: str) -> Any:
        body = {"team": team, "may": may}
        return self.ask("admin", "POST", f"/v1/ledgers/{dataset}/grants", body)


def town_at(
    url: str, tmp_path: Path, client_of: Any, document: Callable[..., dict[str, Any]]
) -> Iterator[Town]:
    KeyStore(tmp_path / "keys").new("test")
    settings = Settings(
        database_url=url,
        key_directory=tmp_path / "keys",
        workers=1,
        rate_limit=1_000_000,
        comparison_seconds=ONCE,
    )
    engine = open_engine(url)
    store, now = TokenRepository(engine), datetime.now(UTC)
    people = {"ada": OF_A_TEAM, "bob": OF_A_TEAM, "plain": (Scope.SUBMIT, Scope.WORK)}
    people |= {name: (Scope(name),) for name in ("admin", "audit", "approve")}
    team_of = {"ada": "ada", "ann": "ada", "bob": "bob"}
    tokens = {}
    for name, scopes in {**people, "ann": OF_A_TEAM}.items():
        called = "ann" if name == "ann" else "same"
        by_hand = ["shared", "toy"] if Scope.WORK in scopes else []
        made = store.new(
            called,
            scopes,
            1,
            by="test",
            at=now,
            team=team_of.get(name),
            queues=["default"] if by_hand else [],
            datasets=by_hand,
        )
        tokens[name] = made[1].text
    engine.dispose()
    with client_of(settings, address="192.0.2.1") as client:
        yield Town(client, settings, document, tokens)


@pytest.fixture(params=["sqlite"])
def town(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    client_of: Any,
    document: Callable[..., dict[str, Any]],
) -> Iterator[Town]:
    url = request.getfixturevalue(f"{request.param}_url")
    yield from town_at(url, tmp_path, client_of, document)


on_both = pytest.mark.parametrize("town", ["sqlite", "postgresql"], indirect=True)
"""Those that ask every kind of query; PostgreSQL's own rules have a test of their own."""


@pytest.fixture
def objects(town: Town) -> dict[str, str]:
    """One of each kind of object of the team ada, by the name of its path's parameter."""
    plan, data = EARLIER
    assert town.budget(data, team="ada").status_code == 201
    named = {"name": plan, "dataset": {"name": data, "size": 1000}}
    certificate = town.id_of(town.certify("ada", **named))
    reservation = town.reserve("ada", data, certificate).json()["id"]
    run = {"certificate": certificate, "data": "d", "model": "mlp:8", "output": "o"}
    queued = town.ask("ada", "POST", "/v1/runs", run)
    assert queued.status_code == 201, queued.text
    assert town.ask("admin", "POST", "/v1/policies", POLICY).status_code == 201
    waiver = {
        "rule": "policy_epsilon_cap",
        "policy": "house",
        "dataset": data,
        "owner": "token:owner",
        "reason": "ada-secret-reason",
        "expires_at": format_instant(datetime.now(UTC) + timedelta(days=1)),
    }
    granted = town.ask("ann", "POST", "/v1/waivers", waiver)  # not who asks for the plan
    assert granted.status_code == 201, granted.text
    return {
        "certificate_id": certificate,
        "reservation_id": reservation,
        "run_id": queued.json()["id"],
        "waiver_id": granted.json()["id"],
        "dataset": data,
        "name": data,
    }


BODIES: dict[str, Any] = {
    "approvals": {"decision": "approve", "envelope": f"sha256:{'1' * 64}"},
    "revocation": {"code": "other", "reason": "x"},
    "reservations": {"certificate": f"sha256:{'0' * 64}"},
    "start": {"fence": 1, "secret": "0" * 64, "plan_digest": f"sha256:{'0' * 64}"},
    "heartbeat": {"fence": 1, "secret": "0" * 64, "steps": 1},
    "record": {"fence": 1, "secret": "0" * 64, "part": 1, "lines": "x\n"},
    "fail": {"fence": 1, "secret": "0" * 64, "code": "x", "message": "x"},
    "complete": {"fence": 1, "secret": "0" * 64, "provenance": {}},
}
"""Well-formed ones, by the last part of the path; the others take none."""
OF_ALL = ("/static/", "/docs/", "/problems/", "/v1/mechanisms/", "/v1/keysets/", "/sign-in")
OF_ALL += ("/policies/", "/v1/policies/", "/v1/tlog/", "/v1/queues/", "/certificates/views")
"""What belongs to no team."""


def rows_of_objects() -> Iterator[tuple[str, str, list[str]]]:
    for method, path, *who in ROWS:
        names = re.findall(r"{(\w+)}", path)
        if set(names) & set(NOWHERE) and not path.startswith(OF_ALL):
            yield method, path, who


def filled(path: str, values: dict[str, str]) -> str:
    """The path, with a chart's or an issue's number where it names one."""
    path = path.replace("charts/{name}", "charts/privacy-profile").replace("{issue}", "1")
    return re.sub(r"{(\w+)}", lambda found: values[found[1]], path)


@pytest.mark.ordinary("postgresql")
@on_both
def test_objects_of_another_team_are_not_there_on_any_route(
    town: Town, objects: dict[str, str]
) -> None:
    """The very answer that an object gets which nobody has, but for its name."""
    form = {"reason": "x", "decision": "approve", "envelope": f"sha256:{'1' * 64}"}
    rows = [row for row in rows_of_objects() if {"submit", "approve", "work"} & {*row[2]}]
    assert len(rows) >= 40
    shown = 0
    for method, path, _who in rows:
        body = BODIES.get(path.rsplit("/", 1)[1], {}) if path.startswith("/v1/") else form
        body = body if method == "POST" else None
        answers = []
        for values in (objects, NOWHERE):
            where = filled(path, values)
            if method == "DELETE":
                where += "?reason=x"
            answer = town.ask("bob", method, where, body)
            said = answer.text
            for value in values.values():
                said = said.replace(value, "<it>").replace(value[:19], "<it>")
            answers.append((answer.status_code, said))
            assert answer.status_code in (303, 400, 404, 409, 422), (method, path, said)
        assert answers[0] == answers[1], (method, path)
        if method == "GET":
            assert answers[0][0] == 404, (path, answers)
            if not path.endswith("/events"):  # a stream, which would go on
                shown += town.ask("ada", "GET", filled(path, objects)).status_code == 200
    assert shown >= 20  # it shows nothing where ada sees nothing either


@pytest.mark.ordinary("sqlite")
@on_both
def test_lists_searches_counts_and_exports_show_none_of_it(
    town: Town, objects: dict[str, str]
) -> None:
    secret = {*EARLIER, "ada-secret-reason", "token:ada/same", *objects.values()}
    seen: set[str] = set()
    queries = ("", "?q=ada-secret", f"?q={objects['certificate_id'][:20]}", "?limit=1")
    for method, path, *who in ROWS:
        if method != "GET" or "{" in path or not {"submit", "approve", "work"} & {*who}:
            continue
        for query in queries:
            bob, ada = (town.ask(who, "GET", path + query) for who in ("bob", "ada"))
            found = {word for word in secret if word in bob.text}
            # A search repeats what was searched for.
            assert not {word for word in found if word not in path + query}, (path, query)
            seen |= {path for word in secret if word in ada.text and word not in query}
    assert {"/v1/certificates", "/certificates", "/v1/runs", "/runs", "/search"} <= seen
    assert {"/v1/ledgers", "/datasets", "/v1/waivers", "/waivers"} <= seen
    pages = (town.ask(who, "GET", "/certificates").text for who in ("bob", "plain"))
    # The last line of a page, for paper, says when it was read.
    counted = [re.sub(r"as of <time.*?</time>", "", page) for page in pages]
    assert counted[0] == counted[1]
    for who in ("audit", "approve"):  # of the organisation
        assert EARLIER[0] in town.ask(who, "GET", "/v1/certificates").text
    with snapshot(town.client.app.state.services.engine) as connection:
        assert list(audit(connection, [])) == []


def test_the_same_plan_is_another_certificate_in_another_team(town: Town) -> None:
    """So nobody learns from the answer that another team asked before, nor who."""
    answers = {who: town.certify(who) for who in ("ada", "bob", "plain")}
    assert [answer.status_code for answer in answers.values()] == [201] * 3
    assert len({town.id_of(answer) for answer in answers.values()}) == 3
    for who, answer in answers.items():
        again = town.certify(who)
        assert (again.status_code, again.content) == (200, answer.content)
        bundle = town.ask(who, "GET", f"/v1/certificates/{town.id_of(answer)}/bundle")
        assert bundle.status_code == 200
    assert len(town.ask("bob", "GET", "/v1/certificates").json()["items"]) == 1
    assert len(town.ask("audit", "GET", "/v1/certificates").json()["items"]) == 3
    # Without a team, ids are what they were.
    loose = town.ask("plain", "GET", f"/v1/certificates/{town.id_of(answers['plain'])}")
    assert loose.json()["plan_digest"] == answers["ada"].json()["plan_digest"]


@on_both
def test_a_team_reserves_from_anothers_data_set_by_a_grant_alone(town: Town) -> None:
    town.budget("shared", team="ada")
    about = {"dataset": {"name": "shared", "size": 1000}}
    mine, theirs = (town.id_of(town.certify(who, **about)) for who in ("ada", "bob"))
    of_ada = town.reserve("ada", "shared", mine, **{"idempotency-key": "k"}).json()["id"]

    def tried(dataset: str = "shared") -> tuple[int, str]:
        answer = town.reserve("bob", dataset, theirs)
        return answer.status_code, answer.json().get("code", "")

    assert tried() == (409, "no_budget")
    assert town.ask("bob", "GET", "/v1/ledgers/shared").status_code == 404
    assert town.reserve("bob", "shared", mine).json()["code"] == "certificate_not_usable"
    assert town.grant("nothing-here", "bob", "read").status_code == 404
    assert town.grant("shared", "bob", "read").status_code == 200
    assert tried() == (403, "not_granted")
    seen = town.ask("bob", "GET", "/v1/ledgers/shared")
    assert seen.json() == town.ask("ada", "GET", "/v1/ledgers/shared").json()
    assert town.grant("shared", "bob", "nothing").status_code == 200
    assert town.ask("bob", "GET", "/v1/ledgers/shared").status_code == 404
    town.grant("shared", "bob", "reserve")
    # One key by one name in two teams is two requests.
    made = town.reserve("bob", "shared", theirs, **{"idempotency-key": "k"})
    assert (made.status_code, made.json()["id"] != of_ada) == (201, True)
    both = {who: town.ask(who, "GET", "/v1/ledgers/shared").json() for who in ("ada", "bob")}
    assert both["ada"] == both["bob"]
    assert both["ada"]["items"][0]["runs"] == 2
    # Sharing a budget is not sharing what stands on it.
    for verb in ("commit", "settle", "release"):
        assert town.ask("bob", "POST", f"/v1/reservations/{of_ada}/{verb}", {}).status_code == 404
    town.grant("shared", "bob", "nothing")
    assert tried() == (403, "not_granted")
    planted = {"dataset": "shared", "team": "bob", "may": "reserve", "reason": ""}
    with writer(town.client.app.state.services.engine).begin() as connection:
        at = datetime.now(UTC)
        connection.execute(insert(dataset_grants).values(**planted, granted_by="x", at=at))
    assert tried() == (403, "not_granted"), "a row alone, which is not in the log"
    town.grant("shared", "bob", "nothing")
    own = f"/v1/reservations/{made.json()['id']}"
    assert town.ask("bob", "POST", f"{own}/commit", {}).json()["state"] == "committed"
    # A data set is one team's; whoever has no team does not reserve from it either.
    assert town.budget("shared", team="bob").json()["code"] == "other_team"
    loose = town.id_of(town.certify("plain", **about))
    assert town.reserve("plain", "shared", loose).json()["code"] == "no_budget"
    grants = town.ask("audit", "GET", "/v1/ledgers/shared/grants").json()["items"]
    assert [(row["team"], row["may"]) for row in grants] == [("bob", "nothing")]


def test_a_queue_gives_a_worker_the_runs_of_its_team(town: Town, objects: dict[str, str]) -> None:
    path, body = "/v1/queues/default/claims", {"worker": "w"}
    for who in ("bob", "plain"):
        assert town.ask(who, "POST", path, body).json() is None
    assert town.ask("ada", "POST", path, body).json()["run"] == objects["run_id"]


def test_a_waiver_is_for_one_team(town: Town, objects: dict[str, str]) -> None:
    """The policy refuses both; the waiver of ada's lets ada's pass, and names no other team."""
    about = {"dataset": {"name": objects["dataset"], "size": 1000}}
    verdicts = {who: town.certify(who, **about).json()["verdict"] for who in ("ada", "bob")}
    assert verdicts == {"ada": "certified", "bob": "refused"}
    body = {
        "rule": "policy_epsilon_cap",
        "policy": "house",
        "dataset": "other",
        "owner": "token:owner",
        "reason": "because",
        "expires_at": format_instant(datetime.now(UTC) + timedelta(days=1)),
        "team": "bob",
    }
    assert town.ask("ada", "POST", "/v1/waivers", body).json()["code"] == "other_team"
    assert town.ask("approve", "POST", "/v1/waivers", body).status_code == 201
    assert len(town.ask("bob", "GET", "/v1/waivers").json()["items"]) == 1
    reissued = town.ask("approve", "POST", f"/v1/certificates/{objects['certificate_id']}/issues")
    assert reissued.status_code == 409


# ---- tokens and groups ----------------------------------------------------------------


def test_a_teams_token_has_no_right_over_the_organisation(town: Town) -> None:
    store = TokenRepository(town.client.app.state.services.engine)
    now = datetime.now(UTC)
    for scopes, team in (([Scope.ADMIN], "ada"), ([Scope.AUDIT], "ada"), ([Scope.SUBMIT], "A b")):
        with pytest.raises(TokenError):
            store.new("x", scopes, 1, by="test", at=now, team=team)


def test_groups_are_mapped_to_roles_in_teams() -> None:
    given = {
        "AFFIDAVIT_OIDC_ISSUER": "https://id.example.org",
        "AFFIDAVIT_OIDC_AUDIENCE": "affidavit",
        "AFFIDAVIT_OIDC_JWKS_URL": "https://id.example.org/jwks",
        "AFFIDAVIT_OIDC_SCOPES": '{"v": {"team": "vision", "scopes": ["submit"]}, "p": ["audit"]}',
    }
    provider = read_provider(given)
    assert provider is not None
    assert provider.teams == {"v": "vision"}
    assert provider.scopes == {"v": {Scope.SUBMIT}, "p": {Scope.AUDIT}}
    held = replace(provider, scopes={**provider.scopes, "l": frozenset({Scope.WORK})})
    held = replace(held, teams={"v": "vision", "l": "language"})
    tokens = ProviderTokens(held, None, datetime.now)  # type: ignore[arg-type]

    def sees(*groups: str) -> list[tuple[str | None, set[Scope]]]:
        actors = tokens.actors_of({"sub": "x", "groups": list(groups)})
        assert {actor.name for actor in actors} == {"oidc:x"}
        return [(actor.visible_team, {*actor.scopes}) for actor in actors]

    vision, language = ("vision", {Scope.SUBMIT}), ("language", {Scope.WORK})
    assert sees("v") == [vision]
    assert sees("p") == [(None, {Scope.AUDIT})]
    # A team's group comes before one of none, whose rights reach further.
    assert sees("p", "v") == [vision, (None, {Scope.AUDIT})]
    assert sees("v", "l", "v", "strangers") == [language, vision]
    assert sees("strangers") == [("default", set())]
    for wrong in (
        '{"v": {"team": "vision", "scopes": ["admin"]}}',
        '{"v": {"team": "a b", "scopes": ["submit"]}}',
        '{"v": {"team": "vision"}}',
        '{"v": {"team": "vision", "scopes": []}}',
    ):
        with pytest.raises(SettingsError):
            read_provider({**given, "AFFIDAVIT_OIDC_SCOPES": wrong})


# ---- in the database ------------------------------------------------------------------


def test_every_table_of_a_teams_object_has_its_rule() -> None:
    """A new table that refers to one with a rule needs one too."""
    for table in metadata.sorted_tables:
        refers = {key.column.table.name for key in table.foreign_keys} & set(RULES)
        assert not refers or table.name in RULES, table.name
        assert "team" not in table.c or table.name in {*RULES, "tokens", "sessions"}
        # Of certifications in progress everybody sees their own alone.
        known = {*RULES, "certifications"}
        assert not {"certificate_id", "run_id"} & {*table.c.keys()} or table.name in known


def touched(connection: Connection, statement: str) -> int | None:
    """How many rows a statement of bob's reaches; none, too, where it is refused."""
    refused = 0 if statement.startswith(("UPDATE", "DELETE", "SELECT")) else None
    try:
        connection.execute(text("SELECT set_config('affidavit.team', 'bob', true)"))
        result = connection.execute(text(statement))
        return result.rowcount if not statement.startswith("SELECT") else len(result.all())
    except ProgrammingError:
        return refused
    finally:
        connection.rollback()


def test_postgresql_shows_the_service_no_row_of_another_team(
    postgresql_url: str,
    tmp_path: Path,
    client_of: Any,
    document: Callable[..., dict[str, Any]],
) -> None:
    """Whatever it asks: the rules are the database's own for the role that the service works as."""
    server = postgresql_url.rsplit("/", 1)[0]
    statements(f"{server}/postgres", "DROP ROLE IF EXISTS of_teams", "CREATE ROLE of_teams LOGIN")
    grant_application(postgresql_url, "of_teams")
    url = with_user(postgresql_url, "of_teams")
    for town in town_at(url, tmp_path, client_of, document):
        made = objects.__wrapped__(town)  # type: ignore[attr-defined]
        town.ask("ada", "POST", "/v1/queues/default/claims", {"worker": "w"})
        assert town.ask("bob", "GET", f"/v1/runs/{made['run_id']}").status_code == 404
    engine = create_engine(url)
    counts: dict[str, dict[str, int]] = {}
    with engine.connect() as connection:
        for team in (None, "bob", "ada", "*"):
            if team is not None:
                connection.execute(text(f"SELECT set_config('affidavit.team', '{team}', false)"))
            counts[str(team)] = {
                table: connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
                for table in RULES
            }
        connection.execute(text("SELECT set_config('affidavit.team', 'bob', false)"))
        forged = (
            "INSERT INTO dataset_grants (dataset, team, may, reason, granted_by, at) "
            "VALUES ('d', 'ada', 'read', '', 'x', now())"
        )
        with pytest.raises(ProgrammingError, match="row-level security"):
            connection.execute(text(forged))
        connection.rollback()
        for table, columns in ((name, metadata.tables[name].c.keys()) for name in RULES):
            for statement in (
                f"UPDATE {table} SET {columns[0]} = {columns[0]}",
                f"DELETE FROM {table}",
                f"SELECT 1 FROM {table} FOR UPDATE",
            ):
                assert touched(connection, statement) == 0, statement
        owner = make_url(postgresql_url).username
        for statement in (
            f"SET ROLE {owner}",
            f"SET SESSION AUTHORIZATION {owner}",
            "SET row_security = off; SELECT * FROM certificates",
            "ALTER TABLE certificates DISABLE ROW LEVEL SECURITY",
            "DROP POLICY certificates_of_team ON certificates",
            "TRUNCATE run_leases",
        ):
            assert touched(connection, statement) is None, statement
    engine.dispose()
    assert not any(counts["None"].values())
    assert not any(counts["bob"].values())
    shown = {table for table, count in counts["ada"].items() if count}
    assert shown >= {"certificates", "requests", "ledgers", "ledger_events", "reservations"}
    assert shown >= {"runs", "run_events", "run_leases", "waivers", "certificate_facets"}
    assert counts["*"] == counts["ada"]


def test_a_connection_shows_what_it_was_opened_for(database_url: str) -> None:
    """Each by itself, though the pool hands out the same one."""
    engine = open_engine(database_url)
    grants = metadata.tables["dataset_grants"]
    with engine.begin() as connection:
        for team in ("ada", "bob"):
            connection.execute(
                grants.insert().values(
                    dataset="d", team=team, may="read", reason="", granted_by="x",
                    at=datetime.now(UTC),
                )
            )  # fmt: skip
    aliased = grants.alias("mine")
    for source in (engine, reader(engine)):
        for team, seen in (("ada", ["ada"]), (None, ["ada", "bob"]), ("bob", ["bob"]), ("x", [])):
            with acting_for(team), source.connect() as connection:
                for table in (grants, aliased):
                    query = select(table.c.team).order_by(table.c.team)
                    assert list(connection.execute(query).scalars()) == seen
                joined = select(grants.c.team).join(aliased, aliased.c.dataset == grants.c.dataset)
                assert {*connection.execute(joined).scalars()} == {*seen}
    engine.dispose()
