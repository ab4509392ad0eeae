"""Signing in with the OpenID provider: the authorization code flow, with PKCE, state and nonce.

A browser is sent to the provider with a ``state`` (the answer is for this browser), a
``nonce`` (the token is for this sign-in) and the hash of a secret (only who has the secret
gets a token for the code). It comes back with a code, which is exchanged for an ID token
server to server. That token is checked as a bearer token is, but for this client as its
audience, and its nonce has to be ours.

References: OpenID Connect Core 1.0, 3.1; RFC 7636 (PKCE, S256); RFC 9207 (``iss`` in the
answer); RFC 9700, 2.1.1 (best current practice).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx

from affidavit.service.identity.actor import Actor, AuthenticationError
from affidavit.service.identity.provider import Provider, SignInClient
from affidavit.service.identity.provider_tokens import (
    ProviderKeys,
    ProviderTokens,
    ProviderUnavailable,
    fetch,
    invalid_token,
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One sign-in on its way: what only this browser knows, and where it goes afterwards."""

    state: str
    nonce: str
    verifier: str
    next: str

    @classmethod
    def new(cls, to: str) -> Attempt:
        """A fresh one."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        return cls(state, nonce, verifier, to)

    def packed(self) -> str:
        """As text for a cookie."""
        fields = [self.state, self.nonce, self.verifier, self.next]
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()

    @classmethod
    def unpacked(cls, text: str) -> Attempt | None:
        """The attempt that ``packed`` wrote; None for anything else."""
        try:
            fields = json.loads(base64.urlsafe_b64decode(text.encode("ascii")))
        except (ValueError, RecursionError):
            return None
        whole = isinstance(fields, list) and len(fields) == 4
        return cls(*fields) if whole and all(isinstance(field, str) for field in fields) else None


class CodeFlow:
    """The flow of one client with one provider.

    Methods raise ``AuthenticationError`` and ``ProviderUnavailable``.
    """

    def __init__(
        self,
        provider: Provider,
        client: SignInClient,
        keys: ProviderKeys,
        now: Callable[[], datetime],
    ) -> None:
        self._issuer = provider.issuer
        self._client = client
        self._tokens = ProviderTokens(replace(provider, audience=client.client_id), keys, now)

    def leave(self, attempt: Attempt, back: str) -> str:
        """Where to send the browser; it comes back to ``back``."""
        challenge = hashlib.sha256(attempt.verifier.encode()).digest()
        query = urlencode(
            {
                "response_type": "code",
                "client_id": self._client.client_id,
                "redirect_uri": back,
                "scope": self._client.scope,
                "state": attempt.state,
                "nonce": attempt.nonce,
                "code_challenge": base64.urlsafe_b64encode(challenge).rstrip(b"=").decode(),
                "code_challenge_method": "S256",
            }
        )
        url = self._client.authorization_url
        return f"{url}{'&' if urlsplit(url).query else '?'}{query}"

    def arrive(
        self, attempt: Attempt | None, answered: Mapping[str, str], back: str
    ) -> tuple[Actor, ...]:
        """Who signed in, once for each of their teams. Raises ``AuthenticationError``."""
        if attempt is None or not _same(attempt.state, answered.get("state", "")):
            raise AuthenticationError(
                "sign_in_not_begun", "this sign-in did not start in this browser; sign in again."
            )
        if answered.get("iss", self._issuer) != self._issuer:
            raise invalid_token("the response came from another provider; sign in again.")
        code = answered.get("code", "")
        if not code:
            raise AuthenticationError(
                "sign_in_refused", "the provider denied the sign-in; sign in again."
            )
        token = self._exchange(code, attempt.verifier, back)
        claims = self._tokens.claims(token)
        if not _same(str(claims.get("nonce", "")), attempt.nonce):
            raise invalid_token("the token belongs to another sign-in; sign in again.")
        if claims.get("azp", self._client.client_id) != self._client.client_id:
            raise invalid_token("the token was issued to another client.")
        actors = self._tokens.actors_of(claims)
        if not actors[0].scopes:
            raise AuthenticationError(
                "no_scopes", "none of your groups may use this service; ask an administrator."
            )
        return actors

    def _exchange(self, code: str, verifier: str, back: str) -> str:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": back,
            "code_verifier": verifier,
        }
        headers = {"accept": "application/json"}
        client = self._client
        if client.client_secret:
            # RFC 6749, 2.3.1: both are written as in a form before they are joined.
            pair = f"{quote(client.client_id, safe='')}:{quote(client.client_secret, safe='')}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form["client_id"] = client.client_id
        try:
            status, content = fetch("POST", client.token_url, data=form, headers=headers)
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL):
            raise ProviderUnavailable from None
        if status in (400, 401):
            raise AuthenticationError(
                "sign_in_refused",
                "the provider does not accept the authorization code; sign in again.",
            )
        try:
            answered: Any = json.loads(content) if status == httpx.codes.OK else None
        except (ValueError, RecursionError):
            answered = None
        token = answered.get("id_token") if isinstance(answered, dict) else None
        if not isinstance(token, str):
            raise ProviderUnavailable
        return token


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
