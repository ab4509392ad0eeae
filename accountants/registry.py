"""The engines, in order of preference; a new one is a file and a line here.

The first engine that supports a run decides; the first of another library that reaches
it gives the second opinion. Preference goes to the exact one, then to two-sided ones, and
the Rényi bound, which reaches furthest and says least, comes last.
"""

from __future__ import annotations

from affidavit.accountants.fourier import FourierAccountant
from affidavit.accountants.gaussian import GaussianAccountant
from affidavit.accountants.pld import PldAccountant
from affidavit.accountants.protocol import Accountant
from affidavit.accountants.prv import PrvAccountant
from affidavit.accountants.rdp import RdpAccountant

ACCOUNTANTS: dict[str, Accountant] = {
    accountant.name: accountant
    for accountant in (
        GaussianAccountant(),
        FourierAccountant(),
        PldAccountant(),
        PrvAccountant(),
        RdpAccountant(),
    )
}


SECOND_OPINIONS = ("pld", "prv", "rdp")
"""Engines of other people, in the order in which they are asked whether ours are right."""


def versions() -> list[dict[str, str]]:
    """Name and version of every engine, in order of preference."""
    return [{"name": each.name, "version": each.version} for each in ACCOUNTANTS.values()]
