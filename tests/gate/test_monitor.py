"""``monitor``: exit codes, its memory, and a log that is a folder of files."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from affidavit.trust.log import merkle_tree
from tests.certificate.verification.test_monitoring import TRUSTED, MemoryLog, entry, honest

Answer = Callable[..., tuple[int, dict[str, Any]]]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


@pytest.fixture
def url(place: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(place)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [key.as_record() for key in TRUSTED]}))
    return file


def write(log: MemoryLog, place: Path) -> None:
    """The log's files as they are now; those of before stay as they are."""
    size = len(log.contents)
    (place / "checkpoint").write_text(log.note)
    for number in range(-(-size // 256)):
        width = min(256, size - 256 * number)
        save(
            place / merkle_tree.tile_path(0, number, width), b"".join(log.hashes(0, number, width))
        )
        entries = merkle_tree.encode_entries(log.entries(number, width))
        save(place / merkle_tree.tile_path("entries", number, width), entries)
    if above := size // 256:
        save(place / merkle_tree.tile_path(1, 0, above), b"".join(log.hashes(1, 0, above)))


def save(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(content)


def test_a_log_is_followed_from_round_to_round(
    url: str, place: Path, keys: Path, tmp_path: Path, answer: Answer
) -> None:
    command = ("monitor", url, "--keys", str(keys), "--json")
    log = honest(300)
    write(log, place)
    code, report = answer(*command)
    assert (code, report["ok"], report["entries"]) == (0, True, 300)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(log.note)
    log.grow(*(entry(number) for number in range(300)))
    write(log, place)
    # Only the full tile is there any more.
    (place / merkle_tree.tile_path(0, 1, 44)).unlink()
    code, report = answer(*command, "--checkpoint", str(elsewhere))
    assert (code, report["entries"], report["size"]) == (0, 300, 600)
    other = MemoryLog().grow(*(entry(-number) for number in range(700)))
    (place / "checkpoint").write_text(other.note)
    for _ in range(2):  # it does not get used to it
        code, report = answer(*command)
        assert (code, report["ok"]) == (1, False)


def test_a_log_that_cannot_be_read_is_undecided(url: str, keys: Path, run: Any) -> None:
    assert run("monitor", "http://127.0.0.1:1", "--keys", str(keys)).exit_code == 3
    assert run("monitor", "http://..", "--keys", str(keys)).exit_code == 3
    for no_url in ("ftp://x", "http://[", "http://x:99999"):
        assert run("monitor", no_url, "--keys", str(keys)).exit_code == 2
    assert run("monitor", url, "--keys", "none.json").exit_code == 2
