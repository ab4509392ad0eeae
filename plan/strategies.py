"""Noise that is correlated across steps, as a plan writes it.

Each class is one form of ``noise:``, with the checks of its own fields; what it means (which
matrix N is injected, and how sensitive its inverse is) belongs to ``affidavit.mechanisms``.
``participation`` says in which steps one record may take part, and ``workload`` what the noise
is optimised for. ``Noise``, the union of these forms and of what installed packages add, stands
in ``affidavit.plan.extensions``.

T is the number of steps of the phase. z is independent noise of standard deviation 1, and
σ_g C_g w, w = N z, is what is injected; coefficients have no unit.

References: docs/theorems/correlated-noise.md; those of each family stand in its module of
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


LARGEST, LEAST = 1e100, 1e-100
"""Coefficients beyond these have squares that are not doubles."""
INVERSE_ROUNDING = 1e-12
"""Share of the diagonal up to which an entry above it is rounding, as a computed inverse has."""

Pointer = Callable[..., str]
"""From the names of a field of the noise to its JSON pointer in the plan."""


class NoiseForm(StrictModel):
    """One form of a plan's ``noise``; ``kind`` is a ``Literal`` of the kinds that it has.

    ``any_length`` says that its cost does not grow with the steps; ``examples`` has a smallest
    document of each kind, for a few dozen steps.
    """

    kind: str
    any_length: ClassVar[bool] = False
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()

    @property
    def depends_on_steps(self) -> bool:
        """Whether the strategy is made for its number of steps, which must then be given."""
        return False

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """Fields that are each valid and do not agree; whether it suits the run is asked later."""
        del pointer
        yield from ()

    @classmethod
    def kinds(cls) -> tuple[str, ...]:
        """The kinds that this form has."""
        return get_args(get_type_hints(cls)["kind"])


class Independent(NoiseForm):
    """Fresh noise at every step.

    With ``arithmetic: exact_grid`` noisy sums are rounded to a grid, exactly, so that their
    low-order bits say nothing of the data; otherwise noise is added in floating point.
    """

    kind: Literal["independent"] = "independent"
    arithmetic: Literal["exact_grid"] | None = None
    examples = ({"kind": "independent"}, {"kind": "independent", "arithmetic": "exact_grid"})


class Bidiagonal(NoiseForm):
    """w_t = z_t - λ z_{t-1}, z_0 = 0; without λ the best one for the workload."""

    kind: Literal["bidiagonal"]
    lambda_: Annotated[Annotated[Real, Field(ge=-1, le=1)] | None, Field(alias="lambda")] = None
    normalized: Annotated[bool, Field(strict=True)] = False
    any_length = True
    examples = ({"kind": "bidiagonal", "lambda": 0.5},)

    @property
    def depends_on_steps(self) -> bool:
        """Where the columns are normalised, or λ is to be found."""
        return self.normalized or self.lambda_ is None

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """λ is found for columns that are not normalised."""
        if self.lambda_ is None and self.normalized:
            yield missing_field(
                pointer("lambda"),
                "lambda can only be optimised without normalized columns.",
                "Give lambda, or remove normalized.",
            )


class Toeplitz(NoiseForm):
    """First column of the strategy C, zero afterwards."""

    kind: Literal["toeplitz"]
    coefficients: Coefficients
    examples = ({"kind": "toeplitz", "coefficients": [1, 0.5, 0.25]},)

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """The first coefficient is not zero, and their squares are doubles."""
        yield from _check_column(pointer("coefficients"), self.coefficients)


class ToeplitzInverse(NoiseForm):
    """First column of the injected noise matrix N = C⁻¹."""

    kind: Literal["toeplitz_inverse"]
    coefficients: Coefficients
    examples = ({"kind": "toeplitz_inverse", "coefficients": [1, -0.5]},)

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """The first coefficient is not zero, and their squares are doubles."""
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
        """Where the bands are optimised."""
        return self.kind in ("banded", "banded_inverse")

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """Every kind but ``sqrt`` has a number of bands."""
        if self.kind == "sqrt" and self.bands is not None:
            yield conflict(
                pointer("bands"), "sqrt takes no number of bands.", "Remove bands, or write bsr."
            )
        if self.kind != "sqrt" and self.bands is None:
            yield missing_field(
                pointer("bands"), f"{self.kind} needs a number of bands.", "Give bands."
            )


class BufferedLinearToeplitz(NoiseForm):
    """BLT: decays θ and scales ω given, or a number of buffers to have them optimised.

    ``objective`` is the error that optimised buffers make least: ``rms`` where it is left out.
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
        """Where the buffers are optimised."""
        return self.buffers is not None

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """Decays with as many scales, or buffers, for which alone there is an objective."""
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
    """The weighting Λ_τ of the objective, τ in steps; it never changes the injected noise."""

    tau: Annotated[Integer, Field(ge=1)]


