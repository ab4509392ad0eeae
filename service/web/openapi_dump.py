"""The text of the OpenAPI document, without a database."""

from __future__ import annotations

import json
from pathlib import Path

from affidavit.service.web.routing import JSON as JSON
from affidavit.service.web.routing import YAML as YAML


def document_text() -> str:
    """Return the document as sorted, indented JSON."""
    from affidavit.service.settings import Settings
    from affidavit.service.web.app import create_app  # which imports this module

    settings = Settings(
        database_url="sqlite:////nonexistent/none.db", key_directory=Path("/nonexistent")
    )
    app = create_app(settings)
    try:
        return json.dumps(app.openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    finally:
        app.state.services.close()
