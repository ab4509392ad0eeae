"""``batch``: one result a line, in order, as soon as it is known; a bad line stops nothing."""

from __future__ import annotations

import io
import json
import os
import resource
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from affidavit.assessment import Assessment, certify
from affidavit.gate import batch, plan_io
from affidavit.gate.plan_io import poll_lines
from affidavit.plan import Plan
from tests.support.polling import TIMEOUT_SECONDS

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def lines(document: Make) -> list[bytes]:
    """Plans with ever more steps, and bad lines among them."""
    plans = [json.dumps(document(steps=steps)).encode() for steps in range(1, 8)]
    weak = json.dumps(document(target={"epsilon": 0.01, "delta": 1e-5})).encode()
    return [*plans[:3], b"", b"not json", *plans[3:5], weak, b'{"version": 1e400}', *plans[5:]]


def results(output: str) -> list[dict[str, Any]]:
    """One document a line."""
    return [json.loads(line) for line in output.splitlines()]


def test_results_stand_where_their_lines_do(lines: list[bytes], save: Any, run: Any) -> None:
    result = run("batch", save(b"\n".join(lines), "plans.jsonl"), "--jobs", "1")
    outcome = results(result.stdout)
    assert result.exit_code == 2
    assert len(outcome) == len(lines)
    for line, entry in zip(lines, outcome, strict=True):
        try:
            steps = json.loads(line)["steps"]
        except (ValueError, KeyError):
            assert (entry["verdict"], entry["plan_digest"]) == ("refused", None)
            assert entry["reasons"][0]["code"] in {"empty", "syntax", "number_out_of_range"}
        else:
            assert entry["sampling"]["steps"] == steps
    assert [item["verdict"] for item in outcome].count("under_noised") == 1


def test_a_batch_line_is_what_certify_says_of_the_plan(document: Make, save: Any, run: Any) -> None:
    path = save(document())
    (alone,) = results(run("certify", path, "--json", "--second-opinion").stdout)
    (line,) = results(run("batch", path, "--jobs", "1", "--second-opinion").stdout)
    assert line == alone
    (quick,) = results(run("batch", path, "--jobs", "1").stdout)
    assert quick == {**alone, "accountants": alone["accountants"][:1]}


@pytest.mark.parametrize(
    ("kinds", "code"), [("gg", 0), ("gw", 1), ("gb", 2), ("wb", 2), ("", 2), ("g\n", 2)]
)
def test_the_exit_code_is_the_worst_of_the_lines(
    document: Make, save: Any, run: Any, kinds: str, code: int
) -> None:
    texts = {
        "g": json.dumps(document()),
        "w": json.dumps(document(target={"epsilon": 0.01, "delta": 1e-5})),
        "b": "{}",
        "\n": "",
    }
    content = "".join(texts[kind] + "\n" for kind in kinds)
    result = run("batch", save(content, "plans.jsonl"), "--jobs", "1")
    assert result.exit_code == code
    assert len(result.stdout.splitlines()) == len(kinds)


