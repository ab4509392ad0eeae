"""The keyset in the OpenAPI document: the envelope, and what its payload holds."""

from __future__ import annotations

from typing import Any

from affidavit.certificate import PAYLOAD_TYPE

KEYSET_SCHEMAS: dict[str, dict[str, Any]] = {
    "SignedKeyset": {
        "type": "object",
        "description": "A DSSE envelope; its payload is the canonical JSON of a keyset version: "
        "root keys and threshold, signing keys with windows, revoked keys, dates.",
        "properties": {
            "payload": {"type": "string", "format": "byte"},
            "payloadType": {"const": PAYLOAD_TYPE},
            "signatures": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "keyid": {"type": "string"},
                        "sig": {"type": "string", "format": "byte"},
                    },
                    "required": ["keyid", "sig"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["payload", "payloadType", "signatures"],
        "additionalProperties": False,
    },
    "PublishedKeyset": {
        "type": "object",
        "properties": {
            "version": {"type": "integer", "minimum": 1},
            "digest": {"type": "string"},
        },
        "required": ["version", "digest"],
    },
}
