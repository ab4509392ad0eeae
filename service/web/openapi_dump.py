"""Print the OpenAPI document, without a database: ``affidavit.service.web.openapi_dump``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from affidavit.service.settings import Settings
from affidavit.service.web.app import create_app


def document_text() -> str:
    """Return the document as sorted, indented JSON."""
    settings = Settings(
        database_url="sqlite:////nonexistent/none.db", key_directory=Path("/nonexistent")
    )
    app = create_app(settings)
    try:
        return json.dumps(app.openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    finally:
        app.state.services.close()


if __name__ == "__main__":
    sys.stdout.write(document_text())
