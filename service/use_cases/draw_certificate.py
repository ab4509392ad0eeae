"""Draw what a certificate's page shows: its profile, its trade-off, and ε over the steps.

All of it follows from the plan, the engine that decided and the steps at which runs ended, so
that the latest drawings are kept in memory and each is made once at a time, in the accounting
pool and under its time limit.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from affidavit.accountants import AccountantError
from affidavit.certificate import Assessment, curves, profile, spending, spending_chart, trade_off
from affidavit.certificate.charts import Chart
from affidavit.plan import Plan, Reason
from affidavit.service.errors import TooBusy
from affidavit.service.pool import AccountingPool
from affidavit.service.single_flight import SingleFlight
from affidavit.service.store import StoredCertificate
from affidavit.service.use_cases.draw_curve import MOST_KEPT, MOST_WAITING, plan_of


@dataclass(frozen=True, slots=True)
class Charts:
    """What is drawn, or the reasons why nothing is; each chart by its name."""

    charts: tuple[tuple[str, Chart], ...]
    reasons: tuple[Reason, ...] = ()


class DrawCertificate:
    """The use case, with the pool it works in; it belongs to one event loop."""

    def __init__(self, pool: AccountingPool) -> None:
        self._pool = pool
        self._flights: SingleFlight[Charts] = SingleFlight()
        self._kept: OrderedDict[str, Charts] = OrderedDict()

    def kept(self, certificate_id: str, steps_run: int | None) -> Charts | None:
        """What was drawn before, if it is still there."""
        return self._kept.get(_name(certificate_id, steps_run))

    async def __call__(self, certificate: StoredCertificate, steps_run: int | None) -> Charts:
        """The charts of ``certificate``; ``steps_run`` is what its latest run was charged.

        Raises ``TooBusy``, ``AccountingTimeout``, ``AccountingFailed``.
        """
        name = _name(certificate.id, steps_run)
        if name not in self._kept:
            if name not in self._flights and len(self._flights) >= MOST_WAITING:
                raise TooBusy
            plan = plan_of(certificate)
            found, _ = await self._flights.run(
                name, lambda: self._pool.run_aside(charts_of, plan, steps_run)
            )
            self._kept[name] = found
        self._kept.move_to_end(name)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return self._kept[name]


def charts_of(plan: Plan, steps_run: int | None) -> Charts:
    """In the pool: the charts of ``plan``."""
    found = curves(plan)
    if isinstance(found, Assessment):
        return Charts((), found.reasons)
    charts = [("profile", profile(found)), ("trade-off", trade_off(found))]
    epsilon = found.assessment.epsilon
    also = () if steps_run is None else (steps_run,)
    try:
        spent = spending(plan, found.engine["name"], found.delta, also=also)
    except AccountantError:
        spent = ()
    if spent and epsilon is not None:
        chart = spending_chart(spent, certified=epsilon.upper, delta=found.delta, run=steps_run)
        charts.append(("steps", chart))
    return Charts(tuple(charts))


def _name(certificate_id: str, steps_run: int | None) -> str:
    return f"{certificate_id} {steps_run}"
