"""The application: routes, limits and error documents, put together from settings.

>>> from affidavit.service.settings import Settings
>>> app = create_app(Settings.from_environment({"AFFIDAVIT_HOME": "/srv/affidavit"}))
>>> sorted(app.openapi()["paths"])[:3]
['/livez', '/metrics', '/readyz']
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.metadata import version
from operator import is_

from fastapi import APIRouter, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute

from affidavit.service import openapi, pages, problems
from affidavit.service.dependencies import Services
from affidavit.service.identity.access import require_guards
from affidavit.service.middleware import BodyLimit, RequestMiddleware
from affidavit.service.operation.telemetry import Tracing, watch_services
from affidavit.service.pages import errors
from affidavit.service.routes import ROUTERS
from affidavit.service.settings import Settings

PAGES = tuple(import_module(f"{pages.__name__}.{name}").router for name in pages.MODULES)

_READ: list[tuple[tuple[APIRouter, ...], list[BaseRoute]]] = []
"""Routers and what was read of them: one entry, and one for each other set that a test tries."""


def create_app(settings: Settings, tracing: Tracing | None = None) -> FastAPI:
    """The service behind ``settings``; opens the database and starts processes when run."""
    services = Services(settings)
    app = FastAPI(
        title="Affidavit",
        version=version("affidavit"),
        description="Certifies differentially private training plans.",
        lifespan=_lifespan,
        routes=_routes((*ROUTERS, *PAGES)),
        redirect_slashes=False,
        # FastAPI's pages load scripts from another host; ours are in routes/about.py.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    watch_services(services.metrics, services)
    app.add_middleware(BodyLimit, limit=settings.body_limit)
    # Added last, it stands around the others.
    app.add_middleware(RequestMiddleware, meters=services.metrics, tracing=tracing)
    problems.install(app)
    errors.install(app)
    openapi.install(app)
    require_guards(app)
    return app


def _routes(routers: tuple[APIRouter, ...]) -> list[BaseRoute]:
    """The routes of ``routers``, read once: FastAPI takes a tenth of a second over ours."""
    for read, routes in _READ:
        if len(read) == len(routers) and all(map(is_, read, routers)):
            return routes
    everything = APIRouter()
    for router in routers:
        everything.include_router(router)
    _READ.append((routers, everything.routes))
    return everything.routes


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    require_guards(app)
    services.keyring.announce()
    await run_in_threadpool(services.authenticator.announce)
    await run_in_threadpool(services.pool.warm_up)
    # What is known to be damaged or rolled back is known before the first request.
    await run_in_threadpool(services.sequencer.check)
    services.sequencer.start()
    services.publisher.start()
    services.dispatcher.start()
    try:
        yield
    finally:
        await services.certifications.stop()
        await run_in_threadpool(services.close)
