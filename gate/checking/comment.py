"""Post the verdicts as one comment of a pull or merge request, and fixes as suggested changes.

The request is found from the environment variables of GitHub and GitLab pipelines. A comment is
recognised by its first line (``formats.MARKER``) and its author, the account of the token, and
replaced in later runs: in somebody else's comment, its author could change the verdicts. A
suggestion is posted once, on the line that it changes. References: GitHub REST API 2022-11-28,
issue comments, review comments; GitHub GraphQL API, viewer; GitLab REST API v4, current user,
notes, discussions and suggestions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from affidavit.gate.checking.discovery import root_of
from affidavit.gate.checking.finding import CheckResult
from affidavit.gate.checking.fixes import apply_edits
from affidavit.gate.checking.formats import MARKER, repository_path
from affidavit.mechanisms import read_bytes
from affidavit.plan import MalformedPlan

TIMEOUT_SECONDS = 30.0
PAGE_SIZE = 100
MAX_PAGES = 50
MAX_COMMENT_LENGTH = 60_000
"""Characters of a comment; GitHub allows 65,536."""


class CommentError(Exception):
    """The comment could not be posted; the message says why, without the token."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A line of a file after a fix."""

    file: str
    line: int
    text: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CommentApi:
    """The API of a code host for the comments of one pull or merge request."""

    comments: str
    """URL of the comments."""
    comment: str
    """URL of one comment, with ``{id}``."""
    update_method: str
    """HTTP method that changes a comment."""
    reviews: str
    """URL of the comments on changed lines."""
    build_review: Callable[[Suggestion, dict[str, Any]], dict[str, Any]]
    """Builds the comment of a suggestion from the host's document of the request."""
    request: str
    """URL of the request."""
    account: Callable[[httpx.Client], Any]
    """Returns the name of the token's account."""
    author: tuple[str, str]
    """Keys of the author's name in a comment."""
    headers: Mapping[str, str]


