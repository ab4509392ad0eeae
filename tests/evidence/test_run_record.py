"""Each fault of a line of a run record has its own code."""

from __future__ import annotations

import json

import pytest

from affidavit.evidence import (
    START,
    BrokenLine,
    decode_line,
    encode_line,
)
from affidavit.evidence.run_record import ENTRIES
from affidavit.plan import canonical_json

ENTRY = {"type": "checkpoint"} | dict.fromkeys(ENTRIES["checkpoint"], 1)


def test_a_line_is_read_back_and_the_next_follows_it() -> None:
    line, digest = encode_line(ENTRY, START)
    assert decode_line(line, START) == ENTRY | {"previous": START, "digest": digest}
    after, _ = encode_line(ENTRY, digest)
    assert decode_line(after, digest)["previous"] == digest


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{\n", "not_json"),
        (b"[]\n", "not_an_entry"),
        (b'{"type":1}\n', "not_an_entry"),
        (json.dumps(json.loads(encode_line(ENTRY, START)[0])).encode() + b"\n", "not_canonical"),
        (encode_line(ENTRY, START)[0].replace(b'"step":1', b'"step":2'), "wrong_digest"),
        (canonical_json(ENTRY | {"previous": START}) + b"\n", "wrong_digest"),
        (encode_line(ENTRY, "sha256:1")[0], "broken_chain"),
        (encode_line(ENTRY | {"more": 1}, START)[0], "unknown_fields"),
        (encode_line({"type": "else"}, START)[0], "unknown_fields"),
    ],
)
def test_each_code_has_a_line_that_only_it_refuses(line: bytes, code: str) -> None:
    with pytest.raises(BrokenLine) as refusal:
        decode_line(line, START)
    assert refusal.value.code == code
