"""Pages of budgets, runs, approvals, policies and waivers: what they say, take and refuse."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from affidavit.accountants import decimal_up
from affidavit.service.web.pages.text import spreadsheet_safe
from tests.service.conftest import ON_SQLITE
from tests.service.runs.conftest import Yard
from tests.support.page_views import page_views
from tests.support.run_records import Record

MARKUP = "<script>alert(1)</script>"
BIDI = "a\u202eb"
HTML = {"accept": "text/html"}


def _get(yard: Yard, path: str, who: str = "audit", status: int = 200) -> str:
    answer = yard.ask("GET", path, who, **HTML)
    assert answer.status_code == status, answer.text
    return str(answer.text)


def _post(yard: Yard, path: str, who: str, **fields: str) -> Any:
    headers = {"authorization": f"Bearer {yard.tokens[who]}", **HTML}
    return yard.client.post(path, data=fields, headers=headers, follow_redirects=False)


def _csv(yard: Yard, path: str) -> list[dict[str, str]]:
    answer = yard.ask("GET", path, "audit")
    assert answer.status_code == 200, answer.text
    return list(csv.DictReader(io.StringIO(answer.text)))


def _view(yard: Yard, path: str, who: str = "audit") -> Any:
    """What a page is rendered from."""
    with page_views() as views:
        _get(yard, path, who)
    (view,) = views
    return view


def _main(page: str) -> str:
    """What a page's main part says, in one line."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.split("<main", 1)[1]))


def _policy(**changes: Any) -> dict[str, Any]:
    base = {"schema_version": 1, "name": "rules", "version": 1, "datasets": ["toy"]}
    return base | changes


def _set_policy(yard: Yard, **changes: Any) -> None:
    answer = yard.ask("POST", "/v1/policies", "admin", _policy(**changes))
    assert answer.is_success, answer.text


@ON_SQLITE
def test_a_run_page_shows_progress_record_and_charge(yard: Yard) -> None:
    certificate = yard.certify()
    run = yard.request(certificate, data="digits<b>").json()
    path = f"/runs/{run['id']}"
    assert "Waiting for a worker" in _main(_get(yard, path))
    job = yard.claim()
    yard.start(job)
    yard.say(job, "heartbeat", steps=3)
    under_way = _view(yard, path)
    # Of ten steps a twentieth is one step: the bound is for the three that were taken.
    assert (under_way["spent"]["steps"], under_way["run"]["state"]) == (3, "running")
    three = yard.ask("POST", "/v1/certificates", "submit", yard.document(steps=3)).json()
    assert under_way["spent"]["epsilon"] == pytest.approx(three["epsilon"]["upper"], rel=1e-4)
    assert under_way["spent"]["epsilon"] >= three["epsilon"]["lower"]
    yard.complete(job, 10)
    page = _get(yard, path)
    assert "The record conforms to the certificate" in _main(page)
    assert "digits&lt;b&gt;" in page
    story = _view(yard, path)["story"]
    told = [moment["what"] for moment in story]
    assert told == ["queued", "claimed", "running", "training", "record checked", "settled"]
    drawn = yard.ask("GET", path + "/steps.svg", "audit")
    assert "charged for 10 steps" in drawn.text
    assert drawn.headers["content-type"] == "image/svg+xml"
    assert "settled" in _main(_get(yard, "/datasets/toy"))
    (entry,) = _csv(yard, "/datasets/toy/ledger.csv")
    assert (entry["state"], entry["steps_run"]) == ("settled", "10")


def test_a_run_that_does_not_conform_shows_its_findings(yard: Yard) -> None:
    run = yard.request(yard.certify()).json()
    job = yard.claim()
    yard.start(job)
    record = Record(yard.predicate(job))
    for _ in range(11):
        record.step()
    yard.complete(job, record.end())
    page = _get(yard, f"/runs/{run['id']}")
    assert "too many steps" in _main(page)
    assert "does not conform" in _main(page)
    assert 'class="badge bad"' in page
    listed = _main(_get(yard, "/runs?state=failed"))
    assert "not conformant" in listed
    assert run["id"][:8] not in _main(_get(yard, "/runs?state=settled"))


