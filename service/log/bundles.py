"""A bundle with its place in the log, added to the bytes that were stored."""

from __future__ import annotations

from affidavit.plan import canonical_json
from affidavit.service.log.proofs import LogReader
from affidavit.service.log.stored_tree import LogDamaged


def with_place(log: LogReader, bundle: bytes) -> bytes:
    """``bundle`` with its ``log`` part, which stands last, as canonical JSON has it.

    Without one while the certificate waits for its place, or where the log is damaged:
    then verifiers who require the log reject the bundle, and ``/readyz`` says why.
    """
    try:
        place = log.place_of(bundle)
    except LogDamaged:
        place = None
    if place is None:
        return bundle
    return bundle[:-1] + b',"log":' + canonical_json(place.as_document()) + b"}"
