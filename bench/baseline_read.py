"""Serve one row by its primary key with plain FastAPI and SQLAlchemy, as a baseline.

uvicorn is configured as in ``affidavit serve``.

    python bench/baseline_read.py DATABASE_URL PORT
"""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI, Response
from sqlalchemy import create_engine, select

from affidavit.service.tables.certificates import certificates

engine = create_engine(sys.argv[1])
app = FastAPI()


@app.get("/{certificate_id}")
def read(certificate_id: str) -> Response:
    """The result of a first issue."""
    query = select(certificates.c.result).where(
        certificates.c.id == certificate_id,
        certificates.c.untrusted.is_(False),
        certificates.c.issue == 1,
    )
    with engine.connect() as connection:
        result = connection.execute(query).scalar()
    return Response(result, 404 if result is None else 200, media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[2]),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
