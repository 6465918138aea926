"""Tokens of OAuth 2.0 client credentials: fetched, cached until shortly before they expire, fetched again."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING
from urllib.parse import quote_plus

import aiohttp
import msgspec
from msgspec import Struct

from carpool_operator.tuning.sources.endpoint import without_password

if TYPE_CHECKING:
    from carpool_operator.tuning.sources.endpoint import Grant

LARGEST = 64 * 2**10
"""Most bytes of an answer: a token is a few KiB."""

LIFE = 300.0
"""Seconds that a token without expiry is cached."""

SPARE = 30.0
"""Seconds before its expiry from which a token is replaced; for short ones, a tenth of their life."""


class TokenError(Exception):
    """There is no token; the message has the reason, in one line."""


class _Answer(Struct):
    access_token: str
    token_type: str = "Bearer"  # noqa: S105 - a kind of token
    expires_in: float | None = None


_decoder = msgspec.json.Decoder(_Answer)


class Tokens:
    """The token of one grant. ``session`` is shared, ``timeout`` in seconds."""

    def __init__(self, grant: Grant, session: aiohttp.ClientSession, timeout: float) -> None:
        self._grant = grant
        self._session = session
        self._timeout = timeout
        self._header = ""
        self._until = 0.0

    async def header(self, now: float) -> str:
        """Return the ``Authorization`` header; ``now`` in seconds of a monotonic clock.

        Raises ``TokenError``.
        """
        if not self._header or now >= self._until:
            answer = await self._fetch()
            life = LIFE if answer.expires_in is None else answer.expires_in
            self._header = f"Bearer {answer.access_token}"
            self._until = now + max(life - SPARE, 0.9 * life)
        return self._header

    def forget(self) -> None:
        """Fetch another one next time: the server rejected this one."""
        self._header = ""

    async def _fetch(self) -> _Answer:
        grant = self._grant
        where = without_password(grant.url)
        pair = f"{quote_plus(grant.client_id)}:{quote_plus(grant.client_secret)}"
        try:
            async with self._session.post(
                grant.url,
                data=dict(grant.form),
                headers={
                    "Authorization": f"Basic {b64encode(pair.encode()).decode()}",
                    "Accept": "application/json",
                    "Accept-Encoding": "identity",
                },
                ssl=grant.tls,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout),
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > LARGEST:
                        raise TokenError(f"{where} answers with more than {LARGEST // 2**10} KiB for a token")
                status = response.status
        except TimeoutError:
            raise TokenError(f"{where} gave no token within {self._timeout:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TokenError(f"{where} gave no token: {type(error).__name__}") from None
        if status != 200:
            raise TokenError(f"{where} gave no token ({status}): check the Secrets that auth.oauth2 names")
        try:
            answer = _decoder.decode(body)
        except (msgspec.DecodeError, RecursionError):
            raise TokenError(f"{where} answers with no token: check auth.oauth2.tokenUrl") from None
        usable = answer.access_token and answer.access_token.isascii() and answer.access_token.isprintable()
        if not usable or answer.token_type.lower() != "bearer":
            raise TokenError(f"{where} gave a token that is no bearer token")
        return answer
