"""Steps 8 and 10 to 12 of verification: each has inputs that only it rejects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.certificate.issuance import Certificate, issue
from affidavit.certificate.verification.bundle_verification import verify
from affidavit.certificate.verification.inclusion_verification import check_inclusion
from affidavit.certificate.verification.verification_result import (
    SeenCheckpoint,
    VerificationOptions,
    VerifiedCertificate,
)
from affidavit.plan import plan_from
from affidavit.trust import (
    STEPS,
    PublicKey,
    SigningKey,
    VerificationError,
    encode_base64,
    read_envelope,
)
from affidavit.trust.log import (
    Checkpoint,
    Consistency,
    merkle_tree,
    note_key,
    read_checkpoint,
    read_inclusion,
)
from affidavit.trust.log.note import sign_note
from tests.support.logged_certificate import KEY, NOW, ORIGIN, Log, certified, log_of
from tests.support.trust import trusting


@pytest.fixture(scope="module")
def certificate(document: Callable[..., dict[str, Any]]) -> Certificate:
    return certified(document(), KEY)


@pytest.fixture
def log(certificate: Certificate) -> Log:
    return log_of(certificate, index=11, size=40)


def passed(bundle: Mapping[str, Any], *keys: PublicKey, **options: Any) -> VerifiedCertificate:
    raw = json.dumps(bundle).encode()
    return verify(raw, trusting(keys or KEY.public), options=VerificationOptions(**options))


def rejected(bundle: Mapping[str, Any], *keys: PublicKey, **options: Any) -> tuple[int, str]:
    with pytest.raises(VerificationError) as caught:
        passed(bundle, *keys, **options)
    assert caught.value.remedy
    return caught.value.step, caught.value.code


# ---- what passes -----------------------------------------------------------------------


def test_a_logged_bundle_passes_every_step_and_its_checkpoint_is_to_be_kept(log: Log) -> None:
    bundle = log.bundle(40)
    result = passed(bundle, require_log=True, log_origin=ORIGIN)
    assert [name for _, name, _ in result.steps] == list(STEPS)
    assert not {10, 11, 12} & set(result.unchecked)
    assert result.checkpoint == bundle["log"]["checkpoint"]
    assert "leaf 11 of 40" in {number: detail for number, _, detail in result.steps}[10]


def test_the_tree_size_may_be_left_out_and_the_layout_changed(log: Log) -> None:
    bundle = log.bundle(40)
    del bundle["log"]["treeSize"]
    passed(json.loads(json.dumps(bundle, indent=4)), require_log=True)


@pytest.mark.parametrize(("index", "size"), [(0, 1), (0, 2), (1, 2), (6, 7), (31, 32), (32, 33)])
def test_any_place_in_any_tree(certificate: Certificate, index: int, size: int) -> None:
    passed(log_of(certificate, index, size).bundle(size), require_log=True)


def test_a_bundle_that_was_never_logged_says_so(certificate: Certificate) -> None:
    bundle = json.loads(certificate.bundle)
    result = passed(bundle)
    assert {10, 11, 12} <= set(result.unchecked)
    assert result.checkpoint is None
    assert rejected(bundle, require_log=True) == (10, "not_logged")


# ---- step 1: form ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"leafIndex": "11"},
        {"leafIndex": 11.5},
        {"leafIndex": 11.0},
        {"leaf_index": 11},
        {"leafIndex": -1},
        {"leafIndex": True},
        {"leafIndex": None},
        {"treeSize": None},
        {"treeSize": "40"},
        {"inclusionProof": "x"},
        {"inclusionProof": [1]},
        {"inclusionProof": ["A"]},
        {"inclusionProof": [encode_base64(bytes(31))]},
        {"inclusionProof": [encode_base64(bytes(32))[:-2] + "B="]},
        {"inclusionProof": [encode_base64(bytes(32))] * 200},
        {"checkpoint": 7},
        {"extra": 1},
    ],
)
def test_step_1_form_of_the_log_part(log: Log, change: dict[str, Any]) -> None:
    bundle = log.bundle(40)
    bundle["log"].update(change)
    assert rejected(bundle) == (1, "bad_log_part")


def test_step_1_a_log_part_that_is_none(log: Log) -> None:
    for part in (None, [], "x", {}):
        assert rejected({**log.bundle(40), "log": part}) == (1, "bad_log_part")


# ---- step 8: accountants and policy ------------------------------------------------------


def test_step_8_versions_and_policies(log: Log, certificate: Certificate) -> None:
    bundle = log.bundle(40)
    engines = certificate.statement["predicate"]["engines"]
    version = {engine["name"]: engine["version"] for engine in engines}["fourier"]
    digest = certificate.statement["predicate"]["policy"]["digest"]
    passed(bundle, accountants={"fourier": version, "pld": "0.5"}, policies=frozenset({digest}))
    passed(bundle, accountants={"fourier": version + ".0"})  # the same release
    above = version + ".1"
    assert rejected(bundle, accountants={"fourier": above}) == (8, "old_accountant")
    assert rejected(bundle, accountants={"fourier": "99"}) == (8, "old_accountant")
    assert rejected(bundle, accountants={"newest": "0"}) == (8, "old_accountant")
    other = frozenset({"sha256:" + "0" * 64})
    assert rejected(bundle, policies=other) == (8, "other_policy")
    passed(bundle, policies=other | {digest})


# ---- step 10: inclusion ------------------------------------------------------------------


def test_step_10_another_place(log: Log) -> None:
    for index in (0, 10, 12, 39, 40, 10**9):
        bundle = log.bundle(40)
        bundle["log"]["leafIndex"] = index
        assert rejected(bundle) == (10, "not_included")


def test_step_10_a_proof_that_was_changed(log: Log) -> None:
    proof = log.bundle(40)["log"]["inclusionProof"]
    for changed in (
        [],
        proof[:-1],
        proof[1:],
        [*proof, proof[0]],
        proof[::-1],
        [encode_base64(bytes(32)), *proof[1:]],
    ):
        bundle = log.bundle(40)
        bundle["log"]["inclusionProof"] = changed
        assert rejected(bundle) == (10, "not_included")


def test_step_10_another_certificates_place(log: Log, document: Any) -> None:
    """A proof is of one signed envelope: not of the same plan signed again."""
    result = certify(plan_from(document()), second_opinion=False)
    again = issue(result, KEY, requester="tests", issued_at=NOW - timedelta(seconds=1))
    key = PublicKey(
        key=KEY.public.key, not_before=NOW - timedelta(days=1), not_after=NOW + timedelta(days=1)
    )
    bundle = {**json.loads(again.bundle), "log": log.part(40)}
    assert rejected(bundle, key) == (10, "not_included")


def test_step_10_checkpoints_that_are_none_or_of_another_size(log: Log) -> None:
    for note in ("", "x", "a\n\nb", log.checkpoint(40).replace("\n40\n", "\n040\n")):
        bundle = log.bundle(40)
        bundle["log"]["checkpoint"] = note
        assert rejected(bundle) == (10, "bad_checkpoint")
    bundle = log.bundle(40)
    bundle["log"]["treeSize"] = 39
    assert rejected(bundle) == (10, "bad_tree_size")
    bundle = log.bundle(40)
    bundle["log"]["checkpoint"] = log.checkpoint(30)
    del bundle["log"]["treeSize"]
    assert rejected(bundle) == (10, "not_included")


def test_step_10_a_statement_without_what_an_entry_is_made_of(
    log: Log, certificate: Certificate
) -> None:
    envelope = read_envelope(json.loads(certificate.bundle)["envelope"])
    part = read_inclusion(log.bundle(40)["log"])
    assert check_inclusion(envelope, certificate.statement, part).size == 40
    for lacks in ("validity", "verdict", "certificate_id", "requester", "plan", "policy"):
        predicate = {k: v for k, v in certificate.statement["predicate"].items() if k != lacks}
        with pytest.raises(VerificationError) as caught:
            check_inclusion(envelope, {**certificate.statement, "predicate": predicate}, part)
        assert (caught.value.step, caught.value.code) == (10, "bad_leaf"), lacks


# ---- step 11: the checkpoint's signature ---------------------------------------------------


def test_step_11_a_stranger_signed_the_checkpoint(log: Log) -> None:
    stranger = SigningKey.generate("stranger")
    bundle = log.bundle(40, key=stranger, at=stranger.public.not_before)
    assert rejected(bundle) == (11, "unknown_checkpoint_key")
    result = passed(bundle, KEY.public, stranger.public)
    assert stranger.key_id[:16] in result.steps[10][2]


def test_step_11_a_root_that_nobody_signed(log: Log, certificate: Certificate) -> None:
    """The proof leads to a root of the forger's own tree, under the true signature line."""
    forged = log_of(certificate, 11, 40, salt=b"forged")
    note = log.checkpoint(40)
    bundle = forged.bundle(40)
    bundle["log"]["checkpoint"] = note.replace(
        encode_base64(log.root(40)), encode_base64(forged.root(40))
    )
    assert rejected(bundle) == (11, "bad_checkpoint_signature")


