"""``affidavit verify``: verify a certificate offline, step by step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from affidavit import assessment, mechanisms
from affidavit import certificate as certificates
from affidavit import client as clients
from affidavit import trust as trusts
from affidavit.accountants import ENGINE_NAMES
from affidavit.gate.console import load_plan, out, print_json, say, show_status, stop
from affidavit.gate.exit_codes import Exit, exit_of_verdict
from affidavit.gate.options import (
    JsonOption,
    LogOriginOption,
    VerifierOptions,
    with_options,
)
from affidavit.gate.render import describe_certificate
from affidavit.gate.verification_report import print_rejection, print_steps, steps_as_documents
from affidavit.plan import MalformedPlan

if TYPE_CHECKING:
    from affidavit.checker import Proof, Unproved

RECOMPUTE_TOLERANCE = 1e-3
"""Relative difference allowed between releases of an accountant."""
_VERSION = re.compile(r"(?<![a-z_])([a-z_]++)=([0-9]++(?:\.[0-9]++)*+)")


@with_options
def verify(
    bundle: Annotated[str, typer.Argument(help="Certificate bundle; - reads standard input.")],
    verifier: VerifierOptions,
    plan: Annotated[
        str | None, typer.Option("--plan", help="Plan that the certificate must be about.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Run the accountants again and compare.")
    ] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Prove the bound again, without the accountants.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the contents of the verified certificate.")
    ] = False,
    accountants: Annotated[
        list[str] | None,
        typer.Option(
            "--accountant",
            metavar="NAME=VERSION",
            help="Minimum version of an accountant; repeatable.",
        ),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="DIGEST|FILE",
            help="Digest of an accepted policy, or a policy file whose rules must hold; "
            "repeatable.",
        ),
    ] = None,
    log_origin: LogOriginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify a certificate offline, step by step; exits 0 only if it verifies and certifies."""
    from affidavit.gate.policy import read_policy

    file = None if plan is None else load_plan(plan, as_json=False)
    digests, files = _split_policies(policies or [])
    try:
        trusted, options = verifier.load(
            accountants=_minimum_versions(accountants or []),
            policies=frozenset(digests),
            floors=tuple(read_policy(Path(file)) for file in files),
            log_origin=log_origin,
        )
        raw = mechanisms.read_bytes(bundle)
        expected = None if file is None else file.plan
        verified = certificates.verify(raw, trusted, plan=expected, options=options)
    except trusts.VerificationError as error:
        print_rejection(bundle, error, as_json=as_json)
        raise typer.Exit(Exit.BLOCKED) from None
    except (trusts.KeyFailure, MalformedPlan) as failure:
        stop(str(failure))
    problem = _recompute(verified) if recompute else None
    prove = prove or any(policy.proof == "required" for policy in options.floors)
    proof = _prove(verified) if prove else None
    if as_json:
        print_json(_as_document(verified, problem, proof, recompute=recompute))
    else:
        _print(verified, problem, proof, recompute=recompute, show=show)
    codes = [reason["code"] for reason in verified.predicate["reasons"]]
    verdict = exit_of_verdict(verified.predicate["verdict"], codes)
    decided = problem is None and not isinstance(proof, Exception)
    raise typer.Exit(verdict if decided else Exit.UNDECIDED)


def _minimum_versions(options: list[str]) -> dict[str, str]:
    """Parse the ``NAME=VERSION`` options."""
    versions: dict[str, str] = {}
    for option in options:
        match = _VERSION.fullmatch(option)
        if match is None or match[1] not in ENGINE_NAMES:
            names = ", ".join(ENGINE_NAMES)
            stop(f"--accountant {option}: give NAME=VERSION, with NAME one of {names}.")
        versions[match[1]] = match[2]
    return versions


def _split_policies(options: list[str]) -> tuple[list[str], list[str]]:
    """Return the digests and the files among the ``--policy`` options."""
    files = [option for option in options if re.fullmatch(clients.DIGEST, option) is None]
    for file in files:
        if file.startswith("sha256:"):
            stop(f"--policy {file}: a digest is sha256: and 64 lower-case hexadecimal digits.")
    return [option for option in options if option not in files], files


def _prove(verified: certificates.VerifiedCertificate) -> Proof | Unproved:
    """Return the checker's proof of the certificate, or the reason why it has none."""
    # Imported here because ball arithmetic is slow to load.
    from affidavit.checker import Unproved

    try:
        with show_status("proving"):
            return certificates.prove_certificate(verified.predicate)
    except Unproved as failure:
        return failure


