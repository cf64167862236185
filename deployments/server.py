"""A local Prefect server and worker in the project's own home: found, started, reused and stopped.

A server named by `PREFECT_API_URL` always wins; it is only checked, never started or stopped.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from deployments.settings import client_settings, server_settings
from eagle3.artifacts import commit_json
from eagle3.errors import ConfigurationError

DEFAULT_PORT = 4200
START_TIMEOUT_S = 240.0
"""The first start creates the database, which takes half a minute on a busy machine."""
POOL = "eagle3-cpu"


def project_home() -> Path:
    """Return the folder for everything that is not a run: Prefect's files, converted models, process ids."""
    return Path(os.environ.get("EAGLE3_HOME", ".eagle3")).resolve()


@dataclass(frozen=True, kw_only=True)
class LocalServer:
    """A server this project started."""

    url: str
    """Without `/api`; the UI."""
    pid: int
    home: Path


def ensure_server(home: Path | None = None) -> str:
    """Make sure a server answers, set the environment for Prefect clients, and return its UI address.

    Must run before `prefect` is imported: Prefect reads its settings at import.

    Raises:
        ConfigurationError: The configured server does not answer, or a local one did not start.
    """
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        _check_configured(configured)
        return configured.removesuffix("/api")
    home = home or project_home()
    server = running_server(home) or _start_server(home)
    os.environ.update(client_settings(server.home, server.url))
    return server.url


def running_server(home: Path) -> LocalServer | None:
    """Return the server recorded in `home` when it is alive and answers."""
    record = home / "server.json"
    if not record.is_file():
        return None
    values = json.loads(record.read_bytes())
    server = LocalServer(url=values["url"], pid=values["pid"], home=home / "prefect")
    return server if _is_alive(server.pid) and _answers(server.url) else None


def start_worker(home: Path) -> int:
    """Start a worker for the project's pool against the server in the environment; returns its process id."""
    log = (home / "worker.log").open("ab")
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    commit_json(home / "worker.json", {"pid": process.pid})
    return process.pid


def stop_all(home: Path) -> list[str]:
    """Stop the worker and the server recorded in `home`; returns what was stopped."""
    stopped: list[str] = []
    for name in ("worker", "server"):
        record = home / f"{name}.json"
        if not record.is_file():
            continue
        pid = json.loads(record.read_bytes())["pid"]
        if _is_alive(pid):
            _stop(pid)
            stopped.append(name)
        record.unlink()
    return stopped


def _start_server(home: Path) -> LocalServer:
    prefect_home = home / "prefect"
    prefect_home.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    log_path = home / "server.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **server_settings(prefect_home, url)},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigurationError(
                f"the local Prefect server ended with code {process.returncode}. "
                f"See {log_path.name!r} in {home.name!r}."
            )
        if _answers(url):
            commit_json(home / "server.json", {"url": url, "pid": process.pid})
            return LocalServer(url=url, pid=process.pid, home=prefect_home)
        time.sleep(0.3)
    _stop(process.pid)
    raise ConfigurationError(
        f"the local Prefect server did not answer within {START_TIMEOUT_S:.0f} s. "
        f"See {log_path.name!r} in {home.name!r}, or set PREFECT_API_URL to a server of your own."
    )


def _check_configured(api_url: str) -> None:
    try:
        response = httpx.get(f"{api_url}/health", timeout=10)
    except httpx.HTTPError as exc:
        raise ConfigurationError(
            f"the Prefect server named by PREFECT_API_URL ({api_url}) cannot be reached: {type(exc).__name__}. "
            "Start it, correct the address, or unset PREFECT_API_URL to use a local server."
        ) from exc
    if not response.is_success:
        raise ConfigurationError(
            f"the Prefect server named by PREFECT_API_URL ({api_url}) answers {response.status_code}, expected 200. "
            "Check the address (it ends in /api) and the credentials."
        )


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/api/health", timeout=2).is_success
    return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stop(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _is_alive(pid):
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _free_port() -> int:
    for port in (DEFAULT_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ConfigurationError("no free port on 127.0.0.1 for the local Prefect server")
