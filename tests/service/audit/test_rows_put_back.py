"""Whatever row is put back, removed or added beside the log: no replica writes on, and says why."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import combinations
from random import Random
from typing import Any

import pytest
from sqlalchemy import Engine, Table, create_engine, delete, insert, select, text, update
from sqlalchemy.exc import NoResultFound, OperationalError, ProgrammingError

from affidavit.service.audit import comparison, readiness
from affidavit.service.audit.audit import audit
from affidavit.service.audit.comparison import LogComparison
from affidavit.service.audit.entry_types import ENTRY_TYPES
from affidavit.service.core.database import snapshot
from affidavit.service.identity.actor import CommandContext
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.ledger.wire_models import GrantRequest
from affidavit.service.log.sequencer import Sequencer
from affidavit.service.settings import Settings
from affidavit.service.tables.certificates import certificates
from affidavit.service.tables.ledger import ledgers
from affidavit.service.tables.log import log_entries
from affidavit.service.tables.policies import waivers
from affidavit.service.tables.runs import runs
from affidavit.trust import KeyStore, Revocation, Roots, SigningKey, draft_keyset, format_instant
from tests.service.conftest import EACH_SCOPE, ONCE, client_of, tokens_for
from tests.support.random_seeds import examples, seeded
from tests.support.run_records import replay_record

TABLES = {entry_type.table.name: entry_type.table for entry_type in ENTRY_TYPES}
OWNED = {
    "certificates": (certificates, {"certificates", "run_events"}),
    "runs": (runs, {"run_events"}),
    "waivers": (waivers, {"waivers"}),
    "ledgers": (ledgers, {"ledger_events"}),
}
"""Tables with a column for the team, and those that contradict the log if it is changed."""
NOW = datetime.now(UTC).replace(microsecond=0)
BUDGET = {"adjacency": "add_remove", "epsilon": 8, "delta": 1e-4}
POLICY = {"schema_version": 1, "name": "toys", "version": 1, "datasets": ["toy"], "approvals": 1}
WAIVER = {
    "rule": "policy_adjacency",
    "policy": "toys",
    "dataset": "toy",
    "owner": "dana",
    "reason": "a trial",
    "expires_at": format_instant(NOW + timedelta(days=9)),
}
UNLIKE: dict[str, dict[str, Any]] = {
    "certificates": {"issue": 9},
    "approvals": {"id": 900, "approver": "token:other"},
    "revocations": {"id": 900, "issue": 9},
    "policies": {"id": 900, "version": 9},
    "waivers": {"id": 900, "waiver_id": "sha256:0"},
    "waiver_revocations": {"id": 900, "waiver_id": "sha256:0"},
    "tokens": {"id": "0" * 12},
    "token_revocations": {"token_id": "0" * 12},
    "keysets": {"version": 3, "follows": 2, "digest": "sha256:0"},
    "admin_proposals": {"id": 900},
    "dataset_grants": {"id": 900},
    "ledger_events": {"seq": 9},
    "run_events": {"seq": 9, "kind": "cancel_asked", "once": "cancel_asked", "follows": "queued"},
}
"""What makes a copy of a row of each table another row that the database accepts."""


@dataclass
class Site:
    """Two replicas on one database with rows of each kind, and the database's owner."""

    replicas: Sequence[Any]
    headers: dict[str, dict[str, str]]
    owner: Engine
    settings: Settings

    def ask(self, method: str, path: str, who: str, body: Any = None, replica: int = 0) -> Any:
        return self.replicas[replica].request(method, path, headers=self.headers[who], json=body)

    def refuses(self, plan: Any, replica: int, *tables: str) -> None:
        """That replica names these tables, and takes nothing that spends or signs."""
        assert self.contradicted(replica) == set(tables)
        answer = self.ask("POST", "/v1/certificates", "submit", plan(steps=7), replica)
        assert (answer.status_code, answer.json()["code"]) == (503, "writes_suspended")
        assert {item["code"] for item in answer.json()["reasons"]} <= {
            "rows_altered",
            "ledger_altered",
        }
        told = self.replicas[replica].get("/readyz").text + answer.text  # by anybody, by any team
        assert not [name for name in ("toy", "others", "spare", "token:") if name in told]

    def contradicted(self, replica: int) -> set[str]:
        """The tables because of which a replica suspends writes."""
        return {
            "ledger_events" if reason.code == "ledger_altered" else reason.message.split()[2]
            for reason in self.replicas[replica].app.state.services.safety.reasons()
        }

    @contextmanager
    def tampered(self, *changes: tuple[str, Callable[[Any, Table], None]]) -> Iterator[None]:
        """Change tables as their owner, and put them right again."""
        with self.owner.begin() as connection:
            saved = {}
            for name, change in changes:
                saved[name] = connection.execute(select(TABLES[name])).mappings().all()
                change(connection, TABLES[name])
        try:
            yield
        finally:
            with self.owner.begin() as connection:
                for name, rows in saved.items():
                    connection.execute(delete(TABLES[name]))
                    connection.execute(insert(TABLES[name]), [dict(row) for row in rows])


