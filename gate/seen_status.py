"""The newest status list seen of each service: the verifier's memory of what was revoked.

A list from before a revocation is well signed and, for an hour, not stale; only somebody
who remembers a later one finds it out. The file is ``status-lists.json`` under
``$AFFIDAVIT_HOME``; several processes may use it at once.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.markup import escape

from affidavit.certificate import (
    PublicKey,
    VerificationError,
    VerificationOptions,
    current_status,
    home,
    write_atomically,
)
from affidavit.gate.console import err
from affidavit.gate.seen import BadStore

VERSION = 1
Seen = dict[str, tuple[int, str]]


class SeenStatusLists:
    """Number and digest of the newest list, by its issuer."""

    def __init__(self) -> None:
        self.path = home() / "status-lists.json"

    def known(self) -> Seen:
        """All of them; raises ``BadStore``."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            if document["version"] != VERSION:
                raise ValueError("it is of another version")
            return {
                str(issuer): (int(each["sequence"]), str(each["digest"]))
                for issuer, each in document["lists"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadStore(
                f"{self.path} cannot be read ({error}). It is the memory by which an old status "
                "list is found out: restore it, or move it away to begin anew."
            ) from None

    def keep(self, issuer: str, sequence: int, digest: str) -> None:
        """Remember a list unless a newer one of its issuer is known; raises ``OSError``."""
        with self._alone():
            known = self.known()
            if sequence <= known.get(issuer, (0, ""))[0]:
                return
            lists = {
                name: {"sequence": number, "digest": of}
                for name, (number, of) in {**known, issuer: (sequence, digest)}.items()
            }
            document = {"version": VERSION, "lists": lists}
            write_atomically(self.path, (json.dumps(document, indent=1) + "\n").encode())

    def remember(self, demands: VerificationOptions, trusted: Sequence[PublicKey]) -> None:
        """Remember a list that counts, whatever it says of the certificate at hand."""
        if demands.status is None:
            return
        now = datetime.now(UTC)
        try:
            found, envelope = current_status(demands.status, trusted, demands.status_seen, now)
        except VerificationError:
            return  # the last step will say so, unless an earlier one has more to say
        try:
            self.keep(found.issuer, found.sequence, envelope.digest)
        except OSError as error:
            err.print(
                f"{escape(str(self.path))} cannot be written ({error.strerror}): an older "
                "status list will not be found out.",
                highlight=False,
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.path.with_name(self.path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
