"""What a verifier asks beyond the certificate itself, as options of ``affidavit verify``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from affidavit.accountants import NAMES
from affidavit.certificate.log import BadLogPart, Consistency, read_consistency
from affidavit.certificate.policy import Policy
from affidavit.gate.console import stop
from affidavit.gate.policy import read_policy
from affidavit.plan import MalformedPlan, load_json

AccountantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accountant",
        metavar="NAME=VERSION",
        help="The lowest version of an accountant to accept; may be repeated.",
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="DIGEST|FILE",
        help="A policy to accept, by its digest, or a policy file whose rules it must keep; "
        "may be repeated.",
    ),
]
RequireLogOption = Annotated[
    bool,
    typer.Option(
        "--require-log",
        help="Reject a bundle whose place in a log, and that log's growth, is not proved.",
    ),
]
LogOriginOption = Annotated[
    str | None, typer.Option("--log-origin", help="The only log to accept, by its name.")
]
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint-store",
        help="Where the last checkpoint seen of each log is kept, instead of your own file.",
    ),
]
ConsistencyOption = Annotated[
    Path | None,
    typer.Option(
        "--consistency",
        help="The answer of GET /v1/log/proof/consistency, from the last checkpoint seen.",
    ),
]

StatusOption = Annotated[
    Path | None,
    typer.Option("--status", help="A signed status list, as `affidavit status --out` writes it."),
]
RequireStatusOption = Annotated[
    bool,
    typer.Option("--require-status", help="Reject a bundle whose revocation is not checked."),
]

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_VERSION = re.compile(r"([a-z_]+)=([0-9]+(?:\.[0-9]+)*)")


def lowest_versions(given: Sequence[str] | None) -> dict[str, str]:
    """``NAME=VERSION`` options as a table."""
    found: dict[str, str] = {}
    for item in given or ():
        read = _VERSION.fullmatch(item)
        if read is None or read[1] not in NAMES:
            stop(f"--accountant {item}: give NAME=VERSION, with NAME one of {', '.join(NAMES)}.")
        found[read[1]] = read[2]
    return found


def accepted_policies(given: Sequence[str] | None) -> frozenset[str]:
    """The digests among what was given."""
    return frozenset(item for item in given or () if _DIGEST.fullmatch(item))


def floors_of(given: Sequence[str] | None) -> tuple[Policy, ...]:
    """The policies in the files among what was given."""
    files = [item for item in given or () if _DIGEST.fullmatch(item) is None]
    for file in files:
        if file.startswith("sha256:"):
            stop(f"--policy {file}: a digest is sha256: and 64 lower-case hexadecimal digits.")
    return tuple(read_policy(Path(entry)) for entry in files)


def status_of(path: Path | None) -> bytes | None:
    """The bytes of a status list's file."""
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        stop(f"{path} cannot be read: {error.strerror}.")


def consistency_of(path: Path | None) -> Consistency | None:
    """The consistency proof in a file."""
    if path is None:
        return None
    try:
        return read_consistency(load_json(path.read_bytes()).data)
    except OSError as error:
        stop(f"{path} cannot be read: {error.strerror}.")
    except MalformedPlan as error:
        stop(f"{path}: {error.reasons[0].message}")
    except BadLogPart as error:
        stop(f"{path} is not a consistency proof: {error}.")
