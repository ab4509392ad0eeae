"""The whole schema of the first release: tables, indexes and triggers.

Tables are written out rather than imported from the service: a published revision keeps
making the tables of its day after the service's tables have moved on. Revisions 0001 to 0025
belonged to development databases, none of them released, so this chain starts at 0026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op

from affidavit.migrations.triggers import install, protect, refuse_inserts

revision = "0026"
down_revision = None
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DIGEST = sa.String(71)
ACTOR = sa.String(255)
NAME = sa.String(64)
UUID = sa.String(36)
CODE = sa.String(32)
KIND = sa.String(16)


def upgrade() -> None:
    """Create the tables, protect those that only grow, and install the guards."""
    install()
    _certificates()
    _identity()
    _log()
    _policies()
    _lifecycle()
    _keysets()
    _ledgers()
    _runs()
    for table, rules in RULES.items():
        refuse_inserts(table, rules)
    refuse_inserts("approvals", PERSONAL_TOKEN, trigger="approvals_guard_person")


def _append_only(name: str, *parts: sa.schema.SchemaItem) -> None:
    op.create_table(name, *parts)
    protect(name)


def _signed_by() -> sa.Column[Any]:
    return sa.Column("key_id", NAME, sa.ForeignKey("signing_keys.key_id"), nullable=False)


def _team() -> sa.Column[Any]:
    return sa.Column("team", NAME, nullable=False, server_default="default")


def _positive(column: str, name: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(f"{column} > 0", name=name)


def _references_an_issue(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["certificate_id", "untrusted", "issue"],
        ["certificates.id", "certificates.untrusted", "certificates.issue"],
        name=f"{table}_certificate",
    )


def _prefix(column: str) -> dict[str, str]:
    """PostgreSQL searches by prefix only in an index that ignores the collation."""
    return {column: "varchar_pattern_ops"}


def _where(condition: str) -> dict[str, Any]:
    return {"postgresql_where": sa.text(condition), "sqlite_where": sa.text(condition)}


def _certificates() -> None:
    _append_only(
        "signing_keys",
        sa.Column("key_id", NAME, primary_key=True),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("first_used_at", INSTANT, nullable=False),
    )
    _append_only(
        "certificates",
        sa.Column("id", DIGEST, primary_key=True),
        sa.Column("untrusted", sa.Boolean, primary_key=True),
        sa.Column("issue", sa.Integer, primary_key=True),
        sa.Column("plan_digest", DIGEST, nullable=False),
        sa.Column("name", NAME),
        sa.Column("dataset", NAME),
        sa.Column("adjacency", CODE, nullable=False),
        sa.Column("verdict", CODE, nullable=False),
        sa.Column("epsilon_upper", sa.Double),
        sa.Column("delta", sa.Double),
        sa.Column("created_at", INSTANT, nullable=False),
        _signed_by(),
        sa.Column("bundle", sa.LargeBinary, nullable=False),
        sa.Column("result", sa.Text, nullable=False),
        sa.Column("not_after", INSTANT, nullable=False),
        sa.Column("envelope_digest", DIGEST, nullable=False),
        sa.Column("approvals_required", sa.Integer, nullable=False),
        sa.Column("approvals_given", sa.Integer, nullable=False),
        _team(),
        sa.CheckConstraint("issue > 0", name="certificates_issue_positive"),
        sa.Index(
            "certificates_awaiting",
            "created_at",
            "id",
            "untrusted",
            **_where("approvals_given < approvals_required"),
        ),
        sa.Index(
            "certificates_by_dataset", "dataset", "created_at", postgresql_ops=_prefix("dataset")
        ),
        sa.Index("certificates_by_end", "not_after"),
        sa.Index("certificates_by_epsilon", "epsilon_upper"),
        sa.Index("certificates_by_id_start", "id", postgresql_ops=_prefix("id")),
        sa.Index("certificates_by_key", "key_id", "created_at"),
        sa.Index("certificates_by_name", "name"),
        sa.Index("certificates_by_name_start", "name", postgresql_ops=_prefix("name")),
        sa.Index("certificates_by_plan", "plan_digest"),
        sa.Index(
            "certificates_by_plan_start", "plan_digest", postgresql_ops=_prefix("plan_digest")
        ),
        sa.Index("certificates_by_team", "team", "created_at", "id", "untrusted"),
        sa.Index("certificates_by_time", "created_at", "id", "untrusted"),
        sa.Index("certificates_by_verdict", "verdict", "created_at"),
    )
    _append_only(
        "certificate_facets",
        sa.Column("certificate_id", DIGEST, primary_key=True),
        sa.Column("untrusted", sa.Boolean, primary_key=True),
        sa.Column("issue", sa.Integer, primary_key=True),
        sa.Column("mechanism", NAME, nullable=False),
        sa.Column("requester", ACTOR, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        _references_an_issue("certificate_facets"),
        sa.Index("certificate_facets_by_mechanism", "mechanism", "created_at"),
        sa.Index("certificate_facets_by_requester", "requester", "created_at"),
    )
    _append_only(
        "requests",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("certificate_id", DIGEST, nullable=False),
        sa.Column("untrusted", sa.Boolean, nullable=False),
        sa.Column("issue", sa.Integer, nullable=False),
        sa.Column("requester", ACTOR, nullable=False),
        sa.Column("received_at", INSTANT, nullable=False),
        sa.Column("content_type", ACTOR, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        _references_an_issue("requests"),
        _positive("id", "requests_id_positive"),
        sa.Index("requests_by_certificate", "certificate_id"),
    )
    op.create_table(
        "certifications",
        sa.Column("id", UUID, primary_key=True),
        sa.Column("requester", ACTOR, nullable=False),
        sa.Column("state", KIND, nullable=False),
        sa.Column("certificate_id", DIGEST),
        sa.Column("problem", sa.Text),
        sa.Column("requested_at", INSTANT, nullable=False, index=True),
        sa.Column("alive_at", INSTANT, nullable=False),
        sa.Column("asked_at", INSTANT, nullable=False),
    )
    _append_only(
        "audit",
        sa.Column("seq", SEQUENCE, primary_key=True),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("actor", ACTOR, nullable=False),
        sa.Column("action", NAME, nullable=False),
        sa.Column("subject", ACTOR, nullable=False),
        sa.Column("details", sa.Text, nullable=False),
        _positive("seq", "audit_seq_positive"),
        sa.Index("audit_by_subject", "subject"),
    )


def _identity() -> None:
    _append_only(
        "tokens",
        sa.Column("id", sa.String(12), primary_key=True),
        sa.Column("name", NAME, nullable=False),
        sa.Column("scopes", ACTOR, nullable=False),
        sa.Column("digest", NAME, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("created_by", ACTOR, nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.Column("person", ACTOR),
        sa.Column("team", NAME),
        sa.Column("serves", sa.Text),
        sa.CheckConstraint("expires_at > created_at", name="tokens_expire_later"),
    )
    _append_only(
        "token_revocations",
        sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id"), primary_key=True),
        sa.Column("revoked_at", INSTANT, nullable=False),
        sa.Column("revoked_by", ACTOR, nullable=False),
        sa.Column("reason", ACTOR, nullable=False),
    )
    op.create_table(
        "token_uses",
        sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id"), primary_key=True),
        sa.Column("last_used_at", INSTANT),
    )
    op.create_table(
        "sessions",
        sa.Column("digest", NAME, primary_key=True),
        sa.Column("actor", ACTOR, nullable=False),
        sa.Column("roles", sa.JSON, nullable=False),
        sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id")),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("seen_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.Column("team", NAME),
        sa.CheckConstraint("expires_at > created_at", name="sessions_expire_later"),
        sa.Index("sessions_by_expiry", "expires_at"),
    )
    _append_only(
        "admin_proposals",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("kind", CODE, nullable=False),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("proposer", ACTOR, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("carried_out", sa.Boolean, nullable=False),
        sa.Column("content", sa.Text),
        sa.Column("reason", sa.Text),
        _positive("id", "admin_proposals_id_positive"),
        sa.Index("admin_proposals_by_digest", "digest", "id"),
    )
    op.create_table(
        "saved_views",
        sa.Column("id", UUID, primary_key=True),
        sa.Column("owner", ACTOR, nullable=False),
        sa.Column("page", NAME, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("query", sa.Text, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.UniqueConstraint("owner", "page", "name", name="saved_views_once"),
    )


def _log() -> None:
    _append_only(
        "log_entries",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("kind", CODE, nullable=False),
        sa.Column("subject", ACTOR, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sa.Index("log_entries_by_kind", "kind", "id"),
        sa.Index("log_entries_by_subject", "subject"),
    )
    op.create_table(
        "log_pending",
        sa.Column("entry_id", SEQUENCE, sa.ForeignKey("log_entries.id"), primary_key=True),
    )
    _append_only(
        "log_leaves",
        sa.Column("leaf_index", SEQUENCE, primary_key=True, autoincrement=False),
        sa.Column("entry_id", SEQUENCE, sa.ForeignKey("log_entries.id"), nullable=False),
        sa.Column("leaf_hash", sa.LargeBinary(32), nullable=False),
        sa.UniqueConstraint("entry_id", name="log_leaves_entry"),
        sa.CheckConstraint("leaf_index >= 0", name="log_leaves_from_zero"),
        sa.Index("log_leaves_by_hash", "leaf_hash"),
    )
    _append_only(
        "log_nodes",
        sa.Column("level", sa.Integer, primary_key=True),
        sa.Column("position", sa.BigInteger, primary_key=True),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
    )
    _append_only(
        "log_checkpoints",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("tree_size", SEQUENCE, nullable=False),
        _signed_by(),
        sa.Column("signed_at", INSTANT, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        _positive("id", "log_checkpoints_id_positive"),
        sa.Index("log_checkpoints_by_size", "tree_size"),
    )
    _append_only(
        "log_cosignatures",
        sa.Column(
            "checkpoint_id",
            SEQUENCE,
            sa.ForeignKey("log_checkpoints.id"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("witness", sa.String(400), primary_key=True),
        sa.Column("cosigned_at", INSTANT, nullable=False),
        sa.Column("line", sa.Text, nullable=False),
    )


def _policies() -> None:
    _append_only(
        "policies",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("name", NAME, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("envelope", sa.LargeBinary, nullable=False),
        _signed_by(),
        sa.Column("created_by", ACTOR, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.CheckConstraint("version > 0", name="policies_version_positive"),
        _positive("id", "policies_id_positive"),
        sa.UniqueConstraint("name", "version", name="policies_version"),
    )
    _append_only(
        "waivers",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("waiver_id", DIGEST, nullable=False),
        sa.Column("envelope", sa.LargeBinary, nullable=False),
        _signed_by(),
        sa.Column("owner", ACTOR, nullable=False),
        sa.Column("created_by", ACTOR, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        _team(),
        sa.CheckConstraint("owner <> created_by", name="waivers_by_another"),
        _positive("id", "waivers_id_positive"),
        sa.UniqueConstraint("waiver_id", name="waivers_once"),
        sa.CheckConstraint("expires_at > created_at", name="waivers_end"),
    )
    _append_only(
        "waiver_revocations",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("waiver_id", DIGEST, sa.ForeignKey("waivers.waiver_id"), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("revoked_by", ACTOR, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.UniqueConstraint("waiver_id", name="waiver_revocations_once"),
        _positive("id", "waiver_revocations_id_positive"),
    )
    _append_only(
        "waiver_uses",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("waiver_id", DIGEST, sa.ForeignKey("waivers.waiver_id"), nullable=False),
        sa.Column("certificate_id", DIGEST, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        _positive("id", "waiver_uses_id_positive"),
        sa.Index("waiver_uses_by_waiver", "waiver_id"),
    )


def _lifecycle() -> None:
    _append_only(
        "approvals",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("certificate_id", DIGEST, nullable=False),
        sa.Column("untrusted", sa.Boolean, nullable=False),
        sa.Column("issue", sa.Integer, nullable=False),
        sa.Column("envelope_digest", DIGEST, nullable=False),
        sa.Column("decision", KIND, nullable=False),
        sa.Column("approver", ACTOR, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("comment", sa.Text, nullable=False),
        sa.CheckConstraint("approver NOT LIKE 'anonymous@%'", name="approvals_by_someone"),
        sa.UniqueConstraint(
            "certificate_id", "untrusted", "issue", "approver", name="approvals_once"
        ),
        _positive("id", "approvals_id_positive"),
        sa.CheckConstraint("decision IN ('approve', 'reject')", name="approvals_decision"),
        _references_an_issue("approvals"),
    )
    _append_only(
        "revocations",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("certificate_id", DIGEST, nullable=False),
        sa.Column("untrusted", sa.Boolean, nullable=False),
        sa.Column("issue", sa.Integer, nullable=False),
        sa.Column("envelope_digest", DIGEST, nullable=False),
        sa.Column("code", CODE, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("revoked_by", ACTOR, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        _positive("id", "revocations_id_positive"),
        sa.UniqueConstraint("certificate_id", "untrusted", "issue", name="revocations_once"),
        _references_an_issue("revocations"),
    )
    _append_only(
        "status_lists",
        sa.Column("sequence", SEQUENCE, primary_key=True),
        sa.Column("issued_at", INSTANT, nullable=False),
        sa.Column("next_update", INSTANT, nullable=False),
        sa.Column("content_digest", DIGEST, nullable=False),
        sa.Column("key_id", NAME, nullable=False),
        sa.Column("envelope", sa.LargeBinary, nullable=False),
        sa.CheckConstraint("sequence > 0", name="status_lists_sequence_positive"),
    )


def _keysets() -> None:
    _append_only(
        "keysets",
        sa.Column("version", SEQUENCE, primary_key=True, autoincrement=False),
        sa.Column("follows", SEQUENCE, sa.ForeignKey("keysets.version", name="keysets_follows")),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("document", sa.LargeBinary, nullable=False),
        sa.Column("published_at", INSTANT, nullable=False),
        sa.Column("publisher", ACTOR, nullable=False),
        sa.CheckConstraint(
            "(version = 1 AND follows IS NULL) OR (follows IS NOT NULL AND version = follows + 1)",
            name="keysets_in_order",
        ),
        sa.UniqueConstraint("digest"),
    )
    _append_only(
        "revoked_keys",
        sa.Column(
            "version",
            SEQUENCE,
            sa.ForeignKey("keysets.version", name="revoked_keys_keyset"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("key_id", NAME, primary_key=True),
        sa.Column("since", INSTANT, nullable=False),
        sa.Index("revoked_keys_by_key", "key_id"),
    )


LEDGER_EVENT = (
    "(kind = 'budget' AND reservation_id IS NULL AND step IS NULL AND follows IS NULL)"
    " OR (reservation_id IS NOT NULL AND certified_steps IS NOT NULL AND step IS NOT NULL AND ("
    "(kind = 'reserve' AND step = 1 AND follows IS NULL)"
    " OR (kind IN ('commit', 'release') AND step = 2"
    " AND follows IS NOT NULL AND follows = 'reserve')"
    " OR (kind = 'settle' AND step = 3 AND follows IS NOT NULL AND follows = 'commit')))"
)
STEPS_RUN = (
    "(kind = 'settle' AND steps_run IS NOT NULL AND steps_run >= 0"
    " AND steps_run <= certified_steps) OR (kind <> 'settle' AND steps_run IS NULL)"
)
RUN_EVENT = (
    "(kind = 'queued' AND seq = 1 AND once IS NOT NULL AND once = 'queued'"
    " AND follows IS NULL AND fence IS NULL)"
    " OR (seq > 1 AND follows IS NOT NULL AND ("
    "(kind = 'claimed' AND once IS NULL AND follows = 'queued' AND fence IS NOT NULL)"
    " OR (kind = 'requeued' AND once IS NULL AND follows = 'queued' AND fence IS NOT NULL)"
    " OR (kind = 'cancel_asked' AND once IS NOT NULL AND once = 'cancel_asked'"
    " AND follows = 'queued')"
    " OR (kind = 'running' AND once IS NOT NULL AND once = 'running' AND follows = 'queued'"
    " AND fence IS NOT NULL)"
    " OR (kind = 'resumed' AND once IS NULL AND follows = 'running' AND fence IS NOT NULL)"
    " OR (kind = 'settled' AND once IS NOT NULL AND once = 'end' AND follows = 'running'"
    " AND fence IS NOT NULL)"
    " OR (kind IN ('failed', 'cancelled') AND once IS NOT NULL AND once = 'end'"
    " AND follows IN ('queued', 'running'))))"
)


def _ledgers() -> None:
    _append_only(
        "ledgers",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("dataset", NAME, nullable=False),
        sa.Column("unit", KIND, nullable=False),
        sa.Column("adjacency", CODE, nullable=False),
        sa.Column("filter", sa.Text, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        _team(),
        _positive("id", "ledgers_id_positive"),
        sa.UniqueConstraint("dataset", "unit", "adjacency", name="ledgers_one_each"),
    )
    _append_only(
        "dataset_grants",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("dataset", NAME, nullable=False),
        sa.Column("team", NAME, nullable=False),
        sa.Column("may", KIND, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("granted_by", ACTOR, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        _positive("id", "dataset_grants_id_positive"),
        sa.CheckConstraint("may IN ('reserve', 'read', 'nothing')", name="dataset_grants_may"),
        sa.Index("dataset_grants_by_dataset", "dataset", "team", "id"),
    )
    _append_only(
        "reservations",
        sa.Column("id", UUID, primary_key=True),
        sa.Column("ledger_id", SEQUENCE, sa.ForeignKey("ledgers.id"), nullable=False),
        sa.Column("certificate_id", DIGEST, nullable=False),
        sa.Column("issue", sa.Integer, nullable=False),
        sa.Column("untrusted", sa.Boolean, nullable=False),
        sa.Column("plan_digest", DIGEST, nullable=False),
        sa.Column("name", NAME),
        sa.Column("certified_steps", sa.Integer, nullable=False),
        sa.Column("rule", KIND, nullable=False),
        sa.Column("cost", sa.Text, nullable=False),
        sa.Column("event", sa.Text, nullable=False),
        _team(),
        sa.CheckConstraint("certified_steps > 0", name="reservations_steps_positive"),
        sa.CheckConstraint("rule IN ('filter', 'alone')", name="reservations_rule"),
        sa.UniqueConstraint("id", "ledger_id", "certified_steps", name="reservations_steps"),
    )
    _append_only(
        "ledger_events",
        sa.Column("ledger_id", SEQUENCE, sa.ForeignKey("ledgers.id"), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", KIND, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("actor", ACTOR, nullable=False),
        sa.Column("reservation_id", UUID),
        sa.Column("certified_steps", sa.Integer),
        sa.Column("step", sa.Integer),
        sa.Column("follows", KIND),
        sa.Column("steps_run", sa.Integer),
        sa.Column("idempotency_key", ACTOR),
        sa.Column("request_digest", DIGEST),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.UniqueConstraint("reservation_id", "kind", name="ledger_events_kind_once"),
        sa.UniqueConstraint("actor", "idempotency_key", name="ledger_events_idempotent"),
        sa.ForeignKeyConstraint(
            ["reservation_id", "ledger_id", "certified_steps"],
            ["reservations.id", "reservations.ledger_id", "reservations.certified_steps"],
            name="ledger_events_reservation",
        ),
        sa.CheckConstraint(STEPS_RUN, name="ledger_events_steps"),
        sa.CheckConstraint(LEDGER_EVENT, name="ledger_events_kind"),
        _positive("seq", "ledger_events_seq_positive"),
        sa.UniqueConstraint("reservation_id", "step", name="ledger_events_once"),
        sa.ForeignKeyConstraint(
            ["reservation_id", "follows"],
            ["ledger_events.reservation_id", "ledger_events.kind"],
            name="ledger_events_follows",
        ),
    )


def _runs() -> None:
    _append_only(
        "runs",
        sa.Column("id", UUID, primary_key=True),
        sa.Column("certificate_id", DIGEST, nullable=False),
        sa.Column("issue", sa.Integer, nullable=False),
        sa.Column("untrusted", sa.Boolean, nullable=False),
        sa.Column("plan_digest", DIGEST, nullable=False),
        sa.Column("reservation_id", UUID, sa.ForeignKey("reservations.id"), nullable=False),
        sa.Column("queue", NAME, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("requested_by", ACTOR, nullable=False),
        sa.Column("requested_at", INSTANT, nullable=False),
        sa.Column("idempotency_key", ACTOR),
        sa.Column("request_digest", DIGEST),
        _team(),
        sa.UniqueConstraint("requested_by", "idempotency_key", name="runs_idempotent"),
        sa.UniqueConstraint("reservation_id", name="runs_reservation_once"),
        _references_an_issue("runs"),
        sa.Index("runs_by_certificate", "certificate_id", "requested_at"),
        sa.Index("runs_by_queue", "queue", "requested_at"),
        sa.Index("runs_by_team", "team", "requested_at", "id"),
        sa.Index("runs_by_time", "requested_at", "id"),
    )
    _append_only(
        "run_events",
        sa.Column("run_id", UUID, sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", KIND, nullable=False),
        sa.Column("once", KIND),
        sa.Column("follows", KIND),
        sa.Column("fence", sa.Integer),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("actor", ACTOR, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.UniqueConstraint("run_id", "once", name="run_events_once"),
        sa.CheckConstraint(RUN_EVENT, name="run_events_kind"),
        _positive("seq", "run_events_seq_positive"),
        sa.UniqueConstraint("run_id", "kind", "fence", name="run_events_fenced"),
        sa.ForeignKeyConstraint(
            ["run_id", "follows"],
            ["run_events.run_id", "run_events.once"],
            name="run_events_follows",
        ),
        sa.CheckConstraint("fence IS NULL OR fence > 0", name="run_events_fence_positive"),
        sa.Index("run_events_by_kind", "kind", "at"),
    )
    op.create_table(
        "run_leases",
        sa.Column("run_id", UUID, sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("queue", NAME, nullable=False),
        sa.Column("requested_at", INSTANT, nullable=False),
        sa.Column("state", KIND, nullable=False),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("holder", ACTOR),
        sa.Column("worker", NAME),
        sa.Column("seconds", sa.Integer),
        sa.Column("expires_at", INSTANT),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("cancel", sa.Boolean, nullable=False),
        sa.Column("granted", sa.Integer, nullable=False, server_default="0"),
        sa.Column("head", DIGEST),
        sa.Column("previous", sa.Integer),
        sa.Column("secret", DIGEST),
        sa.Column("job", sa.Integer, nullable=False, server_default="1"),
        sa.Column("search", sa.Text),
        sa.CheckConstraint("fence >= 0", name="run_leases_fence"),
        sa.CheckConstraint(
            "state IN ('queued', 'claimed', 'running', 'ended')", name="run_leases_state"
        ),
        sa.Index("run_leases_expiring", "state", "expires_at"),
        sa.Index("run_leases_next", "queue", "state", "requested_at", "run_id"),
    )
    _append_only(
        "run_records",
        sa.Column("run_id", UUID, sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("fence", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.CheckConstraint("fence > 0 AND part > 0", name="run_records_counted"),
    )


# ---- rows that the database refuses ---------------------------------------------------------

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

PERSONAL_TOKEN = {
    "four eyes: this token is a person''s, who decides by their own name": (
        "NEW.approver LIKE 'token:%' AND EXISTS (SELECT 1 FROM tokens "
        "WHERE 'token:' || name = NEW.approver AND person IS NOT NULL)"
    ),
}
"""A person who approves by a token would not be recognised as the requester."""
