"""One comment a request: posted once, replaced later, on GitHub and GitLab."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from affidavit.gate.checking import comment
from affidavit.gate.checking.finding import CheckResult, Edit, Fix, GateFinding
from affidavit.gate.checking.formats import MARKER, WRITERS
from affidavit.gate.exit_codes import Exit

GITHUB = "https://api.github.com/repos/o/r/issues"
GITLAB = "https://gitlab.example/api/v4/projects/7/merge_requests/3/notes"


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    event = tmp_path / "event.json"
    event.write_text('{"pull_request": {"number": 5}}')
    for name, value in {
        "GITHUB_EVENT_PATH": str(event),
        "GITHUB_REPOSITORY": "o/r",
        "GITHUB_TOKEN": "secret-token",
        "CI_API_V4_URL": "https://gitlab.example/api/v4",
        "CI_PROJECT_ID": "7",
        "CI_MERGE_REQUEST_IID": "3",
        "GITLAB_TOKEN": "secret-token",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("GITHUB_API_URL", "GITHUB_GRAPHQL_URL"):
        monkeypatch.delenv(name, raising=False)
    return event


def written(body: str, by: str = "bot[bot]") -> dict[str, Any]:
    """A comment as both hosts describe it."""
    return {"body": body, "user": {"login": by}, "author": {"username": by}}


def account(request: httpx.Request) -> httpx.Response | None:
    """Whose token it is, if that is what a request asks for."""
    if request.url.path == "/graphql":
        assert "viewer" in json.loads(request.content)["query"]
        return httpx.Response(200, json={"data": {"viewer": {"login": "bot[bot]"}}})
    if request.url.path.endswith("/v4/user"):
        return httpx.Response(200, json={"username": "bot[bot]"})
    return None


class Conversation:
    """A host that has some comments, and records what it is asked."""

    def __init__(self, comments: list[dict[str, Any]], status: int = 200) -> None:
        self.comments, self.status = comments, status
        self.changes: list[tuple[str, str, str]] = []
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        address = str(request.url.copy_with(query=None))
        if self.status != 200:
            return httpx.Response(self.status, json={"message": "no"})
        if (own := account(request)) is not None:
            return own
        if request.method == "GET":
            page, size = (int(request.url.params[key]) for key in ("page", "per_page"))
            listed = list(enumerate(self.comments, 100))[(page - 1) * size : page * size]
            return httpx.Response(200, json=[one | {"id": n} for n, one in listed])
        self.changes.append((request.method, address, json.loads(request.content)["body"]))
        return httpx.Response(201, json={"id": 1})


@pytest.mark.usefixtures("pipeline")
@pytest.mark.parametrize(
    ("host", "first", "later"),
    [
        ("github", ("POST", f"{GITHUB}/5/comments"), ("PATCH", f"{GITHUB}/comments/250")),
        ("gitlab", ("POST", GITLAB), ("PUT", f"{GITLAB}/250")),
    ],
)
def test_a_comment_is_posted_once_and_then_replaced(
    host: str, first: tuple[str, str], later: tuple[str, str]
) -> None:
    strangers = (written(f"{MARKER}\ncertified", "mallory"), {"body": MARKER, "user": None})
    others = [written(f"text {MARKER}")] * 148 + list(strangers)
    for comments, expected in ((others, first), ([*others, written(f"{MARKER}\nold")], later)):
        talk = Conversation(comments)
        comment.post(host, f"{MARKER}\nnew", httpx.MockTransport(talk))
        assert talk.changes == [(*expected, f"{MARKER}\nnew")]
        name, value = {
            "github": ("authorization", "Bearer secret-token"),
            "gitlab": ("private-token", "secret-token"),
        }[host]
        assert all(headers[name] == value for headers in talk.headers)


def refused(transport: httpx.BaseTransport) -> str:
    with pytest.raises(comment.CommentError) as error:
        comment.post("github", "text", transport)
    return str(error.value)


def test_what_prevents_a_comment_is_told_without_the_token(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("secret-token", request=request)

    answers: list[Callable[[httpx.Request], httpx.Response]] = [
        Conversation([], 403),
        Conversation([], 500),
        unreachable,
        lambda _: httpx.Response(200, text="<html>"),
        lambda _: httpx.Response(200, json={"message": "no list"}),
        lambda _: httpx.Response(200, json=["no comment"]),
    ]
    for answer in answers:
        assert "secret-token" not in refused(httpx.MockTransport(answer))
    pipeline.write_text('{"push": {}}')
    assert "pull request" in refused(httpx.MockTransport(Conversation([])))
    monkeypatch.setenv("GITHUB_TOKEN", "a\r\nb")
    pipeline.write_text('{"pull_request": {"number": 5}}')
    assert "GITHUB_TOKEN" in refused(httpx.MockTransport(Conversation([])))


PLAN = """\
version: 1
dataset: {name: d, size: 60000}
adjacency: add_remove
sampling: {scheme: poisson, lot_size: 600}
epochs: 10
releases:
  - {name: all, clip_norm: 1, noise_multiplier: 1.1}
