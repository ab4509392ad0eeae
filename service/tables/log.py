"""Tables of the log: entries, tree nodes, checkpoints and cosignatures."""

from __future__ import annotations

import sqlalchemy as sa

from affidavit.service.core.database import (
    RowNumber,
    UtcDateTime,
    metadata,
    numbered,
)

log_entries = sa.Table(
    "log_entries",
    metadata,
    sa.Column("id", RowNumber, primary_key=True),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("subject", sa.String(255), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("content", sa.Text, nullable=False),
    sa.Column("salt", sa.LargeBinary(16)),
    sa.Index("log_entries_by_subject", "subject"),
    sa.Index("log_entries_by_kind", "kind", "id"),
)


log_pending = sa.Table(
    "log_pending",
    metadata,
    sa.Column("entry_id", RowNumber, sa.ForeignKey("log_entries.id"), primary_key=True),
)


log_leaves = sa.Table(
    "log_leaves",
    metadata,
    sa.Column("leaf_index", RowNumber, primary_key=True, autoincrement=False),
    sa.Column("entry_id", RowNumber, sa.ForeignKey("log_entries.id"), nullable=False),
    sa.Column("leaf_hash", sa.LargeBinary(32), nullable=False),
    sa.UniqueConstraint("entry_id", name="log_leaves_entry"),
    sa.CheckConstraint("leaf_index >= 0", name="log_leaves_from_zero"),
    sa.Index("log_leaves_by_hash", "leaf_hash"),
)


log_nodes = sa.Table(
    "log_nodes",
    metadata,
    sa.Column("level", sa.Integer, primary_key=True),
    sa.Column("position", sa.BigInteger, primary_key=True),
    sa.Column("hash", sa.LargeBinary(32), nullable=False),
)


log_checkpoints = numbered(
    "log_checkpoints",
    sa.Column("tree_size", RowNumber, nullable=False),
    sa.Column("key_id", sa.String(64), sa.ForeignKey("signing_keys.key_id"), nullable=False),
    sa.Column("signed_at", UtcDateTime, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Index("log_checkpoints_by_size", "tree_size"),
)


log_cosignatures = sa.Table(
    "log_cosignatures",
    metadata,
    sa.Column(
        "checkpoint_id",
        RowNumber,
        sa.ForeignKey("log_checkpoints.id"),
        primary_key=True,
        autoincrement=False,
    ),
    sa.Column("witness", sa.String(400), primary_key=True),
    sa.Column("cosigned_at", UtcDateTime, nullable=False),
    sa.Column("line", sa.Text, nullable=False),
)
