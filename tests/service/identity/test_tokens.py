"""Tokens as text: recognisable, checked, random, and nowhere in what is printed of them."""

from __future__ import annotations

import hashlib
import re
import zlib

import pytest

from affidavit.service.identity.tokens import TOKEN_PATTERN, TokenText, generate_token, parse_token

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def number(digits: str) -> int:
    """Base 62, read independently."""
    return sum(ALPHABET.index(item) * 62**place for place, item in enumerate(reversed(digits)))


def test_a_token_is_prefix_id_secret_and_checksum() -> None:
    for _ in range(50):
        created = generate_token()
        result = re.fullmatch(r"affidavit_([0-9a-f]{12})_(\w{43})(\w{6})", created.text)
        assert result is not None
        assert result[1] == created.id
        assert number(result[2]) < 2**256
        assert number(result[3]) == zlib.crc32(created.text[:-6].encode())
        assert created.digest == hashlib.sha256(created.text.encode()).hexdigest()
        assert TOKEN_PATTERN.search(f"a log line with {created.text}, in the middle") is not None


def test_secrets_use_all_their_bits_and_never_repeat() -> None:
    created = [generate_token() for _ in range(400)]
    secrets = [number(item.text[23:-6]) for item in created]
    assert len({entry.text for entry in created}) == len(created)
    for bit in range(256):  # each bit is 0 in 400 draws with probability 2**-400
        assert {secret >> bit & 1 for secret in secrets} == {0, 1}


def test_any_changed_character_is_noticed_without_a_database() -> None:
    text = generate_token().text
    for place, old in enumerate(text):
        for new in ("0", "z", "_", "é", "\n", ""):
            if new != old:
                assert parse_token(text[:place] + new + text[place + 1 :]) is None


@pytest.mark.parametrize("change", [str.upper, lambda text: text + "\n", lambda text: f" {text}"])
def test_only_the_text_itself_is_a_token(change: object) -> None:
    assert callable(change)
    assert parse_token(change(generate_token().text)) is None


def test_no_representation_shows_the_secret() -> None:
    created = generate_token()
    for shown in (repr(created), str(created), f"{created}", repr([created]), repr({"x": created})):
        assert created.text[23:] not in shown
    assert isinstance(parse_token(created.text), TokenText)
