"""Everything that a request may need, made once for an application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import Engine

from affidavit.service.database import open_engine
from affidavit.service.identity.authentication import Authenticator
from affidavit.service.identity.code_flow import CodeFlow
from affidavit.service.identity.provider import Provider
from affidavit.service.identity.provider_tokens import ProviderKeys, ProviderTokens
from affidavit.service.identity.rate_limit import RateLimiter
from affidavit.service.identity.token_repository import TokenRepository
from affidavit.service.keyring import Keyring
from affidavit.service.keysets.revoked import RevokedKeys
from affidavit.service.keysets.store import KeysetStore
from affidavit.service.ledger.desk import Desk
from affidavit.service.ledger.ledger import Ledger
from affidavit.service.lifecycle.approve import Approve
from affidavit.service.lifecycle.reissue import Reissue
from affidavit.service.lifecycle.revoke import Revoke
from affidavit.service.lifecycle.status_lists import StatusLists
from affidavit.service.log.checkpoint_publisher import (
    CheckpointPublisher,
    destinations,
    published_checkpoints,
)
from affidavit.service.log.reader import LogReader
from affidavit.service.log.sequencer import Sequencer
from affidavit.service.log.witness import Witness
from affidavit.service.migrate import head
from affidavit.service.operation.metrics import Metrics
from affidavit.service.operation.readiness import LogWatch
from affidavit.service.pages.sessions import Sessions
from affidavit.service.policies.store import PolicyStore
from affidavit.service.pool import AccountingPool
from affidavit.service.runs.feed import Feed
from affidavit.service.runs.queue import RunQueue
from affidavit.service.runs.runs import Runs
from affidavit.service.runs.spent import Spending
from affidavit.service.runs.watching import Watching
from affidavit.service.settings import Settings
from affidavit.service.store import CertificateStore
from affidavit.service.use_cases.diagnose_claim import DiagnoseClaim
from affidavit.service.use_cases.draw_certificate import DrawCertificate
from affidavit.service.use_cases.preview_plan import PreviewPlan
from affidavit.service.use_cases.submit_plan import SubmitPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """The parts of one application; ``head`` is the schema revision that it needs."""

    engine: Engine
    store: CertificateStore
    pool: AccountingPool
    keyring: Keyring
    keysets: KeysetStore
    policies: PolicyStore
    submit_plan: SubmitPlan
    approve: Approve
    revoke: Revoke
    reissue: Reissue
    status_lists: StatusLists
    diagnose_claim: DiagnoseClaim
    draw_certificate: DrawCertificate
    preview_plan: PreviewPlan
    ledger: Ledger
    desk: Desk
    runs: Runs
    feed: Feed
    tokens: TokenRepository
    authenticator: Authenticator
    sessions: Sessions
    code_flow: CodeFlow | None
    rate_limiter: RateLimiter
    log: LogReader
    sequencer: Sequencer
    publisher: CheckpointPublisher
    witness: Witness
    metrics: Metrics
    log_watch: LogWatch
    head: str
    public_url: str | None

    @classmethod
    def of(cls, settings: Settings) -> Services:
        """The services that ``settings`` describe; opens and starts nothing yet."""
        engine = open_engine(settings.database_url)
        store = CertificateStore(engine)
        tokens = TokenRepository(engine)
        provided, code_flow = _provided(settings.provider)
        pool = AccountingPool(settings.workers, settings.time_limit)
        keysets = KeysetStore(engine)
        log = LogReader(engine)
        places = destinations(settings.checkpoint_export, log)
        ledger = Ledger(engine)
        keyring = Keyring(settings.key_directory, settings.halves, RevokedKeys(keysets))
        policies = PolicyStore(engine, keyring.public_records)
        sequencer = Sequencer(
            engine,
            keyring.current,
            origin=settings.log_origin,
            published=lambda: published_checkpoints(places),
        )
        desk = Desk(ledger, store, pool, keyring, loopback=settings.loopback)
        run_queue = RunQueue(engine)
        submit_plan = SubmitPlan(store, pool, keyring, policies, desk.position)
        return cls(
            engine=engine,
            store=store,
            pool=pool,
            keyring=keyring,
            keysets=keysets,
            policies=policies,
            submit_plan=submit_plan,
            approve=Approve(engine, keyring),
            revoke=Revoke(engine),
            reissue=Reissue(store, policies, submit_plan),
            status_lists=StatusLists(engine, keyring, settings.log_origin),
            diagnose_claim=DiagnoseClaim(pool),
            draw_certificate=DrawCertificate(pool),
            preview_plan=PreviewPlan(pool, policies, desk.position),
            ledger=ledger,
            desk=desk,
            runs=Runs(run_queue, ledger, desk, store, settings.worker_keys, pool),
            feed=Feed(
                queue=run_queue,
                watching=Watching(run_queue.progress),
                spending=Spending(desk, ledger),
            ),
            tokens=tokens,
            authenticator=Authenticator(tokens, provided, loopback=settings.loopback),
            sessions=Sessions(engine, tokens),
            code_flow=code_flow,
            rate_limiter=RateLimiter(
                per_minute=settings.rate_limit, at_once=settings.concurrency_limit
            ),
            log=log,
            sequencer=sequencer,
            publisher=CheckpointPublisher(places, sequencer.newest),
            witness=Witness(
                engine, keyring.current, settings.witness_name, settings.witnessed_logs
            ),
            metrics=Metrics(),
            log_watch=LogWatch(),
            head=head(),
            public_url=settings.public_url,
        )

    def close(self) -> None:
        """Stop the log's threads and the accounting, and let go of the database."""
        self.sequencer.stop()
        self.publisher.stop()
        self.pool.close()
        self.engine.dispose()


def _provided(provider: Provider | None) -> tuple[ProviderTokens | None, CodeFlow | None]:
    """Bearer tokens of the provider, and signing in with it; both by the same keys."""
    if provider is None:
        return None, None
    keys = ProviderKeys.of(provider)
    client = provider.client
    flow = None if client is None else CodeFlow(provider, client, keys)
    return ProviderTokens(provider, keys), flow


async def _services(request: Request) -> Services:  # a plain one would be run in a thread
    found: Services = request.app.state.services
    return found


TheServices = Annotated[Services, Depends(_services)]
