"""Two homes that start a server at once: each gets its own, whoever was first at the port."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deployments.server import wait_for_server
from eagle3.errors import ConfigurationError

HOME = Path("/of/ours/prefect")
ANSWERS: dict[str, bytes] = {
    "ours": json.dumps({"home": str(HOME)}).encode(),
    "another": json.dumps({"home": "/of/others/prefect"}).encode(),
    "something else": b"<!doctype html>",
}


class Handler(BaseHTTPRequestHandler):
    """Answers every request as the server of `answer` would."""

    answer = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the standard library
        """Write no log."""


@pytest.fixture
def starting() -> Generator[subprocess.Popen[bytes]]:
    """A process that has not bound its port yet."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as process:
        yield process
        process.kill()


@pytest.fixture
def ended() -> subprocess.Popen[bytes]:
    """A process that ended by itself."""
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)
    process.wait()
    return process


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Generator[str]:
    """Where somebody answers."""
    handler = type("Answering", (Handler,), {"answer": ANSWERS[request.param]})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


@pytest.mark.parametrize(
    ("address", "is_ours"), [("ours", True), ("another", False), ("something else", False)], indirect=["address"]
)
def test_the_home_tells_whose_server_answers(starting: subprocess.Popen[bytes], address: str, *, is_ours: bool) -> None:
    assert wait_for_server(starting, address, HOME) is is_ours


def test_a_server_that_lost_its_port_to_a_silent_process_is_started_elsewhere(ended: subprocess.Popen[bytes]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert wait_for_server(ended, f"http://127.0.0.1:{other.getsockname()[1]}", HOME) is False


def test_a_server_that_ended_by_itself_is_an_error(ended: subprocess.Popen[bytes]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    with pytest.raises(ConfigurationError, match="ended with code 3"):
        wait_for_server(ended, f"http://127.0.0.1:{port}", HOME)
