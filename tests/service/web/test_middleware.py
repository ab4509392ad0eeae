"""Every request is told of once, and nothing private is told of it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from affidavit.service.audit import readiness
from affidavit.service.settings import Settings
from affidavit.service.web.app import create_app
from affidavit.service.web.middleware import PROBES
from affidavit.service.web.telemetry import (
    JsonLines,
    Tracing,
    TracingUnavailable,
    open_tracing,
)
from affidavit.trust import KeyStore
from tests.service.operation.log_waiting import until_logged

Plan = Callable[..., dict[str, Any]]
Post = Callable[..., Any]
SECRET = "secretname"  # of a plan, a data set, a query, a header


class Lines(logging.Handler):
    """Keeps what is logged as the lines that would be written."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonLines())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))

    def requests(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["logger"] == "affidavit.request"]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    # The tests' client tells of every address itself.
    handler.addFilter(lambda record: not record.name.startswith("httpx"))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def secret(plan: Plan) -> dict[str, Any]:
    return plan(name=SECRET, dataset={"name": SECRET, "size": 1000})


def test_a_request_is_one_line_with_the_id_that_was_answered(
    client: Any, plan: Plan, post: Post, lines: Lines
) -> None:
    created = post(client, plan())
    (line,) = lines.requests()
    assert line["request_id"] == created.headers["x-request-id"]
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/certificates", 201)
    assert line["verdict"] == "certified"
    assert line["actor"].startswith("anonymous")
    assert line["duration_ms"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["at"])
    identity = created.json()["certificate"]["id"]
    client.get(f"/v1/certificates/{identity}", headers={"x-request-id": "my-1"})
    client.get("/v1/none")
    result = lines.requests()[1:]
    assert [line["route"] for line in result] == ["/v1/certificates/{certificate_id}", "unrouted"]
    assert result[0]["request_id"] == "my-1"
    assert result[1]["code"] == "not_found"


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a\n", "é"])
def test_an_id_that_is_not_harmless_is_replaced(client: Any, given: str) -> None:
    answered = client.get("/livez", headers={"x-request-id": given.encode("latin-1")})
    assert re.fullmatch(r"[0-9a-f]{32}", answered.headers["x-request-id"])


def test_probes_that_succeed_are_not_written_down(client: Any, lines: Lines) -> None:
    for path in PROBES:
        assert client.get(path).status_code == 200
    assert lines.requests() == []


