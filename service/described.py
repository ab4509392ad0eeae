"""``python -m affidavit.service.described``: the OpenAPI document, as it is kept in ``docs``.

It depends on the routes alone: no database is opened, and none need be there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from affidavit.service.app import create_app
from affidavit.service.settings import Settings


def described() -> str:
    """The document as text whose lines can be compared."""
    nowhere = Path("/nonexistent")
    settings = Settings(database_url="sqlite:////nonexistent/none.db", key_directory=nowhere)
    app = create_app(settings)
    try:
        return json.dumps(app.openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    finally:
        app.state.services.close()


if __name__ == "__main__":
    sys.stdout.write(described())