def test_a_fault_of_ours_is_one_lines_answer_and_stops_nothing(
    document: Make, save: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def certify_or_fail(plan: Plan, **options: Any) -> Assessment:
        if plan.phases[0].steps == 2:
            raise TypeError("a fault")
        return certify(plan, **options)

    monkeypatch.setattr(batch.assessment, "certify", certify_or_fail)
    content = "\n".join(json.dumps(document(steps=steps)) for steps in (1, 2, 3))
    result = run("batch", save(content, "plans.jsonl"), "--jobs", "1")
    first, failed, last = results(result.stdout)
    assert result.exit_code == 3
    assert [first["verdict"], last["verdict"]] == ["certified", "certified"]
    assert (failed["verdict"], failed["plan_digest"]) == ("undecided", None)
    assert [item["code"] for item in failed["reasons"]] == ["internal_error"]
    assert "a fault" in failed["reasons"][0]["message"]


def test_an_empty_file_checks_nothing(save: Any, run: Any) -> None:
    result = run("batch", save("", "plans.jsonl"))
    assert result.exit_code == 2
    assert "nothing was checked" in result.stderr
    assert run("batch", "missing.jsonl").exit_code == 2
    assert run("batch", save(""), "--jobs", "0").exit_code == 2


def test_a_file_that_cannot_be_read_to_its_end_is_bad_input(run: Any) -> None:
    result = run("batch", "/proc/self/mem")  # opens, and fails at the first read
    assert result.exit_code == 2
    assert "/proc/self/mem" in result.stderr


def test_an_engine_is_the_only_one_asked(document: Make, save: Any, run: Any) -> None:
    outcome = run("batch", save(document()), "--jobs", "1", "--engine", "rdp", "--second-opinion")
    (result,) = results(outcome.stdout)
    assert [opinion["name"] for opinion in result["accountants"]] == ["rdp"]


def test_two_processes_answer_as_one_does(
    lines: list[bytes], save: Any, run: Any, affidavit: Any
) -> None:
    path = save(b"\n".join(lines) + b"\n", "plans.jsonl")
    one = run("batch", path, "--jobs", "1")
    two = affidavit("batch", path, "--jobs", "2")
    assert (two.returncode, two.stdout) == (one.exit_code, one.stdout)
    assert len(results(one.stdout)) == len(lines)
    assert one.stderr == two.stderr == ""


@pytest.fixture(params=["1", "2"])
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A batch that reads from this test and writes to it."""
    with subprocess.Popen(
        [sys.executable, "-m", "affidavit", "batch", "-", "--jobs", request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
    ) as result:
        yield result
        result.kill()


def next_line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line of its output, which must come while its input stays open."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 30)[0], "no answer came"
    return process.stdout.readline()


@pytest.mark.ordinary("1")
def test_an_answer_comes_before_the_next_line_is_written(
    process: subprocess.Popen[bytes], document: Make
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    for steps in (3, 4):
        process.stdin.write(json.dumps(document(steps=steps)).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(next_line(process))["sampling"]["steps"] == steps
    process.stdin.close()
    assert process.stdout.read() == b""
    assert process.wait(TIMEOUT_SECONDS) == 0


@pytest.mark.soak
def test_a_reader_that_leaves_ends_it_quietly(
    process: subprocess.Popen[bytes], document: Make
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write((json.dumps(document()).encode() + b"\n") * 2)
    process.stdin.flush()
    next_line(process)
    process.stdout.close()
    try:
        process.stdin.write((json.dumps(document()).encode() + b"\n") * 50)
        process.stdin.close()
    except BrokenPipeError:
        pass
    assert process.wait(TIMEOUT_SECONDS) == 3
    assert process.stderr.read() == b""


def test_lines_are_whole_however_they_arrive(tmp_path: Path) -> None:
    content = b"one\n\n" + b"x" * 200_000 + b"\nlast without an end"
    whole = [b"one", b"", b"x" * 200_000, b"last without an end"]
    path = tmp_path / "lines"
    path.write_bytes(content)
    with path.open("rb") as stream:
        assert [line for line in poll_lines(stream) if line is not None] == whole
    in_memory = [line.rstrip(b"\n") for line in poll_lines(io.BytesIO(content)) if line]
    assert in_memory == whole


@pytest.mark.soak
def test_a_pipe_is_read_once(document: Make, affidavit: Any) -> None:
    ended = affidavit("batch", "/dev/stdin", "--jobs", "1", stdin=json.dumps(document()))
    assert ended.returncode == 0
    assert len(results(ended.stdout)) == 1


def test_a_line_without_an_end_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_io, "MAX_BYTES", 1 << 17)
    assert run("batch", "/dev/zero", "--jobs", "1").exit_code == 2


def test_one_plan_starts_no_process(
    document: Make, save: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pebble.ProcessPool", None)
    assert run("batch", save(json.dumps(document()), "one.jsonl"), "--jobs", "4").exit_code == 0
    piped = batch.certify_lines(
        [None, json.dumps(document()).encode()], jobs=4, engine=None, second_opinion=False
    )
    assert [code for _, code in piped] == [0]


def test_its_processes_tell_nobody_where_they_were_interrupted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch.forkserver, "ensure_running", lambda: os.write(2, b"Traceback"))
    assert list(batch.certify_lines([], jobs=2, engine=None, second_opinion=False)) == []
    os.write(2, b"own")
    assert capfd.readouterr().err == "own"


def test_a_moment_without_a_line_is_said() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream:
        result = poll_lines(stream)
        os.write(writer, b"be")
        assert next(result) is None
        os.write(writer, b"gun\nnext")
        assert next(result) == b"begun"
        os.close(writer)
        assert list(result) == [b"next"]


def test_an_interrupted_batch_continues_where_its_output_ends(
    lines: list[bytes], save: Any, run: Any, tmp_path: Path
) -> None:
    path, output = save(b"\n".join(lines), "plans.jsonl"), tmp_path / "results.jsonl"
    whole = run("batch", path, "--jobs", "1").stdout.encode()
    ends = [0, *(index + 1 for index, byte in enumerate(whole) if byte == 10)]
    for cut in (0, ends[1], ends[3] + 7, ends[-2] - 1, len(whole)):
        output.write_bytes(whole[:cut])
        continued = run("batch", path, "--jobs", "1", "--output", str(output))
        assert continued.exit_code == 2
        assert continued.stdout == ""
        assert output.read_bytes() == whole
    output.write_bytes(b'{"something": "else"}\n')
    refused = run("batch", path, "--output", str(output))
    assert (refused.exit_code, "not a result of affidavit batch" in refused.stderr) == (2, True)
    assert output.read_bytes() == b'{"something": "else"}\n'


def test_a_result_that_is_not_written_to_its_end_fails(save: Any, run: Any, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (99, before[1]))  # as a disk that is full
    try:
        full = run("batch", save(b"{}\n", "plans.jsonl"), "--jobs", "1", "--output", str(output))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (full.exit_code, "cannot write" in full.stderr) == (4, True)
    for place in (output / "file", tmp_path):
        none = run("batch", save(b"{}\n", "plans.jsonl"), "--jobs", "1", "--output", str(place))
        assert (none.exit_code, "cannot write" in none.stderr) == (2, True)
