"""The forms of correlated noise in a plan.

Each class is one form of ``noise:``, with the checks of its own fields. Their meaning (the injected
matrix N, and the sensitivity of its inverse) belongs to ``affidavit.mechanisms``.
``participation`` says in which steps one record may take part, and ``workload`` what the noise is
optimised for. ``Noise``, the union of these forms and those of installed packages, is in
``affidavit.plan.noise``.

T is the number of steps of the phase. z is independent noise of standard deviation 1, and
σ_g C_g w, w = N z, is injected; coefficients have no unit.

References: docs/theorems/correlated-noise.md; those of each family are in its module of
``affidavit.mechanisms.strategies``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import Field, StringConstraints

from affidavit.plan.diagnostics import Reason, conflict, invalid_value, missing_field
from affidavit.plan.types import Integer, Positive, Probability, Real, StrictModel, max_items

Coefficients = Annotated[
    tuple[Real, ...], Field(min_length=1, max_length=100_000, fail_fast=True), max_items(100_000)
]
MAX_MATRIX_STEPS = 4096
"""Steps up to which T x T matrices are formed, 128 MiB each."""
Rows = Annotated[
    tuple[Annotated[tuple[Real, ...], Field(fail_fast=True), max_items(MAX_MATRIX_STEPS)], ...],
    Field(min_length=1, fail_fast=True),
    max_items(MAX_MATRIX_STEPS),
]
Bands = Annotated[Integer, Field(ge=1)]
Sha256 = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{64}$")]


MAX_COEFFICIENT, MIN_COEFFICIENT = 1e100, 1e-100
"""The squares of coefficients beyond these are not doubles."""
INVERSE_ROUNDING = 1e-12
"""An entry above the diagonal up to this share of it counts as rounding of a computed inverse."""

Pointer = Callable[..., str]
"""From the path of a field within the noise to its JSON pointer in the plan."""


class NoiseForm(StrictModel):
    """One form of a plan's ``noise``; ``kind`` is a ``Literal`` of its kinds.

    ``any_length`` is true if its cost does not grow with the steps. ``examples`` has a minimal
    document of each kind, for a few dozen steps.
    """

    kind: str
    any_length: ClassVar[bool] = False
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()

    @property
    def depends_on_steps(self) -> bool:
        """Whether the strategy is made for its number of steps, which then cannot be solved for."""
        return False

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """Yield contradictions between fields; whether the noise suits the run is decided later."""
        del pointer
        yield from ()

    @classmethod
    def kinds(cls) -> tuple[str, ...]:
        """Return the kinds of this form."""
        return get_args(get_type_hints(cls)["kind"])


class Independent(NoiseForm):
    """Fresh noise at every step.

    With ``arithmetic: exact_grid``, noisy sums are rounded to a grid exactly, so their low-order
    bits reveal nothing about the data. Otherwise noise is added in floating point.
    """

    kind: Literal["independent"] = "independent"
    arithmetic: Literal["exact_grid"] | None = None
    examples = ({"kind": "independent"}, {"kind": "independent", "arithmetic": "exact_grid"})


class Bidiagonal(NoiseForm):
    """w_t = z_t - λ z_{t-1}, z_0 = 0; λ is optimised for the workload if it is not given."""

    kind: Literal["bidiagonal"]
    lambda_: Annotated[Annotated[Real, Field(ge=-1, le=1)] | None, Field(alias="lambda")] = None
    normalized: Annotated[bool, Field(strict=True)] = False
    any_length = True
    examples = ({"kind": "bidiagonal", "lambda": 0.5},)

    @property
    def depends_on_steps(self) -> bool:
        """Whether the columns are normalised or λ is optimised."""
        return self.normalized or self.lambda_ is None

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """λ is optimised only without normalised columns."""
        if self.lambda_ is None and self.normalized:
            yield missing_field(
                pointer("lambda"),
                "lambda can only be optimised without normalized columns.",
                "Give lambda, or remove normalized.",
            )


class Toeplitz(NoiseForm):
    """The first column of the strategy C, zero beyond the given coefficients."""

    kind: Literal["toeplitz"]
    coefficients: Coefficients
    examples = ({"kind": "toeplitz", "coefficients": [1, 0.5, 0.25]},)

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """The first coefficient is not zero, and all squares are doubles."""
        yield from _check_column(pointer("coefficients"), self.coefficients)


class ToeplitzInverse(NoiseForm):
    """The first column of the injected noise matrix N = C⁻¹."""

    kind: Literal["toeplitz_inverse"]
    coefficients: Coefficients
    examples = ({"kind": "toeplitz_inverse", "coefficients": [1, -0.5]},)

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """The first coefficient is not zero, and all squares are doubles."""
        yield from _check_column(pointer("coefficients"), self.coefficients)


class SquareRoot(NoiseForm):
    """The square root of the workload and its banded relatives.

    ``bands`` counts the bands of C for ``bsr`` and ``banded``, those of N for ``bisr`` and
    ``banded_inverse``; ``sqrt`` takes none.
    """

    kind: Literal["sqrt", "bsr", "bisr", "banded_inverse", "banded"]
    bands: Bands | None = None
    examples = (
        {"kind": "sqrt"},
        {"kind": "bsr", "bands": 3},
        {"kind": "bisr", "bands": 3},
        {"kind": "banded_inverse", "bands": 3},
        {"kind": "banded", "bands": 3},
    )

    @property
    def depends_on_steps(self) -> bool:
        """Whether the bands are optimised."""
        return self.kind in ("banded", "banded_inverse")

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """Every kind except ``sqrt`` has a number of bands."""
        if self.kind == "sqrt" and self.bands is not None:
            yield conflict(
                pointer("bands"), "sqrt takes no number of bands.", "Remove bands, or write bsr."
            )
        if self.kind != "sqrt" and self.bands is None:
            yield missing_field(
                pointer("bands"), f"{self.kind} needs a number of bands.", "Give bands."
            )


class FractionalRoot(NoiseForm):
    """N has the first ``bands`` coefficients of A^-γ, A the workload at a constant rate.

    γ = 1/2 is ``bisr``. γ is optimised for the workload if it is not given.
    """

    kind: Literal["bifr"]
    bands: Bands
    gamma: Annotated[Real, Field(gt=0, le=1)] | None = None
    examples = ({"kind": "bifr", "bands": 3}, {"kind": "bifr", "bands": 3, "gamma": 0.8})

    @property
    def depends_on_steps(self) -> bool:
        """Whether γ is optimised."""
        return self.gamma is None


class BufferedLinearToeplitz(NoiseForm):
    """BLT with given decays θ and scales ω, or with a number of optimised buffers.

    ``objective`` is the error that the buffers minimise, by default ``rms``.
    """

    kind: Literal["blt"]
    decays: (
        Annotated[tuple[Probability, ...], Field(min_length=1, fail_fast=True), max_items(64)]
        | None
    ) = None
    scales: (
        Annotated[tuple[Positive, ...], Field(min_length=1, fail_fast=True), max_items(64)] | None
    ) = None
    buffers: Annotated[Integer, Field(ge=1, le=64)] | None = None
    objective: Literal["rms", "max"] | None = None
    any_length = True
    examples = ({"kind": "blt", "decays": [0.5], "scales": [0.25]}, {"kind": "blt", "buffers": 1})

    @property
    def depends_on_steps(self) -> bool:
        """Whether the buffers are optimised."""
        return self.buffers is not None

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """Either decays and as many scales, or buffers and an optional objective."""
        if (self.buffers is None) == (self.decays is None):
            yield conflict(
                pointer(),
                "a BLT takes either decays and scales, or a number of buffers.",
                "Give one of the two.",
            )
        if self.objective is not None and self.buffers is None:
            yield conflict(
                pointer("objective"),
                "objective applies only to a number of buffers.",
                "Remove objective, or give a number of buffers.",
            )
        if len(self.decays or ()) != len(self.scales or ()):
            yield conflict(
                pointer("scales"),
                "a BLT needs as many scales as decays.",
                "Give one scale per decay.",
            )


class ConvergenceAware(StrictModel):
    """The weighting Λ_τ of the objective, τ in steps, which does not change the injected noise."""

    tau: Annotated[Integer, Field(ge=1)]


class Dense(NoiseForm):
    """The optimal lower-triangular T x T strategy for the rms or maximum error of the workload."""

    kind: Literal["dense"]
    objective: Literal["rms", "max"] = "rms"
    convergence_aware: ConvergenceAware | None = None
    examples = ({"kind": "dense"},)

    @property
    def depends_on_steps(self) -> bool:
        """Always true."""
        return True


class Tree(NoiseForm):
    """Binary-tree aggregation; with ``restart``, each epoch begins a new tree.

    An epoch of full batches is one step, and one of ``cyclic_poisson`` a turn of all groups.
    """

    kind: Literal["tree"]
    restart: Annotated[bool, Field(strict=True)] = False
    examples = ({"kind": "tree"}, {"kind": "tree", "restart": True})


class Matrix(NoiseForm):
    """The injected noise matrix N itself, T x T, in rows or as a file with its digest."""

    kind: Literal["matrix"]
    rows: Rows | None = None
    file: Annotated[str, StringConstraints(strict=True, max_length=1000)] | None = None
    sha256: Sha256 | None = None

    @property
    def depends_on_steps(self) -> bool:
        """Always true."""
        return True

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """Either the rows of a lower-triangular matrix, or a file with its digest."""
        if (self.rows is None) == (self.file is None):
            yield conflict(
                pointer(),
                "a noise matrix takes either rows or file.",
                "Give rows, or file with its sha256.",
            )
        if self.file is not None and self.sha256 is None:
            yield missing_field(
                pointer("sha256"),
                "sha256 is missing; the file could change without it.",
                "Give its sha256.",
            )
        if self.rows is not None:
            yield from _check_rows(pointer("rows"), self.rows)


def _check_column(pointer: str, coefficients: tuple[float, ...]) -> Iterator[Reason]:
    if not MIN_COEFFICIENT <= abs(coefficients[0]) <= MAX_COEFFICIENT:
        yield invalid_value(
            f"{pointer}/0",
            "the first coefficient scales the noise of each step and must lie between 1e-100 and "
            "1e100 in absolute value.",
            "Correct it.",
        )
    for place, value in enumerate(coefficients):
        if abs(value) > MAX_COEFFICIENT:
            yield invalid_value(
                f"{pointer}/{place}", "the coefficient is above 1e100.", "Correct it."
            )
            return


def _check_rows(pointer: str, rows: tuple[tuple[float, ...], ...]) -> Iterator[Reason]:
    """Yield the error of the first row that is not part of a lower-triangular matrix."""
    for index, row in enumerate(rows):
        row_pointer = f"{pointer}/{index}"
        if len(row) != len(rows):
            yield invalid_value(
                row_pointer,
                f"the row has {len(row)} entries in a matrix of {len(rows)} rows.",
                "Give a square matrix.",
            )
            return
        if not MIN_COEFFICIENT <= abs(row[index]) <= MAX_COEFFICIENT:
            yield invalid_value(
                f"{row_pointer}/{index}",
                "the diagonal scales the noise of each step and must lie between 1e-100 and "
                "1e100 in absolute value.",
                "Correct it.",
            )
            return
        later = next((at for at in range(index + 1, len(row)) if row[at] != 0), None)
        if later is not None and not _is_rounding(rows, index):
            yield invalid_value(
                f"{row_pointer}/{later}",
                "a step uses the noise of a later step.",
                "Give a lower-triangular matrix.",
            )
            return
        if max(map(abs, row)) > MAX_COEFFICIENT:
            yield invalid_value(row_pointer, "an entry is above 1e100.", "Correct it.")
            return


def _is_rounding(rows: tuple[tuple[float, ...], ...], index: int) -> bool:
    """Whether the entries above the diagonal in row ``index`` are rounding of an inverse."""
    diagonal = [abs(row[at]) if at < len(row) else 0.0 for at, row in enumerate(rows)]
    return all(
        abs(rows[index][at]) <= INVERSE_ROUNDING * min(diagonal[index], diagonal[at])
        for at in range(index + 1, len(rows))
    )


FORMS: tuple[type[NoiseForm], ...] = (
    Independent,
    Bidiagonal,
    Toeplitz,
    ToeplitzInverse,
    SquareRoot,
    FractionalRoot,
    BufferedLinearToeplitz,
    Dense,
    Tree,
    Matrix,
)
"""The forms of noise of this package, of which ``Noise`` is the union."""
NOISE_KINDS = frozenset(kind for form in FORMS for kind in form.kinds())
"""Every ``kind`` of ``FORMS``."""


class Participation(StrictModel):
    """At most ``participations`` (k) steps of one record, ``separation`` (b) steps apart.

    The distance is exactly b for ``fixed_epoch`` and at least b for ``min_separation``.
    """

    schema_: Annotated[Literal["single", "fixed_epoch", "min_separation"], Field(alias="schema")]
    participations: Annotated[Integer, Field(ge=1)] | None = None
    separation: Annotated[Integer, Field(ge=1)] | None = None

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """Only several participations have a separation."""
        if self.schema_ != "single":
            if self.separation is None:
                yield missing_field(
                    pointer("separation"),
                    f"{self.schema_} needs separation, the steps between participations.",
                    "Give separation.",
                )
            return
        if self.participations not in (None, 1):
            yield conflict(
                pointer("participations"),
                "single takes one participation.",
                "Write fixed_epoch, or remove it.",
            )
        if self.separation is not None:
            yield conflict(
                pointer("separation"), "a single participation has no separation.", "Remove it."
            )


class Workload(StrictModel):
    """The sums of releases that the noise is optimised for; they do not change the guarantee.

    ``momentum`` is β of the heavy ball. ``learning_rates`` has one rate per step of the plan.
    """

    kind: Literal["prefix_sum", "momentum"] = "prefix_sum"
    momentum: Annotated[Real, Field(ge=0, lt=1)] | None = None
    learning_rates: Annotated[tuple[Positive, ...], Field(fail_fast=True)] | None = None

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """The momentum workload requires momentum and may have learning rates."""
        for name in ("momentum", "learning_rates"):
            if self.kind == "prefix_sum" and getattr(self, name) is not None:
                yield conflict(
                    pointer(name),
                    f"prefix_sum has no {name}.",
                    "Remove it, or write kind: momentum.",
                )
        if self.kind == "momentum" and self.momentum is None:
            yield missing_field(
                pointer("momentum"),
                "a momentum workload needs momentum.",
                "Give momentum; 0 is plain SGD with learning rates.",
            )
