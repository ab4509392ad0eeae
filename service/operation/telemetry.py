"""Logs as JSON lines, and traces by OpenTelemetry, both without private values.

::

    {"at": "2026-01-01T12:00:00.123Z", "level": "INFO", "logger": "affidavit.request",
     "message": "request", "request_id": "…", "actor": "token:ci", "method": "POST",
     "route": "/v1/certificates", "status": 201, "duration_ms": 12.3}

The names of the fields never change their meaning. Of an exception the types and the
places in the code are written and not the messages: a database's message repeats the row
that it refuses, and a row may hold a plan. ``FIELDS`` are all that a record may add to
the message, so that nothing gets here by being handed to a logger.

Traces are on when ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``…_TRACES_ENDPOINT``) is set, and need
the extra ``affidavit[otel]``, which nothing else imports. A request has one span, with the
route's template and never the path or the query, so that no name or token gets into it. A
``traceparent`` header is followed.
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

from affidavit.service.settings import SettingsError

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
MOST_FRAMES = 30


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "at": _moment(record.created),
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
    """The error and what it came from, outermost first: types and places, no messages."""
    records: list[dict[str, Any]] = []
    seen: BaseException | None = error
    while seen is not None and len(records) < MOST_FRAMES:
        frames = traceback.extract_tb(seen.__traceback__)[-MOST_FRAMES:]
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
    """Write everything from INFO on to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Alembic tells of its every look at the revision, httpx of every whole address.
    for name in ("alembic", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _moment(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class TracingUnavailable(SettingsError):
    """Traces are asked for and their package is not installed."""


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
        """A span for a request, ended with the block; ``finish`` says what it was."""
        with self._tracer.start_as_current_span(
            method,
            context=self._extract(headers),
            kind=self._kind,
            record_exception=False,  # its message may hold what was asked
            set_status_on_exception=False,
        ) as span:
            yield span

    def finish(self, span: Any, fields: Mapping[str, Any]) -> None:
        """Name the span and give it the fields that the log has too."""
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
        """Send what was not sent yet."""
        self._provider.shutdown()


def open_tracing(environment: Mapping[str, str]) -> Tracing | None:
    """Traces to the collector of ``environment``, or None; raises ``TracingUnavailable``."""
    if not any(environment.get(name) for name in VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise TracingUnavailable(
            f"{VARIABLES[0]} asks for traces; run: pip install 'affidavit[otel]'"
        ) from None
    # The operator's own name for the service has the last word.
    named = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "affidavit"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)
