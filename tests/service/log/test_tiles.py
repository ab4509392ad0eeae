"""The log as tiles: the bytes that Go's own packages make of the same log, and for whom."""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Engine, insert

from affidavit.service.core.database import writer
from affidavit.service.core.errors import NotLogged, SettingsError
from affidavit.service.log.reader import tile_entries, tile_hashes
from affidavit.service.settings import Settings
from affidavit.service.tables.log import log_entries, log_pending
from affidavit.trust.log import (
    NoteKey,
    merkle_tree,
    open_note,
    read_checkpoint,
)
from affidavit.trust.log.note import sign_note
from tests.service.log.conftest import Log

ROOT = Path(__file__).parents[2]
GO: dict[str, Any] = json.loads((ROOT / "vectors" / "tlog" / "go.json").read_text())
ENTRIES = [f"entry {number}" for number in range(GO["size"])]


@pytest.fixture
def logged(log: Log) -> Engine:
    """A log with the entries of Go's."""
    row = {"kind": "test", "subject": "test", "at": datetime.now(UTC)}
    with writer(log.engine).begin() as connection:
        ids = connection.execute(
            insert(log_entries).returning(log_entries.c.id, sort_by_parameter_order=True),
            [{**row, "content": entry} for entry in ENTRIES],
        ).scalars()
        connection.execute(insert(log_pending), [{"entry_id": item} for item in ids])
    log.sequence()
    return log.engine


def test_tiles_are_the_bytes_that_go_makes(log: Log, logged: Engine) -> None:
    assert log.sequence().checkpoint.root_hash == b64decode(GO["root"])
    assert len(GO["tiles"]) > 5
    for path, digest in GO["tiles"].items():
        level, _, number = path.partition("/")
        content = tile_hashes(logged, int(level), *merkle_tree.parse_tile_number(number))
        assert hashlib.sha256(content).hexdigest() == digest, path
    for number, width in ((0, 256), (2, 188), (2, 1)):
        content = tile_entries(logged, number, width)
        start = 256 * number
        assert [item.decode() for item in merkle_tree.decode_entries(content)] == ENTRIES[
            start : start + width
        ]
    for size in (1, 2, 255, 256, 257, 300, 512, 700):
        hashes = merkle_tree.frontier_hashes(
            size, lambda *tile: merkle_tree.decode_hashes(tile_hashes(logged, *tile))
        )
        expected = merkle_tree.Frontier()
        for entry in ENTRIES[:size]:
            expected.append(merkle_tree.leaf_hash(entry.encode()))
        assert merkle_tree.Frontier(size, hashes).root() == expected.root()
    assert expected.root() == b64decode(GO["root"])
    for level, number, width in ((0, 2, 189), (0, 3, 1), (1, 0, 3), (2, 0, 1)):
        with pytest.raises(NotLogged):
            tile_hashes(logged, level, number, width)


def test_proofs_and_notes_of_go_are_ours() -> None:
    root, old = b64decode(GO["root"]), b64decode(GO["smaller_root"])
    merkle_tree.verify_inclusion(
        merkle_tree.leaf_hash(ENTRIES[GO["index"]].encode()),
        index=GO["index"],
        size=GO["size"],
        proof=[b64decode(item) for item in GO["inclusion"]],
        root=root,
    )
    merkle_tree.verify_consistency(
        first=GO["smaller"],
        second=GO["size"],
        first_root=old,
        second_root=root,
        proof=[b64decode(item) for item in GO["consistency"]],
    )
    key = NoteKey.parse(GO["verifier_key"])
    text, signers = open_note(GO["checkpoint"], [key])
    assert signers == [key]
    assert read_checkpoint(GO["checkpoint"]).root_hash == root
    private = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(GO["seed"]))
    assert str(sign_note(text, key, private.sign)) == GO["checkpoint"]


def test_paths_are_those_of_go() -> None:
    for path, number in GO["paths"].items():
        assert merkle_tree.tile_path(3, number, 17) == f"tile/{path}"
        assert merkle_tree.parse_tile_number(path.partition("/")[2]) == (number, 17)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "00",
        "0000",
        "x000/000",
        "001/000",
        "x01/000",
        "000.p/0",
        "000.p/256",
        "000.p/01",
        "000.p",
        "-01",
        "٠٠٠",
        "x001/000/",
        "../000",
        "000.p/1/",
    ],
)
def test_what_is_no_path_of_a_tile_is_refused(text: str) -> None:
    with pytest.raises(merkle_tree.BadTile):
        merkle_tree.parse_tile_number(text)


def test_entries_that_do_not_fit_are_refused() -> None:
    longest = b"x" * 65535
    assert merkle_tree.decode_entries(merkle_tree.encode_entries([b"", longest])) == [b"", longest]
    with pytest.raises(merkle_tree.BadTile, match="65535"):
        merkle_tree.encode_entries([longest + b"x"])
    for cut in (1, 3, 65538):
        with pytest.raises(merkle_tree.BadTile):
            merkle_tree.decode_entries(merkle_tree.encode_entries([b"", longest])[:cut])


def test_over_http_hashes_are_for_all_and_entries_for_whom_the_operator_says(
    database_url: str, tmp_path: Path, client_of: Any
) -> None:
    settings = {"database_url": database_url, "key_directory": tmp_path / "keys", "workers": 1}
    with client_of(Settings(**settings)) as client:
        assert client.get("/v1/tlog/checkpoint").status_code == 404
        log = Log(database_url, client.app.state.services.engine)
        log.grow(3)
        note = client.get("/v1/tlog/checkpoint")
        assert read_checkpoint(note.content).size >= 3
        tile = client.get("/v1/tlog/tile/0/000.p/3")
        assert (tile.status_code, len(tile.content)) == (200, 96)
        assert "immutable" in tile.headers["cache-control"]
        for missing in ("0/000.p/4", "1/000", "0/abc", "6/x999/999"):
            assert client.get(f"/v1/tlog/tile/{missing}").status_code == 404
        assert client.get("/v1/tlog/tile/7/000").status_code in (404, 422)
        assert client.get("/v1/tlog/tile/entries/000.p/3").status_code in (401, 403)
    with client_of(Settings(**settings, public_log_entries=True)) as client:
        entries = merkle_tree.decode_entries(client.get("/v1/tlog/tile/entries/000.p/3").content)
        leaves = merkle_tree.decode_hashes(client.get("/v1/tlog/tile/0/000.p/3").content)
        assert [merkle_tree.leaf_hash(entry) for entry in entries] == leaves
    with pytest.raises(SettingsError, match="AFFIDAVIT_LOG_ENTRIES"):
        Settings.from_environment({"AFFIDAVIT_LOG_ENTRIES": "yes"})
