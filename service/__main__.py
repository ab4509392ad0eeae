"""``python -m affidavit.service COMMAND``: commands of the server.

The command line does not import this room, because it must work without a server, but starts this
module. Expected errors end with one line instead of a traceback. Exit codes: 0 done, 1 an audit
has findings, 2 the operator must fix something (a setting, the schema, an address in use), 3 the
database is unreachable.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from affidavit.service.core.errors import OperatorError
from affidavit.trust import KeyFailure

OPERATOR, UNREACHABLE = 2, 3
GROUPS = {"tokens": "operation.token_commands", "audit": "audit.audit_command"}
"""The groups of commands, each with the module of this room that is imported for it."""


class _Commands(TyperGroup):
    """Commands that return their exit code; expected errors end with one line.

    What they need is imported when they run: a command's help needs no database.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*super().list_commands(ctx), *GROUPS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with this name, or None."""
        if cmd_name not in GROUPS:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"affidavit.service.{GROUPS[cmd_name]}")
        group = get_command(getattr(module, cmd_name))
        group.name = cmd_name
        return group

    def invoke(self, ctx: Any) -> NoReturn:
        """Run a command and raise ``typer.Exit`` with its code."""
        try:
            raise typer.Exit(super().invoke(ctx) or 0)
        except KeyboardInterrupt:
            raise typer.Exit from None
        except (OperatorError, KeyFailure) as error:
            raise _exit_with(str(error), OPERATOR) from None
        except ModuleNotFoundError as error:
            if error.name != "psycopg":
                raise
            message = "PostgreSQL needs its driver; run: pip install 'affidavit[postgresql]'"
            raise _exit_with(message, OPERATOR) from None
        except OSError as error:
            raise _exit_with(str(error), OPERATOR) from None
        except Exception as error:
            if not _is_of_the_database(error):
                raise
            cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            message = f"the database cannot be used: {cause}; see DATABASE_URL"
            raise _exit_with(message, UNREACHABLE) from None


def _is_of_the_database(error: Exception) -> bool:
    """Whether SQLAlchemy, if it was imported, raised ``error``."""
    errors = sys.modules.get("sqlalchemy.exc")
    return errors is not None and isinstance(error, errors.SQLAlchemyError)


def _exit_with(message: str, code: int) -> typer.Exit:
    typer.echo(f"affidavit: {message}", err=True)
    return typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    name="affidavit",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("serve")
def _serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8321,
) -> None:
    """Run the HTTP service."""
    from affidavit.service.settings import Settings
    from affidavit.service.web.serve import serve

    serve(host, port, Settings.from_environment())


@app.command("migrate")
def _migrate() -> None:
    """Migrate the service's database (DATABASE_URL) to this release's schema."""
    from affidavit.service.operation.database_admin import grant_application, head, upgrade
    from affidavit.service.settings import Settings

    settings = Settings.from_environment()
    upgrade(settings.database_url)
    if settings.app_role is not None:
        grant_application(settings.database_url, settings.app_role)
    typer.echo(f"The schema is at revision {head()}.")


@app.command("backup")
def _backup(file: Annotated[Path, typer.Argument(help="New file to write.")]) -> None:
    """Back up the embedded database to a new file while the service keeps running."""
    from affidavit.service.operation.database_admin import back_up
    from affidavit.service.settings import Settings

    size = back_up(Settings.from_environment().database_url, file)
    typer.echo(f"{file} holds {size} bytes.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        app(arguments, prog_name="affidavit")
    except SystemExit as finished:
        return int(finished.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
