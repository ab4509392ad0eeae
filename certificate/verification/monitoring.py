"""Monitor a log from outside: it only grows, its keys sign it, and no entry is missing.

A monitor reads the checkpoint and every new entry, and computes the tree itself: from the tree that
it saw last (read from the tiles, whose root must be the earlier one) and the new entries. If the
result is the signed root, the log extends the earlier one, and each entry matches its hash.
Checkpoints from a witness, another monitor or a bundle must belong to the same tree.
The alarms are those of step 11 of verification, about the checkpoint, and:

========================  ==================================================================
``split_view``            the log differs from the one seen before, here or elsewhere
``rolled_back``           the log has fewer entries than were seen before, here or elsewhere
``entry_missing``         an entry or a hash that the checkpoint covers is missing
``entry_altered``         an entry does not match its hash
``unknown_signer``        an entry was signed by a key that is unknown or not allowed to sign
``backdated``             a certificate in the log is dated long before it was logged
``dated_ahead``           an entry is dated after the checkpoint that contains it
========================  ==================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from affidavit.certificate.verification import inclusion_verification as log_steps
from affidavit.certificate.verification.verification_result import (
    SeenCheckpoint,
    VerificationOptions,
    Verifier,
)
from affidavit.trust import KeyRole, PublicKey, TrustedKeys, VerificationError
from affidavit.trust.dates import fault_of_signature, is_ahead
from affidavit.trust.key import by_id
from affidavit.trust.log import (
    BadNote,
    Checkpoint,
    merkle_tree,
    open_checkpoint,
    read_checkpoint,
)

SIGNED_KINDS = ("certificate", "refusal", "policy", "waiver")
"""The kinds of entries that name the key that signed the recorded document."""
MAX_BACKDATING = timedelta(hours=1)
"""How long before the previous look at the log a new certificate may be dated."""
MAX_ALARMS = 100


class MissingTile(Exception):
    """The log lacks a tile that its checkpoint covers."""


class Source(Protocol):
    """A reader of a log; its methods raise ``MissingTile`` and ``BadTile``."""

    def checkpoint(self) -> str:
        """Return the signed note, with cosignatures."""
        ...

    def hashes(self, level: int, number: int, width: int) -> Sequence[bytes]:
        """Return the first ``width`` hashes of a tile."""
        ...

    def entries(self, number: int, width: int) -> Sequence[bytes]:
        """Return the first ``width`` entries below a tile of level 0."""
        ...


@dataclass(frozen=True, slots=True)
class Alarm:
    """A fault of the log; ``index`` is the index of the faulty entry, if there is one."""

    code: str
    message: str
    index: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorState:
    """The earlier checkpoints with which a monitor compares the log.

    ``last`` is the checkpoint that it saw last, ``elsewhere`` are checkpoints that others saw.
    """

    trusted: TrustedKeys
    options: VerificationOptions
    last: SeenCheckpoint | None = None
    elsewhere: Sequence[str] = ()


@dataclass(slots=True)
class MonitorReport:
    """The result of one check of the log; ``note`` is the checkpoint to store if no alarm."""

    origin: str = ""
    size: int = 0
    entries: int = 0
    note: str = ""
    alarms: list[Alarm] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {
            "ok": not self.alarms,
            "origin": self.origin,
            "size": self.size,
            "entries": self.entries,
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "checkpoint": self.note,
        }


def check_log(source: Source, known: MonitorState) -> MonitorReport:
    """Read the log once and compare it with the ``known`` checkpoints."""
    report = MonitorReport()
    try:
        report.note = source.checkpoint()
        checkpoint = read_checkpoint(report.note)
        report.origin, report.size = checkpoint.origin, checkpoint.size
        verifier = Verifier(known.trusted, known.options, known.trusted.now())
        attestation = log_steps.find_attestation(report.note, verifier)
        log_steps.check_signature(report.note, attestation, verifier, issued_at=None)
        log_steps.check_trust_policy(checkpoint, attestation, verifier, may_be_old=False)
        _require_same_tree(source, checkpoint, known)
        report.alarms += _read_new_entries(source, checkpoint, known, report)
    except _Alarmed as alarmed:
        report.alarms.append(alarmed.alarm)
    except VerificationError as error:
        code = "unknown_signer" if error.code == "unknown_checkpoint_key" else error.code
        report.alarms.append(Alarm(code, error.message))
    except BadNote as error:
        report.alarms.append(Alarm("bad_checkpoint", f"{error}."))
    except (MissingTile, merkle_tree.BadTile, merkle_tree.ProofError) as error:
        report.alarms.append(Alarm("entry_missing", f"{error}."))
    return report


class _Alarmed(Exception):
    def __init__(self, code: str, message: str, index: int | None = None) -> None:
        self.alarm = Alarm(code, message, index)
        super().__init__(message)


def _require_same_tree(source: Source, newest: Checkpoint, known: MonitorState) -> None:
    """Check that the checkpoints from elsewhere are of this tree."""
    for note in known.elsewhere:
        seen, _ = open_checkpoint(note, known.trusted.keys)
        if seen.origin != newest.origin:
            raise _Alarmed("wrong_origin", f"a checkpoint from elsewhere is of {seen.origin!r}.")
        _frontier(source, seen, newest, "elsewhere")


def _frontier(
    source: Source, seen: Checkpoint, newest: Checkpoint, where: str
) -> merkle_tree.Frontier:
    """Read the tree of ``seen`` from the log's tiles and check its root."""
    if seen.size > newest.size:
        raise _Alarmed(
            "rolled_back", f"the log has {newest.size} entries, but {seen.size} were seen {where}."
        )
    tree = merkle_tree.Frontier(seen.size, merkle_tree.frontier_hashes(seen.size, source.hashes))
    if tree.root() != seen.root_hash:
        raise _Alarmed(
            "split_view",
            f"the first {seen.size} entries are not those that were seen {where}: keep both "
            "checkpoints, which are the evidence.",
        )
    return tree


