"""A private half in a PKCS#11 token (an HSM), which signs and never gives it away.

Which object of the token belongs to a public key is found by asking each Ed25519 key of
it to sign a probe: ids and labels are whatever the token's owner chose. The session is
kept open, and opened anew once when it was lost.

Needs the extra ``affidavit[pkcs11]``. Reference: PKCS #11 v3.1, 6.3 (CKM_EDDSA).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from affidavit.certificate.keys import KeyFailure, PublicKey, SigningPort, require_private

MODULE, TOKEN = "AFFIDAVIT_PKCS11_MODULE", "AFFIDAVIT_PKCS11_TOKEN"
PIN_FILE = "AFFIDAVIT_PKCS11_PIN_FILE"
MOST_PIN_BYTES = 1024
PROBE = b"affidavit: which of the token's keys is this?"


class Token:
    """A token with its session; safe to call from several threads."""

    def __init__(self, module: str, label: str, pin: str) -> None:
        self._module, self._label, self._pin = module, label, pin
        self._lock = Lock()
        self._session: Any = None

    def find(self, public: PublicKey) -> SigningPort | None:
        """A signer for ``public`` if the token has its private half; or ``KeyFailure``."""
        with self._lock:
            found = self._retried(lambda: self._object(public))
        return None if found is None else TokenKey(self, public)

    def sign(self, public: PublicKey, message: bytes) -> bytes:
        """The token's signature of ``message``; raises ``KeyFailure``."""
        with self._lock:
            return bytes(self._retried(lambda: self._sign(self._object(public), message)))

    def _retried(self, work: Any) -> Any:
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
                f"see {MODULE}, {TOKEN} and {PIN_FILE}."
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
            try:
                session.close()
            except Exception:  # it is lost already
                return

    def _object(self, public: PublicKey) -> Any:
        from pkcs11 import Attribute, KeyType, ObjectClass

        wanted = {
            Attribute.CLASS: ObjectClass.PRIVATE_KEY,
            Attribute.KEY_TYPE: KeyType.EC_EDWARDS,
        }
        # All of them first: a search that goes on forbids the session to sign.
        for item in list(self._session.get_objects(wanted)):
            if public.accepts(self._sign(item, PROBE), PROBE):
                return item
        return None

    def _sign(self, key: Any, message: bytes) -> bytes:
        from pkcs11 import Mechanism

        if key is None:
            raise KeyFailure(f"the key is no longer in the PKCS#11 token {self._label!r}.")
        return bytes(key.sign(message, mechanism=Mechanism.EDDSA))


@dataclass(frozen=True, slots=True)
class TokenKey:
    """One key of a token."""

    token: Token = field(repr=False)
    public: PublicKey

    @property
    def key_id(self) -> str:
        """The public half's key id."""
        return self.public.key_id

    def sign(self, message: bytes) -> bytes:
        """The token's signature; raises ``KeyFailure``."""
        return self.token.sign(self.public, message)


def open_token(environment: dict[str, str]) -> Token:
    """The token that the settings name; raises ``KeyFailure``."""
    missing = [name for name in (MODULE, TOKEN, PIN_FILE) if not environment.get(name)]
    if missing:
        raise KeyFailure(f"a PKCS#11 token needs {' and '.join(missing)} too.")
    try:
        import pkcs11  # noqa: F401
    except ModuleNotFoundError:
        raise KeyFailure(
            "PKCS#11 needs its package; run: pip install 'affidavit[pkcs11]'"
        ) from None
    pin = Path(environment[PIN_FILE])
    try:
        require_private(pin)
        text = os.fsdecode(pin.read_bytes()[:MOST_PIN_BYTES]).rstrip("\r\n")
    except OSError as error:
        raise KeyFailure(f"{pin} cannot be read: {error.strerror}.") from None
    return Token(environment[MODULE], environment[TOKEN], text)
