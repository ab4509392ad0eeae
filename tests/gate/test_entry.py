"""As a process: every exit code is reached, and only a verdict exits with 0 or 1.

Whatever happens to the streams, to the encoding and to the arguments, no command ends in a
traceback, and none says "certified" or "blocked" for another reason than a plan.
"""

from __future__ import annotations

import io
import json
import locale
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.main import get_command

from affidavit.evidence.model import manifest
from affidavit.gate import entry, invocation
from affidavit.gate.cli import COMMANDS, app
from affidavit.gate.exit_codes import Exit
from affidavit.trust import locked as locked_file
from tests.support.random_seeds import seeded

Make = Callable[..., dict[str, Any]]
BLOCKED = {"target": {"epsilon": 0.1, "delta": 1e-5}}
ENCODINGS = ("utf-8", "cp1252", "ascii", "latin-1", "cp437", "shift_jis", "gb18030", "koi8-r")


@dataclass(frozen=True)
class Ended:
    """What one command left behind."""

    code: int
    out: bytes
    err: bytes


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run one command in this process, with streams of its own in the named encoding."""

    def invoke(*arguments: str, encoding: str = "utf-8") -> Ended:
        streams = {name: io.BytesIO() for name in ("stdout", "stderr")}
        for name, raw in streams.items():
            monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding, write_through=True))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[]"), "utf-8"))
        code = entry.run(lambda: entry._command(arguments))
        out, err = (raw.getvalue() for raw in streams.values())
        return Ended(code, out, err)

    return invoke


@pytest.fixture
def files(document: Make, save: Any) -> dict[str, str]:
    return {
        "certified": save(document(), "modèle-ε-日本.json"),
        "blocked": save(document(**BLOCKED), "weak.json"),
        "malformed": save("version: one\n", "bad.yaml"),
    }


def process(*arguments: str, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "affidavit", *arguments],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        check=False,
        timeout=300,
    )


@pytest.mark.ordinary("check-*", "*-ascii")
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("command", ["check", "certify", "curve"])
def test_no_encoding_changes_the_verdict(
    inside: Callable[..., Ended], files: dict[str, str], encoding: str, command: str
) -> None:
    for name, code in (("certified", 0), ("blocked", 1), ("malformed", 2)):
        ended = inside(command, files[name], encoding=encoding)
        assert ended.code == code
        ended.out.decode(encoding)
        assert b"Traceback" not in ended.err


@pytest.mark.by_turns
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("arguments", [("certify", "--json"), ("check", "--format", "sarif")])
def test_what_programs_read_is_utf_8_everywhere(
    inside: Callable[..., Ended], files: dict[str, str], encoding: str, arguments: Sequence[str]
) -> None:
    ended = inside(*arguments, files["certified"], encoding=encoding)
    assert ended.code == 0
    assert ended.out == inside(*arguments, files["certified"]).out
    assert json.loads(ended.out.decode("utf-8"))


def test_a_report_declares_the_encoding_that_it_has(
    inside: Callable[..., Ended], files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locale, "getpreferredencoding", lambda *_: "cp1252")
    monkeypatch.setattr(locale, "getencoding", lambda: "cp1252")
    ended = inside("check", "--format", "junit", files["certified"], encoding="cp1252")
    assert "ε-日本" in "".join(
        ElementTree.fromstring(ended.out).find(".//testcase").attrib.values()
    )  # type: ignore[union-attr]


@pytest.mark.ordinary("arguments0")
@pytest.mark.parametrize("arguments", [("--help",), ("certify", "--json"), ("check",)])
def test_a_full_device_decides_nothing(files: dict[str, str], arguments: Sequence[str]) -> None:
    plans = [] if arguments == ("--help",) else [files["certified"]]
    with open("/dev/full", "wb") as full:
        ended = process(*arguments, *plans, stdout=full)
    assert ended.returncode == Exit.FAULT
    assert ended.stderr.startswith(b"affidavit: failed, nothing was decided: OSError")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.ordinary("arguments0", "arguments1")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("batch",),
        ("audit", "verify", "--help"),
        ("worker", "--server", "nonsense"),
        *(
            pytest.param(words, marks=pytest.mark.soak)
            for words in (("check", "--help"), ("worker", "--help"), ("train", "nowhere.json"))
        ),
    ],
)
def test_a_closed_pipe_decides_nothing(files: dict[str, str], arguments: Sequence[str]) -> None:
    plans = [files["certified"]] if arguments == ("batch",) else []
    reader, writer = os.pipe()
    os.close(reader)
    ended = process(*arguments, *plans, stdout=writer, stderr=writer)
    os.close(writer)
    assert ended.returncode == Exit.UNDECIDED


@pytest.mark.ordinary("blocked-1")
@pytest.mark.parametrize(("name", "code"), [("certified", 0), ("blocked", 1), ("malformed", 2)])
def test_the_exit_code_alone_is_enough(files: dict[str, str], name: str, code: int) -> None:
    command = f'exec "{sys.executable}" -m affidavit check "{files[name]}" >&- 2>&- <&-'
    assert subprocess.run(["sh", "-c", command], check=False, timeout=300).returncode == code


def test_a_folder_that_cannot_be_used_is_told(
    inside: Callable[..., Ended], files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", files["certified"])
    monkeypatch.setenv("AFFIDAVIT_CACHE", files["certified"])
    for command in ("keys new", "keys list", "certify", "check", "curve"):
        plans = () if command.startswith("keys") else (files["certified"],)
        ended = inside(*command.split(), *plans)
        assert ended.code in (Exit.CERTIFIED, Exit.USAGE), command
        assert b"Traceback" not in ended.err


def test_a_user_without_a_home_checks_and_verifies(
    inside: Callable[..., Ended],
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    bundle = str(tmp_path / "bundle.json")
    assert inside("keys", "new").code == 0
    assert inside("certify", files["certified"], "--out", bundle).code == 0
    (key,) = (tmp_path / "home" / "keys").glob("*.json")
    for name in ("AFFIDAVIT_HOME", "AFFIDAVIT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["of a container"])
    assert inside("check", files["certified"]).code == Exit.CERTIFIED
    assert inside("keys", "list").code == Exit.CERTIFIED
    assert inside("keys", "new").code == Exit.USAGE
    assert inside("verify", bundle, "--keys", str(key)).code == Exit.CERTIFIED


@pytest.mark.parametrize(
    "arguments", [("certify",), ("check",), ("policy", "check"), ("keys", "add"), ("compare", "-")]
)
def test_a_device_without_an_end_is_refused(inside: Any, arguments: Sequence[str]) -> None:
    assert inside(*arguments, "/dev/zero").code == Exit.USAGE
    assert inside("verify", "bundle.json", "--keys", "/dev/zero").code in (1, 2)
    assert len(inside(*arguments, "a" * 100_000).err) < 5000


def test_a_fault_has_a_code_and_a_line_of_its_own(
    inside: Callable[..., Ended], files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for fault in (RuntimeError("first\nsecond"), RecursionError(), MemoryError(), SystemExit("no")):

        def broken(*_: Any, fault: BaseException = fault, **__: Any) -> None:
            raise fault

        monkeypatch.setattr("affidavit.gate.certify.load_plan", broken)
        ended = inside("certify", files["certified"])
        assert ended.code == Exit.FAULT
        (line,) = ended.err.decode().splitlines()
        assert type(fault).__name__ in line
        assert "test_entry.py" in line


@pytest.mark.soak
def test_an_interrupted_command_decides_nothing() -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "affidavit", "check", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Whatever runs in the background of a shell inherits that the signal is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert running.stdin is not None
    running.stdin.write(b"#" * 2**17)  # more than a pipe holds: it returns when the command reads
    running.stdin.flush()
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=300)
    assert running.returncode == Exit.INTERRUPTED
    assert err == b""


def test_a_fault_of_another_program_is_no_verdict() -> None:
    code = (
        "import sys, affidavit.service.settings as s; "
        "s.Settings.from_environment = staticmethod(lambda: 1 / 0); "
        "from affidavit.gate import entry; "
        "sys.exit(entry.run(lambda: entry._command(['audit', 'verify'])))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode == Exit.FAULT
    assert b"ZeroDivisionError" in ended.stderr
    assert b"Traceback" not in ended.stderr


# ---- another system


def test_without_what_posix_alone_has(
    inside: Any, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    locked: list[int] = []
    windows = SimpleNamespace(LK_LOCK=1, locking=lambda *arguments: locked.append(arguments[1]))
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    for module, name in ((os, "fchmod"), (os, "O_DIRECTORY"), (signal, "SIGALRM")):
        monkeypatch.delattr(module, name)
    monkeypatch.setattr(manifest, "OPEN_FLAGS", dict.fromkeys(manifest.OPEN_FLAGS, 0))
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    bundle = str(tmp_path / "bundle.json")
    assert inside("keys", "new").code == 0
    assert inside("certify", files["certified"], "--out", bundle).code == 0
    assert inside("verify", bundle, "--plan", files["certified"]).code == 0
    with locked_file(tmp_path / "seen.json"):
        assert locked == [windows.LK_LOCK]
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_bytes(b"1\r\n")
    assert manifest.manifest_of(model).digests() == {"weights": sha256(b"1\r\n").hexdigest()}
    (model / "link").symlink_to(model / "weights")
    with pytest.raises(OSError, match="link"):
        manifest.hash_file(model / "link")


# ---- random argument lists


VERDICTS = ("certify", "check", "batch", "curve", "diagnose", "compare", "strategy", "advise")
SLOW = ("advise",)
"""Commands that search for seconds, on whatever plan."""


def options_of(command: Any) -> list[str]:
    own = [option for item in command.params for option in (*item.opts, *item.secondary_opts)]
    below = [command.get_command(None, name) for name in getattr(command, "commands", {})]
    return [*own, *getattr(command, "commands", {}), *(o for sub in below for o in options_of(sub))]


def vocabulary(files: dict[str, str]) -> dict[str, list[str]]:
    root: Any = get_command(app)
    names = [name for name in COMMANDS if name not in SLOW]
    options = {name: options_of(root.get_command(None, name)) for name in names}
    values = [*files.values(), "-", "", "nowhere.json", ".", "0", "-1", "1e400", "nan", "8"]
    values += ["rdp", "fourier", "json", "http://127.0.0.1:1", "ε", "\udc80", "--", "a" * 300]
    values += ["--help", "--version", "--json", "[red]", "%s", "poisson", "out.json=", "sarif=x"]
    return {name: [*options[name], *values] for name in names} | {"": [*names, *values]}


def judged(arguments: Sequence[str], ended: Ended, files: dict[str, str]) -> None:
    """Exit codes 0 and 1 of a command that gives verdicts need a plan that deserves them."""
    text = f"{arguments}: {ended}"
    assert ended.code in (0, 1, 2, 3), text
    assert b"Traceback" not in ended.err, text
    told = b"Usage:" in ended.out or ended.out.startswith(b"0.")
    command = next((word for word in arguments if not word.startswith("-")), "")
    if command in VERDICTS and not told:
        # The folder has both plans, of which --fix makes two that are certified.
        good, any_plan = {files["certified"], "."}, {files["certified"], files["blocked"], "."}
        assert ended.code != 0 or good & set(arguments), text
        assert ended.code != 1 or any_plan & set(arguments), text


def try_arguments(count: int, inside: Any, files: dict[str, str], patch: Any, folder: Path) -> None:
    patch.setattr(invocation, "run_program", lambda *_: 0)  # which might serve, or train
    for name in ("RECONNECT_SECONDS", "FIRST_RETRY_SECONDS"):
        patch.setattr(f"affidavit.client.calls.{name}", 0)
    patch.chdir(folder)
    words = vocabulary(files)
    drawn = random.Random(seeded("arguments"))
    for _ in range(count):
        name = drawn.choice(list(words))
        rest = drawn.choices(words[name], k=drawn.randrange(6))
        arguments = [name, *rest] if name else rest
        for path in files:  # --fix and --out may have changed them
            Path(files[path]).write_bytes(ORIGINAL[path])
        judged(arguments, inside(*arguments), files)


ORIGINAL: dict[str, bytes] = {}


@pytest.fixture
def originals(files: dict[str, str]) -> None:
    ORIGINAL.update({name: Path(path).read_bytes() for name, path in files.items()})


@pytest.mark.usefixtures("originals")
def test_random_arguments(
    inside: Any, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try_arguments(100, inside, files, monkeypatch, tmp_path)


@pytest.mark.soak
@pytest.mark.usefixtures("originals")
def test_ten_thousand_random_arguments(
    inside: Any, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try_arguments(10_000, inside, files, monkeypatch, tmp_path)
