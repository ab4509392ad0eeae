"""What an audit found: places where the log and the tables do not say the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference; ``code`` is stable, ``where`` names a table and a row.

    ========================  =========================================================
    ``leaf_missing``          the leaves are not numbered without a gap from 0
    ``leaf_changed``          a leaf's hash is not that of its entry
    ``entry_missing``         a leaf has no entry
    ``entry_changed``         an entry's columns do not say what its hashed bytes say
    ``entry_not_sequenced``   an entry has no leaf and does not wait for one
    ``node_missing``          the hash of a subtree is not stored
    ``node_changed``          a stored hash of a subtree is another, or of no subtree
    ``checkpoint_changed``    a stored checkpoint cannot be read, or its key did not sign it
    ``checkpoint_mismatch``   the leaves do not have the root that a checkpoint signed
    ``checkpoint_missing``    leaves stand beyond the last checkpoint
    ``row_changed``           a row's columns contradict the signed bytes in it
    ``row_without_entry``     the log does not say what a row says
    ``entry_without_row``     the log says what no row says any more
    ``ledger``                a ledger does not hold together; the message says how
    ``rolled_back``           a checkpoint kept elsewhere is of a larger log than this one
    ``rewritten``             a checkpoint kept elsewhere is of another log than this one
    ``other_log``             a checkpoint kept elsewhere is of a log with another name
    ========================  =========================================================
    """

    code: str
    where: str
    message: str

    def as_document(self) -> dict[str, Any]:
        """The finding as JSON data."""
        return asdict(self)