def test_no_private_value_reaches_log_metrics_or_spans(
    settings: Settings, plan: Plan, post: Post, lines: Lines, client_of: Any
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with client_of(settings, tracing=Tracing(provider)) as client:
        post(client, secret(plan))
        post(client, {**secret(plan), SECRET: 1})
        post(client, secret(plan), url="", syntax=SECRET)
        client.get(f"/v1/certificates?name={SECRET}")
        client.get(f"/v1/certificates?verdict={SECRET}")
        client.get(f"/{SECRET}")
        client.get(f"/v1/mechanisms/{SECRET}")
        client.get("/v1/certificates", headers={"authorization": f"Bearer {SECRET}"})
        client.request(SECRET.upper(), "/v1/certificates")
        metrics = client.get("/metrics").text
    spans = "".join(span.to_json() for span in exporter.get_finished_spans())
    written = json.dumps(lines.lines)
    assert len(lines.requests()) == 9
    assert len(exporter.get_finished_spans()) == 10
    for told in (written, metrics, spans):
        assert told
        assert SECRET not in told.lower()


def test_an_exception_is_told_of_by_type_and_place_and_not_by_its_message(
    settings: Settings, plan: Plan, post: Post, lines: Lines, client_of: Any
) -> None:
    app_client = client_of(settings)

    def broken(*_arguments: Any, **_named: Any) -> Any:
        raise RuntimeError(SECRET)

    object.__setattr__(app_client.app.state.services, "submit_plan", broken)
    with app_client as client:
        result = post(client, secret(plan))
        assert result.status_code == 500
        assert result.headers["x-content-type-options"] == "nosniff"
        assert result.headers["content-security-policy"].startswith("default-src 'none'")
    (line,) = lines.requests()
    assert (line["status"], line["code"]) == (500, "internal_error")
    assert line["request_id"] == result.headers["x-request-id"]
    try:
        broken()
    except RuntimeError:
        logging.getLogger("affidavit").exception("a fault")
    last = lines.lines[-1]
    assert last["exception"][0]["type"] == "builtins.RuntimeError"
    assert last["exception"][0]["frames"][-1].endswith("broken")
    assert SECRET not in json.dumps(lines.lines)


def test_spans_follow_the_callers_trace_and_name_the_route(
    settings: Settings, plan: Plan, post: Post, client_of: Any
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with client_of(settings, tracing=Tracing(provider)) as client:
        client.get("/v1/keys", headers={"traceparent": f"00-{trace}-{parent}-01"})
        post(client, plan())
    followed, posted = exporter.get_finished_spans()
    assert f"{followed.context.trace_id:032x}" == trace
    assert f"{followed.parent.span_id:016x}" == parent
    assert (followed.name, followed.kind) == ("GET /v1/keys", SpanKind.SERVER)
    assert followed.status.status_code is StatusCode.UNSET
    assert posted.name == "POST /v1/certificates"
    assert posted.attributes["http.response.status_code"] == 201
    assert posted.attributes["affidavit.verdict"] == "certified"


def test_traces_are_off_until_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracing({}) is None
    requested = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    result = open_tracing(requested)
    assert result is not None
    result.close()
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingUnavailable, match=r"affidavit\[otel\]"):
        open_tracing(requested)


# ---- metrics -----------------------------------------------------------------------


def value_of(metrics: str, sample: str) -> float:
    (result,) = (line for line in metrics.splitlines() if line.startswith(sample + " "))
    return float(result.rsplit(" ", 1)[1])


def test_metrics_count_by_route_verdict_and_code(client: Any, plan: Plan, post: Post) -> None:
    post(client, plan())
    post(client, plan())
    post(client, plan(steps=10**6))
    post(client, {})
    identity = "sha256:" + "0" * 64
    client.get(f"/v1/certificates/{identity}")
    text = client.get("/metrics").text
    route = 'method="POST",route="/v1/certificates"'
    assert value_of(text, f'affidavit_requests_total{{{route},status="201"}}') == 2
    assert value_of(text, f'affidavit_requests_total{{{route},status="200"}}') == 1
    assert value_of(text, f"affidavit_request_seconds_count{{{route}}}") == 4
    assert value_of(text, 'affidavit_certificates_total{verdict="certified"}') == 1
    assert value_of(text, 'affidavit_certificates_total{verdict="under_noised"}') == 1
    assert value_of(text, 'affidavit_problems_total{code="malformed_plan"}') == 1
    assert value_of(text, 'affidavit_problems_total{code="not_found"}') == 1
    assert value_of(text, "affidavit_accounting_waiting") == 0
    assert value_of(text, "affidavit_accounting_workers") == 1
    assert value_of(text, "affidavit_keyset_version") == 0
    assert 0 < value_of(text, "affidavit_signing_key_expires_seconds") < 731 * 86_400
    assert identity not in text


def test_metrics_tell_of_the_log(client: Any, plan: Plan, post: Post) -> None:
    post(client, plan())
    until_logged(client.app.state.services)
    text = client.get("/metrics").text
    assert value_of(text, "affidavit_log_size") >= 1
    assert value_of(text, "affidavit_log_pending") == 0
    assert 0 <= value_of(text, "affidavit_log_checkpoint_age_seconds") < 60


def test_metrics_need_a_token_where_others_can_reach_them(
    settings: Settings, client_of: Any
) -> None:
    with client_of(settings, "192.0.2.1") as client:
        assert client.get("/metrics").status_code == 401


def test_applications_count_for_themselves(settings: Settings, client_of: Any) -> None:
    assert (
        create_app(settings).state.services.metrics
        is not create_app(settings).state.services.metrics
    )
    with client_of(settings) as one:
        one.get("/v1/keys")
        assert '"/v1/keys"' in one.get("/metrics").text
    with client_of(settings) as other:
        assert '"/v1/keys"' not in other.get("/metrics").text


# ---- readiness ---------------------------------------------------------------------


def test_a_log_that_nobody_takes_up_is_not_ready(
    client: Any, plan: Plan, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = client.app.state.services
    services.sequencer.stop()
    assert client.get("/readyz").status_code == 200
    post(client, plan())
    assert client.get("/readyz").status_code == 200  # it has only just begun to wait
    monkeypatch.setattr(readiness, "BEHIND_SECONDS", 0.0)  # and now it has for too long
    result = client.get("/readyz")
    assert result.status_code == 503
    assert [reason["code"] for reason in result.json()["reasons"]] == ["log_behind"]
    while services.sequencer.step():
        pass
    assert client.get("/readyz").status_code == 200


def test_keys_that_may_not_sign_are_not_ready_and_no_development_key_steps_in(
    client: Any, settings: Settings, plan: Plan, post: Post
) -> None:
    (record,) = settings.key_directory.glob("*.json")
    ended = {**json.loads(record.read_text()), "not_before": "2020-01-01T00:00:00Z"}
    record.write_text(json.dumps({**ended, "not_after": "2020-02-01T00:00:00Z"}))
    result = client.get("/readyz")
    assert [reason["code"] for reason in result.json()["reasons"]] == ["signer_unavailable"]
    assert post(client, plan()).status_code == 503
    assert KeyStore(settings.key_directory).new()
    assert client.get("/readyz").json()["signer"]["development"] is False
    assert post(client, plan()).status_code == 201
