"""Made-up requests of every role to every operation: each answer is one that is documented.

schemathesis makes the requests from the OpenAPI document, good ones and bad ones. The
checks: no answer is a server's fault, and status, media type, headers and body are what
the document says. ``AFFIDAVIT_REQUESTS`` is how many requests each operation gets.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from affidavit.service.web.openapi_dump import document_text
from tests.service.whole.conftest import ROLES, Asked
from tests.support.random_seeds import seeded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

GOLDEN = Path(__file__).parents[3] / "docs" / "openapi.json"
REQUESTS = int(os.environ.get("AFFIDAVIT_REQUESTS", "2"))
PARTS = {"method", "url", "headers", "params", "json", "data", "cookies"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = list(schemathesis.openapi.from_path(str(GOLDEN)).get_all_operations())


def test_the_document_is_the_one_that_is_kept() -> None:
    same = document_text() == GOLDEN.read_text()  # pytest would compare 12,000 lines for minutes
    assert same, "docs/openapi.json is not what the service says; run: make docs"


@pytest.mark.by_turns
@pytest.mark.ordinary("POST *", "DELETE *", "GET /v1/log/*", "GET /v1/*{*")
@pytest.mark.parametrize("operation", [item.ok() for item in OPERATIONS], ids=lambda one: one.label)
def test_every_role_gets_a_documented_answer(api: Asked, operation: Any) -> None:
    @seed(seeded(20261121))
    @settings(
        max_examples=REQUESTS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=st.one_of(*made_for(operation)), there=st.booleans())
    def ask(case: Any, there: bool) -> None:
        for name in case.path_parameters.keys() & api.known.keys() if there else ():
            case.path_parameters[name] = api.known[name]
        for role in ROLES:
            case.validate_response(sent(api, role, case), checks=CHECKS)

    ask()


def made_for(operation: Any) -> list[Any]:
    """Requests as documented and, where there is anything to do wrong, others."""
    modes = [GenerationMode.POSITIVE]
    if operation.body or operation.query or operation.path_parameters:
        modes.append(GenerationMode.NEGATIVE)
    return [operation.as_strategy(generation_mode=mode) for mode in modes]


def sent(api: Asked, role: str, case: Any) -> Any:
    """The answer to what schemathesis would have sent with its own client."""
    provided = case.as_transport_kwargs(base_url="http://127.0.0.1")
    created = requests.Request(**{key: provided[key] for key in PARTS & provided.keys()}).prepare()
    # It makes up tokens too, from what the document says of them.
    created.headers.pop("authorization", None)
    headers = {**created.headers, **api.headers[role]}
    return api.client.request(created.method, created.url, content=created.body, headers=headers)
