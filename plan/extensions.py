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
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from affidavit.plan.strategies import FORMS, NOISE_KINDS, NoiseForm

Group = Literal[
    "affidavit.strategies", "affidavit.mechanisms", "affidavit.accountants", "affidavit.optimizers"
]


@cache
def installed_extensions(group: Group) -> Mapping[str, EntryPoint]:
    """Return the entry points of ``group`` by name."""
    return {entry_point.name: entry_point for entry_point in entry_points(group=group)}


@cache
def load_extension(group: Group, name: str) -> Any:
    """Return the object that an installed package registers in ``group`` as ``name``.

    Raises ``KeyError`` for a name that is not installed, and any error of loading the package.
    """
    return installed_extensions(group)[name].load()


def noise_forms() -> tuple[type[NoiseForm], ...]:
    """Return ``FORMS`` and the forms of installed packages, which are loaded."""
    extensions = (load_extension("affidavit.strategies", name) for name in _installed_kinds())
    return (*FORMS, *dict.fromkeys(extensions))


def _installed_kinds() -> list[str]:
    return sorted(installed_extensions("affidavit.strategies").keys() - NOISE_KINDS)


class _InstalledForms:
    """Validates noise of a kind from an installed package with that package's form."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            self._validate, handler(source), serialization=core_schema.simple_ser_schema("any")
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        if _installed_kinds():
            schema = TypeAdapter(_union(noise_forms())).core_schema
        return handler(schema)

    @staticmethod
    def _validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, NoiseForm):
            return value
        kind = value.get("kind") if isinstance(value, dict) else None
        is_builtin = not isinstance(kind, str) or kind in NOISE_KINDS
        if not is_builtin and kind in installed_extensions("affidavit.strategies"):
            return load_extension("affidavit.strategies", kind).model_validate(value)
        return handler(value)


def _union(forms: tuple[type[NoiseForm], ...]) -> Any:
    return Annotated[Union[forms], Field(discriminator="kind")]  # noqa: UP007


if TYPE_CHECKING:
    Noise = NoiseForm
else:
    Noise = Annotated[_union(FORMS), _InstalledForms()]
