"""``affidavit sign-model``, ``verify-model`` and ``audit-model``: evidence of a model.

Exit codes of ``verify-model``: 0 the folder verifies; 1 it does not, and each mismatch is named; 2
usage, or a folder or keys that cannot be read.

``audit-model`` measures a lower bound on ε from the canaries of one run. If a plan has
``canaries``, ``affidavit train`` draws them and writes them with their losses. For any other
training, ``new`` draws them, and each takes part as its coin decides. ``check`` computes the bound
from their losses. Exit codes of ``check``: 0 nothing contradicts the certificate; 1 the lower bound
is above the certified ε, or the certificate does not verify; 2 usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from affidavit import certificate as certificates
from affidavit import evidence as evidences
from affidavit import trust as trusts
from affidavit.accountants import decimal_down
from affidavit.evidence import EXPORTS
from affidavit.gate.console import (
    fail,
    out,
    print_json,
    read_file,
    say,
    stop,
    stop_unwritable,
    usage_errors,
    write,
)
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import (
    JsonOption,
    VerifierOptions,
    command_group,
    with_options,
)

Export = StrEnum("Export", EXPORTS)  # type: ignore[misc]  # values from a table
FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The model's folder.")]


@with_options
def sign_model(
    folder: FolderArgument,
    certificate: Annotated[Path, typer.Option(help="Certificate bundle of the run.")],
    record: Annotated[Path, typer.Option(help="Run record, run/record.jsonl.")],
    verifier: VerifierOptions,
    canaries: Annotated[
        Path | None, typer.Option(help="The canaries that the run was trained with.")
    ] = None,
    losses: Annotated[
        Path | None, typer.Option(help="Losses of the canaries, run/canary-losses.json.")
    ] = None,
    openssf_key: Annotated[
        Path | None,
        typer.Option(
            "--openssf-key", help="ECDSA key (PEM): also sign model.sig, for model-signing."
        ),
    ] = None,
    export: Annotated[
        list[Export] | None, typer.Option(help="Also write the claim in this form; repeatable.")
    ] = None,
) -> None:
    """Put certificate, run record and a signed claim into the folder of a trained model.

    With --keyset and --root, the keyset is added for verifiers who trust the roots.
    """
    from affidavit.trust.signers import own_signing_key

    try:
        key = own_signing_key(trusts.KeyRole.RUN)
        if key is None:
            stop("sign-model needs a signing key; create one with `affidavit keys new`.")
        trusted, options = verifier.load()
        claim = evidences.sign_model(
            folder,
            evidences.Evidence(
                bundle=read_file(certificate),
                record=read_file(record),
                keyset=read_file(verifier.keyset[-1]) if verifier.keyset else None,
                canaries=None if canaries is None else read_file(canaries),
                losses=None if losses is None else read_file(losses),
            ),
            key,
            trusted=trusted,
            now=datetime.now(UTC).replace(microsecond=0),
            openssf_key=None if openssf_key is None else evidences.read_ec_key(openssf_key),
            exports=export or [],
            options=options,
        )
    except (evidences.UnsupportedClaim, trusts.VerificationError) as failure:
        fail(str(failure))
    except (evidences.BadModel, trusts.KeyFailure) as failure:
        stop(str(failure))
    except OSError as error:
        stop_unwritable(folder, error)
    say(f"{_guarantee_line(claim)}; signed in {folder / evidences.STATEMENT_FILE}")


@with_options
def verify_model(
    folder: FolderArgument,
    verifier: VerifierOptions,
    as_json: JsonOption = False,
) -> None:
    """Verify offline what a model's folder claims about its training, and name each mismatch.

    --root alone uses the keyset in the folder; --keyset gives a newer one.
    """
    try:
        within = folder if verifier.root is not None and not verifier.keyset else None
        if within is not None:
            verifier = replace(verifier, keyset=[folder / evidences.KEYSET_FILE])
        trusted, options = verifier.load(within=within)
        report = evidences.verify_model(folder, trusted, options=options)
    except trusts.VerificationError as error:
        report = evidences.ModelReport(
            findings=[
                evidences.ModelFinding(
                    file=str(_keyset_path(folder, verifier.keyset)),
                    code=error.code,
                    message=error.message,
                    remedy=error.remedy,
                )
            ]
        )
    except (evidences.BadModel, trusts.KeyFailure) as failure:
        stop(str(failure))
    except OSError as error:
        stop(f"cannot read {folder}: {error.strerror}.")
    if as_json:
        print_json(_as_document(report))
    else:
        _print(report)
    raise typer.Exit(Exit.CERTIFIED if report.verified else Exit.BLOCKED)


def _keyset_path(folder: Path, keysets: Sequence[Path] | None) -> Path:
    """Return the path of the last keyset, relative to the folder if it is inside."""
    (*_, last) = keysets or [folder]
    return last.relative_to(folder) if last.is_relative_to(folder) else last


def _as_document(report: evidences.ModelReport) -> dict[str, Any]:
    return {
        "verified": report.verified,
        "steps": [{"name": name, "detail": detail} for name, detail in report.steps],
        "findings": [finding.as_dict() for finding in report.findings],
        "claim": report.claim or None,
    }


def _print(report: evidences.ModelReport) -> None:
    for name, detail in report.steps:
        out.print(f"[green]✓[/] {name}: {escape(detail)}")
    for finding in report.findings:
        out.print(
            f"[red]✗ {escape(finding.file)}: {finding.code}:[/] {escape(finding.message)} "
            f"{escape(finding.remedy)}"
        )
    if not report.verified:
        say("verification failed: the model was changed, or its signed claim does not hold.")
        return
    say(f"{_guarantee_line(report.claim)}.")
    for code in report.claim["checked"]:
        say(f"  checked:  {evidences.CHECKED[code]}")
    for code in report.claim["declared"]:
        say(f"  declared: {evidences.DECLARED[code]}")


def _guarantee_line(claim: dict[str, Any]) -> str:
    guarantee = claim["guarantee"]
    epsilon, delta = guarantee["epsilon"], guarantee["delta"]["upper"]
    return (
        f"trained with ε ≤ {epsilon['upper']} at δ = {delta} under {guarantee['adjacency']}, "
        f"unit {guarantee['unit']}"
    )


audit_model = command_group("Measure a lower bound on ε from one run.")


@audit_model.command("new")
def new(
    out: Annotated[Path, typer.Option(help="File for the canaries; secret until the run ends.")],
    count: Annotated[int, typer.Option(help="Number of canaries.")] = 1000,
    guesses: Annotated[
        int | None, typer.Option(help="Even number of guesses; a third of the count by default.")
    ] = None,
) -> None:
    """Draw canaries for training by other means, and print the digest to commit to.

    For affidavit train, write canaries into the plan instead.
    """
    try:
        canaries = evidences.Canaries.generate(count, guesses)
    except evidences.BadCanaries as error:
        stop(str(error))
    write(out, canaries.as_bytes(), mode=0o600)
    say(f"{canaries.commitment}  {count} canaries in {out}; publish the digest before training")


@audit_model.command("check")
@with_options
def check(
    canaries: Annotated[Path, typer.Option(help="The canaries.")],
    losses: Annotated[Path, typer.Option(help='Canary losses, in order: {"losses": [...]}.')],
    certificate: Annotated[Path, typer.Option(help="Certificate bundle of the run.")],
    verifier: VerifierOptions,
    as_json: JsonOption = False,
) -> None:
    """Compare what the canaries' losses prove about ε with the certificate."""
    with usage_errors(certificate):
        trusted, options = verifier.load(past_use=True)
        verified = certificates.verify(read_file(certificate), trusted, options=options)
    guarantee = verified.predicate["guarantee"]
    if guarantee is None or guarantee["adjacency"] not in evidences.AUDITABLE:
        stop(f"{certificate}: audits need {' or '.join(sorted(evidences.AUDITABLE))}.")
    try:
        result = evidences.audit_canaries(
            evidences.read_canaries(read_file(canaries)),
            evidences.read_losses(read_file(losses)),
            delta=float(guarantee["delta"]["upper"]),
        )
    except evidences.BadCanaries as failure:
        stop(str(failure))
    upper, mu = guarantee["epsilon"]["upper"], guarantee["mu"]
    falsified = result.falsifies(guarantee)
    if as_json:
        print_json(
            {
                "falsified": falsified,
                "right": result.right,
                "guesses": result.guesses,
                "canaries": result.canaries,
                "confidence": result.confidence,
                "epsilon": {"at_least": decimal_down(result.epsilon), "certified": upper},
                "mu": {"at_least": decimal_down(result.mu), "certified": mu},
            }
        )
    else:
        say(
            f"{result.right} of {result.guesses} guesses are correct: with confidence "
            f"{result.confidence:g}, ε ≥ {result.epsilon:.4g} at δ = {result.delta:g}, and "
            f"μ ≥ {result.mu:.4g} if its noise is Gaussian; certified: ε ≤ {upper}"
            + ("" if mu is None else f", μ ≤ {mu}")
        )
    if falsified:
        fail("the training violated its certificate.")
    raise typer.Exit(Exit.CERTIFIED)
