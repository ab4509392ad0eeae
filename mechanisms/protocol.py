"""A mechanism: what an optimiser releases, and why the rest of it costs nothing.

Every optimiser has a file of its own that states, for a reader who wants to check it: what
is released, how sensitive that is and where this is proved, what is done with the noisy
releases afterwards (post-processing, free), which state sees raw data (none, or it is
accounted), what the trainer is obliged to, and which noise it may be run with. A plan that
the statements do not cover is refused by ``find_mismatches``, with the field to change.
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
    Event,
    Optimizer,
    Plan,
    Reason,
)

INDEPENDENT = frozenset({"independent"})
CORRELATED = NOISE_KINDS - INDEPENDENT
"""Kinds of noise that are correlated across steps."""
ANY_NOISE = INDEPENDENT | CORRELATED

SMALLEST, LARGEST = 1e-100, 2**53 - 1
"""Bounds of every number of a plan; beyond them a range is said to be open."""

JOINT = "C for flat clipping, C_g for block g; blocks of one step are joint"
JOINT_PROOF = "Triangle inequality for a clipped sum; arXiv:2605.12994v1, Theorem 2.1, for blocks"


def _nothing(_plan: Plan) -> list[Reason]:
    return []


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRun:
    """A run that is accounted as one release, because a state carries records across its steps.

    ``sensitivity`` goes from steps to how far one record moves the run, in clip norms, rounded up;
    ``attained`` from a joint noise multiplier and steps to a release that one record can cause.
    """

    sensitivity: Callable[[int], float]
    attained: Callable[[float, int], Event]


def _step_by_step(_plan: Plan, _phase: int) -> WholeRun | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Obligation:
    """One thing that the trainer must do, by a stable code.

    Our trainer refuses to run what it does not keep, so what it keeps is ``checked_by`` it;
    the rest is ``declared`` by whoever runs the plan.
    """

    code: str
    text: str
    checked_by: Literal["trainer", "declared"] = "trainer"

    def as_dict(self) -> dict[str, str]:
        """The obligation as it stands in a certificate."""
        return {"code": self.code, "text": self.text, "checked_by": self.checked_by}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanism:
    """The privacy-relevant description of one optimiser.

    ``takes`` are the fields of a plan's ``optimizer`` that it has; those of this package's
    mechanisms stand in ``affidavit.plan.TAKES``. ``example`` are the fields of a smallest plan,
    over ``BASE``. ``check`` refuses what the statements do not cover. ``whole_run`` gives a
    phase's sensitivity where its steps are not released one by one; None leaves it to the
    sampler and the noise. A ``wrapper`` acts on the releases of any optimiser.
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
    check: Callable[[Plan], list[Reason]] = _nothing
    whole_run: Callable[[Plan, int], WholeRun | None] = _step_by_step

    def accepts(self, kind: str) -> bool:
        """Whether it is defined with noise of ``kind``; that of other packages is correlated."""
        return kind in self.noise or (kind not in NOISE_KINDS and self.noise >= CORRELATED)

    def find_mismatches(self, plan: Plan) -> list[Reason]:
        """Why ``plan`` is not what this mechanism describes; empty if it is."""
        return [*self._noise_mismatch(plan), *self.check(plan)]

    @property
    def noise_description(self) -> str:
        """The kinds of noise that it may be run with."""
        if self.noise == ANY_NOISE:
            return "any"
        return "correlated" if self.noise == CORRELATED else ", ".join(sorted(self.noise))

    def minimal_plan(self) -> dict[str, Any]:
        """The document of a smallest plan with this optimiser."""
        return {**BASE, "optimizer": {"name": self.name}, **self.example}

    def hyperparameters(self) -> list[dict[str, Any]]:
        """The plan's fields that it takes, with their ranges and what each costs."""
        part = Optimizer if self.kind == "optimizer" else Denoise
        takes = self._fields - {"name"}
        properties = part.model_json_schema()["properties"]
        return [
            {
                "field": name,
                "takes": _range(properties[name]),
                "meaning": field.description or "",
                "changes_the_guarantee": name in GUARANTEE_FIELDS,
            }
            for name, field in part.model_fields.items()
            if name in takes
        ]

    @property
    def _fields(self) -> frozenset[str]:
        if self.kind == "wrapper":
            return frozenset(Denoise.model_fields)
        return OPTIMIZER_FIELDS.get(self.name, self.takes)

    def as_dict(self) -> dict[str, Any]:
        """The description as the command line and the service show it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "title": self.title,
            "releases": self.releases,
            "sensitivity": self.sensitivity,
            "proof": self.proof,
            "post_processing": list(self.post_processing),
            "state_on_raw_data": list(self.state_on_raw_data),
            "obligations": [oblige.as_dict() for oblige in self.obligations],
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
                remedy="Change noise.kind, or name the optimiser that you run.",
            )
            for index, phase in enumerate(plan.phases)
            if not self.accepts(phase.noise.kind)
        ]


BASE: dict[str, Any] = {
    "version": 1,
    "dataset": {"name": "example", "size": 10000},
    "adjacency": "add_remove",
    "sampling": {"scheme": "poisson", "lot_size": 100},
    "steps": 100,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1}],
    "target": {"delta": 1e-5},
}
"""What the smallest plans of all mechanisms share."""


def _range(schema: Mapping[str, Any]) -> str:
    """A JSON schema's range in words: ``[0, 1)``, ``integer in [1, 64]``, ``a | b``."""
    (kind, *_) = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    if "enum" in kind:
        return " | ".join(kind["enum"])
    if "$ref" in kind:
        return "true | false | {threshold: ...}"
    least, most, below = (kind.get(key) for key in ("minimum", "maximum", "exclusiveMaximum"))
    low = f"[{least:g}" if least is not None and least != SMALLEST else "(0"
    if most is not None and most < LARGEST:
        high = f"{most:g}]"
    else:
        high = "∞)" if below is None else f"{below:g})"
    return f"{'integer in ' if kind.get('type') == 'integer' else ''}{low}, {high}"
