"""`eagle3 doctor` against servers that are missing, wrong or locked: it names cause and cure, and exits with 2."""

import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle3.cli import app

ANSWERS: dict[str, tuple[int, bytes]] = {
    "old": (200, b'"3.1.0"'),
    "page": (200, b"<!doctype html>"),
    "locked": (401, b"{}"),
}


class Handler(BaseHTTPRequestHandler):
    """Answers `/NAME/api/admin/version` with the answer of that name."""

    def do_GET(self) -> None:
        status, body = ANSWERS[self.path.split("/")[1]]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the standard library
        """Write no log."""


@pytest.fixture(scope="module")
def server() -> Generator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "OPENROUTER_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def examine() -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 2
    return {finding["check"]: finding for finding in json.loads(done.stdout)}


def test_without_a_server_it_says_how_to_start_one_and_starts_none(tmp_path: Path) -> None:
    found = examine()
    assert found["Prefect server"]["found"] == "no server runs"
    assert "eagle3 up" in found["Prefect server"]["advice"]
    assert found["deployments"]["found"] == found["workers"]["found"] == "not known"
    assert found["file system"]["is_good"]
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("answer", "cause", "advice"),
    [
        ("old", "is version 3.1.0, this client is", "install that version"),
        ("page", "is no Prefect API", "ends in /api"),
        ("locked", "PREFECT_API_AUTH_STRING is not set", "PREFECT_SERVER_API_AUTH_STRING"),
    ],
)
def test_a_server_that_cannot_be_used_is_named_once(
    server: str, answer: str, cause: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{server}/{answer}/api")
    found = examine()
    assert not found["Prefect server"]["is_good"]
    assert cause in found["Prefect server"]["found"]
    assert advice in found["Prefect server"]["advice"]
    assert [cause in finding["found"] for finding in found.values()].count(True) == 1


def test_refused_credentials_are_told_apart_from_missing_ones_and_not_shown(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{server}/locked/api")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:planted-password")
    found = examine()
    assert "is set but was refused" in found["Prefect server"]["found"]
    assert "planted-password" not in json.dumps(found)


def test_a_server_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    found = examine()
    assert "cannot be reached" in found["Prefect server"]["found"]
    assert "unset PREFECT_API_URL" in found["Prefect server"]["advice"]


def test_a_key_is_looked_for_here_even_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "eagle3 API key" in examine()["API key"]["advice"]
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-v1-planted")
    found = examine()["API key"]
    assert found["is_good"]
    assert "planted" not in json.dumps(found)