@ON_SQLITE
def test_runs_are_started_and_stopped_with_the_right_scopes(yard: Yard) -> None:
    fields = {"certificate": yard.certify(), "data": "d", "model": "m", "output": "o"}
    refused = _post(yard, "/runs/new", "submit", **{**fields, "gpus": "many", "data": MARKUP})
    assert refused.status_code == 422
    assert MARKUP not in refused.text
    assert "gpus" in refused.text
    assert _post(yard, "/runs/new", "audit", **fields).status_code == 403
    unknown = _post(yard, "/runs/new", "submit", **{**fields, "certificate": "sha256:" + "0" * 64})
    assert unknown.status_code == 409
    created = _post(yard, "/runs/new", "submit", **fields)
    assert created.status_code == 303
    path = created.headers["location"]
    assert _post(yard, f"{path}/cancel", "work", reason="x").status_code == 403
    stopped = _post(yard, f"{path}/cancel", "admin", reason=f"{BIDI} {MARKUP}")
    assert stopped.headers["location"] == f"{path}?done=stopped"
    page = _get(yard, path)
    assert MARKUP not in page
    assert "\u202e" not in page
    assert r"a\u202eb" in page
    assert _view(yard, path)["story"][-1]["what"] == "cancelled"


def test_an_approval_shows_the_changes_since_the_last_usable_certificate(yard: Yard) -> None:
    yard_two = yard.document(steps=20, notes=MARKUP)
    base = yard.certify()
    _set_policy(yard, approvals=1)
    pending = yard.ask("POST", "/v1/certificates", "submit", yard_two).json()["certificate"]
    (waiting,) = _view(yard, "/approvals")["certificates"]
    assert waiting["id"] == pending["id"]
    path = f"/approvals/{pending['id']}"
    result = _view(yard, path, "approve")["request"]
    assert result["base"]["id"] == base
    assert [(c["pointer"], c["before"], c["after"]) for c in result["changes"]] == [
        ("/notes", None, MARKUP),
        ("/steps", "10", "20"),
    ]
    tones = {change["field"]: change["tone"] for change in result["guarantees"]}
    assert tones == {"ε ≤": "bad"}  # twice the steps with the same noise
    page = _get(yard, path)
    assert MARKUP not in page
    assert 'value="approve"' not in page  # an auditor only reads
    envelope = pending["envelope_digest"]
    for fields, status in (
        ({"decision": "reject", "envelope": envelope}, 422),
        ({"decision": "approve", "envelope": "sha256:" + "0" * 64}, 409),
        ({"decision": "approve"}, 422),
        ({"decision": "maybe", "envelope": envelope}, 422),
    ):
        assert _post(yard, path, "approve", **fields).status_code == status, fields
    assert _post(yard, path, "submit", decision="approve", envelope=envelope).status_code == 403
    done = _post(yard, path, "approve", decision="approve", envelope=envelope, comment=MARKUP)
    assert done.headers["location"] == f"{path}?done=issued"
    assert MARKUP not in _get(yard, path)
    assert _view(yard, "/approvals")["certificates"] == []
    again = _post(yard, path, "approve", decision="approve", envelope=envelope)
    assert again.status_code == 409


