"""Draw a certificate: its privacy curves, its profile, its trade-off, and ε over the steps.

The drawings follow from the plan, the deciding engine and the charged steps of the latest run. They
are computed in the accounting pool from the signed plan, under the time limit of a certificate, and
the latest results are cached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from affidavit.accountants import AccountantError
from affidavit.assessment import (
    Assessment,
    curves,
    profile_chart,
    spending,
    spending_chart,
    trade_off_chart,
)
from affidavit.assessment.charts import Chart
from affidavit.plan import Plan, Reason, plan_from
from affidavit.service.certificates.store import StoredCertificate
from affidavit.service.core.concurrency import ComputationCache
from affidavit.service.core.pool import AccountingPool
from affidavit.trust import statement_in

MAX_RESULTS = 128
"""Cached drawings, about 60 KB each."""


@dataclass(frozen=True, slots=True)
class Charts:
    """Charts by name, or the reasons why there are none."""

    charts: Mapping[str, Chart]
    reasons: tuple[Reason, ...] = ()


class NoCurve(Exception):
    """The plan has no guarantee of which a curve could be drawn."""

    def __init__(self, reasons: tuple[Reason, ...]) -> None:
        super().__init__("no curve")
        self.reasons = reasons


class DrawCertificate:
    """The use case; belongs to one event loop."""

    def __init__(self, pool: AccountingPool) -> None:
        self._pool = pool
        self._curves = ComputationCache[str | tuple[Reason, ...]](MAX_RESULTS)
        self._charts = ComputationCache[Charts](MAX_RESULTS)

    async def curves(self, certificate: StoredCertificate) -> str:
        """Return the document of privacy curves.

        Raises ``NoCurve`` or ``AccountingUnavailable``.
        """
        result = await self._curves(
            certificate.id, lambda: self._pool.run_long(compute_curves, plan_of(certificate))
        )
        if isinstance(result, str):
            return result
        raise NoCurve(result)

    def charts_in_memory(self, certificate_id: str, steps_run: int | None) -> Charts | None:
        """Return cached charts, if any."""
        return self._charts.get(f"{certificate_id} {steps_run}")

    async def charts(self, certificate: StoredCertificate, steps_run: int | None) -> Charts:
        """Return the charts of ``certificate``; ``steps_run`` are its latest run's charged steps.

        Raises ``AccountingUnavailable``.
        """
        return await self._charts(
            f"{certificate.id} {steps_run}",
            lambda: self._pool.run_long(compute_charts, plan_of(certificate), steps_run),
        )


def plan_of(certificate: StoredCertificate) -> Plan:
    """Return the plan in a certificate's signed bytes."""
    return plan_from(statement_in(certificate.bundle)["predicate"]["plan"])


def compute_curves(plan: Plan) -> str | tuple[Reason, ...]:
    """Compute, in the pool, the curves of ``plan`` or the reasons why there are none."""
    result = curves(plan)
    if isinstance(result, Assessment):
        return result.reasons
    return json.dumps(result.as_document(), allow_nan=False, ensure_ascii=False)


def compute_charts(plan: Plan, steps_run: int | None, *, with_steps: bool = True) -> Charts:
    """Compute, in the pool, the privacy profile, the trade-off function, and ε over the steps."""
    result = curves(plan)
    if isinstance(result, Assessment):
        return Charts({}, result.reasons)
    charts = {"profile": profile_chart(result), "trade-off": trade_off_chart(result)}
    epsilon = result.assessment.epsilon
    if not with_steps or epsilon is None:
        return Charts(charts)
    extra_steps = () if steps_run is None else (steps_run,)
    with suppress(AccountantError):
        spent = spending(plan, result.engine["name"], result.delta, extra_steps=extra_steps)
        if spent:
            charts["steps"] = spending_chart(
                spent, certified=epsilon.upper, delta=result.delta, run=steps_run
            )
    return Charts(charts)
