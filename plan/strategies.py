"""Noise that is correlated across steps, as a plan writes it.

Each class is one form of ``noise:``; what it means (which matrix N is injected, and how
sensitive its inverse is) belongs to ``affidavit.mechanisms``. ``participation`` says in
which steps one record may take part, and ``workload`` what the noise is optimised for.

T is the number of steps of the phase. z is independent noise of standard deviation 1, and
σ_g C_g w, w = N z, is what is injected; coefficients have no unit.

References: docs/theorems/correlated-noise.md; those of each family stand in its module of
``affidavit.mechanisms.strategies``.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args, get_type_hints

from pydantic import Field, StringConstraints

from affidavit.plan.types import Integer, Positive, Probability, Real, StrictModel, at_most

Coefficients = Annotated[
    tuple[Real, ...], Field(min_length=1, max_length=100_000, fail_fast=True), at_most(100_000)
]
Rows = Annotated[
    tuple[Annotated[tuple[Real, ...], Field(fail_fast=True), at_most(4096)], ...],
    Field(min_length=1, fail_fast=True),
    at_most(4096),
]
Bands = Annotated[Integer, Field(ge=1)]
Sha256 = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{64}$")]


class Independent(StrictModel):
    """Fresh noise at every step."""

    kind: Literal["independent"] = "independent"


class Bidiagonal(StrictModel):
    """w_t = z_t - λ z_{t-1}, z_0 = 0; without λ the best one for the workload."""

    kind: Literal["bidiagonal"]
    lambda_: Annotated[Annotated[Real, Field(ge=-1, le=1)] | None, Field(alias="lambda")] = None
    normalized: Annotated[bool, Field(strict=True)] = False


class Toeplitz(StrictModel):
    """First column of the strategy C, zero afterwards."""

    kind: Literal["toeplitz"]
    coefficients: Coefficients


class ToeplitzInverse(StrictModel):
    """First column of the injected noise matrix N = C⁻¹."""

    kind: Literal["toeplitz_inverse"]
    coefficients: Coefficients


class SquareRoot(StrictModel):
    """The square root of the workload and its banded relatives.

    ``bands`` counts the bands of C for ``bsr`` and ``banded``, those of N for ``bisr`` and
    ``banded_inverse``; ``sqrt`` takes none.
    """

    kind: Literal["sqrt", "bsr", "bisr", "banded_inverse", "banded"]
    bands: Bands | None = None


class BufferedLinearToeplitz(StrictModel):
    """BLT: decays θ and scales ω given, or a number of buffers to have them optimised."""

    kind: Literal["blt"]
    decays: (
        Annotated[tuple[Probability, ...], Field(min_length=1, fail_fast=True), at_most(64)] | None
    ) = None
    scales: (
        Annotated[tuple[Positive, ...], Field(min_length=1, fail_fast=True), at_most(64)] | None
    ) = None
    buffers: Annotated[Integer, Field(ge=1, le=64)] | None = None


class ConvergenceAware(StrictModel):
    """The weighting Λ_τ of the objective, τ in steps; it never changes the injected noise."""

    tau: Annotated[Integer, Field(ge=1)]


class Dense(StrictModel):
    """The optimal lower-triangular strategy for the workload: T x T, of least rms or max error."""

    kind: Literal["dense"]
    objective: Literal["rms", "max"] = "rms"
    convergence_aware: ConvergenceAware | None = None


class Tree(StrictModel):
    """Binary-tree aggregation; with ``restart`` a new tree begins with every epoch."""

    kind: Literal["tree"]
    restart: Annotated[bool, Field(strict=True)] = False


class Matrix(StrictModel):
    """The injected noise matrix N itself, T x T, in rows or as a file with its digest."""

    kind: Literal["matrix"]
    rows: Rows | None = None
    file: Annotated[str, StringConstraints(strict=True, max_length=1000)] | None = None
    sha256: Sha256 | None = None


Noise = Annotated[
    Independent
    | Bidiagonal
    | Toeplitz
    | ToeplitzInverse
    | SquareRoot
    | BufferedLinearToeplitz
    | Dense
    | Tree
    | Matrix,
    Field(discriminator="kind"),
]
NOISE_KINDS = frozenset(
    kind for form in get_args(get_args(Noise)[0]) for kind in get_args(get_type_hints(form)["kind"])
)
"""Every ``kind`` that a plan's noise may have."""


class Participation(StrictModel):
    """At most ``participations`` (k) steps of one record, ``separation`` (b) steps apart.

    Exactly b under ``fixed_epoch``, at least b under ``min_separation``.
    """

    schema_: Annotated[Literal["single", "fixed_epoch", "min_separation"], Field(alias="schema")]
    participations: Annotated[Integer, Field(ge=1)] | None = None
    separation: Annotated[Integer, Field(ge=1)] | None = None


class Workload(StrictModel):
    """What the released stream is summed into; it shapes the noise, not the guarantee.

    ``momentum`` is β of the heavy ball, and ``learning_rates`` has one for each step of the plan.
    """

    kind: Literal["prefix_sum", "momentum"] = "prefix_sum"
    momentum: Annotated[Real, Field(ge=0, lt=1)] | None = None
    learning_rates: Annotated[tuple[Positive, ...], Field(fail_fast=True)] | None = None
