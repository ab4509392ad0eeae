"""Issues of a certificate, approvals, revocations and status lists.

Until here a certificate id had one row. From here on it has issues, numbered from 1, of
which a later one supersedes the earlier; the rows that are there become issue 1, with
their signed bytes and their answers as they were. SQLite cannot change a primary key, so
its two tables are made anew and the rows copied; PostgreSQL changes them in place, so that
what was granted on them stays granted.

The downgrade keeps the newest issue of each certificate, which is what the release before
this one would have answered, and forgets approvals, revocations and status lists.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
VALID_FOR = timedelta(days=365)
"""How long every certificate was valid before this revision."""
BATCH = 200

CERTIFICATE = (
    "id, untrusted, plan_digest, name, dataset, adjacency, verdict, epsilon_upper, delta, "
    "created_at, key_id, bundle, result"
)
REQUEST = "id, certificate_id, untrusted, requester, received_at, content_type, body"


def upgrade() -> None:
    """Number the issues, and make the three tables of what may happen to one."""
    if _sqlite():
        _make_certificates("certificates_anew", with_issues=True)
        op.execute(
            f"INSERT INTO certificates_anew ({CERTIFICATE}, issue, not_after, envelope_digest, "
            f"approvals_required, approvals_given) "
            f"SELECT {CERTIFICATE}, 1, created_at, '', 0, 0 FROM certificates"
        )
        _make_requests("requests_anew", with_issues=True)
        op.execute(
            f"INSERT INTO requests_anew ({REQUEST}, issue) SELECT {REQUEST}, 1 FROM requests"
        )
        _take_their_places()
        _read_from_bundles()
        append_only.protect("certificates", "id", "untrusted", "issue")
        append_only.protect("requests", "id")
    else:
        _add_issues()
    _approvals()
    _revocations()
    _status_lists()
    for table, rules in RULES.items():
        _guard(table, rules)


def downgrade() -> None:
    """Drop the three tables, and keep each certificate's newest issue."""
    if not _sqlite():
        op.execute("DROP TRIGGER certificates_guard ON certificates")
    for table in ("status_lists", "revocations", "approvals"):
        op.drop_table(table)
    if _sqlite():
        _make_certificates("certificates_anew", with_issues=False)
        op.execute(
            f"INSERT INTO certificates_anew ({CERTIFICATE}) SELECT {CERTIFICATE} "
            f"FROM certificates AS kept WHERE {NEWEST}"
        )
        _make_requests("requests_anew", with_issues=False)
        op.execute(f"INSERT INTO requests_anew ({REQUEST}) SELECT {REQUEST} FROM requests")
        _take_their_places()
        append_only.protect("certificates", "id", "untrusted")
        append_only.protect("requests", "id")
    else:
        _drop_issues()


NEWEST = (
    "issue = (SELECT max(each.issue) FROM certificates AS each "
    "WHERE each.id = kept.id AND each.untrusted = kept.untrusted)"
)


def _sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"


# ---- SQLite: tables made anew -----------------------------------------------------------


def _make_certificates(table: str, *, with_issues: bool) -> None:
    op.create_table(
        table,
        sa.Column("id", sa.String(71), primary_key=True),
        sa.Column("untrusted", sa.Boolean, primary_key=True),
        *([sa.Column("issue", sa.Integer, primary_key=True)] if with_issues else []),
        sa.Column("plan_digest", sa.String(71), nullable=False),
        sa.Column("name", sa.String(64)),
        sa.Column("dataset", sa.String(64)),
        sa.Column("adjacency", sa.String(32), nullable=False),
        sa.Column("verdict", sa.String(32), nullable=False),
        sa.Column("epsilon_upper", sa.Double),
        sa.Column("delta", sa.Double),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("key_id", sa.String(64), sa.ForeignKey("signing_keys.key_id"), nullable=False),
        sa.Column("bundle", sa.LargeBinary, nullable=False),
        sa.Column("result", sa.Text, nullable=False),
        *(_columns_of_an_issue() if with_issues else []),
        *([_issues_count_from_one()] if with_issues else []),
    )


