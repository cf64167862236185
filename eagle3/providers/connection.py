"""One HTTP service: the client, the key, and what a request's end looks like. Shared by the providers."""

import asyncio
import os
import resource
import time
from collections.abc import Mapping
from typing import Any, cast

import httpx

from eagle3.errors import (
    AmbiguousProviderError,
    ConfigurationError,
    CredentialsError,
    ProviderError,
    RetryableProviderError,
)
from eagle3.providers.base import GENERATION_HEADER, OnAccepted, RawReply, TransportFailure
from eagle3.providers.classify import Verdict, classify
from eagle3.providers.proxied import transport_for
from eagle3.records import JsonObject

CONNECT_TIMEOUT_S = 15.0
WRITE_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 90.0
"""Longest silence; services pad with whitespace or answer errors well before."""
LOOKUP_TIMEOUT_S = 30.0
SPARE_DESCRIPTORS = 200
"""Files and sockets beside those of the requests."""


class ApiKey:
    """A secret that does not print itself."""

    def __init__(self, value: str) -> None:
        """Keep the key."""
        self._value = value

    def __repr__(self) -> str:
        """Return a placeholder."""
        return "ApiKey(…)"

    @property
    def header(self) -> str:
        """Value of the Authorization header."""
        return f"Bearer {self._value}"

    def scrub(self, data: bytes) -> bytes:
        """Return `data` with the key replaced, should a server echo it."""
        secret = self._value.encode()
        return data.replace(secret, b"[key]") if len(secret) >= 8 and secret in data else data


def key_from_environment(variable: str) -> ApiKey:
    """Return the API key.

    Raises:
        CredentialsError: The variable is unset or empty.
    """
    value = os.environ.get(variable, "").strip()
    if not value:
        raise CredentialsError(f"environment variable {variable!r} holds no API key. Set it, then run again.")
    return ApiKey(value)


def raise_descriptor_limit(num_connections: int) -> None:
    """Allow this process that many sockets.

    Raises:
        ConfigurationError: The hard limit of the system is too low.
    """
    needed = num_connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        message = (
            f"{num_connections} requests at once need {needed} open files, the hard limit is {hard}. "
            "Raise it (ulimit -Hn), or lower generation.in_flight."
        )
        raise ConfigurationError(message)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _NoCookies(httpx.Cookies):
    """Keeps nothing: chat services need no cookies, and looking for them is a sixth of a request's CPU."""

    def extract_cookies(self, response: httpx.Response) -> None:
        """Ignore the reply's cookies."""


class _Client(httpx.AsyncClient):
    """An httpx client without cookies."""

    _nothing = _NoCookies()

    @property
    def cookies(self) -> httpx.Cookies:
        """Always empty."""
        return self._nothing

    @cookies.setter
    def cookies(self, cookies: Any) -> None:
        del cookies


