"""``affidavit keys``, ``roots`` and ``keyset``: signing keys, root keys, and lists of keys.

A keyset is drafted with the public records of the signing keys, signed on the machine of each root
key, checked, and published to the service.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from affidavit.gate.console import (
    as_json_file,
    err,
    fail,
    out,
    print_json,
    read_file,
    say,
    stop,
    usage_errors,
    write,
)
from affidavit.gate.options import DEFAULT_SERVER, JsonOption, ServerOption, command_group
from affidavit.trust import (
    OVERLAP,
    SERVICE_ROLES,
    KeyFailure,
    KeyRole,
    KeysetError,
    KeyStore,
    PublicKey,
    Revocation,
    Roots,
    SignedKeyset,
    SigningKey,
    accept_keyset,
    draft_keyset,
    format_instant,
    home,
    read_anchor,
    read_keyset,
    read_model,
    read_public_keys,
    read_root_key,
    read_trust_policy,
    write_private,
)

keys = command_group("Manage signing keys.")

LabelOption = Annotated[str, typer.Option(help="Display name of the key.")]
RolesOption = Annotated[
    list[KeyRole] | None,
    typer.Option("--role", help="What the key may sign; repeatable. Default: everything."),
]
EachRoleOption = Annotated[
    bool,
    typer.Option(
        "--each-role",
        help="One key each for certificates, checkpoints, status lists and run records.",
    ),
]
OverlapOption = Annotated[
    int, typer.Option("--overlap-days", min=0, max=730, help="Days for which old keys stay valid.")
]


@keys.command("new")
def keys_new(
    label: LabelOption = "", roles: RolesOption = None, each_role: EachRoleOption = False
) -> None:
    """Create a signing key in the key directory, or one for each role."""
    requested = [frozenset({role}) for role in _roles(roles, each_role=each_role)]
    with usage_errors():
        for role in requested or (None,):
            _print_new(_store().new(label, roles=role))
    say(f"stored in {_store().directory}")


@keys.command("rotate")
def keys_rotate(
    overlap_days: OverlapOption = OVERLAP.days,
    label: LabelOption = "",
    roles: RolesOption = None,
    each_role: EachRoleOption = False,
) -> None:
    """Create new keys that sign from now on, and limit the validity of the old ones.

    Without --role, every role that has a key of its own gets a new one. Keys that sign only
    certificates stay valid, because their certificates would end with them.
    """
    with usage_errors():
        separate = {role for key in _store().public_keys() for role in key.roles or ()}
        requested = _roles(roles, each_role=each_role) or sorted(separate)
        ending = 0
        for role in requested or (None,):
            new, shortened = _store().rotate(timedelta(days=overlap_days), label, role=role)
            _print_new(new)
            ending += shortened
    out.print(f"{ending} older keys end in {overlap_days} days")


@keys.command("retire")
def keys_retire(key: Annotated[str, typer.Argument(help="Key id, or a unique prefix.")]) -> None:
    """End the validity of a key now.

    If the key signs only certificates, they end with it.
    """
    with usage_errors():
        retired = _store().retire(key)
    out.print(f"{retired.key_id}  signed until {retired.not_after:%Y-%m-%d}")


@keys.command("add")
def keys_add(
    public: Annotated[Path, typer.Argument(help="Public key, PEM.")],
    label: LabelOption = "",
    roles: RolesOption = None,
) -> None:
    """Add a key whose private half is on a hardware token or behind a command."""
    try:
        added = _store().add(read_file(public), label, roles=roles or None)
    except KeyFailure as failure:
        stop(f"{public}: {failure}")
    except OSError as error:
        stop(f"cannot access {error.filename}: {error.strerror}.")
    out.print(f"{added.key_id}  signs until {added.not_after:%Y-%m-%d}")


@keys.command("list")
def keys_list(as_json: JsonOption = False) -> None:
    """List the keys in the key directory, oldest first."""
    with usage_errors():
        public_keys = _store().public_keys()
    if as_json:
        print_json({"keys": [key.as_record() for key in public_keys]})
        return
    for key in public_keys:
        out.print(
            f"{key.key_id}  {key.not_before:%Y-%m-%d} to {key.not_after:%Y-%m-%d}  "
            f"{_signs(key):11}  {escape(key.label)}"
        )
    if not public_keys:
        err.print("No keys yet; create one with `affidavit keys new`.")


def _roles(roles: list[KeyRole] | None, *, each_role: bool) -> list[KeyRole]:
    if each_role and roles:
        stop("give --role or --each-role, not both.")
    return [*SERVICE_ROLES, KeyRole.RUN] if each_role else roles or []


def _signs(key: PublicKey) -> str:
    return ", ".join(sorted(key.roles)) if key.roles else "everything"


def _print_new(key: SigningKey) -> None:
    role = f"  {_signs(key.public)}" if key.public.roles else ""
    out.print(f"{key.key_id}  signs until {key.public.not_after:%Y-%m-%d}{role}")


def _store() -> KeyStore:
    return KeyStore(home() / "keys")


roots = command_group("Manage root keys, which sign keysets offline.")


@roots.command("new")
def roots_new(
    directory: Annotated[Path, typer.Option("--out", help="Directory on the offline medium.")],
    label: Annotated[str, typer.Option(help="Holder of the key.")] = "",
) -> None:
    """Create a root key: NAME.pem to keep secret, NAME.json to share."""
    key = SigningKey.generate(label)
    name = f"root-{key.key_id[:16]}"
    with usage_errors():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(directory / f"{name}.pem", key.private)
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


def _read_roots(records: list[Path], threshold: int) -> Roots:
    """Read the roots from public records; report invalid ones and exit."""
    with usage_errors():
        return Roots.of([key for path in records for key in read_public_keys(path)], threshold)


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
def keyset_publish(file: FileArgument, server: ServerOption = DEFAULT_SERVER) -> None:
    """Publish the signed keyset on the service, which checks and serves it."""
    from affidavit.gate.service_commands import connect  # imports the client, slowly

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
        return _read_roots(records, threshold or default)
    if last is None:
        stop("the first version needs --root for each root key, and --threshold.")
    if threshold is None:
        return last.keyset.roots
    return last.keyset.roots.model_copy(update={"threshold": threshold})


def _keys(last: SignedKeyset | None, files: list[Path]) -> list[PublicKey]:
    """Return the keys in ``files`` and those of the last keyset, whose signatures stay valid."""
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
