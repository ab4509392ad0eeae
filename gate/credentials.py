"""Tokens that ``affidavit login`` stored, by service, in a file that only its owner can read."""

from __future__ import annotations

import json
from pathlib import Path

from affidavit.certificate import home, write_atomically


def credentials_file() -> Path:
    """Where tokens are stored."""
    return home() / "credentials.json"


def stored_token(server: str) -> str | None:
    """The token for ``server``; None without one, or where the file cannot be used."""
    token = _tokens().get(server.rstrip("/"))
    return token if isinstance(token, str) else None


def store_token(server: str, token: str) -> Path:
    """Store ``token`` for ``server`` and return the file; raises ``OSError``."""
    path = credentials_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tokens = {**_tokens(), server.rstrip("/"): token}
    write_atomically(path, (json.dumps(tokens, indent=1) + "\n").encode(), mode=0o600)
    return path


def _tokens() -> dict[str, object]:
    try:
        tokens = json.loads(credentials_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return tokens if isinstance(tokens, dict) else {}
