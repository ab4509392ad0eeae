"""Versions of the libraries that compute, as certificates name them."""

from __future__ import annotations

from importlib.metadata import version

from affidavit import __version__

OURS = __version__
DP_ACCOUNTING = f"dp-accounting {version('dp-accounting')}"
PLD = f"{DP_ACCOUNTING}.1"
"""The library's, and how we read it: 1 allows for round-off that grows with a run's length."""
PRV_ACCOUNTANT = f"prv-accountant {version('prv-accountant')}"
