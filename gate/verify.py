"""``affidavit verify``: a certificate checked offline, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from affidavit.certificate import KeyFailure, TrustRoot, VerificationOptions
from affidavit.gate.console import out, read, stop
from affidavit.gate.demands import (
    AccountantOption,
    ConsistencyOption,
    LogOriginOption,
    PolicyOption,
    RequireLogOption,
    RequireStatusOption,
    StatusOption,
    StoreOption,
    accepted_policies,
    consistency_of,
    floors_of,
    lowest_versions,
    status_of,
)
from affidavit.gate.options import JsonOption
from affidavit.gate.seen import BadStore, SeenCheckpoints
from affidavit.gate.seen_status import SeenStatusLists
from affidavit.gate.verifying import Reporting, verify_bundle
from affidavit.plan import MalformedPlan


def verify(
    bundle: Annotated[str, typer.Argument(help="A certificate bundle; - reads stdin.")],
    plan: Annotated[
        str | None, typer.Option("--plan", help="The plan that it must be about.")
    ] = None,
    keys: Annotated[
        list[Path] | None,
        typer.Option(
            "--keys",
            help="Public keys to trust, as GET /v1/keys answers them, instead of your own.",
        ),
    ] = None,
    keyset: Annotated[
        list[Path] | None,
        typer.Option(
            "--keyset",
            help="The keyset whose keys to trust (GET /v1/keyset); several: oldest first.",
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option("--root", help="With --keyset: trusted roots, or the keyset seen last."),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Run the accountants again and compare.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print what the certificate says, once it is verified.")
    ] = False,
    accountants: AccountantOption = None,
    policies: PolicyOption = None,
    require_log: RequireLogOption = False,
    log_origin: LogOriginOption = None,
    checkpoint_store: StoreOption = None,
    consistency: ConsistencyOption = None,
    status: StatusOption = None,
    require_status: RequireStatusOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a certificate offline, step by step; 0 only if it verifies and certifies."""
    file = None if plan is None else read(plan, as_json=False)
    trust = TrustRoot(keys or [], keyset or [], root)
    seen, lists = SeenCheckpoints(checkpoint_store), SeenStatusLists()
    try:
        demands = VerificationOptions(
            accountants=lowest_versions(accountants),
            policies=accepted_policies(policies),
            floors=floors_of(policies),
            require_log=require_log,
            log_origin=log_origin,
            seen=seen.notes(),
            consistency=consistency_of(consistency),
            status=status_of(status),
            require_status=require_status,
            status_seen={} if status is None else lists.known(),
        )
        how = Reporting(recompute=recompute, show=show, as_json=as_json)
        code = verify_bundle(out, bundle, file, trust, demands, seen, lists, how)
    except (KeyFailure, MalformedPlan, BadStore) as failure:
        stop(str(failure))
    raise typer.Exit(code)
