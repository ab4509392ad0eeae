"""A repository that is made to hang or to exhaust the gate: its other files keep their results."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from affidavit.gate.checking import box
from affidavit.gate.checking.box import Begun, Ended, Limits, run_in_box
from affidavit.gate.checking.discovery import MAX_LIMITS, limits
from affidavit.gate.checking.formats import WRITERS
from affidavit.gate.render import frame_excerpt
from affidavit.plan import MalformedPlan, OutsideFolder, read_inside
from tests.gate.checking.test_hanging_repositories import OPTION, PLAN
from tests.support.polling import wait_until
from tests.support.processor_time import best_of_three

IN_A_BOX = True


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


# ---- the child process ---------------------------------------------------------------


def spend_in_python() -> None:
    while True:
        pass


def spend_in_c() -> None:
    pow(7, 10**9)


def fill_memory() -> None:
    held = []
    while True:
        held.append(bytes(1 << 28))  # not touched, which would take time


def nest(depth: int = 0) -> int:
    return nest(depth + 1) + 1


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("act", "told"),
    [
        (spend_in_python, "processor time"),
        (spend_in_c, "processor time"),
        (fill_memory, "512 MiB of memory"),
        (nest, "nested"),
        (crash, "ended the process"),
    ],
    ids=["python", "c", "memory", "depth", "crash"],
)
def test_a_child_that_meets_a_limit_is_ended_and_the_next_item_follows(act: Any, told: str) -> None:
    def work(done: frozenset[str]) -> Any:
        yield Limits(file_seconds=0.3, memory_mebibytes=512)
        for item in ("first", "second", "third"):
            if item not in done:
                yield Begun(item)
                if item == "second":
                    act()
                yield f"result of {item}"

    got = [item for item in run_in_box(work) if not isinstance(item, Begun)]
    first, ended, third = got
    assert (first, third) == ("result of first", "result of third")
    assert (ended.item, ended.is_over) == ("second", False)
    assert told in ended.why


def test_no_more_is_spent_than_the_whole_may() -> None:
    def work(done: frozenset[str]) -> Any:
        yield Limits(file_seconds=0.3, total_seconds=0.7)
        for item in range(20):
            if str(item) not in done:
                yield Begun(str(item))
                spend_in_python()

    before = os.times()
    got = [item for item in run_in_box(work) if isinstance(item, Ended)]
    after = os.times()
    *within, last = (item.is_over for item in got)
    assert last
    assert len(within) < 3  # two, or one if the parent had spent a part
    assert not any(within)
    assert after.children_user - before.children_user < 1.7


@pytest.mark.parametrize("items", [60, 1])
def test_what_this_process_spends_on_the_results_counts_too(items: int, tmp_path: Path) -> None:
    """Of many items, but not of the many results of one, which the child has told before."""
    told = tmp_path / "told"

    def work(done: frozenset[str]) -> Any:
        yield Limits(file_seconds=0.3, total_seconds=0.4)
        for item in range(items):
            if str(item) not in done:
                yield Begun(str(item))
                for _ in range(60 // items):
                    yield bytes(1 << (17 if items > 1 else 9))  # more than a pipe holds, or less
        told.touch()

    before, got = time.process_time(), []
    for message in run_in_box(work):
        if items == 1 and not got:
            wait_until(told.exists)
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        got.append(message)
    assert isinstance(got[-1], Ended)
    assert got[-1].is_over == (items > 1)
    assert time.process_time() - before < 0.4 + 1


def test_an_error_in_the_child_is_raised_here() -> None:
    def work(_: frozenset[str]) -> Any:
        yield Begun("one")
        raise FileExistsError(1, "told", "file")

    with pytest.raises(FileExistsError, match="told"):
        list(run_in_box(work))


def test_a_warning_of_a_reader_is_not_printed() -> None:
    """It would quote a line of the repository as it is, such as one that begins with ``::``."""

    def work(_: frozenset[str]) -> Iterator[int]:
        with warnings.catch_warnings(record=True) as told:
            warnings.warn("::error::", stacklevel=1)
        yield len(told)

    assert list(run_in_box(work)) == [0]


def test_a_child_whose_results_nobody_waits_for_is_ended() -> None:
    def work(_: frozenset[str]) -> Any:
        yield os.getpid()
        time.sleep(600)

    stream = run_in_box(work)
    child = next(stream)
    assert isinstance(child, int)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# ---- the settings --------------------------------------------------------------------


def test_the_limits_are_those_of_the_settings() -> None:
    assert limits() == Limits()
    text = "[tool.affidavit.limits]\nfile_seconds = 2\nmemory_mebibytes = 600\n"
    Path("pyproject.toml").write_text(text)
    assert limits() == Limits(file_seconds=2.0, memory_mebibytes=600)


@pytest.mark.parametrize(
    "line", ["file_seconds = 0", "total_seconds = true", "seconds = 3", "memory_mebibytes = nan"]
    + [f"{key} = {most + 1}" for key, most in MAX_LIMITS.items()],
)  # fmt: skip
def test_settings_that_are_no_limits_are_refused(checked: Any, line: str) -> None:
    Path("pyproject.toml").write_text(f"[tool.affidavit.limits]\n{line}\n")
    with pytest.raises(MalformedPlan):
        limits()
    Path("plan.yaml").write_text(PLAN)
    code, document = checked("plan.yaml")
    assert (code, document["plans"][0]["findings"][0]["rule"]) == (2, "wrong_limit")


def fail() -> None:
    raise KeyError("of the check itself")


@pytest.mark.ordinary("spend_in_c-*-0.8123-3", "fail-*-0.2-1")
@pytest.mark.parametrize(("noise", "code"), [("0.8123", 3), ("0.2", 1)])
@pytest.mark.parametrize(("act", "rule"), [(spend_in_c, "limit_reached"), (fail, "internal_error")])
def test_a_file_at_its_deadline_or_at_a_fault_leaves_the_others_their_results(
    checked: Any, monkeypatch: pytest.MonkeyPatch, noise: str, code: int, act: Any, rule: str
) -> None:
    for name in "abc":
        Path(f"{name}.yaml").write_text(PLAN.replace("0.8123", noise))
    real = box.Limits

    def read(candidate: Any) -> Any:
        if candidate.file == "b.yaml":
            act()
        return original(candidate)

    from affidavit.gate.checking import repository_check

    original = repository_check.read_sources
    monkeypatch.setattr(repository_check, "limits", lambda: real(file_seconds=2.0))
    monkeypatch.setattr(repository_check, "read_sources", read)
    result, document = checked(".")
    assert result == code
    rules = {
        plan["file"]: [item["rule"] for item in plan["findings"] if item["blocks"]]
        for plan in document["plans"]
    }
    assert list(rules) == ["a.yaml", "b.yaml", "c.yaml"]
    assert rules["b.yaml"] == [rule]
    assert rules["a.yaml"] == rules["c.yaml"]


# ---- what lies outside ---------------------------------------------------------------


@pytest.fixture
def secret(here: Path) -> Path:
    """A plan outside of the repository, with a name that must not be told."""
    outside = here.parent / "outside"
    outside.mkdir()
    (outside / "plan.yaml").write_text(PLAN.replace("all", "geheim"))
    return outside


@pytest.mark.ordinary("*-.", "chain-*")
@pytest.mark.parametrize("asked", [".", "plans", "*.yaml", "**/*.yaml"])
@pytest.mark.parametrize("form", ["file", "folder", "parent", "chain", "proc"])
def test_links_out_of_a_folder_are_neither_read_nor_quoted(
    run: Any, here: Path, secret: Path, form: str, asked: str
) -> None:
    Path("plans").mkdir()
    for place in (here, here / "plans"):
        (place / "fine.yaml").write_text(PLAN)
        match form:
            case "file":
                (place / "link.yaml").symlink_to(secret / "plan.yaml")
            case "folder":
                (place / "link").symlink_to(secret)
            case "parent":
                (place / "link").symlink_to("../..")
            case "chain":
                (place / "one.yaml").symlink_to("two.yaml")
                (place / "two.yaml").symlink_to(secret / "plan.yaml")
            case "proc":
                (place / "link.yaml").symlink_to("/proc/self/environ")
    result = run("check", asked, "--format", "json")
    assert result.exit_code == 0
    assert "geheim" not in result.output
    assert "plan.yaml" not in result.stdout


@pytest.mark.parametrize("named", ["link.yaml", "away", "away/plan.yaml", "./a/../link.yaml"])
def test_a_name_in_the_repository_that_leads_out_is_refused(
    run: Any, secret: Path, named: str
) -> None:
    Path("a").mkdir()
    Path("link.yaml").symlink_to(secret / "plan.yaml")
    Path("away").symlink_to(secret)
    result = run("check", named, "--fix", "--format", "json")
    assert result.exit_code == 2
    assert "outside_repository" in result.stdout
    assert "geheim" not in result.output


def test_init_reads_no_script_that_leads_out(run: Any, secret: Path) -> None:
    (secret / "train.py").write_text("geheim = (\n")
    Path("link.py").symlink_to(secret / "train.py")
    result = run("init", "link.py")
    assert result.exit_code == 2
    assert "leads out" in result.output
    assert "geheim" not in result.output


def test_a_file_elsewhere_is_read_if_it_is_named(run: Any, secret: Path) -> None:
    for named in ("../outside/plan.yaml", "../outside", str(secret / "*.yaml")):
        assert run("check", named).exit_code == 0


@pytest.mark.parametrize("form", ["file", "folder", "for good"])
def test_a_file_that_is_replaced_while_it_is_read_is_not_returned(
    here: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    Path("plans").mkdir()
    Path("plans/plan.yaml").write_text(PLAN)
    replaced = Path("plans" if form == "folder" else "plans/plan.yaml")
    target = secret if form == "folder" else secret / "plan.yaml"
    real = os.open

    def swap(path: Any, *rest: Any) -> int:
        """Let the opening meet a link, in whose place the file may be again right after it."""
        replaced.rename("kept")
        replaced.symlink_to(target)
        opened = real(path, *rest)
        if form != "for good":
            replaced.unlink()
            Path("kept").rename(replaced)
        return opened

    assert b"all" in read_inside("plans/plan.yaml", here, 1 << 20)
    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(OutsideFolder):
        read_inside("plans/plan.yaml", here, 1 << 20)


@pytest.mark.by_turns
@pytest.mark.parametrize("pattern", ["**/*.yaml", "*/*/*/*/*/*/*/*/*/*/*.yaml", "**/**/**/*.yaml"])
@pytest.mark.parametrize("target", [".", "..", "loop"])
def test_links_to_folders_above_do_not_multiply_the_work(
    checked: Any, pattern: str, target: str
) -> None:
    folder = Path("a/b/c/d/e/f/g/h/i/j")
    folder.mkdir(parents=True)
    (folder / "plan.yaml").write_text(PLAN)
    for name in ("x", "y", "z"):
        Path(name).symlink_to(target if target != "loop" else name)
        Path("a", name).symlink_to(target if target != "loop" else name)
    Path("pyproject.toml").write_text(f"[tool.affidavit]\nplans = ['{pattern}']\n")
    (code, document), seconds = best_of_three(
        checked, 2.0, lambda: os.times().children_user + os.times().user
    )
    assert (code, len(document["plans"])) == (0, 1)
    assert seconds < 2.0


@pytest.mark.soak
def test_deep_folders_and_long_chains_of_links_leave_the_others_their_results(
    checked: Any,
) -> None:
    depth = 1_100  # more than Python recurses
    for number in range(1, depth):
        os.mkdir("/".join("d" * number))
    for number in range(depth):
        os.symlink(f"link{number + 1}", f"link{number}")
    os.symlink("link0", "link.yaml")
    Path("fine.yaml").write_text(PLAN)
    try:
        answers = [checked(".")[1], checked("*.yaml")[1]]
    finally:
        os.removedirs("/".join("d" * (depth - 1)))
    told = [{plan["file"]: plan["verdict"] for plan in answer["plans"]} for answer in answers]
    fine = {"fine.yaml": "certified"}
    assert told == [{**fine, "link.yaml": "refused"}, fine]


# ---- names that are bytes, and what is no file ---------------------------------------


def test_a_name_of_any_bytes_is_checked_and_told(run: Any, here: Path) -> None:
    odd = (b"\xff.yaml", b"a\n\x1b[2J.yaml", b"::error::\xed\xa0\x80 ##[error]x.yaml")
    for name in (*odd, "\x9b2J\u202e.yaml".encode()):
        (here / os.fsdecode(name)).write_text(PLAN.replace("epsilon: 9", "epsilon: 1"))
    (here / "fine.yaml").write_text(PLAN)
    reports = [f"--report={kind}={kind}.report" for kind in WRITERS]
    done = run("check", ".", *reports)
    assert done.exit_code == 1
    assert done.stdout.count("certified") == 1
    assert done.stderr.count("under_noised") >= 4
    assert "\x1b" not in done.output
    assert not re.search(r"^::|##\[", done.output, re.M)  # a command to the host of a pipeline
    for kind in WRITERS:
        text = Path(f"{kind}.report").read_text("utf-8")
        assert text.replace("\n", "").isprintable()
        assert not re.search(r"^::(?!error file=)", text, re.M)
        if kind in ("json", "sarif", "gitlab", "badge"):
            assert json.loads(text)
    assert len(json.loads(Path("json.report").read_text())["plans"]) == 5


def test_pipes_and_sockets_are_skipped_with_a_note(run: Any) -> None:
    os.mkfifo("pipe.yaml")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.yaml")
        Path("fine.yaml").write_text(PLAN)
        for asked in (".", "*.yaml"):
            result = run("check", asked)
            assert result.exit_code == 0
            assert [name in result.stderr for name in ("pipe.yaml", "socket.yaml")] == [True, True]


SEARCHED = (
    "pyproject.toml",
    "pkg/__init__.py",
    "run.sh",
    "n.ipynb",
    ".vscode/launch.json",
)
"""What is read beside a script, or for all."""


@pytest.mark.parametrize("form", ["pipe", "device", "folder", "loop"])
def test_what_is_no_file_beside_a_script_does_not_block(checked: Any, form: str) -> None:
    for name in SEARCHED:
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        match form:
            case "pipe":
                os.mkfifo(path)
            case "device":
                path.symlink_to("/dev/zero")
            case "folder":
                path.mkdir()
            case "loop":
                path.symlink_to(path.name)
    Path("train.py").write_text("import pkg\nfrom pkg import x\n" + OPTION)
    Path("plan.yaml").write_text(PLAN)
    code, document = checked("plan.yaml", "train.py")
    assert code == 0
    assert [plan["verdict"] for plan in document["plans"]] == ["certified", "certified"]


def test_a_pipe_that_the_settings_name_does_not_block(checked: Any) -> None:
    os.mkfifo("pipe.yaml")
    Path("pyproject.toml").write_text("[tool.affidavit]\nplans = ['pipe.yaml']\n")
    code, document = checked()
    assert (code, document["plans"][0]["findings"][0]["rule"]) == (2, "unreadable")


@pytest.mark.parametrize("name", ["-", "a\\u0000b.yaml", "\\u0000*"])
def test_a_setting_that_names_no_file_is_refused(run: Any, name: str) -> None:
    Path("pyproject.toml").write_text(f'[tool.affidavit]\nplans = ["{name}"]\n')
    result = run("check", "--format", "json", stdin=PLAN.encode())
    assert result.exit_code == 2
    assert "nothing_checked" in result.stdout


def test_an_excerpt_reads_only_the_part_of_a_line_that_it_shows() -> None:
    text = '{"epochs": 1}, ' * 50_000

    def excerpts() -> list[str]:
        return [frame_excerpt(text, 1, 15 * number + 1, "x")[1] for number in range(1, 300)]

    shown, seconds = best_of_three(excerpts, 2.0, time.process_time)
    assert all('{"epochs": 1}, {"epochs": 1}' in line for line in shown)
    assert seconds < 2.0
