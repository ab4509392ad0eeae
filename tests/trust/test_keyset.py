"""A keyset is accepted if t of n trusted roots signed it and it revokes no less than before."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.dsse import Envelope as TheirEnvelope
from securesystemslib.exceptions import VerificationError as TheirRefusal
from securesystemslib.signer import SSlibKey

from affidavit.plan import canonical_json
from affidavit.trust import (
    KeyFailure,
    KeysetError,
    Revocation,
    Roots,
    SignedKeyset,
    SigningKey,
    TrustRoot,
    VerificationError,
    accept_keyset,
    draft_keyset,
    read_anchor,
    read_keyset,
    trust_root,
)
from affidavit.trust.dsse import CosignedEnvelope

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
ROOTS = [SigningKey.generate(f"root {name}") for name in "abcde"]
SIGNERS = [SigningKey.generate(f"signer {number}") for number in range(2)]
Make = Callable[..., SignedKeyset]


def roots_of(indices: str, threshold: int) -> Roots:
    return Roots.of([ROOTS["abcde".index(index)].public for index in indices], threshold)


@pytest.fixture
def make() -> Make:
    """A version after ``last``, signed by the roots named in ``by``."""

    def made(last: SignedKeyset | None = None, by: str = "ab", **changes: Any) -> SignedKeyset:
        inherited = (
            {"roots": roots_of("abc", 2), "revoked": ()}
            if last is None
            else {"roots": last.keyset.roots, "revoked": last.keyset.revoked}
        )
        provided = {
            **inherited,
            "keys": [key.public for key in SIGNERS],
            "issued_at": NOW,
            "expires_at": NOW + timedelta(days=30),
            **changes,
        }
        result = draft_keyset(last, **provided)
        for item in by:
            result = result.signed_by(ROOTS["abcde".index(item)])
        return result

    return made


def code_of(*chain: SignedKeyset, anchor: Any = None, now: datetime = NOW) -> str:
    """How the chain is received: ``accepted`` or the code of the refusal."""
    try:
        accept_keyset(chain, anchor, now)
    except KeysetError as error:
        return error.code
    return "accepted"


# ---- t of n ------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_it_counts_exactly_when_t_of_n_roots_signed_as_another_library_counts(
    make: Make, threshold: int
) -> None:
    roots = roots_of("abc", threshold)
    theirs = [SSlibKey.from_crypto(key.public.key, keyid=key.key_id) for key in ROOTS[:3]]
    # "d" is a stranger, whose signature adds nothing.
    for number in range(5):
        for by in combinations("abcd", number):
            result = make(by="".join(by), roots=roots)
            try:
                TheirEnvelope.from_dict(result.envelope.as_document()).verify(theirs, threshold)
                requested = "accepted"
            except TheirRefusal:
                requested = "keyset_unsigned"
            assert code_of(result, anchor=roots) == requested
            assert (requested == "accepted") == (len(set(by) - {"d"}) >= threshold)


def test_a_key_counts_once_however_often_it_signs(make: Make) -> None:
    result = make(by="aaa")
    assert len(result.envelope.signatures) == 1
    document = result.envelope.as_document()
    document["signatures"] *= 2
    with pytest.raises(KeysetError, match="more than once"):
        read_keyset(canonical_json(document))


def test_a_signature_under_another_keys_id_counts_for_neither(make: Make) -> None:
    result = make(by="ad")
    first, second = result.envelope.signatures
    forged = second.model_copy(update={"key_id": ROOTS[1].key_id})
    envelope = result.envelope.model_copy(update={"signatures": (first, forged)})
    assert code_of(SignedKeyset(result.keyset, envelope)) == "keyset_unsigned"


def test_a_signature_over_the_same_bytes_as_another_type_does_not_count(make: Make) -> None:
    result = make(by="")
    other = CosignedEnvelope(
        payload_type="application/vnd.in-toto+json",
        payload=result.envelope.payload,
        signatures=(),
    )
    signed = other.signed_by(ROOTS[0]).signed_by(ROOTS[1])
    with pytest.raises(KeysetError, match="does not contain a keyset"):
        read_keyset(canonical_json(signed.as_document()))
    moved = result.envelope.model_copy(update={"signatures": signed.signatures})
    assert code_of(SignedKeyset(result.keyset, moved)) == "keyset_unsigned"


def test_its_own_roots_do_not_make_it_trusted(make: Make) -> None:
    usurped = make(by="de", roots=roots_of("de", 2))
    assert code_of(usurped) == "accepted"  # by somebody who trusts nothing yet
    assert code_of(usurped, anchor=roots_of("abc", 2)) == "keyset_untrusted"
    assert code_of(usurped, anchor=make()) == "keyset_untrusted"


# ---- versions ----------------------------------------------------------------------


def test_roots_are_replaced_with_t_of_the_old_and_t_of_the_new(make: Make) -> None:
    first, new = make(), roots_of("cde", 2)
    assert code_of(make(first, by="abde", roots=new), anchor=first) == "accepted"
    assert code_of(make(first, by="bcd", roots=new), anchor=first) == "accepted"
    assert code_of(make(first, by="abe", roots=new), anchor=first) == "keyset_unsigned"
    assert code_of(make(first, by="bde", roots=new), anchor=first) == "keyset_untrusted"


def test_who_missed_a_change_of_roots_needs_the_versions_between(make: Make) -> None:
    first = make()
    second = make(first, by="abde", roots=roots_of("de", 2), expires_at=NOW + timedelta(seconds=1))
    third = make(second, by="de")
    later = NOW + timedelta(days=1)
    assert code_of(third, anchor=first, now=later) == "keyset_untrusted"
    # The version between has expired by now, and need not be current.
    assert code_of(second, third, anchor=first, now=later) == "accepted"
    assert code_of(second, third, anchor=roots_of("abc", 2), now=later) == "accepted"


def test_a_version_is_neither_rolled_back_nor_forked(make: Make) -> None:
    first = make()
    second = make(first, expires_at=NOW + timedelta(days=60))
    other = make(first, expires_at=NOW + timedelta(days=61))
    assert code_of(second, anchor=second) == "accepted"
    assert code_of(first, anchor=second) == "keyset_rollback"
    assert code_of(other, anchor=second) == "keyset_fork"
    assert code_of(make(other), anchor=second) == "keyset_fork"
    assert code_of(make(make(second)), anchor=first) == "accepted"


def test_the_newest_accepted_is_remembered(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same roots at hand: neither what was replaced, nor who was, is trusted again."""
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    anchor = tmp_path / "roots.json"
    anchor.write_bytes(canonical_json(roots_of("abc", 2).model_dump(mode="json")))

    def load(*chain: SignedKeyset) -> str:
        files = [tmp_path / f"{number}.json" for number in range(len(chain))]
        for file, keyset in zip(files, chain, strict=True):
            file.write_bytes(keyset.as_bytes())
        try:
            TrustRoot([], files, anchor).load()
        except VerificationError as error:
            return error.code
        return "accepted"

    now = {"expires_at": datetime.now(UTC) + timedelta(days=9)}
    first = make(**now)
    second = make(first, by="abde", roots=roots_of("de", 2), **now)
    third = make(second, by="de", **now)
    thieves = make(make(first, **now), by="ab", **now)
    assert [load(first), load(second), load(second, third)] == ["accepted"] * 3
    assert load(third) == "accepted"  # by what it remembers; the roots at hand did not sign it
    assert [load(first), load(second)] == ["keyset_rollback"] * 2
    assert load(make(second, by="de", keys=[], **now)) == "keyset_fork"
    assert load(thieves) == load(make(thieves, by="ab", **now)) == "keyset_untrusted"
    (memory,) = (tmp_path / "home" / "keysets").glob("*.json")
    # A process that accepted an older one at the same time, and is later to write it.
    trust_root._save_seen(memory, second)
    assert load(second) == "keyset_rollback"
    memory.write_bytes(b"{}")
    with pytest.raises(KeyFailure, match="cannot be read"):
        load(third)


