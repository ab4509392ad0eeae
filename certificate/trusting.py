"""Whose signatures a verification counts: the key directory's, those given, or a keyset's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from affidavit.certificate.keys import KeyFailure, KeyStore, PublicKey, home, read_public_keys
from affidavit.certificate.keyset import KeysetError, read_keyset
from affidavit.certificate.keyset_trust import accept, read_anchor
from affidavit.certificate.verification import VerificationError

KEY_STEP = 3


@dataclass(frozen=True, slots=True)
class Trust:
    """What the command line said: files of keys, or keysets with what is trusted already."""

    keys: Sequence[Path]
    keysets: Sequence[Path] = ()
    root: Path | None = None

    def public_keys(self) -> tuple[PublicKey, ...]:
        """The trusted keys.

        Raises ``KeyFailure`` for files that cannot be used, and ``VerificationError``, as
        the step that looks for the key, when the keyset does not count.
        """
        if bool(self.keysets) != (self.root is not None):
            raise KeyFailure(
                "--keyset and --root go together: the keyset, and the roots that you trust or "
                "the keyset that you saw last."
            )
        if self.root is not None and self.keys:
            raise KeyFailure("give --keys or --keyset, not both.")
        if self.root is not None:
            return self._of_keyset(self.root)
        if not self.keys:
            return KeyStore(home() / "keys").public_keys()
        return tuple(key for file in self.keys for key in read_public_keys(file))

    def _of_keyset(self, root: Path) -> tuple[PublicKey, ...]:
        try:
            chain = [read_keyset(_read(path)) for path in self.keysets]
            return accept(chain, read_anchor(_read(root)), datetime.now(UTC)).public_keys()
        except KeysetError as error:
            raise VerificationError(KEY_STEP, error.code, error.message, error.remedy) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeyFailure(f"{path} cannot be read: {error.strerror}.") from None