def test_step_11_the_wrong_origin(log: Log) -> None:
    bundle = log.bundle(40, origin="example.com/other")
    for origin in (ORIGIN, ""):
        assert rejected(bundle, log_origin=origin) == (11, "wrong_origin")
    note = bundle["log"]["checkpoint"]
    bundle["log"]["checkpoint"] = note.replace("example.com/other\n", f"{ORIGIN}\n", 1)
    assert rejected(bundle) == (11, "unknown_checkpoint_key")


def test_step_11_keys_that_do_not_count(log: Log) -> None:
    development = SigningKey.generate(development=True)
    bundle = log.bundle(40, key=development)
    assert rejected(bundle, KEY.public, development.public) == (11, "untrusted_checkpoint_key")
    other = SigningKey.generate("other")
    late = log.bundle(40, key=other, at=other.public.not_after + timedelta(seconds=1))
    outside = (11, "checkpoint_key_outside_window")
    assert rejected(late, KEY.public, other.public) == outside
    early = log.bundle(40, key=other, at=other.public.not_before - timedelta(seconds=1))
    assert rejected(early, KEY.public, other.public) == outside
    revoked = PublicKey(
        key=other.public.key,
        not_before=other.public.not_before,
        not_after=other.public.not_after,
        revoked_from=other.public.not_before,
    )
    result = rejected(log.bundle(40, key=other, at=other.public.not_before), KEY.public, revoked)
    assert result == (11, "checkpoint_key_revoked")


