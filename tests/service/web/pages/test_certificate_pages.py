"""Pages of certificates: what they say of each standing, what is taken away, what they refuse."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from affidavit.accountants import decimal_down, decimal_up
from affidavit.gate import app
from affidavit.service.core.database import open_engine
from affidavit.service.keys.keyring import KeysetStore
from affidavit.service.web.pages import certificates as certificates_module
from affidavit.service.web.pages.certificates import CertificateSearch, certificate_list
from affidavit.service.web.pages.text import round_up
from affidavit.trust import (
    KeyStore,
    Revocation,
    Roots,
    SigningKey,
    draft_keyset,
)
from tests.service.conftest import ON_SQLITE
from tests.service.runs.conftest import Yard
from tests.support.page_views import page_views
from tests.support.polling import wait_until

MARKUP = "<script>alert(1)</script>"
HOSTILE = f"=cmd|'/C calc'!A0 {MARKUP} a\u202eb"
HTML = {"accept": "text/html"}


def _get(yard: Yard, path: str, who: str = "audit", status: int = 200) -> Any:
    answer = yard.ask("GET", path, who, **HTML)
    assert answer.status_code == status, answer.text
    return answer


def _main(page: Any) -> str:
    """What a page's main part says, in one line."""
    text = re.sub(r"<[^>]*>", " ", page.text.split("<main", 1)[1])
    return re.sub(r"\s+", " ", html.unescape(text))


def _post(yard: Yard, path: str, who: str, **fields: str) -> Any:
    headers = {"authorization": f"Bearer {yard.tokens[who]}", **HTML}
    return yard.client.post(path, data=fields, headers=headers, follow_redirects=False)


def _view(yard: Yard, path: str, who: str = "audit") -> Any:
    """What a page is rendered from."""
    with page_views() as views:
        _get(yard, path, who)
    (view,) = views
    return view


def _lines(yard: Yard, query: str) -> Any:
    return _view(yard, f"/certificates?{query}")["certificates"]


def _certify(yard: Yard, **changes: Any) -> str:
    answer = yard.ask("POST", "/v1/certificates", "submit", yard.document(**changes))
    assert answer.is_success, answer.text
    return str(answer.json()["certificate"]["id"])


def _revoke(yard: Yard, certificate: str) -> None:
    body = {"code": "plan_error", "reason": HOSTILE}
    where = f"/v1/certificates/{certificate}/revocation"
    assert yard.ask("POST", where, "approve", body).is_success


@ON_SQLITE
def test_a_problem_is_said_once_and_without_the_paths_of_the_api(yard: Yard) -> None:
    page = _main(_get(yard, "/certificates/x", status=422))
    assert page.count("certificate_id must be") + page.count("Certificate_id must be") == 1
    assert "openapi" not in page
    assert "openapi" not in _main(_get(yard, "/nosuch", status=404))


def _offline(yard: Yard, page: Any, home: Path) -> subprocess.CompletedProcess[str] | Any:
    """Do what the page says repeats the verification elsewhere; curl is the tests' client."""
    (block,) = re.findall(r"<pre[^>]*><code>(curl.*?)</code></pre>", page.text, re.DOTALL)
    *fetched, verify = html.unescape(block).splitlines()
    for line in fetched:
        curl, *provided, url = shlex.split(line)
        headers = {}
        if "-H" in provided:
            name, value = provided[provided.index("-H") + 1].split(": ")
            headers[name] = value.replace("$AFFIDAVIT_TOKEN", yard.tokens["audit"])
        answer = yard.client.get(url, headers=headers)
        assert (curl, answer.status_code) == ("curl", 200), url
        (home / provided[provided.index("-o") + 1]).write_bytes(answer.content)
    program, *arguments = shlex.split(verify)
    assert program == "affidavit"
    files = [
        str(home / argument) if argument.endswith(".json") else argument for argument in arguments
    ]
    return CliRunner().invoke(app, files)


