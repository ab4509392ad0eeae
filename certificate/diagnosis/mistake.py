"""A mistake: a wrong derivation that somebody really made, as changes of an account.

A new one is a function in ``catalogue/`` and a line in its registry: given a case it yields
the ways in which the mistake could have been made there, none where it could not. A way
that has to be guessed among many (which accumulation? how many devices?) carries a cost,
because among enough guesses one fits any number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from affidavit.certificate.diagnosis.account import Account, PhaseAccount
from affidavit.certificate.diagnosis.case import Case, Facts

Change = Callable[[PhaseAccount, Facts], PhaseAccount]


def unchanged(account: PhaseAccount, _facts: Facts) -> PhaseAccount:
    """The phase as it is; for mistakes that are made after the phases."""
    return account


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way of making a mistake.

    ``said`` tells what was accounted instead, in a sentence with its numbers; ``cost`` is how
    unlikely it is, in nats, before the claim is looked at.
    """

    code: str
    said: str
    change: Change = unchanged
    delta: float | None = None
    central_limit: bool = False
    cost: float = 1.0

    def of(self, account: Account, facts: tuple[Facts, ...]) -> Account:
        """``account`` with the mistake made."""
        phases = tuple(
            self.change(phase, fact) for phase, fact in zip(account.phases, facts, strict=True)
        )
        return replace(
            account, phases=phases, delta=account.delta if self.delta is None else self.delta
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A row of the catalogue, in words for a person, with the ways to make it in a case.

    ``wrong`` is the step that does not hold and why, ``source`` where it was seen or is
    corrected, ``fix`` what to do, ``field`` the plan's field that it is about.
    """

    code: str
    wrong: str
    source: str
    fix: str
    field: tuple[str, ...]
    ways: Callable[[Case], Iterator[Way]]
