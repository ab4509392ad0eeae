"""Verify the audit log against the database: every row has its entry, every entry its row.

A changed row yields two findings: no entry matches its new content, and no row matches the logged
content. Rows with signed bytes are also compared with those bytes, because pages and searches show
their columns.

The Merkle tree is rebuilt from the bytes of the entries. Each stored hash is compared with the
rebuilt one, and each checkpoint with the root at its size, including checkpoints stored outside the
database. Only those cannot be changed by the owner of the database, who can drop triggers and write
any row.

Rows are read in chunks from one snapshot of the database.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Row, and_, func, select

from affidavit.evidence import (
    BadProvenance,
    SearchOpening,
    read_provenance,
)
from affidavit.service.audit.comparison import (
    ROWS_PER_CHUNK,
    AuditFinding,
    EntryIndex,
    compare_keysets,
    compare_table,
)
from affidavit.service.audit.entry_types import ENTRY_TYPES
from affidavit.service.certificates.integrity import UNREADABLE, SignedContents
from affidavit.service.certificates.issue_status import same_issue
from affidavit.service.core.clock import now_of
from affidavit.service.core.errors import LogDamaged
from affidavit.service.ledger.integrity import check_ledgers
from affidavit.service.ledger.repository import orphaned_reservations
from affidavit.service.log.stored_tree import key_of, open_stored
from affidavit.service.policies.store import find_tampered
from affidavit.service.runs.repository import ENDED, STATES
from affidavit.service.tables.certificates import (
    approvals,
    certificate_facets,
    certificates,
    revocations,
    signing_keys,
)
from affidavit.service.tables.keys import keysets
from affidavit.service.tables.ledger import (
    ledger_events,
    reservations,
)
from affidavit.service.tables.log import (
    log_checkpoints,
    log_entries,
    log_leaves,
    log_nodes,
    log_pending,
)
from affidavit.service.tables.policies import (
    policies,
    waiver_uses,
    waivers,
)
from affidavit.service.tables.runs import (
    run_events,
    run_leases,
    runs,
)
from affidavit.trust import (
    KeyRole,
    KeysetError,
    PublicKey,
    TrustedKeys,
    read_keyset,
)
from affidavit.trust.log import (
    Checkpoint,
    leaf_content,
    merkle_tree,
)

# ---- the tree ------------------------------------------------------------------------

LEAVES_PER_CHUNK = 4096
EXTERNAL_CHECKPOINT = "an external checkpoint"

Expected = dict[int, list[tuple[str, Checkpoint]]]
"""Checkpoints by tree size, each with its location."""


def audit_tree(connection: Connection, external: Sequence[Checkpoint]) -> Iterator[AuditFinding]:
    """Yield the inconsistencies of the tree."""
    expected: Expected = defaultdict(list)
    origins: set[str] = set()
    last = 0
    for where, note, record, size in _checkpoints(connection):
        try:
            checkpoint = open_stored(note, record).checkpoint
        except LogDamaged as error:
            yield AuditFinding("checkpoint_changed", where, f"{error}.")
            continue
        if checkpoint.size != size:
            yield AuditFinding("checkpoint_changed", where, "its note is for another tree size.")
        if checkpoint.size < last:
            yield AuditFinding(
                "checkpoint_changed", where, "it covers fewer entries than the previous one."
            )
        last = max(last, checkpoint.size)
        origins.add(checkpoint.origin)
        expected[checkpoint.size].append((where, checkpoint))
    for checkpoint in external:
        if origins and checkpoint.origin not in origins:
            yield AuditFinding(
                "other_log", EXTERNAL_CHECKPOINT, f"its origin is {checkpoint.origin}."
            )
            continue
        expected[checkpoint.size].append((EXTERNAL_CHECKPOINT, checkpoint))
    tree = merkle_tree.Frontier()
    yield from _rebuild(connection, tree, expected)
    yield from _compare_sizes(tree.size, last, expected)
    yield from _unexpected_nodes(connection, tree.size)
    yield from _unsequenced_entries(connection)


def _checkpoints(connection: Connection) -> Iterator[tuple[str, str, str, int]]:
    query = (
        select(log_checkpoints, signing_keys.c.record)
        .outerjoin(signing_keys, signing_keys.c.key_id == log_checkpoints.c.key_id)
        .order_by(log_checkpoints.c.id)
    )
    for row in connection.execute(query):
        yield f"log_checkpoints {row.id}", row.note, row.record or "{}", row.tree_size


def _rebuild(
    connection: Connection, tree: merkle_tree.Frontier, expected: Expected
) -> Iterator[AuditFinding]:
    yield from _compare_root(expected, tree)
    while rows := _read_leaves(connection, tree.size):
        start = tree.size
        nodes: dict[merkle_tree.Place, bytes] = {}
        for row in rows:
            if row.leaf_index != tree.size:
                yield AuditFinding(
                    "leaf_missing",
                    f"log_leaves {tree.size}",
                    f"the next leaf is {row.leaf_index}; later leaves cannot be verified.",
                )
                return
            yield from _compare_entry(row)
            nodes.update(
                tree.append(merkle_tree.leaf_hash(leaf_content(row.content or "", row.salt)))[1:]
            )
            yield from _compare_root(expected, tree)
        yield from _compare_nodes(connection, start, tree.size, nodes)


def _read_leaves(connection: Connection, start: int) -> Sequence[Row[Any]]:
    return connection.execute(
        select(log_leaves, log_entries)
        .outerjoin(log_entries, log_entries.c.id == log_leaves.c.entry_id)
        .where(log_leaves.c.leaf_index >= start)
        .order_by(log_leaves.c.leaf_index)
        .limit(LEAVES_PER_CHUNK)
    ).all()


def _compare_entry(row: Row[Any]) -> Iterator[AuditFinding]:
    where = f"log_leaves {row.leaf_index}"
    if row.content is None:
        yield AuditFinding("entry_missing", where, f"its entry {row.entry_id} does not exist.")
        return
    if merkle_tree.leaf_hash(leaf_content(row.content, row.salt)) != bytes(row.leaf_hash):
        yield AuditFinding("leaf_changed", where, "its hash is not the hash of its entry.")
    try:
        content = json.loads(row.content)
        columns = (row.kind, row.subject, row.at.isoformat(timespec="microseconds"))
        is_same = (content["kind"], content["subject"], content["at"]) == columns
    except (ValueError, TypeError, KeyError):
        is_same = False
    if not is_same:
        where = f"log_entries {row.entry_id}"
        yield AuditFinding("entry_changed", where, "its columns contradict its hashed bytes.")


def _compare_root(expected: Expected, tree: merkle_tree.Frontier) -> Iterator[AuditFinding]:
    for where, checkpoint in expected.pop(tree.size, ()):
        if tree.root() != checkpoint.root_hash:
            yield AuditFinding(
                "rewritten" if where == EXTERNAL_CHECKPOINT else "checkpoint_mismatch",
                where,
                f"the first {tree.size} entries do not have the root that it signed.",
            )


def _compare_nodes(
    connection: Connection, start: int, size: int, nodes: dict[merkle_tree.Place, bytes]
) -> Iterator[AuditFinding]:
    """Compare the subtrees that the leaves from ``start`` to ``size`` complete."""
    for level in range(1, size.bit_length()):
        first, end = start >> level, size >> level
        if first == end:
            continue
        rows = connection.execute(
            select(log_nodes.c.position, log_nodes.c.hash).where(
                log_nodes.c.level == level,
                log_nodes.c.position >= first,
                log_nodes.c.position < end,
            )
        )
        stored = {position: bytes(value) for position, value in rows}
        for position in range(first, end):
            where = f"log_nodes {level}, {position}"
            rebuilt = nodes.get(merkle_tree.Place(level, position))
            if position not in stored:
                yield AuditFinding("node_missing", where, "the hash is missing.")
            elif rebuilt is not None and stored[position] != rebuilt:
                yield AuditFinding("node_changed", where, "the hash does not match its leaves.")


def _compare_sizes(size: int, signed: int, expected: Expected) -> Iterator[AuditFinding]:
    for expected_size, checkpoints in sorted(expected.items()):
        for where, _ in checkpoints:
            yield AuditFinding(
                "rolled_back" if where == EXTERNAL_CHECKPOINT else "checkpoint_mismatch",
                where,
                f"it covers {expected_size} entries, but the log has {size}.",
            )
    if size > signed:
        message = f"there are {size} leaves, but the checkpoints cover {signed}."
        yield AuditFinding("checkpoint_missing", "log_checkpoints", message)


def _unexpected_nodes(connection: Connection, size: int) -> Iterator[AuditFinding]:
    levels = connection.execute(
        select(log_nodes.c.level, func.max(log_nodes.c.position), func.min(log_nodes.c.position))
        .group_by(log_nodes.c.level)
        .order_by(log_nodes.c.level)
    )
    for level, highest, lowest in levels:
        if level < 1 or lowest < 0 or highest >= size >> min(level, 64):
            message = f"a tree of {size} leaves has no such subtree."
            yield AuditFinding("node_changed", f"log_nodes {level}, {highest}", message)


def _unsequenced_entries(connection: Connection) -> Iterator[AuditFinding]:
    query = (
        select(log_entries.c.id)
        .outerjoin(log_leaves, log_leaves.c.entry_id == log_entries.c.id)
        .outerjoin(log_pending, log_pending.c.entry_id == log_entries.c.id)
        .where(log_leaves.c.entry_id.is_(None), log_pending.c.entry_id.is_(None))
        .order_by(log_entries.c.id)
    )
    for (entry_id,) in connection.execute(query):
        yield AuditFinding(
            "entry_not_sequenced",
            f"log_entries {entry_id}",
            "it has no leaf in the tree and is not pending.",
        )


# ---- the rows ------------------------------------------------------------------------


def audit(
    connection: Connection,
    external: Sequence[Checkpoint],
    worker_keys: Sequence[PublicKey] = (),
    own_keys: Sequence[PublicKey] = (),
) -> Iterator[AuditFinding]:
    """Yield every inconsistency of the tree, of the rows, and of the ledgers.

    ``external`` are checkpoints stored outside the database. Without ``worker_keys``, as on an
    auditor's machine, the workers' signatures are not verified. Without ``own_keys``, the keys of
    the key directory, the origin of signing keys is not verified.
    """
    yield from _report_unreadable("the log", audit_tree(connection, external))
    yield from audit_rows(connection)
    yield from _report_unreadable("signing_keys", _compare_signers(connection, own_keys))
    yield from _report_unreadable("ledgers", _audit_ledgers(connection))
    yield from _report_unreadable("settlements", _compare_settlements(connection, worker_keys))


def _compare_settlements(
    connection: Connection, worker_keys: Sequence[PublicKey]
) -> Iterator[AuditFinding]:
    """Compare reduced charges with the signed ends of their runs, which alone justify them."""
    settled, ended = ledger_events.c, run_events.c
    query = (
        select(settled.reservation_id, settled.steps_run, settled.body)
        .add_columns(runs.c.id.label("run_id"), ended.body.label("ended_body"))
        .outerjoin(runs, runs.c.reservation_id == settled.reservation_id)
        .outerjoin(run_events, (ended.run_id == runs.c.id) & (ended.once == "end"))
        .where(settled.kind == "settle", settled.steps_run < settled.certified_steps)
    )
    workers = TrustedKeys(tuple(worker_keys), policy=None)
    for row in connection.execute(query.execution_options(yield_per=ROWS_PER_CHUNK)):
        end = json.loads(row.ended_body or "{}")
        record = json.loads(row.body)["record"]
        reason = "its run did not end so."
        is_shown = (end.get("steps_charged"), end.get("record")) == (row.steps_run, record)
        if is_shown and worker_keys:
            try:
                signed = read_provenance(end.get("provenance"), workers, later=True)
                is_shown = (signed.run, signed.record) == (row.run_id, record)
                is_shown = is_shown and signed.steps_to_charge <= row.steps_run
                reason = "its worker signed something else."
            except BadProvenance as error:
                is_shown, reason = False, str(error)
        if not is_shown:
            message = f"freed_without_record: it is charged for {row.steps_run} steps, but {reason}"
            yield AuditFinding("ledger", f"reservation {row.reservation_id}", message)


def _audit_ledgers(connection: Connection) -> Iterator[AuditFinding]:
    for fault in check_ledgers(connection):
        yield AuditFinding(
            "ledger", f"{fault.ledger} {fault.seq}", f"{fault.code}: {fault.message}"
        )
    for reservation_id, reason in orphaned_reservations(connection, now_of(connection)):
        yield AuditFinding("orphan", f"reservation {reservation_id}", reason)


def count_pending(connection: Connection) -> int:
    """Count the entries that wait to be sequenced; they are not an inconsistency."""
    return int(connection.execute(select(func.count()).select_from(log_pending)).scalar_one())


def audit_rows(connection: Connection) -> Iterator[AuditFinding]:
    """Yield rows without entries, entries without rows, and contradicting certificates."""
    entries = _entry_index(connection)
    for entry_type in ENTRY_TYPES:
        rows = compare_table(connection, entry_type, entries)
        yield from _report_unreadable(entry_type.table.name, rows)
    yield from _compare_keys(connection)
    for table, findings in (
        (keysets, compare_keysets(connection)),
        (policies, _compare_policies(connection)),
        (certificates, _compare_certificates(connection)),
        (approvals, _compare_decisions(connection)),
        (runs, _compare_runs(connection)),
    ):
        yield from _report_unreadable(table.name, findings)


def _entry_index(connection: Connection) -> EntryIndex:
    """Read every entry, sequenced or not."""
    entries = EntryIndex()
    after = 0
    while rows := connection.execute(
        select(log_entries.c.id, log_entries.c.content)
        .where(log_entries.c.id > after)
        .order_by(log_entries.c.id)
        .limit(ROWS_PER_CHUNK)
    ).all():
        for entry_id, content in rows:
            with suppress(*UNREADABLE):  # audit_tree reports that it does not match its hash
                entries.add(entry_id, content)
        after = rows[-1].id
    return entries


def _compare_keys(connection: Connection) -> Iterator[AuditFinding]:
    """Compare the ids of keys with their records, and require that each key signed something."""
    used: set[str] = set()
    for table in (certificates, log_checkpoints, policies, waivers):
        used.update(connection.execute(select(table.c.key_id).distinct()).scalars())
    for row in connection.execute(select(signing_keys).order_by(signing_keys.c.key_id)):
        where = f"signing_keys {row.key_id}"
        if row.key_id not in used:
            yield AuditFinding("row_without_entry", where, "nothing here was signed with it.")
        try:
            if key_of(row.record).key_id != row.key_id:
                yield AuditFinding("row_changed", where, "its record is that of another key.")
        except LogDamaged as error:
            yield AuditFinding("row_changed", where, f"{error}.")


def _compare_signers(
    connection: Connection, own_keys: Sequence[PublicKey]
) -> Iterator[AuditFinding]:
    """Compare the signing keys with the key directory and all keysets.

    Development keys, which no verifier trusts, are in neither.
    """
    known = {key.key_id for key in own_keys}
    for document in connection.execute(select(keysets.c.document)).scalars():
        with suppress(KeysetError):  # reported with the keysets
            known.update(key.key_id for key in read_keyset(bytes(document)).keyset.keys)
    for row in connection.execute(select(signing_keys).order_by(signing_keys.c.key_id)):
        if own_keys and row.key_id not in known and not key_of(row.record).development:
            message = "neither the key directory nor a keyset has this key."
            yield AuditFinding("row_changed", f"signing_keys {row.key_id}", message)


def _compare_policies(connection: Connection) -> Iterator[AuditFinding]:
    """Compare the columns of policies and waivers with their signed bytes."""
    for message in find_tampered(connection):
        yield AuditFinding("row_changed", "policies and waivers", f"{message}.")


def _compare_decisions(connection: Connection) -> Iterator[AuditFinding]:
    """Compare the issues of approvals and revocations with the envelopes that they name."""
    for table in (approvals, revocations):
        has_envelope = table.c.envelope_digest == certificates.c.envelope_digest
        query = select(table.c.id).outerjoin(certificates, and_(same_issue(table), has_envelope))
        for row_id in connection.execute(query.where(certificates.c.id.is_(None))).scalars():
            where = f"{table.name} {row_id}"
            yield AuditFinding("row_changed", where, "it is not about the issue of its envelope.")


def _compare_certificates(connection: Connection) -> Iterator[AuditFinding]:
    """Verify the signed bytes of certificates, and compare columns and results with them."""
    keys = []
    for record in connection.execute(select(signing_keys.c.record)).scalars():
        with suppress(LogDamaged):  # reported with the keys
            keys += [key for key in (key_of(record),) if key.has_role(KeyRole.CERTIFICATE)]
    facets = certificate_facets.c
    query = (
        select(certificates, facets.mechanism, facets.requester)
        .outerjoin(certificate_facets, same_issue(certificate_facets))
        .order_by(*certificates.primary_key)
    )
    uses = defaultdict(set)
    for use in connection.execute(select(waiver_uses)):
        uses[use.certificate_id].add(use.waiver_id)
    for row in connection.execute(query.execution_options(yield_per=ROWS_PER_CHUNK)):
        where = f"certificates {row.id} issue {row.issue}"
        try:
            contents = SignedContents.of(row._mapping)
            differing = contents.contradicted_by(row._mapping, keys)
            if not uses[row.id] >= contents.waivers:
                differing.append("waiver_uses")
        except UNREADABLE as error:
            yield AuditFinding("row_changed", where, f"it cannot be read: {error}.")
            continue
        if differing:
            yield AuditFinding("row_changed", where, f"its signed bytes contradict: {differing}.")


def _compare_runs(connection: Connection) -> Iterator[AuditFinding]:
    """Compare runs with their reservations and their ``queued`` events, and leases with the log."""
    leases = _logged_leases(connection)
    query = (
        select(
            runs,
            *(run_leases.c[name] for name in ("granted", "state", "fence", "cancel", "search")),
            *(reservations.c[name].label(f"reserved_{name}") for name in _RESERVATION_COLUMNS),
            *(run_events.c[name].label(f"queued_{name}") for name in ("actor", "body")),
        )
        .join(run_leases, run_leases.c.run_id == runs.c.id)
        .outerjoin(reservations, reservations.c.id == runs.c.reservation_id)
        .outerjoin(run_events, (run_events.c.run_id == runs.c.id) & (run_events.c.seq == 1))
        .order_by(runs.c.id)
    )
    for row in connection.execute(query.execution_options(yield_per=ROWS_PER_CHUNK)):
        body = json.loads(row.queued_body or "{}")
        granted, lease = leases[row.id]
        logged = {
            **{name: getattr(row, f"reserved_{name}") for name in _RESERVATION_COLUMNS},
            "reservation_id": body.get("reservation"),
            "queue": body.get("request", {}).get("queue"),
            "requested_by": row.queued_actor,
            **{name: lease.get(name) for name in ("state", "fence", "cancel")},
        }
        differing = [name for name, value in logged.items() if getattr(row, name) != value]
        differing += ["request"] * (json.loads(row.request) != body.get("request"))
        opening = None if row.search is None else SearchOpening.read(json.loads(row.search)).digest
        differing += ["search"] * (opening != lease.get("search"))
        # Without a grant, another worker would charge and train the same steps again.
        granted.append(row.granted)
        differing += ["granted"] * (granted != sorted(granted))
        if differing:
            message = f"its log entries contradict: {differing}."
            yield AuditFinding("row_changed", f"runs {row.id}", message)


def _logged_leases(connection: Connection) -> defaultdict[str, tuple[list[int], dict[str, Any]]]:
    """Return the logged lease of each run: the granted steps, in order, and the columns."""
    leases: defaultdict[str, tuple[list[int], dict[str, Any]]]
    leases = defaultdict(lambda: ([], {"fence": 0, "cancel": False}))
    entries = select(log_entries.c.content).where(log_entries.c.kind.in_(("run", "steps")))
    for content in connection.execute(entries.order_by(log_entries.c.id)).scalars():
        entry = json.loads(content)
        body = entry.get("body", {})  # missing only in entries that no service wrote
        granted, lease = leases[entry.get("subject", "")]
        if "granted" in body:
            granted.append(int(body["granted"]))
        match body.get("event"):
            case "claimed":
                lease |= {"state": "claimed", "fence": body["fence"]}
            case "running":
                lease |= {"state": "running", "search": body.get("search")}
            case "cancel_asked":
                lease["cancel"] = True
            case str() as event:
                lease["state"] = "ended" if event in ENDED else STATES[event]
    return leases


_RESERVATION_COLUMNS = ("certificate_id", "issue", "untrusted", "plan_digest")


def _report_unreadable(where: str, findings: Iterator[AuditFinding]) -> Iterator[AuditFinding]:
    """Yield ``findings``, and a finding instead of the error of an unreadable value."""
    try:
        yield from findings
    except UNREADABLE as error:
        yield AuditFinding("row_changed", where, f"a value cannot be read: {error}.")
