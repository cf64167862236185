"""HTTP/1.1 over asyncio: parsing with httptools, framing, and the life of the server. Knows nothing of models.

One process carries thousands of open requests: a request costs a parser callback, a few timers and the bytes it sends.
"""

import asyncio
import contextlib
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import httptools

from eagle3.simulator.app import App
from eagle3.simulator.wire import JSON_TYPE

MAX_BODY_BYTES = 32 * 1024 * 1024
FLUSH_INTERVAL_S = 0.25
BACKLOG = 4096

_OTHER_PHRASES = {524: "A Timeout Occurred", 529: "Overloaded"}


class LoopClock:
    """The running event loop's timers and the system's clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use the timers of `loop`."""
        self._loop = loop

    def now_s(self) -> float:
        """Unix time in seconds."""
        return time.time()

    def later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Make `call` after `delay_s`."""
        return self._loop.call_later(delay_s, call)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return _OTHER_PHRASES.get(status, "Error")


class HttpReply:
    """The reply to one request of a connection (`eagle3.simulator.wire.Reply`)."""

    def __init__(self, connection: "HttpConnection", *, keep_alive: bool) -> None:
        """Reply on `connection`, which closes afterwards unless `keep_alive`."""
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None
        self._connection = connection
        self._keep_alive = keep_alive
        self._is_complete = False

    def send(self, status: int, body: bytes, headers: Mapping[str, str], content_type: str = JSON_TYPE) -> None:
        """Send a complete reply of known length."""
        if self.is_lost:
            return
        head = self._head(status, headers, content_type, f"Content-Length: {len(body)}")
        self._connection.write(head + body)
        self._complete()

    def open(self, status: int, headers: Mapping[str, str], content_type: str = JSON_TYPE) -> None:
        """Send the head of a reply whose body comes in pieces."""
        if not self.is_lost:
            self._connection.write(self._head(status, headers, content_type, "Transfer-Encoding: chunked"))

    def write(self, piece: bytes) -> None:
        """Send a piece of the body."""
        if piece and not self.is_lost:
            self._connection.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def close(self) -> None:
        """End the body properly."""
        if not self.is_lost:
            self._connection.write(b"0\r\n\r\n")
            self._complete()

    def cut(self) -> None:
        """Close the connection as it stands."""
        if not self.is_lost:
            self._keep_alive = False
            self._complete()

    def lose(self) -> None:
        """The client has gone."""
        self.is_lost = True
        call, self.on_lost = self.on_lost, None
        if call is not None and not self._is_complete:
            call()

    def _head(self, status: int, headers: Mapping[str, str], content_type: str, framing: str) -> bytes:
        lines = [f"HTTP/1.1 {status} {_phrase(status)}", f"Content-Type: {content_type}", framing]
        lines.extend(f"{name}: {value}" for name, value in headers.items())
        if not self._keep_alive:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _complete(self) -> None:
        self._is_complete = True
        self._connection.reply_complete(keep_alive=self._keep_alive)


class _Request(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool


class HttpConnection(asyncio.Protocol):
    """One client connection. Requests on it are answered one after the other."""

    def __init__(self, app: App) -> None:
        """Pass requests to `app`."""
        self._app = app
        self._transport: asyncio.Transport | None = None
        self._parser: Any = cast("Any", httptools).HttpRequestParser(self)
        self._reply: HttpReply | None = None
        self._waiting: deque[_Request] = deque()
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client connected."""
        self._transport = cast("asyncio.Transport", transport)
        self._app.state.counters.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio passes it)
        """The client, or we, closed the connection. What was accepted is finished and billed all the same."""
        self._transport = None
        self._app.state.counters.connections -= 1
        self._waiting.clear()
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.lose()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._transport is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a fault of ours, not of the client's bytes
        except httptools.HttpParserError:
            self.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self._close()

    def write(self, data: bytes) -> None:
        """Send bytes, unless the client has gone."""
        if self._transport is not None:
            self._transport.write(data)

    def reply_complete(self, *, keep_alive: bool) -> None:
        """The current reply has been written; start the next request, if one waits."""
        self._reply = None
        if not keep_alive:
            self._close()
        elif self._waiting:
            self._start(self._waiting.popleft())

    def _close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def on_message_begin(self) -> None:
        """Parser callback."""
        self._target, self._headers, self._body, self._body_bytes = b"", {}, [], 0

    def on_url(self, url: bytes) -> None:
        """Parser callback."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser callback."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Parser callback."""
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Parser callback."""
        self._body_bytes += len(body)
        if self._body_bytes <= MAX_BODY_BYTES:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Parser callback."""
        method = cast("bytes", self._parser.get_method()).decode("latin-1")
        keep_alive = bool(self._parser.should_keep_alive())
        request = _Request(method, self._target.decode("latin-1"), self._headers, b"".join(self._body), keep_alive)
        if self._body_bytes > MAX_BODY_BYTES:
            HttpReply(self, keep_alive=False).send(
                413, b'{"error":{"message":"Request body is too large","code":413}}', {}
            )
        elif self._reply is None:
            self._start(request)
        else:
            self._waiting.append(request)

    def _start(self, request: _Request) -> None:
        reply = self._reply = HttpReply(self, keep_alive=request.keep_alive)
        self._app.handle(request.method, request.target, request.headers, request.body, reply)


def raise_file_limit() -> None:
    """Allow as many open connections as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(
    make_app: Callable[[LoopClock], App],
    *,
    host: str,
    port: int,
    on_ready: Callable[[int], None],
    exit_with_stdin: bool,
) -> None:
    """Serve until SIGTERM, SIGINT or, if asked for, the end of standard input.

    Args:
        make_app: Builds the service on the loop's clock.
        host: Address to listen on.
        port: 0 for any free one.
        on_ready: Called with the port once connections are accepted.
        exit_with_stdin: Stop when standard input closes, so that the server never outlives a killed parent.
    """
    loop = asyncio.get_running_loop()
    app = make_app(LoopClock(loop))
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if exit_with_stdin:
        await _watch_stdin(loop, stopped)
    server = await loop.create_server(lambda: HttpConnection(app), host, port, backlog=BACKLOG)
    listening: socket.socket = server.sockets[0]
    on_ready(listening.getsockname()[1])
    while not stopped.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), FLUSH_INTERVAL_S)
        app.state.flush()
    server.close()


async def _watch_stdin(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    class Watch(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio passes it)
            stopped.set()

    await loop.connect_read_pipe(Watch, sys.stdin)
