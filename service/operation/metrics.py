"""Metrics for Prometheus: requests and responses, and how the parts of the service are doing.

Labels are route templates, methods, statuses, codes and verdicts: small closed sets, never
a name of a data set, of a plan or of an actor. Each application has a registry of its own.
What stands in the database is read when it is asked for and left out when the database
does not answer, so that a scrape never fails for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

if TYPE_CHECKING:
    from affidavit.service.services import Services
from datetime import datetime

from sqlalchemy import QueuePool, func, select

from affidavit.certificate import KeyFailure, parse_instant, read_keyset
from affidavit.service.log.entries import log_checkpoints, log_pending

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)

ReadGauge = Callable[[], float]
ReadGauges = Callable[[], Mapping[str, float]]


class Metrics:
    """The counts of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "affidavit_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "affidavit_request_seconds",
            "Seconds from a request's head to the end of its answer.",
            ("method", "route"),
            buckets=SECONDS,
            registry=self._registry,
        )
        self.running = Gauge(
            "affidavit_requests_running", "Requests in progress.", registry=self._registry
        )
        self._problems = Counter(
            "affidavit_problems",
            "Requests answered with a problem document, by its code.",
            ("code",),
            registry=self._registry,
        )
        # The library takes a lock to find a labelled meter; they are few, so that all are kept.
        self._counted = cache(lambda *labels: self._requests.labels(*map(str, labels)))
        self._timed = cache(self._seconds.labels)
        self._verdicts = Counter(
            "affidavit_certificates",
            "Certificates issued, by verdict.",
            ("verdict",),
            registry=self._registry,
        )

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        known = method if method in METHODS else "other"
        self._counted(known, route, status).inc()
        self._timed(known, route).observe(seconds)

    def problem(self, code: str) -> None:
        """Count a problem document."""
        self._problems.labels(code).inc()

    def issued(self, verdict: str) -> None:
        """Count a certificate that was made just now."""
        self._verdicts.labels(verdict).inc()

    def watch(self, name: str, meaning: str, read: ReadGauge) -> None:
        """Have ``read`` called for the gauge ``name`` whenever somebody asks."""
        Gauge(name, meaning, registry=self._registry).set_function(read)

    def watch_stored(self, meanings: Mapping[str, str], read: ReadGauges) -> None:
        """The same for gauges that one look at the database fills."""
        self._registry.register(_Stored(meanings, read))

    def exposition(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Stored(Collector):
    """Gauges read together from the database."""

    def __init__(self, meanings: Mapping[str, str], read: ReadGauges) -> None:
        self._meanings = meanings
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Their names; without this the registry would read them when it is told of them."""
        return [GaugeMetricFamily(name, meaning) for name, meaning in self._meanings.items()]

    def collect(self) -> Iterator[Metric]:
        """What was read; nothing when the database does not answer."""
        try:
            values = self._read()
        except SQLAlchemyError:
            return
        for name, value in values.items():
            yield GaugeMetricFamily(name, self._meanings[name], value=value)


STORED_GAUGES = {
    "affidavit_log_size": "Leaves of the newest signed checkpoint.",
    "affidavit_log_pending": "Entries that wait for their place in the log.",
    "affidavit_log_oldest_pending_seconds": "How long the oldest is seen to wait.",
    "affidavit_log_checkpoint_age_seconds": "Age of the newest signed checkpoint.",
    "affidavit_keyset_version": "The newest published keyset; 0 before the first.",
    "affidavit_keyset_expires_seconds": "Seconds until it expires.",
}


def watch_services(metrics: Metrics, services: Services) -> None:
    """Have ``metrics`` show how the parts of ``services`` are doing."""
    metrics.watch(
        "affidavit_accounting_waiting",
        "Plans being accounted or waiting for it.",
        lambda: float(services.submit_plan.waiting),
    )
    metrics.watch(
        "affidavit_accounting_running",
        "Computations handed to the accounting's processes and not answered yet.",
        lambda: float(services.pool.unanswered),
    )
    metrics.watch(
        "affidavit_accounting_workers", "Processes that account.", lambda: services.pool.workers
    )
    metrics.watch(
        "affidavit_writes_suspended",
        "Reasons why nothing is spent or signed: damage, an altered ledger, a full disk.",
        lambda: float(len(services.safety.reasons())),
    )
    metrics.watch(
        "affidavit_database_connections",
        "Connections in use.",
        lambda: _connections(services),
    )
    metrics.watch(
        "affidavit_signing_key_expires_seconds",
        "Seconds until the window of the key that signs is over; below 0 when nothing can sign.",
        _expiry(services),
    )
    metrics.watch_stored(STORED_GAUGES, lambda: _stored(services))


def _connections(services: Services) -> float:
    pool = services.engine.pool
    return float(pool.checkedout()) if isinstance(pool, QueuePool) else 0.0


def _stored(services: Services) -> dict[str, float]:
    now = services.clock.now()
    newest = (
        select(log_checkpoints.c.tree_size, log_checkpoints.c.signed_at)
        .order_by(log_checkpoints.c.id.desc())
        .limit(1)
    )
    with services.engine.connect() as connection:
        waiting = connection.execute(select(func.count()).select_from(log_pending)).scalar_one()
        values = {
            "affidavit_log_size": 0.0,
            "affidavit_log_pending": float(waiting),
            "affidavit_log_oldest_pending_seconds": services.log_watch.waited(connection),
        }
        checkpoint = connection.execute(newest).first()
    if checkpoint is not None:
        values["affidavit_log_size"] = float(checkpoint.tree_size)
        age = (now - checkpoint.signed_at).total_seconds()
        values["affidavit_log_checkpoint_age_seconds"] = age
    return {**values, **_keyset(services, now)}


def _keyset(services: Services, now: datetime) -> dict[str, float]:
    newest = services.keysets.newest()
    if newest is None:
        return {"affidavit_keyset_version": 0.0}
    keyset = read_keyset(newest).keyset
    return {
        "affidavit_keyset_version": float(keyset.version),
        "affidavit_keyset_expires_seconds": (
            parse_instant(keyset.expires_at) - now
        ).total_seconds(),
    }


def _expiry(services: Services) -> Callable[[], float]:
    def seconds() -> float:
        try:
            ends = min(key.public.not_after for key in services.keyring.all_current())
        except KeyFailure:
            return -1.0
        return (ends - services.clock.now()).total_seconds()

    return seconds
