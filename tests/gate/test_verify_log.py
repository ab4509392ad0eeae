"""``verify`` of logged bundles: what it remembers, and the log that was rewritten since."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from affidavit.certificate import BadStore, CheckpointStore
from affidavit.trust import (
    KeyRole,
    Revocation,
    Roots,
    draft_keyset,
    format_instant,
)
from affidavit.trust.log import (
    merkle_tree,
    read_checkpoint,
    sign_checkpoint,
)
from tests.support.logged_certificate import (
    KEY,
    NOW,
    ORIGIN,
    Log,
    certified,
    key_for,
    log_of,
)

Answer = Callable[..., tuple[int, dict[str, Any]]]
CERTIFY, LOG = (KeyRole.CERTIFICATE,), (KeyRole.CHECKPOINT,)


@pytest.fixture(scope="module")
def log(document: Any) -> Log:
    return log_of(certified(document(), KEY), index=11, size=40)


@pytest.fixture
def fork(log: Log) -> Log:
    """The same log with another entry 30 and what follows, signed by the same key."""
    tree, nodes = merkle_tree.Frontier(), {}
    for item in range(45):
        own = (
            log.nodes[merkle_tree.Place(0, item)]
            if item < 30
            else merkle_tree.leaf_hash(b"other %d" % item)
        )
        nodes.update(tree.append(own))
    return Log(nodes, 11, log.certificate)


@pytest.fixture
def check(save: Any, answer: Answer) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Verify a bundle with the log's key trusted."""
    keys = save({"keys": [KEY.public.as_record()]}, "keys.json")

    def run(bundle: Any, *options: str) -> tuple[int, dict[str, Any]]:
        path = save(bundle, "bundle.json")
        return answer("verify", path, "--keys", keys, "--json", *options)

    return run


def details(result: dict[str, Any]) -> dict[int, str]:
    return {item["step"]: item["detail"] for item in result["steps"]}


def test_the_last_checkpoint_is_remembered_and_a_fork_is_caught(
    log: Log, fork: Log, check: Any, home: Path
) -> None:
    code, result = check(log.bundle(40), "--require-log", "--log-origin", ORIGIN)
    assert code == 0
    assert all(item["checked"] for item in result["steps"] if item["step"] in (10, 11, 12))
    stored = json.loads((home / "checkpoints.json").read_text())["checkpoints"]
    assert read_checkpoint(stored[ORIGIN]["note"]).size == 40
    # Before the memory, nothing is wrong with the fork; with it, everything.
    code, result = check(fork.bundle(40))
    assert (code, result["step"], result["code"]) == (1, 12, "log_rewritten")
    assert json.loads((home / "checkpoints.json").read_text())["checkpoints"] == stored


def test_a_log_that_grew_needs_its_proof(log: Log, fork: Log, check: Any, save: Any) -> None:
    assert check(log.bundle(20))[0] == 0
    code, result = check(log.bundle(40))
    assert (code, result["steps"][11]["checked"]) == (0, False)
    assert "first=20&second=40" in details(result)[12]
    code, result = check(log.bundle(40), "--require-log")
    assert (code, result["code"]) == (1, "consistency_unproved")
    proof = save(log.consistency(20, 40).as_document(), "proof.json")
    code, result = check(log.bundle(40), "--require-log", "--consistency", proof)
    assert (code, "continues" in details(result)[12]) == (0, True)
    # And back: an older bundle is linked by the same proof, and is not what is remembered.
    code, result = check(log.bundle(20), "--require-log", "--consistency", proof)
    assert (code, "is continued by" in details(result)[12]) == (0, True)
    assert check(log.bundle(40), "--require-log")[0] == 0
    forged = save(fork.consistency(40, 45).as_document(), "forged.json")
    code, result = check(fork.bundle(45), "--consistency", forged)
    assert (code, result["code"]) == (1, "log_rewritten")


def test_a_forged_checkpoint_is_forgotten_once_its_key_is_revoked(
    document: Any, save: Any, answer: Answer, home: Path
) -> None:
    """A thief of the log's key showed one victim a larger log of their own."""
    root, signer, stolen, next_key = (key_for(*roles) for roles in ((), CERTIFY, LOG, LOG))
    roots = Roots.of([root.public], threshold=1)
    anchor = save(roots.model_dump_json(), "roots.json")
    keys, version = [signer.public, stolen.public], None
    since = format_instant(NOW - timedelta(minutes=1))

    def verified(bundle: Any, revoked: Sequence[Revocation] = ()) -> str:
        nonlocal version
        draft = draft_keyset(
            version,
            roots=roots,
            keys=keys,
            revoked=revoked,
            issued_at=NOW,
            expires_at=NOW + timedelta(days=1),
        )
        version = draft.signed_by(root)
        keyset = save(version.as_bytes(), "keyset.json")
        told = ("--keyset", keyset, "--root", anchor, "--require-log", "--json")
        return str(answer("verify", save(bundle), *told)[1].get("code", "verified"))

    certificate = certified(document(), signer)
    genuine, forged = log_of(certificate, 11, 40), log_of(certificate, 0, 300, b"forged")
    before = NOW - timedelta(minutes=2)
    assert verified(forged.bundle(300, key=stolen, at=before)) == "verified"
    assert verified(genuine.bundle(40, key=stolen, at=before)) == "consistency_unproved"
    keys.append(next_key.public)
    revocation = Revocation(key_id=stolen.key_id, since=since)
    assert verified(genuine.bundle(40, key=next_key), [revocation]) == "verified"
    (seen,) = CheckpointStore(home / "checkpoints.json").newest().values()
    assert read_checkpoint(seen.note).size == 40
    assert verified(forged.bundle(300, key=stolen, at=before), [revocation]) == (
        "checkpoint_key_revoked"
    )


