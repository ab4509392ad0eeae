"""What a release said of a set of plans, kept for ever: its plans, bundles and keys.

    python -m tests.release.corpus 0.2.0

freezes the plans of ``tests/release/0.2.0/plans`` under the release that runs: each is
certified and signed with a key that is thrown away afterwards, and ``bundles.jsonl`` and
``keys.json`` are written beside them. Nothing in such a folder is ever changed; what a later
release must still say of it is in ``test_kept_answers.py`` and ``docs/reference/versioning.md``.
"""

from __future__ import annotations

import base64
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from affidavit import __version__
from affidavit.assessment import certify
from affidavit.certificate import issue
from affidavit.plan import Plan, parse_plan
from affidavit.trust import (
    PublicKey,
    SigningKey,
    read_public_keys,
)

HERE = Path(__file__).parent
RELEASES = sorted(path.parent.name for path in HERE.glob("*/keys.json"))


def plan_named(release: str, name: str) -> Plan:
    """One frozen plan, read anew from its text."""
    return parse_plan((HERE / release / "plans" / f"{name}.yaml").read_bytes(), "yaml")


def bundles(release: str) -> dict[str, bytes]:
    """The frozen bundles by the names of their plans, each exactly as it was signed."""
    lines = (HERE / release / "bundles.jsonl").read_bytes().splitlines()
    return {line.partition(b"\t")[0].decode(): line.partition(b"\t")[2] for line in lines}


def keys(release: str) -> tuple[PublicKey, ...]:
    """The public keys that the frozen bundles were signed with."""
    return read_public_keys(HERE / release / "keys.json")


def statement_in(bundle: bytes) -> dict[str, Any]:
    """The statement that a bundle carries, its signature not checked."""
    payload = json.loads(bundle)["envelope"]["payload"]
    result: dict[str, Any] = json.loads(base64.b64decode(payload))
    return result


def freeze(release: str) -> None:
    """Certify and sign the plans of ``release``, which must not be frozen yet."""
    if release != __version__:
        raise SystemExit(f"this is release {__version__}, not {release}")
    where = HERE / release
    if (where / "keys.json").exists():
        raise SystemExit(f"{release} is frozen; a release keeps its answers")
    key, now = SigningKey.generate("corpus"), datetime.now(UTC).replace(microsecond=0)
    lines = []
    for path in sorted((where / "plans").glob("*.yaml")):
        certificate = issue(
            certify(plan_named(release, path.stem)), key, requester="corpus", issued_at=now
        )
        lines.append(path.stem.encode() + b"\t" + certificate.bundle)
    (where / "bundles.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    record = json.dumps({"keys": [key.public.as_record()]}, indent=1)
    (where / "keys.json").write_text(record + "\n")


if __name__ == "__main__":
    freeze(sys.argv[1])
