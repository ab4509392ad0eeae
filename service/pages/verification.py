"""A bundle verified while its page is made: each step green, red or not reached.

It is the same verification that ``affidavit verify`` makes, with this service's own keys, which
is why it convinces nobody else: every step comes with the command that repeats it offline with
keys from somewhere that the reader trusts.
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
MORE: dict[int, str] = {
    7: " --plan plan.yaml",
    10: " --require-log",
    11: " --require-log",
    12: " --require-log",
    13: " --require-status",
}
"""What a verifier adds to look at a step closely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of the verification, and the command that makes it somewhere else.

    ``adds`` is what that command has beyond the one that makes every step.
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
    """This service's keys, those that the newest keyset revokes from then on."""
    newest = services.keysets.newest()
    since = {} if newest is None else read_keyset(newest).keyset.revoked_since()
    records = [*services.store.keys(), *services.keyring.public_records()]
    keys = (PublicKey.from_record(dict(record)) for record in records)
    return tuple(replace(key, revoked_from=since.get(key.key_id)) for key in keys)


def verification(
    bundle: bytes, trusted: Iterable[PublicKey], now: datetime, revoked: str | None
) -> Verification:
    """``bundle`` against ``trusted`` keys, at ``now``.

    ``revoked`` says why it was revoked, if it was: what a status list tells others, this
    service has in its own records.
    """
    try:
        found = verify(bundle, trusted, now=now)
        if revoked is not None:
            raise VerificationError(STATUS, "revoked", revoked, "Do not use it.")
    except VerificationError as error:
        return Verification(
            passed=False,
            steps=tuple(_step(number, *_rejected(number, error)) for number in _NUMBERS),
            code=error.code,
            remedy=error.remedy,
        )
    saw = {number: detail for number, _, detail in found.steps}
    saw[STATUS] = "not revoked, by the records of this service"
    left = set(found.unchecked) - {STATUS}
    return Verification(
        passed=True,
        steps=tuple(
            _step(number, "unchecked" if number in left else "passed", saw[number])
            for number in _NUMBERS
        ),
    )


STATUS = len(STEPS)
_NUMBERS = range(1, STATUS + 1)


def _rejected(number: int, error: VerificationError) -> tuple[State, str]:
    if number < error.step:
        return "passed", ""
    return ("failed", error.message) if number == error.step else ("not_reached", "")


def _step(number: int, state: State, detail: str) -> Step:
    return Step(
        number=number,
        name=STEPS[number - 1],
        state=state,
        detail=detail,
        command=VERIFY + MORE.get(number, ""),
        adds=MORE.get(number, "").strip(),
    )