optimizer: {name: dp_sgd}
target: {epsilon: 3, delta: 1.0e-5}
"""


def test_a_comment_says_which_change_moved_epsilon(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("before.yaml").write_text(PLAN)
    Path("plan.yaml").write_text(PLAN.replace("epochs: 10", "epochs: 100"))
    posted: list[tuple[str, str]] = []
    monkeypatch.setattr(comment, "post", lambda host, body, **_: posted.append((host, body)))
    result = run("check", "plan.yaml", "--diff", "before.yaml", "--comment", "gitlab")
    assert result.exit_code == 1
    ((host, body),) = posted
    assert (host, body.startswith(MARKER)) == ("gitlab", True)
    moved = body.partition("Changes that moved ε")[2]
    assert "epochs: 10.0 -> 100.0" in moved.replace("\\", "")
    assert moved.count("ε ≤") >= 2

    def fail(_host: str, _body: str, **_: Any) -> None:
        raise comment.CommentError("it is down")

    monkeypatch.setattr(comment, "post", fail)
    result = run("check", "before.yaml", "--comment", "github")
    assert (result.exit_code, "it is down" in result.stderr) == (3, True)
    assert run("check", "before.yaml", "--comment", "bitbucket").exit_code == 2


SCRIPT = """\
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
SIGMA = 0.5
loader = DataLoader(data, batch_size=600)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader,
    noise_multiplier=SIGMA, max_grad_norm=1.0)
for epoch in range(10):
    for batch in loader:
        loss(batch).backward()
        optimizer.step()
