"""Logs as JSON, one object a line, without private values.

::

    {"at": "2026-01-01T12:00:00.123Z", "level": "INFO", "logger": "affidavit.request",
     "message": "request", "request_id": "…", "actor": "token:ci", "method": "POST",
     "route": "/v1/certificates", "status": 201, "duration_ms": 12.3}

The names of the fields never change their meaning. Of an exception the types and the
places in the code are written and not the messages: a database's message repeats the row
that it refuses, and a row may hold a plan. ``FIELDS`` are all that a record may add to
the message, so that nothing gets here by being handed to a logger.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

FIELDS = (
    "request_id",
    "actor",
    "method",
    "route",
    "status",
    "code",
    "verdict",
    "duration_ms",
)
MOST_FRAMES = 30


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "at": _moment(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = described(record.exc_info[1])
        return json.dumps(line, ensure_ascii=True)


def described(error: BaseException) -> list[dict[str, Any]]:
    """The error and what it came from, outermost first: types and places, no messages."""
    found: list[dict[str, Any]] = []
    seen: BaseException | None = error
    while seen is not None and len(found) < MOST_FRAMES:
        frames = traceback.extract_tb(seen.__traceback__)[-MOST_FRAMES:]
        found.append(
            {
                "type": f"{type(seen).__module__}.{type(seen).__qualname__}",
                "frames": [
                    f"{'/'.join(PurePath(at.filename).parts[-2:])}:{at.lineno} {at.name}"
                    for at in frames
                ],
            }
        )
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return found


def configure() -> None:
    """Write everything from INFO on to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Alembic tells of its every look at the revision, httpx of every whole address.
    for name in ("alembic", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _moment(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
