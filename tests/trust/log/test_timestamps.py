"""RFC 3161 timestamps of a checkpoint, by valid and invalid authorities."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from affidavit.trust.log import BadTimestamp, verify_timestamp

CONTENT = b"a checkpoint"
NOW = datetime.now(UTC)
CONFIGURATION = """
[tsa]
default_policy = 1.2.3.4.1
digests = sha1, sha256, sha384, sha512
signer_digest = sha256
serial = serial
"""
STAMPING = ExtendedKeyUsageOID.TIME_STAMPING


@dataclass(frozen=True)
class Party:
    """A key with its certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def party(
    issuer: Party | None,
    name: str = "authority",
    *,
    usage: tuple[x509.ObjectIdentifier, ...] = (STAMPING,),
    critical: bool = True,
    days: tuple[int, int] = (-9, 9),
) -> Party:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    root = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + timedelta(days=days[0]))
        .not_valid_after(NOW + timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=root, path_length=None), critical=True)
    )
    if usage and not root:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=critical)
    signer = key if issuer is None else issuer.key
    return Party(key, builder.sign(signer, hashes.SHA256()))


def der(tag: int, content: bytes) -> bytes:
    length = len(content)
    short = bytes([length]) if length < 128 else b"\x82" + length.to_bytes(2, "big")
    return bytes([tag]) + short + content


@dataclass(frozen=True)
class Authority:
    """``openssl`` in a folder: stamps, and what it says signed by anybody."""

    home: Path
    root: Party
    own: Party

    def openssl(self, command: str) -> None:
        subprocess.run(
            ["openssl", *command.split()], cwd=self.home, check=True, capture_output=True
        )

    def write(self, name: str, of: Party) -> None:
        private = of.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (self.home / f"{name}.key").write_bytes(private)
        (self.home / f"{name}.pem").write_bytes(of.certificate.public_bytes(Encoding.PEM))

    def stamp(self, content: bytes = CONTENT, digest: str = "sha256") -> bytes:
        (self.home / "content").write_bytes(content)
        self.write("own", self.own)
        self.openssl(f"ts -query -data content -{digest} -cert -no_nonce -out query")
        reply = "ts -reply -config configuration -section tsa -queryfile query -out reply"
        self.openssl(f"{reply} -signer own.pem -inkey own.key")
        return (self.home / "reply").read_bytes()

    def signed_by(self, signer: Party, status: int = 0) -> bytes:
        """The stamp's content under the signature of ``signer``, with that status."""
        self.stamp()
        self.openssl("ts -reply -config configuration -in reply -token_out -out token")
        self.openssl("cms -verify -noverify -binary -inform DER -in token -out stamped")
        self.write("other", signer)
        kind = "-econtent_type 1.2.840.113549.1.9.16.1.4"
        sign = f"cms -sign -cades -binary -nodetach -outform DER {kind} -in stamped -out signed"
        self.openssl(f"{sign} -signer other.pem -inkey other.key -md sha256")
        answer = der(0x30, der(0x02, bytes([status])))
        return der(0x30, answer + (self.home / "signed").read_bytes())

    def verified(self, reply: bytes) -> datetime:
        return verify_timestamp(CONTENT, reply, self.root.certificate.public_bytes(Encoding.PEM))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: Any) -> Authority:
    home = tmp_path_factory.mktemp("authority")
    (home / "configuration").write_text(CONFIGURATION)
    root = party(None, "root")
    return Authority(home, root, party(root))


def is_now(at: datetime) -> bool:
    return abs(at - datetime.now(UTC)) < timedelta(minutes=5)


@pytest.mark.parametrize("digest", ["sha256", "sha384", "sha512"])
def test_a_stamp_of_these_bytes_by_an_authority_below_the_root_counts(
    authority: Authority, digest: str
) -> None:
    assert is_now(authority.verified(authority.stamp(digest=digest)))


def test_another_authority_below_the_root_counts(authority: Authority) -> None:
    assert is_now(authority.verified(authority.signed_by(party(authority.root))))


@pytest.mark.parametrize("digest", ["sha1", "sha256"])
def test_a_weak_hash_or_another_object_does_not_count(authority: Authority, digest: str) -> None:
    content = CONTENT if digest == "sha1" else b"another checkpoint"
    with pytest.raises(BadTimestamp):
        authority.verified(authority.stamp(content, digest))


SIGNERS: dict[str, Callable[[Authority], Party]] = {
    "expired when it stamped": lambda a: party(a.root, days=(-9, -1)),
    "not valid yet": lambda a: party(a.root, days=(1, 9)),
    "for code": lambda a: party(a.root, usage=(ExtendedKeyUsageOID.CODE_SIGNING,)),
    "for servers": lambda a: party(a.root, usage=(ExtendedKeyUsageOID.SERVER_AUTH,)),
    "for more than time": lambda a: party(
        a.root, usage=(STAMPING, ExtendedKeyUsageOID.CODE_SIGNING)
    ),
    "for nothing": lambda a: party(a.root, usage=()),
    "not critically for time": lambda a: party(a.root, critical=False),
    "below another root of that name": lambda _: party(party(None, "root")),
    "below an authority": lambda a: party(a.own),
    "of its own": lambda _: party(None),
    "the root itself": lambda a: a.root,
}


@pytest.mark.parametrize("signer", SIGNERS.values(), ids=SIGNERS.keys())
def test_who_is_no_authority_stamps_nothing(
    authority: Authority, signer: Callable[[Authority], Party]
) -> None:
    reply = authority.signed_by(signer(authority))
    with pytest.raises(BadTimestamp):
        authority.verified(reply)


@pytest.mark.parametrize("status", [1, 2, 77])
def test_what_was_not_granted_is_no_stamp(authority: Authority, status: int) -> None:
    with pytest.raises(BadTimestamp):
        authority.verified(authority.signed_by(party(authority.root), status))


def test_no_part_of_a_stamp_is_one_and_no_changed_bit_moves_its_time(authority: Authority) -> None:
    whole = authority.stamp()
    at = authority.verified(whole)
    for length in range(0, len(whole), 7):
        with pytest.raises(BadTimestamp):
            authority.verified(whole[:length])
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        try:
            assert authority.verified(bytes(changed)) == at
        except BadTimestamp:
            continue
