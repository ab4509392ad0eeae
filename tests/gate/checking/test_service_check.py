"""``check --server``: whatever the service answers, only a proved plan passes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from affidavit.client import calls
from affidavit.gate.exit_codes import Exit
from tests.support.random_seeds import examples, seeded

DIGEST = "sha256:" + "0" * 64
HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1.5, 10**400, "", "x", "\ud800", "\x1b[2J", [], [[]], {}, {"a": 1}, [None] * 3,
)  # fmt: skip


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have every request answered with these documents in turn, the last one for good."""
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calls, "FIRST_RETRY_SECONDS", 0)

    def prepare(*documents: Any) -> None:
        rest = [json.dumps(document) for document in documents]

        def handle(_: httpx.Request) -> httpx.Response:
            return httpx.Response(200, text=rest.pop(0) if len(rest) > 1 else rest[0])

        monkeypatch.setattr(
            httpx.HTTPTransport, "handle_request", lambda _, request: handle(request)
        )

    return prepare


POLICY = {
    "name": "p",
    "version": 1,
    "digest": DIGEST,
    "datasets": "default",
    "active": True,
    "created_by": None,
    "created_at": None,
    "policy": {"on_outage": "warn"},
    "envelope": None,
}


def answer(plan_digest: str, **more: Any) -> dict[str, Any]:
    reason = {"code": "c", "pointer": "/steps", "message": "m", "remedy": "r"}
    return {
        "verdict": "certified",
        "plan_digest": plan_digest,
        "epsilon": {"lower": 1.0, "upper": 2.0},
        "delta": {"lower": 1e-5, "upper": 1e-5},
        "reasons": [reason],
        "waived": [{**reason, "waiver": {"id": DIGEST}}],
        "policy": {"name": "p", "version": 1, "digest": DIGEST},
        "certificate": {"id": DIGEST, "status": "active", "bundle": {}, "issue": 1},
        **more,
    }


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = document.items() if isinstance(document, dict) else ()
    below = enumerate(document) if isinstance(document, list) else below
    return [path, *(place for key, part in below for place in places(part, (*path, key)))]


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    result = document.copy()
    result[path[0]] = replaced(document[path[0]], path[1:], value)
    return result


def test_no_answer_makes_a_command_fail_or_a_weak_plan_pass(
    service: Callable[..., None], run: Any, save: Any, document: Any
) -> None:
    drawn = random.Random(seeded("answers"))
    plans = {
        kind: save(document(**fields), f"{kind}.json")
        for kind, fields in (("good", {}), ("weak", {"target": {"epsilon": 0.1, "delta": 1e-5}}))
    }
    digest = json.loads(run("certify", plans["good"], "--json").stdout)["plan_digest"]
    for _ in range(examples(50)):
        kind = drawn.choice(list(plans))
        forms = [answer(digest), POLICY]
        which = drawn.randrange(2)
        spot = drawn.choice(places(forms[which]))
        forms[which] = replaced(forms[which], spot, drawn.choice(HOSTILE))
        service(*forms)
        ended = run("check", plans[kind], "--server", "http://service.test")
        text = f"{kind} {forms[which]}: {ended.output}"
        assert ended.exit_code in (Exit.CERTIFIED, Exit.BLOCKED, Exit.UNDECIDED), text
        assert kind == "good" or ended.exit_code != Exit.CERTIFIED, text


def test_an_answer_counts_where_nothing_can_be_stored(
    service: Callable[..., None], run: Any, save: Any, document: Any, monkeypatch: Any
) -> None:
    plan = save(document(), "plan.json")
    digest = json.loads(run("certify", plan, "--json").stdout)["plan_digest"]
    monkeypatch.setenv("AFFIDAVIT_CACHE", f"{plan}/cache")
    service(answer(digest), POLICY)
    ended = run("check", plan, "--server", "http://service.test")
    assert ended.exit_code == Exit.CERTIFIED, ended.output
