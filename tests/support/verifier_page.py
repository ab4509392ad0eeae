"""The verifier page in Chromium, to which tests give files and from which they take outcomes."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from affidavit.evidence import verifier_page
from affidavit.plan import canonical_json
from affidavit.trust import Roots, SigningKey, TrustedKeys, draft_keyset, format_instant
from affidavit.trust.keyset import Revocation

VERIFY = """async ([parts, cases]) => {
  const bytes = (text) => Uint8Array.fromBase64(text);
  const known = parts.map(bytes);
  const whole = async (pieces) => {
    const found = pieces.map((item) => (typeof item === "number" ? known[item] : bytes(item)));
    return new Uint8Array(await new Blob(found).arrayBuffer());
  };
  const results = [];
  for (const item of cases) {
    const trust = item.trust.map(({ name, content }) => ({ name, bytes: bytes(content) }));
    results.push(await verifyFiles({ ...item, subject: await whole(item.subject), trust }));
  }
  return results;
}"""
BATCH_BYTES = 40_000_000
ROOT = SigningKey.generate("root")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A bundle or an evidence file, the files to trust, and the time."""

    subject: bytes
    trust: dict[str, bytes]
    now: datetime

    def as_json(self, parts: Sequence[bytes] = ()) -> dict[str, Any]:
        """The case, with the numbers of the ``parts`` of its subject in their places."""
        files = [{"name": name, "content": _text(raw)} for name, raw in self.trust.items()]
        pieces: list[str | int] = []
        start = 0
        for number, part in enumerate(parts):
            if (at := self.subject.find(part, start)) >= 0:
                pieces += [_text(self.subject[start:at]), number]
                start = at + len(part)
        pieces.append(_text(self.subject[start:]))
        return {"subject": pieces, "trust": files, "now": format_instant(self.now)}


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


@dataclass
class VerifierPage:
    """The page as one opens it; ``wrong`` is whatever it did that no page may."""

    page: Any
    wrong: list[str] = field(default_factory=list)

    def results(
        self, cases: Sequence[Case], parts: Sequence[bytes] = ()
    ) -> Iterator[dict[str, Any]]:
        """What the page finds; ``parts`` of the subjects, in their order, are sent only once."""
        known = [_text(part) for part in parts]
        batch: list[Case] = []
        size = 0
        for case in cases:
            batch.append(case)
            size += len(case.subject)
            if size > BATCH_BYTES:
                yield from self._verify(batch, parts, known)
                batch, size = [], 0
        yield from self._verify(batch, parts, known)

    def _verify(self, batch: Sequence[Case], parts: Sequence[bytes], known: Sequence[str]) -> Any:
        return self.page.evaluate(VERIFY, [known, [item.as_json(parts) for item in batch]])

    def outcomes(self, cases: Sequence[Case]) -> list[tuple[int, str]]:
        """The step that rejects, and its code; 0 if none does."""
        return [outcome_of(result) for result in self.results(cases)]


UNUSABLE = (-1, "unusable")
"""What to trust cannot be read, so that nothing is verified."""


def outcome_of(result: dict[str, Any]) -> tuple[int, str]:
    if result["outcome"] == "rejected":
        return result["error"]["step"], result["error"]["code"]
    if result["outcome"] == "unusable":
        assert not result["error"]["message"].startswith("This page failed"), result
        return UNUSABLE
    return 0, "held"


@contextmanager
def opened(chromium: Any, folder: Path) -> Iterator[VerifierPage]:
    """Open the page from a file, without a server."""
    path = folder / "verify.html"
    path.write_bytes(verifier_page())
    with chromium.new_context(offline=True) as context:
        result = VerifierPage(context.new_page())
        result.page.on("console", lambda message: result.wrong.append(message.text))
        result.page.on("pageerror", lambda error: result.wrong.append(str(error)))
        result.page.on("dialog", lambda dialog: result.wrong.append(dialog.message))
        result.page.on("request", lambda request: result.wrong.append(request.url))
        result.page.goto(path.as_uri())
        result.wrong.remove(path.as_uri())
        yield result
        assert not result.wrong


