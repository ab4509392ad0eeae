"""Code: which release of the trainer ran, by version and by the digest of its sources.

>>> sorted(code_reference())
['digest', 'version']
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import affidavit

ROOMS = ("plan", "mechanisms", "certificate", "trainer")
"""What a run executes of this project."""


def code_reference() -> dict[str, str]:
    """Version and digest over path and content of every source file of ``ROOMS``."""
    root = Path(affidavit.__file__).parent
    result = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            result.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return {"version": affidavit.__version__, "digest": "sha256:" + result.hexdigest()}