@ON_SQLITE
def test_a_certificate_page_shows_guarantee_charts_and_runs(yard: Yard, tmp_path: Path) -> None:
    plan = yard.document(notes=HOSTILE)
    stated = yard.ask("POST", "/v1/certificates", "submit", plan).json()
    certificate = stated["certificate"]["id"]
    run = yard.request(certificate).json()
    job = yard.claim()
    yard.start(job)
    assert yard.complete(job, 10).is_success
    bundle = f"/v1/certificates/{certificate}/bundle"
    wait_until(lambda: "log" in yard.ask("GET", bundle, "audit").json())
    path = f"/certificates/{certificate}"
    drawn = _get(yard, f"{path}/charts/steps.svg")
    assert drawn.headers["content-security-policy"].startswith("default-src 'none'")
    assert "charged for 10 steps" in drawn.text
    page = _get(yard, path)
    text = _main(page)
    shown = _view(yard, path)
    upper, lower = (stated["epsilon"][end] for end in ("upper", "lower"))
    at_most = decimal_up(upper, 5)
    assert shown["sentence"] == f"Certified: ε ≤ {at_most} at δ = 1e-5 (add/remove, per example)."
    assert f"from {decimal_down(lower, 5)} (lower bound, not a guarantee) to {at_most}" in text
    assert shown["sentence"].removeprefix("Certified: ") in text
    checks = {check["covers"]: check for check in shown["checks"]}
    assert all(check["sentence"] in text for check in checks.values())
    assert [name for name in checks if checks[name]["is_done"]] == ["arithmetic", "implementation"]
    # Its charts are drawn and stand in the page: target, diagonal, cap and run are named.
    for name in ("target", "no leakage", "certified for the whole run", "the actual run"):
        assert name in text
    # The record of the conformant run vouches for what the trainer was obliged to.
    marks = {row["question"]: (row["mark"], row["by"]) for row in shown["checklist"]}
    assert marks["Clip each record:"] == ("checked", f"record of run {run['id']}")
    assert marks["What does one unit hold?"] == ("declared", "plan")
    assert marks["Who may read the data and the weights?"] == ("open", "deployment")
    (lineage,) = shown["runs"]
    assert lineage["id"] == run["id"]
    assert f'title="{"2" * 64}"' in page.text  # the weights
    assert [item["state"] for item in shown["verification"]["steps"]] == ["passed"] * 13
    assert MARKUP not in page.text
    assert "\u202e" not in page.text
    assert r"a\u202eb" in page.text
    assert _offline(yard, page, tmp_path).exit_code == 0


@ON_SQLITE
def test_a_session_downloads_the_same_bundle_as_the_api(yard: Yard) -> None:
    certificate = _certify(yard)
    signing_in = yard.client.get("/sign-in", headers=HTML)
    (csrf,) = re.findall(r'name="csrf" value="([^"]+)"', signing_in.text)
    sent = {"csrf": csrf, "token": yard.tokens["audit"], "next": f"/certificates/{certificate}"}
    page = yard.client.post("/sign-in", data=sent, headers=HTML)
    links = re.findall(r'<a [^>]*href="([^"]+)"', page.text)
    assert not [entry for entry in links if entry.startswith("/v1/")]
    (link,) = [item for item in links if "bundle" in item]
    # The log may give it a place in between, which stands in it from then on.
    before = yard.ask("GET", f"/v1/certificates/{certificate}/bundle", "audit")
    taken = yard.client.get(link)
    after = yard.ask("GET", f"/v1/certificates/{certificate}/bundle", "audit")
    assert taken.status_code == 200, taken.text
    assert taken.content in (before.content, after.content)
    assert taken.headers["content-type"] == before.headers["content-type"]
    assert taken.headers["content-disposition"] == 'attachment; filename="bundle.json"'
    assert taken.headers["cache-control"] == "no-store"
    assert yard.client.get(link.replace(certificate[7:], "0" * 64)).status_code == 404


@ON_SQLITE
def test_a_refused_certificate_claims_nothing(yard: Yard) -> None:
    fixed = {"adjacency": "add_remove", "sampling": {"scheme": "fixed_size", "lot_size": 100}}
    certificate = _certify(yard, **fixed)
    path = f"/certificates/{certificate}"
    text = _main(_get(yard, path))
    assert "No guarantee can be certified" in text
    assert "fixed_size_needs_replace_one" in text
    assert "What to do:" in text
    assert "ε ≤" not in text
    marks = [(row["topic"], row["mark"]) for row in _view(yard, path)["checklist"]]
    assert ("Privacy parameters", "open") in marks
    assert "checked" not in {mark for _, mark in marks}
    document = _get(yard, f"{path}/documentation.md").text
    assert document.count("NIST SP 800-226") == 2
    for part in ("Purpose", "Data", "Method", "Guarantee", "Residual risk"):
        assert f". {part}\n" in document
    assert certificate in document
    _get(yard, f"{path}/charts/profile.svg", status=404)


