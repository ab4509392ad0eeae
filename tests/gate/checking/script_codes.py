"""What is broken in a training script, as the tests of scripts compare it."""

from __future__ import annotations

from affidavit.importers.scripts import importer


def codes_of(text: str) -> set[str]:
    """The codes of the faults in a script, but for the divisor, which most of them make private."""
    partial = importer.read(text.encode())
    assert partial is not None
    return {item.code for item in partial.broken} - {"private_divisor"}
