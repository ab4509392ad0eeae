"""A checkpoint that somebody kept finds out a log that was rewritten, and no other."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from affidavit.trust import KeyStore, SigningKey
from affidavit.trust.log import read_checkpoint, sign_checkpoint
from tests.service.runs.conftest import Yard
from tests.support.page_views import page_views
from tests.support.polling import TIMEOUT_SECONDS


def _newest(yard: Yard, more_than: int = 0) -> str:
    """The newest checkpoint, as the page gives it to be kept."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        answer = yard.ask("GET", "/audit/checkpoint", "audit")
        if answer.status_code == 200 and read_checkpoint(answer.text).size > more_than:
            return str(answer.text)
        time.sleep(0.05)
    raise AssertionError("nothing was signed in time")


def _held(yard: Yard, kept: str, status: int = 200) -> Any:
    with page_views() as views:
        answer = yard.client.get(
            "/audit",
            params={"saved_checkpoint": kept},
            headers={"authorization": f"Bearer {yard.tokens['audit']}"},
        )
    assert answer.status_code == status, answer.text
    (view,) = views
    return view


def _other(text: str) -> bytes:
    return bytes(byte ^ 1 for byte in read_checkpoint(text).root_hash)


def test_a_saved_checkpoint_detects_a_rewritten_log(yard: Yard, tmp_path: Path) -> None:
    stored = _newest(yard)
    stated = read_checkpoint(stored)
    yard.certify()
    now = read_checkpoint(_newest(yard, stated.size))
    held = _held(yard, stored)["comparison"]
    assert (held["extended"], held["signed"]) == (True, True)
    assert held["then"] == stated.size
    assert held["now"] >= now.size  # entries of the background may follow
    # As a form sends it, and without the last line end that a text area may lose.
    assert _held(yard, stored.replace("\n", "\r\n").strip())["comparison"]["extended"]

    key = KeyStore(tmp_path / "keys").signing_key()
    assert key is not None
    stranger = SigningKey.generate("stranger")
    at = datetime.now(UTC)

    def of(who: Any, **changes: Any) -> Any:
        provided = {
            "origin": stated.origin,
            "size": stated.size,
            "root_hash": stated.root_hash,
            **changes,
        }
        return _held(yard, sign_checkpoint(who, at=at, **provided))["comparison"]

    # What the service signed once, and what it now says was there, are not the same.
    rewritten = of(key, root_hash=_other(stored))
    assert (rewritten["extended"], rewritten["signed"]) == (False, True)
    assert "have changed since" in rewritten["contradiction"]
    lost = of(key, size=now.size + 100)
    assert (lost["extended"], lost["signed"]) == (False, True)
    assert "entries are missing" in lost["contradiction"]
    # What somebody else signed accuses nobody.
    assert not of(stranger, root_hash=_other(stored))["signed"]
    assert of(stranger)["extended"]
    forged = sign_checkpoint(
        key, origin=stated.origin, size=stated.size, root_hash=_other(stored), at=at
    )
    page = yard.client.get(
        "/audit",
        params={"saved_checkpoint": forged},
        headers={"authorization": f"Bearer {yard.tokens['audit']}", "accept": "text/html"},
    )
    assert "Stop the service, keep a copy" in page.text

    other = sign_checkpoint(key, origin="log.example", size=1, root_hash=stated.root_hash, at=at)
    assert "of another log" in _held(yard, other, 422)["comparison_error"]
    for text in ("no note", "<script>", "a\x00b", "\n\n— x y\n", stored[: len(stored) // 2]):
        assert "ot a checkpoint" in _held(yard, text, 422)["comparison_error"], text


def test_the_entries_of_the_log_are_a_file(yard: Yard) -> None:
    _newest(yard)
    for query, count in (("", 1), ("?kind=refusal", 0), ("?before=0", 0)):
        answer = yard.ask("GET", f"/audit.csv{query}", "audit")
        assert answer.headers["content-type"].startswith("text/csv")
        first, *lines = answer.text.splitlines()
        assert first.startswith("index,kind,subject,")
        assert len(lines) >= count if count else not lines
    assert lines == []
