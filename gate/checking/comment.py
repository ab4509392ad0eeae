"""Post the verdicts as one comment of a pull or merge request, and fixes as suggested changes.

The request is found from the variables that the pipelines of GitHub and GitLab set. A comment is
recognised by its first line (``formats.MARKER``) and replaced in later runs. A suggestion is posted
once, on the line that it changes. References: GitHub REST API 2022-11-28, issue comments, review
comments; GitLab REST API v4, notes, discussions and suggestions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from affidavit.gate.checking.finding import CheckResult
from affidavit.gate.checking.formats import MARKER, path_of

TIMEOUT = 30.0
PAGE = 100
MAX_PAGES = 50
LONGEST = 60_000
"""Characters of a comment; GitHub takes 65,536."""


class NotPosted(Exception):
    """The comment could not be posted; the message says why, and holds no token."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A line of a file as a fix writes it."""

    file: str
    line: int
    text: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The comments of one request: their list, and how one of them is changed."""

    comments: str
    comment: str
    """Address of one comment, with ``{id}``."""
    change: str
    """The HTTP method that changes one."""
    reviews: str
    """Comments on lines of the request's changes."""
    review: Callable[[Suggestion, dict[str, Any]], dict[str, Any]]
    """What is posted there for a suggestion, from the request as the host describes it."""
    request: str
    """Address of the request itself."""
    headers: Mapping[str, str]


def github() -> Place:
    """The pull request of a GitHub workflow; raises ``NotPosted``."""
    api = os.environ.get("GITHUB_API_URL", "https://api.github.com")
    try:
        event = json.loads(Path(_variable("GITHUB_EVENT_PATH")).read_bytes())
        number = int(event["pull_request"]["number"])
    except (OSError, ValueError, KeyError, TypeError):
        raise NotPosted("this workflow was not triggered by a pull request") from None
    repository = f"{api}/repos/{_variable('GITHUB_REPOSITORY')}"
    return Place(
        comments=f"{repository}/issues/{number}/comments",
        comment=f"{repository}/issues/comments/{{id}}",
        change="PATCH",
        request=f"{repository}/pulls/{number}",
        reviews=f"{repository}/pulls/{number}/comments",
        review=lambda item, request: {
            "body": _suggested(item, "suggestion"),
            "commit_id": request["head"]["sha"],
            "path": item.file,
            "line": item.line,
            "side": "RIGHT",
        },
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {_variable('GITHUB_TOKEN')}",
            "X-GitHub-Api-Version": "2022-11-28",
        },
    )


def gitlab() -> Place:
    """The merge request of a GitLab pipeline; raises ``NotPosted``."""
    project = f"{_variable('CI_API_V4_URL')}/projects/{_variable('CI_PROJECT_ID')}"
    request = f"{project}/merge_requests/{_variable('CI_MERGE_REQUEST_IID')}"
    return Place(
        comments=f"{request}/notes",
        comment=f"{request}/notes/{{id}}",
        change="PUT",
        request=request,
        reviews=f"{request}/discussions",
        review=lambda item, described: {
            "body": _suggested(item, "suggestion:-0+0"),
            "position": {
                **{
                    key: described["diff_refs"][key]
                    for key in ("base_sha", "head_sha", "start_sha")
                },
                "position_type": "text",
                "old_path": item.file,
                "new_path": item.file,
                "new_line": item.line,
            },
        },
        headers={"PRIVATE-TOKEN": _variable("GITLAB_TOKEN")},
    )


HOSTS: dict[str, Callable[[], Place]] = {"github": github, "gitlab": gitlab}


def suggestions(results: Sequence[CheckResult]) -> Iterator[Suggestion]:
    """The first fix of each finding, where it changes one line."""
    for finding in (finding for result in results for finding in result.findings):
        fix = finding.fixes[0] if finding.fixes else None
        lines = (
            {line for edit in fix.edits for line in (edit.line, edit.end_line)} if fix else set()
        )
        if fix is None or len(lines) != 1:
            continue
        (line,) = lines
        text = Path(finding.file).read_text("utf-8").splitlines()[line - 1]
        for edit in sorted(fix.edits, key=lambda edit: edit.column, reverse=True):
            text = text[: edit.column - 1] + edit.after + text[edit.end_column - 1 :]
        yield Suggestion(path_of(finding.file), line, text, fix.description)


def _suggested(item: Suggestion, block: str) -> str:
    fence = "`" * (3 + item.text.count("`"))
    return f"{item.why[0].upper()}{item.why[1:]}.\n\n{fence}{block}\n{item.text}\n{fence}"


def post(
    host: str,
    body: str,
    transport: httpx.BaseTransport | None = None,
    suggested: Sequence[Suggestion] = (),
) -> None:
    """Post ``body``, or replace the comment of an earlier run, and suggest changes.

    A change of a line that the request does not touch is left to the comment, which has it in
    words. Raises ``NotPosted``.
    """
    place = HOSTS[host]()
    text = body if len(body) <= LONGEST else f"{body[:LONGEST]}\n\nThe comment was truncated."
    try:
        with httpx.Client(headers=place.headers, timeout=TIMEOUT, transport=transport) as client:
            listed = _comments(client, place.comments)
            ours = (one for one in listed if str(one.get("body", "")).startswith(MARKER))
            number = next((int(one["id"]) for one in ours), None)
            if number is None:
                answer = client.post(place.comments, json={"body": text})
            else:
                url = place.comment.format(id=number)
                answer = client.request(place.change, url, json={"body": text})
            answer.raise_for_status()
            if suggested:
                _suggest(client, place, suggested)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise NotPosted(f"{host} answered {status}; check the token's permissions") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise NotPosted(f"{host} did not answer: {type(error).__name__}") from None


def _suggest(client: httpx.Client, place: Place, suggested: Sequence[Suggestion]) -> None:
    described = client.get(place.request)
    described.raise_for_status()
    # GitHub's review comments stand alone, GitLab's are the notes of discussions.
    notes = (n for item in _comments(client, place.reviews) for n in item.get("notes", [item]))
    earlier = {
        (one.get("body"), at.get("new_path", one.get("path")), at.get("new_line", one.get("line")))
        for one in notes
        for at in [one["position"] if isinstance(one.get("position"), dict) else {}]
    }
    for suggestion in suggested:
        document = place.review(suggestion, described.json())
        if (document["body"], suggestion.file, suggestion.line) not in earlier:
            answer = client.post(place.reviews, json=document)
            if answer.status_code not in (400, 422):  # not a line of the request's changes
                answer.raise_for_status()


def _comments(client: httpx.Client, address: str) -> Iterator[dict[str, Any]]:
    """All comments at an address, page by page."""
    for page in range(1, MAX_PAGES + 1):
        answer = client.get(address, params={"per_page": PAGE, "page": page})
        answer.raise_for_status()
        comments: Any = answer.json()
        if not isinstance(comments, list) or not all(isinstance(c, dict) for c in comments):
            raise ValueError("not a list of comments")
        yield from comments
        if len(comments) < PAGE:
            return


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value or any(character in value for character in "\r\n"):
        raise NotPosted(f"{name} is not set")
    return value
