"""The folder of the keys and of what verifiers remember, found without reading a key.

>>> home({"AFFIDAVIT_HOME": "/srv/affidavit"}).as_posix()
'/srv/affidavit'
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

KEY_PREFIXES = ("AFFIDAVIT_SIGNING_KEY", "AFFIDAVIT_PKCS11_")
"""How the variables begin that configure a key outside of the folder."""


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the keys and the embedded database."""
    return Path(environ.get("AFFIDAVIT_HOME") or Path.home() / ".affidavit")


def may_have_signing_key(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this machine may have a signing key, which ``signers`` then reads, slowly."""
    configured = any(name.startswith(KEY_PREFIXES) for name in environ)
    return configured or (home(environ) / "keys").exists()
