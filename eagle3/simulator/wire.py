"""What the endpoints need from the outside: a clock and a reply to write to. The server and the tests supply them."""

from collections.abc import Callable, Mapping
from typing import Protocol

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream"
HTML_TYPE = "text/html; charset=UTF-8"


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Do not make the call."""
        ...


class Clock(Protocol):
    """Time, and calls in the future. Everything runs in one thread."""

    def now_s(self) -> float:
        """Unix time in seconds."""
        ...

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Make `call` after `delay_s`."""
        ...


class Reply(Protocol):
    """The reply to one request. Whatever is sent after the client has gone is dropped."""

    is_lost: bool
    """The client closed the connection."""
    on_lost: Callable[[], None] | None
    """Called once when the client closes the connection before the reply is complete."""

    def send(self, status: int, body: bytes, headers: Mapping[str, str], content_type: str = JSON_TYPE) -> None:
        """Send a complete reply of known length."""
        ...

    def open(self, status: int, headers: Mapping[str, str], content_type: str = JSON_TYPE) -> None:
        """Send the head of a reply whose body comes in pieces."""
        ...

    def write(self, piece: bytes) -> None:
        """Send a piece of the body."""
        ...

    def close(self) -> None:
        """End the body properly."""
        ...

    def cut(self) -> None:
        """Close the connection as it stands."""
        ...
