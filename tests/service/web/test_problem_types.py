"""The ``type`` of every problem leads to a page of the service that answered."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/certificates/none"), ("POST", "/v1/certificates"), ("GET", "/problems/nothing")],
)
def test_a_problem_resolves(reader: Any, method: str, path: str) -> None:
    problem = reader.request(method, path).json()
    assert problem["type"] == f"/problems/{problem['code']}"
    page = reader.get(problem["type"])
    assert page.status_code == 200
    assert problem["code"] in page.text


def test_operations_have_tags_and_ids_of_their_own(openapi: dict[str, Any]) -> None:
    tags = {tag["name"] for tag in openapi["tags"]}
    operations = [item for path in openapi["paths"].values() for item in path.values()]
    assert all(set(item["tags"]) <= tags for item in operations)
    assert len({item["operationId"] for item in operations}) == len(operations)
    assert not [item for item in operations if "v1" in item["operationId"]]
    reads = [path["get"]["operationId"] for path in openapi["paths"].values() if "get" in path]
    health = {"livez", "readyz", "metrics"}
    assert not [name for name in {*reads} - health if not name.startswith(("get_", "list_"))]
    assert all("_" in item["operationId"] for item in operations if item["tags"] != ["health"])
