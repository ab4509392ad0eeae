"""Run programs as processes that are forked from one with their imports done.

Starting the service or a trainer mostly costs imports. ``python -m
tests.support.forked_processes FD MODULE…`` calls ``prepare`` of each MODULE once, and then ``main``
of one of them for each request over the socket FD, in a process of its own that may be killed. Late
imports belong in ``prepare``: the tests themselves are collected with MODULE imported. Replacements
that the other modules must not have belong in ``main``. A worker of ``forked_workers`` forks such
processes from itself before its first test (``fork_mothers``), and they import next to nothing.

A test never forks its own process: another thread of it may hold a lock, which the child would
wait for. It sends the function to a process that has no threads (``call``).
"""

from __future__ import annotations

import atexit
import base64
import copyreg
import faulthandler
import gc
import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tests.support.polling import TIMEOUT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
MOST = 1 << 16
"""Bytes of a request."""
WIDTH = 16
"""Bytes of a process id, and of an exit code, so that neither is read with the other."""


class Forked:
    """What the tests need of ``subprocess.Popen``, for a process that is no child of theirs."""

    def __init__(self, told: int) -> None:
        self.returncode: int | None = None
        self._told = told
        self.pid = int(os.read(told, WIDTH))

    def send_signal(self, sent: int) -> None:
        """Send it, unless the process is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, sent)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float) -> int:
        """The exit code; raises ``subprocess.TimeoutExpired``."""
        result = self._ended(timeout)
        if result is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return result

    def _ended(self, seconds: float) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], seconds)[0]:
            self.returncode = int(os.read(self._told, WIDTH))
            os.close(self._told)
        return self.returncode


Process = subprocess.Popen[Any] | Forked
FAMILIES = (
    ("tests.service.forked_service", "tests.service.whole.self_killing_service"),
    (
        "tests.worker.forked_worker",
        "tests.worker.stubbed_worker",
        "tests.trainer.loop.forked_ranks",
    ),
    ("tests.guard.opacus_scenarios",),
)
"""Modules that import much the same, and whose processes are forked from one."""
CALL = "call a pickled function"
"""The first argument of a request that is not for ``main``."""


def fork(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], output: int
) -> Forked:
    """``module.main(arguments)`` in this environment, with ``output`` for all that it says."""
    request = json.dumps([module, [*arguments], {**environment}]).encode()
    assert len(request) < MOST, len(request)
    told, telling = os.pipe()
    (family,) = [family for family in FAMILIES if module in family]
    socket.send_fds(_mother(family), [request], [output, telling])
    os.close(telling)
    return Forked(told)


def call(module: str, function: Callable[[], Any]) -> Forked:
    """``function()``, which can be pickled, with what ``module`` has imported.

    It ends with 0, or with 1 and a traceback if it raises.
    """
    pickled = base64.b64encode(pickle.dumps(function)).decode()
    return fork(module, [CALL, pickled], os.environ, 2)


def _private(key: Ed25519PrivateKey) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return Ed25519PrivateKey.from_private_bytes, (key.private_bytes_raw(),)


def _public(key: Ed25519PublicKey) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return Ed25519PublicKey.from_public_bytes, (key.public_bytes_raw(),)


# The tests' keys go where their functions go.
copyreg.pickle(type(Ed25519PrivateKey.generate()), _private)
copyreg.pickle(type(Ed25519PrivateKey.generate().public_key()), _public)


FORKED: dict[tuple[str, ...], socket.socket] = {}
"""The mothers that were forked from this process."""


def fork_mothers() -> None:
    """Fork a mother for each family; called while this process has no other threads."""
    for family in FAMILIES:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            end(lambda family=family, theirs=theirs: _become_mother(family, theirs))
        theirs.close()
        FORKED[family] = ours


def _become_mother(family: tuple[str, ...], asking: socket.socket) -> None:
    """Inherit imports alone: no file, no socket, no handler."""
    os.closerange(3, asking.fileno())
    os.closerange(asking.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    faulthandler.enable()
    logging.getLogger().handlers.clear()
    for handler in filter(None, (reference() for reference in logging._handlerList)):  # type: ignore[attr-defined]
        if type(handler) is logging.StreamHandler:  # what it wrote to is pytest's
            handler.stream = sys.stderr
    with suppress(KeyboardInterrupt):  # of a terminal, which interrupts the tests too
        if asking.recv(1, socket.MSG_PEEK):  # a request, or nothing if nobody can ask any more
            _serve(family, asking)


@cache
def _mother(family: tuple[str, ...]) -> socket.socket:
    """The mother of a family's processes, which ends with who made it."""
    if family in FORKED:
        return FORKED[family]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_processes", str(theirs.fileno()), *family],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    atexit.register(_dismissed, process, ours)
    return ours


def _dismissed(process: subprocess.Popen[bytes], asking: socket.socket) -> None:
    asking.close()
    process.wait(TIMEOUT_SECONDS)


# ---- in the mother -----------------------------------------------------------------


def _serve(names: Sequence[str], asking: socket.socket) -> None:
    """A process for each request, until there is nobody left who could ask."""
    modules = {name: import_module(name) for name in names}
    for module in modules.values():
        module.prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its children tell somebody else of theirs
    gc.collect()
    gc.freeze()  # or every process would copy what it looks through for garbage
    while True:
        request, descriptors, *_ = socket.recv_fds(asking, MOST, 2)
        if not request:
            return
        if os.fork() == 0:
            asking.close()
            module, *given = json.loads(request)
            _watch(modules[module].main, *given, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(
    main: Callable[[Sequence[str]], int],
    arguments: list[str],
    environment: dict[str, str],
    output: int,
    telling: int,
) -> NoReturn:
    """Fork the process, and tell its id and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(telling)
        for entry in (1, 2):
            os.dup2(output, entry)
        os.close(output)
        os.environ.clear()
        os.environ.update(environment)
        end(lambda: _called(arguments[1]) if arguments[:1] == [CALL] else main(arguments))
    for item in (0, 1, 2, output):
        os.close(item)  # who reads what the process says waits until nobody has it
    os.write(telling, b"%*d" % (WIDTH, pid))
    _, status = os.waitpid(pid, 0)
    os.write(telling, b"%*d" % (WIDTH, os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _called(pickled: str) -> None:
    pickle.loads(base64.b64decode(pickled))()


def end(main: Callable[[], Any]) -> NoReturn:
    """End this process as an interpreter does in which ``main`` was all there was to do."""
    code = 1
    try:
        code = main() or 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        _serve(sys.argv[2:], inherited)
