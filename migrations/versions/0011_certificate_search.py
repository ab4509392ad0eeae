"""By what certificates are searched for: their mechanism and requester, and indexes."""

from __future__ import annotations

import base64
import json

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

INDEXES = {
    "certificates_by_verdict": ["verdict", "created_at"],
    "certificates_by_epsilon": ["epsilon_upper"],
    "certificates_by_end": ["not_after"],
    "certificates_by_dataset": ["dataset", "created_at"],
    "certificates_by_name_start": ["name"],
    "certificates_by_id_start": ["id"],
    "certificates_by_plan_start": ["plan_digest"],
}
STARTS = ("name", "id", "plan_digest", "dataset")
AT_ONCE = 500


def upgrade() -> None:
    """Make the table and the indexes, and read the facets off what was signed."""
    op.create_table(
        "certificate_facets",
        sa.Column("certificate_id", sa.String(71), primary_key=True),
        sa.Column("untrusted", sa.Boolean, primary_key=True),
        sa.Column("issue", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("mechanism", sa.String(64), nullable=False),
        sa.Column("requester", sa.String(255), nullable=False),
        sa.ForeignKeyConstraint(
            ["certificate_id", "untrusted", "issue"],
            ["certificates.id", "certificates.untrusted", "certificates.issue"],
            name="certificate_facets_certificate",
        ),
    )
    for column in ("mechanism", "requester"):
        op.create_index(f"certificate_facets_by_{column}", "certificate_facets", [column])
    for name, columns in INDEXES.items():
        ops = {columns[0]: "varchar_pattern_ops"} if columns[0] in STARTS else {}
        op.create_index(name, "certificates", columns, postgresql_ops=ops)
    op.create_index("runs_by_certificate", "runs", ["certificate_id", "requested_at"])
    _read_off()
    append_only.protect("certificate_facets", "certificate_id", "untrusted", "issue")


def downgrade() -> None:
    """Drop them; the certificates say the same."""
    op.drop_index("runs_by_certificate", "runs")
    for name in INDEXES:
        op.drop_index(name, "certificates")
    op.drop_table("certificate_facets")


def _read_off() -> None:
    connection = op.get_bind()
    facets = sa.table(
        "certificate_facets",
        *map(sa.column, ("certificate_id", "untrusted", "issue", "mechanism", "requester")),
    )
    kept = sa.table("certificates", *map(sa.column, ("id", "untrusted", "issue", "bundle")))
    place = (kept.c.id, kept.c.untrusted, kept.c.issue)
    query = sa.select(kept).order_by(*place).limit(AT_ONCE)
    rows = connection.execute(query).all()
    while rows:
        connection.execute(sa.insert(facets), [_facets(row) for row in rows])
        after = sa.tuple_(*place) > sa.tuple_(*rows[-1][:3])
        rows = connection.execute(query.where(after)).all()


def _facets(row: sa.Row[tuple[str, bool, int, bytes]]) -> dict[str, object]:
    envelope = json.loads(bytes(row.bundle))["envelope"]
    predicate = json.loads(base64.b64decode(envelope["payload"]))["predicate"]
    return {
        "certificate_id": row.id,
        "untrusted": row.untrusted,
        "issue": row.issue,
        "mechanism": predicate["plan"].get("optimizer", {}).get("name", "dp_sgd"),
        "requester": predicate["requester"],
    }
