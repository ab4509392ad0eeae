"""What a training library is to the gate: its private call, the calls beside it, and its rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from affidavit.importers.base import Broken

NOT_SHUFFLED = ("poisson", "truncated_poisson", "cyclic_poisson", "balls_in_bins", "fixed_size")
"""Schemes that no shuffling loader draws."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call by one of ``names``, and the quantities that its arguments state.

    ``positional`` are the names of its arguments in order. A call that ``trains`` is counted with
    the loops around it. One that only ``accounts`` says what was told to an accountant: it must
    agree with what trains. ``makers`` are class methods that take the same arguments.
    ``replaces`` are quantities that another call stated, and that do not hold after this one.
    """

    names: tuple[str, ...]
    makers: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    quantities: Mapping[str, str] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = False
    accounts: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Something that holds only for some values of an argument of the private call.

    ``holds`` gets the value, None if the argument is left out, and the lot size, None if unknown.
    Where it does not hold, or the value is not settled, ``broken`` applies.
    """

    argument: str
    holds: Callable[[Any, Any], bool]
    broken: Broken


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """A library: its private call, the calls beside it, and what it does not do.

    ``poisson`` is the argument that decides whether lots are Poisson, with its default. ``scheme``
    is what the library's own loader draws otherwise; None if the script's loader decides. ``runs``
    is the method of what the private call returns that trains once. If ``makes_classes``, the names
    of ``private`` are functions that return classes, and a call of such a class is private.
    ``methods`` of what it returns change nothing of what was told to the call.
    """

    name: str
    modules: tuple[str, ...]
    private: Call
    beside: tuple[Call, ...] = ()
    poisson: tuple[str, bool] | None = None
    scheme: str | None = None
    runs: str | None = None
    makes_classes: bool = False
    methods: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    broken: tuple[Broken, ...] = ()
    notes: tuple[str, ...] = ()
