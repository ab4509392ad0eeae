"""How the documents become a site: ``make site`` (Sphinx with MyST and furo, nothing remote).

Pages are the Markdown files of this folder as they stand, which are readable without the site
too. Every warning is an error: a link to a page, heading or file that is not there, a page that
no table of contents leads to, a block in a language that is not one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from affidavit import __version__
from affidavit.evidence import verifier_page

project = "Affidavit"
author = "the authors of Affidavit"
version = release = __version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_site"]
nitpicky = True
suppress_warnings = ["myst.header"]  # levels of headings are taste; links are not

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = "Affidavit"
html_copy_source = False
html_show_copyright = False


def setup(app: Any) -> None:
    """Put the page that verifies certificates beside the others."""

    def write(app: Any, error: Exception | None) -> None:
        if error is None and app.builder.format == "html":
            (Path(app.outdir) / "verify.html").write_bytes(verifier_page())

    app.connect("build-finished", write)
