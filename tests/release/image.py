"""The image's build, tried without an engine: its first stage twice, and then what it runs.

    python -m tests.release.image        (make try-image)

The COPY and RUN lines of the Dockerfile's first stage are carried out in a folder, with that
folder in the place of ``/``: what ``.dockerignore`` lets through is copied, and every command
runs under the same shell. Doing it twice must give the same files to the byte. Then the second
stage's command migrates an empty database and serves, with everything but the home read-only
to it, and the health check's request is answered.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.answering import answering
from tests.support.building import ROOT
from tests.support.free_ports import free_port

DOCKERFILE = ROOT / "Dockerfile"


def main() -> None:
    """Build twice, compare, run; ends with the first step that fails."""
    with tempfile.TemporaryDirectory() as folder:
        root, context = Path(folder) / "root", _context(Path(folder) / "context")
        first = _build(root, context)
        shutil.rmtree(root)
        second = _build(root, context)
        differing = sorted(name for name in first | second if first.get(name) != second.get(name))
        if differing:
            raise SystemExit(f"two builds differ in {len(differing)} files: {differing[:10]}")
        sys.stdout.write(f"two builds gave the same {len(first)} files\n")
        _serve(root)


def instructions(stage: int) -> list[tuple[str, str]]:
    """(instruction, rest) of one stage of the Dockerfile, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    result = [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]
    starts = [index for index, (word, _) in enumerate(result) if word == "FROM"] + [len(result)]
    return result[starts[stage] + 1 : starts[stage + 1]]


def _context(where: Path) -> Path:
    """What ``.dockerignore`` lets an engine see, as it stands now."""
    where.mkdir()
    for line in (ROOT / ".dockerignore").read_text().split():
        if not line.startswith("!"):
            continue
        source = ROOT / line[1:]
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, where / source.name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, where / source.name)
    return where


def _build(root: Path, context: Path) -> dict[str, str]:
    """Carry out the first stage under ``root``; the digests of what the second copies."""
    source = root / "src"
    source.mkdir(parents=True)
    tools = root / "tools"
    _shell(f"{sys.executable} -m venv {tools}", source, tools)
    for word, rest in instructions(0):
        if word == "COPY":
            *names, _ = rest.split()
            for name in names:
                _copy(context / name, source / name)
        elif word == "RUN":
            _shell(re.sub(r"(?<=[\s='])/(?=opt|dist)", f"{root}/", f" {rest}"), source, tools)
    stored = root / "opt" / "affidavit"
    return {
        path.relative_to(stored).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(stored.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def _copy(source: Path, to: Path) -> None:
    if not source.exists():
        raise SystemExit(f"the Dockerfile copies {source.name}, which .dockerignore keeps out")
    if source.is_dir():
        shutil.copytree(source, to, symlinks=True)
    else:
        shutil.copy(source, to)


def _shell(command: str, where: Path, tools: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PATH": f"{tools}/bin:{os.environ['PATH']}", "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=where, env=environment, capture_output=True, text=True,
        check=False, timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{command}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")


def _serve(root: Path) -> None:
    """The second stage's CMD and health check, on a free port, with a home of its own."""
    words = dict(instructions(1))
    command, port = _last_argument(words["CMD"]), free_port()
    home = root / "home"
    home.mkdir()
    environment = {
        "PATH": f"{root}/opt/affidavit/bin:{os.environ['PATH']}",
        "AFFIDAVIT_HOME": str(home),
        "HOME": str(home),
    }
    # On loopback: as in the image, for others than itself, it would first want a token.
    command = command.replace("--host 0.0.0.0", "").replace("8000", str(port))
    with subprocess.Popen(["/bin/sh", "-c", command], cwd=home, env=environment) as server:
        try:
            answering(f"http://127.0.0.1:{port}/readyz")
            check = _last_argument(words["HEALTHCHECK"].partition("CMD ")[2])
            subprocess.run(
                ["python", "-c", check.replace("8000", str(port))], env=environment, check=True
            )
        finally:
            server.terminate()
    sys.stdout.write("it migrates, serves and is healthy\n")


def _last_argument(exec_form: str) -> str:
    arguments: list[str] = re.findall(r'"((?:[^"\\]|\\.)*)"', exec_form)
    return arguments[-1]


if __name__ == "__main__":
    main()
