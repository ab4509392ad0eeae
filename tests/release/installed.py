"""The wheel as strangers get it: installed with hashes, and run where there is no source.

    python -m tests.release.installed        (make test-wheel)

For each Python from 3.11 on that is found here, the oldest and the newest: an environment of
its own, the locked dependencies by their hashes, the wheel of the source distribution, and
then the main job from an empty directory: keys, a certificate, its verification, the gate, and
a service whose schema is made and that says it is ready.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.answering import answering
from tests.support.building import ROOT, copy_of_the_tree
from tests.support.free_ports import free_port

EXAMPLE = ROOT / "examples" / "e2e-dp-muon-corrected.yaml"
UNDER_NOISED = ROOT / "examples" / "e2e-dp-muon-published.yaml"


def main() -> None:
    """Build once, install and try under each Python; ends with the first that fails."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        wheel = _wheel(where)
        for python in _pythons():
            _try(python, wheel, where / python.replace("/", "_"))


def _wheel(where: Path) -> Path:
    tree = copy_of_the_tree(where / "tree")
    _run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(where / "dist"), "."],
        tree,
    )
    (wheel,) = (where / "dist").glob("*.whl")
    return wheel


def _pythons() -> list[str]:
    """The oldest and the newest interpreter at hand that this project supports."""
    names = [f"python3.{minor}" for minor in range(11, 30)]
    result = [path for name in names if (path := shutil.which(name)) and _works(path)]
    return list(dict.fromkeys([result[0], result[-1]])) if result else [sys.executable]


def _works(python: str) -> bool:
    done = subprocess.run([python, "-c", "import venv, ssl"], capture_output=True, check=False)
    return done.returncode == 0


def _try(python: str, wheel: Path, where: Path) -> None:
    _run([python, "-m", "venv", str(where / "venv")], ROOT)
    bin_ = where / "venv" / "bin"
    pip = [str(bin_ / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--require-hashes", "-r", str(ROOT / "requirements-run.lock")], where)
    _run([*pip, "--no-deps", str(wheel)], where)
    empty = where / "empty"
    empty.mkdir()
    affidavit = str(bin_ / "affidavit")
    version = _run([affidavit, "--version"], empty).strip()
    _run([affidavit, "keys", "new"], empty)
    _run([affidavit, "certify", str(EXAMPLE), "--out", "bundle.json"], empty)
    _run([affidavit, "verify", "bundle.json", "--plan", str(EXAMPLE)], empty)
    _run([affidavit, "check", str(UNDER_NOISED)], empty, code=1)
    _run([affidavit, "migrate"], empty)
    _serve(affidavit, empty)
    _run([str(bin_ / "python"), "-m", "pip", "check"], empty)
    sys.stdout.write(f"{python}: {version} installs, certifies, verifies, refuses and serves\n")


def _serve(affidavit: str, where: Path) -> None:
    """The service comes up, says that it is ready, and has its pages with it."""
    port = free_port()
    command = [affidavit, "serve", "--port", str(port)]
    with subprocess.Popen(command, cwd=where, env=_environment(where)) as server:
        try:
            answering(f"http://127.0.0.1:{port}/readyz")
            answering(f"http://127.0.0.1:{port}/certificates")
        finally:
            server.terminate()


def _run(command: list[str], where: Path, code: int = 0) -> str:
    """Its standard output; ends this process, with all that was said, if it ends otherwise."""
    done = subprocess.run(
        command,
        cwd=where,
        env=_environment(where),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode != code:
        raise SystemExit(
            f"{json.dumps(command)} ended with {done.returncode}, not {code}:\n"
            f"{done.stdout}{done.stderr}"
        )
    return done.stdout


def _environment(where: Path) -> dict[str, str]:
    """This process's, with nothing of the source tree and a home of its own."""
    stored = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return stored | {
        "SOURCE_DATE_EPOCH": "1700000000",
        "AFFIDAVIT_HOME": str(where / "home"),
        "AFFIDAVIT_CACHE": str(where / "cache"),
    }


if __name__ == "__main__":
    main()
