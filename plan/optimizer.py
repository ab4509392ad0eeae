"""The optimiser of a plan: its name and its public hyperparameters.

Most hyperparameters act on released values and are post-processing. ``GUARANTEE_FIELDS`` are the
few that change the guarantee or decide whether there is one: ``combine`` and ``noise_divisor``
(DP-DiSK), ``error_clip_norm`` and ``pre_clip_norm`` (DP-Dice). A field that the optimiser does not
have is refused, because a reader could take it for one that has an effect.

>>> sorted(OPTIMIZER_FIELDS["dp_muon"] - COMMON_FIELDS)
['auxiliary_learning_rate', 'beta1', 'beta2', 'momentum', 'newton_schulz_degree', \
'newton_schulz_start', 'newton_schulz_steps']
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from affidavit.plan.extensions import installed_extensions, load_extension
from affidavit.plan.types import Integer, Positive, Real, StrictModel

OptimizerName = Literal[
    "dp_sgd",
    "dp_sgd_lowpass",
    "dp_adam",
    "dp_adamw",
    "dp_adambc",
    "dp_adam_floor",
    "dp_adam_lowpass",
    "dp_muon",
    "dp_muonbc",
    "dp_corrmom",
    "dp_corrsgd",
    "dp_disk",
    "dp_dice",
    "dp_matrix_se",
    "dp_matrix_se_lambda",
    "dp_matrix_me",
    "dp_matrix_me_lambda",
]


Decay = Annotated[Real, Field(ge=0, lt=1)]
NonNegative = Annotated[Real, Field(ge=0)]


class Denoise(StrictModel):
    """Singular-value shrinkage of each released mean before the optimiser reads it.

    It applies if the largest singular value exceeds ``threshold`` σ'(√n + √m), with σ' the noise
    standard deviation of the released mean. Source: "Sample-efficient DP fine-tuning via gradient
    matrix denoising".
    """

    threshold: Annotated[
        Real,
        Field(ge=1, le=100, description="multiple κ of σ'(√n + √m) below which nothing changes"),
    ] = 1.02


class _InstalledNames:
    """Accepts the optimisers of installed packages as well."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            self._validate, handler(source), serialization=core_schema.simple_ser_schema("str")
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        names = handler(schema)
        names["enum"] += sorted(
            installed_extensions("affidavit.mechanisms").keys() - set(names["enum"])
        )
        return names

    @staticmethod
    def _validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, str) and value not in OPTIMIZER_FIELDS:
            return (
                value if value in installed_extensions("affidavit.mechanisms") else handler(value)
            )
        return handler(value)


def _expand_switch(value: Any) -> Any:
    """Read ``true`` as the published threshold and ``false`` as no denoising."""
    if isinstance(value, bool):
        return {} if value else None
    return value


