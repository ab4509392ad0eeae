"""``affidavit audit`` verifies the log against the database: text, JSON and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.plan import plan_from
from affidavit.service.__main__ import main
from affidavit.service.certificates.decisions import RevocationRequest, revoke
from affidavit.service.certificates.store import CertificateStore, PlanRequest
from affidavit.service.certificates.submit_plan import sign
from affidavit.service.core.database import writer
from affidavit.service.identity.actor import Actor, CommandContext
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.keys.keyring import KeysetStore
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.ledger.wire_models import GrantRequest
from affidavit.service.log.entries import append
from affidavit.trust import (
    KeyStore,
    Revocation,
    Roots,
    SigningKey,
    draft_keyset,
)
from tests.service.log.conftest import KEY, NOON, Log

Tamper = Callable[..., None]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def issued(log: Log, document: Any) -> list[str]:
    """Three certificates, two refusals and a token, in the log; the ids of the former."""
    store = CertificateStore(log.engine)
    ids = []
    plans = [document(steps=steps) for steps in (1, 2, 3)]
    plans += [document(target={"epsilon": 0.01, "delta": 1e-5})]
    plans += [document(optimizer={"name": "dp_dice"})]
    for plan in map(plan_from, plans):
        assessment = certify(plan, second_opinion=False)
        now = datetime.now(UTC)
        created = sign(assessment, KEY, requester="me", issued_at=now, previous=None)
        request = PlanRequest(
            requester="me", received_at=NOON, content_type="application/json", body=b"{}"
        )
        store.add(created, KEY.public.as_record(), request)
        ids.append(created.id)
    TokenRepository(log.engine).new("ci", [Scope.SUBMIT], 90, by="root", at=datetime.now(UTC))
    log.sequence()
    return ids[:3]


@pytest.fixture
def run(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """A command of the service's program: its exit code and what it printed."""
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    monkeypatch.setenv("DATABASE_URL", log.url)

    def call(*arguments: str) -> tuple[int, str]:
        code = main(arguments)
        told = capsys.readouterr()
        return code, told.out + told.err

    return call


# ---- rows ---------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is_wrong(log: Log, issued: list[str]) -> None:
    assert len(issued) == 3
    assert log.audit() == []


@pytest.mark.usefixtures("issued")
def test_a_key_is_listed_that_signed_nothing(log: Log, tamper: Tamper) -> None:
    key = SigningKey.generate().public
    tamper(
        "INSERT INTO signing_keys (key_id, record, first_used_at) "
        "SELECT :id, :record, first_used_at FROM signing_keys",
        id=key.key_id,
        record=json.dumps(key.as_record()),
    )
    (result,) = log.audit()
    assert (result.code, result.where) == ("row_without_entry", f"signing_keys {key.key_id}")


@pytest.mark.usefixtures("issued")
def test_a_certificate_is_removed(log: Log, tamper: Tamper) -> None:
    tamper("DELETE FROM requests", "DELETE FROM certificates WHERE verdict = 'certified'")
    assert [item.code for item in log.audit()] == ["entry_without_row"] * 3


@pytest.mark.parametrize("kind", ["keyset", "approval", "policy", "revocation"])
def test_an_entry_that_says_nothing_is_of_no_row(log: Log, kind: str) -> None:
    with writer(log.engine).begin() as connection:
        append(connection, kind, "keyset:9", {}, actor="mallory", at=NOON)
    log.sequence()
    assert [item.code for item in log.audit()] == ["entry_without_row"]


def test_a_certificate_is_added_that_was_never_logged(
    log: Log, issued: list[str], tamper: Tamper
) -> None:
    """A copy under another id: signed bytes of another certificate."""
    names = (
        "plan_digest, name, dataset, adjacency, verdict, epsilon_upper, delta, created_at, "
        "not_after, envelope_digest, approvals_required, approvals_given, key_id, bundle, result"
    )
    tamper(
        f"INSERT INTO certificates (id, untrusted, issue, {names}) "
        f"SELECT 'sha256:{'0' * 64}', untrusted, issue, {names} FROM certificates "
        f"WHERE id = '{issued[0]}'"
    )
    assert log.codes() == {"row_without_entry", "row_changed"}


def test_columns_beside_the_signed_bytes_are_changed(
    log: Log, issued: list[str], tamper: Tamper
) -> None:
    later = "'2999-01-01 00:00:00.000000'"
    for name, value in {
        "verdict": "'refused'",
        "issue": "7",
        "key_id": "'another'",
        "envelope_digest": "'sha256:0'",
        "result": 'REPLACE(result, \'"verdict": "certified"\', \'"verdict": "refused"\')',
        "epsilon_upper": "0.001",
        "name": "'another'",
        "dataset": "'another'",
        "adjacency": "'zero_out'",
        "approvals_required": "2",
        "approvals_given": "2",
        "created_at": later,
        "not_after": later,
        "plan_digest": "'sha256:0'",
    }.items():
        tamper(f"UPDATE certificates SET {name} = {value} WHERE id = '{issued[1]}'")
        (result,) = log.audit()
        assert result.code == "row_changed"
        assert name.removesuffix("_upper") in result.message
    shown = "REPLACE(result, '\"given\": ', '\"given\": 1')"
    tamper(f"UPDATE certificates SET result = {shown} WHERE id = '{issued[2]}'")
    assert sorted("noise_multiplier" in item.message for item in log.audit()) == [False, True]
    tamper(f"UPDATE certificates SET result = '{{}}' WHERE id = '{issued[2]}'")
    tamper(f"UPDATE certificates SET epsilon_upper = NULL WHERE id = '{issued[0]}'")
    assert [item.code for item in log.audit()] == ["row_changed"] * 3


