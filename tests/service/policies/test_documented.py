"""Every answer fits what is documented, and the log tells the same story as the tables."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from jsonschema import Draft202012Validator

from affidavit.service.audit.audit import audit_rows, count_pending
from tests.service.conftest import ON_SQLITE
from tests.support.polling import TIMEOUT_SECONDS

Document = Callable[..., dict[str, Any]]
UNKNOWN = "sha256:" + "0" * 64


@ON_SQLITE
def test_answers_fit_their_documentation(
    house: Any, plan: Document, policy: Document, waiver_request: Document, openapi: dict[str, Any]
) -> None:
    seen = set()

    def ask(who: str, method: str, path: str, filled: str = "", document: Any = None) -> Any:
        where, _, query = path.partition("?")
        full = where.replace("{waiver_id}", filled).replace("{name}/{version}", filled)
        answer = house.ask(who, method, f"{full}?{query}" if query else full, document)
        documented = openapi["paths"][where][method.lower()]["responses"][str(answer.status_code)]
        schema = documented["content"][answer.headers["content-type"]]["schema"]
        whole = {**schema, "components": openapi["components"]}
        Draft202012Validator(whole).validate(answer.json())
        seen.add((method, where, answer.status_code))
        return answer

    for version in (1, 1, 3):
        ask("ada", "POST", "/v1/policies", document=policy(version=version, epsilon_cap=0.5))
    ask("ada", "POST", "/v1/policies", document={})
    ask("sam", "GET", "/v1/policies")
    for which in ("toys/1", "default/2", "toys/9", "a b/1"):
        ask("sam", "GET", "/v1/policies/{name}/{version}", which)
    house.submit("sam", plan())
    ask("ann", "POST", "/v1/policies/simulate?limit=1", document=policy(epsilon_cap=9, version=2))
    ask("ann", "POST", "/v1/policies/simulate?limit=0", document=policy())
    ask("ann", "POST", "/v1/policies/simulate", document=policy(name="b"))
    created = ask("amy", "POST", "/v1/waivers", document=waiver_request()).json()["id"]
    ask("amy", "POST", "/v1/waivers", document=waiver_request(owner="amy"))
    ask("amy", "POST", "/v1/waivers", document=waiver_request(policy="none"))
    ask("amy", "POST", "/v1/waivers", document={})
    house.submit("sam", plan())
    for _ in range(2):
        ask("sam", "GET", "/v1/waivers")
        for which in (created, UNKNOWN, "1"):
            ask("sam", "GET", "/v1/waivers/{waiver_id}", which)
        ask("amy", "DELETE", "/v1/waivers/{waiver_id}?reason=over", created)
    ask("amy", "DELETE", "/v1/waivers/{waiver_id}", created)
    assert {status for _, _, status in seen} == {200, 201, 400, 403, 404, 409, 422}
    _log_and_tables_agree(house)


def _log_and_tables_agree(house: Any) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    with house.engine.connect() as connection:
        while count_pending(connection):
            assert time.monotonic() < end, "the log's entries never got their places"
            connection.rollback()
            time.sleep(0.05)
        assert list(audit_rows(connection)) == []
    house.tamper("waiver_revocations", "UPDATE waiver_revocations SET reason = 'other'")
    with house.engine.connect() as connection:
        assert list(audit_rows(connection))


def test_the_documented_policy_takes_what_the_reader_takes(
    policy: Document, openapi: dict[str, Any]
) -> None:
    schema = {"$ref": "#/components/schemas/Policy", "components": openapi["components"]}
    validator = Draft202012Validator(schema)
    full = policy(caps={"toy": {"epsilon": 1}}, accountants={"pld": "0.6"}, samplers=["poisson"])
    validator.validate(json.loads(json.dumps(full)))
    for changes in ({"epsilon_cap": 0}, {"samplers": []}, {"budget": 1}, {"epsilon_cup": 1}):
        assert not validator.is_valid(policy(**changes)), changes
