"""What the log's routes answer, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

_INDEX = {"type": "integer", "minimum": 0}
_HASH = {"type": "string", "format": "byte", "description": "32 bytes in base64."}
_HASHES = {"type": "array", "items": _HASH}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


LOG_SCHEMAS: dict[str, dict[str, Any]] = {
    "InclusionProof": _object(
        {"leafIndex": _INDEX, "treeSize": _INDEX, "leafHash": _HASH, "hashes": _HASHES}
    ),
    "ConsistencyProof": _object({"first": _INDEX, "second": _INDEX, "hashes": _HASHES}),
    "LogEntries": _object(
        {
            "entries": {
                "type": "array",
                "items": _object(
                    {
                        "leafIndex": _INDEX,
                        "leafHash": _HASH,
                        "content": {
                            "type": "string",
                            "description": "Canonical JSON, the very bytes that were hashed.",
                        },
                    }
                ),
            },
            "next": {
                "type": ["string", "null"],
                "description": "Path of the following entries.",
            },
        }
    ),
}
