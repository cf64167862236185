"""A simulator without sockets or waiting: raw bytes in, raw bytes out, and a clock that the test moves."""

import heapq
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eagle3.simulator.answers import Answer, Answers
from eagle3.simulator.app import App
from eagle3.simulator.scenario import Scenario
from eagle3.simulator.server import HttpConnection
from eagle3.simulator.state import State

MODEL = "acme/tiny"


class ManualTimer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class ManualClock:
    """Time moves only when the test says so."""

    def __init__(self) -> None:
        self.time_s = 1_800_000_000.0
        self._due: list[tuple[float, int, ManualTimer]] = []
        self._serial = itertools.count()

    def now_s(self) -> float:
        return self.time_s

    def later(self, delay_s: float, call: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(call)
        heapq.heappush(self._due, (self.time_s + delay_s, next(self._serial), timer))
        return timer

    def advance(self, seconds: float) -> None:
        until = self.time_s + seconds
        while self._due and self._due[0][0] <= until:
            self.time_s, _, timer = heapq.heappop(self._due)
            if timer.call is not None:
                timer.call()
        self.time_s = until


class RecordingTransport:
    """The wire: keeps what is written, and tells the connection when it closes."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False
        self.connection: HttpConnection | None = None

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.written += data

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            assert self.connection is not None
            self.connection.connection_lost(None)


@dataclass
class Received:
    """One reply as a client would parse it."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        lines = [
            line for line in self.body.decode().split("\n") if line.startswith("data: ") and line != "data: [DONE]"
        ]
        return [json.loads(line.removeprefix("data: ")) for line in lines]


def parse_reply(raw: bytes) -> Received | None:
    """Parse one HTTP reply; `is_complete` is false when its body was cut."""
    if not raw:
        return None
    head, _, rest = raw.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    if "content-length" in headers:
        length = int(headers["content-length"])
        return Received(int(status_line.split()[1]), headers, rest[:length], len(rest) >= length)
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            return Received(int(status_line.split()[1]), headers, body, True)
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return Received(int(status_line.split()[1]), headers, body, False)


@dataclass
class Call:
    """One request on a connection of its own."""

    connection: HttpConnection
    transport: RecordingTransport

    @property
    def reply(self) -> Received | None:
        return parse_reply(self.transport.written)

    def disconnect(self) -> None:
        self.transport.close()


def tiny_scenario(**changes: Any) -> Scenario:
    document: dict[str, Any] = {
        "seed": 7,
        "models": [{"id": MODEL, "suffix": "0101", "default_max_tokens": 1000}],
        "providers": [
            {
                "name": "Solo",
                "tag": "solo/bf16",
                "quantization": "bf16",
                "prompt_usd_per_mtok": 1,
                "completion_usd_per_mtok": 2,
                "latency": {"median_s": 2, "sigma": 0},
            }
        ],
        "account": {"credits_usd": 1},
        **changes,
    }
    return Scenario.model_validate(document)


def provider(name: str, **changes: Any) -> dict[str, Any]:
    """A provider entry with prices and a fixed latency of 2 s."""
    return {
        "name": name,
        "tag": name.lower(),
        "prompt_usd_per_mtok": 1,
        "completion_usd_per_mtok": 2,
        "latency": {"median_s": 2, "sigma": 0},
        **changes,
    }


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def plain_answer(
    text: str = "Hi there!", *, num_prompt: int = 4, output_ids: tuple[int, ...] = (10, 11, 12, 2)
) -> Answer:
    return Answer(
        prompt_ids=tuple(range(num_prompt)),
        output_ids=output_ids,
        finish_reason="stop",
        content=text,
        is_ended=True,
    )


@dataclass
class Bench:
    """A simulator on a manual clock."""

    scenario: Scenario
    answers: Answers
    clock: ManualClock = field(default_factory=ManualClock)
    state_file: Path | None = None

    def __post_init__(self) -> None:
        self.state = State(self.scenario.account, self.state_file)
        self.app = App(
            self.scenario, answers=self.answers, state=self.state, clock=self.clock, admin_token="admin-token"
        )

    def send(
        self,
        method: str,
        target: str,
        body: Any = None,
        *,
        key: str | None = "k",
        headers: dict[str, str] | None = None,
    ) -> Call:
        connection = HttpConnection(self.app)
        transport = RecordingTransport()
        transport.connection = connection
        connection.connection_made(transport)  # type: ignore[arg-type]
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {target} HTTP/1.1", "Host: x", f"Content-Length: {len(payload)}"]
        if key is not None:
            lines.append(f"Authorization: Bearer {key}")
        lines.extend(f"{name}: {value}" for name, value in (headers or {}).items())
        connection.data_received(("\r\n".join(lines) + "\r\n\r\n").encode() + payload)
        return Call(connection, transport)

    def chat(self, text: str = "hi", *, cached: bool = False, clear: bool = False, **fields: Any) -> Call:
        body = {"model": MODEL, "messages": user(text), "max_tokens": 50, **fields}
        headers = {"X-OpenRouter-Cache": "true"} if cached else {}
        if clear:
            headers["X-OpenRouter-Cache-Clear"] = "true"
        return self.send("POST", "/api/v1/chat/completions", body, headers=headers)

    def finished(self, call: Call, *, after_s: float = 60) -> Received:
        self.clock.advance(after_s)
        reply = call.reply
        assert reply is not None
        return reply

    def get(self, path: str, *, key: str | None = "k") -> Received:
        reply = self.send("GET", f"/api/v1{path}", key=key).reply
        assert reply is not None
        return reply

    def admin(self, method: str, path: str, body: Any = None, *, token: str = "admin-token") -> Received:
        reply = self.send(method, f"/_admin{path}", body, key=token).reply
        assert reply is not None
        return reply


@pytest.fixture
def bench() -> Callable[..., Bench]:
    """Build a bench: scenario fields by keyword, plain answers to `hi` and to `prompt 0` … `prompt 199`."""

    def build(
        *,
        answers: Answers | None = None,
        state_file: Path | None = None,
        clock: ManualClock | None = None,
        **changes: Any,
    ) -> Bench:
        if answers is None:
            answers = Answers()
            answers.add(user("hi"), plain_answer())
            for number in range(200):
                answers.add(user(f"prompt {number}"), plain_answer(f"Answer {number}."))
        return Bench(tiny_scenario(**changes), answers, clock or ManualClock(), state_file)

    return build
