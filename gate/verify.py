"""``affidavit verify``: verify a certificate offline, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from affidavit.certificate import (
    KeyFailure,
    TrustRoot,
    VerificationError,
    VerificationOptions,
    VerifiedCertificate,
    certify,
    proof_sources,
    prove_certificate,
)
from affidavit.certificate import verify as verify_bundle
from affidavit.certificate.policy import accounted
from affidavit.gate.console import out, print_json, read, read_file, say, stop, working
from affidavit.gate.exit_codes import OF_VERDICT, Exit
from affidavit.gate.options import JsonOption, KeysetOption, KeysOption, RootOption
from affidavit.gate.plan_io import read_bytes
from affidavit.gate.render import contents
from affidavit.gate.verifier_state import BadStore, CheckpointStore, StatusStore
from affidavit.gate.verify_options import (
    AccountantOption,
    ConsistencyOption,
    LogOriginOption,
    PolicyOption,
    RequireLogOption,
    RequireStatusOption,
    StatusOption,
    StoreOption,
    TrustOption,
    accepted_policies,
    minimum_versions,
    read_consistency_file,
    read_trust_policy,
    required_policies,
)
from affidavit.plan import MalformedPlan, plan_from

if TYPE_CHECKING:
    from affidavit.accountants import Proof, Unproved

RECOMPUTE_TOLERANCE = 1e-3
"""Relative difference allowed between releases of an accountant."""


def verify(
    bundle: Annotated[str, typer.Argument(help="Certificate bundle; - reads standard input.")],
    plan: Annotated[
        str | None, typer.Option("--plan", help="Plan that the certificate must be about.")
    ] = None,
    keys: KeysOption = None,
    keyset: KeysetOption = None,
    root: RootOption = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Run the accountants again and compare.")
    ] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Prove the bound again, without the accountants.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the contents of the verified certificate.")
    ] = False,
    accountants: AccountantOption = None,
    policies: PolicyOption = None,
    require_log: RequireLogOption = False,
    log_origin: LogOriginOption = None,
    checkpoint_store: StoreOption = None,
    consistency: ConsistencyOption = None,
    status: StatusOption = None,
    require_status: RequireStatusOption = False,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify a certificate offline, step by step; exits 0 only if it verifies and certifies."""
    file = None if plan is None else read(plan, as_json=False)
    anchors = TrustRoot(keys, keyset, root)
    checkpoints, lists = CheckpointStore(checkpoint_store), StatusStore()
    try:
        trusted, default_policy = anchors.load()
        options = VerificationOptions(
            accountants=minimum_versions(accountants),
            policies=accepted_policies(policies),
            floors=required_policies(policies),
            require_log=require_log,
            log_origin=log_origin,
            seen=checkpoints.newest(),
            consistency=read_consistency_file(consistency),
            status=None if status is None else read_file(status),
            require_status=require_status,
            status_seen={} if status is None else lists.newest(),
            trust=read_trust_policy(trust) or default_policy,
        )
        raw = read_bytes(bundle)
        lists.update(options, trusted)
        expected = None if file is None else file.plan
        verified = verify_bundle(raw, trusted, plan=expected, options=options)
        if verified.checkpoint is not None:
            checkpoints.update(verified.checkpoint, options.seen)
    except VerificationError as error:
        _print_failure(bundle, error, as_json=as_json)
        raise typer.Exit(Exit.BLOCKED) from None
    except (KeyFailure, MalformedPlan, BadStore) as failure:
        stop(str(failure))
    problem = _recompute(verified) if recompute else None
    prove = prove or any(policy.proof == "required" for policy in options.floors)
    proof = _prove(verified) if prove else None
    if as_json:
        print_json(_as_document(verified, problem, proof, recompute=recompute))
    else:
        _print(verified, problem, proof, recompute=recompute, show=show)
    verdict = OF_VERDICT[verified.predicate["verdict"]]
    decided = problem is None and not isinstance(proof, Exception)
    raise typer.Exit(verdict if decided else Exit.UNDECIDED)