def test_a_revocation_is_permanent(make: Make) -> None:
    def revoked(since: datetime) -> list[Revocation]:
        text = since.strftime("%Y-%m-%dT%H:%M:%SZ")
        return [Revocation(key_id=SIGNERS[0].key_id, since=text)]

    first = make(revoked=revoked(NOW))
    assert code_of(make(first), anchor=first) == "accepted"
    earlier, later = NOW - timedelta(days=9), NOW + timedelta(seconds=1)
    assert code_of(make(first, revoked=revoked(earlier)), anchor=first) == "accepted"
    assert code_of(make(first, revoked=revoked(later)), anchor=first) == "keyset_unrevoked"
    assert code_of(make(first, revoked=[]), anchor=first) == "keyset_unrevoked"


def test_it_has_its_time(make: Make) -> None:
    result = make()
    second = timedelta(seconds=1)
    end = NOW + timedelta(days=30)
    assert code_of(result, now=NOW - second) == "keyset_not_yet"
    assert code_of(result, now=NOW) == code_of(result, now=end) == "accepted"
    assert code_of(result, now=end + second) == "keyset_expired"


# ---- form --------------------------------------------------------------------------


def test_what_is_written_is_read_back(make: Make) -> None:
    result = make(revoked=[Revocation(key_id=SIGNERS[1].key_id, since="2026-01-01T00:00:00Z")])
    assert read_keyset(result.as_bytes()) == result
    assert read_anchor(result.as_bytes()) == result
    roots = roots_of("abc", 2)
    assert read_anchor(canonical_json(roots.model_dump(mode="json"))) == roots
    revoked_from = datetime(2026, 1, 1, tzinfo=UTC)
    assert result.keyset.public_keys() == (
        SIGNERS[0].public,
        replace(SIGNERS[1].public, revoked_from=revoked_from),
    )


