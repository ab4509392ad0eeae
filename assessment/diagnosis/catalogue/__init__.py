"""The known mistakes. A new mistake is one function, in the module of its topic, and a test vector.

``blocks``: releases of one step and their sensitivity. ``sampling``: records of a step and the
number of steps. ``correlated``: correlated noise and repeated participation. ``reporting``: the
reported result.
"""

from __future__ import annotations

from affidavit.assessment.diagnosis.catalogue import (
    blocks,
    correlated,
    reporting,
    sampling,
)
from affidavit.assessment.diagnosis.mistake import Mistake

CATALOGUE: dict[str, Mistake] = {
    item.code: item
    for module in (blocks, correlated, sampling, reporting)
    for item in vars(module).values()
    if isinstance(item, Mistake)
}
"""Every known mistake by its stable code."""
