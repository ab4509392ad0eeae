"""A monitor reads an honest log in memory, which is then tampered with in every place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest

from affidavit.certificate.verification.monitoring import (
    Alarm,
    MissingTile,
    MonitorReport,
    MonitorState,
    check_log,
)
from affidavit.certificate.verification.verification_result import (
    SeenCheckpoint,
    VerificationOptions,
)
from affidavit.trust import (
    KeyRole,
    PublicKey,
    SigningKey,
    TrustPolicy,
)
from affidavit.trust.log import (
    merkle_tree,
    sign_checkpoint,
)
from tests.support.trust import trusting
from tests.trust.test_trust_policy import policy

ORIGIN = "example.com/log"
SIGNER = SigningKey.generate(roles=(KeyRole.CERTIFICATE,))
LOGGER = SigningKey.generate(roles=(KeyRole.CHECKPOINT,))
TRUSTED = (SIGNER.public, LOGGER.public)
NOW = SIGNER.public.not_before


def entry(number: int, key: SigningKey = SIGNER, at: datetime = NOW) -> bytes:
    body = {"key_id": key.key_id, "number": number}
    content = {"kind": "certificate", "subject": "x", "at": at.isoformat(), "body": body}
    return json.dumps(content).encode()


@dataclass
class MemoryLog:
    """A log as tiles, whose operator may serve anything."""

    contents: list[bytes] = field(default_factory=list)
    nodes: dict[merkle_tree.Place, bytes] = field(default_factory=dict)
    tree: merkle_tree.Frontier = field(default_factory=merkle_tree.Frontier)
    key: SigningKey = LOGGER
    origin: str = ORIGIN
    note: str = ""

    def grow(self, *entries: bytes) -> MemoryLog:
        for content in entries:
            self.contents.append(content)
            self.nodes.update(self.tree.append(merkle_tree.leaf_hash(content)))
        self.sign(self.tree.size, self.tree.root())
        return self

    def sign(self, size: int, root: bytes, at: datetime = NOW) -> None:
        self.note = sign_checkpoint(self.key, origin=self.origin, size=size, root_hash=root, at=at)

    def checkpoint(self) -> str:
        return self.note

    def hashes(self, level: int, number: int, width: int) -> Sequence[bytes]:
        places = [merkle_tree.Place(8 * level, 256 * number + item) for item in range(width)]
        if places[-1] not in self.nodes:
            raise MissingTile("no such tile")
        return [self.nodes[place] for place in places]

    def entries(self, number: int, width: int) -> Sequence[bytes]:
        return self.contents[256 * number :][:width]


def honest(size: int = 600) -> MemoryLog:
    return MemoryLog().grow(*(entry(number) for number in range(size)))


def look(
    log: MemoryLog,
    last: SeenCheckpoint | str | None = None,
    elsewhere: Sequence[str] = (),
    trusted: tuple[PublicKey, ...] = TRUSTED,
    policy: TrustPolicy | None = None,
) -> MonitorReport:
    known = MonitorState(
        trusted=trusting(trusted, policy=policy, at=NOW),
        options=VerificationOptions(log_origin=None if policy else ORIGIN),
        last=SeenCheckpoint(last) if isinstance(last, str) else last,
        elsewhere=elsewhere,
    )
    return check_log(log, known)


def codes(report: MonitorReport) -> list[tuple[str, int | None]]:
    return [(alarm.code, alarm.index) for alarm in report.alarms]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 600])
def test_an_honest_log_is_followed_without_alarm(size: int) -> None:
    log = honest(size)
    first = look(log)
    assert (first.alarms, first.size, first.entries) == ([], size, size)
    again = look(log, first.note, [first.note])
    assert (again.alarms, again.entries) == ([], 0)
    log.grow(*(entry(number) for number in range(300)))
    then = look(log, first.note, [first.note])
    assert (then.alarms, then.entries) == ([], 300)


def test_another_history_is_a_split_view() -> None:
    seen = honest(300).note
    other = MemoryLog().grow(entry(-1), *(entry(number) for number in range(1, 400)))
    assert codes(look(other, seen)) == [("split_view", None)]
    assert codes(look(other, None, [seen])) == [("split_view", None)]
    same_size = MemoryLog().grow(*(entry(number + 1) for number in range(300)))
    assert codes(look(same_size, seen)) == [("split_view", None)]
    assert codes(look(honest(299), seen)) == [("rolled_back", None)]
    assert codes(look(honest(299), None, [seen])) == [("rolled_back", None)]


def test_what_is_missing_or_altered_is_named() -> None:
    log = honest()
    log.contents[400] = entry(-400)
    assert codes(look(log)) == [("entry_altered", 400)]
    log = honest()
    del log.contents[-1]
    assert codes(look(log)) == [("entry_missing", 599)]
    log = honest()
    seen = honest(300).note
    del log.nodes[merkle_tree.Place(0, 280)]
    log.nodes = {place: node for place, node in log.nodes.items() if place.position < 280}
    assert codes(look(log, seen)) == [("entry_missing", None)]
    # The hashes of another tree beside true entries, and a root of neither.
    log = honest()
    log.sign(600, bytes(32))
    assert codes(look(log)) == [("split_view", None)]


def test_signers_that_nobody_knows_are_named() -> None:
    stranger = SigningKey.generate()
    log = honest(3).grow(entry(3, stranger), entry(4, LOGGER))
    assert codes(look(log)) == [("unknown_signer", 3), ("unknown_signer", 4)]
    log = replace(honest(3), key=stranger).grow(entry(3))
    assert codes(look(log)) == [("unknown_signer", None)]
    early = honest(2).grow(entry(2, at=NOW - timedelta(days=1)))
    assert codes(look(early)) == [("unknown_signer", 2)]


def test_the_operator_with_a_stolen_key_cannot_backdate_into_the_log() -> None:
    """Its certificate is dated before the revocation, but the log had been seen since."""
    trusted = (replace(SIGNER.public, not_before=NOW - timedelta(days=9)), LOGGER.public)
    log = honest(3)
    seen = log.note
    log.grow(entry(3, at=NOW - timedelta(days=2)))
    assert codes(look(log, seen, trusted=trusted)) == [("backdated", 3)]
    # The operator dates each checkpoint as well, but not when the monitor looked.
    logger = replace(LOGGER.public, not_before=NOW - timedelta(days=9))
    log = honest(3)
    log.sign(3, log.tree.root(), NOW - timedelta(days=4))
    seen = SeenCheckpoint(log.note, NOW)
    log.grow(entry(3, at=NOW - timedelta(days=2)))
    log.sign(4, log.tree.root(), NOW - timedelta(days=1))
    assert codes(look(log, seen, trusted=(trusted[0], logger))) == [("backdated", 3)]


def test_a_checkpoint_does_not_vouch_for_what_came_after_it() -> None:
    """As one would of a thief whose key's window has ended."""
    for minutes, expected in ((4, []), (6, [("dated_ahead", 3)])):
        later = honest(3).grow(entry(3, at=NOW + timedelta(minutes=minutes)))
        later.sign(4, later.tree.root(), NOW)
        assert codes(look(later)) == expected


def test_a_log_without_its_witnesses_or_of_another_name_alarms() -> None:
    log = honest(3)
    assert codes(look(log, policy=policy())) == [("not_witnessed", None)]
    other = MemoryLog(origin="example.com/other").grow(entry(0))
    assert codes(look(other)) == [("wrong_origin", None)]


def test_what_is_no_log_alarms() -> None:
    log = honest(2)
    for note in ("", "nonsense", log.note[:-9]):
        log.note = note
        assert [alarm.code for alarm in look(log).alarms] == ["bad_checkpoint"]
    listed = json.dumps(json.loads(entry(0)) | {"body": {"key_id": []}}).encode()
    without_zone = entry(0).replace(b"+00:00", b"")
    nested = b"[" * 60_000
    for content in (
        b"",
        b"[]",
        b"\xff",
        b'{"kind": "certificate"}',
        listed,
        without_zone,
        nested,
    ):
        assert codes(look(MemoryLog().grow(content))) == [("entry_altered", 0)]
    assert Alarm("a", "b").index is None
