"""``affidavit serve`` and the other commands of the service, which is a program of its own.

The gate must not depend on the service to work offline, so these commands become it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from affidavit.gate.service_program import become_service


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8321,
) -> None:
    """Run the HTTP service."""
    become_service("serve", "--host", host, "--port", str(port))


def migrate() -> None:
    """Bring the service's database (DATABASE_URL) to this release's schema."""
    become_service("migrate")


def backup(
    file: Annotated[Path, typer.Argument(help="The file to make.")],
) -> None:
    """Copy the embedded database to a new file while the service goes on working."""
    become_service("backup", str(file))