def test_step_11_a_checkpoint_without_a_time(log: Log) -> None:
    text = str(Checkpoint(origin=ORIGIN, size=40, root_hash=log.root(40)))
    bundle = log.bundle(40)
    bundle["log"]["checkpoint"] = str(sign_note(text, note_key(ORIGIN, KEY.public), KEY.sign))
    assert rejected(bundle) == (11, "undated_checkpoint")


# ---- step 12: consistency with what was seen -------------------------------------------------


def seen(log: Log, size: int) -> dict[str, SeenCheckpoint]:
    return {ORIGIN: SeenCheckpoint(log.checkpoint(size))}


def test_step_12_a_log_that_grew(log: Log) -> None:
    for size in (1, 12, 16, 32, 39):
        result = passed(log.bundle(40), seen=seen(log, size), consistency=log.consistency(size, 40))
        assert 12 not in result.unchecked
        assert result.checkpoint is not None
        assert read_checkpoint(result.checkpoint).size == 40
    same = passed(log.bundle(40), seen=seen(log, 40), require_log=True)
    assert 12 not in same.unchecked


def test_step_12_an_older_bundle_is_linked_backwards_and_not_kept(log: Log) -> None:
    result = passed(log.bundle(20), seen=seen(log, 40), consistency=log.consistency(20, 40))
    assert 12 not in result.unchecked
    assert result.checkpoint is None


def test_step_12_without_a_proof_nothing_is_claimed_or_kept(log: Log) -> None:
    wrong = log.consistency(20, 30)
    for proof in (None, wrong):
        result = passed(log.bundle(40), seen=seen(log, 20), consistency=proof)
        assert 12 in result.unchecked
        assert "first=20&second=40" in result.steps[11][2]
        assert result.checkpoint is None
        assert rejected(
            log.bundle(40), seen=seen(log, 20), consistency=proof, require_log=True
        ) == (12, "consistency_unproved")


def test_step_12_a_fork(log: Log, certificate: Certificate) -> None:
    """The last rows dropped and others appended, signed by the log's true key."""
    forked = log_of(certificate, 11, 40)
    tree, nodes = merkle_tree.Frontier(), {}
    for item in range(45):
        own = (
            forked.nodes[merkle_tree.Place(0, item)]
            if item < 30
            else merkle_tree.leaf_hash(b"rewritten %d" % item)
        )
        nodes.update(tree.append(own))
    forked = Log(nodes, 11, certificate)
    assert rejected(forked.bundle(40), seen=seen(log, 40)) == (12, "log_rewritten")
    for proof in (forked.consistency(40, 45), Consistency(first=40, second=45, hashes=())):
        result = rejected(forked.bundle(45), seen=seen(log, 40), consistency=proof)
        assert result == (12, "log_rewritten")
    # A log rolled back to before: what was seen cannot be linked to it either.
    back = rejected(forked.bundle(35), seen=seen(log, 40), consistency=forked.consistency(35, 40))
    assert back == (12, "log_rewritten")
    # Up to where they part, both are one log.
    passed(forked.bundle(30), seen=seen(log, 40), consistency=log.consistency(30, 40))


def test_step_12_what_was_seen_of_another_log_does_not_matter(log: Log) -> None:
    other = {"example.com/other": SeenCheckpoint(log.checkpoint(3, origin="example.com/other"))}
    result = passed(log.bundle(40), seen=other, require_log=True)
    assert 12 not in result.unchecked


def test_step_12_a_memory_that_cannot_be_read(log: Log) -> None:
    for note in ("", "x", log.checkpoint(7, origin="example.com/other")):
        assert rejected(log.bundle(40), seen={ORIGIN: SeenCheckpoint(note)}) == (
            12,
            "bad_seen_checkpoint",
        )


# ---- every byte -----------------------------------------------------------------------------


def test_no_changed_byte_of_the_log_part_passes(log: Log) -> None:
    raw = json.dumps(log.bundle(40), sort_keys=True).encode()
    begin = raw.index(b'"log"')
    for place in range(begin, len(raw)):
        changed = raw[:place] + bytes([raw[place] ^ (1 << (place % 7))]) + raw[place + 1 :]
        with pytest.raises(VerificationError):
            verify(changed, trusting(KEY.public), options=VerificationOptions(log_origin=ORIGIN))
