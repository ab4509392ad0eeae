"""Lines of a run's record: each thing that a line can be wrong by has its own code."""

from __future__ import annotations

import json

import pytest

from affidavit.certificate.run_record import FIELDS, START, BrokenLine, sealed, unsealed
from affidavit.plan import canonical_json

ENTRY = {"type": "checkpoint"} | dict.fromkeys(FIELDS["checkpoint"], 1)


def test_a_line_is_read_back_and_the_next_follows_it() -> None:
    line, digest = sealed(ENTRY, START)
    assert unsealed(line, START) == ENTRY | {"previous": START, "digest": digest}
    after, _ = sealed(ENTRY, digest)
    assert unsealed(after, digest)["previous"] == digest


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{\n", "not_json"),
        (b"[]\n", "not_an_entry"),
        (b'{"type":1}\n', "not_an_entry"),
        (json.dumps(json.loads(sealed(ENTRY, START)[0])).encode() + b"\n", "not_canonical"),
        (sealed(ENTRY, START)[0].replace(b'"step":1', b'"step":2'), "wrong_digest"),
        (canonical_json(ENTRY | {"previous": START}) + b"\n", "wrong_digest"),
        (sealed(ENTRY, "sha256:1")[0], "broken_chain"),
        (sealed(ENTRY | {"more": 1}, START)[0], "unknown_fields"),
        (sealed({"type": "else"}, START)[0], "unknown_fields"),
    ],
)
def test_each_code_has_a_line_that_only_it_refuses(line: bytes, code: str) -> None:
    with pytest.raises(BrokenLine) as refusal:
        unsealed(line, START)
    assert refusal.value.code == code
