"""One person with two tokens is one person: to the service, and to the database by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from affidavit.service.identity.tokens import TokenError
from affidavit.trust import read_envelope
from tests.service.certificates.conftest import Company
from tests.service.certificates.test_approvals import insert_approval, predicate
from tests.service.conftest import ON_SQLITE, token_for, tokens_for

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def people(company: Company) -> Company:
    """Ana has a token to submit with and two to approve with; Bob has one of each kind."""
    settings = company.settings
    for person, scopes in (
        ("ana", {"ana-ci": ["submit"], "ana-laptop": ["approve"], "ana-phone": ["approve"]}),
        ("oidc:b-17", {"bob-ci": ["submit"], "bob-laptop": ["approve"]}),
    ):
        company.headers |= tokens_for(settings, scopes, person)
    return company


def test_nobody_approves_what_they_asked_for_with_another_token(
    people: Company, plan: Plan
) -> None:
    people.require_approvals(1)
    requested = people.submit(plan(), "ana-ci").json()
    assert predicate(requested)["requester"] == "person:ana"
    answer = people.decide("ana-laptop", requested)
    assert (answer.status_code, answer.json()["code"]) == (403, "own_request")
    with pytest.raises(IntegrityError, match="four eyes"):
        insert_approval(people, requested, approver="person:ana")
    # Nor by raw SQL in the name of a token, by which nobody would know her.
    with pytest.raises(IntegrityError, match="four eyes"):
        insert_approval(people, requested, approver="token:ana-laptop")
    approved = people.decide("bob-laptop", requested).json()
    envelope = read_envelope(approved["certificate"]["bundle"]["envelope"])
    assert b"oidc:b-17" in envelope.payload


def test_two_tokens_of_one_person_are_one_approval(people: Company, plan: Plan) -> None:
    people.require_approvals(2)
    requested = people.submit(plan(), "bob-ci").json()
    assert people.decide("ana-laptop", requested).status_code == 201
    again = people.decide("ana-phone", requested)
    assert (again.status_code, again.json()["code"]) == (409, "already_decided")
    assert people.current(requested)["certificate"]["status"] == "awaiting_approval"


@ON_SQLITE
def test_a_name_that_is_no_person_is_refused(people: Company) -> None:
    for person in ("", "token:ci", "person:ana", "anonymous@loopback:x", "a b"):
        with pytest.raises(TokenError, match="person"):
            token_for(people.settings, "submit", name="x", person=person)