def test_pending_approvals_are_paged(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("affidavit.service.web.pages.approvals.PAGE_SIZE", 2)
    _set_policy(yard, approvals=1)
    created = {
        yard.ask("POST", "/v1/certificates", "submit", yard.document(steps=steps)).json()[
            "certificate"
        ]["id"]
        for steps in range(11, 16)
    }
    seen: list[str] = []
    cursor = ""
    for _ in range(4):
        result = _view(yard, f"/approvals{cursor}")
        seen += [item["id"] for item in result["certificates"]]
        if result["next"] is None:
            break
        cursor = f"?cursor={result['next']}"
    assert len(seen) == 5
    assert set(seen) == created
    assert _get(yard, "/approvals?cursor=forged", status=422)


@ON_SQLITE
def test_a_policy_draft_is_simulated_and_activated(yard: Yard) -> None:
    loose = yard.certify()
    tight = yard.ask(
        "POST",
        "/v1/certificates",
        "submit",
        yard.document(releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 100}]),
    ).json()["certificate"]["id"]
    _set_policy(yard, epsilon_cap=8)
    draft = _view(yard, "/policies/draft?policy=rules&epsilon_cap=0.4")
    broken = draft["result"]["changes"]
    assert [(item["certificate"]["id"], item["would_be"]) for item in broken] == [
        (loose, "refused")
    ]
    assert "the policy rules allows 0.4" in broken[0]["reasons"][0]["message"]
    assert tight not in {entry["certificate"]["id"] for entry in broken}
    _get(yard, "/policies/draft?policy=rules&epsilon_cap=4&valid_days=7", status=422)
    bad = _get(yard, "/policies/draft?policy=rules&epsilon_cap=much")
    assert "epsilon_cap" in bad
    assert _post(yard, "/policies/draft", "submit", yaml=draft["yaml"]).status_code == 403
    simulated = _post(yard, "/policies/draft", "audit", yaml=draft["yaml"], do="simulate")
    assert "1 would change" in _main(simulated.text)
    refused = _post(yard, "/policies/draft", "audit", yaml=draft["yaml"], do="activate")
    assert refused.status_code == 403
    again = _post(yard, "/policies/draft", "admin", yaml="version: [", do="activate")
    assert again.status_code == 422
    done = _post(yard, "/policies/draft", "admin", yaml=draft["yaml"], do="activate")
    assert done.headers["location"].startswith("/policies/rules/2")
    assert _post(yard, "/policies/draft", "admin", yaml=draft["yaml"], do="activate").is_redirect
    rules = _view(yard, "/policies/rules/2")["rules"]
    changed = [(rule["rule"], rule["before"], rule["value"]) for rule in rules if rule["changed"]]
    assert changed == [("epsilon_cap", "8.0", "0.4")]
    assert _get(yard, "/policies/rules/9", status=404)


@ON_SQLITE
def test_waivers_need_four_eyes(yard: Yard) -> None:
    _set_policy(yard, epsilon_cap=0.1)
    fields = {
        "rule": "policy_epsilon_cap",
        "policy": "rules",
        "dataset": "toy",
        "owner": "olga",
        "reason": MARKUP,
        "expires_at": "2027-01-31",
    }
    assert _post(yard, "/waivers", "audit", **fields).status_code == 403
    assert _post(yard, "/waivers", "approve", **{**fields, "dataset": "x"}).status_code == 409
    assert _post(yard, "/waivers", "approve", **{**fields, "rule": "large"}).status_code == 422
    own = _post(yard, "/waivers", "approve", **{**fields, "owner": "token:approve"})
    assert own.status_code == 403
    assert _post(yard, "/waivers", "approve", **fields).status_code == 303
    (line,) = _view(yard, "/waivers")["waivers"]
    assert (line["status"], line["waiver"]["expires_at"]) == ("in_force", "2027-01-31T23:59:59Z")
    assert MARKUP not in _get(yard, "/waivers")
    path = f"/waivers/{line['id']}/revoke"
    assert _post(yard, path, "approve", reason="").status_code == 422
    assert _post(yard, path, "approve", reason="over").status_code == 303
    assert _view(yard, "/waivers")["waivers"][0]["status"] == "revoked"


