"""An OpenID provider for tests: real keys, a real HTTP server, and tokens good and bad."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://id.example.org/"
AUDIENCE = "affidavit"

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
SHORT_RSA = rsa.generate_private_key(public_exponent=65537, key_size=1024)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
STRANGER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def jwk(private: Any, kid: str, alg: str, **more: Any) -> dict[str, Any]:
    """The public half of a key, as a JWKS document has it."""
    kind = jwt.get_algorithm_by_name(alg)
    record: dict[str, Any] = kind.to_jwk(private.public_key(), as_dict=True)
    return {**record, "kid": kid, "alg": alg, "use": "sig", **more}


GOOD_KEYS = [jwk(RSA, "rsa", "RS256"), jwk(EC, "ec", "ES256"), jwk(ED, "ed", "EdDSA")]


def document(*keys: Any) -> bytes:
    """A JWKS document."""
    return json.dumps({"keys": list(keys)}).encode()


def claims(**changes: Any) -> dict[str, Any]:
    """The claims of a good token, with some changed, or left out where they are None."""
    now = int(time.time())
    usual = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "00u1-alice",
        "iat": now,
        "nbf": now,
        "exp": now + 6 * 3600,  # cases are made when tests are collected, long before some run
        "groups": ["ml-team"],
    }
    return {name: value for name, value in (usual | changes).items() if value is not None}


def token(
    private: Any = RSA,
    alg: str = "RS256",
    kid: str | None = "rsa",
    *,
    header: Any = None,
    **changes: Any,
) -> str:
    """A signed token; ``header`` adds to its header."""
    headers = {**({} if kid is None else {"kid": kid}), **(header or {})}
    # The library's own encoder refuses to write claims that no provider should.
    raw = json.dumps(claims(**changes)).encode()
    return jwt.api_jws.encode(raw, private, alg, headers=headers)


@dataclass
class ProviderServer:
    """What the server answers at any path, and what it was asked."""

    url: str = ""
    body: bytes = field(default_factory=lambda: document(*GOOD_KEYS))
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    closing: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)


class Quiet:
    """A handler that writes no log; stands before the class of the standard library."""

    def log_message(self, *_given: Any) -> None:
        """Say nothing."""


@contextmanager
def answering_by(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on a free loopback port, which answers by ``handler``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def provider_server() -> Iterator[ProviderServer]:
    """A provider on a free loopback port."""
    state = ProviderServer()

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            state.closing.wait(state.delay)
            self.send_response(state.status)
            for name, value in state.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(state.body)))
            self.end_headers()
            with suppress(ConnectionError):  # it was cut off
                self.wfile.write(state.body)

    with answering_by(Handler) as address:
        state.url = f"{address}/jwks"
        try:
            yield state
        finally:
            state.closing.set()
