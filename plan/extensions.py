"""Extensions: additions of installed packages by entry points.

==========================  ==========================  ====================================
group                       name of the entry point     object
==========================  ==========================  ====================================
``affidavit.strategies``    a ``kind`` of ``noise``     ``mechanisms.strategies.StrategyForm``
``affidavit.mechanisms``    an ``optimizer.name``       ``mechanisms.Mechanism``
``affidavit.accountants``   an engine                   a class: ``accountants.Accountant``
``affidavit.optimizers``    an ``optimizer.name``       a class: the trainer's ``DPOptimizer``
==========================  ==========================  ====================================

A package is loaded when its extension is first used. It cannot redefine names of this package.

References: https://packaging.python.org/en/latest/specifications/entry-points/
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

Group = Literal[
    "affidavit.strategies", "affidavit.mechanisms", "affidavit.accountants", "affidavit.optimizers"
]


@cache
def installed_extensions(group: Group) -> Mapping[str, EntryPoint]:
    """Return the entry points of ``group`` by name."""
    return {entry_point.name: entry_point for entry_point in _entry_points().select(group=group)}


@cache
def _entry_points() -> Any:
    """Return those of all groups, because finding them reads a file of each installed package."""
    return entry_points()


@cache
def load_extension(group: Group, name: str) -> Any:
    """Return the object that an installed package registers in ``group`` as ``name``.

    Raises ``KeyError`` for a name that is not installed, and any error of loading the package.
    """
    return installed_extensions(group)[name].load()
