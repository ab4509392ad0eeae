"""``python -m affidavit.service COMMAND``: what the command line runs for a server.

The command line itself must work without a server, so it does not import this room; it
starts this module instead. Nothing expected ends in a traceback. Exit codes: 0 done, 1 an
audit found something, 2 something that the operator must fix (a setting, the schema, an
address in use), 3 the database cannot be reached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from affidavit.certificate import KeyFailure
from affidavit.service.identity import commands as tokens
from affidavit.service.identity.loopback_auth import NoIdentities
from affidavit.service.identity.tokens import TokenError
from affidavit.service.log import audit_command, witness_server
from affidavit.service.log.audit_command import AuditCommandError
from affidavit.service.log.checkpoint_publisher import PublishError
from affidavit.service.log.witness_server import WitnessError
from affidavit.service.operation.database_admin import (
    BackupError,
    SchemaNotAtHead,
    back_up,
    grant_application,
    head,
    upgrade,
)
from affidavit.service.settings import Settings, SettingsError

OPERATOR, UNREACHABLE = 2, 3
EXPECTED = (
    SettingsError,
    SchemaNotAtHead,
    KeyFailure,
    NoIdentities,
    TokenError,
    AuditCommandError,
    PublishError,
    BackupError,
    WitnessError,
)
"""What the operator must fix; each message says what."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        settings = Settings.from_environment()
        return int(options.run(options, settings) or 0)
    except KeyboardInterrupt:
        return 0
    except EXPECTED as error:
        return _fail(str(error), OPERATOR)
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        return _fail(
            "PostgreSQL needs its driver; run: pip install 'affidavit[postgresql]'", OPERATOR
        )
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        return _fail(f"the database cannot be used: {cause}; see DATABASE_URL", UNREACHABLE)
    except OSError as error:
        return _fail(str(error), OPERATOR)


def _migrate(_options: argparse.Namespace, settings: Settings) -> None:
    upgrade(settings.database_url)
    if settings.app_role is not None:
        grant_application(settings.database_url, settings.app_role)
    print(f"The schema is at revision {head()}.")  # noqa: T201  # what was asked for


def _backup(options: argparse.Namespace, settings: Settings) -> None:
    size = back_up(settings.database_url, options.file)
    print(f"{options.file} holds {size} bytes.")  # noqa: T201  # what was asked for


def _serve(options: argparse.Namespace, settings: Settings) -> None:
    # With it come the pages and all accountants, which no other command needs to wait for.
    from affidavit.service.serve import serve

    serve(options.host, options.port, settings)


def _fail(message: str, code: int) -> int:
    print(f"affidavit: {message}", file=sys.stderr)  # noqa: T201  # a command's own words
    return code


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < 65_536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m affidavit.service")
    commands = parser.add_subparsers(dest="command", required=True)
    migrating = commands.add_parser("migrate", help="upgrade the database schema to this release")
    migrating.set_defaults(run=_migrate)
    serving = commands.add_parser("serve", help="run the HTTP service")
    serving.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 127.0.0.1 (this machine only) if omitted",
    )
    serving.add_argument("--port", type=_port, default=8321, help="0: any free port")
    serving.set_defaults(run=_serve)
    backing_up = commands.add_parser("backup", help="copy the embedded database to a new file")
    backing_up.add_argument("file", type=Path, help="the file to create")
    backing_up.set_defaults(run=_backup)
    tokens.add_parser(commands)
    audit_command.add_parser(commands)
    witness_server.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
