"""Post the verdicts as one comment of a pull or merge request, and replace it in later runs.

The request is found from the variables that the pipelines of GitHub and GitLab set. A comment is
recognised by its first line (``formats.MARKER``). References: GitHub REST API 2022-11-28, issue
comments; GitLab REST API v4, notes of merge requests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from affidavit.gate.checking.formats import MARKER

TIMEOUT = 30.0
PAGE = 100
MOST_PAGES = 50
LONGEST = 60_000
"""Characters of a comment; GitHub takes 65,536."""


class NotPosted(Exception):
    """The comment could not be posted; the message says why, and holds no token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The comments of one request: their list, and how one of them is changed."""

    comments: str
    comment: str
    """Address of one comment, with ``{id}``."""
    change: str
    """The HTTP method that changes one."""
    headers: Mapping[str, str]


def github() -> Place:
    """The pull request of a GitHub workflow; raises ``NotPosted``."""
    api = os.environ.get("GITHUB_API_URL", "https://api.github.com")
    try:
        event = json.loads(Path(_variable("GITHUB_EVENT_PATH")).read_bytes())
        number = int(event["pull_request"]["number"])
    except (OSError, ValueError, KeyError, TypeError):
        raise NotPosted("the event of this workflow is not that of a pull request") from None
    issues = f"{api}/repos/{_variable('GITHUB_REPOSITORY')}/issues"
    return Place(
        comments=f"{issues}/{number}/comments",
        comment=f"{issues}/comments/{{id}}",
        change="PATCH",
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {_variable('GITHUB_TOKEN')}",
            "X-GitHub-Api-Version": "2022-11-28",
        },
    )


def gitlab() -> Place:
    """The merge request of a GitLab pipeline; raises ``NotPosted``."""
    project = f"{_variable('CI_API_V4_URL')}/projects/{_variable('CI_PROJECT_ID')}"
    notes = f"{project}/merge_requests/{_variable('CI_MERGE_REQUEST_IID')}/notes"
    return Place(
        comments=notes,
        comment=f"{notes}/{{id}}",
        change="PUT",
        headers={"PRIVATE-TOKEN": _variable("GITLAB_TOKEN")},
    )


HOSTS: dict[str, Callable[[], Place]] = {"github": github, "gitlab": gitlab}


def post(host: str, body: str, transport: httpx.BaseTransport | None = None) -> None:
    """Post ``body``, or replace the comment of an earlier run; raises ``NotPosted``."""
    place = HOSTS[host]()
    text = body if len(body) <= LONGEST else f"{body[:LONGEST]}\n\nThe rest is left out."
    try:
        with httpx.Client(headers=place.headers, timeout=TIMEOUT, transport=transport) as client:
            number = _earlier(client, place)
            if number is None:
                answer = client.post(place.comments, json={"body": text})
            else:
                url = place.comment.format(id=number)
                answer = client.request(place.change, url, json={"body": text})
            answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise NotPosted(f"{host} answered {status}; may the token write comments?") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NotPosted(f"{host} did not answer: {type(error).__name__}") from None


def _earlier(client: httpx.Client, place: Place) -> int | None:
    """The number of the comment that an earlier run posted, if any."""
    for page in range(1, MOST_PAGES + 1):
        answer = client.get(place.comments, params={"per_page": PAGE, "page": page})
        answer.raise_for_status()
        comments: Any = answer.json()
        if not isinstance(comments, list) or not all(isinstance(c, dict) for c in comments):
            raise ValueError("no list of comments")
        for comment in comments:
            if str(comment.get("body", "")).startswith(MARKER):
                return int(comment["id"])
        if len(comments) < PAGE:
            return None
    return None


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value or any(character in value for character in "\r\n"):
        raise NotPosted(f"{name} is not set")
    return value
