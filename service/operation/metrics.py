"""Counts for Prometheus: what was asked and answered, and how the parts are doing.

Labels are route templates, methods, statuses, codes and verdicts: small closed sets, never
a name of a data set, of a plan or of an actor. Each application has a registry of its own.
What stands in the database is read when it is asked for and left out when the database
does not answer, so that a scrape never fails for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)

Read = Callable[[], float]
ReadMany = Callable[[], Mapping[str, float]]


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

    def watch(self, name: str, meaning: str, read: Read) -> None:
        """Have ``read`` called for the gauge ``name`` whenever somebody asks."""
        Gauge(name, meaning, registry=self._registry).set_function(read)

    def watch_stored(self, meanings: Mapping[str, str], read: ReadMany) -> None:
        """The same for gauges that one look at the database fills."""
        self._registry.register(_Stored(meanings, read))

    def exposition(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Stored(Collector):
    """Gauges read together from the database."""

    def __init__(self, meanings: Mapping[str, str], read: ReadMany) -> None:
        self._meanings = meanings
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Their names; without this the registry would read them when it is told of them."""
        return [GaugeMetricFamily(name, meaning) for name, meaning in self._meanings.items()]

    def collect(self) -> Iterator[Metric]:
        """What was read; nothing when the database does not answer."""
        try:
            found = self._read()
        except SQLAlchemyError:
            return
        for name, value in found.items():
            yield GaugeMetricFamily(name, self._meanings[name], value=value)