class Connection:
    """An httpx client for one base URL that turns every end of a request into a value."""

    def __init__(
        self,
        base_url: str,
        key: ApiKey | None,
        headers: Mapping[str, str],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare a client; no connection is opened yet.

        Args:
            base_url: Root of the API, for example `https://host/api/v1`.
            key: Sent as a bearer token; None for servers without keys.
            headers: Sent with every completion.
            transport: For tests; unset means the fast one, or one that uses the environment's proxy.
        """
        self._root = httpx.URL(base_url.rstrip("/") + "/")
        self._key = key
        self._urls: dict[str, httpx.URL] = {}
        common = {"user-agent": "eagle3-pipeline", "accept-encoding": "identity", "accept": "application/json"}
        if key is not None:
            common["authorization"] = key.header
        self._posted = httpx.Headers(
            {"host": self._root.netloc.decode("ascii"), **common, "content-type": "application/json", **headers}
        )
        timeout = httpx.Timeout(connect=CONNECT_TIMEOUT_S, write=WRITE_TIMEOUT_S, read=READ_TIMEOUT_S, pool=None)
        self._client = _Client(
            transport=transport or transport_for(self._root), headers=common, timeout=timeout, follow_redirects=False
        )
        self._extensions = {"timeout": timeout.as_dict()}

    @property
    def host(self) -> str:
        """Host name of the service."""
        return self._root.host

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        deadline_s: float,
        headers: Mapping[str, str] | None = None,
        on_accepted: OnAccepted | None = None,
    ) -> RawReply:
        """Send a JSON body; see `ChatProvider.complete`. Only cancellation raises."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = self._root.join(path)
        # The client's own build_request parses URL and headers anew each time, and a request made of `content` does so
        # with the headers: together a third of a request's CPU.
        sent = httpx.Headers(self._posted)
        sent["content-length"] = str(len(body))
        if headers is not None:
            sent.update(headers)
        request = httpx.Request(
            "POST", url, headers=sent, stream=httpx.ByteStream(body), extensions=dict(self._extensions)
        )
        return await self._exchange(request, deadline_s, on_accepted)

    async def get_json(
        self, path: str, params: Mapping[str, str] | None = None, *, allow_404: bool = False
    ) -> JsonObject | None:
        """Fetch a JSON object; None for a 404 when that is allowed.

        Raises:
            CredentialsError: The key was refused.
            RetryableProviderError: The service did not answer well; asking later may help.
            ProviderError: It answered something else than a JSON object.
        """
        request = self._client.build_request("GET", self._root.join(path), params=dict(params or {}))
        reply = await self._exchange(request, LOOKUP_TIMEOUT_S)
        if reply.failure is not None:
            raise AmbiguousProviderError(f"GET {path!r} at {self.host}: {reply.failure.value}: {reply.message}")
        if reply.status == 404 and allow_404:
            return None
        if reply.status != 200:
            outcome = classify(reply)
            kind: type[Exception] = ProviderError
            if outcome.verdict is Verdict.CREDENTIALS:
                kind = CredentialsError
            elif outcome.verdict in (Verdict.RETRY, Verdict.RATE_LIMITED):
                kind = RetryableProviderError
            raise kind(f"GET {path!r} at {self.host}: {outcome.message}. Check base URL, model and key.")
        try:
            value: Any = httpx.Response(200, content=reply.body).json()
        except ValueError as exc:
            raise ProviderError(f"GET {path!r} at {self.host} gave no JSON ({len(reply.body)} bytes)") from exc
        if not isinstance(value, dict):
            raise ProviderError(f"GET {path!r} at {self.host} gave {type(value).__name__}, expected a JSON object")
        return cast("JsonObject", value)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _exchange(
        self, request: httpx.Request, deadline_s: float, on_accepted: OnAccepted | None = None
    ) -> RawReply:
        started_s = time.perf_counter()
        status: int | None = None
        headers: dict[str, str] = {}
        chunks: list[bytes] = []
        failure: TransportFailure | None = None
        message = ""
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._client.send(request, stream=True)
                try:
                    status = response.status_code
                    headers = {
                        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers.raw
                    }
                    if on_accepted is not None and GENERATION_HEADER in headers:
                        on_accepted(headers[GENERATION_HEADER])
                    # Decoding costs as much as receiving, and nothing is encoded unless a server disobeys.
                    is_encoded = "content-encoding" in headers
                    plain = cast("httpx.AsyncByteStream", response.stream)
                    async for chunk in response.aiter_bytes() if is_encoded else plain:
                        chunks.append(chunk)  # noqa: PERF401 - what came before a cut is kept
                finally:
                    await response.aclose()
        except TimeoutError:
            failure, message = TransportFailure.DEADLINE, f"no complete reply within {deadline_s:.0f} s"
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol) as exc:
            failure, message = TransportFailure.NOT_SENT, str(exc)
        except httpx.TimeoutException as exc:
            failure, message = TransportFailure.STALLED, str(exc)
        except httpx.HTTPError as exc:
            failure, message = TransportFailure.CUT, f"{type(exc).__name__}: {exc}"
        body = b"".join(chunks)
        return RawReply(
            status=status,
            headers=headers,
            body=self._key.scrub(body) if self._key is not None else body,
            elapsed_s=time.perf_counter() - started_s,
            failure=failure,
            message=message,
        )
