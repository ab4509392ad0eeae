"""Settings of the service, read from environment variables at start-up.

No setting can change a guarantee; everything that can is in the plan. An invalid value is an error
that names the variable, and is not replaced by the default.

=============================  =====================================================
``DATABASE_URL``               default ``sqlite:///<home>/affidavit.db``
``AFFIDAVIT_HOME``             folder of database and keys, default ``~/.affidavit``
``AFFIDAVIT_WORKERS``          accounting processes, default 2
``AFFIDAVIT_TIME_LIMIT``       seconds after which an accounting is killed, default 120
``AFFIDAVIT_BODY_LIMIT``       bytes of a request body, default 1048576
``AFFIDAVIT_RATE_LIMIT``       requests per minute and token or address, default 6000
``AFFIDAVIT_CONCURRENCY``      concurrent requests per token or address, default 128
``AFFIDAVIT_COMPARISON``       seconds between comparisons of tables and log, 1 to 10, default 5
``AFFIDAVIT_DATABASE_APP_ROLE``  PostgreSQL role to which ``migrate`` grants the tables
``AFFIDAVIT_PUBLIC_URL``       where browsers reach the pages, as ``https://dp.example.com``
``AFFIDAVIT_LOG_ORIGIN``       the log's name, as ``affidavit.example.com/log``
``AFFIDAVIT_LOG_ENTRIES``      ``public``: everybody may read log entries at ``/v1/tlog``
``AFFIDAVIT_CHECKPOINT_EXPORT``  see ``service.log.checkpoint_publisher``
``AFFIDAVIT_TIMESTAMP_AUTHORITY``  URL of the authority (RFC 3161) that stamps evidence files
``AFFIDAVIT_DISPATCH``           the engine that executes runs: ``service.dispatch.engines``
``AFFIDAVIT_JOB``                what the engine starts for a run, described there
=============================  =====================================================

``service.identity.provider`` describes ``AFFIDAVIT_OIDC_...``, for an OpenID provider, and
``trust.signers`` the variables for the private halves of keys.

>>> Settings.from_environment({"AFFIDAVIT_HOME": "/srv/affidavit"}).database_url
'sqlite:////srv/affidavit/affidavit.db'
>>> Settings.from_environment({"AFFIDAVIT_WORKERS": "many"})
Traceback (most recent call last):
affidavit.service.core.errors.SettingsError: AFFIDAVIT_WORKERS is 'many'; give a number...
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from affidavit.service.core.errors import SettingsError
from affidavit.service.identity.provider import Provider, read_provider
from affidavit.trust import PrivateKeySource, home
from affidavit.trust.log import BadNote, require_name
from affidavit.trust.signers import KEY_VARIABLES, private_key_source

MIB = 1024 * 1024
WORKERS = 2
TIME_LIMIT = 120
RATE_LIMIT = 6000
CONCURRENCY_LIMIT = 128
COMPARISON_SECONDS = 5

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of one service process; times in seconds, sizes in bytes.

    ``loopback`` has no variable; it is set when the opened port is reachable only locally.
    """

    database_url: str
    key_directory: Path
    workers: int = WORKERS
    time_limit: float = float(TIME_LIMIT)
    body_limit: int = MIB
    rate_limit: int = RATE_LIMIT
    concurrency_limit: int = CONCURRENCY_LIMIT
    comparison_seconds: float = float(COMPARISON_SECONDS)
    provider: Provider | None = None
    public_url: str | None = None
    loopback: bool = False
    halves: PrivateKeySource | None = field(default=None, repr=False)
    app_role: str | None = None
    log_origin: str | None = None
    checkpoint_export: str = ""
    timestamp_authority: str | None = None
    dispatch: str = "local"
    job: str = ""
    public_log_entries: bool = False

    @property
    def worker_keys(self) -> Path:
        """The folder of the public records of workers' keys, beside the service's keys."""
        return self.key_directory.with_name("worker-keys")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Return the settings of ``environment``; raises ``SettingsError`` and ``KeyFailure``.

        Private keys are removed from the process's environment, so that child processes do not
        inherit them.
        """
        variables = dict(os.environ if environment is None else environment)
        if environment is None:
            for name in KEY_VARIABLES:
                os.environ.pop(name, None)
        folder = Path(variables["AFFIDAVIT_HOME"]) if variables.get("AFFIDAVIT_HOME") else home()
        provider = read_provider(variables)
        public_url = _public_url(variables.get("AFFIDAVIT_PUBLIC_URL", ""))
        if provider is not None and provider.client is not None and public_url is None:
            raise SettingsError(
                "AFFIDAVIT_PUBLIC_URL is not set, and the provider redirects browsers there; give "
                "scheme and host like https://dp.example.com."
            )
        return cls(
            database_url=database_url(
                variables.get("DATABASE_URL") or f"sqlite:///{folder / 'affidavit.db'}"
            ),
            key_directory=folder / "keys",
            workers=_integer(variables, "AFFIDAVIT_WORKERS", WORKERS, 256),
            time_limit=float(_integer(variables, "AFFIDAVIT_TIME_LIMIT", TIME_LIMIT, 86_400)),
            body_limit=_integer(variables, "AFFIDAVIT_BODY_LIMIT", MIB, 64 * MIB),
            rate_limit=_integer(variables, "AFFIDAVIT_RATE_LIMIT", RATE_LIMIT, 10_000_000),
            concurrency_limit=_integer(
                variables, "AFFIDAVIT_CONCURRENCY", CONCURRENCY_LIMIT, 10_000
            ),
            comparison_seconds=float(
                _integer(variables, "AFFIDAVIT_COMPARISON", COMPARISON_SECONDS, 10)
            ),
            provider=provider,
            public_url=public_url,
            log_origin=_log_name(variables, "AFFIDAVIT_LOG_ORIGIN"),
            checkpoint_export=variables.get("AFFIDAVIT_CHECKPOINT_EXPORT", ""),
            timestamp_authority=_timestamp_authority(variables),
            dispatch=_validated_dispatch(variables),
            job=variables.get("AFFIDAVIT_JOB", ""),
            public_log_entries=_is_public(variables, "AFFIDAVIT_LOG_ENTRIES"),
            halves=private_key_source(variables),
            app_role=variables.get("AFFIDAVIT_DATABASE_APP_ROLE") or None,
        )


def _timestamp_authority(variables: Mapping[str, str]) -> str | None:
    """Return the URL of the authority; raises ``SettingsError`` if it cannot be used."""
    url = variables.get("AFFIDAVIT_TIMESTAMP_AUTHORITY", "").strip()
    if not url:
        return None
    if re.fullmatch(r"https?://[^\s/]+(/\S*)?", url) is None:
        raise SettingsError(
            "AFFIDAVIT_TIMESTAMP_AUTHORITY is no URL; give the authority's like "
            "https://tsa.example.com."
        )
    if find_spec("rfc3161_client") is None:
        raise SettingsError(
            "AFFIDAVIT_TIMESTAMP_AUTHORITY needs a client; run: pip install "
            "'affidavit[timestamps]'."
        )
    return url


def _public_url(text: str) -> str | None:
    """Return scheme and host as an origin: in lower case, without a trailing slash."""
    text = text.strip()
    if not text:
        return None
    match = re.fullmatch(r"(https?)://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?/?", text.lower())
    if match is None:
        raise SettingsError(
            f"AFFIDAVIT_PUBLIC_URL is {text[:80]!r}; give scheme and host like "
            "https://dp.example.com, without a path."
        )
    scheme, host, port = match[1], match[2], match[3] or ""
    return f"{scheme}://{host}{'' if port == _DEFAULT_PORTS[scheme] else port}"


def _log_name(variables: Mapping[str, str], variable: str) -> str | None:
    name = variables.get(variable)
    if not name:
        return None
    try:
        require_name(name)
    except BadNote as error:
        raise SettingsError(
            f"{variable} is {name[:40]!r}: {error}; give one like example.com/log."
        ) from None
    return name


def _validated_dispatch(variables: Mapping[str, str]) -> str:
    dispatch = variables.get("AFFIDAVIT_DISPATCH") or "local"
    if dispatch != "local":
        from affidavit.service.dispatch.engines import build_engine  # imports an HTTP client

        build_engine(dispatch, variables.get("AFFIDAVIT_JOB", ""))
    return dispatch


def database_url(text: str) -> str:
    """Return the URL in ``text`` with the driver that this service uses; raises ``SettingsError``.

    >>> database_url("postgres://db/affidavit")
    'postgresql+psycopg://db/affidavit'
    """
    remedy = "give sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # a port that is no number
        raise SettingsError(f"DATABASE_URL is not the URL of a database; {remedy}.") from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "postgresql+psycopg"):
        raise SettingsError(f"DATABASE_URL names {url.drivername!r}; {remedy}.")
    if url.drivername == "sqlite" and url.database in (None, "", ":memory:"):
        raise SettingsError(f"DATABASE_URL names no file, so nothing would be stored; {remedy}.")
    return url.render_as_string(hide_password=False)


def _is_public(variables: Mapping[str, str], name: str) -> bool:
    text = variables.get(name)
    if text not in (None, "", "public"):
        raise SettingsError(f"{name} is {text[:40]!r}; give public, or leave it out.")
    return bool(text)


def _integer(variables: Mapping[str, str], name: str, default: int, maximum: int) -> int:
    text = variables.get(name)
    if not text:
        return default
    if text.isascii() and text.isdecimal() and len(text) < 12 and 1 <= int(text) <= maximum:
        return int(text)
    raise SettingsError(f"{name} is {text[:40]!r}; give a number from 1 to {maximum}.")
