"""A mechanism: what an optimiser releases, and why the rest of it is post-processing.

The description of an optimiser states what is released, how sensitive that is and where this is
proved, the post-processing of the noisy releases, the state that sees raw data (none, or it is
accounted), the obligations of the trainer, and the supported noise. A plan that the description
does not cover is refused by ``find_mismatches``, with the field to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from affidavit.plan import (
    GUARANTEE_FIELDS,
    NOISE_KINDS,
    OPTIMIZER_FIELDS,
    Denoise,
    Optimizer,
    Plan,
    Reason,
    events,
)

INDEPENDENT = frozenset({"independent"})
CORRELATED = NOISE_KINDS - INDEPENDENT
"""Kinds of noise that are correlated across steps."""
ANY_NOISE = INDEPENDENT | CORRELATED

MIN_NUMBER, MAX_NUMBER = 1e-100, 2**53 - 1
"""Bounds of every number of a plan; a range that reaches them is shown as open."""

JOINT = "C for flat clipping, C_g for block g; blocks of one step are joint"
JOINT_PROOF = "Triangle inequality for a clipped sum; arXiv:2605.12994v1, Theorem 2.1, for blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRun:
    """A run that is accounted as one release, because a state carries records across its steps.

    ``sensitivity`` maps steps to how far one record moves the run, in clip norms, rounded up.
    ``attained`` maps a joint noise multiplier and steps to a release that one record can cause.
    """

    sensitivity: Callable[[int], float]
    attained: Callable[[float, int], events.Event]


@dataclass(frozen=True, kw_only=True, slots=True)
class Obligation:
    """A requirement on the trainer, with a stable code.

    Affidavit's trainer meets those that it checks, or refuses to run. The others are declared by
    the user.
    """

    code: str
    text: str
    checked_by: Literal["trainer", "declared"] = "trainer"

    def as_dict(self) -> dict[str, str]:
        """Return the obligation as in a certificate."""
        return {"code": self.code, "text": self.text, "checked_by": self.checked_by}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanism:
    """The privacy-relevant description of one optimiser.

    ``takes`` are its fields of a plan's ``optimizer``; those of this package's mechanisms are in
    ``affidavit.plan.OPTIMIZER_FIELDS``. ``example`` has the fields of a minimal plan, besides
    ``BASE_PLAN``. ``check`` returns why a plan is not covered. ``whole_run`` returns the
    sensitivity of a phase whose steps are not released one by one, or None. A ``wrapper`` acts on
    the releases of any optimiser.
    """

    name: str
    kind: Literal["optimizer", "wrapper"] = "optimizer"
    title: str
    releases: str
    sensitivity: str
    proof: str
    post_processing: tuple[str, ...]
    state_on_raw_data: tuple[str, ...] = ()
    obligations: tuple[Obligation, ...] = ()
    needs_auxiliary_block: bool = False
    clipping: str = "flat, one norm over all tensors, or per block"
    noise: frozenset[str] = ANY_NOISE
    sources: tuple[str, ...]
    takes: frozenset[str] = frozenset()
    example: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Plan], list[Reason]] = lambda _plan: []
    whole_run: Callable[[Plan, int], WholeRun | None] = lambda _plan, _index: None

    def accepts(self, kind: str) -> bool:
        """Whether it is defined with noise of ``kind``; kinds of other packages are correlated."""
        return kind in self.noise or (kind not in NOISE_KINDS and self.noise >= CORRELATED)

    def find_mismatches(self, plan: Plan) -> list[Reason]:
        """Return why this mechanism does not describe ``plan``; empty if it does."""
        return [*self._noise_mismatch(plan), *self.check(plan)]

    @property
    def noise_description(self) -> str:
        """The supported kinds of noise, as text."""
        if self.noise == ANY_NOISE:
            return "any"
        return "correlated" if self.noise == CORRELATED else ", ".join(sorted(self.noise))

    def minimal_plan(self) -> dict[str, Any]:
        """Return the document of a minimal plan with this optimiser."""
        return {**BASE_PLAN, "optimizer": {"name": self.name}, **self.example}

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return its fields of a plan, with their ranges and whether they change the guarantee."""
        part = Optimizer if self.kind == "optimizer" else Denoise
        names = self._fields - {"name"}
        properties = part.model_json_schema()["properties"]
        return [
            {
                "field": name,
                "takes": _range(properties[name]),
                "meaning": field.description or "",
                "changes_the_guarantee": name in GUARANTEE_FIELDS,
            }
            for name, field in part.model_fields.items()
            if name in names
        ]

    @property
    def _fields(self) -> frozenset[str]:
        if self.kind == "wrapper":
            return frozenset(Denoise.model_fields)
        return OPTIMIZER_FIELDS.get(self.name, self.takes)

    def as_dict(self) -> dict[str, Any]:
        """Return the description as JSON data."""
        return {
            "name": self.name,
            "kind": self.kind,
            "title": self.title,
            "releases": self.releases,
            "sensitivity": self.sensitivity,
            "proof": self.proof,
            "post_processing": list(self.post_processing),
            "state_on_raw_data": list(self.state_on_raw_data),
            "obligations": [obligation.as_dict() for obligation in self.obligations],
            "needs_auxiliary_block": self.needs_auxiliary_block,
            "clipping": self.clipping,
            "noise": sorted(self.noise),
            "hyperparameters": self.hyperparameters(),
            "sources": list(self.sources),
            "minimal_plan": self.minimal_plan(),
        }

    def _noise_mismatch(self, plan: Plan) -> list[Reason]:
        return [
            Reason(
                code="noise_mismatch",
                pointer=plan.pointer(index, "noise", "kind"),
                message=f"{self.name} is defined with {self.noise_description} noise, "
                f"not {phase.noise.kind}.",
                remedy="Change noise.kind, or name the optimiser of your run.",
            )
            for index, phase in enumerate(plan.phases)
            if not self.accepts(phase.noise.kind)
        ]


BASE_PLAN: dict[str, Any] = {
    "version": 1,
    "dataset": {"name": "example", "size": 10000},
    "adjacency": "add_remove",
    "sampling": {"scheme": "poisson", "lot_size": 100},
    "steps": 100,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1}],
    "target": {"delta": 1e-5},
}
"""The common fields of the minimal plans of all mechanisms."""


def _range(schema: Mapping[str, Any]) -> str:
    """Return the range of a JSON schema as text: ``[0, 1)``, ``integer in [1, 64]``, ``a | b``."""
    (kind, *_) = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    if "enum" in kind:
        return " | ".join(kind["enum"])
    if "$ref" in kind:
        return "true | false | {threshold: ...}"
    least, most, below = (kind.get(key) for key in ("minimum", "maximum", "exclusiveMaximum"))
    low = f"[{least:g}" if least is not None and least != MIN_NUMBER else "(0"
    if most is not None and most < MAX_NUMBER:
        high = f"{most:g}]"
    else:
        high = "∞)" if below is None else f"{below:g})"
    return f"{'integer in ' if kind.get('type') == 'integer' else ''}{low}, {high}"
