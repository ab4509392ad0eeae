"""Private keys outside the key directory: an environment variable or a PKCS#11 token.

At most one is configured; by default keys are files (``affidavit.trust.key_store``).

==============================  ====================================================
``AFFIDAVIT_SIGNING_KEY``       the private key itself, PKCS#8 PEM; further keys can be in
                                ``AFFIDAVIT_SIGNING_KEY_CHECKPOINT`` and ``..._STATUS``
``AFFIDAVIT_PKCS11_MODULE``     the path of a PKCS#11 library, with
``AFFIDAVIT_PKCS11_TOKEN``      the label of the token and
``AFFIDAVIT_PKCS11_PIN_FILE``   a file with its PIN, readable by its owner alone
==============================  ====================================================

*Environment variables*: each has one unencrypted PKCS#8 PEM block and nothing else. What a key may
sign is in its public record; each role's private half can come from a secret of its own.

*PKCS#11 token* (an HSM): signs and never reveals the key. The token's object for a public key is
found by signing a probe with each of its Ed25519 keys, because ids and labels are the owner's
choice. The session stays open and is reopened once if lost. Needs ``affidavit[pkcs11]``.
Reference: PKCS #11 v3.1, 6.3 (CKM_EDDSA).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from affidavit.trust.home_directory import home
from affidavit.trust.key import (
    KeyFailure,
    KeyRole,
    PrivateKeySource,
    PublicKey,
    SigningKey,
    SigningPort,
)
from affidavit.trust.key_store import (
    KeyStore,
    require_private,
)


def own_signing_key(role: KeyRole = KeyRole.CERTIFICATE) -> SigningPort | None:
    """Return the newest key of this machine with ``role``, or None; raises ``KeyFailure``."""
    return KeyStore(home() / "keys").signing_key(private_key_source(os.environ), role=role)


def private_key_source(environ: Mapping[str, str]) -> PrivateKeySource | None:
    """Return the source that ``environ`` configures, or None for the key directory.

    Raises ``KeyFailure`` if two are configured, or if the one cannot be used.
    """
    stated = [name for name in KEY_VARIABLES if environ.get(name)]
    has_token = bool(environ.get(MODULE_VARIABLE))
    if stated and has_token:
        raise KeyFailure(f"{stated[0]} and {MODULE_VARIABLE} are both set; give only one.")
    if stated:
        return EnvironmentKeys(tuple(EnvironmentKey.of(environ[name], name) for name in stated))
    return open_token(environ) if has_token else None


@dataclass(frozen=True, slots=True)
class RemoteKey:
    """A key whose private key signs elsewhere, through ``sign_with``."""

    public: PublicKey
    sign_with: Callable[[PublicKey, bytes], bytes] = field(repr=False)

    @property
    def key_id(self) -> str:
        """The id of the public key."""
        return self.public.key_id

    def sign(self, message: bytes) -> bytes:
        """Return the signature of ``message``; raises ``KeyFailure``."""
        return self.sign_with(self.public, message)


KEY_VARIABLE = "AFFIDAVIT_SIGNING_KEY"
KEY_VARIABLES = (
    KEY_VARIABLE,
    "AFFIDAVIT_SIGNING_KEY_CHECKPOINT",
    "AFFIDAVIT_SIGNING_KEY_STATUS",
)
MAX_PEM_CHARACTERS = 4096
_KEY_REMEDY = "give one unencrypted PKCS#8 PEM block of an Ed25519 private key"


@dataclass(frozen=True, slots=True)
class EnvironmentKey:
    """A private key in the environment."""

    private: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def of(cls, text: str, variable: str = KEY_VARIABLE) -> EnvironmentKey:
        """Parse the PEM text in ``variable``; raises ``KeyFailure``, which does not repeat it."""
        pem = text.strip()
        if len(pem) > MAX_PEM_CHARACTERS or pem.count("-----BEGIN") != 1:
            raise KeyFailure(f"{variable} is not one PEM block; {_KEY_REMEDY}.")
        if not pem.startswith("-----BEGIN PRIVATE KEY-----"):
            raise KeyFailure(f"{variable} does not begin with a private key; {_KEY_REMEDY}.")
        try:
            private = load_pem_private_key(pem.encode(), password=None)
        except (ValueError, TypeError):
            raise KeyFailure(
                f"{variable} cannot be read as a private key; {_KEY_REMEDY}."
            ) from None
        if not isinstance(private, Ed25519PrivateKey):
            raise KeyFailure(f"{variable} contains a key that is not Ed25519; {_KEY_REMEDY}.")
        return cls(private)

    def find(self, public: PublicKey) -> SigningPort | None:
        """Return a signer for ``public`` if it belongs to this private key, or None."""
        if self.private.public_key() != public.key:
            return None
        return SigningKey(private=self.private, public=public)


@dataclass(frozen=True, slots=True)
class EnvironmentKeys:
    """The private keys in the environment."""

    keys: tuple[EnvironmentKey, ...]

    def find(self, public: PublicKey) -> SigningPort | None:
        """Return a signer for ``public`` if one of these private keys belongs to it, or None."""
        return next(filter(None, (key.find(public) for key in self.keys)), None)


MODULE_VARIABLE, TOKEN_VARIABLE = "AFFIDAVIT_PKCS11_MODULE", "AFFIDAVIT_PKCS11_TOKEN"
PIN_FILE_VARIABLE = "AFFIDAVIT_PKCS11_PIN_FILE"
MAX_PIN_BYTES = 1024
PROBE = b"affidavit: which of the token's keys is this?"


class PKCS11Token:
    """A token with its session; thread-safe."""

    def __init__(self, module: str, label: str, pin: str) -> None:
        self._module, self._label, self._pin = module, label, pin
        self._lock = Lock()
        self._session: Any = None

    def find(self, public: PublicKey) -> SigningPort | None:
        """Return a signer for ``public`` if the token has its key; raises ``KeyFailure``."""
        with self._lock:
            result = self._with_retry(lambda: self._object(public))
        return None if result is None else RemoteKey(public, self.sign)

    def sign(self, public: PublicKey, message: bytes) -> bytes:
        """Return the token's signature of ``message``; raises ``KeyFailure``."""
        with self._lock:
            return bytes(self._with_retry(lambda: self._sign(self._object(public), message)))

    def _with_retry(self, work: Any) -> Any:
        from pkcs11.exceptions import PKCS11Error  # an extra

        try:
            if self._session is not None:
                return work()
        except PKCS11Error:
            self._close()
        try:
            self._open()
            return work()
        except PKCS11Error as error:
            self._close()
            raise KeyFailure(
                f"the PKCS#11 token {self._label!r} cannot be used: {type(error).__name__}; "
                f"see {MODULE_VARIABLE}, {TOKEN_VARIABLE} and {PIN_FILE_VARIABLE}."
            ) from None

    def _open(self) -> None:
        import pkcs11
        from pkcs11.exceptions import UserAlreadyLoggedIn

        token = pkcs11.lib(self._module).get_token(token_label=self._label)
        try:
            self._session = token.open(user_pin=self._pin)
        except UserAlreadyLoggedIn:  # a login counts for all sessions of a process
            self._session = token.open()

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):  # the session may be lost already
                session.close()

    def _object(self, public: PublicKey) -> Any:
        from pkcs11 import Attribute, KeyType, ObjectClass

        requested = {
            Attribute.CLASS: ObjectClass.PRIVATE_KEY,
            Attribute.KEY_TYPE: KeyType.EC_EDWARDS,
        }
        # A list, because the session cannot sign during a search.
        for item in list(self._session.get_objects(requested)):
            if public.accepts(self._sign(item, PROBE), PROBE):
                return item
        return None

    def _sign(self, key: Any, message: bytes) -> bytes:
        from pkcs11 import Mechanism

        if key is None:
            raise KeyFailure(f"the key is no longer in the PKCS#11 token {self._label!r}.")
        return bytes(key.sign(message, mechanism=Mechanism.EDDSA))


def open_token(environment: Mapping[str, str]) -> PKCS11Token:
    """Open the configured token; raises ``KeyFailure``."""
    missing = [
        name
        for name in (MODULE_VARIABLE, TOKEN_VARIABLE, PIN_FILE_VARIABLE)
        if not environment.get(name)
    ]
    if missing:
        raise KeyFailure(f"a PKCS#11 token needs {' and '.join(missing)} too.")
    try:
        import pkcs11  # noqa: F401
    except ModuleNotFoundError:
        raise KeyFailure(
            "PKCS#11 needs its package; run: pip install 'affidavit[pkcs11]'"
        ) from None
    pin = Path(environment[PIN_FILE_VARIABLE])
    try:
        require_private(pin)
        text = os.fsdecode(pin.read_bytes()[:MAX_PIN_BYTES]).rstrip("\r\n")
    except OSError as error:
        raise KeyFailure(f"{pin} cannot be read: {error.strerror}.") from None
    return PKCS11Token(environment[MODULE_VARIABLE], environment[TOKEN_VARIABLE], text)
