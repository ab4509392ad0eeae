"""The known mistakes, one function each; a new mistake is a function and a test vector."""

from __future__ import annotations

from affidavit.certificate.diagnosis.catalogue import blocks, correlated, reporting, sampling
from affidavit.certificate.diagnosis.mistake import Mistake

CATALOGUE: dict[str, Mistake] = {
    item.code: item
    for module in (blocks, correlated, sampling, reporting)
    for item in vars(module).values()
    if isinstance(item, Mistake)
}
"""Every known mistake by its stable code."""
