"""One computation for callers that ask the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Runs ``work`` once per key at a time; who comes meanwhile gets the same outcome.

    Belongs to one event loop. A caller that goes away does not stop the computation,
    because others may be waiting for it.
    """

    def __init__(self) -> None:
        self._flights: dict[str, asyncio.Task[T]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: str) -> bool:
        return key in self._flights

    async def run(self, key: str, work: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The outcome of ``work`` for ``key``, and whether this caller started it."""
        flight = self._flights.get(key)
        started = flight is None
        if flight is None:
            flight = asyncio.create_task(self._fly(key, work))
            self._flights[key] = flight
        return await asyncio.shield(flight), started

    async def _fly(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        finally:
            del self._flights[key]
