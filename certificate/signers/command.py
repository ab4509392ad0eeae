"""A private half behind a command: a key management service, a smart card, another machine.

The command gets the message on its standard input and the key's id in
``AFFIDAVIT_KEY_ID``; it prints the Ed25519 signature, as 64 bytes or in base64 (with the
``vault:v1:`` that Transit puts before it). It is started directly, without a shell. What
it prints counts only if the public key accepts it, so that a wrong key, a truncated
message or a prehashed variant is noticed here and not by those who verify.

What is signed is a statement with the whole plan, up to some megabytes: a service that
takes less (AWS KMS signs 4096 bytes, Google Cloud KMS 64 KiB) cannot sign every
certificate.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import shlex
import subprocess
from dataclasses import dataclass

from affidavit.certificate.keys import KeyFailure, PublicKey, SigningPort

VARIABLE = "AFFIDAVIT_SIGN_COMMAND"
SECONDS = 30
"""How long the command may take."""
SIGNATURE_BYTES = 64
PREFIX = re.compile(rb"^vault:v[0-9]{1,9}:")


@dataclass(frozen=True, slots=True)
class CommandHalves:
    """Private halves that one command signs with."""

    command: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> CommandHalves:
        """The command of a line with shell quoting; raises ``KeyFailure``."""
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise KeyFailure(f"{VARIABLE} cannot be read: {error}.") from None
        if not words:
            raise KeyFailure(f"{VARIABLE} names no command.")
        return cls(words)

    def find(self, public: PublicKey) -> SigningPort | None:
        """A signer for ``public``; whether the command has that key shows when it signs."""
        return CommandKey(self.command, public)


@dataclass(frozen=True, slots=True)
class CommandKey:
    """One key of the command."""

    command: tuple[str, ...]
    public: PublicKey

    @property
    def key_id(self) -> str:
        """The public half's key id."""
        return self.public.key_id

    def sign(self, message: bytes) -> bytes:
        """The command's signature; raises ``KeyFailure``.

        What the command says on stderr is left out of the failure: it may hold credentials.
        """
        try:
            done = subprocess.run(
                self.command,
                input=message,
                capture_output=True,
                check=False,
                timeout=SECONDS,
                env={**os.environ, "AFFIDAVIT_KEY_ID": self.key_id},
            )
        except subprocess.TimeoutExpired:
            raise KeyFailure(f"the command of {VARIABLE} did not end in {SECONDS} s.") from None
        except OSError as error:
            raise KeyFailure(
                f"the command of {VARIABLE} cannot be run: {error.strerror}."
            ) from None
        if done.returncode != 0:
            raise KeyFailure(f"the command of {VARIABLE} ended with code {done.returncode}.")
        signature = _read(done.stdout)
        if signature is None:
            raise KeyFailure(f"the command of {VARIABLE} printed no Ed25519 signature.")
        if not self.public.accepts(signature, message):
            raise KeyFailure(
                f"the command of {VARIABLE} signed with another key than {self.key_id[:16]}, or "
                "not the whole message, or not with pure Ed25519."
            )
        return signature


def _read(printed: bytes) -> bytes | None:
    if len(printed) == SIGNATURE_BYTES:
        return printed
    try:
        decoded = base64.b64decode(PREFIX.sub(b"", printed.strip()), validate=True)
    except (binascii.Error, ValueError):
        return None
    return decoded if len(decoded) == SIGNATURE_BYTES else None
