"""``affidavit roots`` and ``keyset``: root keys, and the lists of keys that they sign.

A keyset is drafted with the public records of the signing keys, signed on the machine of each root
key, checked, and published to the service.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from affidavit import trust as trusts
from affidavit.gate.console import (
    as_json_file,
    fail,
    out,
    read_file,
    say,
    stop,
    usage_errors,
    write,
)
from affidavit.gate.options import DEFAULT_SERVER, ServerOption, command_group

roots = command_group("Manage root keys, which sign keysets offline.")


@roots.command("new")
def roots_new(
    directory: Annotated[Path, typer.Option("--out", help="Directory on the offline medium.")],
    label: Annotated[str, typer.Option(help="Holder of the key.")] = "",
) -> None:
    """Create a root key: NAME.pem to keep secret, NAME.json to share."""
    key = trusts.SigningKey.generate(label)
    name = f"root-{key.key_id[:16]}"
    with usage_errors():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        trusts.write_private(directory / f"{name}.pem", key.private)
    write(directory / f"{name}.json", as_json_file(key.public.as_record()))
    out.print(f"{key.key_id}  keep {directory / name}.pem offline")


@roots.command("trust")
def roots_trust(
    records: Annotated[list[Path], typer.Argument(help="Public records of the root keys.")],
    threshold: Annotated[int, typer.Option(min=1, help="Number of roots that must sign.")],
    file: Annotated[Path, typer.Option("--out", help="File for verifiers.")],
) -> None:
    """Write the trusted roots for verifiers (`verify --root FILE`)."""
    write(file, as_json_file(_read_roots(records, threshold).model_dump(mode="json")))


def _read_roots(records: list[Path], threshold: int) -> trusts.Roots:
    """Read the roots from public records; report invalid ones and exit."""
    with usage_errors():
        return trusts.Roots.of(
            [key for path in records for key in trusts.read_public_keys(path)], threshold
        )


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
        typer.Option(
            "--revoke", help="KEY_ID, or KEY_ID=YYYY-MM-DDThh:mm:ssZ to revoke it from then on."
        ),
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
        last = None if previous is None else trusts.read_keyset(read_file(previous))
        keyset_draft = trusts.draft_keyset(
            last,
            roots=_roots(last, root or [], threshold),
            keys=(signing := _keys(last, keys or [])),
            revoked=_revoked(last, signing, revoke or []),
            issued_at=(now := datetime.now(UTC)),
            expires_at=now + timedelta(days=days),
            trust=trusts.read_trust_policy(trust) or (None if last is None else last.keyset.trust),
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
        signer = trusts.read_root_key(key)
        signed = trusts.read_keyset(read_file(file))
    current_roots = {root.key_id for root in signed.keyset.roots.keys}
    write(file, signed.signed_by(signer).as_bytes())
    origin = "" if signer.key_id in current_roots else ", a root of the previous version"
    say(f"signed by {signer.key_id[:16]}{origin}")


@keyset.command("check")
def keyset_check(
    file: FileArgument,
    root: Annotated[
        Path | None, typer.Option("--root", help="Trusted roots, or the last keyset seen.")
    ] = None,
) -> None:
    """Check whether a keyset is valid; exit with 1 and the reason if it is not."""
    try:
        anchor = None if root is None else trusts.read_anchor(read_file(root))
        accepted = trusts.accept_keyset(
            [trusts.read_keyset(read_file(file))], anchor, datetime.now(UTC)
        )
    except trusts.KeysetError as error:
        fail(f"{error.code}: {error}")
    caveat = "" if root is not None else " (only by its own roots: give --root)"
    out.print(
        f"[green]✓[/] version {accepted.version}, {len(accepted.keys)} keys, "
        f"{len(accepted.revoked)} revoked, valid until {accepted.expires_at}{caveat}"
    )


@keyset.command("publish")
def keyset_publish(file: FileArgument, server: ServerOption = DEFAULT_SERVER) -> None:
    """Publish the signed keyset on the service, which checks and serves it."""
    from affidavit.gate.service_commands import connect  # imports the client, slowly

    with usage_errors():
        signed = trusts.read_keyset(read_file(file))
    with connect(server) as client:
        client.publish_keyset(signed.envelope.as_document())
    say(f"version {signed.keyset.version} published ({signed.digest})")


def _administrators(last: trusts.SignedKeyset | None, option: int | None) -> int | None:
    if option is None:
        return None if last is None else last.keyset.administrators
    return option if option > 1 else None


def _roots(
    last: trusts.SignedKeyset | None, records: list[Path], threshold: int | None
) -> trusts.Roots:
    if records:
        default = len(records) if last is None else last.keyset.roots.threshold
        return _read_roots(records, threshold or default)
    if last is None:
        stop("the first version needs --root for each root key, and --threshold.")
    if threshold is None:
        return last.keyset.roots
    return last.keyset.roots.model_copy(update={"threshold": threshold})


def _keys(last: trusts.SignedKeyset | None, files: list[Path]) -> list[trusts.PublicKey]:
    """Return the keys in ``files`` and those of the last keyset, whose signatures stay valid."""
    new = (
        [key for file in files for key in trusts.read_public_keys(file)]
        if files
        else trusts.KeyStore(trusts.home() / "keys").public_keys()
    )
    previous = () if last is None else last.keyset.public_keys()
    return list({key.key_id: key for key in (*previous, *new)}.values())


def _revoked(
    last: trusts.SignedKeyset | None, keys: list[trusts.PublicKey], options: list[str]
) -> list[trusts.Revocation]:
    begins = {key.key_id: trusts.format_instant(key.not_before) for key in keys}
    revoked = {} if last is None else {entry.key_id: entry for entry in last.keyset.revoked}
    for option in options:
        key_id, _, since = option.partition("=")
        if key_id not in begins:
            stop(f"--revoke {key_id}: no such key in the keyset; give a full key id.")
        document = {"key_id": key_id, "since": since or begins[key_id]}
        revoked[key_id] = trusts.read_model(trusts.Revocation, document)
    return list(revoked.values())
