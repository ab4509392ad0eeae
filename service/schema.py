"""The whole schema: ``metadata`` once every module that has tables was imported."""

from __future__ import annotations

from affidavit.service.identity import tables as identity
from affidavit.service.log import entries
from affidavit.service.tables import metadata

MODULES = (identity, entries)
"""A module with tables is a line here; migrations and tests then see its tables."""

__all__ = ["metadata"]