@ON_SQLITE
def test_a_revoked_certificate_is_marked_everywhere(yard: Yard, tmp_path: Path) -> None:
    certificate = _certify(yard)
    _revoke(yard, certificate)
    path = f"/certificates/{certificate}"
    page = _get(yard, path)
    text = _main(page)
    assert "Do not use this certificate. Revoked by token:approve:" in text
    assert "verification failed" in text
    assert MARKUP not in page.text
    assert "\u202e" not in page.text
    shown = _view(yard, path)["verification"]
    assert (shown["passed"], shown["code"], shown["steps"][-1]["state"]) == (
        False,
        "revoked",
        "failed",
    )
    assert _offline(yard, page, tmp_path).exit_code != 0
    for status, ids in (("revoked", [certificate]), ("active", [])):
        assert [line["id"] for line in _lines(yard, f"status={status}")] == ids


def test_a_certificate_of_a_revoked_key_is_no_longer_active(yard: Yard, tmp_path: Path) -> None:
    certificate = _certify(yard)
    now = datetime.now(UTC)
    (bad,) = KeyStore(tmp_path / "keys").public_keys()
    KeyStore(tmp_path / "keys").new("next")
    root = SigningKey.generate("root")
    created = draft_keyset(
        None,
        roots=Roots.of([root.public], threshold=1),
        keys=[bad],
        revoked=[
            Revocation(key_id=bad.key_id, since=f"{now - timedelta(days=1):%Y-%m-%dT%H:%M:%SZ}")
        ],
        issued_at=now,
        expires_at=now + timedelta(days=30),
    ).signed_by(root)
    KeysetStore(yard.engine).publish(created.as_bytes(), actor="me", at=now)
    text = _main(_get(yard, f"/certificates/{certificate}"))
    assert "The key that signed it was revoked" in text
    shown = _view(yard, f"/certificates/{certificate}")["verification"]
    assert (shown["code"], shown["steps"][5]["state"]) == ("key_revoked", "failed")
    for status, result in (("key_revoked", [certificate]), ("active", []), ("expired", [])):
        assert [line["id"] for line in _lines(yard, f"status={status}")] == result


@ON_SQLITE
def test_a_waived_rule_is_shown_with_its_waiver(yard: Yard) -> None:
    rules = {"schema_version": 1, "name": "strict", "version": 1, "datasets": ["toy"]}
    rules |= {"epsilon_cap": 0.5, "approvals": 1}
    assert yard.ask("POST", "/v1/policies", "admin", rules).is_success
    refused = _certify(yard)
    text = _main(_get(yard, f"/certificates/{refused}"))
    assert "Refused by the policy; the proved bound is ε ≤ 0.56129" in text
    until = f"{datetime.now(UTC) + timedelta(days=30):%Y-%m-%dT%H:%M:%SZ}"
    leave = {"rule": "policy_epsilon_cap", "policy": "strict", "dataset": "toy", "owner": "olga"}
    leave |= {"reason": MARKUP, "expires_at": until}
    assert yard.ask("POST", "/v1/waivers", "approve", leave).is_success
    pending = _certify(yard)
    page = _get(yard, f"/certificates/{pending}", "approve")
    text = _main(page)
    assert "Waived: policy_epsilon_cap" in text
    assert "Granted by token:approve, owned by olga" in text
    assert "0 of 1 required approvals" in text
    assert "Review approval" in text
    assert "Review approval" not in _main(_get(yard, f"/certificates/{pending}"))
    assert MARKUP not in page.text


@pytest.mark.soak
@ON_SQLITE
def test_a_mu_that_a_policy_compares_is_signed_and_shown(yard: Yard) -> None:
    rules = {"schema_version": 1, "name": "strict", "version": 1, "datasets": ["toy"], "mu_cap": 9}
    assert yard.ask("POST", "/v1/policies", "admin", rules).is_success
    certificate = _certify(yard, sampling={"scheme": "poisson", "lot_size": 10})
    stated = _view(yard, f"/certificates/{certificate}")["predicate"]
    bound = stated["guarantee"]["gaussian_bound"]
    assert stated["verdict"] == "certified"
    text = _main(_get(yard, f"/certificates/{certificate}"))
    assert f"that of μ = {round_up(bound['mu'])}" in text


