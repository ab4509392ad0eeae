"""The routes, one module for each resource; a new module is one line in ``MODULES``."""

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
)


def routers(*modules: str) -> tuple[APIRouter, ...]:
    """The ``router`` of each of ``modules``, which are below this package."""
    return tuple(import_module(f"{__name__}.{module}").router for module in modules)


ROUTERS = routers(*MODULES)