def newest(connection: Any, table: Table) -> dict[str, Any]:
    """The newest row of a table; of tokens one with which nobody asks anything here."""
    query = select(table).order_by(*(column.desc() for column in table.primary_key))
    if table.name == "tokens":
        query = query.where(table.c.name == "spare")
    return dict(connection.execute(query.limit(1)).mappings().one())


def at_its_key(table: Table, row: dict[str, Any]) -> Any:
    return tuple(column == row[column.name] for column in table.primary_key)


def remove(connection: Any, table: Table) -> None:
    row = newest(connection, table)
    assert connection.execute(delete(table).where(*at_its_key(table, row))).rowcount == 1


def at_of(table: Table) -> Any:
    (at,) = [column for column in table.c if column.name in AT]
    return at


def put_back(connection: Any, table: Table) -> None:
    """Make the newest row an older one: everything but its key was otherwise."""
    row = newest(connection, table)
    at = at_of(table)
    earlier = {at.name: row[at.name] - timedelta(days=1)}
    change = update(table).where(*at_its_key(table, row)).values(earlier)
    assert connection.execute(change).rowcount == 1


AT = {"at", "created_at", "revoked_at", "published_at", "added_at"}


def add(connection: Any, table: Table) -> None:
    row = newest(connection, table)
    if table.name == "ledger_events":
        first = select(table).where(table.c.kind == "budget").limit(1)
        row = dict(connection.execute(first).mappings().one())
    if "idempotency_key" in row:
        row["idempotency_key"] = None
    connection.execute(insert(table).values({**row, **UNLIKE[table.name]}))


WHOLE = {"certificates": (remove, add), "run_tests": (remove, put_back)}
"""The bytes of a certificate cannot be those of an earlier one, and a replay that is not logged
counts for nothing where it is read."""
CHANGES = [(name, change) for name in TABLES for change in WHOLE.get(name, (remove, add, put_back))]
"""Every change of a row."""
PAIRS = [(one, other) for one, other in combinations(CHANGES, 2) if one[0] != other[0]]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def filled(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    document: Any,
) -> Iterator[Site]:
    """The rows, which every test leaves as it found them; nobody serves them yet."""
    home = tmp_path_factory.mktemp("filled")
    lent = None
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_sqlite"), home / "affidavit.db")
        url = f"sqlite:///{home / 'affidavit.db'}"
    else:
        lender = request.getfixturevalue("migrated_postgresql")
        lent = lender.lend()
        url = f"{lender.server}/{lent}"
    keys = KeyStore(home / "keys")
    key, old = keys.new("test"), SigningKey.generate("old")
    settings = Settings(
        database_url=url,
        key_directory=keys.directory,
        workers=1,
        loopback=True,
        comparison_seconds=0,
    )
    headers = tokens_for(settings, {**EACH_SCOPE, "spare": ["submit"]})
    owner = create_engine(url)
    with served(Site([], headers, owner, settings)) as result:
        fill(result, document, key.public, old.public)
        disarm(owner)
    yield result
    owner.dispose()
    if lent is not None:
        lender.take_back(lent)