def resigned(found: SignedKeyset, payload: bytes) -> bytes:
    """That payload under signatures that fit it, as holders of the keys could make it."""
    envelope = found.envelope.model_copy(update={"payload": payload, "signatures": ()})
    for key in ROOTS[:2]:
        envelope = envelope.signed_by(key)
    return canonical_json(envelope.as_document())


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("version", 0),
        ("version", "1"),
        ("version", True),
        ("version", 2),
        ("previous", "sha256:" + "0" * 64),
        ("_type", "https://affidavit.dev/keyset/v2"),
        ("extra", 1),
        ("issued_at", "2026-06-01"),
        ("issued_at", "2026-02-30T00:00:00Z"),
        ("issued_at", "2026-6-1T00:00:00Z"),
        ("expires_at", "2026-06-01T12:00:00Z"),
        ("roots/threshold", 0),
        ("roots/threshold", 4),
        ("roots/keys", []),
        ("roots/keys/1", "same"),
        ("roots/keys/0/key_id", "0" * 64),
        ("roots/keys/0/public_key", "no key"),
        ("keys/1", "same"),
        ("keys/0/algorithm", "rsa"),
        ("keys/0/not_after", "2000-01-01T00:00:00Z"),
        ("keys/0/development", True),
        ("revoked", [{"key_id": "0" * 64, "since": "2026-01-01T00:00:00Z"}]),
        ("revoked", [{"key_id": "0" * 64}]),
    ],
)
def test_another_form_is_refused_however_well_it_is_signed(
    make: Make, pointer: str, value: Any
) -> None:
    result = make()
    document = json.loads(result.envelope.payload)
    *path, last = pointer.split("/")
    part = document
    for step in path:
        part = part[int(step)] if isinstance(part, list) else part[step]
    part[int(last) if isinstance(part, list) else last] = part[0] if value == "same" else value
    with pytest.raises(KeysetError) as refused:
        read_keyset(resigned(result, canonical_json(document)))
    assert refused.value.code == "keyset_malformed"


@pytest.mark.parametrize("lacks", ["key_id", "algorithm", "public_key", "not_before", "not_after"])
def test_a_key_without_what_it_is_and_when_it_signs_is_none(make: Make, lacks: str) -> None:
    result = make()
    document = json.loads(result.envelope.payload)
    del document["keys"][0][lacks]
    with pytest.raises(KeysetError, match=f"keys/0/{lacks}: Field required"):
        read_keyset(resigned(result, canonical_json(document)))


def test_roots_that_are_written_by_hand_need_their_keys_and_a_threshold(make: Make) -> None:
    keys = [
        {name: key.public.as_record()[name] for name in ("key_id", "public_key")}
        for key in ROOTS[:3]
    ]
    roots = read_anchor(canonical_json({"threshold": 2, "keys": keys}))
    assert isinstance(roots, Roots)
    assert [(key.algorithm, key.label) for key in roots.keys] == [("ed25519", "")] * 3
    assert [key.public().key_id for key in roots.keys] == [key.key_id for key in ROOTS[:3]]
    result = make()
    assert accept_keyset([result], roots, NOW) == result.keyset


def test_a_root_key_signs_no_certificates(make: Make) -> None:
    with pytest.raises(KeysetError, match="root key"):
        make(keys=[ROOTS[0].public])


def test_one_version_has_one_spelling(make: Make) -> None:
    result = make()
    spaced = json.dumps(json.loads(result.envelope.payload), indent=1).encode()
    with pytest.raises(KeysetError, match="canonical"):
        read_keyset(resigned(result, spaced))


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"nonsense", b'{"payload": NaN}'])
def test_files_that_hold_no_keyset_are_refused(raw: bytes) -> None:
    with pytest.raises(KeysetError):
        read_keyset(raw)
    with pytest.raises(KeysetError):
        read_anchor(raw)
