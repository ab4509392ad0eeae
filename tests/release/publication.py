"""A release on this machine: signed, pushed and uploaded, to stand-ins for what it would reach.

    python -m tests.release.publication        (make try-release)

A clone of the commit gets the settings that only its owner knows, a key that signs, and a bare
repository as its origin. There ``make release`` builds, checks and pushes the signed tag; the
tag verifies, the checksums hold, and the packages are uploaded to an index on this machine, from
which they are downloaded again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from affidavit import __version__
from tests.support.answering import answering
from tests.support.building import ROOT
from tests.support.free_ports import free_port

TOOLS = ROOT / ".venv-examine" / "bin"
URLS = """
[project.urls]
Source = "https://source.example"
Security = "https://source.example/security"
"""


def main() -> None:
    """Release into the stand-ins; ends with the first step that fails."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        clone = _clone(where)
        _run(["make", "release"], clone)
        tag = f"v{__version__}"
        _run(["git", "tag", "--verify", tag], clone)
        pushed = _run(["git", "ls-remote", "--tags", "origin", tag], clone)
        if not pushed:
            raise SystemExit(f"{tag} is not in the origin")
        dist = clone / "dist"
        for line in (dist / "SHA256SUMS").read_text().splitlines():
            digest, name = line.split()
            (file,) = dist.rglob(name)
            _run(["sha256sum", "--check"], file.parent, f"{digest}  {name}\n")
        _upload(dist / "packages", where)
    sys.stdout.write(f"{tag} is signed, pushed, uploaded and downloaded, all on this machine\n")


def _clone(where: Path) -> Path:
    """A clone of HEAD, ready to be released, whose origin is a bare repository beside it."""
    clone, origin, key = where / "clone", where / "origin.git", where / "key"
    _run(["git", "clone", "--quiet", str(ROOT), str(clone)], where)
    _run(["git", "init", "--quiet", "--bare", str(origin)], where)
    _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], where)
    (where / "signers").write_text(f"me@example {Path(f'{key}.pub').read_text()}")
    for name, value in {
        "remote.origin.url": str(origin),
        "user.name": "me",
        "user.email": "me@example",
        "gpg.format": "ssh",
        "user.signingKey": str(key),
        "gpg.ssh.allowedSignersFile": str(where / "signers"),
    }.items():
        _run(["git", "config", name, value], clone)
    for name in (".venv", ".venv-examine"):
        (clone / name).symlink_to(ROOT / name)
    # Links are no folders, which .gitignore's patterns for the environments may end in.
    (clone / ".git/info/exclude").write_text(".venv\n.venv-*\n")
    project, changelog = clone / "pyproject.toml", clone / "CHANGELOG.md"
    if "[project.urls]" not in project.read_text():
        project.write_text(
            project.read_text().replace("\n[project.scripts]", URLS + "\n[project.scripts]")
        )
    changelog.write_text(re.sub(r"\(unreleased\)", "(2000-01-01)", changelog.read_text()))
    _run(["git", "commit", "--quiet", "--allow-empty", "--all", "--message", "ready"], clone)
    for name in ("requirements.lock", "pyproject.toml"):
        os.utime(clone / name, (0, 0))  # older than the environments, which stay as they are
    return clone


def _upload(packages: Path, where: Path) -> None:
    """``twine upload`` to an index on this machine, and ``pip download`` from it."""
    (where / "index").mkdir()
    port = free_port()
    options = ["--port", str(port), "--interface", "127.0.0.1", "--disable-fallback"]
    options += ["--passwords", ".", "--authenticate", "."]
    index = subprocess.Popen(
        [TOOLS / "pypi-server", "run", *options, str(where / "index")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        answering(url)
        files = [str(path) for path in packages.iterdir()]
        upload = [str(TOOLS / "twine"), "upload", "--repository-url", url, "--non-interactive"]
        _run([*upload, "--username", "", "--password", "", *files], where)
        wanted = f"affidavit=={__version__}"
        for kind in (["--only-binary", ":all:"], ["--no-binary", ":all:", "--no-build-isolation"]):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind]
            _run([*command, "--index-url", f"{url}/simple", "--dest", "got", wanted], where)
        got = {path.name: path.read_bytes() for path in (where / "got").iterdir()}
        if got != {path.name: path.read_bytes() for path in packages.iterdir()}:
            raise SystemExit(f"downloaded: {sorted(got)}, not what was uploaded")
    finally:
        index.terminate()
        index.wait(timeout=60)


def _run(command: list[str], where: Path, given: str = "") -> str:
    """Its standard output; ends this process, with all that was said, if it fails."""
    done = subprocess.run(
        command, cwd=where, input=given, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
