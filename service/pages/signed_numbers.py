"""The numbers that a certificate's statement signs, as text rounded outward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from affidavit.certificate import verdict_sentence
from affidavit.certificate.policy import refused_by_policy
from affidavit.service.pages.text import ADJACENCIES, down, plain, up

UNITS = {"example": "record", "user": "user"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarantee:
    """The proved guarantee: ε in nats between its bounds at δ; all are decimals rounded outward.

    ``digits`` are the bounds and δ as they are signed.
    """

    epsilon_at_most: str
    epsilon_at_least: str
    delta: str
    adjacency: str
    unit: str
    confidence: str | None
    target_epsilon: str | None
    target_delta: str | None
    mu: str | None
    digits: tuple[tuple[str, str], ...]

    @property
    def words(self) -> str:
        """The guarantee in one line, with everything that gives the number its meaning."""
        chance = "" if self.confidence is None else f" with confidence {self.confidence}"
        return (
            f"ε ≤ {self.epsilon_at_most} at δ = {self.delta}{chance} "
            f"({self.adjacency}, per {self.unit})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The noise multiplier of one release, over its clip norm on the sum."""

    release: str
    blocks: int
    given: str | None
    required: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One engine's bracket of ε at the certificate's δ."""

    name: str
    version: str
    at_least: str
    at_most: str
    decides: bool
    agrees: str


def guarantee_of(predicate: Mapping[str, Any]) -> Guarantee | None:
    """The guarantee; None if nothing is proved."""
    guarantee = predicate["guarantee"]
    if guarantee is None:
        return None
    return Guarantee(
        epsilon_at_most=up(guarantee["epsilon"]["upper"]),
        epsilon_at_least=down(guarantee["epsilon"]["lower"]),
        delta=up(guarantee["delta"]["upper"]),
        adjacency=ADJACENCIES.get(guarantee["adjacency"], guarantee["adjacency"]),
        unit=UNITS.get(guarantee["unit"], guarantee["unit"]),
        confidence=guarantee.get("confidence"),
        target_epsilon=_rounded(guarantee["target"]["epsilon"]),
        target_delta=_rounded(guarantee["target"]["delta"]),
        mu=up(guarantee["mu"]),
        digits=(
            ("ε at most", str(guarantee["epsilon"]["upper"])),
            ("ε at least", str(guarantee["epsilon"]["lower"])),
            ("δ", str(guarantee["delta"]["upper"])),
        ),
    )


def noise_of(release: Mapping[str, Any]) -> Noise:
    """The noise of one release."""
    phase = f"phase {release['phase'] + 1}, " if "phase" in release else ""
    return Noise(
        release=f"{phase}{release['name']}",
        blocks=release["count"],
        given=down(release["given"], 7),
        required=up(release["required"]),
    )


def engines_of(predicate: Mapping[str, Any]) -> tuple[Engine, ...]:
    """The engines, the one that decides first."""
    accountants = predicate["accountants"]
    return tuple(
        Engine(
            name=accountant["name"],
            version=accountant["version"],
            at_least=down(accountant["epsilon"]["lower"], 8),
            at_most=up(accountant["epsilon"]["upper"], 8),
            decides=number == 0,
            agrees=_agrees(accountants[0]["epsilon"], accountant["epsilon"])
            if number
            else "decides",
        )
        for number, accountant in enumerate(accountants)
    )


def _agrees(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    apart = float(one["upper"]) < float(other["lower"]) or float(other["upper"]) < float(
        one["lower"]
    )
    return "near" if apart else "meets"


def claim_of(plan: Mapping[str, Any]) -> str | None:
    """The ε that the plan claims; None if it claims none."""
    epsilon = (plan.get("claim") or {}).get("epsilon")
    return None if epsilon is None else str(epsilon)


def sentence(predicate: Mapping[str, Any], guarantee: Guarantee | None) -> str:
    """The verdict in one sentence."""
    codes = [reason["code"] for reason in predicate["reasons"]]
    return verdict_sentence(
        predicate["verdict"],
        None if guarantee is None else guarantee.words,
        "" if guarantee is None else _target(predicate["plan"], guarantee),
        by_policy=refused_by_policy(predicate["verdict"], codes),
    )


def _target(plan: Mapping[str, Any], guarantee: Guarantee) -> str:
    if guarantee.target_epsilon is not None:
        return f"the target is ε = {guarantee.target_epsilon}"
    claimed = claim_of(plan)
    return "less is claimed" if claimed is None else f"ε = {claimed} is claimed"


def agreement(engines: tuple[Engine, ...]) -> str:
    """How the engines agree, in one sentence."""
    if not engines:
        return "No engine ran: the plan was refused before accounting."
    if len(engines) == 1:
        return "One engine supports this plan; there is no independent second opinion."
    others = [engine for engine in engines if not engine.decides]
    if all(other.agrees == "meets" for other in others):
        return f"{len(engines)} independent engines agree: their brackets of ε overlap."
    return (
        "The engines agree within the documented accuracy of the second. Where brackets do not "
        "overlap, ours decides, which is proved on both sides."
    )


def _rounded(text: str | None) -> str | None:
    return None if text is None else plain(float(text))
