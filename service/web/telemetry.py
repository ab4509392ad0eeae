"""Logs as JSON lines, traces by OpenTelemetry, and metrics for Prometheus, without private values.

::

    {"at": "2026-01-01T12:00:00.123Z", "level": "INFO", "logger": "affidavit.request",
     "message": "request", "request_id": "…", "actor": "token:ci", "method": "POST",
     "route": "/v1/certificates", "status": 201, "duration_ms": 12.3}

The names of the fields never change their meaning. Exceptions are logged by type and position in
the code, without messages, because a database's message repeats the refused row, which may contain
a plan. Only ``FIELDS`` of a record are added to its message.

Traces are on if ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``…_TRACES_ENDPOINT``) is set, and need the
extra ``affidavit[otel]``. A request has one span, named by the route's template without path or
query, so that it contains no name or token. A ``traceparent`` header is followed.

Labels of metrics are route templates, methods, statuses, codes and verdicts, never names of data
sets, plans or actors. Each application has its own registry. Gauges of the database are read for
each scrape and omitted while the database does not respond.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from affidavit.service.core.errors import SettingsError

FIELDS = (
    "request_id",
    "actor",
    "method",
    "route",
    "status",
    "code",
    "verdict",
    "duration_ms",
)
MAX_FRAMES = 30


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its line end."""
        line: dict[str, Any] = {
            "at": _format_time(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = exception_record(record.exc_info[1])
        return json.dumps(line, ensure_ascii=True)


def exception_record(error: BaseException) -> list[dict[str, Any]]:
    """Return the types and positions of an error and its causes, outermost first."""
    records: list[dict[str, Any]] = []
    seen: BaseException | None = error
    while seen is not None and len(records) < MAX_FRAMES:
        frames = traceback.extract_tb(seen.__traceback__)[-MAX_FRAMES:]
        records.append(
            {
                "type": f"{type(seen).__module__}.{type(seen).__qualname__}",
                "frames": [
                    f"{'/'.join(PurePath(at.filename).parts[-2:])}:{at.lineno} {at.name}"
                    for at in frames
                ],
            }
        )
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return records


def configure_logging() -> None:
    """Log records from INFO up to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Alembic logs every read of the revision, httpx every full URL.
    for name in ("alembic", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _format_time(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class TracingUnavailable(SettingsError):
    """Traces are configured, but their package is not installed."""


class Tracing:
    """Spans of one provider (``opentelemetry.sdk.trace.TracerProvider``)."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        self._provider = provider
        self._tracer = provider.get_tracer("affidavit")
        self._extract, self._kind = extract, SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    @contextmanager
    def request(self, method: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """Open a span for a request, which ``finish`` describes."""
        with self._tracer.start_as_current_span(
            method,
            context=self._extract(headers),
            kind=self._kind,
            record_exception=False,  # its message may contain private values
            set_status_on_exception=False,
        ) as span:
            yield span

    def finish(self, span: Any, fields: Mapping[str, Any]) -> None:
        """Name the span, and add the fields of the log."""
        span.update_name(f"{fields['method']} {fields['route']}")
        span.set_attribute("http.request.method", fields["method"])
        span.set_attribute("http.route", fields["route"])
        span.set_attribute("http.response.status_code", fields["status"])
        for name in ("request_id", "code", "verdict"):
            if fields.get(name) is not None:
                span.set_attribute(f"affidavit.{name}", fields[name])
        if fields["status"] >= 500:
            span.set_status(self._failed)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def open_tracing(environment: Mapping[str, str]) -> Tracing | None:
    """Open traces to the collector of ``environment``, if any; raises ``TracingUnavailable``."""
    if not any(environment.get(name) for name in ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise TracingUnavailable(
            f"{ENDPOINT_VARIABLES[0]} asks for traces; run: pip install 'affidavit[otel]'"
        ) from None
    # The operator's own name for the service takes precedence.
    attributes = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "affidavit"}
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class Metrics:
    """The metrics of one application."""

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
            "Seconds from a request's head to the end of its response.",
            ("method", "route"),
            buckets=DURATION_BUCKETS,
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
        self._verdicts = Counter(
            "affidavit_certificates",
            "Certificates issued, by verdict.",
            ("verdict",),
            registry=self._registry,
        )

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        known = method if method in METHODS else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(known, route).observe(seconds)

    def problem(self, code: str) -> None:
        """Count a problem document."""
        self._problems.labels(code).inc()

    def issued(self, verdict: str) -> None:
        """Count a new certificate."""
        self._verdicts.labels(verdict).inc()

    def watch(self, gauges: Collector) -> None:
        """Add gauges, which are read at each scrape."""
        self._registry.register(gauges)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