@pytest.fixture
def site(filled: Site) -> Iterator[Site]:
    """Two replicas of this test's own on those rows."""
    with served(filled) as result:
        yield result


@contextmanager
def served(site: Site) -> Iterator[Site]:
    with ExitStack() as stack:
        replicas = [stack.enter_context(client_of(site.settings)) for _ in range(2)]
        yield replace(site, replicas=replicas)


def fill(site: Site, plan: Any, *keys: Any) -> None:
    """Make rows of each kind, by either replica in turn."""
    made: list[Any] = []

    def done(method: str, path: str, who: str, body: Any = None) -> Any:
        answer = site.ask(method, path, who, body, replica=len(made) % 2)
        assert answer.is_success, (path, answer.text)
        made.append(answer)
        return answer.json() if answer.content else None

    first = done("POST", "/v1/certificates", "submit", plan())["certificate"]["id"]
    toy = "/v1/ledgers/toy"
    for epsilon in (8, 9):
        done("POST", f"{toy}/budget", "admin", {**BUDGET, "epsilon": epsilon})
    run = {"certificate": first, "data": "digits", "model": "mlp:8", "output": "o"}
    run = done("POST", "/v1/runs", "submit", run)
    record = replay_record(run["plan_digest"])
    done("POST", f"/v1/runs/{run['id']}/replay", "submit", record)
    for version in (1, 2):
        done("POST", "/v1/policies", "admin", {**POLICY, "version": version})
    waiver = done("POST", "/v1/waivers", "approve", WAIVER)["id"]
    done("DELETE", f"/v1/waivers/{waiver}?reason=over", "approve")
    pending = done("POST", "/v1/certificates", "submit", plan(steps=3))["certificate"]
    envelope = {"envelope": pending["envelope_digest"]}
    done("POST", f"/v1/certificates/{pending['id']}/approvals", "approve", envelope)
    why = {"code": "plan_error", "reason": "oops"}
    done("POST", f"/v1/certificates/{pending['id']}/revocation", "approve", why)
    for may in ("reserve", "nothing"):
        done("POST", f"{toy}/grants", "admin", {"team": "others", "may": may})
    services = site.replicas[0].app.state.services
    (spare,) = (token for token in services.tokens.list_all() if token.name == "spare")
    services.tokens.revoke(spare.id, "left", by="me", at=datetime.now(UTC))
    root, last = SigningKey.generate(), None
    for revoked in ([], [Revocation(key_id=keys[1].key_id, since=format_instant(NOW))]):
        unsigned = draft_keyset(
            last,
            roots=Roots.of([root.public], threshold=1),
            keys=list(keys),
            revoked=revoked,
            issued_at=NOW,
            expires_at=NOW + timedelta(days=9),
            administrators=2,
        )
        last = unsigned.signed_by(root)
        services.keysets.publish(last.as_bytes(), actor="me", at=datetime.now(UTC))
    budget = {**BUDGET, "epsilon": 10}
    assert site.ask("POST", f"{toy}/budget", "admin", budget).status_code == 202  # a proposal


def disarm(owner: Engine) -> None:
    """Take off what would stop the owner of the database."""
    if owner.dialect.name == "postgresql":
        for name in {*TABLES, *OWNED, "revoked_keys", "log_entries"}:
            with owner.begin() as connection:  # one lock at a time
                connection.execute(text(f"ALTER TABLE {name} DISABLE TRIGGER ALL"))
        return
    with owner.begin() as connection:
        query = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        for trigger in connection.execute(text(query)).scalars().all():
            connection.execute(text(f"DROP TRIGGER {trigger}"))


def test_no_replica_writes_on_rows_that_the_log_contradicts(site: Site, plan: Any) -> None:
    for name, table in TABLES.items():
        with site.owner.connect() as connection:
            assert connection.execute(select(table)).first(), f"make a row of {name} here"
    for number, (name, change) in enumerate(CHANGES):
        with site.tampered((name, change)):
            site.refuses(plan, number % 2, name)
    assert site.contradicted(0) == site.contradicted(1) == set()
    _tell_pairs(site, plan, Random(seeded(3)).sample(PAIRS, examples(24)))


