"""``affidavit keyset``: which keys may sign, written down, signed by the roots, published.

The file travels: it is drafted where the signing keys' records are, signed in turn where
each root key is kept, checked, and published to the service.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from affidavit.certificate import (
    KeyFailure,
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
from affidavit.gate.console import err, out, stop, write
from affidavit.gate.exits import Exit
from affidavit.gate.roots import read_roots
from affidavit.gate.service_client import SERVER, ServerOption, ask

keyset = typer.Typer(help="The keyset that root keys sign.", no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(help="The keyset.")]


@keyset.command("new")
def keyset_new(
    file: Annotated[Path, typer.Option("--out", help="The draft to be signed.")],
    previous: Annotated[
        Path | None, typer.Option("--previous", help="The version before; none for the first.")
    ] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option("--root", help="A root key's public record; all, or the previous version's."),
    ] = None,
    threshold: Annotated[
        int | None, typer.Option(min=1, help="How many roots have to sign.")
    ] = None,
    keys: Annotated[
        list[Path] | None,
        typer.Option("--keys", help="Records of keys that sign, instead of your own."),
    ] = None,
    revoke: Annotated[
        list[str] | None,
        typer.Option("--revoke", help="KEY_ID, or KEY_ID=YYYY-MM-DDThh:mm:ssZ: from then on."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3660, help="Days until it expires.")] = 90,
) -> None:
    """Draft the next version; without --previous the first one."""
    try:
        last = None if previous is None else read_keyset(_read(previous))
        made = draft_keyset(
            last,
            roots=_roots(last, root or [], threshold),
            keys=(signing := _keys(last, keys or [])),
            revoked=_revoked(last, signing, revoke or []),
            issued_at=(now := datetime.now(UTC)),
            expires_at=now + timedelta(days=days),
        )
    except (KeyFailure, KeysetError) as failure:
        stop(str(failure))
    write(file, made.as_bytes())
    out.print(f"version {made.keyset.version}, to be signed: {escape(str(file))}", highlight=False)


@keyset.command("sign")
def keyset_sign(
    file: FileArgument,
    key: Annotated[Path, typer.Option("--key", help="The root key's private half, PEM.")],
) -> None:
    """Add the signature of a root key to the file."""
    try:
        signer = read_root_key(key)
        found = read_keyset(_read(file))
    except (KeyFailure, KeysetError) as failure:
        stop(str(failure))
    listed = {item.key_id for item in found.keyset.roots.keys}
    write(file, found.signed_by(signer).as_bytes())
    known = "" if signer.key_id in listed else ", a root of the version before"
    out.print(f"signed by {signer.key_id[:16]}{known}", highlight=False)


@keyset.command("check")
def keyset_check(
    file: FileArgument,
    root: Annotated[
        Path | None,
        typer.Option("--root", help="Roots that you trust, or the keyset that you saw last."),
    ] = None,
) -> None:
    """Whether the keyset counts: 0 if it does, 1 with the reason if it does not."""
    try:
        anchor = None if root is None else read_anchor(_read(root))
        found = accept_keyset([read_keyset(_read(file))], anchor, datetime.now(UTC))
    except KeysetError as error:
        err.print(f"[red]✗[/] {error.code}: {escape(str(error))}", highlight=False)
        raise typer.Exit(Exit.BLOCKED) from None
    against = "" if root is not None else " (by its own roots alone: give --root)"
    out.print(
        f"[green]✓[/] version {found.version}, {len(found.keys)} keys, {len(found.revoked)} "
        f"revoked, until {found.expires_at}{against}",
        highlight=False,
    )


@keyset.command("publish")
def keyset_publish(file: FileArgument, server: ServerOption = SERVER) -> None:
    """Hand the signed keyset to the service, which checks it and serves it."""
    try:
        found = read_keyset(_read(file))
    except KeysetError as failure:
        stop(str(failure))
    ask(server, "POST", "/v1/keysets", found.envelope.as_document())
    version = found.keyset.version
    out.print(f"version {version} is published ({found.digest})", highlight=False)


def _roots(last: SignedKeyset | None, records: list[Path], threshold: int | None) -> Roots:
    if records:
        default = len(records) if last is None else last.keyset.roots.threshold
        return read_roots(records, threshold or default)
    if last is None:
        stop("the first version needs its root keys; give --root for each, and --threshold.")
    if threshold is None:
        return last.keyset.roots
    return last.keyset.roots.model_copy(update={"threshold": threshold})


def _keys(last: SignedKeyset | None, files: list[Path]) -> list[PublicKey]:
    """The keys given, and those of ``last`` beside them, for what they signed still counts."""
    given = (
        [key for file in files for key in read_public_keys(file)]
        if files
        else KeyStore(home() / "keys").public_keys()
    )
    before = () if last is None else last.keyset.public_keys()
    return list({key.key_id: key for key in (*before, *given)}.values())


def _revoked(
    last: SignedKeyset | None, keys: list[PublicKey], wanted: list[str]
) -> list[Revocation]:
    begins = {key.key_id: format_instant(key.not_before) for key in keys}
    found = {} if last is None else {entry.key_id: entry for entry in last.keyset.revoked}
    for item in wanted:
        key_id, _, since = item.partition("=")
        if key_id not in begins:
            stop(f"--revoke {key_id}: no such key among the keyset's; give a whole key id.")
        document = {"key_id": key_id, "since": since or begins[key_id]}
        found[key_id] = read_model(Revocation, document)
    return list(found.values())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        stop(f"{path} cannot be read: {error.strerror}.")
