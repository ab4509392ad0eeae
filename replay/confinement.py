"""What a run may write: its own folders, and nothing else on the machine.

Two mechanisms agree. An audit hook of Python sees each file that is opened to be written, names
the line that does it, and raises ``PermissionError``. Landlock, a part of Linux 5.13 and later,
lets the kernel refuse the same to compiled code and to processes that the run starts. Connections
to other machines are refused by the hook alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from affidavit.replay.recorder import Recorder

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of Landlock's system calls, the same on all architectures."""
NO_NEW_PRIVILEGES = 38
BENEATH_PATH = 1
WRITES = {1: 0x1FF2, 2: 0x3FF2, 3: 0x7FF2}
"""Rights to write, remove, make, and from later versions to move and truncate, by version."""
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")
ONLY_BELOW = "writes only below its working folder"
WATCHED = frozenset(("open", "socket.connect", *CHANGES))


def confine_writes(recorder: Recorder, written: dict[str, str | None]) -> None:
    """Allow changes only in the two folders of a run, and note in ``written`` who writes what.

    ``written`` maps each file, relative to the job's folder, to the line that first opens it to
    write; a refused one has the name ``outside: PATH``. A run that stops has these folders, and
    those of the runs that continue it, in one folder, which the kernel allows.
    """
    lines, folder = recorder.lines, Path(recorder.job.folder).resolve()
    prefix = f"{folder}/"

    def refuse(path: str, why: str) -> None:
        written.setdefault(f"outside: {path}", lines.current())
        raise PermissionError(f"a replay {why}, so not to {path}")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WATCHED:  # most are reads of attributes
            return
        if event == "socket.connect":
            address = arguments[1]
            if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
                refuse(str(address[0]), "sends nothing to other machines")
            return
        is_open = event == "open"
        if is_open and not _writes(*arguments[1:]):
            return
        path = arguments[1 if event in ("os.rename", "os.link", "os.symlink") else 0]
        if not isinstance(path, str | bytes | os.PathLike):  # a file that is open already
            return
        full = os.path.realpath(os.fsdecode(path))
        if "__pycache__" in full:
            return
        if not f"{full}/".startswith((prefix, f"{recorder.out}/", "/dev/", "/proc/")):
            refuse(os.fsdecode(path), ONLY_BELOW)
        if is_open and full.startswith(prefix):
            written.setdefault(full.removeprefix(prefix), lines.current())

    sys.addaudithook(hook)
    own = (folder, recorder.out) if recorder.job.pause is None else (folder.parent,)
    _confine_in_kernel((*own, Path("/dev")))


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


def _confine_in_kernel(folders: Sequence[Path]) -> None:
    """Let the kernel refuse writes outside of ``folders``, where it knows Landlock."""
    if platform.system() != "Linux":
        return
    call = ctypes.CDLL(None, use_errno=True).syscall
    version = call(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    rights = WRITES[min(version, 3)]
    handled = ctypes.c_uint64(rights)
    ruleset = call(CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    for folder in folders:
        parent = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = rights.to_bytes(8, sys.byteorder) + parent.to_bytes(4, sys.byteorder)
        call(ADD_RULE, ruleset, BENEATH_PATH, rule, 0)
        os.close(parent)
    ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