def test_a_store_of_ones_own(log: Log, fork: Log, check: Any, tmp_path: Path, home: Path) -> None:
    store = str(tmp_path / "store" / "seen.json")
    assert check(log.bundle(40), "--checkpoint-store", store)[0] == 0
    assert not (home / "checkpoints.json").exists()
    assert check(fork.bundle(40))[0] == 0
    assert check(fork.bundle(40), "--checkpoint-store", store)[0] == 1


def test_what_the_verifier_asks(log: Log, check: Any, document: Any) -> None:
    assert check(log.bundle(40), "--log-origin", "example.com/x")[1]["code"] == "wrong_origin"
    assert check(log.bundle(40), "--accountant", "fourier=99")[1]["code"] == "old_accountant"
    assert check(log.bundle(40), "--accountant", "fourier=0.0.1")[0] == 0
    policy = "sha256:" + "0" * 64
    assert check(log.bundle(40), "--policy", policy)[1]["code"] == "other_policy"
    offline = json.loads(certified(document(), KEY).bundle)
    code, result = check(offline, "--require-log")
    assert (code, result["step"], result["code"]) == (1, 10, "not_logged")


def test_people_are_told_what_was_not_checked(log: Log, save: Any, run: Any) -> None:
    keys = save({"keys": [KEY.public.as_record()]}, "keys.json")
    told = run("verify", save(log.bundle(40)), "--keys", keys).stdout
    assert "✓ 10. inclusion: leaf 11 of 40" in told
    assert "✓ 12. consistency: the first checkpoint of example.com/log seen here" in told
    offline = save(json.loads(log.certificate.bundle), "offline.json")
    assert "– 10. inclusion: not logged" in run("verify", offline, "--keys", keys).stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--accountant", "fourier"),
        ("--accountant", "fourier=new"),
        ("--accountant", "unknown=1"),
        ("--policy", "sha256:12"),
        ("--consistency", "missing.json"),
        ("--checkpoint-store", "bad"),
    ],
)
def test_mistakes_of_use(
    log: Log, save: Any, run: Any, options: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text('{"version": 7}')
    option, value = options
    value = str(tmp_path / "bad.json") if value == "bad" else value
    result = run("verify", save(log.bundle(40)), option, value)
    assert result.exit_code == 2
    assert result.stdout == ""
    for bad in ("[]", '{"first": 1}', "no", '{"first": 1, "second": 2, "hashes": ["x"]}'):
        path = save(bad, "consistency.json")
        assert run("verify", save(log.bundle(40)), "--consistency", path).exit_code == 2


def test_a_memory_that_was_tampered_with_is_not_taken_for_an_empty_one(
    log: Log, check: Any, save: Any, run: Any, home: Path
) -> None:
    check(log.bundle(40))
    path = home / "checkpoints.json"
    whole = json.loads(path.read_text())
    for bad in (
        "",
        "[]",
        '{"version": 2, "checkpoints": {}}',
        json.dumps({**whole, "checkpoints": {"example.com/x": whole["checkpoints"][ORIGIN]}}),
        json.dumps({**whole, "checkpoints": {ORIGIN: "x"}}),
        json.dumps({**whole, "checkpoints": {ORIGIN: 7}}),
    ):
        path.write_text(bad)
        result = run("verify", save(log.bundle(40)))
        assert result.exit_code == 2
        assert "restore it" in result.stderr.replace("\n", " ")


def test_a_memory_that_cannot_be_written_is_said_and_does_not_hide_the_verdict(
    log: Log,
    save: Any,
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(_self: Any, _note: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "_save", full)
    keys = save({"keys": [KEY.public.as_record()]}, "keys.json")
    result = run("verify", save(log.bundle(40)), "--keys", keys)
    assert result.exit_code == 0
    assert "No space left on device" in caplog.text


def test_many_at_once_lose_nothing_and_keep_the_largest(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"

    def keep(number: int) -> None:
        size, origin = number // 4 + 1, f"example.com/{number % 4}"
        note = sign_checkpoint(KEY, origin=origin, size=size, root_hash=bytes(32), at=NOW)
        CheckpointStore(path).update(note, {})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(keep, reversed(range(64))))
    newest = CheckpointStore(path).newest()
    assert {origin: read_checkpoint(seen.note).size for origin, seen in newest.items()} == {
        f"example.com/{number}": 16 for number in range(4)
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    for damaged in ("{", "[" * 100_000):
        path.write_text(damaged)
        with pytest.raises(BadStore):
            CheckpointStore(path).newest()
    with pytest.raises(BadStore):
        CheckpointStore(Path("/dev/zero")).newest()
