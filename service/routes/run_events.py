"""``GET /v1/runs/{run_id}/events``: what happens to a run, as it happens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from affidavit.service.openapi import problems
from affidavit.service.problems import Problem
from affidavit.service.requests import in_thread
from affidavit.service.routes.ledgers import BudgetReader
from affidavit.service.routes.runs import RunId
from affidavit.service.runs.feed import ID_PATTERN, Feed, Place
from affidavit.service.runs.watching import MOST
from affidavit.service.services import TheServices

MEDIA_TYPE = "text/event-stream"

router = APIRouter()

LastEventId = Annotated[
    str | None,
    Header(
        pattern=ID_PATTERN, description="The last event that was seen; those after it are sent."
    ),
]


@router.get(
    "/v1/runs/{run_id}/events",
    summary="A run's events, as they happen",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events: `state` with a RunEvent as data, and `progress` "
            "with a RunProgress. The stream ends with the run, and otherwise within minutes: "
            "ask again with `Last-Event-ID`.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        204: {"description": "The run is over, and everything was told: do not ask again."},
        **problems(401, 403, 404, 422, 503),
    },
)
async def events(
    _: BudgetReader, services: TheServices, run_id: RunId, last_event_id: LastEventId = None
) -> Response:
    """State, steps and ε spent so far; it resumes where ``Last-Event-ID`` says."""
    feed = services.feed
    told = Place() if last_event_id is None else Place.read(last_event_id)
    if await in_thread(lambda: feed.is_over(run_id, told)):
        return Response(status_code=204)
    if feed.watching.full:
        raise Problem(
            503,
            "too_many_watchers",
            f"{MOST} streams are open already; ask for the run itself, or try again later.",
            headers={"Retry-After": "5"},
        )
    return _Stream(feed, run_id, told)


class _Stream(StreamingResponse):
    """The events of a run that is watched for as long as they are sent."""

    def __init__(self, feed: Feed, run_id: str, told: Place) -> None:
        # Neither kept by a cache nor held back by a proxy.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(feed.events(run_id, told), headers=headers, media_type=MEDIA_TYPE)
        self._watched = feed.watching.watched(run_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self._watched:
            await super().__call__(scope, receive, send)
