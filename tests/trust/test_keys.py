"""Keys are stored atomically and privately, and sign inside their windows."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from affidavit.trust import (
    KeyFailure,
    KeyStore,
    PublicKey,
    SigningKey,
    development_key,
    home,
    read_public_keys,
    read_root_key,
)
from affidavit.trust.key import WINDOW


def test_a_new_key_is_private_and_found_again(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys")
    assert store.signing_key() is None
    key = store.new("first")
    private = tmp_path / "keys" / f"{key.key_id}.pem"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(private.parent.stat().st_mode) == 0o700
    result = store.signing_key()
    assert result is not None
    assert result.key_id == key.key_id
    assert key.public.accepts(result.sign(b"message"), b"message")
    assert not key.public.accepts(result.sign(b"message"), b"another")


def test_the_newest_key_inside_its_window_signs(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    old, new = store.new("old"), store.new("new")
    record = tmp_path / f"{old.key_id}.json"
    record.write_text(json.dumps({**old.public.as_record(), "not_before": "2020-01-01T00:00:00Z"}))
    result = store.signing_key()
    assert result is not None
    assert result.key_id == new.key_id
    expired = {**new.public.as_record(), "not_before": "2020-01-01T00:00:00Z"}
    expired["not_after"] = "2020-02-01T00:00:00Z"
    (tmp_path / f"{new.key_id}.json").write_text(json.dumps(expired))
    result = store.signing_key()
    assert result is not None
    assert result.key_id == old.key_id


def test_a_private_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    key = KeyStore(tmp_path).new()
    (tmp_path / f"{key.key_id}.pem").chmod(0o644)
    with pytest.raises(KeyFailure, match="chmod 600"):
        KeyStore(tmp_path).signing_key()


def test_a_private_key_of_another_pair_is_not_used(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    key, other = store.new(), KeyStore(tmp_path / "other").new()
    mine = tmp_path / f"{key.key_id}.pem"
    mine.write_bytes((tmp_path / "other" / f"{other.key_id}.pem").read_bytes())
    with pytest.raises(KeyFailure, match="does not belong"):
        store.signing_key()


def test_records_survive_the_trip(tmp_path: Path) -> None:
    key = SigningKey.generate("label")
    assert PublicKey.from_record(key.public.as_record()) == key.public
    file = tmp_path / "keys.json"
    for document in (
        {"keys": [key.public.as_record()]},
        [key.public.as_record()],
        key.public.as_record(),
    ):
        file.write_text(json.dumps(document))
        assert read_public_keys(file) == (key.public,)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"keys": 3}', "nonsense", '{"key_id": "a"}', "[" * 100_000]
)
def test_files_that_hold_no_keys_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(KeyFailure):
        read_public_keys(file)


def test_a_record_may_not_name_another_key() -> None:
    record = {**SigningKey.generate().public.as_record(), "key_id": "0" * 64}
    with pytest.raises(KeyFailure, match="key id"):
        PublicKey.from_record(record)


def test_a_window_has_ends() -> None:
    key = SigningKey.generate().public
    assert key.covers(datetime.now(UTC))
    assert not key.covers(datetime.now(UTC) - timedelta(days=1))
    assert not key.covers(datetime.now(UTC) + timedelta(days=731))


def test_a_key_from_elsewhere_is_kept_with_its_label_from_now_on(tmp_path: Path) -> None:
    public = SigningKey.generate().public.key
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    begin = datetime.now(UTC).replace(microsecond=0)
    created = KeyStore(tmp_path).add(pem, "the vault's")
    assert KeyStore(tmp_path).public_keys() == (created,)
    assert (created.key, created.label) == (public, "the vault's")
    assert begin <= created.not_before <= datetime.now(UTC)
    assert created.not_after - created.not_before == WINDOW
    with pytest.raises(KeyFailure, match="already exists"):
        KeyStore(tmp_path).add(pem)


def test_the_key_for_trying_things_out_says_that_it_is_one() -> None:
    key, other = development_key(), development_key()
    record = key.public.as_record()
    assert (record["label"], record["development"]) == ("development", True)
    assert key.key_id != other.key_id
    assert SigningKey.generate("development").public.as_record()["development"] is False


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("AFFIDAVIT_HOME")
    assert home() == Path.home() / ".affidavit"


def test_a_root_key_without_a_record_is_valid_from_now_on(tmp_path: Path) -> None:
    path = tmp_path / "root.pem"
    created = SigningKey.generate("root")
    path.write_bytes(
        created.private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    path.chmod(0o600)
    before = datetime.now(UTC).replace(microsecond=0)
    read = read_root_key(path)
    assert read.key_id == created.key_id
    assert before <= read.public.not_before <= datetime.now(UTC) < read.public.not_after
