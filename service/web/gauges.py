"""The gauges of a service: its queues, database, key, log and keyset, read for each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import QueuePool, func, select
from sqlalchemy.exc import SQLAlchemyError

from affidavit.service.tables.log import log_checkpoints, log_pending
from affidavit.service.web.dependencies import Services
from affidavit.trust import KeyFailure, parse_instant, read_keyset

GAUGES = {
    "affidavit_accounting_waiting": "Plans being accounted or waiting for accounting.",
    "affidavit_accounting_running": "Computations in progress in the accounting processes.",
    "affidavit_accounting_workers": "Accounting processes.",
    "affidavit_writes_suspended": "Reasons why nothing is spent or signed: damage, an altered "
    "ledger, a full disk.",
    "affidavit_database_connections": "Database connections in use.",
    "affidavit_signing_key_expires_seconds": "Seconds until the signing key's window ends; below 0 "
    "if no key can sign.",
    "affidavit_log_size": "Leaves of the newest signed checkpoint.",
    "affidavit_log_pending": "Entries waiting for their place in the log.",
    "affidavit_log_oldest_pending_seconds": "Seconds that the oldest of them has waited.",
    "affidavit_log_checkpoint_age_seconds": "Seconds since the newest checkpoint was signed.",
    "affidavit_keyset_version": "Version of the newest published keyset; 0 if there is none.",
    "affidavit_keyset_expires_seconds": "Seconds until that keyset expires.",
}


class ServiceGauges(Collector):
    """The gauges of one application's services."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def describe(self) -> Iterable[Metric]:
        """Return the names, so that the registry does not read the values at registration."""
        return [GaugeMetricFamily(name, meaning) for name, meaning in GAUGES.items()]

    def collect(self) -> Iterator[Metric]:
        """Yield the values, without the stored ones if the database does not respond."""
        services = self._services
        connections = services.engine.pool
        values: dict[str, float] = {
            "affidavit_accounting_waiting": services.submit_plan.waiting,
            "affidavit_accounting_running": services.pool.unanswered,
            "affidavit_accounting_workers": services.pool.workers,
            "affidavit_writes_suspended": len(services.safety.reasons()),
            "affidavit_database_connections": (
                connections.checkedout() if isinstance(connections, QueuePool) else 0
            ),
        }
        for read in (_read_key_gauge, _read_log_gauges, _read_keyset_gauges):
            with suppress(SQLAlchemyError):
                values |= read(services)
        for name, value in values.items():
            yield GaugeMetricFamily(name, GAUGES[name], value=value)


def _read_key_gauge(services: Services) -> dict[str, float]:
    try:
        end = min(key.public.not_after for key in services.keyring.all_current())
        seconds = (end - services.clock.now()).total_seconds()
    except KeyFailure:
        seconds = -1.0
    return {"affidavit_signing_key_expires_seconds": seconds}


def _read_log_gauges(services: Services) -> dict[str, float]:
    newest = (
        select(log_checkpoints.c.tree_size, log_checkpoints.c.signed_at)
        .order_by(log_checkpoints.c.id.desc())
        .limit(1)
    )
    with services.engine.connect() as connection:
        pending = connection.execute(select(func.count()).select_from(log_pending)).scalar_one()
        oldest = services.log_watch.waited(connection)
        checkpoint = connection.execute(newest).first()
    values = {
        "affidavit_log_size": 0.0,
        "affidavit_log_pending": float(pending),
        "affidavit_log_oldest_pending_seconds": oldest,
    }
    if checkpoint is not None:
        age = services.clock.now() - checkpoint.signed_at
        values["affidavit_log_size"] = float(checkpoint.tree_size)
        values["affidavit_log_checkpoint_age_seconds"] = age.total_seconds()
    return values


def _read_keyset_gauges(services: Services) -> dict[str, float]:
    newest = services.keysets.newest()
    if newest is None:
        return {"affidavit_keyset_version": 0.0}
    keyset = read_keyset(newest).keyset
    remaining = parse_instant(keyset.expires_at) - services.clock.now()
    return {
        "affidavit_keyset_version": float(keyset.version),
        "affidavit_keyset_expires_seconds": remaining.total_seconds(),
    }
