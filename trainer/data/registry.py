"""The data that a command line may name; a new adapter is a file and a line here."""

from __future__ import annotations

from affidavit.trainer.sources import DataSource

DATA: dict[str, DataSource] = {}
