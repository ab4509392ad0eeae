"""The model card of Hugging Face: what a claim adds to ``README.md``.

The card's metadata (the YAML before the text) gets the tag ``differential-privacy`` and one field,
``differential_privacy``; its text gets one section between two comments. A card that has them
already gets new ones, and everything else of it stays. Decimals are strings, so that no reader
rounds them.

Reference: Hugging Face Hub, "Model Cards", metadata.
"""

from __future__ import annotations

import io
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from affidavit.certificate.evidence.claim import CHECKED, FOLDER
from affidavit.certificate.evidence.exports import Claimed
from affidavit.certificate.evidence.manifest import BadModel

CARD_FILE = "README.md"
FIELD = "differential_privacy"
TAG = "differential-privacy"
BEGIN, END = "<!-- differential privacy: begin -->", "<!-- differential privacy: end -->"
_METADATA = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END) + r"\n?", re.DOTALL)


def has_section(card: bytes) -> bool:
    """Whether ``card`` has a section of ours."""
    return BEGIN.encode() in card


def with_claim(card: bytes, of: Claimed) -> bytes:
    """``card``, which may be empty, with metadata and section of the claim.

    Raises ``BadModel`` for a card that is not UTF-8, or whose metadata are no mapping.
    """
    try:
        text = card.decode("utf-8")
        parts = _METADATA.match(text)
        metadata = _mapping("" if parts is None else parts[1])
        tags = metadata.get("tags")
        tags = [] if tags is None else tags
        if not isinstance(tags, list):
            raise ValueError("tags is no list")
    except (ValueError, YAMLError) as error:
        reason = str(error).split("\n", 1)[0]
        raise BadModel(
            "bad_card",
            f"{CARD_FILE}: its metadata cannot be read: {reason}.",
            "Correct the YAML between the two lines ---, in UTF-8.",
        ) from None
    if TAG not in tags:
        tags.append(TAG)
    metadata["tags"] = tags
    metadata[FIELD] = of.properties()
    written = io.StringIO()
    _yaml().dump(metadata, written)
    body = text if parts is None else text[parts.end() :]
    section = _section(of)
    if _SECTION.search(body):
        body = _SECTION.sub(lambda _: section, body, count=1)
    else:
        body = f"{body.rstrip()}\n\n{section}".lstrip("\n")
    return f"---\n{written.getvalue()}---\n{body}".encode()


def _section(of: Claimed) -> str:
    claim = of.claim
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in of.properties().items()]
    lines = [
        BEGIN,
        "## Differential privacy",
        "",
        of.guarantee,
        "",
        "| | |",
        "|---|---|",
        *rows,
        "",
        "Verification checks:",
        "",
        *(f"- {CHECKED[code]}" for code in claim["checked"]),
        "",
        "The signer declares:",
        "",
        *(f"- {sentence}" for sentence in of.declared),
        "",
        f"The claim is in `{FOLDER}/`; `affidavit verify-model` checks it offline.",
        END,
    ]
    return "\n".join(lines) + "\n"


def _mapping(text: str) -> Any:
    loaded = _yaml().load(text)
    if loaded is None:
        return CommentedMap()
    if not isinstance(loaded, dict):
        raise ValueError("it is no mapping")
    return loaded


def _yaml() -> YAML:
    """A reader and writer that leaves comments, order and quotes as they are."""
    result = YAML()
    result.width = 4096
    result.preserve_quotes = True
    return result
