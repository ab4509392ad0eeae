"""The desk: what the routes ask of a ledger, with the accounting done before the transaction.

What a certificate's run costs follows from its signed bytes, and what runs cost together
from the ledger's rows, so that both are kept in memory and worked out once at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool

from affidavit.accountants.privacy_filter import Cost
from affidavit.certificate import Assessment
from affidavit.plan import Plan
from affidavit.service.command import CommandContext
from affidavit.service.concurrency import Batcher, SingleFlight, in_thread_pool
from affidavit.service.errors import AccountingUnavailable
from affidavit.service.keyring import Keyring
from affidavit.service.ledger import document, refusals
from affidavit.service.ledger.costing import (
    Costed,
    composition,
    cost_of_assessment,
    cost_of_bundle,
)
from affidavit.service.ledger.ledger import Ledger
from affidavit.service.ledger.rows import KeptLedger, Reservation, Scope
from affidavit.service.ledger.steps import Claim, require_usable
from affidavit.service.pool import AccountingPool
from affidavit.service.store import CertificateStore, StoredCertificate

MOST_KEPT = 512


class Desk:
    """The ledger's use cases; belongs to one event loop.

    Methods raise ``DomainError``, and where they account ``AccountingTimeout`` or
    ``AccountingFailed``. ``loopback`` lets certificates of a development key be reserved for,
    as long as there is no other key: nobody else reaches the service then.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: CertificateStore,
        pool: AccountingPool,
        signers: Keyring,
        *,
        loopback: bool,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._pool = pool
        self._signers = signers
        self._loopback = loopback
        self._flights: SingleFlight[dict[str, Any]] = SingleFlight()
        self._sought: Batcher[Scope, KeptLedger | None] = Batcher(in_thread_pool(ledger.find_all))
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()

    async def reserve(
        self, dataset: str | None, certificate_id: str, call: CommandContext
    ) -> tuple[Reservation, bool]:
        """Reserve for a certificate of that id in the ledger of its unit and adjacency.

        ``dataset`` is what it must be about, None for whatever it is about. A repetition is
        answered whatever became of the certificate since.
        """
        if call.idempotency_key is not None:
            known = await run_in_threadpool(self._ledger.repeated, call)
            if known is not None:
                return known, False
        certificate, untrusted_too = await run_in_threadpool(self._usable, dataset, certificate_id)
        found = await self._cost(certificate)
        claim = Claim(
            scope=Scope(
                dataset=certificate.dataset or "", unit=found["unit"], adjacency=found["adjacency"]
            ),
            certificate=certificate,
            steps=found["steps"],
            cost=Cost.read(found["cost"]),
            event=found["event"],
            certain=found["certain"],
            untrusted_too=untrusted_too,
        )
        return await run_in_threadpool(self._ledger.reserve, claim, call)

    async def settle(
        self, reservation_id: str, steps_run: int | None, record: str | None, call: CommandContext
    ) -> tuple[Reservation, bool]:
        """Settle on ``steps_run`` steps, or on all of them where that is None."""
        reservation = await run_in_threadpool(self._ledger.reservation, reservation_id)
        steps = reservation.certified_steps if steps_run is None else steps_run
        cost = None if record is None else await self.cost_of_steps(reservation, steps)
        return await run_in_threadpool(
            self._ledger.settle, reservation_id, steps, record, cost, call
        )

    async def cost_of_steps(self, reservation: Reservation, steps: int) -> Cost | None:
        """What the first ``steps`` steps of a reserved run cost; None for all of them."""
        if steps >= reservation.certified_steps:
            return None
        certificate = await run_in_threadpool(self._issue_of, reservation)
        return Cost.read((await self._cost(certificate, steps))["cost"])

    async def documents(self, dataset: str, certificate_id: str | None) -> list[dict[str, Any]]:
        """The ledgers of ``dataset``, with a forecast for the certificate in its own."""
        kept = await run_in_threadpool(self._ledger.ledgers, dataset)
        forecast = None
        if certificate_id is not None and kept:
            certificate, _ = await run_in_threadpool(self._usable, dataset, certificate_id)
            forecast = await self._cost(certificate)
        return [await self._document(item, forecast, certificate_id) for item in kept]

    async def composed(self, kept: KeptLedger) -> dict[str, Any]:
        """ε of all that runs or ran in a ledger, composed as if it had been fixed in advance."""
        entries = await run_in_threadpool(self._ledger.reservations, kept.id)
        return await self._composed(kept, entries)

    async def forecast(self, kept: KeptLedger, certificate_id: str) -> dict[str, Any]:
        """How many more runs of a certificate fit into a ledger.

        Raises ``CertificateNotUsable``.
        """
        dataset = kept.scope.dataset
        certificate, _ = await run_in_threadpool(self._usable, dataset, certificate_id)
        found = await self._cost(certificate)
        if (found["unit"], found["adjacency"]) != (kept.scope.unit, kept.scope.adjacency):
            raise refusals.CertificateNotUsable(
                f"{certificate_id} is of {found['unit']} and {found['adjacency']}.",
                "Look at the ledger of its privacy unit and adjacency.",
            )
        return await run_in_threadpool(
            document.forecast_document,
            kept,
            Cost.read(found["cost"]),
            certificate_id,
            certain=found["certain"],
        )

    async def position(self, plan: Plan, assessment: Assessment) -> dict[str, Any] | None:
        """Where the plan's ledger stands, for its certificate; None where there is no budget."""
        name = plan.dataset.name
        if name is None or assessment.verdict != "certified":
            return None
        scope = Scope(dataset=name, unit=plan.dataset.unit, adjacency=plan.adjacency)
        kept = await self._sought(scope)
        if kept is None:
            return None
        try:
            found = await self._pool.run(cost_of_assessment, plan, assessment)
        except AccountingUnavailable as error:
            # The certificate stands without it; the reservation will ask again.
            found = {"refused": f"it could not be worked out in time: {error}"}
        why = found.get("refused")
        return await run_in_threadpool(
            document.position_document,
            kept,
            None if why else Cost.read(found["cost"]),
            certain=found.get("certain", False),
            why=why,
        )

    async def _document(
        self, kept: KeptLedger, forecast: Costed | None, certificate_id: str | None
    ) -> dict[str, Any]:
        entries = await run_in_threadpool(self._ledger.reservations, kept.id)
        composed = await self._composed(kept, entries)
        about = None
        scope = (kept.scope.unit, kept.scope.adjacency)
        if forecast is not None and (forecast["unit"], forecast["adjacency"]) == scope:
            about = await run_in_threadpool(
                document.forecast_document,
                kept,
                Cost.read(forecast["cost"]),
                str(certificate_id),
                certain=forecast["certain"],
            )
        return await run_in_threadpool(document.ledger_document, kept, entries, composed, about)

    async def _composed(self, kept: KeptLedger, entries: list[Reservation]) -> dict[str, Any]:
        """ε of all that runs or ran, composed as if it had been fixed in advance."""
        counts: Counter[str] = Counter()
        for entry in entries:
            if entry.state == "settled" and entry.steps_run != entry.certified_steps:
                certificate = await run_in_threadpool(self._issue_of, entry)
                found = await self._cost(certificate, entry.steps_run)
                counts[json.dumps(found["event"], sort_keys=True)] += 1
            elif entry.state != "released":
                counts[json.dumps(entry.event, sort_keys=True)] += 1
        events = [(json.loads(text), count) for text, count in sorted(counts.items())]
        delta = float(kept.state.budget.delta)
        name = hashlib.sha256(json.dumps([events, delta]).encode()).hexdigest()
        return await self._once(
            f"composed {name}", lambda: self._pool.run(composition, events, delta)
        )

    async def _cost(self, certificate: StoredCertificate, steps: int | None = None) -> Costed:
        """What its run costs; raises ``NotAccountable``."""
        found = await self._once(
            f"cost {certificate.envelope_digest} {steps}",
            lambda: self._pool.run(cost_of_bundle, certificate.bundle, steps),
        )
        if "refused" in found:
            raise refusals.NotAccountable(
                f"the cost of {certificate.id} is not bounded: {found['refused']}.",
                "POST the plan again with this release, or change what it asks for.",
            )
        return found

    async def _once(
        self, name: str, work: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        if name not in self._kept:
            found, _ = await self._flights.run(name, work)
            self._kept[name] = found
        self._kept.move_to_end(name)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return self._kept[name]

    def _issue_of(self, reservation: Reservation) -> StoredCertificate:
        for issue in self._store.issues(reservation.certificate_id):
            if (issue.issue, issue.untrusted) == (reservation.issue, reservation.untrusted):
                return issue
        raise refusals.CertificateNotUsable(
            f"the certificate of reservation {reservation.id} is not kept here.",
            "Settle in full, without steps_run.",
        )

    def _usable(self, dataset: str | None, certificate_id: str) -> tuple[StoredCertificate, bool]:
        """A certificate that may be reserved for, and whether one of a development key may.

        Raises ``CertificateNotUsable``.
        """
        untrusted_too = self._untrusted_too()
        certificate = self._store.find(certificate_id)
        if dataset is None:
            dataset = (certificate.dataset if certificate else None) or ""
        require_usable(certificate, dataset, untrusted_too=untrusted_too)
        assert certificate is not None
        return certificate, untrusted_too

    def _untrusted_too(self) -> bool:
        return self._loopback and self._signers.current().public.development
