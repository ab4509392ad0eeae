"""The routes, one module per resource; a new module needs a line in ``MODULES``."""

from __future__ import annotations

from importlib import import_module

from fastapi import APIRouter

MODULES = (
    "certificates",
    "about",
    "keys",
    "log",
    "policies",
    "ledgers",
    "runs",
    "evidence",
)


def routers(*modules: str) -> tuple[APIRouter, ...]:
    """Return the ``router`` of each of ``modules`` in this package."""
    return tuple(import_module(f"{__name__}.{module}").router for module in modules)


ROUTERS = routers(*MODULES)
