"""Sixteen bodies made to break a reader, each as JSON and as YAML, over a real socket.

Each gets a 4xx problem with a pointer or a position within seconds, none a 500, and the
service answers a good plan afterwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from affidavit.trust import KeyStore
from tests.support.polling import TIMEOUT_SECONDS
from tests.support.processor_time import best_of_three

SECONDS = 10.0
YAML, JSON = "application/yaml", "application/json"

_GOOD = """{"version": 1, "dataset": {"size": 1000}, "adjacency": "add_remove",
 "sampling": {"scheme": "full_batch"}, "steps": STEPS,
 "releases": [{"name": "all", "clip_norm": CLIP, "noise_multiplier": 20}],
 "target": {"epsilon": 8, "delta": 1.0e-5}EXTRA}"""


def _body(steps: str = "10", clip: str = "1", extra: str = "") -> bytes:
    text = _GOOD.replace("STEPS", steps).replace("CLIP", clip).replace("EXTRA", extra)
    return text.encode("utf-8", "surrogatepass")


_BOTH: dict[str, bytes] = {
    "subnormal": _body(clip="4.9e-324"),
    "1e400": _body(clip="1e400"),
    "negative zero": _body(clip="-0.0"),
    "true for 1": _body(steps="true"),
    "text for a number": _body(steps='"3"'),
    "duplicate keys": _body(extra=', "steps": 11'),
    "integer of 300 digits": _body(steps="9" * 300),
    "unknown field": _body(extra=', "stepz": 10'),
    "10^5 brackets": b"[" * 100_000,
    "60 000 brackets": b"[" * 60_000,
    "empty": b"",
    "10 MB": b" " * 10_000_000,
}
HOSTILE: dict[str, tuple[str, bytes]] = {
    **{f"{name} (JSON)": (JSON, body) for name, body in _BOTH.items()},
    **{f"{name} (YAML)": (YAML, body) for name, body in _BOTH.items()},
    "NaN (JSON)": (JSON, _body(clip="NaN")),
    "NaN (YAML)": (YAML, _body(clip=".nan")),
    "Infinity (JSON)": (JSON, _body(clip="Infinity")),
    "Infinity (YAML)": (YAML, _body(clip="-.inf")),
    "lone surrogate (JSON)": (JSON, _body(extra=', "notes": "\\ud800"')),
    "lone surrogate (YAML)": (YAML, _body(extra=', "notes": "\\ud800"')),
    "lone surrogate in bytes (JSON)": (JSON, _body(extra=', "notes": "\ud800"')),
    "lone surrogate in bytes (YAML)": (YAML, _body(extra=', "notes": "\ud800"')),
    "YAML bomb": (
        YAML,
        b"a: &a [x, x, x, x, x, x, x, x, x]\n"
        + b"".join(
            f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n".encode()
            for before, name in zip("abcdefgh", "bcdefghi", strict=True)
        ),
    ),
    "YAML bomb as JSON": (JSON, b"a: &a [x]\nb: *a\n"),
    "YAML tag": (YAML, b"version: !!python/object/apply:os.system [id]\n"),
    "YAML tag as JSON": (JSON, b'{"version": !!int "1"}'),
    "many unknown fields": (
        JSON,
        json.dumps({f"field{number}": 1 for number in range(50_000)}).encode(),
    ),
    "many errors": (JSON, _body(extra=', "extra": [' + ", ".join(["[]"] * 200_000) + "]")),
}


@pytest.fixture(scope="module")
def running(
    migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory, serving: Any
) -> Iterator[httpx.Client]:
    """A client of one server process for all bodies: it must survive each of them."""
    home = tmp_path_factory.mktemp("hostile")
    (home / "affidavit.db").write_bytes(migrated_sqlite.read_bytes())
    KeyStore(home / "keys").new("test")
    with (
        serving(home, forked=True) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS) as client,
    ):
        assert client.post(
            "/v1/certificates", content=_body(), headers={"content-type": JSON}
        ).status_code in (200, 201)
        yield client


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_quickly_and_the_next_request_answered(
    running: httpx.Client, post: Callable[..., Any], name: str
) -> None:
    syntax, body = HOSTILE[name]
    answer, took = best_of_three(lambda: post(running, body, syntax), SECONDS, time.monotonic)

    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert "Traceback" not in answer.text
    reasons = answer.json()["reasons"]
    assert all(reason["code"] and reason["remedy"] for reason in reasons)
    assert answer.status_code == 413 or any(map(_says_where, reasons)), answer.text
    assert took < SECONDS, f"{took:.2f} s"
    assert post(running, _body()).status_code == 200


def _says_where(reason: dict[str, Any]) -> bool:
    """A pointer or a line; a body that is empty, or no text at all, has neither."""
    return bool(
        reason["pointer"]
        or "line" in reason
        or reason["code"] == "empty"
        or "at byte" in reason["message"]
    )


def test_the_good_plan_is_good_in_both_syntaxes(
    running: httpx.Client, post: Callable[..., Any]
) -> None:
    assert post(running, _body(), JSON).status_code == 200
    assert post(running, _body(), YAML).status_code == 200
