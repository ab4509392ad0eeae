"""The known mistakes, one function each; a new one is a function, a row and a vector."""

from __future__ import annotations

from affidavit.certificate.diagnosis.case import Mistake
from affidavit.certificate.diagnosis.catalogue import blocks, correlated, reporting, sampling

CATALOGUE: dict[str, Mistake] = {
    mistake.code: mistake
    for mistake in (
        *blocks.MISTAKES,
        *correlated.MISTAKES,
        *sampling.MISTAKES,
        *reporting.MISTAKES,
    )
}
"""Every known mistake by its stable code."""