# affidavit: dataset_size=6000 adjacency=zero_out target_epsilon=1 target_delta=1e-5
"""
REQUESTED = {
    "a plan.yaml": (PLAN.replace("epsilon: 3", "epsilon: 1"), 7),
    "train.py": (f"# not\u2028lines\x0cof\x85git\n{SCRIPT}", 4),
}
"""Files with too little noise, and the line that says it."""


@pytest.mark.ordinary("a plan.yaml-gitlab", "train.py-github")
@pytest.mark.usefixtures("pipeline")
@pytest.mark.parametrize("host", ["github", "gitlab"])
@pytest.mark.parametrize("name", REQUESTED)
def test_a_fix_is_suggested_once_on_its_line(
    name: str, host: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, number = REQUESTED[name]
    Path(name).write_text(text)
    reviews: list[dict[str, Any]] = []
    answer_of_review = [201]

    def talk(request: httpx.Request) -> httpx.Response:
        address = request.url.path
        if (own := account(request)) is not None:
            return own
        if request.method == "GET" and address.endswith(("/pulls/5", "/merge_requests/3")):
            shas = dict.fromkeys(("base_sha", "head_sha", "start_sha"), "a1")
            return httpx.Response(200, json={"head": {"sha": "a1"}, "diff_refs": shas})
        reviewed = address.endswith(("/pulls/5/comments", "/discussions"))
        if request.method == "GET":
            mine = [one | written(one["body"]) for one in reviews]
            listed = mine if host == "github" else [{"notes": [one]} for one in mine]
            return httpx.Response(200, json=listed if reviewed else [])
        if reviewed:
            reviews.append(json.loads(request.content))
        return httpx.Response(answer_of_review[0] if reviewed else 201, json={"id": 1})

    post = comment.post
    monkeypatch.setattr(
        comment, "post", lambda *a, **k: post(*a, transport=httpx.MockTransport(talk), **k)
    )
    for status in (201, 201, 422 if host == "github" else 400):
        answer_of_review[0] = status
        assert run("check", name, "--comment", host).exit_code == 1
        assert len(reviews) == 1
    (review,) = reviews
    place = review if host == "github" else review["position"]
    assert (place.get("path", place.get("new_path")), place.get("line", place.get("new_line"))) == (
        name,
        number,
    )
    assert {"github": place.get("commit_id"), "gitlab": place.get("head_sha")}[host] == "a1"
    block = {"github": "```suggestion\n", "gitlab": "```suggestion:-0+0\n"}[host]
    line = review["body"].partition(block)[2].partition("\n```")[0]
    lines = Path(name).read_text().split("\n")
    Path(name).write_text("\n".join([*lines[: number - 1], line, *lines[number:]]))
    assert run("check", name).exit_code == 0
    reviews.clear()
    answer_of_review[0] = 500
    Path(name).write_text("\n".join(lines))
    result = run("check", name, "--comment", host)
    assert (result.exit_code, "500" in result.stderr) == (1, True)


@pytest.mark.parametrize(("content", "number"), [(b"1", 1), (b"3", 0), (b"\xe9", 0), (None, 0)])
def test_a_file_that_is_another_one_by_now_gets_no_suggestion(
    tmp_path: Path, content: bytes | None, number: int
) -> None:
    place = {"start": 0, "end": 1, "line": 1, "column": 1, "end_line": 1, "end_column": 2}
    fix = Fix(description="d", changes=(), epsilon=1, edits=(Edit(**place, before="1", after="2"),))
    file = tmp_path / "plan.yaml"
    if content is not None:
        file.write_bytes(content)
    finding = GateFinding(file=str(file), rule="r", level="error", message="m", fixes=(fix,))
    result = CheckResult(file=str(file), name="n", exit=Exit.BLOCKED, findings=(finding,))
    assert len(list(comment.find_suggestions([result]))) == number


@pytest.mark.parametrize(
    ("form", "shown"), [("gitlab", '"path": "a b.yaml"'), ("github", "=a b.yaml,")]
)
def test_a_report_has_the_path_as_the_host_knows_it(
    form: str, shown: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a b.yaml").write_text("name: x")
    for name in ("./a b.yaml", str(tmp_path / "a b.yaml")):
        assert shown in run("check", name, "--format", form).stdout


def test_a_badge_has_the_bound_of_certified_plans_alone(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN)
    badge = json.loads(run("check", "plan.yaml", "--format", "badge").stdout)
    assert (badge["schemaVersion"], badge["color"]) == (1, "brightgreen")
    assert float(badge["message"].partition("≤")[2]) <= 3
    Path("other.yaml").write_text(PLAN.replace("epsilon: 3", "epsilon: 0.1"))
    badge = json.loads(run("check", "plan.yaml", "other.yaml", "--format", "badge").stdout)
    assert (badge["message"], badge["color"]) == ("not certified", "red")


def test_the_badge_of_a_script_has_the_sum_of_its_private_calls() -> None:
    def result(name: str, *, adds_up: bool) -> CheckResult:
        return CheckResult(file="train.py", name=name, exit=Exit.CERTIFIED, findings=(),
                           result={"epsilon": {"upper": "1.1"}}, adds_up=adds_up)  # fmt: skip

    one, two = result("train.py", adds_up=True), result("train.py#/1", adds_up=True)
    assert json.loads(WRITERS["badge"]([one, two]))["message"] == "ε ≤ 2.2"
    assert json.loads(WRITERS["badge"]([result("a", adds_up=False)]))["message"] == "ε ≤ 1.1"
