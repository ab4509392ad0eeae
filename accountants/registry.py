"""The engines by name, in order of preference, with the versions that certificates state.

To add an engine, write its file and add a line here. Engines of installed packages (entry points
``affidavit.accountants``) follow, sorted by name.

The first engine that supports a run decides. The checker (``affidavit.checker``) gives
the second opinion or, where it has no statement, the first engine of another library that supports
the run. Exact engines come first, then fast two-sided ones, then Rényi bounds, which cover most and
are loosest.

Engines and their interfaces are imported on first use: the other libraries take a second to load,
most checks do not need them, and help needs the names alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from affidavit import __version__
from affidavit.plan import installed_extensions, load_extension

if TYPE_CHECKING:
    from affidavit.accountants.protocol import Accountant, PrivacyCurve
    from affidavit.plan import events

AFFIDAVIT_VERSION = __version__
DP_ACCOUNTING = f"dp-accounting {version('dp-accounting')}"
PLD = f"{DP_ACCOUNTING}.1"
"""The library's version and that of our use of it: 1 allows for round-off that grows with steps."""
RDP = f"{DP_ACCOUNTING}.1"
"""The library's version and that of our use of it: 1 allows for round-off of tiny divergences."""
PRV_ACCOUNTANT = f"prv-accountant {version('prv-accountant')}"

_ENGINES = {
    "gaussian": ("gaussian:GaussianAccountant", AFFIDAVIT_VERSION),
    "fourier": ("fourier_accountant:FourierAccountant", AFFIDAVIT_VERSION),
    "allocation": ("random_allocation:AllocationAccountant", AFFIDAVIT_VERSION),
    "allocation_rdp": ("random_allocation:RenyiAllocationAccountant", AFFIDAVIT_VERSION),
    "monte_carlo": ("monte_carlo:MonteCarloAccountant", AFFIDAVIT_VERSION),
    "largest_bin": ("largest_bin:LargestBinAccountant", AFFIDAVIT_VERSION),
    "analytic_gaussian": ("analytic_gaussian:AnalyticGaussianAccountant", DP_ACCOUNTING),
    "pld": ("pld:PldAccountant", PLD),
    "participations": ("participations:ParticipationAccountant", AFFIDAVIT_VERSION),
    "selection": ("selection:SelectionAccountant", AFFIDAVIT_VERSION),
    "rdp": ("rdp:RdpAccountant", RDP),
    "prv": ("prv:PrvAccountant", PRV_ACCOUNTANT),
}
_INSTALLED = tuple(sorted(installed_extensions("affidavit.accountants").keys() - _ENGINES.keys()))
ENGINE_NAMES = (*_ENGINES, *_INSTALLED)
"""Every engine, in order of preference."""
SOLVER_NAMES = (
    "gaussian",
    "fourier",
    "allocation",
    "allocation_rdp",
    "monte_carlo",
    "participations",
    "selection",
    "rdp",
)
"""The engines used to solve for a quantity. They answer in milliseconds, ``selection`` and
``monte_carlo`` in up to seconds."""
CERTAIN_ENGINE = "largest_bin"
"""The engine whose bounds replace sampled ones that are not lower."""
SECOND_OPINIONS = ("analytic_gaussian", "pld", "prv", "rdp", "allocation_rdp", CERTAIN_ENGINE)
"""The engines that give a second opinion, in order: those of other libraries and, for balls in
bins, which no other library covers, those of another method."""


@cache
def accountant(name: str) -> Accountant:
    """Return the engine called ``name``; raises ``KeyError`` unless it is in ``ENGINE_NAMES``."""
    if name in _INSTALLED:
        engine_class = load_extension("affidavit.accountants", name)
    else:
        engine_class = resolve_name(f"affidavit.accountants.{_ENGINES[name][0]}")
    engine: Accountant = engine_class()
    return engine


def certain_accountants() -> Iterator[Accountant]:
    """Yield the engines whose bounds hold with certainty, in order, importing each on demand."""
    from affidavit.accountants.protocol import Sampling

    engines = map(accountant, ENGINE_NAMES)
    return (engine for engine in engines if not isinstance(engine, Sampling))


def find_curve(name: str, event: events.Event) -> PrivacyCurve | None:
    """Return the curve of ``event`` by the engine called ``name``, or None if it has none."""
    from affidavit.accountants.protocol import AccountantError

    try:
        return accountant(name).curve(event)
    except AccountantError:
        return None


def engine_versions() -> list[dict[str, str]]:
    """Return the name and version of every engine, in order, without importing any."""
    own_engines = [{"name": name, "version": version} for name, (_, version) in _ENGINES.items()]
    return own_engines + [
        {"name": name, "version": _installed_version(name)} for name in _INSTALLED
    ]


def _installed_version(name: str) -> str:
    package = installed_extensions("affidavit.accountants")[name].dist
    assert package is not None  # entry points of installed packages have one
    return f"{package.name} {package.version}"