def test_a_data_set_shows_three_totals_and_a_forecast(yard: Yard) -> None:
    certificate = yard.certify()
    for _ in range(3):
        yard.request(certificate)
    view = _view(yard, f"/datasets/toy?composed=yes&certificate={certificate}")
    api = yard.ask("GET", f"/v1/ledgers/toy?certificate={certificate}", "audit").json()["items"][0]
    spent = api["spent"]
    assert view["composed"] == spent["composed"]
    assert spent["composed"]["epsilon"]["upper"] < spent["sum"]["epsilon"]
    assert view["requested_forecast"] == api["forecast"]
    amounts = {item["name"]: Decimal(item["epsilon"]) for item in view["amounts"]}
    assert amounts["spent"] == amounts["committed"] == 0  # Three runs wait for a worker.
    assert amounts["reserved"] == Decimal(decimal_up(spent["filter"]["epsilon"], 5))
    assert sum(amounts.values()) == Decimal(str(api["budget"]["epsilon"]))
    assert view["forecast"] == api["forecast"]
    page = _get(yard, "/datasets/toy")
    for total in (spent["filter"], spent["composed"], spent["sum"]):
        bound = total["epsilon"] if total is not spent["composed"] else total["epsilon"]["upper"]
        assert decimal_up(bound, 5) in _main(page)
    assert page.count("information only") >= 2
    assert "<svg" in page
    assert _get(yard, "/datasets/nowhere", status=404)
    for fields, status in (
        ({"dataset": "toy", "epsilon": "9", "delta": "1e-4"}, 303),
        ({"dataset": "../x", "epsilon": "9", "delta": "1e-4"}, 422),
        ({"dataset": "toy", "epsilon": "-1", "delta": "1e-4"}, 422),
        ({"dataset": "toy", "epsilon": "nan", "delta": "1e-4"}, 422),
        ({"dataset": "toy", "epsilon": MARKUP, "delta": "1e-4"}, 422),
    ):
        sent = {"unit": "example", "adjacency": "add_remove", "reason": "", **fields}
        answer = _post(yard, "/datasets", "admin", **sent)
        assert answer.status_code == status, (fields, answer.text)
        assert MARKUP not in answer.text
    assert _view(yard, "/datasets")["ledgers"][0]["state"]["budget"]["epsilon"] == "9"


@pytest.mark.soak
def test_what_a_group_adds_is_the_use_without_it(yard: Yard) -> None:
    """Of one group, all that is in use; of two, at most that, and more than one run of them."""
    yard.request(yard.certify())
    yard.request(yard.certify())
    other = yard.ask("POST", "/v1/certificates", "submit", yard.document(name="other")).json()
    yard.request(other["certificate"]["id"], model="mlp:16")
    (ledger,) = yard.ask("GET", "/v1/ledgers/toy", "audit").json()["items"]
    spent = float(ledger["spent"]["filter"]["epsilon"])
    now = datetime.now(UTC)
    for by, names in (
        ("person", {"token:submit"}),
        ("team", {"default"}),
        ("month", {f"{now:%Y-%m}"}),
        ("plan", {"quick", "other"}),
        ("model", {"mlp:8", "mlp:16"}),
    ):
        shares = _view(yard, f"/datasets/toy?by={by}")["shares"]
        assert {item["name"] for item in shares} == names
        assert sum(item["runs"] for item in shares) == 3
        added = [float(item["adds"]) for item in shares]
        if len(names) == 1:
            assert added[0] == pytest.approx(spent, abs=1e-3)
        else:
            assert max(added) < spent
            assert sum(added) <= spent
    view = _view(yard, "/datasets/toy?by=plan")
    assert float(view["shares"][0]["adds"]) > max(float(adds) for _, adds in view["entries"])
    assert [name for _, name in view["choices"]] == [f"other, {now:%F}", f"quick, {now:%F}"]
    assert _view(yard, "/runs/new", "submit")["choices"] == view["choices"]
    (quarter,) = view["quarters"]
    report = _csv(yard, f"/datasets/toy/ledger.csv?quarter={quarter}")
    assert sorted(row["model"] for row in report) == ["mlp:16", "mlp:8", "mlp:8"]
    assert _csv(yard, "/datasets/toy/ledger.csv?quarter=2001-Q1") == []


