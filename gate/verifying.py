"""``affidavit verify``: the numbered steps, printed as they pass, and what they end in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from affidavit.certificate import (
    TrustRoot,
    VerificationError,
    VerificationOptions,
    VerifiedCertificate,
    certify,
    verify,
)
from affidavit.certificate.policy import accounted
from affidavit.gate.console import err
from affidavit.gate.contents import contents
from affidavit.gate.exits import OF_VERDICT, Exit
from affidavit.gate.files import print_json
from affidavit.gate.reading import PlanFile, read_bytes
from affidavit.gate.seen import SeenCheckpoints
from affidavit.gate.seen_status import SeenStatusLists
from affidavit.plan import plan_from

RECOMPUTED_WITHIN = 1e-3
"""Relative room for another release of an engine to answer differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reporting:
    """What is done beside verifying: accounting again, showing the certificate, and how."""

    recompute: bool
    show: bool
    as_json: bool


def verify_bundle(
    console: Console,
    name: str,
    plan: PlanFile | None,
    trust: TrustRoot,
    demands: VerificationOptions,
    seen: SeenCheckpoints,
    lists: SeenStatusLists,
    how: Reporting,
) -> Exit:
    """Verify one bundle and print it; the exit code is that of what it certifies."""
    raw = read_bytes(name)
    try:
        wanted = None if plan is None else plan.plan
        trusted = trust.public_keys()
        lists.remember(demands, trusted)
        verified = verify(raw, trusted, plan=wanted, demands=demands)
    except VerificationError as error:
        _print_failure(console, name, error, as_json=how.as_json)
        return Exit.BLOCKED
    _remember(verified, seen)
    problem = _recomputed_otherwise(verified) if how.recompute else None
    code = OF_VERDICT[verified.predicate["verdict"]] if problem is None else Exit.UNDECIDED
    if how.as_json:
        print_json(_as_document(verified, problem, recompute=how.recompute))
        return code
    for number, step, detail in verified.steps:
        mark = "[yellow]–[/]" if number in verified.unchecked else "[green]✓[/]"
        console.print(f"{mark} {number}. {step}: {escape(detail)}", highlight=False)
    if problem is not None:
        console.print(f"[red]✗ recomputed:[/] {escape(problem)}", highlight=False)
    elif how.recompute:
        console.print("[green]✓[/] recomputed: the accountants agree", highlight=False)
    for line in contents(verified.predicate) if how.show else ():
        console.print(f"  {escape(line)}", highlight=False)
    console.print(escape(_conclusion(verified)), highlight=False)
    return code


def _remember(verified: VerifiedCertificate, seen: SeenCheckpoints) -> None:
    if verified.checkpoint is None:
        return
    try:
        seen.keep(verified.checkpoint)
    except OSError as error:
        err.print(
            f"{escape(str(seen.path))} cannot be written ({error.strerror}): a log that is "
            "rewritten from here on will not be found out.",
            highlight=False,
        )


def _conclusion(verified: VerifiedCertificate) -> str:
    predicate = verified.predicate
    guarantee = predicate["guarantee"]
    said = f"the certificate verifies; its verdict is {predicate['verdict']}"
    if guarantee is None:
        return said + "."
    epsilon, delta = guarantee["epsilon"]["upper"], guarantee["delta"]["upper"]
    level = guarantee.get("confidence")
    chance = "" if level is None else f" with confidence {level}"
    return f"{said}: ε ≤ {epsilon} at δ = {delta}{chance} under {guarantee['adjacency']}."


def _recomputed_otherwise(verified: VerifiedCertificate) -> str | None:
    """How a fresh run of the accountants contradicts the certificate; None if it does not."""
    predicate = verified.predicate
    fresh = certify(plan_from(predicate["plan"]))
    # A policy refuses what may be proved all the same; only what is proved is worked out here.
    if fresh.verdict != accounted(predicate):
        why = "".join(f" {reason.message} {reason.remedy}" for reason in fresh.reasons[:1])
        return f"the verdict is now {fresh.verdict}, not {predicate['verdict']}.{why}"
    if predicate["guarantee"] is None or fresh.epsilon is None:
        return None
    stated = float(predicate["guarantee"]["epsilon"]["upper"])
    if fresh.epsilon.lower > stated * (1 + RECOMPUTED_WITHIN):
        return f"ε is at least {fresh.epsilon.lower:.6g}, above the {stated:.6g} certified."
    seed = predicate["guarantee"].get("seed")
    if fresh.confidence is None or seed != fresh.confidence.seed:
        return None
    if abs(fresh.epsilon.upper / stated - 1) > RECOMPUTED_WITHIN:
        return f"draws from its seed give ε ≤ {fresh.epsilon.upper:.6g}, not {stated:.6g}."
    return None


def _as_document(
    verified: VerifiedCertificate, problem: str | None, *, recompute: bool
) -> dict[str, Any]:
    return {
        "verified": True,
        "verdict": verified.predicate["verdict"],
        "steps": [
            {
                "step": number,
                "name": step,
                "detail": detail,
                "checked": number not in verified.unchecked,
            }
            for number, step, detail in verified.steps
        ],
        "recomputed": None if not recompute else problem is None,
        "reasons": [] if problem is None else [{"code": "recomputed", "message": problem}],
        "statement": verified.statement,
    }


def _print_failure(console: Console, name: str, error: VerificationError, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "verified": False,
                "step": error.step,
                "step_name": error.step_name,
                "code": error.code,
                "message": error.message,
                "remedy": error.remedy,
            }
        )
        return
    console.print(
        f"[red]✗ {escape(name)}: rejected at step {error.step} ({error.step_name}), "
        f"{error.code}:[/] {escape(error.message)} {escape(error.remedy)}",
        highlight=False,
    )
