"""A file is complete or unchanged, with its mode, and its name is on the disk."""

from __future__ import annotations

import errno
import os
import random
import stat
from pathlib import Path

import pytest

from affidavit.trust import fsync_directory, write_atomically
from tests.support.power_loss import PowerCut, disk

WHOLE = (b"old content", b"what is new")


def test_a_power_cut_leaves_it_whole_and_once_it_is_written_leaves_it_so(tmp_path: Path) -> None:
    for seed in range(50):
        drawn, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        write_atomically(folder / "file", b"old content")
        data = False
        with disk(folder, drawn.randint(1, 3), drawn) as failing:
            try:
                write_atomically(folder / "file", b"what is new")
                data = True
                failing.cut()
            except PowerCut:
                pass
        assert failing.left["file"] in WHOLE[data:]


@pytest.mark.parametrize("mode", [0o600, 0o644])
@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_it_has_its_mode_whatever_the_mask_and_what_was_there(
    tmp_path: Path, mode: int, mask: int
) -> None:
    path = tmp_path / "file"
    path.touch(0o666)
    before = os.umask(mask)
    try:
        write_atomically(path, b"content", mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(path, b"content")
    assert os.read(reader, 99) == b"content"
    os.close(reader)
    assert [stat.S_ISFIFO(entry.stat().st_mode) for entry in tmp_path.iterdir()] == [True]


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_where_it_cannot_be_written_it_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=r"No space.*/file'"):
        write_atomically(tmp_path / "file", b"new")
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("file", b"old")]


def test_a_file_system_that_orders_names_itself_is_left_to_it_and_a_broken_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(number: int) -> None:
        def fsync(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    says(errno.EINVAL)
    fsync_directory(tmp_path)
    says(errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        fsync_directory(tmp_path)
