"""A running service with somebody for each scope, on both databases."""

from __future__ import annotations

from tests.service.runs.conftest import Yard, yard

__all__ = ["Yard", "yard"]
