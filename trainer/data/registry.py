"""The data that a command line may name; a new adapter is a file and a line here."""

from __future__ import annotations

from affidavit.trainer.data.bible import bible
from affidavit.trainer.data.generated import generated
from affidavit.trainer.data.jsonl import jsonl
from affidavit.trainer.data.numbers import csv_file, digits
from affidavit.trainer.sources import DataSource

DATA: dict[str, DataSource] = {
    "bible": bible,
    "csv": csv_file,
    "digits": digits,
    "generated": generated,
    "jsonl": jsonl,
}
