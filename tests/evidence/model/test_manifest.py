"""The manifest equals that of the package ``model-signing``, for hostile folders too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from model_signing import hashing, verifying

from affidavit.evidence import (
    SIGNATURE_FILE,
    BadModel,
    manifest_of,
)
from affidavit.evidence.model.manifest import require_portable
from affidavit.plan import printable
from tests.evidence.model.conftest import WEIGHTS, Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Names whose order by characters is not that by parts, and what git keeps."""
    result = tmp_path / "model"
    for name in ("sub-a/a", "sub/a", "sub/deep/b", "sub.a", "é f", "Z", ".hidden", ".git/x"):
        (result / name).parent.mkdir(parents=True, exist_ok=True)
        (result / name).write_text(name)
    (result / ".gitattributes").write_text("*.bin filter=lfs\n")
    (result / "empty").mkdir()
    return result


def test_it_is_that_of_model_signing(folder: Path) -> None:
    theirs = hashing.hash(folder)
    ours = manifest_of(folder)
    assert [(item.name, item.sha256) for item in ours.files] == [
        (item.identifier, item.digest.digest_hex) for item in theirs.resource_descriptors()
    ]


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_model_signing_verifies_a_signed_model(
    run: Run, tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    key = ec.generate_private_key(curve)
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pub").write_bytes(pem)
    folder = run.signed(tmp_path / "model", key)

    def verify() -> None:
        configured = verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "key.pub")
        configured.verify(folder, folder / SIGNATURE_FILE)

    verify()
    (folder / WEIGHTS).write_bytes(b"others")
    with pytest.raises(ValueError, match=WEIGHTS):
        verify()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda path: path.symlink_to("/etc/hostname"), "link"),
        (lambda path: path.symlink_to(path.parent), "loop"),
        (lambda path: path.symlink_to("Z"), "inside"),
        (lambda path: path.symlink_to("nowhere"), "dangling"),
        (os.mkfifo, "pipe"),
    ],
)
def test_what_is_no_file_is_named_and_never_signed(folder: Path, make: object, name: str) -> None:
    make(folder / name)  # type: ignore[operator]
    manifest = manifest_of(folder)
    assert [obstacle.name for obstacle in manifest.obstacles] == [name]
    assert name not in manifest.digests()
    with pytest.raises(BadModel, match=name) as failure:
        require_portable(manifest)
    assert failure.value.code == "not_a_file"


def test_a_name_of_wrong_bytes_is_named_in_characters_that_a_terminal_shows(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/a\xff\x1b[31m\n")).write_text("x")
    (obstacle,) = manifest_of(folder).obstacles
    assert obstacle.name.isprintable()
    assert printable("plain/é") == "plain/é"


@pytest.mark.parametrize("other", ["z", "é f".encode().decode()])
def test_names_that_are_one_on_other_systems_are_not_signed(folder: Path, other: str) -> None:
    import unicodedata

    name = other if other == "z" else unicodedata.normalize("NFD", other)
    (folder / name).write_text("x")
    with pytest.raises(BadModel) as failure:
        require_portable(manifest_of(folder))
    assert failure.value.code == "ambiguous_name"


def test_a_large_file_is_read_in_pieces(folder: Path) -> None:
    """Four gibibytes of nothing on a sparse file would not fit; a mebibyte shows the digest."""
    with (folder / "large").open("wb") as stream:
        stream.truncate(3 << 20)
    expected = "bbd05cf6097ac9b1f89ea29d2542c1b7b67ee46848393895f5a9e43fa1f621e5"
    assert manifest_of(folder).digests()["large"] == expected


def test_a_folder_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(BadModel) as failure:
        manifest_of(folder / "Z")
    assert failure.value.code == "no_folder"
