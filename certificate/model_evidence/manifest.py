"""The manifest of a model, in the form of OpenSSF: the sha256 of every file, and a signature of it.

Files are ordered by the parts of their paths, and the root digest is the sha256 of their digests
in that order, so that the manifest of a folder is the one that the package ``model-signing``
computes with its method ``files`` and without symbolic links. What git keeps in a folder is left
out, as it is there; so are the signatures themselves.

A folder may hold regular files and folders. Anything else (a link, a pipe, a device, a name that
is no UTF-8) has no digest, and is listed by its name as an ``obstacle``. Nothing outside the folder
is ever opened, whatever a manifest names: files are found by walking the folder, and opened
without following links.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = (Path(folder) / "weights").write_bytes(b"1234")
...     manifest = manifest_of(Path(folder))
>>> [file.name for file in manifest.files], manifest.root[:8]
(['weights'], 'cfc32b61')

``model.sig`` is the manifest as the package ``model-signing`` signs it, a Sigstore bundle around a
DSSE envelope around the manifest's in-toto statement. ``model-signing`` takes ECDSA keys on the
curves P-256, P-384 and P-521, and no Ed25519, so that this signature has a key of its own beside
the one that signs certificates:

    openssl ecparam -name prime256v1 -genkey -noout -out model-key.pem
    model_signing verify key FOLDER --signature FOLDER/model.sig --public_key model-key.pub

Affidavit's own statement lists ``model.sig`` among its files, so that a changed one is noticed by
``affidavit verify-model`` too, which does not need its key.

References: OpenSSF Model Signing specification v1.0; Sigstore bundle v0.3; DSSE v1; model_signing
1.1.1, ``manifest.py`` and ``sign_ec_key.py``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, HashAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from affidavit.certificate.dsse import (
    PAYLOAD_TYPE,
    Envelope,
    EnvelopeSignature,
    in_toto,
    pre_authentication_encoding,
)
from affidavit.certificate.keys.key import KeyFailure
from affidavit.certificate.keys.key_store import require_private
from affidavit.plan import CodedError, MalformedPlan, canonical_json, load_json

OPENSSF_TYPE = "https://model_signing/signature/v1.0"
"""The predicate type of a statement that ``model-signing`` writes and reads."""
IGNORED = (".git", ".gitattributes", ".github", ".gitignore")
"""What ``model-signing`` leaves out of every manifest."""
MAX_FILES = 100_000
MAX_DEPTH = 64
"""Levels of folders: paths below stay openable on every system."""
FLAGS = {name: getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")}
"""How a file is opened; each system has some of them."""


class BadModel(CodedError):
    """A model folder that cannot be signed or read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFile:
    """One file: its path from the model's folder, with ``/``, and its sha256 in hexadecimal."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle:
    """Something in the folder that has no digest, and why; ``name`` is printable."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The files of a model in their order, and what in its folder is no file."""

    files: tuple[ModelFile, ...]
    obstacles: tuple[Obstacle, ...] = field(default=())

    @property
    def root(self) -> str:
        """The sha256 of all digests in order, in hexadecimal: one name for the whole model."""
        return hashlib.sha256(
            b"".join(bytes.fromhex(item.sha256) for item in self.files)
        ).hexdigest()

    def digests(self) -> dict[str, str]:
        """The digest of each file by its name."""
        return {item.name: item.sha256 for item in self.files}

    def without(self, name: str) -> Manifest:
        """The manifest of the folder without the file ``name``."""
        return replace(self, files=tuple(item for item in self.files if item.name != name))

    def as_openssf(self, model: str, ignored: Iterable[str]) -> dict[str, Any]:
        """The statement of ``model-signing`` about this manifest; ``model`` is only informative."""
        predicate = {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [*IGNORED, *ignored],
            },
            "resources": [
                {"name": item.name, "algorithm": "sha256", "digest": item.sha256}
                for item in self.files
            ],
        }
        return in_toto({model: self.root}, OPENSSF_TYPE, predicate)


def manifest_of(folder: Path, ignored: Iterable[str] = ()) -> Manifest:
    """The manifest of what is in ``folder``, without the paths ``ignored``.

    Raises ``BadModel`` for a folder that is none, or has too many files.
    """
    left_out = {*IGNORED, *ignored}
    files: list[ModelFile] = []
    obstacles: list[Obstacle] = []
    for name, entry in _walked(folder, left_out):
        reason = _reason(name, entry)
        try:
            if reason is None:
                files.append(ModelFile(name=name, sha256=hash_file(Path(entry.path))))
        except OSError as error:
            reason = f"it cannot be read: {error.strerror}"
        if reason is not None:
            obstacles.append(Obstacle(name=printable(name), reason=reason))
        if len(files) + len(obstacles) > MAX_FILES:
            raise BadModel(
                "too_many_files",
                f"{folder} holds more than {MAX_FILES} files.",
                "Put data sets and caches elsewhere; a model's folder holds the model.",
            )
    return Manifest(
        files=tuple(sorted(files, key=lambda item: PurePosixPath(item.name).parts)),
        obstacles=tuple(sorted(obstacles, key=lambda item: item.name)),
    )


def require_portable(manifest: Manifest) -> None:
    """Raise ``BadModel`` unless every system can hold these files, each under its own name."""
    for obstacle in manifest.obstacles:
        raise BadModel(
            "not_a_file",
            f"{obstacle.name}: {obstacle.reason}.",
            "Copy its target into the folder, or remove it.",
        )
    names: dict[str, str] = {}
    for item in manifest.files:
        other = names.setdefault(unicodedata.normalize("NFC", item.name).casefold(), item.name)
        if other != item.name:
            raise BadModel(
                "ambiguous_name",
                f"{printable(other)} and {printable(item.name)} are the same file on some systems.",
                "Rename one of them.",
            )