@ON_SQLITE
def test_a_claim_is_diagnosed(yard: Yard) -> None:
    path = f"/certificates/{_certify(yard)}/diagnosis"
    assert "The claim holds" in _main(_get(yard, f"{path}?claimed=0.56129"))
    assert "The claim is refuted" in _main(_get(yard, f"{path}?claimed=0.16"))
    for claimed in ("much", MARKUP, "-1", "nan", "1e999"):
        page = _get(yard, f"{path}?claimed={claimed}", status=422)
        assert MARKUP not in page.text
        assert re.search(r"The claim(:| must be a positive decimal)", _main(page))
    _get(yard, f"{path}?claimed={'1' * 65}", status=422)
    # A plan that claims less than is proved: the sentence says what, and no None.
    wrong = _certify(yard, target={"delta": 1e-5}, claim={"epsilon": 0.1})
    text = _main(_get(yard, f"/certificates/{wrong}"))
    assert "ε = 0.1 is claimed, and" in text
    assert "None" not in text


def test_the_list_is_filtered_paged_and_refuses_unknown_parameters(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = [_certify(yard, name=f"plan-{number}", steps=number) for number in (1, 2, 3)]
    low = _certify(yard, name="loud", target={"epsilon": 0.1, "delta": 1e-5})
    monkeypatch.setattr(certificates_module, "PAGE_SIZE", 2)
    for query in ("q=plan", "q=plan&requester=token:submit", "q=plan&mechanism=dp_sgd"):
        seen, cursor = [], ""
        while True:
            result = _view(yard, f"/certificates?{query}{cursor}")
            seen += [line["id"] for line in result["certificates"]]
            if not result["next"]:
                break
            cursor = f"&cursor={result['next']}"
        assert seen == created[::-1], query
    for narrowed, ids in (
        ("verdict=under_noised", [low]),
        (f"q={low[7:19]}", [low]),
        ("dataset=toy&q=loud", [low]),
        ("dataset=to", []),
        ("requester=token:submit&q=loud", [low]),
        ("mechanism=dp_muon", []),
        ("q=%25", []),
        ("q=_lan", []),
        ("epsilon=none", []),
        # A form sends every field, those too that were left empty.
        ("q=loud&dataset=&requester=&verdict=&status=&epsilon=&mechanism=&ends=&cursor=", [low]),
    ):
        lines = _lines(yard, narrowed)
        assert [line["id"] for line in lines] == ids, narrowed
    _revoke(yard, created[0])
    for status, ids in (
        ("revoked", [created[0]]),
        ("rejected", []),
        ("active", [low, created[2]]),
    ):
        lines = _lines(yard, f"status={status}")
        assert [line["id"] for line in lines] == ids, status
    for wrong in ("verdict=fine", "epsilons=to_1", "cursor=zz", "q=" + "a" * 129):
        _get(yard, f"/certificates?{wrong}", status=422)
    facets = {item["name"]: item["choices"] for item in result["facets"]}
    assert {c["value"]: c["count"] for c in facets["verdict"]}["certified"] == "3"
    # Of the two newest one is certified: that is the least there is, and the total is whole.
    monkeypatch.setattr(certificates_module, "MAX_COUNTED", 2)
    result = _view(yard, "/certificates?verdict=under_noised")
    verdicts = {c["value"]: c["count"] for c in result["facets"][0]["choices"]}
    assert (verdicts["certified"], verdicts["refused"], result["total"]) == ("2+", "0+", "1")


def test_expired_certificates_are_sorted_by_expiry(
    yard: Yard, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        _certify(yard, name=f"plan-{number}", steps=number)
    monkeypatch.setattr(certificates_module, "PAGE_SIZE", 2)
    later = datetime.now(UTC) + timedelta(days=4000)
    engine = open_engine(database_url)
    with engine.connect() as connection:
        for requested in ({"ends": "over"}, {"status": "expired"}, {"ends": "over", "q": "plan"}):
            first = certificate_list(connection, CertificateSearch.model_validate(requested), later)
            rest = CertificateSearch.model_validate({**requested, "cursor": first.next})
            second = certificate_list(connection, rest, later)
            ends = [line.not_after for line in (*first.certificates, *second.certificates)]
            assert len(ends) == 3
            assert ends == sorted(ends, reverse=True)
            assert (first.total, second.next) == ("3", None)
    engine.dispose()


def test_the_list_states_its_order(yard: Yard) -> None:
    _certify(yard, name="plan", steps=1)
    for query, order, stated in (
        ("", "created_at", "newest first"),
        ("?ends=over", "not_after", "latest expiry first"),
        ("?ends=over&mechanism=dp_sgd", "created_at", "newest first"),
    ):
        assert _view(yard, f"/certificates{query}")["order"] == order
        assert f", {stated}." in _main(_get(yard, f"/certificates{query}"))
