"""An httpx transport for many connections through a proxy: one httpx connection each, reused last in, first out.

It costs three times the CPU of `eagle3.providers.transport`, but it is httpx's own code, which knows proxies. A pool of
one connection has nothing to scan, so httpx's quadratic search does not occur.
"""

import urllib.request
from collections.abc import AsyncIterator
from typing import cast

import httpx

from eagle3.providers.transport import IDLE_LIMIT_S, FastTransport


def transport_for(url: httpx.URL) -> httpx.AsyncBaseTransport:
    """Return the fast transport, or a proxied one when the environment names a proxy for this host."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy is None or urllib.request.proxy_bypass(url.host):
        return FastTransport()
    return ProxiedTransport(proxy)


class ProxiedTransport(httpx.AsyncBaseTransport):
    """Put it under `httpx.AsyncClient(transport=...)`. It opens as many connections as there are requests at once."""

    def __init__(self, proxy: str) -> None:
        """Start without connections; `proxy` is a URL."""
        self._proxy = proxy
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._busy: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request."""
        transport = self._idle.pop() if self._idle else self._new()
        self._busy.add(transport)
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            self._busy.discard(transport)
            await transport.aclose()
            raise
        response.stream = _Returning(self, transport, cast("httpx.AsyncByteStream", response.stream))
        return response

    def give_back(self, transport: httpx.AsyncHTTPTransport) -> None:
        """Keep a connection for the next request; httpx opens it again when it was closed."""
        self._busy.discard(transport)
        self._idle.append(transport)

    async def aclose(self) -> None:
        """Close every connection."""
        for transport in [*self._idle, *self._busy]:
            await transport.aclose()
        self._idle.clear()
        self._busy.clear()

    def _new(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_LIMIT_S)
        return httpx.AsyncHTTPTransport(proxy=self._proxy, limits=limits)


class _Returning(httpx.AsyncByteStream):
    """A body that hands its connection back at its end."""

    def __init__(
        self, owner: ProxiedTransport, transport: httpx.AsyncHTTPTransport, stream: httpx.AsyncByteStream
    ) -> None:
        self._owner = owner
        self._transport = transport
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
        self._owner.give_back(self._transport)
