"""A private half handed over in an environment variable, as orchestrators do with secrets.

It is PKCS#8 PEM, unencrypted, one block and nothing else.

>>> from affidavit.certificate.keys import SigningKey
>>> EnvironmentHalf.of(None).find(SigningKey.generate().public) is None
True
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from affidavit.certificate.keys import KeyFailure, PublicKey, SigningKey, SigningPort

VARIABLE = "AFFIDAVIT_SIGNING_KEY"
MOST_CHARACTERS = 4096
REMEDY = f"give {VARIABLE} one unencrypted PKCS#8 PEM block of an Ed25519 private key"


@dataclass(frozen=True, slots=True)
class EnvironmentHalf:
    """The one private half that was handed over, or none."""

    private: Ed25519PrivateKey | None = field(repr=False)

    @classmethod
    def of(cls, text: str | None) -> EnvironmentHalf:
        """The half of a PEM text; raises ``KeyFailure``, which does not repeat the text."""
        if not text:
            return cls(None)
        whole = text.strip()
        if len(whole) > MOST_CHARACTERS or whole.count("-----BEGIN") != 1:
            raise KeyFailure(f"{VARIABLE} is not one PEM block; {REMEDY}.")
        if not whole.startswith("-----BEGIN PRIVATE KEY-----"):
            raise KeyFailure(f"{VARIABLE} does not begin with a private key; {REMEDY}.")
        try:
            private = load_pem_private_key(whole.encode(), password=None)
        except (ValueError, TypeError):
            raise KeyFailure(f"{VARIABLE} cannot be read as a private key; {REMEDY}.") from None
        if not isinstance(private, Ed25519PrivateKey):
            raise KeyFailure(f"{VARIABLE} holds a key that is not Ed25519; {REMEDY}.")
        return cls(private)

    def find(self, public: PublicKey) -> SigningPort | None:
        """The half as a signer for ``public``, if it is that key's."""
        if self.private is None or self.private.public_key() != public.key:
            return None
        return SigningKey(private=self.private, public=public)
