"""The FastAPI application: routes, middleware and error handlers.

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

from affidavit.service.core import problems
from affidavit.service.settings import Settings
from affidavit.service.web import openapi, pages
from affidavit.service.web.access import require_guards
from affidavit.service.web.dependencies import Services
from affidavit.service.web.gauges import ServiceGauges
from affidavit.service.web.middleware import BodyLimit, RequestMiddleware
from affidavit.service.web.pages import errors
from affidavit.service.web.routes import ROUTERS
from affidavit.service.web.telemetry import Tracing

PAGES = tuple(import_module(f"{pages.__name__}.{name}").router for name in pages.MODULES)

_INCLUDED: list[tuple[tuple[APIRouter, ...], list[BaseRoute]]] = []
"""Tuples of routers, which are not hashable, with their routes."""


def create_app(settings: Settings, tracing: Tracing | None = None) -> FastAPI:
    """Return the application for ``settings``; its lifespan opens the database and processes."""
    services = Services(settings)
    app = FastAPI(
        title="Affidavit",
        version=version("affidavit"),
        description="Certifies differentially private training plans.",
        lifespan=_lifespan,
        routes=_routes((*ROUTERS, *PAGES)),
        redirect_slashes=False,
        # FastAPI's own pages load scripts from another host; see routes/about.py.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    services.metrics.watch(ServiceGauges(services))
    app.add_middleware(BodyLimit, limit=settings.body_limit)
    # The middleware that is added last is the outermost.
    app.add_middleware(RequestMiddleware, meters=services.metrics, tracing=tracing)
    problems.install(app)
    errors.install(app)
    openapi.install(app)
    require_guards(app)
    return app


def _routes(routers: tuple[APIRouter, ...]) -> list[BaseRoute]:
    """Return the routes of ``routers``, cached: FastAPI needs a tenth of a second."""
    for included, routes in _INCLUDED:
        if len(included) == len(routers) and all(map(is_, included, routers)):
            return routes
    combined = APIRouter()
    for router in routers:
        combined.include_router(router)
    _INCLUDED.append((routers, combined.routes))
    return combined.routes


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    require_guards(app)
    services.keyring.announce()
    await run_in_threadpool(services.authenticator.log_warnings)
    await run_in_threadpool(services.pool.warm_up)
    # Detect damage and rollbacks before the first request.
    await run_in_threadpool(services.sequencer.try_step)
    await run_in_threadpool(services.safety.reasons)
    services.sequencer.start()
    services.publisher.start()
    services.dispatcher.start()
    try:
        yield
    finally:
        await services.certifications.stop()
        await run_in_threadpool(services.close)
