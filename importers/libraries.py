"""Describe each training library: its private call, related calls, and known faults.

The facts are in ``libraries.toml``, one section for each library, and ``samplers.toml``, from the
libraries' own sources: TensorFlow Privacy 0.8 and 0.9, jax-privacy 2.0 and its development tree,
private-transformers 0.2, fastDP, PyVacy, dp-transformers 1.0, Flower 1.x, pfl 0.5, optax 0.1.7,
objax 1.8, and torchdp 0.1 (the former name of Opacus). ``like`` names a section to inherit keys
from.

A quantity of a plan is an expression of a call's arguments, such as ``"batch_size"`` or
``"expected_participations / iterations"``. An argument that the call omits has the library's
default, or leaves the quantity unknown. Rules list known faults of the library.
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
"""Sampling schemes that shuffling loaders do not draw."""


class Call(StrictModel):
    """A call by one of ``names``, with the quantities that its arguments state.

    ``positional`` names its positional arguments. A call that ``trains`` is counted with the loops
    around it. A call that only ``accounts`` states what an accountant was told, which must agree
    with the training. ``makers`` are class methods that take the same arguments. ``replaces``
    lists quantities of other calls that this call overrides.
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
"""A requirement on a value. A list has the values that are equivalent to leaving it out."""


class Rule(StrictModel):
    """An obligation that depends on arguments of the private call.

    ``broken`` applies if an argument does not meet its requirement, or is not known.
    """

    holds: Mapping[str, ArgumentRequirement]
    broken: BrokenObligation


def satisfies_requirement(value: Any, requirement: ArgumentRequirement, lot: Any) -> bool:
    """Whether the value of an argument, None if left out, meets a rule's requirement.

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


class LotSampler(Call):
    """A class that draws lots by a ``scheme`` of plans, or None, if its arguments meet ``holds``.

    ``remedy`` says what to do about others.
    """

    modules: tuple[str, ...]
    scheme: str | None = None
    holds: Mapping[str, ArgumentRequirement] = {}
    remedy: str = ""


class Library(StrictModel):
    """A training library: its private call, related calls, and its known faults.

    - ``key``: name of its section in ``libraries.toml``.
    - ``poisson``: argument that decides whether lots are Poisson, with its default.
    - ``scheme``: scheme of the library's own loader, None if the script's loader decides.
    - ``draws``: the method that draws the lots of one run.
    - ``makes_classes``: the names of ``private`` are functions that return private classes.
    - ``methods``: methods of the result that do not change the arguments of the call.
    - ``yields_to``: sections whose scripts use these names too, as types or in tests.
    - ``remarks``: notes on arguments of the private call that have a value.
    - ``trains``: a library that does not train is only read where no training library is called.
    """

    key: str
    name: str
    modules: tuple[str, ...]
    private: Call
    beside: tuple[Call, ...] = ()
    poisson: tuple[str, bool] | None = None
    scheme: str | None = None
    draws: str | None = None
    makes_classes: bool = False
    methods: tuple[str, ...] = ()
    yields_to: tuple[str, ...] = ()
    trains: bool = True
    rules: tuple[Rule, ...] = ()
    broken: tuple[BrokenObligation, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[tuple[str, str | bool, str], ...] = ()

    @property
    def samplers(self) -> tuple[LotSampler, ...]:
        """Its classes that draw lots."""
        return tuple(item for item in SAMPLERS if not {*item.modules}.isdisjoint(self.modules))


def _load() -> tuple[Library, ...]:
    sections = load_facts("libraries.toml")
    return tuple(
        Library(**{"key": key} | sections.get(own.pop("like", ""), {}) | own)
        for key, own in sections.items()
    )


SAMPLERS = tuple(
    LotSampler(**{"names": (name,)} | own) for name, own in load_facts("samplers.toml").items()
)
FAULTS = {
    key: BrokenObligation(
        **{"code": key, "schemes": NOT_SHUFFLED if own.pop("poisson_alone", False) else None} | own
    )
    for key, own in load_facts("faults.toml").items()
}
"""Faults of scripts that break a claim with any library, by code."""
LIBRARIES = _load()
TRAINING = tuple(item for item in LIBRARIES if item.trains)
ACCOUNTING = tuple(item for item in LIBRARIES if not item.trains)
OPACUS, OPACUS_BEFORE_1 = TRAINING[:2]