def test_what_cannot_be_read_at_all_hides_nothing_else(
    log: Log, issued: list[str], tamper: Tamper
) -> None:
    assert len(issued) == 3
    tamper("UPDATE certificates SET dataset = 'another'")
    found = {item.where for item in log.audit()}
    nested = "[" * 60_000
    tamper(f"UPDATE log_entries SET content = '{nested}' WHERE id = 1")
    assert found < {item.where for item in log.audit()}


def test_signed_bytes_are_changed(log: Log, issued: list[str], tamper: Tamper) -> None:
    other = f"(SELECT bundle FROM certificates WHERE id = '{issued[2]}')"
    tamper(f"UPDATE certificates SET bundle = {other} WHERE id = '{issued[1]}'")
    assert {"row_without_entry", "entry_without_row", "row_changed"} <= log.codes()
    tamper(f"UPDATE certificates SET bundle = :none WHERE id = '{issued[1]}'", none=b"{}")
    assert {"row_changed", "entry_without_row"} <= log.codes()


def test_what_is_relied_on_beside_the_logged_rows_is_changed(
    log: Log, issued: list[str], tamper: Tamper
) -> None:
    """Which keys are revoked, what a revocation is of, the newest grant, who asked."""
    now, root = datetime.now(UTC), SigningKey.generate()
    unsigned = draft_keyset(
        None,
        roots=Roots.of([root.public], threshold=1),
        keys=[KEY.public],
        revoked=[Revocation(key_id=KEY.key_id, since="2099-01-01T00:00:00Z")],
        issued_at=now,
        expires_at=now + timedelta(days=1),
    )
    keyset = unsigned.signed_by(root).as_bytes()
    KeysetStore(log.engine).publish(keyset, actor="me", at=now)
    request = RevocationRequest(code="other", reason="over")
    revoke(log.engine, issued[0], request, Actor("me", frozenset(Scope)), now)
    call = CommandContext(actor="me", at=now)
    for may in ("reserve", "nothing"):
        LedgerStore(log.engine).grant("toy", GrantRequest(team="others", may=may), call)
    log.sequence()
    assert log.audit() == []
    for change, told in {
        "DELETE FROM revoked_keys": "revokes other keys",
        "UPDATE keysets SET document = :unsigned": "not valid",
        "UPDATE revocations SET untrusted = NOT untrusted": "the issue of its envelope",
        "UPDATE dataset_grants SET id = id + 7 WHERE may = 'reserve'": "not in the order",
        "UPDATE certificate_facets SET requester = 'another'": "requester",
        "DELETE FROM certificate_facets": "mechanism",
    }.items():
        tamper(change, unsigned=unsigned.as_bytes())
        findings = log.audit()
        assert {item.code for item in findings} == {"row_changed"}
        assert any(told in item.message for item in findings), change
    tamper("UPDATE log_checkpoints SET tree_size = tree_size + 1")
    assert log.codes() == {"row_changed", "checkpoint_changed"}


@pytest.mark.usefixtures("issued")
@pytest.mark.parametrize(
    "change",
    [
        "scopes = 'admin'",
        "name = 'root'",
        "digest = 'of another'",
        """serves = '{"queues": ["gpu"]}'""",
        """scopes = 'admin', serves = '{"scopes": ["submit"]}'""",
    ],
)
def test_a_token_is_given_more_than_was_logged(log: Log, tamper: Tamper, change: str) -> None:
    tamper(f"UPDATE tokens SET {change}")
    assert log.codes() == {"row_without_entry", "entry_without_row"}


@pytest.mark.usefixtures("issued")
def test_a_token_is_given_more_time(log: Log, tamper: Tamper) -> None:
    later = datetime.now(UTC) + timedelta(days=1000)
    value = later.isoformat(sep=" ") if "sqlite" in log.url else later
    tamper("UPDATE tokens SET expires_at = :later", later=value)
    assert log.codes() == {"row_without_entry", "entry_without_row"}


# ---- the command ----------------------------------------------------------------------------


@pytest.mark.usefixtures("issued")
def test_verify_says_what_is_right_and_what_was_not_asked(log: Log, run: Run) -> None:
    code, told = run("audit", "verify")
    assert (code, "6 entries" in told, "--checkpoint" in told) == (0, True, True)
    log.enter(2)
    code, told = run("audit", "verify", "--json")
    assert code == 0
    assert json.loads(told) == {
        "consistent": True,
        "entries": 6,
        "waiting": 2,
        "kept_checkpoints": 0,
        "findings": [],
    }