class Dense(NoiseForm):
    """The optimal lower-triangular strategy for the workload: T x T, of least rms or max error."""

    kind: Literal["dense"]
    objective: Literal["rms", "max"] = "rms"
    convergence_aware: ConvergenceAware | None = None
    examples = ({"kind": "dense"},)

    @property
    def depends_on_steps(self) -> bool:
        """Always."""
        return True


class Tree(NoiseForm):
    """Binary-tree aggregation; with ``restart`` a new tree begins with every epoch."""

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
        """Always."""
        return True

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """Rows of a lower-triangular matrix, or a file with its digest."""
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
    if not LEAST <= abs(coefficients[0]) <= LARGEST:
        yield invalid_value(
            f"{pointer}/0",
            "the first coefficient is each step's own noise and must lie between 1e-100 and 1e100 "
            "in absolute value.",
            "Correct it.",
        )
    for place, value in enumerate(coefficients):
        if abs(value) > LARGEST:
            yield invalid_value(
                f"{pointer}/{place}", "the coefficient is above 1e100.", "Correct it."
            )
            return


def _check_rows(pointer: str, rows: tuple[tuple[float, ...], ...]) -> Iterator[Reason]:
    """The first row that is not one of a lower-triangular matrix with a diagonal."""
    for place, row in enumerate(rows):
        at_row = f"{pointer}/{place}"
        if len(row) != len(rows):
            yield invalid_value(
                at_row,
                f"the row has {len(row)} entries in a matrix of {len(rows)} rows.",
                "Give a square matrix.",
            )
            return
        if not LEAST <= abs(row[place]) <= LARGEST:
            yield invalid_value(
                f"{at_row}/{place}",
                "the diagonal is each step's own noise and must lie between 1e-100 and 1e100 in "
                "absolute value.",
                "Correct it.",
            )
            return
        later = next((at for at in range(place + 1, len(row)) if row[at] != 0), None)
        if later is not None and not _is_rounding(rows, place):
            yield invalid_value(
                f"{at_row}/{later}",
                "a step uses noise that is drawn later.",
                "Give a lower-triangular matrix.",
            )
            return
        if max(map(abs, row)) > LARGEST:
            yield invalid_value(at_row, "an entry is above 1e100.", "Correct it.")
            return


def _is_rounding(rows: tuple[tuple[float, ...], ...], place: int) -> bool:
    """Whether what stands above the diagonal in row ``place`` is as small as in an inverse."""
    diagonal = [abs(row[at]) if at < len(row) else 0.0 for at, row in enumerate(rows)]
    later = range(place + 1, len(rows))
    return all(
        abs(rows[place][at]) <= INVERSE_ROUNDING * min(diagonal[place], diagonal[at])
        for at in later
    )


FORMS: tuple[type[NoiseForm], ...] = (
    Independent,
    Bidiagonal,
    Toeplitz,
    ToeplitzInverse,
    SquareRoot,
    BufferedLinearToeplitz,
    Dense,
    Tree,
    Matrix,
)
"""The forms of noise that this package defines; the union ``Noise`` is built from them."""
NOISE_KINDS = frozenset(kind for form in FORMS for kind in form.kinds())
"""Every ``kind`` of ``FORMS``."""


class Participation(StrictModel):
    """At most ``participations`` (k) steps of one record, ``separation`` (b) steps apart.

    Exactly b under ``fixed_epoch``, at least b under ``min_separation``.
    """

    schema_: Annotated[Literal["single", "fixed_epoch", "min_separation"], Field(alias="schema")]
    participations: Annotated[Integer, Field(ge=1)] | None = None
    separation: Annotated[Integer, Field(ge=1)] | None = None

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """One participation has no separation; several have one."""
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
    """What the released stream is summed into; it shapes the noise, not the guarantee.

    ``momentum`` is β of the heavy ball, and ``learning_rates`` has one for each step of the plan.
    """

    kind: Literal["prefix_sum", "momentum"] = "prefix_sum"
    momentum: Annotated[Real, Field(ge=0, lt=1)] | None = None
    learning_rates: Annotated[tuple[Positive, ...], Field(fail_fast=True)] | None = None

    def check(self, pointer: Pointer) -> Iterator[Reason]:
        """Momentum and learning rates belong to the workload of momentum, which has the first."""
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
