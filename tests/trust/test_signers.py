"""Private keys outside files: each signature is checked with the public key."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from affidavit.trust import KeyFailure, KeyStore, SigningKey, write_private
from affidavit.trust.signers import (
    KEY_VARIABLE,
    KEY_VARIABLES,
    MODULE_VARIABLE,
    PIN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    open_token,
    private_key_source,
)

KEY, OTHER = SigningKey.generate(), SigningKey.generate()
MESSAGES = (b"", b"message", bytes(range(256)) * 8192)
SOFTHSM = Path("/usr/lib/softhsm/libsofthsm2.so")


def pem(key: Any, encryption: Any = None) -> str:
    written = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())
    return written.decode()


# ---- the environment ---------------------------------------------------------------


def test_a_key_of_the_environment_signs_for_its_own_record_alone() -> None:
    halves = private_key_source({KEY_VARIABLE: pem(KEY.private)})
    assert halves is not None
    result = halves.find(KEY.public)
    assert result is not None
    assert all(KEY.public.accepts(result.sign(message), message) for message in MESSAGES)
    assert halves.find(OTHER.public) is None
    assert "PRIVATE" not in repr(halves)


def test_each_key_of_the_environment_signs_for_its_own_record() -> None:
    given = dict(zip(KEY_VARIABLES, map(pem, (KEY.private, OTHER.private)), strict=False))
    halves = private_key_source(given)
    assert halves is not None
    for key in (KEY, OTHER):
        signer = halves.find(key.public)
        assert signer is not None
        assert key.public.accepts(signer.sign(b"m"), b"m")
    assert halves.find(SigningKey.generate().public) is None
    with pytest.raises(KeyFailure, match=KEY_VARIABLES[1]):
        private_key_source({**given, KEY_VARIABLES[1]: "nonsense"})


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        pem(KEY.private) + pem(OTHER.private),
        pem(KEY.private, BestAvailableEncryption(b"x")),
        pem(generate_private_key(SECP256R1())),
        KEY.public.as_record()["public_key"],
        pem(KEY.private)[:60],
        "-----BEGIN PRIVATE KEY-----\n" + "A" * 5000,
    ],
    ids=[
        "no key",
        "two keys",
        "a password",
        "another curve",
        "a public key",
        "cut off",
        "too long",
    ],
)
def test_another_text_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(KeyFailure) as refused:
        private_key_source({KEY_VARIABLE: text})
    assert KEY_VARIABLE in str(refused.value)
    assert not any(line in str(refused.value) for line in text.splitlines() if len(line) > 20)


def test_one_place_keeps_the_key() -> None:
    assert private_key_source({}) is None
    with pytest.raises(KeyFailure, match="both set"):
        private_key_source({KEY_VARIABLE: pem(KEY.private), MODULE_VARIABLE: "/none.so"})


# ---- a token -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The settings of a SoftHSM2 token that holds both keys."""
    directory = tmp_path_factory.mktemp("token")
    (directory / "tokens").mkdir()
    configuration, pin = directory / "softhsm2.conf", directory / "pin"
    configuration.write_text(f"directories.tokendir = {directory / 'tokens'}\nlog.level = ERROR\n")
    pin.write_text("1234\n")
    pin.chmod(0o600)
    patch = pytest.MonkeyPatch()
    patch.setenv("SOFTHSM2_CONF", str(configuration))
    secrets = ["--pin", "1234", "--token", "signing"]
    created = ["--init-token", "--free", "--label", "signing", "--so-pin", "5678", "--pin", "1234"]
    subprocess.run(["softhsm2-util", *created], check=True, capture_output=True)
    for number, key in enumerate((KEY, OTHER)):
        write_private(directory / "key.pem", key.private)
        named = [
            "--import",
            str(directory / "key.pem"),
            "--label",
            f"k{number}",
            "--id",
            f"0{number}",
        ]
        subprocess.run(["softhsm2-util", *named, *secrets], check=True, capture_output=True)
    yield {
        MODULE_VARIABLE: str(SOFTHSM),
        TOKEN_VARIABLE: "signing",
        PIN_FILE_VARIABLE: str(pin),
    }
    patch.undo()


def test_a_token_signs_with_the_key_of_each_record(token: dict[str, str]) -> None:
    halves = private_key_source(token)
    assert halves is not None
    for key in (KEY, OTHER):
        result = halves.find(key.public)
        assert result is not None
        assert all(key.public.accepts(result.sign(message), message) for message in MESSAGES)
    assert halves.find(SigningKey.generate().public) is None
    assert "1234" not in repr(result)


# The package warns when it lets go of what belonged to the lost session.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_session_that_was_lost_is_opened_again(token: dict[str, str]) -> None:
    halves: Any = private_key_source(token)
    result = halves.find(KEY.public)
    halves._session.close()
    assert KEY.public.accepts(result.sign(b"again"), b"again")


def test_a_token_that_cannot_be_used_is_said(token: dict[str, str], tmp_path: Path) -> None:
    pin = tmp_path / "pin"
    pin.write_text("1234")
    pin.chmod(0o644)
    for changes, stated in (
        ({TOKEN_VARIABLE: "none"}, "NoSuchToken"),
        ({MODULE_VARIABLE: "/none.so"}, "PKCS11Error"),
        ({TOKEN_VARIABLE: ""}, TOKEN_VARIABLE),
        ({PIN_FILE_VARIABLE: str(pin)}, "chmod 600"),
        ({PIN_FILE_VARIABLE: "/none"}, "cannot be read"),
    ):
        with pytest.raises(KeyFailure, match=stated):
            _seek({**token, **changes})


def _seek(settings: dict[str, str]) -> None:
    open_token(settings).find(KEY.public)


def test_without_its_package_a_token_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pkcs11", None)
    provided = dict.fromkeys((MODULE_VARIABLE, TOKEN_VARIABLE, PIN_FILE_VARIABLE), "x")
    with pytest.raises(KeyFailure, match=r"affidavit\[pkcs11\]"):
        private_key_source(provided)


# ---- the key directory with them ---------------------------------------------------


def test_the_directory_says_when_and_the_other_place_signs(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.save(KEY.public)
    assert store.signing_key() is None
    result = store.signing_key(private_key_source({KEY_VARIABLE: pem(KEY.private)}))
    assert result is not None
    assert result.public == KEY.public
