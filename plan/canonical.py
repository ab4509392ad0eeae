"""The canonical form of JSON data, and its digest."""

from __future__ import annotations

import hashlib
from typing import Any

import rfc8785


def canonical_json(value: Any) -> bytes:
    """Return the RFC 8785 canonical JSON of ``value``."""
    return rfc8785.dumps(value)


def digest_of(value: Any) -> str:
    """Return ``sha256:`` and the hexadecimal digest of the canonical JSON of ``value``."""
    return digest_of_bytes(canonical_json(value))


def digest_of_bytes(content: bytes) -> str:
    """Return ``sha256:`` and the hexadecimal digest of ``content``."""
    return "sha256:" + hashlib.sha256(content).hexdigest()
