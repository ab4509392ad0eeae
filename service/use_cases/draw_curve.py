"""Draw the curves of a certificate: what its guarantee says beside one ε, read again.

The plan is read from the signed bytes and its curves are computed in the accounting pool,
under the same time limit as a certificate. They follow from the plan and the engines, as
the certificate's id does, so that the latest are kept in memory and asked for once at a time.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass

from affidavit.certificate import Assessment, curves, picture, read_envelope
from affidavit.plan import Plan, Reason, plan_from
from affidavit.service.errors import TooBusy
from affidavit.service.pool import AccountingPool
from affidavit.service.single_flight import SingleFlight
from affidavit.service.store import StoredCertificate

MOST_WAITING = 64
"""Curves that are computed or wait for it, beyond which another is turned away."""
MOST_KEPT = 128
"""Curves kept in memory, about 60 KB each."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The document of curves and their picture."""

    document: str
    svg: str


class NoCurve(Exception):
    """Nothing is claimed about the plan of which a curve could be drawn."""

    def __init__(self, reasons: tuple[Reason, ...]) -> None:
        super().__init__("no curve")
        self.reasons = reasons


class DrawCurve:
    """The use case, with the pool it works in; it belongs to one event loop."""

    def __init__(self, pool: AccountingPool) -> None:
        self._pool = pool
        self._flights: SingleFlight[Drawn | tuple[Reason, ...]] = SingleFlight()
        self._kept: OrderedDict[str, Drawn | tuple[Reason, ...]] = OrderedDict()

    async def __call__(self, certificate: StoredCertificate) -> Drawn:
        """The curves of ``certificate``.

        Raises ``NoCurve``, ``TooBusy``, ``AccountingTimeout``, ``AccountingFailed``.
        """
        wanted = certificate.id
        if wanted not in self._kept:
            if wanted not in self._flights and len(self._flights) >= MOST_WAITING:
                raise TooBusy
            plan = plan_of(certificate)
            found, _ = await self._flights.run(wanted, lambda: self._pool.run_aside(drawn, plan))
            self._kept[wanted] = found
        self._kept.move_to_end(wanted)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        kept = self._kept[wanted]
        if isinstance(kept, Drawn):
            return kept
        raise NoCurve(kept)


def plan_of(certificate: StoredCertificate) -> Plan:
    """The plan that a stored certificate carries in its signed bytes."""
    envelope = read_envelope(json.loads(certificate.bundle)["envelope"])
    return plan_from(json.loads(envelope.payload)["predicate"]["plan"])


def drawn(plan: Plan) -> Drawn | tuple[Reason, ...]:
    """In the pool: the curves of ``plan``, or the reasons why there are none."""
    found = curves(plan)
    if isinstance(found, Assessment):
        return found.reasons
    return Drawn(
        document=json.dumps(found.as_document(), allow_nan=False, ensure_ascii=False),
        svg=picture(found),
    )