def _read_new_entries(
    source: Source, newest: Checkpoint, known: MonitorState, report: MonitorReport
) -> list[Alarm]:
    """Read the new entries up to the signed root, and return the alarms about them.

    An entry is new if it was not there when this monitor last read the log. That time is by the
    monitor's own clock, because the operator can write any date.
    """
    tree, since = merkle_tree.Frontier(), None
    if known.last is not None:
        last = read_checkpoint(known.last.note)
        tree = _frontier(source, last, newest, "here before")
        since = known.last.at or last.signed_at
    first = tree.size
    alarms: list[Alarm] = []
    for index, entry in _entries(source, first, newest.size):
        tree.append(merkle_tree.leaf_hash(entry))
        if len(alarms) < MAX_ALARMS:
            keys = by_id(known.trusted.keys)
            alarms += _entry_alarms(index, entry, keys, since, newest.signed_at)
        report.entries += 1
    if tree.root() != newest.root_hash:
        _require_unaltered(source, first, newest.size)
        raise _Alarmed("split_view", "the entries and hashes are not those of the signed root.")
    return alarms


def _entries(source: Source, first: int, size: int) -> Iterator[tuple[int, bytes]]:
    for number in range(first // merkle_tree.TILE_WIDTH, -(-size // merkle_tree.TILE_WIDTH)):
        start = number * merkle_tree.TILE_WIDTH
        width = min(merkle_tree.TILE_WIDTH, size - start)
        entries = source.entries(number, width)
        if len(entries) < width:
            raise _Alarmed(
                "entry_missing", f"entry {start + len(entries)} is missing.", start + len(entries)
            )
        for index in range(max(first, start), start + width):
            yield index, entries[index - start]


def _require_unaltered(source: Source, first: int, size: int) -> None:
    for index, entry in _entries(source, first, size):
        number, place = divmod(index, merkle_tree.TILE_WIDTH)
        width = min(merkle_tree.TILE_WIDTH, size - number * merkle_tree.TILE_WIDTH)
        if source.hashes(0, number, width)[place] != merkle_tree.leaf_hash(entry):
            raise _Alarmed("entry_altered", f"entry {index} does not match its hash.", index)


def _entry_alarms(
    index: int,
    entry: bytes,
    keys: dict[str, PublicKey],
    since: datetime | None,
    signed_at: datetime | None,
) -> Iterable[Alarm]:
    try:
        content = json.loads(entry)
        kind, body = content["kind"], content["body"]
        at = datetime.fromisoformat(content["at"])
        key_id = body.get("key_id") if kind in SIGNED_KINDS else None
        if at.tzinfo is None or not isinstance(key_id, str | None):
            raise ValueError("a field has the wrong type")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield Alarm("entry_altered", f"entry {index} is not an Affidavit log entry.", index)
        return
    if signed_at is not None and is_ahead(at, signed_at):
        message = f"entry {index}: a {kind} is dated {content['at']}, after its checkpoint."
        yield Alarm("dated_ahead", message, index)
    if key_id is None:
        return
    key = keys.get(key_id)
    if key is None or key.development or not key.has_role(KeyRole.CERTIFICATE):
        message = f"entry {index}: a {kind} is signed by {key_id[:16]}, which you do not trust."
        yield Alarm("unknown_signer", message, index)
    elif fault_of_signature(key, at, now=at) is not None:
        message = (
            f"entry {index}: a {kind} is dated {content['at']}, when its key was not allowed to "
            "sign."
        )
        yield Alarm("unknown_signer", message, index)
    if since is not None and kind in ("certificate", "refusal") and at < since - MAX_BACKDATING:
        message = f"entry {index}: a {kind} is dated {content['at']}, long before it was logged."
        yield Alarm("backdated", message, index)
