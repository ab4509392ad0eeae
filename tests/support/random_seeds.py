"""Seeds and numbers of random tests: fixed and few in the suite, new and all in ``make soak``.

>>> seeded(7)
7
"""

from __future__ import annotations

import os


def seeded(fixed: int | str) -> int | str:
    """The seed for ``random.Random`` that stands in the test, or one of ``AFFIDAVIT_SEED`` too."""
    new = os.environ.get("AFFIDAVIT_SEED")
    return fixed if new is None else f"{new} {fixed}"


def examples(number: int) -> int:
    """How many examples a test draws: all in ``make soak``, of many an eighth in the suite.

    At least two, because Hypothesis begins with the least example.

    >>> examples(60), examples(6)
    (7, 2)
    """
    return number if os.environ.get("HYPOTHESIS_PROFILE") == "searching" else max(2, number // 8)
