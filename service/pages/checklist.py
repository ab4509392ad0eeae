"""What a certificate's guarantee rests on, along NIST SP 800-226, as a checklist.

The publication asks of a claim of differential privacy more than its ε: what one unit is, who
is trusted, how noise is really made, what leaks beside the output. Each item here says what
holds for this certificate and who vouches for it:

``checked``
    proved by the accounting, verified here, or found in the record of a conformant run;
``declared``
    said in the plan or left to the trainer, and so far nobody looked;
``open``
    not covered by this certificate: someone else has to answer for it.

Reference: NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees
(March 2025), the privacy pyramid and its hazards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mark = Literal["checked", "declared", "open"]
SAMPLING = frozenset(
    {"sampler_of_the_plan", "cryptographic_generator", "empty_lot_counts", "one_lot_for_all_blocks"}
)
"""Obligations about how records are drawn; the others are about clipping and noise."""
ADJACENCIES = {"add_remove": "add/remove", "replace_one": "replace one", "zero_out": "zero out"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One question of the checklist, its answer, and who vouches for it."""

    topic: str
    question: str
    answer: str
    mark: Mark
    by: str


def checklist(predicate: Mapping[str, Any], conformant_run: str | None) -> tuple[Item, ...]:
    """The items for the statement's ``predicate``; ``conformant_run`` is a run that kept it."""
    items = (*_guarantee(predicate), *_mechanism(predicate, conformant_run), *_deployment())
    return tuple(items)


def _guarantee(predicate: Mapping[str, Any]) -> Iterator[Item]:
    plan, said = predicate["plan"], predicate["guarantee"]
    engines = ", ".join(item["name"] for item in predicate["accountants"]) or "none"
    # A plan that was refused before any accounting has nothing that accounting vouches for.
    mark: Mark = "open" if said is None else "checked"
    by = "nobody" if said is None else "accounting"
    yield Item(
        topic="Privacy parameters",
        question="Is ε an upper bound, at which δ?",
        answer="No ε is claimed."
        if said is None
        else "ε is bounded from above at the δ that stands beside it, by " + engines + ".",
        mark=mark,
        by=by,
    )
    data = plan["dataset"]
    times = data.get("contributions_per_user")
    yield Item(
        topic="Unit of privacy",
        question="What does one unit hold?",
        answer=f"One {data['unit']}"
        + (f" with at most {times} records" if times else "")
        + ". That records of the data set are such units is taken from the plan.",
        mark="declared",
        by="plan",
    )
    yield Item(
        topic="Adjacency",
        question="Which data sets count as neighbours?",
        answer=f"{ADJACENCIES[plan['adjacency']]}, "
        + ("as the plan says." if said is None else "used in every step of the proof."),
        mark="declared" if said is None else "checked",
        by="plan" if said is None else "accounting",
    )
    yield Item(
        topic="Composition",
        question="Is every release counted?",
        answer="Nothing was accounted."
        if said is None
        else "All steps and all intermediate models are counted. "
        + _ledger(predicate.get("ledger")),
        mark=mark,
        by=by,
    )


def _ledger(kept: Mapping[str, Any] | None) -> str:
    if kept is None:
        return "Other runs on this data set are not: it has no budget here."
    return "Other runs on this data set are counted by its ledger."


def _mechanism(predicate: Mapping[str, Any], run: str | None) -> Iterator[Item]:
    for obligation in sorted(
        predicate["obligations"], key=lambda each: each["code"] not in SAMPLING
    ):
        by_trainer = obligation["checked_by"] == "trainer"
        kept = by_trainer and run is not None
        yield Item(
            topic="Sampling" if obligation["code"] in SAMPLING else "Clipping and noise",
            question=obligation["code"].replace("_", " ").capitalize() + ":",
            answer=obligation["text"] + ".",
            mark="checked" if kept else "declared",
            by=_voucher(run, by_trainer=by_trainer),
        )
    for item in predicate["assumptions"]:
        if item.startswith("noise is exactly Gaussian"):
            yield Item(
                topic="Floating-point arithmetic",
                question="Can rounding leak?",
                answer=item[:1].upper() + item[1:] + ".",
                mark="declared",
                by="assumption",
            )


def _voucher(run: str | None, *, by_trainer: bool) -> str:
    if not by_trainer:
        return "whoever trains"
    return "trainer, when run" if run is None else f"record of run {run}"


def _deployment() -> Iterator[Item]:
    yield Item(
        topic="Trust model",
        question="Who sees the raw data?",
        answer="Whoever trains: this is the central model. What is released is protected, "
        "the training machine is not.",
        mark="declared",
        by="plan",
    )
    for topic, question, answer in (
        (
            "Hyperparameters",
            "Were choices made by looking at the data?",
            "Only what the plan lists under extra is counted; tuning that it does not list is not.",
        ),
        (
            "Side channels",
            "Do time, memory or logs tell something?",
            "Time and memory of a run are not bounded. Run records hold no realised lot sizes "
            "or norms; other logs are the trainer's.",
        ),
        (
            "Security and access",
            "Who may read the data and the weights?",
            "Not part of this certificate.",
        ),
        (
            "Data collection",
            "Was the data collected and kept as promised?",
            "Not part of this certificate.",
        ),
        (
            "Utility and bias",
            "Does the noise hurt some groups more?",
            "Not examined: a guarantee of privacy says nothing about it.",
        ),
    ):
        yield Item(topic=topic, question=question, answer=answer, mark="open", by="whoever deploys")