class Optimizer(StrictModel):
    """The optimiser and its public hyperparameters.

    ``combine``, ``noise_divisor``, ``error_clip_norm`` (C₂, l2, on the mean) and
    ``pre_clip_norm`` (G, l2) change the guarantee; the others are post-processing.
    """

    name: Annotated[OptimizerName, _InstalledNames()] = "dp_sgd"
    momentum: Annotated[
        Decay | None, Field(description="heavy-ball momentum β of the noisy means")
    ] = None
    beta1: Annotated[Decay | None, Field(description="decay of Adam's first moment")] = None
    beta2: Annotated[Decay | None, Field(description="decay of Adam's second moment")] = None
    learning_rate: Annotated[Positive | None, Field(description="step length η")] = None
    auxiliary_learning_rate: Annotated[
        Positive | None,
        Field(description="step length of the tensors that AdamW updates; η where it is left out"),
    ] = None
    weight_decay: Annotated[NonNegative | None, Field(description="strength of weight decay")] = (
        None
    )
    floor: Annotated[
        NonNegative | None, Field(description="public lower bound ξ of the second moment")
    ] = None
    smoothing: Annotated[Decay | None, Field(description="decay of the causal low-pass filter")] = (
        None
    )
    newton_schulz_steps: Annotated[
        Annotated[Integer, Field(ge=1, le=64)] | None,
        Field(description="Newton-Schulz iterations q"),
    ] = None
    newton_schulz_degree: Annotated[
        Annotated[Integer, Field(ge=1, le=16)] | None,
        Field(description="degree κ of the Newton-Schulz polynomial"),
    ] = None
    newton_schulz_start: Annotated[
        Literal["paper", "frobenius"] | None,
        Field(description="Y₀ = M / max(1, ‖M‖_F) (paper) or M / ‖M‖_F (frobenius)"),
    ] = None
    probes: Annotated[
        Annotated[Integer, Field(ge=1)] | None,
        Field(description="antithetic Gaussian probes J of the bias correction"),
    ] = None
    kappa: Annotated[
        Annotated[Real, Field(gt=0, le=1)] | None,
        Field(description="gain κ of the simplified Kalman filter"),
    ] = None
    gamma: Annotated[
        Positive | None, Field(description="how far along the last update γ to look ahead")
    ] = None
    combine: Annotated[
        Literal["before_clipping", "after_clipping"] | None,
        Field(description="when a record's two gradients are combined"),
    ] = None
    noise_divisor: Annotated[
        Literal["one", "filter_norm"] | None,
        Field(description="what the noise multiplier is divided by before noise is drawn"),
    ] = None
    error_clip_norm: Annotated[
        Positive | None, Field(description="l2 norm C₂ that the error state is clipped to")
    ] = None
    pre_clip_norm: Annotated[
        Positive | None, Field(description="l2 norm G that a record's raw gradient is clipped to")
    ] = None
    denoise: Annotated[
        Denoise | None,
        BeforeValidator(_expand_switch, json_schema_input_type=Denoise | bool | None),
        Field(description="singular-value shrinkage of the released means"),
    ] = None


GUARANTEE_FIELDS = frozenset({"combine", "noise_divisor", "error_clip_norm", "pre_clip_norm"})
"""Fields that change the guarantee; all others are post-processing."""

COMMON_FIELDS = frozenset({"name", "learning_rate", "weight_decay", "denoise"})
_SGD = COMMON_FIELDS | {"momentum"}
_ADAM = COMMON_FIELDS | {"beta1", "beta2"}
_MUON = (
    _SGD
    | _ADAM
    | {
        "auxiliary_learning_rate",
        "newton_schulz_steps",
        "newton_schulz_degree",
        "newton_schulz_start",
    }
)

OPTIMIZER_FIELDS: dict[str, frozenset[str]] = {
    "dp_sgd": _SGD,
    "dp_sgd_lowpass": _SGD | {"smoothing"},
    "dp_adam": _ADAM,
    "dp_adamw": _ADAM,
    "dp_adambc": _ADAM | {"floor"},
    "dp_adam_floor": _ADAM | {"floor"},
    "dp_adam_lowpass": _ADAM | {"smoothing"},
    "dp_muon": _MUON,
    "dp_muonbc": _MUON | {"probes"},
    "dp_corrmom": _ADAM | {"momentum"},
    "dp_corrsgd": _SGD,
    "dp_disk": _SGD | _ADAM | {"kappa", "gamma", "combine", "noise_divisor"},
    "dp_dice": _SGD | {"error_clip_norm", "pre_clip_norm"},
    "dp_matrix_se": _SGD,
    "dp_matrix_se_lambda": _SGD,
    "dp_matrix_me": _SGD,
    "dp_matrix_me_lambda": _SGD,
}
"""The fields of each optimiser."""

assert OPTIMIZER_FIELDS.keys() == set(get_args(OptimizerName))


def optimizer_fields(name: str) -> frozenset[str]:
    """Return the fields of the optimiser ``name``, which may be one of an installed package."""
    if name in OPTIMIZER_FIELDS:
        return OPTIMIZER_FIELDS[name]
    fields: frozenset[str] = load_extension("affidavit.mechanisms", name).takes
    return fields
