"""The Python of a Jupyter notebook: its code cells, in order, without magic commands.

Cells may have been run in another order, or twice; what is read is a run from top to bottom.
"""

from __future__ import annotations

import json

from affidavit.importers.base import not_imported

KIND = "notebook"
MAGICS = ("%", "!", "?")
RUNNING = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Magic commands of a cell that run its Python."""


def source_of(raw: bytes) -> bytes:
    """The cells as one script; raises ``MalformedPlan`` if this is not a notebook."""
    try:
        cells = json.loads(raw)["cells"]
        texts = [
            "".join(cell["source"])
            for cell in cells
            if cell.get("cell_type") == "code" and cell.get("source")
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise not_imported(KIND, "it has no cells that can be read.", "Save it again.") from None
    return "\n".join(_plain(text) for text in texts).encode("utf-8", "replace")


def _plain(text: str) -> str:
    """A cell with its magic commands as comments, and cells of other languages whole."""
    first = (text.split(maxsplit=1) or [""])[0]
    if first.startswith("%%") and first not in RUNNING:
        return "\n".join("# " + line for line in text.splitlines())
    return "\n".join(
        f"{line[: len(line) - len(line.lstrip())]}pass  # {line.strip()}"
        if line.lstrip().startswith(MAGICS)
        else line
        for line in text.splitlines()
    )