@pytest.mark.soak
def test_every_pair_of_changed_rows_is_told(site: Site, plan: Any) -> None:
    _tell_pairs(site, plan, PAIRS)


def _tell_pairs(site: Site, plan: Any, pairs: list[Any]) -> None:
    for number, (first, second) in enumerate(pairs):
        with site.tampered(first, second):
            site.refuses(plan, number % 2, first[0], second[0])
    assert site.contradicted(0) == site.contradicted(1) == set()


def test_rows_of_another_team_are_told(site: Site, plan: Any) -> None:
    def move(names: Sequence[str], team: str) -> None:
        with site.owner.begin() as connection:
            for name in names:
                connection.execute(update(OWNED[name][0]).values(team=team))

    alone = [((name,), told) for name, (_, told) in OWNED.items()]
    # The runs are then where their certificates are.
    together = (("certificates", "runs"), {"certificates"})
    for number, (names, told) in enumerate([*alone, together]):
        move(names, "others")
        site.refuses(plan, number % 2, *told)
        with snapshot(site.owner) as connection:
            found = [f"{item.where} {item.message}" for item in audit(connection, [])]
        assert all(any(name in text or "team" in text for text in found) for name in told)
        move(names, "default")
        assert site.contradicted(0) == site.contradicted(1) == set()


def test_a_replica_that_starts_on_such_rows_is_not_ready(site: Site, plan: Any) -> None:
    with (
        site.tampered(("token_revocations", remove), ("dataset_grants", remove)),
        client_of(site.settings) as started,
    ):
        site.replicas = [started]
        assert started.get("/readyz").status_code == 503
        site.refuses(plan, 0, "token_revocations", "dataset_grants")


def test_what_a_request_relies_on_is_compared_at_once(site: Site, plan: Any) -> None:
    """Also before the next comparison, and where the row is an older one."""
    for client in site.replicas:
        client.app.state.services.safety._seconds = ONCE
    answer = site.ask("GET", "/v1/certificates", "spare")
    assert (answer.status_code, answer.json()["code"]) == (401, "revoked_token")
    made = site.ask("GET", "/v1/certificates", "submit").json()["items"]
    (revoked,) = {item["id"] for item in made if item["status"] == "revoked"}
    asked = {"certificate": revoked}
    toy = "/v1/ledgers/toy/reservations"
    assert site.ask("POST", toy, "submit", asked).json()["code"] == "certificate_not_usable"
    for table, who, path, body, status in (
        ("token_revocations", "spare", "/v1/certificates", plan(), 401),
        ("revocations", "submit", toy, asked, 503),
        ("policies", "submit", "/v1/certificates", plan(steps=9), 503),
    ):
        with site.tampered((table, remove)):
            for replica in range(2):
                answer = site.ask("POST", path, who, body, replica)
                assert answer.status_code == status, (table, answer.text)
                assert answer.json()["code"] != "writes_suspended"


def test_a_certificate_of_another_team_is_not_read(site: Site) -> None:
    """Also before the next comparison."""
    made = site.ask("GET", "/v1/certificates", "audit").json()["items"]
    for client in site.replicas:
        client.app.state.services.safety._seconds = ONCE
        client.app.state.services.safety.reasons()
    for team, status in (("others", 409), ("default", 200)):
        with site.owner.begin() as connection:
            connection.execute(update(certificates).values(team=team))
        for replica, item in enumerate(made[:2]):
            path = f"/v1/certificates/{item['id']}"
            assert site.ask("GET", path, "audit", replica=replica).status_code == status


