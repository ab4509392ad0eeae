"""What a certificate's statement signs: its numbers as text rounded outward, and a checklist.

The checklist follows NIST SP 800-226, which demands more of a claim of differential privacy than
its ε: what the privacy unit is, who is trusted, how noise is generated, what leaks beside the
output. Each item says what holds for this certificate, with one of three marks:

``checked``
    proved by the accounting, verified here, or found in the record of a conforming run;
``declared``
    stated in the plan or left to the trainer, and not verified;
``open``
    not covered by this certificate: somebody else is responsible for it.

Reference: NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees
(March 2025), the privacy pyramid and its hazards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from affidavit.certificate import verdict_sentence
from affidavit.service.pages.text import ADJACENCIES, capitalized, down, plain, up


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
        unit=guarantee["unit"],
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
    return verdict_sentence(
        predicate["verdict"],
        None if guarantee is None else guarantee.words,
        "" if guarantee is None else _target(predicate["plan"], guarantee),
        [reason["code"] for reason in predicate["reasons"]],
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


Mark = Literal["checked", "declared", "open"]
SAMPLING = frozenset(
    {"sampler_of_the_plan", "cryptographic_generator", "empty_lot_counts", "one_lot_for_all_blocks"}
)
"""Obligations about how records are drawn; the others are about clipping and noise."""
DEPLOYMENT = (
    (
        "Hyperparameters",
        "Were choices made by looking at the data?",
        "Only what the plan lists under extra is counted; other tuning is not.",
    ),
    (
        "Side channels",
        "Do time, memory or logs reveal something?",
        "Time and memory of a run are not bounded. Run records hold no realised lot sizes or "
        "norms; other logs are the trainer's.",
    ),
    (
        "Security and access",
        "Who may read the data and the weights?",
        "Not part of this certificate.",
    ),
    (
        "Data collection",
        "Was the data collected and stored as promised?",
        "Not part of this certificate.",
    ),
    (
        "Utility and bias",
        "Does the noise hurt some groups more?",
        "Not examined: a privacy guarantee does not imply anything about it.",
    ),
)


@dataclass(frozen=True, slots=True)
class Item:
    """One question of the checklist, its answer, its mark and the source of the answer."""

    topic: str
    question: str
    answer: str
    mark: Mark
    by: str


def checklist(predicate: Mapping[str, Any], conformant_run: str | None) -> tuple[Item, ...]:
    """The items for the statement's ``predicate``; ``conformant_run`` is a run that conformed."""
    return (
        *_guarantee(predicate),
        *_mechanism(predicate, conformant_run),
        Item(
            "Trust model",
            "Who sees the raw data?",
            "The trainer: this is the central model. Releases are protected, the training "
            "machine is not.",
            "declared",
            "plan",
        ),
        *(Item(*texts, "open", "deployment") for texts in DEPLOYMENT),
    )


def _guarantee(predicate: Mapping[str, Any]) -> Iterator[Item]:
    plan = predicate["plan"]
    proved = predicate["guarantee"] is not None
    # The accounting vouches for nothing in a plan that was refused before it.
    source: tuple[Mark, str] = ("checked", "accounting") if proved else ("open", "no proof")
    engines = ", ".join(engine["name"] for engine in predicate["accountants"]) or "none"
    yield Item(
        "Privacy parameters",
        "Is ε an upper bound, at which δ?",
        f"ε is bounded from above at the given δ by {engines}." if proved else "No ε is certified.",
        *source,
    )
    dataset = plan["dataset"]
    most = dataset.get("contributions_per_user")
    yield Item(
        "Unit of privacy",
        "What does one unit hold?",
        f"One {dataset['unit']}"
        + (f" with at most {most} records" if most else "")
        + ". The plan states that the data set consists of such units.",
        "declared",
        "plan",
    )
    adjacency = ADJACENCIES[plan["adjacency"]]
    yield Item(
        "Adjacency",
        "Which data sets count as neighbours?",
        f"{adjacency}, used in every step of the proof."
        if proved
        else f"{adjacency}, according to the plan.",
        *(source if proved else ("declared", "plan")),
    )
    others = "counted by its ledger"
    if predicate.get("ledger") is None:
        others = "not counted: the data set has no budget here"
    yield Item(
        "Composition",
        "Is every release counted?",
        f"All steps and all intermediate models are counted. Other runs on this data set are "
        f"{others}."
        if proved
        else "Nothing was accounted.",
        *source,
    )


def _mechanism(predicate: Mapping[str, Any], run: str | None) -> Iterator[Item]:
    for obligation in sorted(predicate["obligations"], key=lambda o: o["code"] not in SAMPLING):
        by_trainer = obligation["checked_by"] == "trainer"
        source = "trainer, when run" if run is None else f"record of run {run}"
        yield Item(
            "Sampling" if obligation["code"] in SAMPLING else "Clipping and noise",
            obligation["code"].replace("_", " ").capitalize() + ":",
            obligation["text"] + ".",
            "checked" if by_trainer and run is not None else "declared",
            source if by_trainer else "trainer",
        )
    for assumption in predicate["assumptions"]:
        if assumption.startswith("noise is exactly Gaussian"):
            yield Item(
                "Floating-point arithmetic",
                "Can rounding leak?",
                f"{capitalized(assumption)}.",
                "declared",
                "assumption",
            )
