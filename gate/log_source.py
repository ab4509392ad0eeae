"""A transparency log in the format of C2SP tlog-tiles, read over HTTP."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from affidavit.certificate.verification.monitoring import MissingTile
from affidavit.client import read_bounded
from affidavit.trust.log import merkle_tree

TIMEOUT_SECONDS = 30.0
MAX_RESPONSE_BYTES, MAX_RESPONSE_SECONDS = 32 * 1024 * 1024, 300.0


class Unreadable(Exception):
    """The log cannot be read."""


class HttpSource:
    """A log in the format of C2SP tlog-tiles, at a URL."""

    def __init__(self, url: str, token: str | None) -> None:
        headers = {"Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT_SECONDS)
        self._url = url.rstrip("/")

    def checkpoint(self) -> str:
        """Fetch the signed note; raises ``Unreadable``."""
        try:
            return self._get("checkpoint").decode(errors="replace")
        except MissingTile:
            raise Unreadable(f"no log at {self._url}, or it is empty.") from None

    def hashes(self, level: int, number: int, width: int) -> Sequence[bytes]:
        """Fetch the first ``width`` hashes of a tile."""
        return merkle_tree.decode_hashes(self._tile(level, number, width))[:width]

    def entries(self, number: int, width: int) -> Sequence[bytes]:
        """Fetch the first ``width`` entries below a tile of level 0."""
        return merkle_tree.decode_entries(self._tile("entries", number, width))[:width]

    def _tile(self, level: int | str, number: int, width: int) -> bytes:
        try:
            return self._get(merkle_tree.tile_path(level, number, width))
        except MissingTile:
            # A log may drop the partial tiles of a full one.
            return self._get(merkle_tree.tile_path(level, number))

    def _get(self, path: str) -> bytes:
        try:
            with self._client.stream("GET", f"{self._url}/{path}") as response:
                content = read_bounded(response, MAX_RESPONSE_BYTES, MAX_RESPONSE_SECONDS).content
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise Unreadable(f"cannot reach {self._url}: {type(error).__name__}.") from None
        if response.status_code == httpx.codes.NOT_FOUND:
            raise MissingTile(f"the log does not have {path}")
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise Unreadable(
                f"access to {path} is denied: set AFFIDAVIT_TOKEN to a token with the scope "
                "audit, or ask the operator to make entries public."
            )
        if not response.is_success:
            raise Unreadable(f"{path}: the log answered {response.status_code}.")
        return content
