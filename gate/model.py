"""``affidavit sign-model`` and ``affidavit verify-model``: evidence in a model's folder.

Exit codes of ``verify-model``: 0 everything fits; 1 something does not, and is named; 2 usage, or a
folder or keys that cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from affidavit.certificate import (
    CHECKED,
    DECLARED,
    EXPORTS,
    KEYSET_FILE,
    STATEMENT_FILE,
    BadModel,
    Evidence,
    KeyFailure,
    KeyRole,
    ModelFinding,
    ModelReport,
    NotTrained,
    TrustRoot,
    VerificationError,
    VerificationOptions,
    read_ec_key,
)
from affidavit.certificate import sign_model as sign_folder
from affidavit.certificate import verify_model as verify_folder
from affidavit.certificate.signers import own_signing_key
from affidavit.gate.console import fail, out, print_json, read_file, say, stop
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import JsonOption, KeysetOption, KeysOption, RootOption
from affidavit.gate.verify_options import RequireStatusOption, StatusOption

Export = StrEnum("Export", EXPORTS)  # type: ignore[misc]  # its values are a table's keys
FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The model's folder.")]


def sign_model(
    folder: FolderArgument,
    certificate: Annotated[Path, typer.Option(help="Certificate bundle of the run.")],
    record: Annotated[Path, typer.Option(help="Run record, run/record.jsonl.")],
    keys: KeysOption = None,
    keyset: KeysetOption = None,
    root: RootOption = None,
    canaries: Annotated[
        Path | None, typer.Option(help="The canaries that the run was trained with.")
    ] = None,
    losses: Annotated[
        Path | None, typer.Option(help="Their losses, run/canary-losses.json.")
    ] = None,
    openssf_key: Annotated[
        Path | None,
        typer.Option(
            "--openssf-key", help="ECDSA key (PEM): also sign model.sig, for model-signing."
        ),
    ] = None,
    export: Annotated[
        list[Export] | None,
        typer.Option(help="Also write the claim in this form; repeat the option for several."),
    ] = None,
) -> None:
    """Put certificate, run record and a signed claim into the folder of a trained model.

    With --keyset and --root the keyset goes into the folder too, for verifiers who trust the roots.
    """
    try:
        key = own_signing_key(KeyRole.RUN)
        if key is None:
            stop("sign-model needs a signing key; create one with `affidavit keys new`.")
        claim = sign_folder(
            folder,
            Evidence(
                bundle=read_file(certificate),
                record=read_file(record),
                keyset=read_file(keyset[-1]) if keyset else None,
                canaries=None if canaries is None else read_file(canaries),
                losses=None if losses is None else read_file(losses),
            ),
            key,
            trusted=TrustRoot(keys, keyset, root).public_keys(),
            now=datetime.now(UTC).replace(microsecond=0),
            openssf_key=None if openssf_key is None else read_ec_key(openssf_key),
            exports=export or [],
        )
    except (NotTrained, VerificationError) as failure:
        fail(str(failure))
    except (BadModel, KeyFailure) as failure:
        stop(str(failure))
    except OSError as error:
        stop(f"{folder} cannot be written: {error.strerror}.")
    say(f"{_guarantee(claim)}; signed in {folder / STATEMENT_FILE}")


def verify_model(
    folder: FolderArgument,
    keys: KeysOption = None,
    keyset: KeysetOption = None,
    root: RootOption = None,
    status: StatusOption = None,
    require_status: RequireStatusOption = False,
    as_json: JsonOption = False,
) -> None:
    """Verify offline what a model's folder claims about its training, and name what does not fit.

    With --root alone, the keyset in the folder is used; --keyset gives a newer one.
    """
    try:
        if root is not None and not keyset:
            keyset = [folder / KEYSET_FILE]
        report = verify_folder(
            folder,
            TrustRoot(keys, keyset, root).public_keys(),
            options=VerificationOptions(
                status=None if status is None else read_file(status), require_status=require_status
            ),
        )
    except VerificationError as error:
        report = ModelReport(
            findings=[
                ModelFinding(
                    file=str(_inside(folder, keyset)),
                    code=error.code,
                    message=error.message,
                    remedy=error.remedy,
                )
            ]
        )
    except (BadModel, KeyFailure) as failure:
        stop(str(failure))
    except OSError as error:
        stop(f"cannot read {folder}: {error.strerror}.")
    (print_json(_as_document(report)) if as_json else _print(report))
    raise typer.Exit(Exit.CERTIFIED if report.verified else Exit.BLOCKED)


def _inside(folder: Path, keysets: Sequence[Path] | None) -> Path:
    """The keyset's place, from the folder if it is in it."""
    (*_, last) = keysets or [folder]
    return last.relative_to(folder) if last.is_relative_to(folder) else last


def _as_document(report: ModelReport) -> dict[str, Any]:
    return {
        "verified": report.verified,
        "steps": [{"name": name, "detail": detail} for name, detail in report.steps],
        "findings": [finding.as_dict() for finding in report.findings],
        "claim": report.claim or None,
    }


def _print(report: ModelReport) -> None:
    for name, detail in report.steps:
        out.print(f"[green]✓[/] {name}: {escape(detail)}")
    for finding in report.findings:
        out.print(
            f"[red]✗ {escape(finding.file)}: {finding.code}:[/] {escape(finding.message)} "
            f"{escape(finding.remedy)}"
        )
    if not report.verified:
        say("the model is not what was signed, or what was signed does not hold.")
        return
    say(f"{_guarantee(report.claim)}.")
    for code in report.claim["checked"]:
        say(f"  checked:  {CHECKED[code]}")
    for code in report.claim["declared"]:
        say(f"  declared: {DECLARED[code]}")


def _guarantee(claim: dict[str, Any]) -> str:
    guarantee = claim["guarantee"]
    epsilon, delta = guarantee["epsilon"], guarantee["delta"]["upper"]
    return (
        f"trained with ε ≤ {epsilon['upper']} at δ = {delta} under {guarantee['adjacency']}, "
        f"unit {guarantee['unit']}"
    )