def _columns_of_an_issue() -> list[sa.Column[object]]:
    return [
        sa.Column("not_after", INSTANT, nullable=False),
        sa.Column("envelope_digest", sa.String(71), nullable=False),
        sa.Column("approvals_required", sa.Integer, nullable=False),
        sa.Column("approvals_given", sa.Integer, nullable=False),
    ]


def _issues_count_from_one() -> sa.CheckConstraint:
    return sa.CheckConstraint("issue > 0", name="certificates_issue_positive")


def _make_requests(table: str, *, with_issues: bool) -> None:
    issue = ["issue"] if with_issues else []
    op.create_table(
        table,
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("certificate_id", sa.String(71), nullable=False),
        sa.Column("untrusted", sa.Boolean, nullable=False),
        *(sa.Column(name, sa.Integer, nullable=False) for name in issue),
        sa.Column("requester", sa.String(255), nullable=False),
        sa.Column("received_at", INSTANT, nullable=False),
        sa.Column("content_type", sa.String(255), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(
            ["certificate_id", "untrusted", *issue],
            [f"certificates_anew.{name}" for name in ("id", "untrusted", *issue)],
            name="requests_certificate",
        ),
        sa.CheckConstraint("id > 0", name="requests_id_positive"),
    )


def _take_their_places() -> None:
    """Put the new tables where the old ones are; references follow a renamed table.

    The old requests go first, because they refer to the old certificates.
    """
    op.drop_table("requests")
    op.drop_table("certificates")
    op.rename_table("certificates_anew", "certificates")
    op.rename_table("requests_anew", "requests")
    op.create_index("certificates_by_time", "certificates", ["created_at", "id", "untrusted"])
    op.create_index("certificates_by_plan", "certificates", ["plan_digest"])
    op.create_index("certificates_by_name", "certificates", ["name"])
    op.create_index("requests_by_certificate", "requests", ["certificate_id"])


# ---- PostgreSQL: the same, in place ------------------------------------------------------


def _add_issues() -> None:
    op.drop_constraint("requests_certificate", "requests")
    op.drop_constraint("certificates_pkey", "certificates")
    for table in ("certificates", "requests"):
        op.add_column(table, sa.Column("issue", sa.Integer, nullable=False, server_default="1"))
        op.alter_column(table, "issue", server_default=None)
    for column in _columns_of_an_issue():
        column.nullable = True
        op.add_column("certificates", column)
    with _changeable("certificates"):
        op.execute(
            "UPDATE certificates SET not_after = created_at, envelope_digest = '', "
            "approvals_required = 0, approvals_given = 0"
        )
        _read_from_bundles()
    for column in _columns_of_an_issue():
        op.alter_column("certificates", column.name, nullable=False)
    op.create_check_constraint("certificates_issue_positive", "certificates", "issue > 0")
    _refer_by("id", "untrusted", "issue")


def _drop_issues() -> None:
    for table in RULES:
        op.execute(f"DROP FUNCTION affidavit_guard_{table}()")
    op.drop_constraint("requests_certificate", "requests")
    op.drop_constraint("certificates_pkey", "certificates")
    with _changeable("certificates"):
        op.execute(f"DELETE FROM certificates AS kept WHERE NOT {NEWEST}")
    for name in ("issue", *(column.name for column in _columns_of_an_issue())):
        op.drop_column("certificates", name)
    op.drop_column("requests", "issue")
    _refer_by("id", "untrusted")


def _refer_by(*key: str) -> None:
    op.create_primary_key("certificates_pkey", "certificates", list(key))
    op.create_foreign_key(
        "requests_certificate",
        "requests",
        "certificates",
        ["certificate_" + key[0], *key[1:]],
        list(key),
    )


@contextmanager
def _changeable(table: str) -> Iterator[None]:
    """Let this migration, which holds the table's lock until it commits, change its rows."""
    op.execute(f"ALTER TABLE {table} DISABLE TRIGGER {table}_refuse_change")
    yield
    op.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {table}_refuse_change")


# ---- what the signed bytes say -----------------------------------------------------------


def _read_from_bundles() -> None:
    """Fill in each row's end of validity and its envelope's digest."""
    table = sa.table(
        "certificates",
        sa.column("id"),
        sa.column("untrusted", sa.Boolean),
        sa.column("created_at", INSTANT),
        sa.column("bundle"),
        sa.column("not_after", INSTANT),
        sa.column("envelope_digest"),
    )
    key = sa.tuple_(table.c.id, table.c.untrusted)
    rows = sa.select(table.c.id, table.c.untrusted, table.c.created_at, table.c.bundle)
    last: tuple[str, bool] | None = None
    while True:
        wanted = rows if last is None else rows.where(key > sa.tuple_(*last))
        batch = op.get_bind().execute(wanted.order_by(table.c.id, table.c.untrusted).limit(BATCH))
        found = batch.all()
        if not found:
            return
        for row in found:
            not_after, digest = _said_by(bytes(row.bundle), row.created_at)
            op.get_bind().execute(
                sa.update(table)
                .where(table.c.id == row.id, table.c.untrusted == row.untrusted)
                .values(not_after=not_after, envelope_digest=digest)
            )
        last = (found[-1].id, found[-1].untrusted)


def _said_by(bundle: bytes, created_at: datetime) -> tuple[datetime, str]:
    try:
        envelope = json.loads(bundle)["envelope"]
        canonical = json.dumps(envelope, sort_keys=True, separators=(",", ":")).encode()
        validity = json.loads(base64.b64decode(envelope["payload"]))["predicate"]["validity"]
        not_after = datetime.strptime(validity["not_after"], "%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, KeyError, TypeError):
        # Not a bundle of ours; no verifier will accept it, whatever is kept beside it.
        return created_at + VALID_FOR, f"sha256:{hashlib.sha256(bundle).hexdigest()}"
    return not_after.replace(tzinfo=UTC), f"sha256:{hashlib.sha256(canonical).hexdigest()}"


# ---- approvals ---------------------------------------------------------------------------


def _of_an_issue(name: str) -> list[sa.Column[object] | sa.Constraint]:
    return [
        sa.Column("certificate_id", sa.String(71), nullable=False),
        sa.Column("untrusted", sa.Boolean, nullable=False),
        sa.Column("issue", sa.Integer, nullable=False),
        sa.Column("envelope_digest", sa.String(71), nullable=False),
        sa.ForeignKeyConstraint(
            ["certificate_id", "untrusted", "issue"],
            ["certificates.id", "certificates.untrusted", "certificates.issue"],
            name=f"{name}_certificate",
        ),
        sa.CheckConstraint("id > 0", name=f"{name}_id_positive"),
    ]


def _approvals() -> None:
    op.create_table(
        "approvals",
        sa.Column("id", SEQUENCE, primary_key=True),
        *_of_an_issue("approvals"),
        sa.Column("decision", sa.String(16), nullable=False),
        sa.Column("approver", sa.String(255), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("comment", sa.Text, nullable=False),
        sa.UniqueConstraint(
            "certificate_id", "untrusted", "issue", "approver", name="approvals_once"
        ),
        sa.CheckConstraint("decision IN ('approve', 'reject')", name="approvals_decision"),
        sa.CheckConstraint("approver NOT LIKE 'anonymous@%'", name="approvals_by_someone"),
    )
    append_only.protect("approvals", "id")


def _revocations() -> None:
    op.create_table(
        "revocations",
        sa.Column("id", SEQUENCE, primary_key=True),
        *_of_an_issue("revocations"),
        sa.Column("code", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("revoked_by", sa.String(255), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.UniqueConstraint("certificate_id", "untrusted", "issue", name="revocations_once"),
    )
    append_only.protect("revocations", "id")


def _status_lists() -> None:
    op.create_table(
        "status_lists",
        sa.Column("sequence", SEQUENCE, primary_key=True),
        sa.Column("issued_at", INSTANT, nullable=False),
        sa.Column("next_update", INSTANT, nullable=False),
        sa.Column("content_digest", sa.String(71), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("envelope", sa.LargeBinary, nullable=False),
        sa.CheckConstraint("sequence > 0", name="status_lists_sequence_positive"),
    )
    append_only.protect("status_lists", "sequence")


# ---- what the database itself refuses ------------------------------------------------------

_SAME_ISSUE = (
    "certificate_id = NEW.certificate_id AND untrusted = NEW.untrusted AND issue = NEW.issue"
)
_ITS_ENVELOPE = (
    "id = NEW.certificate_id AND untrusted = NEW.untrusted AND issue = NEW.issue "
    "AND envelope_digest = NEW.envelope_digest"
)

RULES: Mapping[str, Mapping[str, str]] = {
    "approvals": {
        "four eyes: who asked for a certificate cannot approve it": (
            "EXISTS (SELECT 1 FROM requests WHERE certificate_id = NEW.certificate_id "
            "AND requester = NEW.approver)"
        ),
        "four eyes: who asked for this issue is not known": (
            f"EXISTS (SELECT 1 FROM requests WHERE {_SAME_ISSUE} AND requester LIKE 'anonymous@%')"
        ),
        "this envelope awaits no approval": (
            f"NOT EXISTS (SELECT 1 FROM certificates WHERE {_ITS_ENVELOPE} "
            "AND approvals_given < approvals_required)"
        ),
        "this issue is superseded": (
            "EXISTS (SELECT 1 FROM certificates WHERE id = NEW.certificate_id "
            "AND untrusted = NEW.untrusted AND issue > NEW.issue)"
        ),
        "this issue is revoked": f"EXISTS (SELECT 1 FROM revocations WHERE {_SAME_ISSUE})",
        # Of a unique constraint alone, INSERT OR REPLACE in SQLite would remove the old row.
        "approvals is append-only: this approver has decided": (
            f"EXISTS (SELECT 1 FROM approvals WHERE {_SAME_ISSUE} AND approver = NEW.approver)"
        ),
        "this issue is rejected": (
            f"EXISTS (SELECT 1 FROM approvals WHERE {_SAME_ISSUE} AND decision = 'reject')"
        ),
    },
    "certificates": {
        "an issue was left out": (
            "NEW.issue > 1 AND NOT EXISTS (SELECT 1 FROM certificates WHERE id = NEW.id "
            "AND untrusted = NEW.untrusted AND issue = NEW.issue - 1)"
        ),
        "it names more approvals than were given": (
            "NEW.approvals_given > 0 AND NEW.approvals_given > (SELECT count(*) FROM approvals "
            "WHERE certificate_id = NEW.id AND untrusted = NEW.untrusted "
            "AND issue = NEW.issue - 1 AND decision = 'approve')"
        ),
    },
    "revocations": {
        "there is no such envelope": (
            f"NOT EXISTS (SELECT 1 FROM certificates WHERE {_ITS_ENVELOPE})"
        ),
        "revocations is append-only: this issue is revoked": (
            f"EXISTS (SELECT 1 FROM revocations WHERE {_SAME_ISSUE})"
        ),
    },
    "status_lists": {
        "the sequence number of status lists only grows": (
            "NEW.sequence <= (SELECT max(sequence) FROM status_lists)"
        ),
    },
}
"""What a new row must not be, by table: the message and the condition in SQL."""


def _guard(table: str, rules: Mapping[str, str]) -> None:
    """Refuse rows of ``table`` that meet a condition, whoever inserts them."""
    if _sqlite():
        for number, (message, condition) in enumerate(rules.items(), 1):
            op.execute(
                f"CREATE TRIGGER {table}_guard_{number} BEFORE INSERT ON {table} "
                f"WHEN {condition} BEGIN SELECT RAISE(ABORT, '{message}'); END"
            )
        return
    checks = " ".join(
        f"IF {condition} THEN RAISE EXCEPTION '{message}' "
        "USING ERRCODE = 'integrity_constraint_violation'; END IF;"
        for message, condition in rules.items()
    )
    # A temporary table of the same name is otherwise found before ours, and says anything.
    schema = op.get_bind().execute(sa.text("SELECT quote_ident(current_schema())")).scalar_one()
    op.execute(
        f"CREATE FUNCTION affidavit_guard_{table}() RETURNS trigger LANGUAGE plpgsql "
        f"SET search_path = {schema}, pg_temp AS $$ BEGIN {checks} RETURN NEW; END $$"
    )
    op.execute(
        f"CREATE TRIGGER {table}_guard BEFORE INSERT ON {table} FOR EACH ROW "
        f"EXECUTE FUNCTION affidavit_guard_{table}()"
    )
    op.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {table}_guard")
