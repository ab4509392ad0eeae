"""``affidavit audit-model``: a measured lower end of ε, from the canaries of one run.

Where a plan has ``canaries``, ``affidavit train`` draws them and leaves them with their losses;
``new`` draws them for any other training, in which they take part as their coins say. ``check``
says what their losses prove. Exit codes of ``check``: 0 nothing contradicts the
certificate; 1 the lower end is above the certified ε, or the certificate does not verify; 2 usage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from affidavit.accountants import decimal_down
from affidavit.certificate import (
    AUDITABLE,
    BadCanaries,
    Canaries,
    KeyFailure,
    TrustRoot,
    VerificationError,
    audit_canaries,
    read_canaries,
    read_losses,
    verify,
)
from affidavit.gate.console import fail, print_json, read_file, say, stop, write
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import JsonOption, KeysetOption, KeysOption, RootOption, command_group

audit_model = command_group("Measure from one run how large ε is at least.")


@audit_model.command("new")
def new(
    out: Annotated[Path, typer.Option(help="File for the canaries; secret until the run ends.")],
    count: Annotated[int, typer.Option(help="Number of canaries.")] = 1000,
    guesses: Annotated[
        int | None, typer.Option(help="Even number of guesses; a third of the count by default.")
    ] = None,
) -> None:
    """Draw canaries for a training by other means, and print the digest to commit to.

    For affidavit train, write canaries into the plan instead.
    """
    try:
        canaries = Canaries.fresh(count, guesses)
    except BadCanaries as error:
        stop(str(error))
    write(out, canaries.as_bytes(), mode=0o600)
    say(f"{canaries.commitment}  {count} canaries in {out}; publish the digest before training")


@audit_model.command("check")
def check(
    canaries: Annotated[Path, typer.Option(help="The canaries.")],
    losses: Annotated[Path, typer.Option(help='Their losses: {"losses": [...]}, in order.')],
    certificate: Annotated[Path, typer.Option(help="Certificate bundle of the run.")],
    keys: KeysOption = None,
    keyset: KeysetOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare what the canaries' losses prove about ε with the certificate."""
    try:
        trusted = TrustRoot(keys, keyset, root).public_keys()
        guarantee = verify(read_file(certificate), trusted).predicate["guarantee"]
        if guarantee is None or guarantee["adjacency"] not in AUDITABLE:
            stop(f"{certificate}: audits are of guarantees under {' or '.join(sorted(AUDITABLE))}.")
        result = audit_canaries(
            read_canaries(read_file(canaries)),
            read_losses(read_file(losses)),
            delta=float(guarantee["delta"]["upper"]),
        )
    except VerificationError as error:
        fail(f"{certificate}: {error.code}: {error.message} {error.remedy}")
    except (BadCanaries, KeyFailure) as failure:
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
            f"{result.right} of {result.guesses} guesses are right: with confidence "
            f"{result.confidence:g}, ε ≥ {result.epsilon:.4g} at δ = {result.delta:g}, and "
            f"μ ≥ {result.mu:.4g} if its noise is Gaussian; certified: ε ≤ {upper}"
            + ("" if mu is None else f", μ ≤ {mu}")
        )
    if falsified:
        fail("the training did not keep its certificate.")
    raise typer.Exit(Exit.CERTIFIED)
