"""Options of ``affidavit verify`` that demand more than a valid certificate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from affidavit.accountants import ENGINE_NAMES
from affidavit.certificate import BadTrustPolicy, TrustPolicy, parse_trust_policy
from affidavit.certificate.log import BadLogPart, Consistency, read_consistency
from affidavit.certificate.policy import Policy
from affidavit.gate.console import read_file, stop
from affidavit.gate.policy import read_policy
from affidavit.plan import MalformedPlan, load_json

AccountantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accountant", metavar="NAME=VERSION", help="Minimum version of an accountant; repeatable."
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="DIGEST|FILE",
        help="Digest of an accepted policy, or a policy file whose rules must hold; repeatable.",
    ),
]
RequireLogOption = Annotated[
    bool,
    typer.Option(
        "--require-log", help="Reject a bundle without a proof of inclusion in a consistent log."
    ),
]
LogOriginOption = Annotated[
    str | None, typer.Option("--log-origin", help="Name of the only accepted log.")
]
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint-store",
        help="File with the last checkpoint seen of each log, instead of your own.",
    ),
]
ConsistencyOption = Annotated[
    Path | None,
    typer.Option(
        "--consistency",
        help="Consistency proof from the last checkpoint seen (GET /v1/log/proof/consistency).",
    ),
]

StatusOption = Annotated[
    Path | None,
    typer.Option("--status", help="Signed status list, as written by `affidavit status --out`."),
]
RequireStatusOption = Annotated[
    bool, typer.Option("--require-status", help="Reject a bundle without a revocation check.")
]

TrustOption = Annotated[
    Path | None,
    typer.Option(
        "--trust", help="Trust policy (YAML): log, witnesses and freshness; default: the keyset's."
    ),
]

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_VERSION = re.compile(r"([a-z_]+)=([0-9]+(?:\.[0-9]+)*)")


def minimum_versions(options: Sequence[str] | None) -> dict[str, str]:
    """Parse the ``NAME=VERSION`` options."""
    versions: dict[str, str] = {}
    for option in options or ():
        match = _VERSION.fullmatch(option)
        if match is None or match[1] not in ENGINE_NAMES:
            names = ", ".join(ENGINE_NAMES)
            stop(f"--accountant {option}: give NAME=VERSION, with NAME one of {names}.")
        versions[match[1]] = match[2]
    return versions


def accepted_policies(options: Sequence[str] | None) -> frozenset[str]:
    """The policy digests among the ``--policy`` options."""
    return frozenset(option for option in options or () if _DIGEST.fullmatch(option))


def required_policies(options: Sequence[str] | None) -> tuple[Policy, ...]:
    """The policies in the files among the ``--policy`` options."""
    files = [option for option in options or () if _DIGEST.fullmatch(option) is None]
    for file in files:
        if file.startswith("sha256:"):
            stop(f"--policy {file}: a digest is sha256: and 64 lower-case hexadecimal digits.")
    return tuple(read_policy(Path(file)) for file in files)


def read_consistency_file(path: Path | None) -> Consistency | None:
    """The consistency proof in a file."""
    if path is None:
        return None
    try:
        return read_consistency(load_json(read_file(path)).data)
    except MalformedPlan as error:
        stop(f"{path}: {error.reasons[0].message}")
    except BadLogPart as error:
        stop(f"{path} is not a consistency proof: {error}.")


def read_trust_policy(path: Path | None) -> TrustPolicy | None:
    """The trust policy in a file."""
    if path is None:
        return None
    try:
        return parse_trust_policy(read_file(path))
    except BadTrustPolicy as error:
        stop(f"{path} is not a trust policy: {error}.")
