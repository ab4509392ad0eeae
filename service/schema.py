"""The whole schema: ``metadata`` once every module that has tables was imported."""

from __future__ import annotations

from affidavit.service.identity import tables as identity
from affidavit.service.keysets import tables as keysets
from affidavit.service.ledger import tables as ledger
from affidavit.service.lifecycle import tables as lifecycle
from affidavit.service.log import tables as log_tables
from affidavit.service.pages import tables as pages
from affidavit.service.policies import tables as policies
from affidavit.service.runs import tables as runs
from affidavit.service.tables import metadata

MODULES = (
    identity,
    ledger,
    keysets,
    log_tables,
    lifecycle,
    pages,
    policies,
    runs,
)
"""A module with tables is a line here; migrations and tests then see its tables."""

__all__ = ["metadata"]