def github() -> CommentApi:
    """Return the API of the pull request of a GitHub workflow; raises ``CommentError``."""
    base = os.environ.get("GITHUB_API_URL", "https://api.github.com")
    try:
        event = json.loads(Path(_variable("GITHUB_EVENT_PATH")).read_bytes())
        number = int(event["pull_request"]["number"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CommentError("this workflow was not triggered by a pull request") from None
    repository = f"{base}/repos/{_variable('GITHUB_REPOSITORY')}"
    return CommentApi(
        comments=f"{repository}/issues/{number}/comments",
        comment=f"{repository}/issues/comments/{{id}}",
        update_method="PATCH",
        request=f"{repository}/pulls/{number}",
        reviews=f"{repository}/pulls/{number}/comments",
        build_review=lambda item, request: {
            "body": _suggestion_body(item, "suggestion"),
            "commit_id": request["head"]["sha"],
            "path": item.file,
            "line": item.line,
            "side": "RIGHT",
        },
        account=_github_account,
        author=("user", "login"),
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {_variable('GITHUB_TOKEN')}",
            "X-GitHub-Api-Version": "2022-11-28",
        },
    )


def gitlab() -> CommentApi:
    """Return the API of the merge request of a GitLab pipeline; raises ``CommentError``."""
    base = _variable("CI_API_V4_URL")
    project = f"{base}/projects/{_variable('CI_PROJECT_ID')}"
    request = f"{project}/merge_requests/{_variable('CI_MERGE_REQUEST_IID')}"
    return CommentApi(
        comments=f"{request}/notes",
        comment=f"{request}/notes/{{id}}",
        update_method="PUT",
        request=request,
        reviews=f"{request}/discussions",
        build_review=lambda item, described: {
            "body": _suggestion_body(item, "suggestion:-0+0"),
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
        account=lambda client: _checked(client.get(f"{base}/user"))["username"],
        author=("author", "username"),
        headers={"PRIVATE-TOKEN": _variable("GITLAB_TOKEN")},
    )


def _github_account(client: httpx.Client) -> Any:
    """Return the name of the token's account, which REST does not tell a workflow's token."""
    address = os.environ.get("GITHUB_GRAPHQL_URL", "https://api.github.com/graphql")
    answer = _checked(client.post(address, json={"query": "query { viewer { login } }"}))
    return answer["data"]["viewer"]["login"]


def _checked(answer: httpx.Response) -> Any:
    answer.raise_for_status()
    return answer.json()


HOSTS: dict[str, Callable[[], CommentApi]] = {"github": github, "gitlab": gitlab}


def find_suggestions(results: Sequence[CheckResult]) -> Iterator[Suggestion]:
    """Yield the first fix of each finding that changes a single line, as code hosts count lines."""
    for finding in (finding for result in results for finding in result.findings):
        fix = finding.fixes[0] if finding.fixes else None
        if fix is None or not fix.edits:
            continue
        try:
            text = read_bytes(finding.file, root_of(finding.file)).decode()
            after = apply_edits(text, fix.edits)
        except (MalformedPlan, ValueError):  # the file is another one by now
            continue
        first, last = min(edit.start for edit in fix.edits), max(edit.end for edit in fix.edits)
        if "\n" in text[first:last]:
            continue
        start = text.rfind("\n", 0, first) + 1
        line = after[start:].partition("\n")[0].removesuffix("\r")
        number = text.count("\n", 0, start) + 1
        yield Suggestion(repository_path(finding.file), number, line, fix.description)


def _suggestion_body(item: Suggestion, block: str) -> str:
    fence = "`" * (3 + item.text.count("`"))
    return f"{item.why[0].upper()}{item.why[1:]}.\n\n{fence}{block}\n{item.text}\n{fence}"


def post(
    host: str,
    body: str,
    transport: httpx.BaseTransport | None = None,
    suggested: Sequence[Suggestion] = (),
) -> None:
    """Post ``body``, or replace the comment of an earlier run, and suggest changes.

    Lines that the request does not change get no suggestion. Raises ``CommentError``.
    """
    api = HOSTS[host]()
    text = (
        body
        if len(body) <= MAX_COMMENT_LENGTH
        else f"{body[:MAX_COMMENT_LENGTH]}\n\nThe comment was truncated."
    )
    try:
        with httpx.Client(
            headers=api.headers, timeout=TIMEOUT_SECONDS, transport=transport
        ) as client:
            account = str(api.account(client))
            number = next(
                (
                    int(comment["id"])
                    for comment in _list_comments(client, api.comments)
                    if str(comment.get("body", "")).startswith(MARKER)
                    and _author_of(comment, api) == account
                ),
                None,
            )
            if number is None:
                answer = client.post(api.comments, json={"body": text})
            else:
                url = api.comment.format(id=number)
                answer = client.request(api.update_method, url, json={"body": text})
            answer.raise_for_status()
            if suggested:
                _post_suggestions(client, api, suggested, account)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise CommentError(f"{host} answered {status}; check the token's permissions") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise CommentError(f"{host} did not answer: {type(error).__name__}") from None


def _author_of(comment: dict[str, Any], api: CommentApi) -> Any:
    author, name = api.author
    described = comment.get(author)
    return described.get(name) if isinstance(described, dict) else None


def _post_suggestions(
    client: httpx.Client, api: CommentApi, suggested: Sequence[Suggestion], account: str
) -> None:
    described = _checked(client.get(api.request))
    # Review comments are single on GitHub, and notes of discussions on GitLab.
    notes = (n for item in _list_comments(client, api.reviews) for n in item.get("notes", [item]))
    earlier = {
        (
            note.get("body"),
            position.get("new_path", note.get("path")),
            position.get("new_line", note.get("line")),
        )
        for note in notes
        if _author_of(note, api) == account
        for position in [note["position"] if isinstance(note.get("position"), dict) else {}]
    }
    for suggestion in suggested:
        document = api.build_review(suggestion, described)
        if (document["body"], suggestion.file, suggestion.line) not in earlier:
            answer = client.post(api.reviews, json=document)
            if answer.status_code not in (400, 422):  # not a line of the request's changes
                answer.raise_for_status()


def _list_comments(client: httpx.Client, address: str) -> Iterator[dict[str, Any]]:
    """Yield all comments at a URL, page by page."""
    for page in range(1, MAX_PAGES + 1):
        params = {"per_page": PAGE_SIZE, "page": page}
        comments: Any = _checked(client.get(address, params=params))
        if not isinstance(comments, list) or not all(isinstance(c, dict) for c in comments):
            raise ValueError("not a list of comments")
        yield from comments
        if len(comments) < PAGE_SIZE:
            return


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value or any(character in value for character in "\r\n"):
        raise CommentError(f"{name} is not set")
    return value
