"""The public records of the keys that signed what is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    bindparam,
    select,
    text,
)

from affidavit.service.core.database import (
    UtcDateTime,
)
from affidavit.service.tables.certificates import signing_keys


def insert_signing_key(connection: Connection, key: Mapping[str, Any], at: datetime) -> None:
    """Store the public record of a key that signs at ``at``, unless it is stored already."""
    known = select(signing_keys.c.key_id).where(signing_keys.c.key_id == key["key_id"])
    if connection.execute(known).first() is None:
        record = json.dumps(dict(key), sort_keys=True)
        connection.execute(_INSERT_KEY, {"key": key["key_id"], "record": record, "at": at})


_INSERT_KEY = text(
    "INSERT INTO signing_keys (key_id, record, first_used_at) VALUES (:key, :record, :at) "
    "ON CONFLICT DO NOTHING"
).bindparams(bindparam("at", type_=UtcDateTime))
