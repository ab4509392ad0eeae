"""The ledger service: use cases of budgets, with the accounting done before the transaction.

The accounting pool computes the cost of a certificate's run from its signed bytes, and the
composition of a ledger's runs from its rows. Results are cached.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import NoResultFound
from starlette.concurrency import run_in_threadpool

from affidavit.accountants import AccountantError
from affidavit.accountants.privacy_filter import Cost
from affidavit.assessment import (
    Assessment,
    CertificateDiffers,
    CertifiedRun,
    composed_epsilon,
    interval,
    run_of,
)
from affidavit.client import Composition, Forecast, Ledger, LedgerSummary
from affidavit.plan import (
    Plan,
    RefusedPlan,
    events,
    plan_from,
)
from affidavit.service.certificates.store import CertificateStore, StoredCertificate
from affidavit.service.core.concurrency import ComputationCache
from affidavit.service.core.errors import AccountingUnavailable, DomainError
from affidavit.service.core.pool import AccountingPool
from affidavit.service.core.teams import acting_for
from affidavit.service.identity.actor import CommandContext
from affidavit.service.keys.keyring import Keyring
from affidavit.service.ledger import repository
from affidavit.service.ledger.state import LedgerScope, StoredLedger, StoredReservation
from affidavit.service.ledger.store import (
    CertificateNotUsable,
    CostedRun,
    LedgerStore,
    find_repeated_reservation,
    require_usable,
)
from affidavit.service.ledger.wire_models import forecast_of, position_of
from affidavit.trust import statement_in

# ---- costs, in the accounting pool ---------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCost:
    """The cost of a run of a certificate for ``steps``, whole or in part.

    ``event`` is the event document of the accounted part. ``certain`` tells whether the certificate
    holds without a confidence.
    """

    unit: str
    adjacency: str
    steps: int
    cost: Cost
    event: dict[str, Any]
    certain: bool


_FAILURES = (AccountantError, CertificateDiffers, RefusedPlan, ArithmeticError, ValueError)


def cost_of_bundle(bundle: bytes, steps_run: int | None = None) -> RunCost | str:
    """Compute the cost of a certificate's run, whole or up to ``steps_run``.

    Returns the reason instead if the cost is not bounded.
    """
    predicate = statement_in(bundle)["predicate"]
    plan = plan_from(predicate["plan"])
    try:
        run = run_of(plan, predicate["accountants"][0]["name"], predicate=predicate)
        return _costed(run, run.steps if steps_run is None else steps_run)
    except _FAILURES as failure:
        return str(failure) or type(failure).__name__


def cost_of_assessment(plan: Plan, assessment: Assessment) -> RunCost | str:
    """Compute the cost of a run of a plan that was just certified; returns like the above."""
    epsilon, delta = assessment.epsilon, assessment.delta
    if assessment.verdict != "certified" or epsilon is None or delta is None:
        return f"the verdict is {assessment.verdict}"
    try:
        run = run_of(plan, assessment.accountants[0].name)
        assessed = CertifiedRun(
            lowered=run.lowered,
            epsilon=epsilon.upper,
            delta=delta.upper,
            certain=assessment.confidence is None,
        )
        return _costed(assessed, assessed.steps)
    except _FAILURES as failure:
        return str(failure) or type(failure).__name__


def compose_events(runs: list[tuple[dict[str, Any], int]], delta: float) -> dict[str, Any]:
    """Compose ``runs`` with their counts, as if they had been fixed in advance.

    Returns ``engine`` and ``epsilon`` with its two ends, or nulls if no engine supports the events.
    """
    parts = tuple(
        events.Repeated(event=events.parse_event(event), count=count) for event, count in runs
    )
    try:
        engine, epsilon = composed_epsilon([events.Composed(events=parts)], delta)
    except AccountantError:
        return {"engine": None, "epsilon": None}
    return {"engine": engine, "epsilon": interval(epsilon)}


def _costed(run: CertifiedRun, steps_run: int) -> RunCost | str:
    if not 0 <= steps_run <= run.steps:
        return f"{steps_run} steps are not between 0 and {run.steps}"
    plan = run.lowered.plan
    return RunCost(
        unit=plan.dataset.unit,
        adjacency=plan.adjacency,
        steps=run.steps,
        cost=run.cost_of(steps_run),
        event=events.event_document(run.event_of(steps_run)),
        certain=run.certain,
    )


# ---- the service ---------------------------------------------------------------------

MAX_CACHED_RESULTS = 512
MAX_ENTRIES = 200
"""Reservations in a ledger's response, latest first; ``entries_total`` counts all."""


