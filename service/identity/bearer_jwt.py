"""A token of the OpenID provider: who its holder is, and what their groups may do.

Checked before anything in it counts: the signature, by a key that the provider's document
has under the token's ``kid`` and with that key's algorithm; ``iss`` and ``aud``, exactly;
``exp``, ``nbf`` and ``iat``, with a minute for clocks that differ. Keys or addresses that
a token brings along (``jwk``, ``jku``, ``x5c``, ``x5u``) are not looked at, and one that
lists extensions as critical (``crit``) is refused, for none is understood here.

The holder's name is ``sub``, which a provider never gives to somebody else; an address or
a display name can change hands. Groups that the operator's table does not list allow
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jwt

from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.identity.credentials import AuthenticationError
from affidavit.service.identity.provider import Provider
from affidavit.service.identity.provider_keys import ALGORITHMS, ProviderKeys, UnknownKey

LEEWAY_SECONDS = 60
REQUIRED = ("exp", "iat", "iss", "aud", "sub")
LONGEST_SUBJECT = 200
LONGEST_KID = 256


class ProviderTokens:
    """Tokens of one provider."""

    def __init__(self, provider: Provider, keys: ProviderKeys) -> None:
        self._provider = provider
        self._keys = keys

    def actor(self, token: str) -> Actor:
        """Who holds ``token``; raises ``AuthenticationError`` or ``ProviderUnavailable``."""
        return self.actor_of(self.claims(token))

    def actor_of(self, claims: Mapping[str, Any]) -> Actor:
        """Whom checked claims are about; raises ``AuthenticationError``."""
        return Actor(_name(claims["sub"]), self._scopes(claims))

    def claims(self, token: str) -> Mapping[str, Any]:
        """Its verified claims; raises ``AuthenticationError`` or ``ProviderUnavailable``."""
        try:
            key = self._key(jwt.get_unverified_header(token))
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._provider.audience,
                issuer=self._provider.issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": list(REQUIRED), "enforce_minimum_key_length": True},
            )
        except jwt.ExpiredSignatureError:
            raise AuthenticationError(
                "expired_token", "the token has expired; sign in again."
            ) from None
        except (jwt.InvalidAudienceError, jwt.InvalidIssuerError):
            raise AuthenticationError(
                "invalid_token", "the token was issued for another service or by another provider."
            ) from None
        except jwt.ImmatureSignatureError:
            raise AuthenticationError(
                "invalid_token", "the token is not valid yet; compare the clocks."
            ) from None
        # A signed document can still hold numbers that no clock has.
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise AuthenticationError(
                "invalid_token", "the token is not one of the provider's."
            ) from None
        return claims

    def _key(self, header: Mapping[str, Any]) -> jwt.PyJWK:
        if header.get("alg") not in ALGORITHMS:
            raise AuthenticationError(
                "invalid_token", f"a token is signed by one of {', '.join(ALGORITHMS)}."
            )
        kid = header.get("kid")
        if not isinstance(kid, str) or not 0 < len(kid) <= LONGEST_KID or "crit" in header:
            raise AuthenticationError(
                "invalid_token", "a token names its key by kid and has no crit."
            )
        try:
            return self._keys.key(kid)
        except UnknownKey:
            raise AuthenticationError(
                "invalid_token", "the provider has no key of the token's kid."
            ) from None

    def _scopes(self, claims: Mapping[str, Any]) -> frozenset[Scope]:
        found: Any = claims
        for name in self._provider.claim:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, str):
            # OAuth's own claim of scopes is one text (RFC 8693 4.2); a group may have spaces.
            found = found.split() if self._provider.claim[-1] in ("scope", "scp") else [found]
        groups = found if isinstance(found, list) else []
        known = [self._provider.scopes.get(group) for group in groups if isinstance(group, str)]
        return frozenset().union(*(item for item in known if item is not None))


def _name(subject: str) -> str:
    plain = subject.isascii() and subject.isprintable() and " " not in subject
    if not plain or not 0 < len(subject) <= LONGEST_SUBJECT:
        raise AuthenticationError(
            "invalid_token",
            f"the token's sub is not 1 to {LONGEST_SUBJECT} visible ASCII characters.",
        )
    return f"oidc:{subject}"
