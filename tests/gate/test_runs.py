"""``affidavit runs``: what it tells of a run while services come and go, and what it verifies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from affidavit.client import Run, calls
from affidavit.evidence import (
    START,
    Conformance,
    ConformanceFinding,
    encode_line,
    sign_provenance,
)
from affidavit.gate.cli import app
from affidavit.trust import SigningKey

RUN = "6f1c0c9e-7d0b-4b52-9a37-0f5f4f7f9d11"
SERVER = "http://service.test"
FINAL = {
    "type": "final",
    "ended": "completed",
    "charged": 4,
    "released": 4,
    "parameters": "p",
    "at": "a",
}


def block(place: str, kind: str, /, **data: Any) -> str:
    return f"id: {place}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"


def state(place: str, name: str, **more: Any) -> str:
    at = "2026-01-01T00:00:00Z"
    return block(place, "state", seq=1, at=at, event=name, state=name, **more)


def run_in(state: str) -> httpx.Response:
    digest = "sha256:" + "0" * 64
    fields = dict.fromkeys(Run.model_fields, None) | dict.fromkeys(
        ("id", "reservation", "queue", "data", "model", "output", "requested_by"), "x"
    )
    fields |= {
        "state": state,
        "certificate": digest,
        "plan_digest": digest,
        "issue": 1,
        "claims": 0,
        "cancel_asked": True,
        "requirements": {"gpus": 0, "hosts": 1, "memory": 0},
        "steps": {"certified": 1, "granted": 0, "reported": 0, "charged": None},
        "requested_at": "2026-01-01T00:00:00Z",
        "changed_at": "2026-01-01T00:00:00Z",
    }
    return httpx.Response(200, json=fields)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str | None]]:
    """Have a service answer in this order; returns the last ids that it was asked from."""

    def prepare(*given: httpx.Response | Exception) -> list[str | None]:
        requested: list[str | None] = []
        rest = list(given)

        def handle(request: httpx.Request) -> httpx.Response:
            requested.append(request.headers.get("last-event-id"))
            answer = rest.pop(0) if len(rest) > 1 else rest[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(
            httpx.HTTPTransport, "handle_request", lambda _, request: handle(request)
        )
        monkeypatch.setattr(calls, "RECONNECT_SECONDS", 0)
        return requested

    return prepare


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["runs", *words])


def stream(*blocks: str) -> httpx.Response:
    return httpx.Response(200, text="retry: 2000\n\n: \n\n" + "".join(blocks))


def problem(status: int, code: str) -> httpx.Response:
    return httpx.Response(status, json={"code": code, "detail": "so it is"})


def test_a_run_is_told_of_through_a_service_that_goes_and_comes(answers: Any) -> None:
    spent = {"steps": 5, "epsilon": 0.5, "delta": 1e-5}
    requested = answers(
        stream(state("1-0", "queued"), state("2-0", "running", worker="w1")),
        httpx.ConnectError("refused"),
        problem(503, "database_unavailable"),
        stream(block("2-5", "progress", steps=5, certified=9, spent=spent), 'data: {"cut'),
        stream(state("3-9", "settled", code="conformant")),
        httpx.Response(204),
    )
    result = run("watch", RUN, "--server", SERVER)
    assert result.exit_code == 0, result.output
    assert requested == [None, "2-0", "2-0", "2-0", "2-5", "3-9"]
    told = [line.removeprefix("2026-01-01T00:00:00.000Z ") for line in result.stdout.splitlines()]
    assert told == [
        "queued",
        "running w1",
        "step 5 of 9, ε ≤ 0.5 at δ = 1e-5 spent",
        "settled conformant",
    ]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([stream(state("1-0", "failed", code="no_record")), httpx.Response(204)], 1),
        ([httpx.Response(204), run_in("settled")], 0),
        ([httpx.Response(204), run_in("cancelled")], 1),
        ([problem(404, "not_found")], 1),
        ([problem(403, "not_allowed")], 1),
        ([problem(503, "too_many_watchers")], 3),
        ([httpx.ConnectError("refused")], 3),
        ([stream("data: not json\n\n")], 3),
        ([stream("data: [1]\n\n")], 3),
        ([httpx.Response(400, text="<html>")], 3),
    ],
)
def test_it_ends_as_the_run_did_or_says_why_not(
    answers: Any, monkeypatch: pytest.MonkeyPatch, given: list[Any], code: int
) -> None:
    monkeypatch.setattr(calls, "MAX_RECONNECTS", 2)
    answers(*given)
    result = run("watch", RUN, "--server", SERVER)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output


def test_a_run_is_cancelled(answers: Any) -> None:
    answers(run_in("running"))
    result = run("cancel", RUN, "--reason", "no", "--server", SERVER)
    assert (result.exit_code, result.stdout.split(",")[0]) == (0, "running")
    assert run("cancel", "../certificates", "--server", SERVER).exit_code == 2


@pytest.fixture
def signed(tmp_path: Path) -> Callable[..., list[str]]:
    """The words that verify a provenance that a worker signed."""
    key = SigningKey.generate("worker")
    (tmp_path / "weights.pt").write_bytes(b"weights")
    line, head = encode_line(FINAL, START)
    (tmp_path / "record.jsonl").write_bytes(line)
    (tmp_path / "worker.json").write_text(json.dumps(key.public.as_record()))
    (tmp_path / "other.json").write_text(json.dumps(SigningKey.generate().public.as_record()))

    def make(*findings: ConformanceFinding) -> list[str]:
        names = dict.fromkeys(("certificate_id", "plan_digest"), "sha256:" + "0" * 64)
        job = {"run": RUN, "fence": 1, "data": "digits", "model": "mlp"}
        counts = ("steps_certified", "steps_charged", "steps_released", "steps_to_charge")
        result = Conformance(
            run=None,
            **names,
            head=head,
            findings=findings,
            **dict.fromkeys(counts, 4),
        )
        weights = hashlib.sha256(b"weights").hexdigest()
        provided = {"worker": "w", "weights": weights, "header": {}, "began": datetime.now(UTC)}
        (tmp_path / "provenance.json").write_text(
            json.dumps(sign_provenance(key, result, **job, **provided))
        )
        keys = ["--keys", str(tmp_path / "worker.json")]
        return ["verify", str(tmp_path / "provenance.json"), *keys]

    return make


def test_what_a_worker_signed_is_verified_offline(signed: Any, tmp_path: Path) -> None:
    words = signed()
    about = [f"--weights={tmp_path / 'weights.pt'}", f"--record={tmp_path / 'record.jsonl'}"]
    result = run(*words, *about, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["run"], told["conformant"], told["steps_to_charge"]) == (RUN, True, 4)
    assert told["checked"] == "signature, weights, record"
    assert json.loads(run(*words, "--json").stdout)["checked"] == "signature"


def test_one_of_a_run_that_does_not_conform_is_told_of_and_blocks(signed: Any) -> None:
    result = run(*signed(ConformanceFinding(code="wrong_noise", line=3, message="less")))
    assert result.exit_code == 1
    assert "findings: wrong_noise" in result.stdout


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda at: (at / "weights.pt").write_bytes(b"others"), 1),
        (lambda at: (at / "weights.pt").unlink(), 2),
        (lambda at: (at / "record.jsonl").write_bytes(b""), 1),
        (lambda at: (at / "record.jsonl").write_bytes(b"{}\n"), 1),
        (lambda at: (at / "provenance.json").write_bytes(b"{}"), 1),
        (lambda at: (at / "provenance.json").write_bytes(b"\xff"), 1),
        (lambda at: (at / "provenance.json").write_bytes(b"[" * 100_000), 1),
        (lambda at: (at / "provenance.json").unlink(), 2),
        (lambda at: (at / "worker.json").write_bytes((at / "other.json").read_bytes()), 1),
        (lambda at: (at / "worker.json").write_bytes(b"{}"), 2),
    ],
    ids=range(10),
)
def test_whatever_is_not_as_it_was_signed_blocks(
    signed: Any, tmp_path: Path, spoil: Callable[[Path], None], code: int
) -> None:
    words = signed()
    about = [f"--weights={tmp_path / 'weights.pt'}", f"--record={tmp_path / 'record.jsonl'}"]
    spoil(tmp_path)
    result = run(*words, *about)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert not result.stdout