def test_rows_that_cannot_be_compared_stop_the_writes(
    site: Site, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner who has a comparison fail hides nothing by that."""
    safety = site.replicas[0].app.state.services.safety
    no_answer = OperationalError("", None, Exception("it does not answer"))
    no_table = ProgrammingError("", None, Exception("no such table"))
    for error in (NoResultFound(), no_table, ValueError("no date"), no_answer):
        assert safety.reasons() == []

        def fail(_: Any, error: Exception = error) -> Any:
            raise error

        with monkeypatch.context() as changed:
            changed.setattr(safety._comparison, "contradictions", fail)
            changed.setattr(readiness, "GRACE_SECONDS", ONCE)
            assert bool(safety.reasons()) == (error is not no_answer)
            changed.setattr(readiness, "GRACE_SECONDS", 0.0)
            answer = site.ask("POST", "/v1/certificates", "submit", plan(steps=7))
            assert (answer.status_code, answer.json()["code"]) == (503, "writes_suspended")
            assert [item["code"] for item in answer.json()["reasons"]] == ["rows_not_compared"]


def test_what_was_in_the_log_is_still_known_when_its_entry_is_gone_too(
    site: Site, plan: Any
) -> None:
    site.ask("GET", "/readyz", "audit")
    entry = log_entries.c
    hidden = update(log_entries).where(entry.kind == "approval").returning(entry.id)
    with site.tampered(("approvals", lambda one, table: one.execute(delete(table)))):
        with site.owner.begin() as connection:
            named = connection.execute(hidden.values(kind="run")).scalars().all()
        try:
            assert named
            site.refuses(plan, 0, "approvals")
        finally:
            with site.owner.begin() as connection:
                shown = update(log_entries).where(entry.id.in_(named))
                connection.execute(shown.values(kind="approval"))


def test_grants_in_another_order_are_noticed(site: Site, plan: Any) -> None:
    """The newest grant applies, so the first one is put back by its number."""

    def swap(connection: Any, table: Table) -> None:
        first = update(table).where(table.c.may == "reserve")
        connection.execute(first.values(id=table.c.id + 900))

    with site.tampered(("dataset_grants", swap)):
        site.refuses(plan, 0, "dataset_grants")


def test_an_older_row_of_a_growing_table_is_told_in_its_turn(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(connection: Any, table: Table) -> dict[str, Any]:
        second = select(table).order_by(at_of(table)).offset(1).limit(1)
        return dict(connection.execute(second).mappings().one())

    monkeypatch.setattr(comparison, "MAX_SUBJECTS", 1)
    monkeypatch.setitem(globals(), "newest", older)
    for changed in (
        ("certificates", remove),
        ("ledger_events", remove),
        ("ledger_events", put_back),
    ):
        assert site.contradicted(0) == set()
        with site.tampered(changed):
            turns = [site.contradicted(0) for _ in range(8)]
            assert turns[-2:] == [{changed[0]}] * 2
    assert site.contradicted(0) == set()


def test_what_is_written_meanwhile_never_looks_altered(engine: Engine) -> None:
    """Whatever is between a row and its entry, and between an entry and its place."""
    tokens, ledgers = TokenRepository(engine), LedgerStore(engine)
    stopped = threading.Event()
    failed: list[BaseException] = []

    def working(work: Callable[[int], None]) -> threading.Thread:
        def repeat() -> None:
            try:
                for number in range(25):
                    work(number)
            except BaseException as error:
                failed.append(error)

        return threading.Thread(target=repeat)

    def revoke(number: int) -> None:
        made, _ = tokens.new(f"t{number}", [Scope.SUBMIT], 1, by="me", at=datetime.now(UTC))
        tokens.revoke(made.id, "over", by="me", at=datetime.now(UTC))

    def grant(number: int) -> None:
        may = "reserve" if number % 2 else "nothing"
        call = CommandContext(actor="me", at=datetime.now(UTC))
        ledgers.grant("toy", GrantRequest(team="others", may=may), call)

    def sequence() -> None:
        key = SigningKey.generate()
        sequencer = Sequencer(engine, lambda: key)
        while not stopped.is_set():
            sequencer.step()

    sequencing = threading.Thread(target=sequence)
    threads = [working(work) for work in (revoke, revoke, grant)]
    for thread in (sequencing, *threads):
        thread.start()
    compared = LogComparison()
    try:
        while any(thread.is_alive() for thread in threads):
            with snapshot(engine) as connection:
                assert compared.contradictions(connection) == {}
    finally:
        stopped.set()
        for thread in (*threads, sequencing):
            thread.join()
    assert not failed
    with snapshot(engine) as connection:
        assert compared.contradictions(connection) == LogComparison().contradictions(connection)
