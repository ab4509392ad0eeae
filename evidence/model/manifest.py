"""The manifest of a model, in the form of OpenSSF: the sha256 of every file, and a signature of it.

Files are ordered by the parts of their paths, and the root digest is the sha256 of their digests in
that order. The manifest of a folder equals that of the package ``model-signing`` with its method
``files`` and without symbolic links. Git's own files are left out, as in ``model-signing``, and so
are the signatures themselves.

A folder may contain regular files and folders. Anything else (a link, a pipe, a device, a name that
is not UTF-8) has no digest and is listed as an ``obstacle``. Nothing outside the folder is ever
opened: files are found by walking the folder, and opened without following links.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = (Path(folder) / "weights").write_bytes(b"1234")
...     manifest = manifest_of(Path(folder))
>>> [file.name for file in manifest.files], manifest.root[:8]
(['weights'], 'cfc32b61')

``model.sig`` is the manifest as the package ``model-signing`` signs it: a Sigstore bundle with a
DSSE envelope of the manifest's in-toto statement. ``model-signing`` accepts ECDSA keys on the
curves P-256, P-384 and P-521, and no Ed25519, so that this signature needs its own key:

    openssl ecparam -name prime256v1 -genkey -noout -out model-key.pem
    model_signing verify key FOLDER --signature FOLDER/model.sig --public_key model-key.pub

Affidavit's own statement lists ``model.sig`` among its files, so that ``affidavit verify-model``
detects a changed one without its key.

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
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, HashAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from affidavit.plan import CodedError, MalformedPlan, canonical_json, load_json
from affidavit.plan.terminal_escapes import printable
from affidavit.trust import KeyFailure
from affidavit.trust.dsse import (
    PAYLOAD_TYPE,
    Envelope,
    EnvelopeSignature,
    in_toto,
    pre_authentication_encoding,
)
from affidavit.trust.key_store import require_private

OPENSSF_TYPE = "https://model_signing/signature/v1.0"
"""The predicate type of the statements of ``model-signing``."""
IGNORED = (".git", ".gitattributes", ".github", ".gitignore")
"""The names that ``model-signing`` leaves out of every manifest."""
MAX_FILES = 100_000
MAX_DEPTH = 64
"""The most levels of folders; paths stay short enough for every system."""
OPEN_FLAGS = {name: getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")}
"""The flags with which a file is opened; each system has some of them."""


class BadModel(CodedError):
    """The model folder cannot be signed or read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFile:
    """One file: its path from the model's folder, with ``/``, and its sha256 in hexadecimal."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle:
    """An entry of the folder without a digest, and the reason; ``name`` is printable."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The files of a model in their order, and the entries of its folder that are not files."""

    files: tuple[ModelFile, ...]
    obstacles: tuple[Obstacle, ...] = ()

    @property
    def root(self) -> str:
        """The sha256 of all digests in order, in hexadecimal; it identifies the whole model."""
        digests = b"".join(bytes.fromhex(item.sha256) for item in self.files)
        return hashlib.sha256(digests).hexdigest()

    def digests(self) -> dict[str, str]:
        """Return the digest of each file by its name."""
        return {item.name: item.sha256 for item in self.files}

    def without(self, name: str) -> Manifest:
        """Return the manifest without the file ``name``."""
        return replace(self, files=tuple(item for item in self.files if item.name != name))

    def as_openssf(self, model: str, ignored: Iterable[str]) -> dict[str, Any]:
        """Return the ``model-signing`` statement of this manifest; ``model`` is informative."""
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
    """Return the manifest of ``folder``, without the paths ``ignored``.

    Raises ``BadModel`` if it is not a folder or has too many files.
    """
    files: list[ModelFile] = []
    obstacles: list[Obstacle] = []
    for name, entry in _walk(folder, {*IGNORED, *ignored}):
        reason = _find_obstacle(name, entry)
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
    """Raise ``BadModel`` unless every system can store these files under distinct names."""
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
    """Return the sha256 of a regular file, in hexadecimal; raises ``OSError``."""
    with os.fdopen(_open(path), "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_model_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most ``max_bytes`` bytes; raises ``OSError``, ``BadModel``."""
    with os.fdopen(_open(path), "rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise BadModel(
            "too_large",
            f"{printable(path.name)} is larger than {max_bytes} bytes.",
            "It is not what Affidavit writes there; fetch the model again.",
        )
    return content


def _open(path: Path) -> int:
    """Open a regular file without following links or blocking on a pipe."""
    if not OPEN_FLAGS["O_NOFOLLOW"] and path.is_symlink():
        raise OSError(0, "it is a link")
    descriptor = os.open(path, os.O_RDONLY | sum(OPEN_FLAGS.values()))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file")
    return descriptor


def _walk(folder: Path, ignored: set[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the entries below ``folder`` that are not folders, with their relative paths."""
    if not folder.is_dir():
        raise BadModel("no_folder", f"{folder} is not a folder.", "Give the model's folder.")
    pending: list[tuple[Path, str, int]] = [(folder, "", 0)]
    while pending:
        current, prefix, depth = pending.pop()
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    name = prefix + entry.name
                    if name in ignored:
                        continue
                    if entry.is_dir(follow_symlinks=False) and depth < MAX_DEPTH:
                        pending.append((Path(entry.path), f"{name}/", depth + 1))
                    else:
                        yield name, entry
        except OSError as error:
            raise BadModel(
                "unreadable", f"{printable(str(current))} cannot be read: {error.strerror}.",
                "Make it readable, or remove it.",
            ) from None  # fmt: skip


def _find_obstacle(name: str, entry: os.DirEntry[str]) -> str | None:
    """Return the reason why an entry has no digest, or None for a regular file."""
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
"""The hash for the signatures of each curve."""


def read_ec_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a PEM private key on a curve of ``model-signing``; raises ``KeyFailure``."""
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
    """Return the content of ``model.sig``; ``ignored`` are the paths left out of the manifest."""
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
    """Return the sha256 of each file in a ``model.sig``, whose signature is not verified.

    Raises ``BadModel`` if it is malformed.
    """
    try:
        envelope = load_json(content, MAX_BYTES).data["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        statement = load_json(payload, MAX_BYTES).data
        if statement["predicateType"] != OPENSSF_TYPE:
            raise ValueError("another predicate")
        resources = statement["predicate"]["resources"]
        digests = {
            item["name"]: item["digest"] for item in resources if item["algorithm"] == "sha256"
        }
        if len(digests) != len(resources):
            raise ValueError("another digest, or a file that is listed twice")
        return digests
    except (MalformedPlan, KeyError, TypeError, ValueError):
        raise BadModel(
            "bad_model_signature",
            f"{SIGNATURE_FILE} is not a signature of model-signing over files and their sha256.",
            "Sign the model again with --openssf-key, or remove the file before signing.",
        ) from None
