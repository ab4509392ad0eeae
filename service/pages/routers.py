"""The pages, one file each; a new one is a file and a line here."""

from __future__ import annotations

from affidavit.service.pages import (
    keys,
    sign_in,
    static_files,
)

PAGES = (
    static_files.router,
    sign_in.router,
    keys.router,
)
