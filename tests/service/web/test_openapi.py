"""The OpenAPI document says what the service does: each answer fits what is documented."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator

from affidavit.plan import load_yaml

ID = "sha256:" + "0" * 64
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
DOCUMENT = Path(__file__).parents[3] / "docs" / "openapi.json"
JSON, YAML = "application/json", "application/yaml"


def schema_for(openapi: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    """A validator of ``schema`` with the document's components at hand."""
    return Draft202012Validator({**schema, "components": openapi["components"]})


EXCHANGES: list[tuple[str, str, str, Any, dict[str, str], int]] = [
    ("post", "/v1/certificates", "", {}, {"content-type": JSON}, 201),
    ("post", "/v1/certificates", "", {"steps": 0}, {"content-type": JSON}, 400),
    ("post", "/v1/certificates", "", {"releases": []}, {"content-type": JSON}, 400),
    ("post", "/v1/certificates", "", b"a: [", {"content-type": YAML}, 400),
    ("post", "/v1/certificates", "", {}, {"content-type": "text/html"}, 415),
    ("post", "/v1/certificates", "", b" " * 2_000_000, {"content-type": JSON}, 413),
    ("get", "/v1/certificates", "?limit=1", None, {}, 200),
    ("get", "/v1/certificates", "?limit=x", None, {}, 422),
    ("get", "/v1/certificates/{certificate_id}", ID, None, {}, 404),
    ("get", "/v1/certificates/{certificate_id}", "1", None, {}, 422),
    ("get", "/v1/certificates/{certificate_id}/bundle", ID, None, {}, 404),
    ("get", "/v1/certificates/{certificate_id}/bundle", "1", None, {}, 422),
    ("get", "/v1/certificates/{certificate_id}/curve", ID, None, {}, 404),
    ("get", "/v1/keys", "", None, {}, 200),
    ("get", "/v1/status", "", None, {}, 200),
    ("get", "/v1/certificates/{certificate_id}/issues", ID, None, {}, 404),
    ("post", "/v1/certificates/{certificate_id}/issues", ID, None, {}, 403),
    ("post", "/v1/certificates/{certificate_id}/approvals", ID, b"{}", {}, 403),
    ("post", "/v1/certificates/{certificate_id}/revocation", ID, b"{}", {}, 403),
    ("get", "/v1/mechanisms", "", None, {}, 200),
    ("get", "/v1/mechanisms/{name}", "dp_dice", None, {}, 200),
    ("get", "/v1/mechanisms/{name}", "adam", None, {}, 404),
    ("get", "/v1/mechanisms/{name}", "A", None, {}, 422),
    ("get", "/v1/log/checkpoint", "", None, {}, 404),
    ("get", "/v1/log/proof/inclusion", "?index=0", None, {}, 404),
    ("get", "/v1/log/proof/inclusion", "?index=-1", None, {}, 422),
    ("get", "/v1/log/proof/inclusion", "?hash=xyz", None, {}, 422),
    ("get", "/v1/log/proof/consistency", "?first=1", None, {}, 404),
    ("get", "/v1/log/proof/consistency", "?first=0", None, {}, 422),
    ("get", "/v1/log/entries", "", None, {}, 200),
    ("get", "/v1/log/entries", "?start=x", None, {}, 422),
    ("get", "/livez", "", None, {}, 200),
    ("get", "/readyz", "", None, {}, 200),
]


@pytest.mark.by_turns
@pytest.mark.parametrize(("method", "path", "filled", "body", "headers", "status"), EXCHANGES)
def test_an_answer_has_a_documented_status_media_type_and_shape(
    client: TestClient,
    openapi: dict[str, Any],
    plan: Callable[..., Any],
    method: str,
    path: str,
    filled: str,
    body: Any,
    headers: dict[str, str],
    status: int,
) -> None:
    where = re.sub(r"{\w+}", filled, path) if "{" in path else path + filled
    sent = {"json": plan(**body)} if isinstance(body, dict) else {"content": body}
    answer = client.request(method, where, headers=headers, **sent)
    assert answer.status_code == status
    documented = openapi["paths"][path][method]["responses"][str(status)]
    media = answer.headers["content-type"]
    schema_for(openapi, documented["content"][media]["schema"]).validate(answer.json())


def test_a_known_certificate_fits_what_is_documented(
    client: TestClient, openapi: dict[str, Any], plan: Any, post: Any
) -> None:
    location = post(client, plan()).headers["location"]
    assert post(client, plan()).status_code == 200
    for tail in ("", "/bundle", "/curve"):
        path = "/v1/certificates/{certificate_id}" + tail
        answer = client.get(path.replace("/v1/certificates/{certificate_id}", location))
        content = openapi["paths"][path]["get"]["responses"]["200"]["content"]
        schema_for(openapi, content[JSON]["schema"]).validate(answer.json())


