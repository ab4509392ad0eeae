"""What a run may make a worker do: read named folders, write below its outputs, tell no record."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from affidavit.plan import explain
from affidavit.trainer.__main__ import EXIT_CODES
from affidavit.trainer.sources import FOLDERS, FileRefused, Options, load_data
from affidavit.worker.__main__ import app
from affidavit.worker.lease import Job, Refused
from affidavit.worker.trainer_process import failure_reason
from tests.support.forked_processes import fork
from tests.support.polling import TIMEOUT_SECONDS

SECRET = "hiv-positive"
RUN = "00000000-0000-4000-8000-000000000000"
OFFERED = {
    "run": RUN,
    "fence": 1,
    "secret": 64 * "0",
    "certificate": f"sha256:{'0' * 64}",
    "plan_digest": f"sha256:{'1' * 64}",
    "data": "digits:part=train",
    "model": "mlp:8",
    "output": "a/b",
    "time_limit": None,
    "granted": 0,
    "previous": None,
}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_run_that_fails_tells_no_word_of_the_data(shop: Any) -> None:
    """By way of the service every reader of runs would have it, outside of any guarantee."""
    records = shop.home / "data" / "records.csv"
    records.parent.mkdir()
    records.write_text(f"age,label\n{SECRET},0\n")
    certificate = shop.certify(4)
    for options, code in (([], "file_refused"), (["--files", str(records.parent)], "bad_source")):
        run = shop.request(certificate, data=f"csv:{records},label=label,classes=2")
        shop.worker(*options, "--run", run)
        result = shop.wait(run, "failed")
        assert result["code"] == "trainer_failed"
        assert code in result["message"]
        assert SECRET not in str(result)
        (log,) = shop.home.glob(f"runs/**/{run}-1/trainer.log")
        assert (SECRET in log.read_text()) == (code == "bad_source")


def test_every_code_of_the_trainer_has_a_meaning_and_nothing_else_is_told(tmp_path: Path) -> None:
    for code in {*EXIT_CODES, "bad_source", "file_refused", "unsupported_model", "diverged"}:
        assert "trainer" in {meaning.part for meaning in explain(code) if meaning.message}, code
    log = tmp_path / "log"
    for text, told in (
        (f"bad_source: x.csv, line 2, column b: '{SECRET}' is no finite number.\n", "bad_source"),
        (f"bad_source: {SECRET}\n{SECRET} and more\n", "bad_source"),
        (f"Traceback:\nValueError: {SECRET}\n", ""),
        (f"{SECRET}\n", ""),
        ("", ""),
    ):
        log.write_text(text)
        assert told in failure_reason(log)
        assert SECRET not in failure_reason(log)


@pytest.mark.parametrize(
    ("named", "taken"),
    [
        ("in/a.csv", True),
        ("in/../in/a.csv", True),
        ("in/deep/b.csv", True),
        ("in", True),
        ("in/none.csv", True),
        ("out.csv", False),
        ("in/../out.csv", False),
        ("in/link.csv", False),
        ("in/circle.csv", False),
        ("inside.csv", False),
        ("/proc/self/environ", False),
        ("/proc/self/root/etc/passwd", False),
    ],
)
def test_a_file_is_read_below_the_folders_that_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, taken: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in/deep").mkdir(parents=True)
    Path("out.csv").write_text("x")
    Path("in/link.csv").symlink_to("../out.csv")
    Path("in/circle.csv").symlink_to("circle.csv")
    before = FOLDERS.set((Path("in"),))
    try:
        for options in (
            Options.parse(named, "--data x"),
            Options.parse(f"words={named}", "--data x"),
        ):
            if taken:
                assert options.file(None if options.value else "words") == Path(named).resolve()
            else:
                with pytest.raises(FileRefused, match="not in a folder"):
                    options.file(None if options.value else "words")
        FOLDERS.set(())
        with pytest.raises(FileRefused):
            load_data(f"csv:{named},label=x,classes=2")
    finally:
        FOLDERS.reset(before)


def test_a_worker_takes_what_a_service_offers_and_nothing_else() -> None:
    """Its folders and its trainer's command line are made of it."""
    assert Job.read(OFFERED).model_dump() == OFFERED
    for name, values in {
        "run": ("../../x", f"{RUN}/..", f"{RUN}\n", "", None, 3),
        "output": ("/etc", "../x", "a/../b", "a//b", ".hidden", "a/", "a\n", None),
        "data": ("", " digits", "-x", "csv:a b", "csv:\0", None, ["digits"]),
        "model": ("", "--model", None),
        "fence": (0, -1, True, 1.5, "1", None),
        "granted": (-1, None, "0"),
        "previous": (0, "1", True),
        "time_limit": (0, 1.5, False),
        "certificate": ("sha256:0", None),
        "plan_digest": (f"sha256:{'1' * 65}",),
    }.items():
        for value in values:
            with pytest.raises(Refused, match=name):
                Job.read({**OFFERED, name: value})
    with pytest.raises(Refused):
        Job.read({})


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_worker_that_can_do_nothing_ends_with_a_code_that_says_so(shop: Any) -> None:
    for token, options, code, told in (
        ("affidavit_no_token", (), 2, "invalid_token"),
        (None, ("--server", "ftp://x"), 2, "--server 'ftp://x'"),
        (None, ("--server", "http://127.0.0.1:1"), 3, "cannot claim a run"),
        (None, ("--keys", "nowhere.json"), 2, "nowhere.json"),
        ("tökén", (), 2, "AFFIDAVIT_TOKEN is not valid"),
        ("sec\nret", (), 2, "AFFIDAVIT_TOKEN is not valid"),
    ):
        environment = {**os.environ, "AFFIDAVIT_HOME": str(shop.home_of("w1"))}
        environment |= {} if token is None else {"AFFIDAVIT_TOKEN": token}
        # It asks once where it waits longest from the beginning.
        provided = ["--server", shop.server.url, "--once", "--wait", "30", *options]
        provided += ["--outputs", str(shop.home)]
        said = shop.home / "said"
        with said.open("wb") as log:
            worker = fork("tests.worker.forked_worker", provided, environment, log.fileno())
            ended = worker.wait(TIMEOUT_SECONDS)
        assert (ended, told in said.read_text()) == (code, True), said.read_text()
        assert token is None or token not in said.read_text()


def test_a_worker_without_its_gpu_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # as Python ends where there is no CUDA
    ended = CliRunner().invoke(app, ["--gpu", "--once", "--server", "http://127.0.0.1:1"])
    assert ended.exit_code == 2
    assert "fewer than 1 CUDA devices" in ended.output
