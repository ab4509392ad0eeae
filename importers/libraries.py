"""What each training library is to the gate: its private call, the calls beside it, its rules.

The facts stand in ``libraries.toml``, one section for each library, from the libraries' own
sources: TensorFlow Privacy 0.8 and 0.9, jax-privacy 2.0, private-transformers 0.2, fastDP,
PyVacy, dp-transformers 1.0, Flower 1.x, pfl 0.5, optax 0.1.7, objax 1.8, and torchdp 0.1, Opacus'
first name. ``like`` names a section whose other keys hold too.

A quantity of a plan is an expression of a call's arguments, as ``"batch_size"`` or
``"expected_participations / iterations"``. An argument that the call leaves out has the library's
default, or makes the quantity unknown. Rules list what the library is known not to do, so that
no claim may rest on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from affidavit.importers.names import load_facts
from affidavit.importers.partial_plan import BrokenObligation, is_number
from affidavit.plan import Scheme, StrictModel

NOT_SHUFFLED = tuple(
    scheme for scheme in get_args(Scheme) if scheme not in ("shuffled", "cyclic", "full_batch")
)
"""Schemes that no shuffling loader draws."""


class Call(StrictModel):
    """A call by one of ``names``, and the quantities that its arguments state.

    ``positional`` are the names of its arguments in order. A call that ``trains`` is counted with
    the loops around it. One that only ``accounts`` says what was told to an accountant: it must
    agree with what trains. ``makers`` are class methods that take the same arguments.
    ``replaces`` are quantities that another call stated, and that do not hold after this one.
    """

    names: tuple[str, ...]
    makers: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    quantities: Mapping[str, str] = {}
    positional: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    trains: bool = False
    accounts: bool = False


ArgumentRequirement = Literal["given", "number", "lot_size", "gaussian"] | tuple[Any, ...]
"""What a value has to be; a list has the values that are as good as none."""


class Rule(StrictModel):
    """Something that holds only for some values of arguments of the private call.

    Where one is otherwise, or is not settled, ``broken`` applies.
    """

    holds: Mapping[str, ArgumentRequirement]
    broken: BrokenObligation


def satisfies_requirement(value: Any, requirement: ArgumentRequirement, lot: Any) -> bool:
    """Whether the ``value`` of an argument, None if left out, is as a rule requires.

    ``lot`` is the lot size, None if unknown.
    """
    match requirement:
        case "given":
            return value is not None
        case "number":
            return is_number(value)
        case "lot_size":
            return value is None or (lot is not None and bool(value == lot))
        case "gaussian":
            return str(value).lower() == "gaussian"
    return value is None or value in requirement


class Library(StrictModel):
    """A library: its private call, the calls beside it, and what it does not do.

    ``key`` is the name of its section. ``poisson`` is the argument that decides whether lots
    are Poisson, with its default. ``scheme`` is what the library's own loader draws otherwise;
    None if the script's loader decides. ``runs`` is the method of what the private call returns
    that trains once, and ``draws`` the one that draws the lots of one run. If
    ``makes_classes``, the names of ``private`` are functions that return classes, and a call of
    such a class is private. ``methods`` of what it returns do not change the arguments of the
    call. ``yields_to`` are the sections whose scripts use these names too, as types or in
    tests. One that does not ``train`` is read only where no training library is called.
    """

    key: str
    name: str
    modules: tuple[str, ...]
    private: Call
    beside: tuple[Call, ...] = ()
    poisson: tuple[str, bool] | None = None
    scheme: str | None = None
    runs: str | None = None
    draws: str | None = None
    makes_classes: bool = False
    methods: tuple[str, ...] = ()
    yields_to: tuple[str, ...] = ()
    trains: bool = True
    rules: tuple[Rule, ...] = ()
    broken: tuple[BrokenObligation, ...] = ()
    notes: tuple[str, ...] = ()


def _load() -> tuple[Library, ...]:
    sections = load_facts("libraries.toml")
    return tuple(
        Library(**{"key": key} | sections.get(own.pop("like", ""), {}) | own)
        for key, own in sections.items()
    )


FAULTS = {
    key: BrokenObligation(
        **{"code": key, "schemes": NOT_SHUFFLED if own.pop("poisson_alone", False) else None} | own
    )
    for key, own in load_facts("faults.toml").items()
}
"""What a script may do so that its claim does not hold, whatever its library."""
LIBRARIES = _load()
TRAINING = tuple(item for item in LIBRARIES if item.trains)
ACCOUNTING = tuple(item for item in LIBRARIES if not item.trains)
OPACUS, OPACUS_BEFORE_1 = TRAINING[:2]