def hash_file(path: Path) -> str:
    """The sha256 of a regular file, in hexadecimal, in constant memory; raises ``OSError``."""
    with os.fdopen(_opened(path), "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_model_file(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes; raises ``OSError``, ``BadModel``."""
    with os.fdopen(_opened(path), "rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise BadModel(
            "too_large",
            f"{printable(path.name)} is larger than {most} bytes.",
            "It is not what Affidavit writes there; fetch the model again.",
        )
    return content


LONGEST_LINE = 2000
"""Characters of a text from elsewhere that are shown."""


def printable(name: str) -> str:
    """``name`` on one line, whatever is in it: control characters and wrong bytes are escaped.

    A long one is cut in the middle.

    >>> printable("a\\nb\\udcff")
    'a\\\\nb\\\\udcff'
    """
    half = LONGEST_LINE // 2
    shown = name if len(name) <= LONGEST_LINE else f"{name[:half]}...{name[-half:]}"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in shown
    )


def _opened(path: Path) -> int:
    """A descriptor of the file itself: no link is followed, and a pipe does not block."""
    if not FLAGS["O_NOFOLLOW"] and path.is_symlink():
        raise OSError(0, "it is a link")
    descriptor = os.open(path, os.O_RDONLY | sum(FLAGS.values()))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file")
    return descriptor


def _walked(folder: Path, left_out: set[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below ``folder`` that is not a folder itself, with its path from there."""
    if not folder.is_dir():
        raise BadModel("no_folder", f"{folder} is not a folder.", "Give the model's folder.")
    waiting: list[tuple[Path, str, int]] = [(folder, "", 0)]
    while waiting:
        place, prefix, depth = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    name = prefix + entry.name
                    if name in left_out:
                        continue
                    inside = entry.is_dir(follow_symlinks=False)
                    if not inside or depth == MAX_DEPTH:
                        yield name, entry
                    else:
                        waiting.append((Path(entry.path), f"{name}/", depth + 1))
        except OSError as error:
            raise BadModel(
                "unreadable", f"{printable(str(place))} cannot be read: {error.strerror}.",
                "Make it readable, or remove it.",
            ) from None  # fmt: skip


def _reason(name: str, entry: os.DirEntry[str]) -> str | None:
    """Why an entry has no digest; None for a regular file."""
    if entry.is_symlink():
        return "it is a symbolic link"
    if entry.is_dir(follow_symlinks=False):
        return f"it is more than {MAX_DEPTH} folders deep"
    if not entry.is_file(follow_symlinks=False):
        return "it is not a regular file"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    return None


SIGNATURE_FILE = "model.sig"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MAX_BYTES = 64 * 1024 * 1024
HASHES: dict[str, HashAlgorithm] = {
    "secp256r1": SHA256(),
    "secp384r1": SHA384(),
    "secp521r1": SHA512(),
}
"""The hash that belongs to a curve's signatures."""


def read_ec_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key of a PEM file, on a curve that ``model-signing`` takes.

    Raises ``KeyFailure``.
    """
    try:
        require_private(path)
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise KeyFailure(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError):
        raise KeyFailure(f"{path} is not an unencrypted private key in PEM.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in HASHES:
        raise KeyFailure(
            f"{path}: model-signing takes keys on the curves P-256, P-384 and P-521; make one with "
            "openssl ecparam -name prime256v1 -genkey -noout."
        )
    return key


def sign_openssf(
    manifest: Manifest, model: str, ignored: tuple[str, ...], key: ec.EllipticCurvePrivateKey
) -> bytes:
    """The bytes of ``model.sig``; ``ignored`` are paths that the manifest leaves out."""
    payload = canonical_json(manifest.as_openssf(model, ignored))
    signed = pre_authentication_encoding(PAYLOAD_TYPE, payload)
    signature = key.sign(signed, ec.ECDSA(HASHES[key.curve.name]))
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signatures = (EnvelopeSignature(key_id="", signature=signature),)
    envelope = Envelope(payload_type=PAYLOAD_TYPE, payload=payload, signatures=signatures)
    hint = hashlib.sha256(pem).hexdigest()
    bundle = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": envelope.as_document(),
    }
    return json.dumps(bundle).encode()


def openssf_digests(content: bytes) -> dict[str, str]:
    """The files that a ``model.sig`` lists, with their sha256; its signature is not checked.

    Raises ``BadModel`` for anything that is not such a file.
    """
    try:
        envelope = load_json(content, MAX_BYTES).data["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        return _resources(load_json(payload, MAX_BYTES).data)
    except (MalformedPlan, KeyError, TypeError, ValueError):
        raise BadModel(
            "bad_model_signature",
            f"{SIGNATURE_FILE} is not a signature of model-signing over files and their sha256.",
            "Sign the model again with --openssf-key, or remove the file before signing.",
        ) from None


def _resources(statement: Any) -> dict[str, str]:
    if statement["predicateType"] != OPENSSF_TYPE:
        raise ValueError("another predicate")
    resources = statement["predicate"]["resources"]
    result = {item["name"]: item["digest"] for item in resources if item["algorithm"] == "sha256"}
    if len(result) != len(resources):
        raise ValueError("another digest, or a file that is listed twice")
    return result