def _print(
    verified: certificates.VerifiedCertificate,
    problem: str | None,
    proof: Proof | Unproved | None,
    *,
    recompute: bool,
    show: bool,
) -> None:
    print_steps(verified.steps, verified.unchecked)
    if problem is not None:
        out.print(f"[red]✗ recomputed:[/] {escape(problem)}")
    elif recompute:
        out.print("[green]✓[/] recomputed: the accountants give the same bounds again")
    if isinstance(proof, Exception):
        text = f"{proof.code}: {proof} {proof.remedy}"
        out.print(f"[red]✗ not proved:[/] {escape(text)}")
    elif proof is not None:
        bound = f"ε ≤ {proof.epsilon} at δ = {proof.delta}"
        out.print(f"[green]✓[/] proved in ball arithmetic: {bound}")
        say(
            "  from "
            + ", ".join(f"docs/theorems/{page}.md" for page in certificates.proof_sources(proof))
        )
    for line in describe_certificate(verified.predicate) if show else ():
        say(f"  {line}")
    if problem is not None or isinstance(proof, Exception):
        say("every step holds, but the numbers of the certificate were not confirmed.")
        return
    say(_conclusion(verified))


def _conclusion(verified: certificates.VerifiedCertificate) -> str:
    predicate = verified.predicate
    guarantee = predicate["guarantee"]
    verdict = f"the certificate verifies; its verdict is {predicate['verdict']}"
    if guarantee is None:
        return verdict + "."
    epsilon, delta = guarantee["epsilon"]["upper"], guarantee["delta"]["upper"]
    level = guarantee.get("confidence")
    confidence = "" if level is None else f" with confidence {level}"
    return f"{verdict}: ε ≤ {epsilon} at δ = {delta}{confidence} under {guarantee['adjacency']}."


def _recompute(verified: certificates.VerifiedCertificate) -> str | None:
    """Run the accountants again; return their contradiction of the certificate, or None."""
    from affidavit.certificate.policy import accounting_verdict
    from affidavit.plan import plan_from

    predicate = verified.predicate
    recomputed = assessment.certify(plan_from(predicate["plan"]))
    # A policy may refuse a proved guarantee, so this compares the accountants' verdicts.
    # Earlier certificates say ``under_noised`` where later ones say ``unproved``.
    unmet = {"under_noised", "unproved"}
    certified = accounting_verdict(predicate)
    if recomputed.verdict != certified and not {recomputed.verdict, certified} <= unmet:
        reason = "".join(f" {reason.message} {reason.remedy}" for reason in recomputed.reasons[:1])
        return f"the verdict is now {recomputed.verdict}, not {predicate['verdict']}.{reason}"
    if predicate["guarantee"] is None or recomputed.epsilon is None:
        return None
    certified_epsilon = float(predicate["guarantee"]["epsilon"]["upper"])
    if recomputed.epsilon.lower > certified_epsilon * (1 + RECOMPUTE_TOLERANCE):
        lower = recomputed.epsilon.lower
        return f"ε is at least {lower:.6g}, above the {certified_epsilon:.6g} certified."
    seed = predicate["guarantee"].get("seed")
    if recomputed.confidence is None or seed != recomputed.confidence.seed:
        return None
    upper = recomputed.epsilon.upper
    if abs(upper / certified_epsilon - 1) > RECOMPUTE_TOLERANCE:
        return f"draws from its seed give ε ≤ {upper:.6g}, not {certified_epsilon:.6g}."
    return None


def _as_document(
    verified: certificates.VerifiedCertificate,
    problem: str | None,
    proof: Proof | Unproved | None,
    *,
    recompute: bool,
) -> dict[str, Any]:
    reasons = [] if problem is None else [{"code": "recomputed", "message": problem}]
    proved: dict[str, Any] = {}
    if isinstance(proof, Exception):
        reasons.append({"code": proof.code, "message": f"{proof} {proof.remedy}"})
        proved = {"proved": None}
    elif proof is not None:
        bound = {"epsilon": proof.epsilon, "delta": proof.delta}
        proved = {"proved": {**bound, "statements": list(proof.theorems)}}
    return {
        **proved,
        "verified": not reasons,
        "verdict": verified.predicate["verdict"],
        "steps": steps_as_documents(verified.steps, verified.unchecked),
        "recomputed": None if not recompute else problem is None,
        "reasons": reasons,
        "statement": verified.statement,
    }
