"""Versions of the libraries that compute, as certificates name them.

The engines, in order of preference; a new one is a file and a line here. Those that installed
packages add (entry points ``affidavit.accountants``) come after ours, by name.

The first engine that supports a run decides. The checker (``affidavit.accountants.checker``) gives
the second opinion, or where it does not reach the first engine of another library that does.
Preference goes to the exact one, then to quick two-sided ones, then to the Rényi bound, which
reaches furthest and says least.

An engine is imported when it is first asked: the libraries of the second opinions take a
second to load, and most checks never need them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import version

from affidavit import __version__
from affidavit.accountants.protocol import Accountant, AccountantError, PrivacyCurve, Sampling
from affidavit.plan import Event, installed_extensions, load_extension

OURS = __version__
DP_ACCOUNTING = f"dp-accounting {version('dp-accounting')}"
PLD = f"{DP_ACCOUNTING}.1"
"""The library's, and how we read it: 1 allows for round-off that grows with a run's length."""
RDP = f"{DP_ACCOUNTING}.1"
"""The same: 1 allows for what is lost of the divergences of very weak releases."""
PRV_ACCOUNTANT = f"prv-accountant {version('prv-accountant')}"


_PLACES = {
    "gaussian": (OURS, "affidavit.accountants.gaussian", "GaussianAccountant"),
    "fourier": (OURS, "affidavit.accountants.fourier", "FourierAccountant"),
    "allocation": (OURS, "affidavit.accountants.random_allocation", "AllocationAccountant"),
    "allocation_rdp": (
        OURS,
        "affidavit.accountants.random_allocation",
        "RenyiAllocationAccountant",
    ),
    "monte_carlo": (OURS, "affidavit.accountants.monte_carlo", "MonteCarloAccountant"),
    "largest_bin": (OURS, "affidavit.accountants.largest_bin", "LargestBinAccountant"),
    "analytic_gaussian": (
        DP_ACCOUNTING,
        "affidavit.accountants.analytic_gaussian",
        "AnalyticGaussianAccountant",
    ),
    "pld": (PLD, "affidavit.accountants.pld", "PldAccountant"),
    "participations": (
        OURS,
        "affidavit.accountants.participations",
        "ParticipationAccountant",
    ),
    "selection": (OURS, "affidavit.accountants.selection", "SelectionAccountant"),
    "rdp": (RDP, "affidavit.accountants.rdp", "RdpAccountant"),
    "prv": (PRV_ACCOUNTANT, "affidavit.accountants.prv", "PrvAccountant"),
}
_INSTALLED = tuple(sorted(installed_extensions("affidavit.accountants").keys() - _PLACES.keys()))
NAMES = (*_PLACES, *_INSTALLED)
"""Every engine, in order of preference."""
SOLVERS = (
    "gaussian",
    "fourier",
    "allocation",
    "allocation_rdp",
    "monte_carlo",
    "participations",
    "selection",
    "rdp",
)
"""The engines that a search asks: all answer in milliseconds, but ``selection`` and ``monte_carlo``
in up to seconds."""
CERTAIN = "largest_bin"
"""The engine whose bounds replace sampled ones where they are no higher."""
SECOND_OPINIONS = ("analytic_gaussian", "pld", "prv", "rdp", "allocation_rdp", CERTAIN)
"""Engines in the order in which they are asked whether ours are right: other people's, and
for balls in bins, which nobody else's reaches, those of another method."""


@cache
def accountant(name: str) -> Accountant:
    """The engine called ``name``; raises ``KeyError`` for a name that is not in ``NAMES``."""
    if name in _INSTALLED:
        engine_class = load_extension("affidavit.accountants", name)
    else:
        _, module, kind = _PLACES[name]
        engine_class = getattr(import_module(module), kind)
    engine: Accountant = engine_class()
    return engine


def certain_accountants() -> Iterator[Accountant]:
    """Those whose bounds hold with certainty, in order of preference, each imported in its turn."""
    engines = map(accountant, NAMES)
    return (engine for engine in engines if not isinstance(engine, Sampling))


def curve_or_none(name: str, event: Event) -> PrivacyCurve | None:
    """The curve of ``event`` by the engine called ``name``, or None where it has none."""
    try:
        return accountant(name).curve(event)
    except AccountantError:
        return None


def versions() -> list[dict[str, str]]:
    """Name and version of every engine, in order of preference, without importing any."""
    ours = [{"name": name, "version": version} for name, (version, _, _) in _PLACES.items()]
    return ours + [{"name": name, "version": _installed_version(name)} for name in _INSTALLED]


def _installed_version(name: str) -> str:
    package = installed_extensions("affidavit.accountants")[name].dist
    assert package is not None  # entry points of installed packages have one
    return f"{package.name} {package.version}"
