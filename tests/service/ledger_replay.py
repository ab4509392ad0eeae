"""What a replay of the rows finds wrong with ledgers."""

from __future__ import annotations

from sqlalchemy import Engine

from affidavit.service.ledger.integrity import LedgerFinding, check_ledgers


def replay(engine: Engine) -> list[LedgerFinding]:
    """What is wrong with the ledgers behind ``engine``."""
    with engine.connect() as connection:
        return check_ledgers(connection)