def trust_files(trusted: TrustedKeys) -> dict[str, bytes]:
    """The files that make a reader trust the same: records, or a keyset if a key is revoked."""
    policy = trusted.policy
    if all(key.revoked_from is None for key in trusted.keys):
        records = [key.as_record() for key in trusted.keys]
        files = {"keys.json": json.dumps(records).encode()}
    else:
        files = keyset_files(trusted)
    if policy is not None:
        files["trust.json"] = canonical_json(policy.model_dump(mode="json"))
    return files


def keyset_files(trusted: TrustedKeys) -> dict[str, bytes]:
    roots = Roots.of([ROOT.public], threshold=1)
    revoked = [
        Revocation(key_id=key.key_id, since=format_instant(key.revoked_from))
        for key in trusted.keys
        if key.revoked_from is not None
    ]
    keyset = draft_keyset(
        None,
        roots=roots,
        keys=trusted.keys,
        revoked=revoked,
        issued_at=trusted.now().replace(year=2000, month=1, day=1),
        expires_at=trusted.now().replace(year=9000, month=1, day=1),
    ).signed_by(ROOT)
    return {
        "keyset.json": keyset.as_bytes(),
        "roots.json": canonical_json(roots.model_dump(mode="json")),
    }


# ---- Altered files ----------------------------------------------------------------------

BYTES = b'"{}[]0,:\\.e-nul \x00\x7f\x80\xc3\xed\xef\xff\n\r'
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 1.0, 0.5, -0.0, 2**53 - 1, 2**53, 10**30, 1e22, 5e-324, 1e-310),
    *(
        float("nan"),
        float("inf"),
        "",
        "a",
        "0",
        "NaN",
        "1e400",
        " 1 ",
        "1_0",
        "\u0661",
        "\x1f1",
        "\ufeff1",
        "\ud800",
        "é",
        "\u202e",
    ),
    *([], [[]], [1], {}, {"a": 1}, {"__proto__": {"verdict": "certified"}}, "2026-02-30T00:00:00Z"),
    *(
        "sha256:" + "0" * 64,
        "9999-12-31T23:59:59Z",
        "2026-1-2T3:4:5Z",
        "AAAA",
        "AB==",
        "<img src=x>",
    ),
)


def altered_bytes(raw: bytes, chance: random.Random) -> bytes:
    """Flip, replace, insert, remove or repeat some bytes."""
    result = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 9))):
        at = chance.randrange(len(result)) if result else 0
        match chance.randrange(6):
            case 0:
                result[at] ^= 1 << chance.randrange(8)
            case 1:
                result[at] = chance.choice(BYTES)
            case 2:
                result.insert(at, chance.choice(BYTES))
            case 3:
                del result[at : at + chance.choice((1, 1, 5, 1000))]
            case 4:
                result[at:at] = result[at : at + chance.randrange(60)]
            case _:
                result += chance.choice((b" ", b"\n", b"}", b"\xef\xbb\xbf"))
        if not result:
            break
    return bytes(result)


def altered_json(document: Any, chance: random.Random) -> bytes:
    """Replace, remove, add or repeat some field, also with what is no JSON in the strict sense."""
    changed = copy.deepcopy(document)
    parents = list(_containers(changed))
    parent = chance.choice(parents)
    names = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
    value = chance.choice(VALUES) if chance.random() < 0.9 else _deep(chance.choice((20, 40)))
    twice = ""
    kind = chance.randrange(8)
    if kind < 5 and names:
        parent[chance.choice(names)] = value
    elif kind == 5 and names:
        del parent[chance.choice(names)]
    elif isinstance(parent, dict):
        name = chance.choice(("__proto__", "constructor", "extra", "toString", *map(str, names)))
        twice = f"{json.dumps(name)}:{json.dumps(value)}"
        if kind == 6:
            parent[name], twice = value, ""
    else:
        parent.append(value)
    marker = "\u2603"
    if twice:
        parent[marker] = marker
    text = json.dumps(changed)
    if twice:
        written = f"{json.dumps(marker)}: {json.dumps(marker)}"
        text = text.replace(written, twice)
    return text.encode()


def _deep(levels: int) -> Any:
    result: Any = []
    for _ in range(levels):
        result = [result]
    return result


def _containers(node: Any) -> Iterator[Any]:
    if isinstance(node, dict | list):
        yield node
        for item in node.values() if isinstance(node, dict) else node:
            yield from _containers(item)