def test_every_operation_documents_problems_and_nothing_of_another_framework(
    openapi: dict[str, Any],
) -> None:
    assert "HTTPValidationError" not in openapi["components"]["schemas"]
    for path, operations in openapi["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert "500" in operation["responses"], path
            for status, response in operation["responses"].items():
                answer = "image/svg+xml" if path.endswith(".svg") else JSON
                if path.endswith("log/checkpoint") or path == "/metrics":
                    answer = "text/plain"
                if path.startswith("/v1/tlog/tile/"):
                    answer = "application/octet-stream"
                if path.endswith("/events"):
                    answer = "text/event-stream"
                if path.endswith("/evidence"):
                    answer = "application/octet-stream"
                if path.endswith("/record") and status == "200" and "requestBody" not in operation:
                    answer = "application/octet-stream"
                media = [answer] if int(status) < 400 else ["application/problem+json"]
                if status == "204":  # which has no body
                    media = []
                assert list(response.get("content", ())) == media, (path, status)
    body = openapi["paths"]["/v1/certificates"]["post"]["requestBody"]
    assert set(body["content"]) == {JSON, YAML, "application/x-yaml", "text/yaml"}


def contents(openapi: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every body and every answer with content, each with the place where it stands."""
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            bodies = [("body", operation.get("requestBody", {})), *operation["responses"].items()]
            for where, body in bodies:
                for media, content in body.get("content", {}).items():
                    yield f"{method} {path} {where} {media}", content


def test_every_body_and_every_answer_has_an_example_that_fits(openapi: dict[str, Any]) -> None:
    for place, content in contents(openapi):
        (example,) = content["examples"].values()
        if "$ref" in example:
            name = example["$ref"].removeprefix("#/components/examples/")
            example = openapi["components"]["examples"][name]
        schema_for(openapi, content["schema"]).validate(example["value"]), place


def test_what_is_made_has_a_place_and_what_is_limited_says_how(openapi: dict[str, Any]) -> None:
    for path, operations in openapi["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert "201" not in responses or "Location" in responses["201"]["headers"], path
            if "429" in responses:
                assert all("RateLimit" in response["headers"] for response in responses.values())


def test_every_answer_says_what_remains_of_the_rate_limit(client: TestClient) -> None:
    for path in ("/v1/certificates", "/v1/certificates?limit=x", "/v1/keys"):
        headers = client.get(path).headers
        policy = re.fullmatch(r'"minute";q=([0-9]+);w=60', headers["ratelimit-policy"])
        state = re.fullmatch(r'"minute";r=([0-9]+);t=([0-9]+)', headers["ratelimit"])
        assert policy
        assert state
        assert 0 < int(state[1]) < int(policy[1])
        assert 0 < int(state[2]) <= 60


def test_the_documentation_comes_from_this_host_alone(client: TestClient) -> None:
    page = client.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(parts) == 4
    for part in parts:
        assert client.get(part).status_code == 200, part
    assert client.get("/docs/redoc.standalone.js").status_code == 422


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_generated_client_reads_what_the_service_says(
    client: TestClient, plan: Any, post: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By openapi-python-client."""
    from openapi_python_client import generate
    from openapi_python_client.config import Config, ConfigFile, MetaType

    settings = ConfigFile(post_hooks=[], package_name_override="generated")
    folder = tmp_path / "generated"
    config = Config.from_sources(
        settings, MetaType.NONE, DOCUMENT, "utf-8", overwrite=False, output_path=folder
    )
    left_out = {
        str(error.detail) for error in generate(config=config) if "yaml" not in str(error.detail)
    }
    assert left_out == set()
    monkeypatch.syspath_prepend(str(tmp_path))
    made = import_module("generated.client").Client(base_url="http://127.0.0.1")
    made.set_httpx_client(client)
    location = post(client, plan(target={"delta": 1e-5})).headers["location"]
    listed = import_module("generated.api.certificates.list_certificates").sync(client=made)
    (summary,) = listed.items
    assert location.endswith(summary.id)
    read = import_module("generated.api.certificates.get_certificate").sync(summary.id, client=made)
    assert read.epsilon.upper == summary.epsilon_upper
    assert read.certificate.status == summary.status


def test_every_reference_leads_somewhere(openapi: dict[str, Any]) -> None:
    components = openapi["components"]

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                _, _, kind, name = node["$ref"].split("/")
                assert name in components[kind]
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(openapi)


def test_plans_fit_the_documented_schema(openapi: dict[str, Any], plan: Any) -> None:
    validator = schema_for(openapi, {"$ref": "#/components/schemas/Plan"})
    assert EXAMPLES
    for path in EXAMPLES:
        validator.validate(load_yaml(path.read_bytes()).data)
    validator.validate(plan())
    assert not validator.is_valid(plan(stepz=1))
    assert not validator.is_valid({})


def test_not_ready_is_a_503_that_says_why(client: TestClient, openapi: dict[str, Any]) -> None:
    services = client.app.state.services  # type: ignore[attr-defined]
    engine = services.engine
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["reasons"][0]["code"] == "schema_not_at_head"
    content = openapi["paths"]["/readyz"]["get"]["responses"]["503"]["content"]
    schema_for(openapi, content["application/problem+json"]["schema"]).validate(answer.json())
