"""Traces by OpenTelemetry, where the operator asks for them: one span a request.

They are on when ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``…_TRACES_ENDPOINT``) is set, and need
the extra ``affidavit[otel]``, which nothing else imports. A span has the route's template
and never the path or the query, so that no name or token gets into it. A ``traceparent``
header is followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from affidavit.service.settings import SettingsError

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