def _prove(verified: VerifiedCertificate) -> Proof | Unproved:
    """What the checker proves of the certificate, or what is in its way."""
    # Imported here because ball arithmetic is slow to load.
    from affidavit.accountants import Unproved

    try:
        with working("proving"):
            return prove_certificate(verified.predicate)
    except Unproved as failure:
        return failure


def _print(
    verified: VerifiedCertificate,
    problem: str | None,
    proof: Proof | Unproved | None,
    *,
    recompute: bool,
    show: bool,
) -> None:
    for number, step, detail in verified.steps:
        mark = "[yellow]–[/]" if number in verified.unchecked else "[green]✓[/]"
        out.print(f"{mark} {number}. {step}: {escape(detail)}")
    if problem is not None:
        out.print(f"[red]✗ recomputed:[/] {escape(problem)}")
    elif recompute:
        out.print("[green]✓[/] recomputed: the accountants agree")
    if isinstance(proof, Exception):
        text = f"{proof.code}: {proof} {proof.remedy}"
        out.print(f"[red]✗ not proved:[/] {escape(text)}")
    elif proof is not None:
        bound = f"ε ≤ {proof.epsilon} at δ = {proof.delta}"
        out.print(f"[green]✓[/] proved in ball arithmetic: {bound}")
        say("  from " + ", ".join(f"docs/theorems/{page}.md" for page in proof_sources(proof)))
    for line in contents(verified.predicate) if show else ():
        say(f"  {line}")
    say(_conclusion(verified))


def _conclusion(verified: VerifiedCertificate) -> str:
    predicate = verified.predicate
    guarantee = predicate["guarantee"]
    verdict = f"the certificate verifies; its verdict is {predicate['verdict']}"
    if guarantee is None:
        return verdict + "."
    epsilon, delta = guarantee["epsilon"]["upper"], guarantee["delta"]["upper"]
    level = guarantee.get("confidence")
    confidence = "" if level is None else f" with confidence {level}"
    return f"{verdict}: ε ≤ {epsilon} at δ = {delta}{confidence} under {guarantee['adjacency']}."


def _recompute(verified: VerifiedCertificate) -> str | None:
    """How a new run of the accountants contradicts the certificate; None if it agrees."""
    predicate = verified.predicate
    fresh = certify(plan_from(predicate["plan"]))
    # A policy may refuse a proved guarantee; only the accountants are compared here.
    # Certificates that were issued before ``unproved`` existed say ``under_noised`` for both.
    unmet = {"under_noised", "unproved"}
    if fresh.verdict != accounted(predicate) and not {fresh.verdict, accounted(predicate)} <= unmet:
        reason = "".join(f" {reason.message} {reason.remedy}" for reason in fresh.reasons[:1])
        return f"the verdict is now {fresh.verdict}, not {predicate['verdict']}.{reason}"
    if predicate["guarantee"] is None or fresh.epsilon is None:
        return None
    stated = float(predicate["guarantee"]["epsilon"]["upper"])
    if fresh.epsilon.lower > stated * (1 + RECOMPUTE_TOLERANCE):
        return f"ε is at least {fresh.epsilon.lower:.6g}, above the {stated:.6g} certified."
    seed = predicate["guarantee"].get("seed")
    if fresh.confidence is None or seed != fresh.confidence.seed:
        return None
    if abs(fresh.epsilon.upper / stated - 1) > RECOMPUTE_TOLERANCE:
        return f"draws from its seed give ε ≤ {fresh.epsilon.upper:.6g}, not {stated:.6g}."
    return None


def _as_document(
    verified: VerifiedCertificate,
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
        "reasons": reasons,
        "statement": verified.statement,
    }


def _print_failure(name: str, error: VerificationError, *, as_json: bool) -> None:
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
    out.print(
        f"[red]✗ {escape(name)}: rejected at step {error.step} ({error.step_name}), "
        f"{error.code}:[/] {escape(error.message)} {escape(error.remedy)}"
    )
