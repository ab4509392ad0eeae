"""The field ``noise`` of a release: the forms of this package and of installed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from affidavit.plan.extensions import installed_extensions, load_extension
from affidavit.plan.strategies import FORMS, NOISE_KINDS, NoiseForm


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
