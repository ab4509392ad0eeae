"""The seeds of random tests: fixed in the suite, new in each round of ``make soak``.

>>> seeded(7)
7
"""

from __future__ import annotations

import os


def seeded(fixed: int | str) -> int | str:
    """The seed for ``random.Random`` that stands in the test, or one of ``AFFIDAVIT_SEED`` too."""
    new = os.environ.get("AFFIDAVIT_SEED")
    return fixed if new is None else f"{new} {fixed}"
