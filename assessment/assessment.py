"""An assessment: the proved bounds of a plan, and the verdict that follows.

``affidavit.assessment.certification`` builds it; it is then printed, signed and stored.
``as_result`` is the result document that the command line prints and the HTTP service returns. All
numbers in it are finite; an unbounded upper end is null.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from affidavit.accountants import Bracket, decimal_down, decimal_up
from affidavit.plan import Adjacency, Reason

if TYPE_CHECKING:
    from affidavit.accountants import GaussianBound

Verdict = Literal["certified", "under_noised", "unproved", "refused", "undecided"]
ClaimAnswer = Literal["holds", "refuted", "not_decided"]
"""The answer to a claim: its largest number is not below the upper bound, is below the lower
bound, or lies between the two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Confidence:
    """The probability with which a sampled bracket holds, and the seed of its random draws."""

    level: float
    seed: str

    def __str__(self) -> str:
        return f"with confidence {decimal_down(self.level)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Opinion:
    """One engine's bracket of ε, in nats, at the plan's δ; without ``confidence`` it is certain."""

    name: str
    version: str
    epsilon: Bracket
    confidence: Confidence | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the opinion as a result document has it."""
        result = {"name": self.name, "version": self.version, "epsilon": interval(self.epsilon)}
        if self.confidence is None:
            return result
        return {**result, "confidence": self.confidence.level, "seed": self.confidence.seed}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupBound:
    """ε in nats of data sets that differ in up to ``records`` records, by ``relation``.

    If the plan's unit is a user, ``records`` counts users. ``epsilon`` is None if no theorem bounds
    it; ``reasons`` say why.
    """

    records: int
    relation: Adjacency
    epsilon: Bracket | None
    confidence: Confidence | None = None
    reasons: tuple[Reason, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the bound as a result document has it."""
        return {
            "records": self.records,
            "relation": self.relation,
            "epsilon": interval(self.epsilon),
            "confidence": None if self.confidence is None else self.confidence.level,
            "reasons": [reason.as_dict() for reason in self.reasons],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CapNeeds:
    """What a plan needs in order to meet a policy's cap ``epsilon`` (nats), in words.

    ``needs`` is the noise, the steps or the lots of a plan that was certified at the cap; it is
    empty if no such plan was found.
    """

    epsilon: float
    needs: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseNoise:
    """One release's noise multiplier as the plan gives it and as the target requires it."""

    name: str
    count: int
    required: float | None
    given: float | None
    phase: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the release as a result document has it; ``phase`` is omitted if it is None."""
        result = asdict(self)
        if self.phase is None:
            del result["phase"]
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Caveat:
    """A warning that changes no number."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """The results for one plan.

    ``epsilon`` (nats) and ``delta`` are the guarantee's brackets; the targets are the plan's.
    ``joint`` is σ_joint of a step and ``sensitivity`` how far one record moves the run, in clip
    norms, each if all phases share one. ``mu`` is the Gaussian-DP parameter if the run is exactly
    one Gaussian mechanism. ``proof`` is the witness that the checker accepted, ``proof_problem``
    the reason why there is none; both are None if no proof was requested. ``gaussian`` is the least
    Gaussian curve that bounds the guarantee at every ε, ``gaussian_problem`` the reason why there
    is none, likewise. ``groups`` are the requested bounds of larger groups and of other relations.
    ``cap`` is what a policy's cap on ε needs, if it was computed.
    """

    verdict: Verdict
    plan_digest: str
    plan: dict[str, Any]
    adjacency: Adjacency
    unit: str
    epsilon: Bracket | None = None
    delta: Bracket | None = None
    target_epsilon: float | None = None
    target_delta: float | None = None
    joint: float | None = None
    releases: tuple[ReleaseNoise, ...] = ()
    allocation: dict[str, Any] | None = None
    sensitivity: float | None = None
    strategies: tuple[dict[str, Any], ...] = ()
    mu: float | None = None
    sampling: tuple[dict[str, Any], ...] = ()
    accountants: tuple[Opinion, ...] = ()
    confidence: Confidence | None = None
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[Caveat, ...] = ()
    planning: tuple[dict[str, Any], ...] = ()
    obligations: tuple[dict[str, str], ...] = ()
    assumptions: tuple[str, ...] = ()
    proof: dict[str, Any] | None = None
    proof_problem: Reason | None = None
    gaussian: GaussianBound | None = None
    gaussian_problem: Reason | None = None
    groups: tuple[GroupBound, ...] = ()
    cap: CapNeeds | None = None

    @property
    def epsilon_text(self) -> str | None:
        """The proved upper bound of ε, rounded up; None if nothing is proved."""
        if self.epsilon is None or self.verdict in ("refused", "undecided"):
            return None
        upper = self.epsilon.upper
        return decimal_up(upper, 6) if math.isfinite(upper) else "not bounded"

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the reasons."""
        return tuple(reason.code for reason in self.reasons)

    @property
    def level(self) -> float | None:
        """The confidence of the bounds; None if they are certain."""
        return None if self.confidence is None else self.confidence.level

    @property
    def confidence_suffix(self) -> str:
        """The confidence in words after a space; empty if the bounds are certain."""
        return "" if self.confidence is None else f" {self.confidence}"

    @property
    def headline(self) -> str:
        """The verdict in one sentence, to six digits."""
        bound = None
        if self.epsilon is not None and self.delta is not None:
            bound = (
                f"ε ≤ {decimal_up(self.epsilon.upper, 6)} at δ = {decimal_up(self.delta.upper, 6)}"
                f"{self.confidence_suffix}, under {self.adjacency}, for one {self.unit}"
            )
        target = None if self.target_epsilon is None else f"{self.target_epsilon:g}"
        goal = goal_of(self.plan, target, self.codes)
        sentence = verdict_sentence(self.verdict, bound, goal, self.codes)
        return sentence[:1].lower() + sentence[1:]

    @property
    def joint_text(self) -> str | None:
        """The joint noise multiplier to six digits."""
        return None if self.joint is None else f"{self.joint:.6g}"

    def as_result(self) -> dict[str, Any]:
        """Return the result document, without its certificate.

        It has a ``strategy`` of correlated noise, ``groups`` and ``gaussian_bound`` if requested.
        """
        result: dict[str, Any] = {}
        if self.strategies:
            several = len(self.strategies) > 1
            result["strategy"] = list(self.strategies) if several else self.strategies[0]
        if self.groups:
            result["groups"] = [bound.as_dict() for bound in self.groups]
        if self.gaussian is not None or self.gaussian_problem is not None:
            bound, problem = self.gaussian, self.gaussian_problem
            result["gaussian_bound"] = {
                **({} if bound is None else asdict(bound)),
                "reasons": [] if problem is None else [problem.as_dict()],
            }
        return result | {
            "verdict": self.verdict,
            "plan_digest": self.plan_digest,
            "epsilon": interval(self.epsilon),
            "delta": interval(self.delta),
            "confidence": self.level,
            "target": {"epsilon": self.target_epsilon, "delta": self.target_delta},
            "adjacency": self.adjacency,
            "unit": self.unit,
            "noise_multiplier": {
                "joint": self.joint,
                "releases": [release.as_dict() for release in self.releases],
            },
            "allocation": self.allocation,
            "sensitivity": self.sensitivity,
            "mu": self.mu,
            "sampling": self.sampling[0] if len(self.sampling) == 1 else list(self.sampling),
            "accountants": [opinion.as_dict() for opinion in self.accountants],
            "reasons": [reason.as_dict() for reason in self.reasons],
            "warnings": [asdict(warning) for warning in self.warnings],
            "planning": list(self.planning),
            "obligations": list(self.obligations),
            "assumptions": list(self.assumptions),
        }


POLICY_CODE_PREFIX = "policy_"
"""The prefix of the codes of a policy's reasons, and of no other reasons."""


def is_refused_by_policy(verdict: str, codes: Collection[str]) -> bool:
    """Whether a plan is refused by its policy alone, so that its numbers hold.

    >>> [is_refused_by_policy("refused", [code]) for code in ("policy_unit", "unsound")]
    [True, False]
    """
    by_policy = bool(codes) and all(code.startswith(POLICY_CODE_PREFIX) for code in codes)
    return verdict == "refused" and by_policy


CLAIM_CODES = frozenset({"claim_below_certified", "claim_not_decided"})
"""The codes of the reasons that concern a claim."""


def goal_of(plan: Mapping[str, Any], target: str | None, codes: Collection[str]) -> str:
    """Return what a plan's bound is compared with, in words: its ``target``, or its claim.

    The claim is, if the target is missing or met; ``plan`` is the plan's document.

    >>> goal_of({"claim": {"epsilon": "2"}}, "3", ["claim_not_decided"])
    'ε = 2 is claimed'
    >>> goal_of({"claim": {"epsilon": "2"}}, "3", ["unproved", "claim_not_decided"])
    'the target is ε = 3'
    """
    claim = plan.get("claim") or {}
    is_met = bool(CLAIM_CODES.intersection(codes)) and not {"under_noised", "unproved"} & {*codes}
    if target is not None and not is_met:
        return f"the target is ε = {target}"
    if (sigma := claim.get("noise_multiplier")) is not None:
        return f"σ = {sigma} is claimed"
    return f"ε = {claim.get('epsilon')} is claimed"


def verdict_sentence(
    verdict: str, bound: str | None, goal: str, codes: Collection[str] = ()
) -> str:
    """Return a verdict as one sentence, which never claims a lower bound.

    ``bound`` is the proved guarantee in words, or None; ``goal`` is what it is compared with
    (``goal_of``), and ``codes`` are those of the reasons. A refusal that is not the policy's alone
    has no bound.

    >>> verdict_sentence("under_noised", "ε ≤ 3 at δ = 1e-5", "ε = 2 is claimed")
    'Under-noised: ε = 2 is claimed, and the proved bound is ε ≤ 3 at δ = 1e-5.'
    """
    if verdict == "undecided":
        if "open_use" in codes:
            return "Undecided: a use of private objects is not understood; nothing is certified."
        return "Undecided: two accountants disagree, so nothing is certified."
    if bound is None or (verdict == "refused" and not is_refused_by_policy(verdict, codes)):
        return "Refused: no guarantee can be certified for this plan."
    match verdict:
        case "certified":
            return f"Certified: {bound}."
        case "under_noised":
            return f"Under-noised: {goal}, and the proved bound is {bound}."
        case "unproved":
            return f"Unproved: {goal}, which may hold or not; the proved bound is {bound}."
        case _:
            return f"Refused by the policy; the proved bound is {bound}."


def malformed_result(reasons: tuple[Reason, ...]) -> dict[str, Any]:
    """Return the result document of a malformed plan: a refusal without a certificate."""
    return {
        "verdict": "refused",
        "plan_digest": None,
        "epsilon": None,
        "delta": None,
        "accountants": [],
        "reasons": [reason.as_dict() for reason in reasons],
        "warnings": [],
        "obligations": [],
    }


def interval(bracket: Bracket | None) -> dict[str, float | None] | None:
    """Return a bracket as JSON data; an infinite upper end is null."""
    if bracket is None:
        return None
    upper = bracket.upper if math.isfinite(bracket.upper) else None
    return {"lower": bracket.lower, "upper": upper}
