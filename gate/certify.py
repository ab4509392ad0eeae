"""``affidavit certify``: certify a plan, and sign the certificate if there is a key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from affidavit.certificate.policy import MAX_RECORDS
from affidavit.gate.console import (
    fail,
    load_plan,
    out,
    print_json,
    require_writable,
    say,
    show_status,
    stop,
    usage_errors,
    write,
)
from affidavit.gate.exit_codes import Exit, exit_of_verdict
from affidavit.gate.options import (
    EngineOption,
    JsonOption,
    PlanArgument,
    PolicyFileOption,
    SecondOpinionOption,
)
from affidavit.plan import Adjacency
from affidavit.trust import may_have_signing_key

if TYPE_CHECKING:
    from affidavit.assessment import Assessment
    from affidavit.certificate import Certificate
    from affidavit.mechanisms.plan_files import PlanFile
    from affidavit.trust import SigningPort


def certify(
    plan: PlanArgument,
    as_json: JsonOption = False,
    bundle: Annotated[
        Path | None, typer.Option("--out", help="Write the signed bundle to this file.")
    ] = None,
    engine: EngineOption = None,
    policy: PolicyFileOption = None,
    second_opinion: SecondOpinionOption = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Sign a proof that `affidavit verify --prove` checks.")
    ] = False,
    records: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_RECORDS, help="Also bound ε of groups of this many records, or users."
        ),
    ] = None,
    relation: Annotated[
        Adjacency | None,
        typer.Option(help="Also bound ε of data sets that differ by this adjacency."),
    ] = None,
    mu: Annotated[
        bool,
        typer.Option("--mu", help="Also find the least μ whose Gaussian curve bounds the run."),
    ] = False,
    show_attack: Annotated[
        bool, typer.Option("--show-attack", help="Say which attack attains the lower end of ε.")
    ] = False,
) -> None:
    """Certify a plan: show the noise it needs, or its ε, as a bracket with reasons.

    A signed certificate includes a second opinion; without a key, use --second-opinion.
    """
    # Imported here because the accountants load slowly, and the help needs none.
    from affidavit.assessment import certify as assess
    from affidavit.gate.policy import read_policy

    require_writable(bundle)
    rules = None if policy is None else read_policy(policy)
    file = load_plan(plan, as_json=as_json)
    key = _signing_key("--out" if bundle is not None else "--prove" if prove else None)
    second_opinion |= key is not None or (rules is not None and rules.second_opinion == "required")
    with show_status("certifying"):
        result = assess(file.plan, engine=engine, second_opinion=second_opinion)
        if records is not None or relation is not None:
            from affidavit.assessment import with_group

            result = with_group(result, records or 1, relation or result.adjacency)
        if mu:
            from affidavit.assessment import with_gaussian_bound

            result = with_gaussian_bound(result)
    attack: tuple[str, ...] = ()
    if show_attack:
        from affidavit.assessment import explain_lower_end

        with show_status("looking for the attack"):
            attack = explain_lower_end(file.plan, result)
    if prove:
        from affidavit.certificate import with_proof

        with show_status("searching for a proof"):
            result = with_proof(result)
    if rules is not None:
        from affidavit.certificate.requirements import lacks_requirements, with_requirements

        if lacks_requirements(result, rules):
            with show_status("proving what the policy requires"):
                result = with_requirements(result, rules)
    if prove and (problem := result.proof_problem) is not None:
        fail(f"{problem.code}: {problem.message} {problem.remedy}", Exit.UNDECIDED)
    assessment, judgement, certificate = result, None, None
    if rules is not None or key is not None:
        from affidavit.certificate import issue_here
        from affidavit.certificate.policy import BUILT_IN, evaluate_policy

        assessment, judgement = evaluate_policy(file.plan, result, rules or BUILT_IN)
        certificate = None if key is None else issue_here(assessment, key, judgement)
    if bundle is not None and certificate is not None:
        write(bundle, certificate.bundle)
    if as_json:
        document = (
            assessment.as_result() | ({} if judgement is None else judgement.as_dict())
            if certificate is None
            else certificate.as_result(assessment)
        )
        print_json(document | ({"attack": list(attack)} if show_attack else {}))
    else:
        _print(file, assessment, certificate, bundle)
        if show_attack:
            out.print("what attains the lower end of ε:")
        for sentence in attack:
            out.print(f"  {escape(sentence)}")
    raise typer.Exit(exit_of_verdict(assessment.verdict, assessment.codes))


def _print(
    file: PlanFile, assessment: Assessment, certificate: Certificate | None, bundle: Path | None
) -> None:
    from affidavit.gate.render import print_assessment

    print_assessment(out, file.name, file.locate(assessment.reasons), assessment)
    if certificate is None:
        say("not signed; create a signing key with `affidavit keys new`.")
    else:
        say(f"certificate {certificate.id}")
    if bundle is None:
        if certificate is not None:
            say("not stored; write the signed bundle to a file with --out.")
    else:
        say(f"bundle written to {bundle}")


def _signing_key(needed_by: str | None) -> SigningPort | None:
    key = None
    if may_have_signing_key():
        from affidavit.trust.signers import own_signing_key

        with usage_errors():
            key = own_signing_key()
    if key is None and needed_by is not None:
        stop(f"{needed_by} needs a signing key; create one with `affidavit keys new`.")
    return key
