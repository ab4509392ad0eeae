"""What ledger and queue refuse, with a code that stays and what to do about it.

>>> WrongState("the run is settled.", "There is nothing to stop.").code
'wrong_state'

A refusal is the answer to a request that was understood: budget, state or rights do not allow
it. A request that cannot be read is a ``MalformedRequest`` (``affidavit.service.wanted``).
"""

from __future__ import annotations

from typing import ClassVar


class Refusal(Exception):
    """Base of all of them; ``status`` is that of the HTTP answer."""

    code: ClassVar[str] = "refused"
    status: ClassVar[int] = 409

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message} {remedy}")
        self.message = message
        self.remedy = remedy


class WrongState(Refusal):
    """What is asked for was done already, or cannot be done any more, or not yet."""

    code = "wrong_state"


class IdempotencyKeyReused(Refusal):
    """The key came before, with another request."""

    code = "idempotency_key_reused"
    status = 422
