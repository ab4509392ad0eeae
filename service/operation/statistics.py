"""What is read when somebody asks for the metrics: the queue, the pool, the log, the keys."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from sqlalchemy import QueuePool, func, select

from affidavit.certificate import KeyFailure, read_instant, read_keyset
from affidavit.service.log.log_tables import log_checkpoints, log_pending
from affidavit.service.operation.metrics import Metrics
from affidavit.service.services import Services

MEANINGS = {
    "affidavit_log_size": "Leaves of the newest signed checkpoint.",
    "affidavit_log_pending": "Entries that wait for their place in the log.",
    "affidavit_log_oldest_pending_seconds": "How long the oldest is seen to wait.",
    "affidavit_log_checkpoint_age_seconds": "Age of the newest signed checkpoint.",
    "affidavit_keyset_version": "The newest published keyset; 0 before the first.",
    "affidavit_keyset_expires_seconds": "Seconds until it expires.",
}


def watch(meters: Metrics, services: Services) -> None:
    """Have ``meters`` show how the parts of ``services`` are doing."""
    meters.watch(
        "affidavit_accounting_waiting",
        "Plans being accounted or waiting for it.",
        lambda: float(services.submit_plan.waiting),
    )
    meters.watch(
        "affidavit_accounting_running",
        "Computations handed to the accounting's processes and not answered yet.",
        lambda: float(services.pool.unanswered),
    )
    meters.watch(
        "affidavit_accounting_workers", "Processes that account.", lambda: services.pool.workers
    )
    meters.watch(
        "affidavit_database_connections",
        "Connections in use.",
        lambda: _connections(services),
    )
    meters.watch(
        "affidavit_signing_key_expires_seconds",
        "Seconds until the window of the key that signs is over; below 0 when nothing can sign.",
        _expiry(services),
    )
    meters.watch_stored(MEANINGS, lambda: _stored(services))


def _connections(services: Services) -> float:
    pool = services.engine.pool
    return float(pool.checkedout()) if isinstance(pool, QueuePool) else 0.0


def _stored(services: Services) -> dict[str, float]:
    now = datetime.now(UTC)
    newest = (
        select(log_checkpoints.c.tree_size, log_checkpoints.c.signed_at)
        .order_by(log_checkpoints.c.id.desc())
        .limit(1)
    )
    with services.engine.connect() as connection:
        waiting = connection.execute(select(func.count()).select_from(log_pending)).scalar_one()
        found = {
            "affidavit_log_size": 0.0,
            "affidavit_log_pending": float(waiting),
            "affidavit_log_oldest_pending_seconds": services.log_watch.waited(connection),
        }
        checkpoint = connection.execute(newest).first()
    if checkpoint is not None:
        found["affidavit_log_size"] = float(checkpoint.tree_size)
        age = (now - checkpoint.signed_at).total_seconds()
        found["affidavit_log_checkpoint_age_seconds"] = age
    return {**found, **_keyset(services, now)}


def _keyset(services: Services, now: datetime) -> dict[str, float]:
    newest = services.keysets.newest()
    if newest is None:
        return {"affidavit_keyset_version": 0.0}
    keyset = read_keyset(newest).keyset
    return {
        "affidavit_keyset_version": float(keyset.version),
        "affidavit_keyset_expires_seconds": (read_instant(keyset.expires_at) - now).total_seconds(),
    }


def _expiry(services: Services) -> Callable[[], float]:
    def seconds() -> float:
        try:
            ends = services.keyring.current().public.not_after
        except KeyFailure:
            return -1.0
        return (ends - datetime.now(UTC)).total_seconds()

    return seconds