def test_a_named_data_set_has_a_page_before_it_has_a_budget(yard: Yard) -> None:
    assert "The data set nob has no budget" in _main(_get(yard, "/datasets/nob", status=404))
    plan = yard.document(dataset={"name": "nob", "size": 1000})
    assert yard.ask("POST", "/v1/certificates", "submit", plan).is_success
    assert 'href="/datasets/nob"' in _get(yard, "/certificates")
    page = _get(yard, "/datasets/nob")
    assert "No budget yet" in _main(page)
    assert "POST /v1/ledgers/nob/budget" in _main(page)
    assert 'href="/datasets"' in page
    _get(yard, "/datasets/nob?ledger=example/add_remove", status=404)
    assert _view(yard, "/datasets/nob")["shown"] is None


@ON_SQLITE
def test_the_reservations_of_a_ledger_are_a_file(yard: Yard) -> None:
    run = yard.request(yard.certify()).json()["id"]
    links = re.findall(r'href="([^"]+csv[^"]*)"', _get(yard, "/datasets/toy"))
    (entry,) = _csv(yard, html.unescape(links[0]))
    assert (entry["run"], entry["state"]) == (run, "reserved")
    assert _csv(yard, "/datasets/toy/ledger.csv?before=1") == []
    _get(yard, "/datasets/toy/ledger.csv?ledger=example/zero_out", status=404)
    # A data set may be called like a file.
    budget = {"adjacency": "zero_out", "epsilon": 7, "delta": 1e-3}
    assert yard.ask("POST", "/v1/ledgers/toy.csv/budget", "admin", budget).is_success
    assert "<h1>toy.csv</h1>" in _get(yard, "/datasets/toy.csv")
    assert _csv(yard, "/datasets/toy.csv/ledger.csv") == []


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN A-----",
        "-----BEGIN A-----\nAA==\n-----END B-----\n",
        "-----BEGIN A-----\nAA==\n-----END A-----\n+1",
        "-----BEGIN A-----\ncmd|'/C calc'!A0\n-----END A-----\n",
    ],
)
def test_text_that_looks_like_a_key_is_still_escaped(text: str) -> None:
    assert spreadsheet_safe(text) == f"'{text}"


@ON_SQLITE
def test_a_plan_is_previewed_and_submitted(yard: Yard) -> None:
    fields = {
        "mode": "form",
        "name": "quick",
        "dataset.name": "toy",
        "dataset.size": "1000",
        "adjacency": "add_remove",
        "sampling.scheme": "full_batch",
        "steps": "10",
        "releases.0.name": "all",
        "releases.0.clip_norm": "1",
        "releases.0.noise_multiplier": "20",
        "target.epsilon": "8",
        "target.delta": "1e-5",
    }
    before = yard.ask("GET", "/v1/certificates", "audit").json()["items"]
    checked = _post(yard, "/plans/new", "submit", do="check", **fields)
    assert "Would be certified: ε ≤ 0.56" in _main(checked.text)
    text = json.dumps({**yard.document(), "target": {"delta": 1e-5}, "claim": 0.1})
    claimed = _post(yard, "/plans/new", "submit", do="check", mode="yaml", yaml=text)
    assert "ε = 0.1 is claimed, and the proved bound is ε ≤" in _main(claimed.text)
    assert yard.ask("GET", "/v1/certificates", "audit").json()["items"] == before
    created = _post(yard, "/plans/new", "submit", do="certify", **fields)
    assert created.headers["location"] == f"/certificates/{yard.certify()}"
    wrong = _post(yard, "/plans/new", "submit", do="certify", **{**fields, "steps": MARKUP})
    assert wrong.status_code == 422
    assert MARKUP not in wrong.text
    refused = _post(
        yard, "/plans/new", "submit", do="check", mode="yaml", yaml=f"notes: '{BIDI}{MARKUP}'"
    )
    assert "\u202e" not in refused.text
    assert MARKUP not in refused.text
    _set_policy(yard, epsilon_cap=0.1)
    judged = _post(yard, "/plans/new", "submit", do="check", **fields)
    assert "Refused by the policy" in _main(judged.text)
    assert _post(yard, "/plans/new", "audit", do="check", **fields).status_code == 403


