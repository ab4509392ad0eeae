"""A copy of the embedded database while the service goes on working.

SQLite's own online backup: the copy is one moment's state, whatever is being written
meanwhile. It is checked, and appears under its name only when it is whole; it holds
plans, and is therefore readable by its owner alone. PostgreSQL has ``pg_dump`` for this.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from sqlalchemy.engine import make_url

from affidavit.certificate import synchronise
from affidavit.service.settings import SettingsError

PAGES = 4096
"""Pages copied at once; between the portions writers get their turn."""


class BackupFailed(Exception):
    """The copy could not be made, or is not whole; there is none then."""


def back_up(url: str, target: Path) -> int:
    """Copy the SQLite database at ``url`` to the new file ``target``; its size in bytes.

    Raises ``SettingsError`` for a database of another kind, ``BackupFailed`` and ``OSError``.
    """
    found = make_url(url)
    if found.get_backend_name() != "sqlite":
        raise SettingsError(
            "DATABASE_URL is PostgreSQL's: back it up with pg_dump --format=custom; "
            "see docs/how-to/backup-and-restore.md."
        )
    source = Path(str(found.database))
    if not source.exists():
        raise BackupFailed(f"{source} does not exist; there is nothing to back up.")
    if target.exists():
        raise BackupFailed(f"{target} exists; a backup replaces nothing, give another name.")
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    partial = Path(name)
    try:
        _copy(source, partial)
        os.fsync(descriptor)
        os.link(partial, target)  # fails, rather than replaces, if somebody was quicker
        synchronise(target.parent)
    except sqlite3.DatabaseError as error:
        raise BackupFailed(f"{source} cannot be copied: {error}.") from None
    finally:
        os.close(descriptor)
        partial.unlink(missing_ok=True)
    return target.stat().st_size


def _copy(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy, pages=PAGES)
        # One file: the copy of a database in WAL mode would open with files of its own.
        copy.execute("PRAGMA journal_mode=DELETE")
        said = copy.execute("PRAGMA integrity_check").fetchone()
        if said != ("ok",):
            raise sqlite3.DatabaseError(f"the copy is not sound ({said[0]})")
