"""``affidavit keyset``: draft, sign, check and publish the list of keys that may sign.

The keyset file is drafted where the public records of the signing keys are, signed by each root
key where that key is stored, checked, and published to the service.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from affidavit.certificate import (
    KeysetError,
    KeyStore,
    PublicKey,
    Revocation,
    Roots,
    SignedKeyset,
    accept_keyset,
    draft_keyset,
    format_instant,
    home,
    read_anchor,
    read_keyset,
    read_model,
    read_public_keys,
    read_root_key,
)
from affidavit.gate.client import SERVER, ServerOption, connect
from affidavit.gate.console import fail, out, read_file, say, stop, usage_errors, write
from affidavit.gate.keys import read_roots
from affidavit.gate.options import command_group
from affidavit.gate.verify_options import read_trust_policy

keyset = command_group("Draft, sign, check and publish keysets: lists of keys that may sign.")

FileArgument = Annotated[Path, typer.Argument(help="Keyset file.")]


@keyset.command("new")
def keyset_new(
    file: Annotated[Path, typer.Option("--out", help="File for the draft.")],
    previous: Annotated[
        Path | None, typer.Option("--previous", help="Previous version; omit it for the first.")
    ] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option("--root", help="Public record of a root key; default: the previous roots."),
    ] = None,
    threshold: Annotated[
        int | None, typer.Option(min=1, help="Number of roots that must sign.")
    ] = None,
    keys: Annotated[
        list[Path] | None,
        typer.Option("--keys", help="Public records of signing keys, instead of your own."),
    ] = None,
    revoke: Annotated[
        list[str] | None,
        typer.Option("--revoke", help="KEY_ID, or KEY_ID=YYYY-MM-DDThh:mm:ssZ: from then on."),
    ] = None,
    trust: Annotated[
        Path | None,
        typer.Option("--trust", help="Default trust policy (YAML); default: the previous one."),
    ] = None,
    administrators: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10,
            help="Administrators who must request the same change; default: as before, or 1.",
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3660, help="Days until the keyset expires.")] = 90,
) -> None:
    """Draft the next version, or without --previous the first one."""
    with usage_errors():
        last = None if previous is None else read_keyset(read_file(previous))
        keyset_draft = draft_keyset(
            last,
            roots=_roots(last, root or [], threshold),
            keys=(signing := _keys(last, keys or [])),
            revoked=_revoked(last, signing, revoke or []),
            issued_at=(now := datetime.now(UTC)),
            expires_at=now + timedelta(days=days),
            trust=read_trust_policy(trust) or (None if last is None else last.keyset.trust),
            administrators=_administrators(last, administrators),
        )
    write(file, keyset_draft.as_bytes())
    say(f"version {keyset_draft.keyset.version} drafted, to be signed: {file}")


@keyset.command("sign")
def keyset_sign(
    file: FileArgument, key: Annotated[Path, typer.Option("--key", help="Private root key, PEM.")]
) -> None:
    """Sign the keyset with a root key."""
    with usage_errors():
        signer = read_root_key(key)
        signed = read_keyset(read_file(file))
    listed = {root.key_id for root in signed.keyset.roots.keys}
    write(file, signed.signed_by(signer).as_bytes())
    former = "" if signer.key_id in listed else ", a root of the previous version"
    say(f"signed by {signer.key_id[:16]}{former}")


@keyset.command("check")
def keyset_check(
    file: FileArgument,
    root: Annotated[
        Path | None, typer.Option("--root", help="Trusted roots, or the last keyset seen.")
    ] = None,
) -> None:
    """Check whether a keyset is valid; exits 1 with the reason if not."""
    try:
        anchor = None if root is None else read_anchor(read_file(root))
        accepted = accept_keyset([read_keyset(read_file(file))], anchor, datetime.now(UTC))
    except KeysetError as error:
        fail(f"{error.code}: {error}")
    caveat = "" if root is not None else " (only by its own roots: give --root)"
    out.print(
        f"[green]✓[/] version {accepted.version}, {len(accepted.keys)} keys, "
        f"{len(accepted.revoked)} revoked, valid until {accepted.expires_at}{caveat}"
    )


@keyset.command("publish")
def keyset_publish(file: FileArgument, server: ServerOption = SERVER) -> None:
    """Publish the signed keyset on the service, which checks and serves it."""
    with usage_errors():
        signed = read_keyset(read_file(file))
    with connect(server) as client:
        client.publish_keyset(signed.envelope.as_document())
    say(f"version {signed.keyset.version} published ({signed.digest})")


def _administrators(last: SignedKeyset | None, option: int | None) -> int | None:
    if option is None:
        return None if last is None else last.keyset.administrators
    return option if option > 1 else None


def _roots(last: SignedKeyset | None, records: list[Path], threshold: int | None) -> Roots:
    if records:
        default = len(records) if last is None else last.keyset.roots.threshold
        return read_roots(records, threshold or default)
    if last is None:
        stop("the first version needs --root for each root key, and --threshold.")
    if threshold is None:
        return last.keyset.roots
    return last.keyset.roots.model_copy(update={"threshold": threshold})


def _keys(last: SignedKeyset | None, files: list[Path]) -> list[PublicKey]:
    """The given keys, and those of ``last``, whose signatures remain valid."""
    new = (
        [key for file in files for key in read_public_keys(file)]
        if files
        else KeyStore(home() / "keys").public_keys()
    )
    previous = () if last is None else last.keyset.public_keys()
    return list({key.key_id: key for key in (*previous, *new)}.values())


def _revoked(
    last: SignedKeyset | None, keys: list[PublicKey], options: list[str]
) -> list[Revocation]:
    begins = {key.key_id: format_instant(key.not_before) for key in keys}
    revoked = {} if last is None else {entry.key_id: entry for entry in last.keyset.revoked}
    for option in options:
        key_id, _, since = option.partition("=")
        if key_id not in begins:
            stop(f"--revoke {key_id}: no such key in the keyset; give a full key id.")
        document = {"key_id": key_id, "since": since or begins[key_id]}
        revoked[key_id] = read_model(Revocation, document)
    return list(revoked.values())