@ON_SQLITE
def test_incomparable_certificates_are_not_ranked(
    yard: Yard,
) -> None:
    first = yard.certify()
    ids = [
        yard.ask("POST", "/v1/certificates", "submit", yard.document(**changes)).json()[
            "certificate"
        ]["id"]
        for changes in ({"steps": 20}, {"adjacency": "zero_out"})
    ]
    result = _view(yard, f"/compare?id={first}&id={ids[0]}")
    (pair,) = result["pairs"]
    (steps,) = pair["lines"]
    assert (pair["ranking"], steps["pointer"]) == ("first", "/steps")
    assert float(pair["start"]) + float(steps["adds"]) == pytest.approx(float(pair["end"]))
    result = _view(yard, f"/compare?id={first}&id={ids[1]}&id={ids[0]}")
    unranked, ranked = result["pairs"]
    assert (unranked["ranking"], unranked["difference"]) == (None, None)
    assert (ranked["sentence"], ranked["difference"]) == (pair["sentence"], pair["difference"])
    assert [item["code"] for item in unranked["obstacles"]] == ["different_adjacency"]
    profile = yard.ask("GET", f"/compare/profile.svg?id={first}&id={ids[0]}", "audit")
    assert profile.headers["content-type"] == "image/svg+xml"
    missing = f"/compare?id={first}&id=sha256:{'0' * 64}"
    assert "does not exist" in _main(_get(yard, missing, status=404))
    texts = _post(yard, "/compare", "audit", first="version: 1", second=f"<b>{BIDI}")
    assert texts.status_code == 422
    assert "<b>" not in texts.text
    assert "\u202e" not in texts.text


@ON_SQLITE
def test_a_form_without_its_token_is_refused(yard: Yard) -> None:
    token = yard.tokens["admin"]
    signing_in = yard.client.get("/sign-in", headers=HTML)
    csrf = re.findall(r'name="csrf" value="([^"]+)"', signing_in.text)[0]
    yard.client.post("/sign-in", data={"csrf": csrf, "token": token, "next": "/"}, headers=HTML)
    budget = {"unit": "example", "adjacency": "add_remove", "epsilon": "1", "delta": "1e-5"}
    for sent in ({}, {"csrf": "0" * 64}, {"csrf": csrf}):
        answer = yard.client.post("/datasets", data={"dataset": "new", **budget, **sent})
        assert answer.status_code == 403
    page = yard.client.get("/datasets", headers=HTML)
    assert "/datasets/new" not in page.text
    own = re.findall(r'name="csrf" value="([^"]+)"', page.text)[-1]
    sent = {"dataset": "new", **budget, "csrf": own}
    assert yard.client.post("/datasets", data=sent, follow_redirects=False).status_code == 303


@ON_SQLITE
def test_tokens_of_a_person_are_one_identity(yard: Yard) -> None:
    """Two tokens of one person are one identity: they cannot approve what they asked for."""
    created = _post(yard, "/tokens", "admin", name="priya-ci", person="priya", scope="audit")
    assert created.status_code == 201
    lines = _view(yard, "/tokens", "admin")["tokens"]
    (line,) = [item for item in lines if item["name"] == "priya-ci"]
    assert line["person"] == "person:priya"
    assert "person:priya" in _main(_get(yard, "/tokens", "admin"))
    wrong = _post(yard, "/tokens", "admin", name="x", person="a b <i>", scope="audit")
    assert wrong.status_code == 422
    assert "is not valid" in _main(wrong.text)
    assert 'value="a b &lt;i&gt;"' in wrong.text
