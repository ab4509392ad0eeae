"""``affidavit sign-model`` and ``verify-model`` from the command line, with keys of a keyset."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from affidavit.evidence import (
    KEYSET_FILE,
    STATEMENT_FILE,
    losses_as_bytes,
    read_canaries,
)
from affidavit.trust import KeyStore
from tests.evidence.model.conftest import WEIGHTS, run_of

Folder = tuple[Path, list[str]]


@pytest.fixture
def sign(home: Path, run: Any, tmp_path: Path) -> Callable[..., Any]:
    """Sign the model of a run with this home's key, which a root vouches for in a keyset."""
    key = KeyStore(home / "keys").new("signer")
    done = run_of(key)
    done.signed(tmp_path / "model")
    (tmp_path / "bundle.json").write_bytes(done.evidence.bundle)
    (tmp_path / "record.jsonl").write_bytes(done.evidence.record)
    keyset, roots = str(tmp_path / "keyset.json"), str(tmp_path / "roots.json")
    run("roots", "new", "--out", str(tmp_path / "root"))
    (secret,) = (tmp_path / "root").glob("*.pem")
    record = str(secret.with_suffix(".json"))
    run("roots", "trust", record, "--threshold", "1", "--out", roots)
    run("keyset", "new", "--root", record, "--threshold", "1", "--out", keyset)
    run("keyset", "sign", keyset, "--key", str(secret))

    def signed(*options: str) -> Any:
        evidence = ["--certificate", str(tmp_path / "bundle.json")]
        evidence += ["--record", str(tmp_path / "record.jsonl")]
        model = str(tmp_path / "model")
        return run("sign-model", model, *evidence, "--keyset", keyset, "--root", roots, *options)

    return signed


@pytest.fixture
def verify(run: Any, tmp_path: Path) -> Callable[..., Any]:
    """Verify it as somebody who has nothing but the folder and the roots."""

    def verified(*options: str) -> Any:
        roots = str(tmp_path / "roots.json")
        return run("verify-model", str(tmp_path / "model"), "--root", roots, *options)

    return verified


def test_a_signed_model_verifies_with_the_roots_alone(
    sign: Any, verify: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sign().exit_code == 0
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "nobody"))
    result = verify("--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["verified"], document["findings"]) == (0, True, [])
    assert document["claim"]["guarantee"]["epsilon"]["upper"] in verify().stdout


@pytest.mark.parametrize("name", [WEIGHTS, KEYSET_FILE, STATEMENT_FILE, "README.md"])
def test_an_altered_file_is_named(sign: Any, verify: Any, tmp_path: Path, name: str) -> None:
    assert sign().exit_code == 0
    path = tmp_path / "model" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    result = verify("--json")
    assert result.exit_code == 1
    assert name in {finding["file"] for finding in json.loads(result.stdout)["findings"]}
    assert f"✗ {name}: " in verify().stdout


def test_an_ecdsa_key_signs_the_manifest_and_any_other_is_refused(
    sign: Any, verify: Any, tmp_path: Path
) -> None:
    key = tmp_path / "ec.pem"
    for curve, code in (("secp256k1", 2), ("prime256v1", 0)):
        command = ["openssl", "ecparam", "-name", curve, "-genkey", "-noout", "-out", str(key)]
        subprocess.run(command, check=True)
        key.chmod(0o600)
        assert sign("--openssf-key", str(key)).exit_code == code
    assert (tmp_path / "model" / "model.sig").exists()
    assert verify().exit_code == 0
    key.chmod(0o644)
    assert sign("--openssf-key", str(key)).exit_code == 2


def test_what_cannot_be_read_is_a_usage_error(sign: Any, run: Any, tmp_path: Path) -> None:
    assert sign().exit_code == 0
    assert run("verify-model", str(tmp_path / "none")).exit_code == 2
    assert run("verify-model", str(tmp_path / "model"), "--root", "/none").exit_code == 2
    missing = ["--certificate", "/none", "--record", "/none"]
    assert run("sign-model", str(tmp_path / "model"), *missing).exit_code == 2


def test_a_folder_without_a_claim_is_not_verified(run: Any, home: Path, tmp_path: Path) -> None:
    KeyStore(home / "keys").new()
    (tmp_path / "plain").mkdir()
    result = run("verify-model", str(tmp_path / "plain"), "--json")
    assert result.exit_code == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert (finding["file"], finding["code"]) == (STATEMENT_FILE, "no_claim")


def test_canaries_are_drawn_and_their_losses_compared_with_the_certificate(
    sign: Any, run: Any, answer: Any, tmp_path: Path
) -> None:
    assert sign().exit_code == 0
    canaries, losses = tmp_path / "canaries.json", tmp_path / "losses.json"
    new = run("audit-model", "new", "--count", "600", "--out", str(canaries))
    drawn = read_canaries(canaries.read_bytes())
    assert new.exit_code == 0
    assert drawn.commitment in new.stdout
    assert canaries.stat().st_mode & 0o777 == 0o600
    check = ["audit-model", "check", "--canaries", str(canaries), "--losses", str(losses)]
    check += ["--certificate", str(tmp_path / "bundle.json")]
    for known, code in ((0, 0), (600, 1)):
        taken = enumerate(drawn.included)
        values = [float(not item) if index < known else 0.5 for index, item in taken]
        losses.write_bytes(losses_as_bytes(values))
        exit_code, document = answer(*check, "--json")
        assert (exit_code, document["falsified"]) == (code, code == 1)
    losses.write_text("{}")
    assert run(*check).exit_code == 2
    assert run("audit-model", "new", "--count", "1", "--out", str(canaries)).exit_code == 2


def test_exports_are_written_and_signed_and_another_form_is_refused(
    sign: Any, verify: Any, tmp_path: Path
) -> None:
    assert sign("--export", "spdx").exit_code == 2
    assert sign("--export", "cyclonedx", "--export", "model-card").exit_code == 0
    assert (tmp_path / "model" / "affidavit" / "model.cdx.json").is_file()
    assert "## Differential privacy" in (tmp_path / "model" / "README.md").read_text()
    assert verify().exit_code == 0


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_keyset_in_the_folder_is_a_file_of_the_folder(
    verify: Any, sign: Any, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """A pipe would be waited for, and a link would have another file told."""
    assert sign().exit_code == 0
    path = tmp_path / "model" / KEYSET_FILE
    path.unlink()
    make(path)
    result = verify()
    assert result.exit_code == 2
    assert "keyset.json cannot be read" in result.stderr
