"""How often and how many at once: buckets for each caller, and 429 with the time to wait."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st

from affidavit.service.identity import rate_limiter
from affidavit.service.identity.rate_limiter import RateLimiter, key_of_address, retry_after
from affidavit.service.settings import Settings
from affidavit.service.web import app as application
from affidavit.service.web.access import Reader
from affidavit.service.web.routes import ROUTERS
from tests.support.polling import TIMEOUT_SECONDS

LIST = "/v1/certificates"


@given(
    per_minute=st.integers(1, 600),
    gaps=st.lists(st.floats(0, 20, allow_nan=False), min_size=1, max_size=60),
)
def test_in_no_time_more_than_a_full_bucket_and_the_rate_get_through(
    per_minute: int, gaps: list[float]
) -> None:
    limits, moments = (
        RateLimiter(per_minute=per_minute, at_once=1),
        list(itertools.accumulate(gaps)),
    )
    allowed = [moment for moment in moments if limits.take("a", moment) == 0]
    for first, begin in enumerate(allowed):
        for last, end in enumerate(allowed[first:], first):
            most = per_minute + (end - begin) * per_minute / 60
            assert last - first + 1 <= most + 1e-6


@given(per_minute=st.integers(1, 600), burst=st.integers(0, 700))
def test_who_waits_as_long_as_told_is_let_in(per_minute: int, burst: int) -> None:
    limits, now = RateLimiter(per_minute=per_minute, at_once=1), 0.0
    for _ in range(burst):
        now += limits.take("a", now) and 0.001
    wait = limits.take("a", now)
    assert wait >= 0
    assert int(retry_after(wait)) >= max(wait, 1)
    if wait:
        assert limits.take("a", now + wait + 1e-6) == 0


def test_buckets_are_apart_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limiter, "MAX_BUCKETS", 10)
    limits = RateLimiter(per_minute=1, at_once=1)
    for number in range(1000):
        assert limits.take(f"address:{number}", 0.0) == 0
    assert len(limits._buckets) == 10
    assert limits.take("address:999", 0.0) > 0


def test_at_once_is_counted_down_as_requests_end() -> None:
    limits = RateLimiter(per_minute=1, at_once=2)
    for caller in ("a", "a", "b"):
        assert limits.begin(caller)
    assert not limits.begin("a")
    limits.end("a")
    limits.begin("a")
    for caller in ("a", "b", "a"):
        limits.end(caller)
    assert limits._running == {}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        (None, "garbage", True),
        ("fe80::1%eth0", "fe80::1%eth1", True),
    ],
)
def test_who_owns_many_addresses_has_one_bucket(one: str | None, other: str, same: bool) -> None:
    assert (key_of_address(one) == key_of_address(other)) is same


def limited(settings: Settings, **limits: int) -> Settings:
    return replace(settings, loopback=False, **limits)


def statuses(client: Any, times: int, path: str = LIST, **sent: Any) -> list[int]:
    return [client.get(path, **sent).status_code for _ in range(times)]


def test_a_token_has_its_own_bucket_and_livez_has_none(
    settings: Settings, client_of: Any, token_for: Any
) -> None:
    one, other = (token_for(settings, "submit", name=name) for name in ("one", "other"))
    same_name = token_for(settings, "submit", name="one")
    with client_of(limited(settings, rate_limit=3)) as client:
        assert statuses(client, 5, headers=one) == [200] * 3 + [429] * 2
        assert statuses(client, 4, headers=other) == [200] * 3 + [429]
        assert statuses(client, 1, headers=same_name) == [200]  # a stolen one does not lock out
        answer = client.get(LIST, headers=one)
        assert answer.json()["code"] == "rate_limited"
        assert 1 <= int(answer.headers["retry-after"]) <= 20
        assert "AFFIDAVIT_RATE_LIMIT" in answer.json()["detail"]
        assert statuses(client, 20, "/livez") == [200] * 20
        assert statuses(client, 4, "/v1/keys") == [200] * 3 + [429]  # its address's


def test_bad_tokens_are_counted_by_address_and_use_up_no_token(
    settings: Settings, client_of: Any, token_for: Any
) -> None:
    good = token_for(settings, "submit")
    bad = {"authorization": good["authorization"][:-1] + "~"}
    with client_of(limited(settings, rate_limit=3)) as client:
        assert statuses(client, 5, headers=bad) == [401] * 3 + [429] * 2
        assert statuses(client, 1) == [429]
        assert statuses(client, 3, headers=good) == [200] * 3


def test_what_a_token_may_not_do_counts_too(
    settings: Settings, client_of: Any, token_for: Any
) -> None:
    worker = token_for(settings, "work")
    with client_of(limited(settings, rate_limit=2)) as client:
        assert statuses(client, 3, headers=worker) == [403, 403, 429]


def test_without_tokens_this_machine_has_a_bucket_of_its_own(
    settings: Settings, client_of: Any
) -> None:
    with client_of(replace(settings, rate_limit=2)) as client:
        assert statuses(client, 3) == [200, 200, 429]


@asynccontextmanager
async def asking(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, client=("192.0.2.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://affidavit.test") as client:
        yield client


def test_so_many_at_once_and_no_more_and_room_again_afterwards(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, token_for: Any
) -> None:
    router, go = APIRouter(), asyncio.Event()
    begun: list[str] = []

    @router.get("/v1/slow")
    async def slow(actor: Reader) -> dict[str, str]:
        begun.append(actor.name)
        await go.wait()
        if len(begun) == 3:
            raise RuntimeError("one of them ends badly")
        return {}

    monkeypatch.setattr(application, "ROUTERS", (*ROUTERS, router))
    one, other = (token_for(settings, "submit", name=name) for name in ("one", "other"))
    app = application.create_app(limited(settings, concurrency_limit=2))

    async def work() -> None:
        async with asking(app) as client:
            first = [asyncio.create_task(client.get("/v1/slow", headers=one)) for _ in range(2)]
            while len(begun) < 2:
                await asyncio.sleep(0.01)
            refused = await client.get("/v1/slow", headers=one)
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_at_once")
            assert refused.headers["retry-after"] == "1"
            assert "AFFIDAVIT_CONCURRENCY" in refused.json()["detail"]
            third = asyncio.create_task(client.get("/v1/slow", headers=other))
            while len(begun) < 3:
                await asyncio.sleep(0.01)
            assert (await client.get("/livez")).status_code == 200
            go.set()
            with pytest.raises(RuntimeError):
                await asyncio.gather(*first, third)
            begun.clear()
            assert (await client.get("/v1/slow", headers=one)).status_code == 200
            assert app.state.services.rate_limiter._running == {}

    try:
        asyncio.run(asyncio.wait_for(work(), TIMEOUT_SECONDS))
    finally:
        app.state.services.close()
