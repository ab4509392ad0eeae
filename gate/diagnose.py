"""``affidavit diagnose``: which known mistake explains a claim that cannot be certified.

Exit codes: 0 the claim holds, 1 it does not (explained or not) or the plan is refused, 2 usage
or malformed input, 3 the engines contradict each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError
from rich.markup import escape

from affidavit.gate.console import out, refuse
from affidavit.gate.exits import Exit
from affidavit.gate.files import print_json
from affidavit.gate.reading import PlanFile, read_plan
from affidavit.plan import Claim, MalformedPlan, Reason

if TYPE_CHECKING:
    from affidavit.certificate.diagnosis import Diagnosis


def diagnose(
    plan: Annotated[str, typer.Argument(help="A plan, YAML or JSON; - reads it from stdin.")],
    claimed_epsilon: Annotated[
        str | None,
        typer.Option("--claimed-epsilon", help="The ε that is claimed, digit for digit."),
    ] = None,
    claimed_noise_multiplier: Annotated[
        str | None,
        typer.Option(
            "--claimed-noise-multiplier", help="A σ for every block, said to reach the target."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result document.")] = False,
) -> None:
    """Name the known mistakes that lead from a plan to a claimed ε or noise multiplier."""
    # Other commands need not wait for what this one loads.
    from affidavit.certificate.diagnosis import diagnose as find

    try:
        file = read_plan(plan)
        claim = _claim(file, claimed_epsilon, claimed_noise_multiplier)
    except MalformedPlan as error:
        refuse(plan, error.reasons, Exit.USAGE, as_json=as_json)
    try:
        found = find(file.plan, claim)
    except MalformedPlan as error:
        refuse(plan, file.locate(error.reasons), Exit.USAGE, as_json=as_json)
    if as_json:
        print_json(found.as_result())
    else:
        _print(found)
    raise typer.Exit(_exit(found))


def _claim(file: PlanFile, epsilon: str | None, noise_multiplier: str | None) -> Claim:
    """The claim of the command line, or else that of the plan; raises ``MalformedPlan``."""
    if epsilon is None and noise_multiplier is None:
        if file.plan.claim is not None:
            return file.plan.claim
        raise MalformedPlan(
            _wrong("nothing is claimed.", "Give --claimed-epsilon or --claimed-noise-multiplier.")
        )
    if epsilon is not None and noise_multiplier is not None:
        raise MalformedPlan(_wrong("two things are claimed.", "Give one of the two options."))
    try:
        return Claim(epsilon=epsilon, noise_multiplier=noise_multiplier)
    except ValidationError:
        raise MalformedPlan(
            _wrong(
                f"{epsilon or noise_multiplier!r} is not a positive decimal.",
                "Give the number as it was published, like 7.9852.",
            )
        ) from None


def _wrong(message: str, remedy: str) -> Reason:
    return Reason(code="invalid_claim", pointer="", message=message, remedy=remedy)


def _exit(found: Diagnosis) -> Exit:
    if found.certified.verdict == "undecided":
        return Exit.UNDECIDED
    return Exit.CERTIFIED if found.holds else Exit.BLOCKED


def _print(found: Diagnosis) -> None:
    style = "green" if found.holds else "red"
    out.print(f"[bold {style}]{escape(found.summary)}[/]", highlight=False)
    for reason in found.certified.reasons if found.certified.epsilon is None else ():
        _say(f"{reason.code}: {reason.message} {reason.remedy}")
    for place, explanation in enumerate(found.explanations, 1):
        reading = explanation.reading
        _say("")
        _say(
            f"explanation {place} of {len(found.explanations)}: "
            f"{' + '.join(explanation.mistakes)}, under {reading.accountant}: "
            f"ε = {reading.epsilon:.7g}, off by {explanation.differs_by:+.2g}"
        )
        for step in found.as_steps(explanation):
            _say(f"  accounted  {step['accounted']}.")
            _say(f"  wrong      {step['wrong']}")
            _say(f"  source     {step['source']}")
            _say(f"  to do      {step['fix']} ({step['pointer']})")
    if found.corrected is not None:
        wanted = ", ".join(
            f"{release.name} {release.given:.7g}"
            for release in found.corrected.releases
            if release.given is not None
        )
        _say("")
        _say(f"to make the claim true: noise multipliers {wanted}; {found.corrected_summary}.")


def _say(line: str) -> None:
    out.print(escape(line), highlight=False, soft_wrap=True)
