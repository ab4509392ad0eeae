"""How routes of the ledger name a data set and a reservation."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path as PathParameter

from affidavit.service.wanted import UUID

DatasetName = Annotated[
    str, PathParameter(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="As plans name it.")
]
ReservationId = Annotated[
    str,
    PathParameter(
        pattern=UUID,
        description="As the reservation was answered.",
    ),
]
