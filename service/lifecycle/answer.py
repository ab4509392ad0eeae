"""What is answered about an issue: the result that was kept, and where the issue stands.

``result`` is kept as the text that was first answered, and its text is not read again for
every answer: what may change later, and what tells one issue from another, is put in at the
end of its ``certificate``, which stands last.

>>> placed('{"verdict": "certified", "certificate": {"id": "x"}}', {"status": "active"})
'{"verdict": "certified", "certificate": {"id": "x", "status": "active"}}'
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from affidavit.service.store import StoredCertificate


def answer_of(certificate: StoredCertificate) -> str:
    """The result document of an issue, with its number, its digest and its status."""
    return placed(
        certificate.result,
        {
            "issue": certificate.issue,
            "envelope_digest": certificate.envelope_digest,
            "status": certificate.status.value,
        },
    )


def placed(result: str, more: Mapping[str, Any]) -> str:
    """``result``, whose last field is ``certificate``, with ``more`` at the end of that.

    Raises ``ValueError`` where another field is last.
    """
    if not result.endswith("}}"):
        raise ValueError("this is not a result that ends with its certificate")
    return f"{result[:-2]}, {json.dumps(dict(more))[1:]}}}"
