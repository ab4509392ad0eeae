"""Whether the service can do its work: database, schema at head, signer, and a log that grows.

Nothing is written to find it out: a probe comes every few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from affidavit.certificate import KeyFailure, PublicKey
from affidavit.plan import Reason
from affidavit.service.keyring import Keyring
from affidavit.service.migrate import revision_of
from affidavit.service.operation.log_age import BEHIND_SECONDS, LogWatch

_READ_ONLY = text("SELECT current_setting('transaction_read_only')::boolean")


@dataclass(frozen=True, slots=True)
class Readiness:
    """What was found; the service is ready when there is no reason against it."""

    revision: str | None
    key: PublicKey | None
    reasons: tuple[Reason, ...]


def check_readiness(
    engine: Engine,
    head: str,
    signers: Keyring,
    log_problem: Reason | None,
    log_watch: LogWatch,
) -> Readiness:
    """Look at the database and at the signer; ``log_problem`` is what the sequencer found."""
    reasons: list[Reason] = [] if log_problem is None else [log_problem]
    key: PublicKey | None = None
    revision = None
    try:
        revision = revision_of(engine)
        if _takes_no_writes(engine):
            message = "the database takes no writes: it is a standby, or was told to take none."
            reasons.append(
                _reason("database_read_only", message, "Lead DATABASE_URL to the primary.")
            )
        if revision != head:
            message = f"the schema is at revision {revision}, not {head}."
            reasons.append(_reason("schema_not_at_head", message, "Run: affidavit migrate"))
        elif (seconds := _behind(engine, log_watch)) > BEHIND_SECONDS:
            message = f"an entry has waited {seconds:.0f} s for its place in the log."
            reasons.append(_reason("log_behind", message, "The service's log says why."))
    except SQLAlchemyError:
        message = "the database does not answer."
        reasons.append(_reason("database_unavailable", message, "Start it; see DATABASE_URL."))
    try:
        key = signers.current().public
    except KeyFailure as failure:
        reasons.append(_reason("signer_unavailable", str(failure), "Mend the key directory."))
    except SQLAlchemyError:
        pass  # which keys are revoked is not known; why not is said above
    return Readiness(revision, key, tuple(reasons))


def _takes_no_writes(engine: Engine) -> bool:
    if engine.dialect.name != "postgresql":
        return False
    with engine.connect() as connection:
        return bool(connection.execute(_READ_ONLY).scalar_one())


def _behind(engine: Engine, log_watch: LogWatch) -> float:
    with engine.connect() as connection:
        return log_watch.waited(connection)


def _reason(code: str, message: str, remedy: str) -> Reason:
    return Reason(code=code, pointer="", message=message, remedy=remedy)
