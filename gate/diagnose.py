"""``affidavit diagnose``: answer a claim, and find the known mistake behind it if it is wrong.

Exit codes: 0 the claim holds, 1 it is refuted or the plan is refused, 2 usage or malformed input,
3 the claim is not decided or the engines contradict each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from affidavit.gate.console import exit_with_reasons, load_plan, out, print_json, say, show_status
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import JsonOption, PlanArgument
from affidavit.plan import MalformedPlan, Reason

if TYPE_CHECKING:
    from affidavit.assessment.diagnose import Diagnosis
    from affidavit.plan import Claim


_OF_ANSWER = {
    "holds": Exit.CERTIFIED,
    "refuted": Exit.BLOCKED,
    "not_decided": Exit.UNDECIDED,
}
_STYLES = {"holds": "green", "refuted": "red", "not_decided": "yellow"}


def diagnose(
    plan: PlanArgument,
    claimed_epsilon: Annotated[
        str | None, typer.Option("--claimed-epsilon", help="The claimed ε, with all its digits.")
    ] = None,
    claimed_noise_multiplier: Annotated[
        str | None,
        typer.Option(
            "--claimed-noise-multiplier", help="The claimed noise multiplier of every block."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a claimed ε or noise multiplier, and find the known mistakes that lead to it.

    Exits with 0 if the claim holds, with 1 if it is refuted or the plan is refused, and with 3 if
    the claim lies between the proved bounds, so that it is not decided.
    """
    # Imported here because it is slow.
    from affidavit.assessment.diagnose import diagnose as diagnose_claim

    file = load_plan(plan, as_json=as_json)
    claim: Claim | Reason | None = file.plan.claim
    if claim is None or claimed_epsilon is not None or claimed_noise_multiplier is not None:
        claim = _claim(claimed_epsilon, claimed_noise_multiplier)
    if isinstance(claim, Reason):
        exit_with_reasons("claim", (claim,), Exit.USAGE, as_json=as_json)
    try:
        with show_status("recomputing the claim"):
            result = diagnose_claim(file.plan, claim)
    except MalformedPlan as error:
        exit_with_reasons(plan, file.locate(error.reasons), Exit.USAGE, as_json=as_json)
    if as_json:
        print_json(result.as_result())
    else:
        _print(result)
    raise typer.Exit(_exit_code(result))


def _claim(epsilon: str | None, noise_multiplier: str | None) -> Claim | Reason:
    """Return the claim that the options state, or the reason why they state none."""
    from pydantic import ValidationError

    from affidavit.plan import Claim

    message, remedy = "no claim is given.", "Give --claimed-epsilon or --claimed-noise-multiplier."
    if epsilon is not None and noise_multiplier is not None:
        message, remedy = "two claims are given.", "Give only one option."
    elif epsilon is not None or noise_multiplier is not None:
        try:
            return Claim(epsilon=epsilon, noise_multiplier=noise_multiplier)
        except ValidationError as error:
            text = noise_multiplier if epsilon is None else epsilon
            problem = error.errors()[0]["msg"]
            message, remedy = f"{text!r} is not a claim: {problem}.", "Correct the option."
    return Reason(code="invalid_claim", message=message, remedy=remedy)


def _exit_code(result: Diagnosis) -> Exit:
    if result.certified.verdict == "refused":
        return Exit.BLOCKED
    return _OF_ANSWER[result.answer]


def _print(result: Diagnosis) -> None:
    style = _STYLES[result.answer]
    out.print(f"[bold {style}]{escape(result.summary)}[/]")
    for reason in result.certified.reasons if result.certified.epsilon is None else ():
        say(f"{reason.code}: {reason.message} {reason.remedy}")
    for number, explanation in enumerate(result.explanations, 1):
        reading = explanation.reading
        say("")
        say(
            f"explanation {number} of {len(result.explanations)}: "
            f"{' + '.join(explanation.mistakes)}, under {reading.accountant}: "
            f"ε = {reading.epsilon:.7g}, off by {explanation.differs_by:+.2g}"
        )
        for step in result.as_steps(explanation):
            say(f"  accounted  {step['accounted']}.")
            say(f"  wrong      {step['wrong']}")
            say(f"  source     {step['source']}")
            say(f"  fix        {step['fix']} ({step['pointer']})")
    if result.corrected is not None:
        multipliers = ", ".join(
            f"{release.name} {release.given:.7g}"
            for release in result.corrected.releases
            if release.given is not None
        )
        say("")
        say(f"to make the claim hold: noise multipliers {multipliers}; {result.corrected_summary}.")
