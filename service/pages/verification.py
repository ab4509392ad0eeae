"""A bundle verified while its page is rendered: each step passed, failed or was not reached.

It is the verification of ``affidavit verify``, with this service's own keys, so it convinces
nobody else: every step comes with the command that repeats it offline with keys from a source
that the reader trusts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from affidavit.certificate import STEPS, PublicKey, VerificationError, read_keyset, verify
from affidavit.service.services import Services

State = Literal["passed", "failed", "unchecked", "not_reached"]
VERIFY = "affidavit verify bundle.json --keys keys.json --status status.json"
OPTIONS: dict[int, str] = {
    7: " --plan plan.yaml",
    10: " --require-log",
    11: " --require-log",
    12: " --require-log",
    13: " --require-status",
}
"""Options that make the command check a step more strictly."""
STATUS = len(STEPS)
"""The step that checks for revocation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step, and the command that repeats it elsewhere.

    ``adds`` are the options of that command beyond those of the basic one.
    """

    number: int
    name: str
    state: State
    detail: str
    command: str
    adds: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """All steps; ``code`` and ``remedy`` say why one failed."""

    passed: bool
    steps: tuple[Step, ...]
    code: str | None = None
    remedy: str | None = None


def trusted_keys(services: Services) -> tuple[PublicKey, ...]:
    """This service's keys, with the revocations of the newest keyset."""
    newest = services.keysets.newest()
    since = {} if newest is None else read_keyset(newest).keyset.revoked_since()
    records = [*services.store.keys(), *services.keyring.public_records()]
    keys = (PublicKey.from_record(dict(record)) for record in records)
    return tuple(replace(key, revoked_from=since.get(key.key_id)) for key in keys)


def verification(
    bundle: bytes, trusted: Iterable[PublicKey], now: datetime, revoked: str | None
) -> Verification:
    """``bundle`` verified with ``trusted`` keys at ``now``.

    ``revoked`` says why it was revoked, if it was: this service knows from its own records
    what a status list tells others.
    """
    states: dict[int, tuple[State, str]] = {}
    error: VerificationError | None = None
    try:
        result = verify(bundle, trusted, now=now)
        if revoked is not None:
            raise VerificationError(STATUS, "revoked", revoked, "Do not use it.")
    except VerificationError as failure:
        error = failure
        states = dict.fromkeys(range(1, error.step), ("passed", ""))
        states[error.step] = ("failed", error.message)
    else:
        for number, _, detail in result.steps:
            states[number] = ("unchecked" if number in result.unchecked else "passed", detail)
        states[STATUS] = ("passed", "not revoked, by the records of this service")
    steps = []
    for number, name in enumerate(STEPS, 1):
        state, detail = states.get(number, ("not_reached", ""))
        adds = OPTIONS.get(number, "")
        steps.append(
            Step(
                number=number,
                name=name,
                state=state,
                detail=detail,
                command=VERIFY + adds,
                adds=adds.strip(),
            )
        )
    return Verification(
        passed=error is None,
        steps=tuple(steps),
        code=None if error is None else error.code,
        remedy=None if error is None else error.remedy,
    )
