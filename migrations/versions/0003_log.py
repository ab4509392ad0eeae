"""The transparency log: entries, their order, their tree and its signed checkpoints.

Certificates that were issued before there was a log get their entries now, in the order
in which they were issued; the service gives them their places when it starts. What is
logged of a certificate follows from its signed bytes, which verifiers recompute, so that
its form is published and is imported here instead of being written out.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

from affidavit.certificate import read_envelope
from affidavit.certificate.log import certificate_entry
from affidavit.migrations import append_only

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
BATCH = 200


def upgrade() -> None:
    """Make the tables, forbid changing them, and enter what was certified before."""
    _entries()
    _tree()
    _checkpoints()
    _enter_certificates()


def downgrade() -> None:
    """Drop them, with everything in them."""
    for table in (
        "log_witnessed",
        "log_checkpoints",
        "log_nodes",
        "log_leaves",
        "log_pending",
        "log_entries",
    ):
        op.drop_table(table)


def _entries() -> None:
    op.create_table(
        "log_entries",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
    )
    op.create_index("log_entries_by_subject", "log_entries", ["subject"])
    append_only.protect("log_entries", "id")
    op.create_table(
        "log_pending",
        sa.Column("entry_id", SEQUENCE, sa.ForeignKey("log_entries.id"), primary_key=True),
    )


def _tree() -> None:
    op.create_table(
        "log_leaves",
        sa.Column("leaf_index", SEQUENCE, primary_key=True, autoincrement=False),
        sa.Column("entry_id", SEQUENCE, sa.ForeignKey("log_entries.id"), nullable=False),
        sa.Column("leaf_hash", sa.LargeBinary(32), nullable=False),
        sa.UniqueConstraint("entry_id", name="log_leaves_entry"),
        sa.CheckConstraint("leaf_index >= 0", name="log_leaves_from_zero"),
    )
    op.create_index("log_leaves_by_hash", "log_leaves", ["leaf_hash"])
    append_only.protect("log_leaves", "leaf_index")
    op.create_table(
        "log_nodes",
        sa.Column("level", sa.Integer, primary_key=True),
        sa.Column("position", sa.BigInteger, primary_key=True),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
    )
    append_only.protect("log_nodes", "level", "position")


def _checkpoints() -> None:
    op.create_table(
        "log_checkpoints",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("tree_size", SEQUENCE, nullable=False),
        sa.Column("key_id", sa.String(64), sa.ForeignKey("signing_keys.key_id"), nullable=False),
        sa.Column("signed_at", INSTANT, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.CheckConstraint("id > 0", name="log_checkpoints_id_positive"),
    )
    op.create_index("log_checkpoints_by_size", "log_checkpoints", ["tree_size"])
    append_only.protect("log_checkpoints", "id")
    op.create_table(
        "log_witnessed",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("origin", sa.String(255), nullable=False),
        sa.Column("tree_size", SEQUENCE, nullable=False),
        sa.Column("received_at", INSTANT, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.CheckConstraint("id > 0", name="log_witnessed_id_positive"),
    )
    op.create_index("log_witnessed_by_origin", "log_witnessed", ["origin", "tree_size"])
    append_only.protect("log_witnessed", "id")


def _enter_certificates() -> None:
    connection = op.get_bind()
    certificates = sa.table(
        "certificates", sa.column("id"), sa.column("untrusted"), sa.column("bundle")
    )
    keys = connection.execute(
        sa.select(certificates.c.id, certificates.c.untrusted).order_by(
            sa.text("created_at, id, untrusted")
        )
    ).all()
    for start in range(0, len(keys), BATCH):
        for certificate, untrusted in keys[start : start + BATCH]:
            bundle = connection.execute(
                sa.select(certificates.c.bundle).where(
                    certificates.c.id == certificate, certificates.c.untrusted == untrusted
                )
            ).scalar_one()
            _enter(connection, bytes(bundle))


def _enter(connection: sa.Connection, bundle: bytes) -> None:
    envelope = read_envelope(json.loads(bundle)["envelope"])
    entry = certificate_entry(envelope, json.loads(envelope.payload))
    entries = sa.table(
        "log_entries",
        sa.column("id", SEQUENCE),
        sa.column("kind"),
        sa.column("subject"),
        sa.column("at", INSTANT),
        sa.column("content"),
    )
    made = connection.execute(
        sa.insert(entries)
        .values(
            kind=entry.kind,
            subject=entry.subject,
            at=entry.at,
            content=entry.content.decode(),
        )
        .returning(entries.c.id)
    ).scalar_one()
    connection.execute(
        sa.insert(sa.table("log_pending", sa.column("entry_id"))).values(entry_id=made)
    )
