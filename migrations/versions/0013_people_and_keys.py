"""Whose a token is, and which keys the published keysets revoke, for the status to tell."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
INSTANT_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def upgrade() -> None:
    """Add the column, which is empty for tokens made before, and the table, filled."""
    op.add_column("tokens", sa.Column("person", sa.String(255)))
    _guard_approvals()
    revoked_keys = op.create_table(
        "revoked_keys",
        sa.Column(
            "version",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            sa.ForeignKey("keysets.version", name="revoked_keys_keyset"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("key_id", sa.String(64), primary_key=True),
        sa.Column("since", INSTANT, nullable=False),
    )
    op.create_index("revoked_keys_by_key", "revoked_keys", ["key_id"])
    append_only.protect("revoked_keys", "version", "key_id")
    published = op.get_bind().execute(sa.text("SELECT version, document FROM keysets")).all()
    rows = [row for version, document in published for row in _revoked(version, bytes(document))]
    if rows:
        op.bulk_insert(revoked_keys, rows)


def downgrade() -> None:
    """Drop them; keysets still say what they revoke."""
    op.drop_table("revoked_keys")
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER approvals_guard_person")
    else:
        op.execute("DROP TRIGGER approvals_guard_person ON approvals")
        op.execute("DROP FUNCTION affidavit_guard_approvals_person()")
    # Not by a copy of the table, which would leave its triggers behind.
    op.execute("ALTER TABLE tokens DROP COLUMN person")


def _guard_approvals() -> None:
    """Refuse an approval in the name of a token that is a person's, whoever inserts it.

    By that name the person would not be recognised as who asked or has decided.
    """
    message = "four eyes: this token is a person''s, who decides by their own name"
    condition = (
        "NEW.approver LIKE 'token:%' AND EXISTS (SELECT 1 FROM tokens "
        "WHERE 'token:' || name = NEW.approver AND person IS NOT NULL)"
    )
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            f"CREATE TRIGGER approvals_guard_person BEFORE INSERT ON approvals "
            f"WHEN {condition} BEGIN SELECT RAISE(ABORT, '{message}'); END"
        )
        return
    # A temporary table of the same name is otherwise found before ours, and says anything.
    schema = op.get_bind().execute(sa.text("SELECT quote_ident(current_schema())")).scalar_one()
    op.execute(
        f"CREATE FUNCTION affidavit_guard_approvals_person() RETURNS trigger LANGUAGE plpgsql "
        f"SET search_path = {schema}, pg_temp AS $$ BEGIN IF {condition} THEN "
        f"RAISE EXCEPTION '{message}' USING ERRCODE = 'integrity_constraint_violation'; "
        "END IF; RETURN NEW; END $$"
    )
    op.execute(
        "CREATE TRIGGER approvals_guard_person BEFORE INSERT ON approvals FOR EACH ROW "
        "EXECUTE FUNCTION affidavit_guard_approvals_person()"
    )
    op.execute("ALTER TABLE approvals ENABLE ALWAYS TRIGGER approvals_guard_person")


def _revoked(version: int, document: bytes) -> list[dict[str, Any]]:
    """What a signed keyset of schema version 1 revokes."""
    payload = json.loads(base64.b64decode(json.loads(document)["payload"]))
    return [
        {
            "version": version,
            "key_id": item["key_id"],
            "since": datetime.strptime(item["since"], INSTANT_FORMAT).replace(tzinfo=UTC),
        }
        for item in payload["revoked"]
    ]