class NotAccountable(DomainError):
    """No accountant bounds the run's cost at the filter's orders."""

    code = "not_accountable"


class LedgerService:
    """The ledger's use cases; belongs to one event loop.

    Methods raise ``DomainError``, and ``AccountingUnavailable`` if they account. ``loopback``,
    for a service that only this machine reaches, allows certificates of a development key while
    no other key exists.
    """

    def __init__(
        self,
        store: LedgerStore,
        certificates: CertificateStore,
        pool: AccountingPool,
        keyring: Keyring,
        *,
        loopback: bool,
    ) -> None:
        self.store = store
        self._certificates = certificates
        self._pool = pool
        self._keyring = keyring
        self._loopback = loopback
        self._costs: ComputationCache[RunCost | str] = ComputationCache(MAX_CACHED_RESULTS)
        self._compositions: ComputationCache[dict[str, Any]] = ComputationCache(MAX_CACHED_RESULTS)

    async def reserve(
        self, dataset: str | None, certificate_id: str, context: CommandContext
    ) -> tuple[StoredReservation, bool]:
        """Reserve for a certificate in the ledger of its data set, unit and adjacency.

        The certificate must be about ``dataset``, if given. A repeated request gets the first
        response, whatever became of the certificate since.
        """
        earlier = await run_in_threadpool(self.store.read, find_repeated_reservation, context)
        if earlier is not None:
            return earlier, False
        run = await self.cost_run(dataset, certificate_id)
        return await run_in_threadpool(self.store.reserve, run, context)

    async def cost_run(self, dataset: str | None, certificate_id: str) -> CostedRun:
        """Return a usable certificate with the cost of its run, to be reserved in a transaction.

        Raises ``CertificateNotUsable`` or ``NotAccountable``.
        """
        certificate, allow_untrusted = await run_in_threadpool(
            self._usable, dataset, certificate_id
        )
        run = await self._cost(certificate)
        return CostedRun(
            scope=LedgerScope(
                dataset=certificate.dataset or "", unit=run.unit, adjacency=run.adjacency
            ),
            certificate=certificate,
            steps=run.steps,
            cost=run.cost,
            event=run.event,
            certain=run.certain,
            allow_untrusted=allow_untrusted,
        )

    async def cost_of_steps(self, reservation: StoredReservation, steps: int) -> Cost | None:
        """Return the cost of the first ``steps`` steps of a reserved run, or None for all steps."""
        if steps >= reservation.steps.certified:
            return None
        certificate = await run_in_threadpool(self._issue_of, reservation)
        return (await self._cost(certificate, steps)).cost

    async def ledgers(self, dataset: str, certificate_id: str | None) -> list[Ledger]:
        """Return the ledgers of ``dataset``, with a forecast for the certificate in its ledger."""
        stored = await run_in_threadpool(self.store.ledgers, dataset)
        cost = None
        if certificate_id is not None and stored:
            certificate, _ = await run_in_threadpool(self._usable, dataset, certificate_id)
            cost = await self._cost(certificate)
        result = []
        for ledger in stored:
            reservations = await self._reservations_of(ledger)
            composed = await self._compose(ledger, reservations)
            forecast = None
            if cost is not None and certificate_id is not None:
                forecast = await _forecast(ledger, cost, certificate_id)
            result.append(
                await run_in_threadpool(_with_entries, ledger, reservations, composed, forecast)
            )
        return result

    async def compose(self, ledger: StoredLedger) -> Composition:
        """Compose all runs of a ledger, as if they had been fixed in advance."""
        return await self._compose(ledger, await self._reservations_of(ledger))

    async def forecast(self, ledger: StoredLedger, certificate_id: str) -> Forecast:
        """Forecast how many more runs of a certificate fit into a ledger.

        Raises ``CertificateNotUsable``.
        """
        dataset = ledger.scope.dataset
        certificate, _ = await run_in_threadpool(self._usable, dataset, certificate_id)
        cost = await self._cost(certificate)
        forecast = await _forecast(ledger, cost, certificate_id)
        if forecast is None:
            raise CertificateNotUsable(
                f"{certificate_id} is for {cost.unit} and {cost.adjacency}.",
                "Open the ledger of its privacy unit and adjacency.",
            )
        return forecast

    async def position(self, plan: Plan, assessment: Assessment) -> dict[str, Any] | None:
        """Return the state of the plan's ledger for its certificate, or None without a budget."""
        name = plan.dataset.name
        if name is None or assessment.verdict != "certified":
            return None
        scope = LedgerScope(dataset=name, unit=plan.dataset.unit, adjacency=plan.adjacency)
        ledger = await run_in_threadpool(self.store.read, repository.find_ledger, scope)
        if ledger is None:
            return None
        try:
            result = await self._pool.run(cost_of_assessment, plan, assessment)
        except AccountingUnavailable as error:
            # The certificate is valid without it; the reservation computes it again.
            result = f"it could not be computed in time: {error}"
        cost, certain, reason = None, False, None
        if isinstance(result, RunCost):
            cost, certain = result.cost, result.certain
        else:
            reason = result
        return await run_in_threadpool(position_of, ledger, cost, certain=certain, reason=reason)

    async def _reservations_of(self, ledger: StoredLedger) -> list[StoredReservation]:
        return await run_in_threadpool(self.store.read, repository.reservations_of, ledger.id)

    async def _compose(
        self, ledger: StoredLedger, reservations: list[StoredReservation]
    ) -> Composition:
        counts: Counter[str] = Counter()
        for reservation in reservations:
            if reservation.state == "released":
                continue
            event = reservation.event
            steps = reservation.steps
            if reservation.state == "settled" and steps.run != steps.certified:
                certificate = await run_in_threadpool(self._issue_of, reservation)
                event = (await self._cost(certificate, steps.run)).event
            counts[json.dumps(event, sort_keys=True)] += 1
        runs = [(json.loads(text), count) for text, count in sorted(counts.items())]
        delta = ledger.state.budget.delta
        digest = hashlib.sha256(json.dumps([runs, float(delta)]).encode()).hexdigest()
        result = await self._compositions(
            digest, lambda: self._pool.run(compose_events, runs, float(delta))
        )
        return Composition.model_validate({**result, "delta": delta})

    async def _cost(self, certificate: StoredCertificate, steps: int | None = None) -> RunCost:
        """Return the cost of a certificate's run; raises ``NotAccountable``."""
        result = await self._costs(
            f"{certificate.envelope_digest} {steps}",
            lambda: self._pool.run(cost_of_bundle, certificate.bundle, steps),
        )
        if isinstance(result, RunCost):
            return result
        raise NotAccountable(
            f"the cost of {certificate.id} is not bounded: {result}.",
            "POST the plan again with this release, or change the plan.",
        )

    def _issue_of(self, reservation: StoredReservation) -> StoredCertificate:
        # Everybody who sees a ledger sees the composition of all its runs, of every team.
        with acting_for(None), suppress(NoResultFound):
            issue, untrusted = reservation.issue, reservation.untrusted
            return self._certificates.issue(reservation.certificate, issue, untrusted=untrusted)
        raise CertificateNotUsable(
            f"the certificate of reservation {reservation.id} is not stored here.",
            "Settle in full, without steps_run.",
        )

    def _usable(self, dataset: str | None, certificate_id: str) -> tuple[StoredCertificate, bool]:
        """Return a usable certificate, and whether a development key's certificate is allowed.

        Raises ``CertificateNotUsable``.
        """
        allow_untrusted = self._loopback and self._keyring.current().public.development
        certificate = self._certificates.find(certificate_id)
        if dataset is None:
            dataset = (certificate.dataset if certificate else None) or ""
        usable = require_usable(certificate, dataset, allow_untrusted=allow_untrusted)
        return usable, allow_untrusted


async def _forecast(ledger: StoredLedger, cost: RunCost, certificate_id: str) -> Forecast | None:
    """Return the forecast, or None if the certificate has another unit or adjacency."""
    if (cost.unit, cost.adjacency) != (ledger.scope.unit, ledger.scope.adjacency):
        return None
    return await run_in_threadpool(
        forecast_of, ledger, cost.cost, certificate_id, certain=cost.certain
    )


def _with_entries(
    ledger: StoredLedger,
    reservations: Sequence[StoredReservation],
    composed: Composition,
    forecast: Forecast | None,
) -> Ledger:
    """Return ``ledger`` with all its ``reservations``, latest first."""
    summary = dict(LedgerSummary.model_validate(ledger))
    summary["spent"] = summary["spent"].model_copy(update={"composed": composed})
    entries = list(reservations[:MAX_ENTRIES])
    return Ledger(**summary, entries=entries, entries_total=len(reservations), forecast=forecast)
