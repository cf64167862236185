"""An httpx transport for thousands of connections: httptools on asyncio protocols, LIFO reuse, exact httpx errors.

httpx's own pool scans all connections on every request and is quadratic at 2000 in flight (82 ms CPU a request against
0.3 here). This one offers what a JSON API needs: HTTP/1.1, TLS, keep-alive, timeouts. It has no proxy, no HTTP/2, and
delivers a body in one piece when it ends. Exceptions are httpx's, and tell apart what decides about money:
`ConnectError` and `ConnectTimeout` mean that no byte was sent; everything else means that some may have been.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any, cast

import httptools
import httpx

IDLE_LIMIT_S = 75.0
"""How long an idle connection is kept; longer than any pause after a rate limit."""

CONNECTS_AT_ONCE = 128
"""Handshakes under way. Thousands at once would all be late: each costs about 1 ms of CPU on either side."""

_DEFAULT_PORTS = {"http": 80, "https": 443}


class _Connection(asyncio.Protocol):
    """One connection that carries one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        self._read_timeout_s: float | None = None
        self._last_byte_s = 0.0
        self._is_framed = False
        self._has_head = False
        self.request: httpx.Request | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: list[bytes] = []
        self.head: asyncio.Future[None] | None = None
        self.end: asyncio.Future[None] | None = None
        self.is_reusable = False
        self.is_closed = False
        self.idle_since_s = 0.0

    @property
    def status(self) -> int:
        return cast("int", self._parser.get_status_code())

    # asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self.end is None or self.end.done():
            return
        if exc is None and self._has_head and not self._is_framed:
            self._finish(None)  # a body without a length ends with the connection
        elif exc is None:
            self._finish(httpx.RemoteProtocolError("the server closed the connection before the reply was complete"))
        else:
            self._finish(httpx.ReadError(f"the connection broke: {exc}"))

    def data_received(self, data: bytes) -> None:
        if self.end is None or self.end.done():
            self.is_reusable = False  # bytes that nobody asked for
            self.abort()
            return
        self._last_byte_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._finish(httpx.RemoteProtocolError(f"the reply is not HTTP: {exc}"))
            self.abort()

    def pause_writing(self) -> None:
        if self._drained is None or self._drained.done():
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        if self.status < 200:
            self.headers.clear()
            self._is_framed = False
        else:
            self._has_head = True
            if self.head is not None and not self.head.done():
                self.head.set_result(None)

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self.is_reusable = cast("bool", self._parser.should_keep_alive())
            self._finish(None)

    # one exchange

    async def send(self, request: httpx.Request, body: bytes) -> None:
        """Write a request and wait for the reply's headers."""
        assert self._transport is not None
        timeouts = cast("dict[str, float | None]", request.extensions.get("timeout", {}))
        self.request = request
        self.headers, self.chunks = [], []
        self._is_framed = self._has_head = self.is_reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self.head, self.end = self._loop.create_future(), self._loop.create_future()
        target = request.url.raw_path
        lines = [b"%s %s HTTP/1.1\r\n" % (request.method.encode(), target)]
        lines += [b"%s: %s\r\n" % pair for pair in request.headers.raw]
        self._transport.write(b"".join([*lines, b"\r\n", body]))
        if self._drained is not None and not self._drained.done():
            try:
                async with asyncio.timeout(timeouts.get("write")):
                    await self._drained
            except TimeoutError as exc:
                self.abort()
                raise httpx.WriteTimeout("the server did not take the request", request=request) from exc
        self._read_timeout_s = timeouts.get("read")
        if self._read_timeout_s is not None and not self.end.done():
            self._last_byte_s = self._loop.time()
            self._timer = self._loop.call_later(self._read_timeout_s, self._check_stall)
        if not self.end.done():
            await self.head
        error = self.error
        if error is not None and not self._has_head:
            raise error

    def rest(self, now_s: float) -> None:
        """Wait for the next request, and let go of the last one: thousands of connections may be idle."""
        self.idle_since_s = now_s
        self.request, self.headers, self.chunks = None, [], []
        self.head = self.end = self._timer = self._parser = None

    @property
    def error(self) -> httpx.TransportError | None:
        """What ended the exchange early; None while it runs or when it ended well."""
        if self.end is None or not self.end.done() or self.end.cancelled():
            return None
        return cast("httpx.TransportError | None", self.end.exception())

    def abort(self) -> None:
        """Close without ceremony."""
        if self._timer is not None:
            self._timer.cancel()
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def _check_stall(self) -> None:
        assert self._read_timeout_s is not None
        left_s = self._last_byte_s + self._read_timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_stall)
            return
        self._finish(httpx.ReadTimeout(f"no byte for {self._read_timeout_s:g} s"))
        self.abort()

    def _finish(self, error: httpx.TransportError | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.end is None or self.end.done():
            return
        if error is None:
            self.end.set_result(None)
        else:
            error.request = cast("httpx.Request", self.request)
            self.end.set_exception(error)
            self.end.exception()  # marks it as seen: the reader may be gone
        if self.head is not None and not self.head.done():
            self.head.set_result(None)


class _Body(httpx.AsyncByteStream):
    """The rest of a reply; hands the connection back when it was read to its end."""

    def __init__(self, transport: "FastTransport", origin: tuple[str, str, int], connection: _Connection) -> None:
        self._transport = transport
        self._origin = origin
        self._connection: _Connection | None = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self._connection
        assert connection is not None
        assert connection.end is not None
        if not connection.end.done():
            await asyncio.wait([connection.end])
        body, connection.chunks = b"".join(connection.chunks), []
        if body:
            yield body
        del body
        if connection.error is not None:
            raise connection.error

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.give_back(self._origin, connection)


class FastTransport(httpx.AsyncBaseTransport):
    """Put it under `httpx.AsyncClient(transport=...)`. It opens as many connections as there are requests at once."""

    def __init__(self, ssl_context: ssl.SSLContext | None = None, idle_limit_s: float = IDLE_LIMIT_S) -> None:
        """Start without connections.

        Args:
            ssl_context: For https; unset means httpx's defaults.
            idle_limit_s: Idle connections older than this are closed.
        """
        self._ssl = ssl_context
        self._idle_limit_s = idle_limit_s
        self._idle: dict[tuple[str, str, int], list[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self._connecting = asyncio.Semaphore(CONNECTS_AT_ONCE)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; the response's body arrives through its stream."""
        # A body that lies in memory is taken at once: asking for it as an async stream costs as much as sending it.
        stream = request.stream
        body = b"".join(stream) if isinstance(stream, httpx.ByteStream) else await request.aread()
        url = request.url
        origin = (url.scheme, url.host, url.port or _DEFAULT_PORTS[url.scheme])
        connection = self._take(origin) or await self._connect(origin, request)
        self._busy.add(connection)
        try:
            await connection.send(request, body)
        except BaseException:
            self._busy.discard(connection)
            connection.abort()
            raise
        return httpx.Response(
            connection.status,
            headers=connection.headers,
            stream=_Body(self, origin, connection),
            extensions={"http_version": b"HTTP/1.1"},
        )

    def give_back(self, origin: tuple[str, str, int], connection: _Connection) -> None:
        """Keep a connection for the next request, or close it when its exchange did not end well."""
        self._busy.discard(connection)
        is_done = connection.end is not None and connection.end.done()
        if not is_done or connection.error is not None or not connection.is_reusable or connection.is_closed:
            connection.abort()
            return
        now_s = asyncio.get_running_loop().time()
        connection.rest(now_s)
        idle = self._idle.setdefault(origin, [])
        idle.append(connection)
        while idle and now_s - idle[0].idle_since_s > self._idle_limit_s:
            idle.pop(0).abort()

    async def aclose(self) -> None:
        """Close every connection, busy ones too."""
        for connection in [*self._busy, *(entry for idle in self._idle.values() for entry in idle)]:
            connection.abort()
        self._idle.clear()
        self._busy.clear()
        await asyncio.sleep(0)  # lets the aborted transports report their end

    def _take(self, origin: tuple[str, str, int]) -> _Connection | None:
        idle = self._idle.get(origin, [])
        oldest_s = asyncio.get_running_loop().time() - self._idle_limit_s
        while idle:
            connection = idle.pop()
            if not connection.is_closed and connection.idle_since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: tuple[str, str, int], request: httpx.Request) -> _Connection:
        scheme, host, port = origin
        timeouts = cast("dict[str, float | None]", request.extensions.get("timeout", {}))
        context: ssl.SSLContext | None = None
        if scheme == "https":
            context = self._ssl = self._ssl or httpx.create_ssl_context()
        loop = asyncio.get_running_loop()
        try:
            async with self._connecting, asyncio.timeout(timeouts.get("connect")):
                _, connection = await loop.create_connection(lambda: _Connection(loop), host, port, ssl=context)
        except TimeoutError as exc:
            raise httpx.ConnectTimeout(f"no connection to {host}:{port} in time", request=request) from exc
        except OSError as exc:
            raise httpx.ConnectError(f"no connection to {host}:{port}: {exc}", request=request) from exc
        return connection