def test_verify_is_1_where_something_is_wrong(issued: list[str], run: Run, tamper: Tamper) -> None:
    tamper(f"UPDATE certificates SET verdict = 'refused' WHERE id = '{issued[0]}'")
    code, told = run("audit", "verify")
    assert code == 1
    assert f"row_changed  certificates {issued[0]}" in told
    code, told = run("audit", "verify", "--json")
    assert (code, json.loads(told)["consistent"]) == (1, False)
    assert [load["code"] for load in json.loads(told)["findings"]] == ["row_changed"]
    tamper("UPDATE tokens SET id = :clear", clear="\x1b[2J")
    assert "tokens \\x1b[2J: no log entry" in run("audit", "verify")[1]


@pytest.mark.usefixtures("issued")
def test_an_exported_checkpoint_finds_what_the_database_cannot(
    log: Log, run: Run, tamper: Tamper, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    code, told = run("audit", "export-checkpoint", str(path))
    assert (code, "6 entries" in told) == (0, True)
    log.grow(5)
    code, told = run("audit", "verify", "--checkpoint", str(path))
    assert code == 0, told
    assert run("audit", "export-checkpoint", str(path))[0] == 0
    newest = path.read_bytes()
    tamper(
        "DELETE FROM log_checkpoints WHERE tree_size > 6",
        "DELETE FROM log_leaves WHERE leaf_index >= 6",
        "DELETE FROM log_nodes WHERE (position + 1) * (1 << level) > 6",
        "DELETE FROM log_entries WHERE id > 6",
    )
    assert run("audit", "verify")[0] == 0
    code, told = run("audit", "verify", f"--checkpoint={path}")
    assert (code, "rolled_back" in told) == (1, True)
    log.grow(6)
    code, told = run("audit", "verify", f"--checkpoint={path}")
    assert (code, "rewritten" in told) == (1, True)
    # What tells of it is not written over.
    code, told = run("audit", "export-checkpoint", str(path))
    assert code == 1, told
    assert path.read_bytes() == newest


def test_mistakes_of_use_are_one_sentence(log: Log, run: Run, tmp_path: Path) -> None:
    assert log.entered == 0
    (tmp_path / "text").write_text("not a checkpoint")
    for arguments in (
        ("verify", "--checkpoint", str(tmp_path / "missing")),
        ("verify", "--checkpoint", str(tmp_path / "text")),
        ("export-checkpoint", str(tmp_path / "new")),
    ):
        code, told = run("audit", *arguments)
        assert code == 2, arguments
        assert len(told.splitlines()) == 1
    assert not (tmp_path / "new").exists()
    log.grow(1)
    assert run("audit", "export-checkpoint", str(tmp_path / "none" / "new"))[0] == 2


@pytest.mark.usefixtures("issued")
@pytest.mark.parametrize("record", ["{}", "[" * 60_000])
def test_a_key_that_cannot_be_read_keeps_no_auditor_from_a_kept_checkpoint(
    log: Log, run: Run, tamper: Tamper, tmp_path: Path, record: str
) -> None:
    """Whoever can insert rows can insert one."""
    path = str(tmp_path / "kept")
    assert run("audit", "export-checkpoint", path)[0] == 0
    columns = "'strange', :record, first_used_at FROM signing_keys LIMIT 1"
    tamper(
        f"INSERT INTO signing_keys (key_id, record, first_used_at) SELECT {columns}", record=record
    )
    code, told = run("audit", "verify", "--checkpoint", path)
    assert (code, "signing_keys strange" in told) == (1, True), told
    assert [item.code for item in log.audit()] == ["row_without_entry", "row_changed"]


def test_a_checkpoint_of_an_unknown_key_accuses_nobody(log: Log, run: Run, tmp_path: Path) -> None:
    stored = log.grow(3)
    forged = tmp_path / "forged"
    forged.write_text(stored.note.replace("\n3\n", "\n4\n"))
    code, told = run("audit", "verify", "--checkpoint", str(forged))
    assert (code, str(forged) in told) == (2, True)


def test_a_key_of_the_directory_is_known_when_the_table_was_emptied(
    log: Log, run: Run, tamper: Tamper, tmp_path: Path
) -> None:
    """Who drops the whole log does not make kept checkpoints unreadable by it."""
    key = KeyStore(tmp_path / "keys").new("test")
    log.key = key
    path = tmp_path / "checkpoint"
    path.write_text(log.grow(2).note)
    tamper(
        "DELETE FROM log_checkpoints",
        "DELETE FROM log_leaves",
        "DELETE FROM log_nodes",
        "DELETE FROM log_entries",
        "DELETE FROM signing_keys",
    )
    code, told = run("audit", "verify", "--checkpoint", str(path))
    assert (code, "rolled_back" in told) == (1, True)


def test_a_database_that_cannot_be_reached_is_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    assert run("audit", "verify")[0] == 3
