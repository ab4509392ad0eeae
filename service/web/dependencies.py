"""The services of an application, which requests use."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

from fastapi import Depends, Header, Request

from affidavit.service.audit.evidence import EvidenceCollector
from affidavit.service.audit.readiness import (
    LogWatch,
    Readiness,
    SafetyWatch,
    check_readiness,
)
from affidavit.service.certificates.certificate_curves import DrawCertificate
from affidavit.service.certificates.certifications import Certifications
from affidavit.service.certificates.preview_plan import PreviewPlan
from affidavit.service.certificates.status_list_signing import StatusLists
from affidavit.service.certificates.store import CertificateStore
from affidavit.service.certificates.submit_plan import SubmitPlan
from affidavit.service.core.clock import DatabaseClock
from affidavit.service.core.database import open_engine
from affidavit.service.core.fair_queue import Turns
from affidavit.service.core.pool import AccountingPool
from affidavit.service.dispatch.dispatcher import Dispatcher
from affidavit.service.dispatch.engines import RayJobs, build_engine
from affidavit.service.identity.actor import Actor, CommandContext
from affidavit.service.identity.authentication import Authenticator
from affidavit.service.identity.openid import CodeFlow, ProviderKeys, ProviderTokens
from affidavit.service.identity.provider import Provider
from affidavit.service.identity.rate_limiter import RateLimiter
from affidavit.service.identity.tokens import TokenRepository, last_revocations
from affidavit.service.keys.keyring import (
    Keyring,
    KeysetStore,
    RevokedKeys,
)
from affidavit.service.ledger.service import LedgerService
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.log.checkpoint_publisher import (
    CheckpointPublisher,
    Cosignatures,
    destinations,
    published_checkpoints,
)
from affidavit.service.log.reader import LogReader
from affidavit.service.log.sequencer import Sequencer
from affidavit.service.operation.database_admin import head
from affidavit.service.operation.four_eyes import FourEyes
from affidavit.service.policies.store import PolicyStore
from affidavit.service.runs.events import RunEvents
from affidavit.service.runs.queue import RunQueue
from affidavit.service.runs.service import RunService
from affidavit.service.settings import Settings
from affidavit.service.web.sessions import Sessions
from affidavit.service.web.telemetry import Metrics
from affidavit.trust import KeyRole


class Services:
    """The services of one application; ``head`` is the schema revision that it needs."""

    def __init__(self, settings: Settings) -> None:
        """Create the services for ``settings`` without opening or starting anything."""
        self.engine = open_engine(settings.database_url)
        self._aside = open_engine(settings.database_url, aside=True)
        self.clock = DatabaseClock(self._aside)
        self.store = CertificateStore(self.engine)
        self.tokens = TokenRepository(self.engine)
        provider_tokens, self.code_flow = _provider_parts(settings.provider, self.clock.now)
        self.pool = AccountingPool(settings.workers, settings.time_limit)
        self.keysets = KeysetStore(self.engine)
        self.log = LogReader(self.engine)
        self.public_log_entries = settings.public_log_entries
        places = destinations(settings.checkpoint_export, self.log, Cosignatures(self.engine))
        self.ledger_store = LedgerStore(self.engine)
        self.keyring = Keyring(
            settings.key_directory,
            settings.halves,
            RevokedKeys(KeysetStore(self._aside), self.clock.now),
            self.clock.now,
        )
        self.four_eyes = FourEyes(self.engine, self.keysets.administrators, last_revocations)
        self.policies = PolicyStore(self.engine, self.keyring.public_records, self.clock.now)
        self.sequencer = Sequencer(
            self.engine,
            self.keyring.signer(KeyRole.CHECKPOINT),
            origin=settings.log_origin,
            published=lambda: published_checkpoints(places),
            now=self.clock.now,
        )
        self.ledger = LedgerService(
            self.ledger_store, self.store, self.pool, self.keyring, loopback=settings.loopback
        )
        run_queue = RunQueue(self.engine)
        engine = build_engine(settings.dispatch, settings.job)
        self.dispatcher = Dispatcher(self.engine, engine, self.clock.now)
        self.submit_plan = SubmitPlan(
            self.store, self.pool, self.keyring, self.policies, self.ledger.position
        )
        self.certifications = Certifications(self.engine, self.clock.now)
        self.status_lists = StatusLists(self.engine, self.keyring, settings.log_origin)
        self.draw_certificate = DrawCertificate(self.pool)
        self.evidence = EvidenceCollector(
            engine=self.engine,
            store=self.store,
            policies=self.policies,
            keysets=self.keysets,
            status_lists=self.status_lists,
            log=self.log,
            keys=self.key_records,
            complaints=lambda: self.readiness().reasons,
            authority=settings.timestamp_authority,
        )
        self.preview_plan = PreviewPlan(self.pool, self.policies, self.ledger.position)
        self.runs = RunService(
            run_queue,
            self.ledger,
            self.store,
            settings.worker_keys,
            self.keyring.revoked,
            self.pool,
            multi_host=isinstance(engine, RayJobs),
        )
        self.run_events = RunEvents(run_queue, self.ledger)
        self.authenticator = Authenticator(
            self.tokens, provider_tokens, self.clock.now, loopback=settings.loopback
        )
        self.sessions = Sessions(self.engine, self.tokens, self.keyring)
        self.rate_limiter = RateLimiter(
            per_minute=settings.rate_limit, at_once=settings.concurrency_limit
        )
        self.turns = Turns(settings.concurrency_limit)
        self.publisher = CheckpointPublisher(places, self.sequencer.newest)
        self.metrics = Metrics()
        self.log_watch = LogWatch()
        self.safety = SafetyWatch(
            self.engine,
            lambda: self.sequencer.problem or self.publisher.problem,
            self.sequencer.newest,
            self.clock,
            settings.comparison_seconds,
        )
        self.head = head()
        self.public_url = settings.public_url

    def call_of(self, actor: Actor) -> CommandContext:
        """Return the context of a change that ``actor`` makes now."""
        return CommandContext(actor=actor.name, at=self.clock.now())

    def key_records(self) -> list[dict[str, Any]]:
        """Return the public records of all keys of the service, its certificates and its keyset.

        The key directory takes precedence over stored records.
        """
        keyset = self.keysets.signed()
        of_keyset = [] if keyset is None else [key.key_id for key in keyset.keyset.keys]
        records = [*self.store.keys(of_keyset), *self.keyring.public_records()]
        return list({record["key_id"]: record for record in records}.values())

    def readiness(self) -> Readiness:
        """Return whether the application can work now."""
        suspended = self.safety.reasons()
        return check_readiness(self.engine, self.head, self.keyring, suspended, self.log_watch)

    def close(self) -> None:
        """Stop the threads and accounting processes, and close the database."""
        self.dispatcher.stop()
        self.sequencer.stop()
        self.publisher.stop()
        self.pool.close()
        self.engine.dispose()
        self._aside.dispose()


def _provider_parts(
    provider: Provider | None, now: Callable[[], datetime]
) -> tuple[ProviderTokens | None, CodeFlow | None]:
    """Return the verifier of the provider's tokens and the sign-in flow, which share its keys."""
    if provider is None:
        return None, None
    keys = ProviderKeys.of(provider)
    client = provider.client
    flow = None if client is None else CodeFlow(provider, client, keys, now)
    return ProviderTokens(provider, keys, now), flow


def services_of(request: Request) -> Services:
    """Return the services of the application that handles ``request``."""
    services: Services = request.app.state.services
    return services


async def _services(request: Request) -> Services:  # async, to run outside the thread pool
    return services_of(request)


IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=r"^[!-~]{1,255}$",
        description="A repetition with the same key gets the first response again.",
    ),
]
TheServices = Annotated[Services, Depends(_services)]
