"""A local Prefect server and workers in the project's own home: found, started, reused and stopped.

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
from importlib.metadata import version
from pathlib import Path

import httpx

from deployments.settings import client_settings, server_settings
from eagle3.artifacts import commit_json
from eagle3.errors import ConfigurationError

DEFAULT_PORT = 4200
DEFAULT_REPORT_PORT = 4210
ANY_PORT = 0
"""The system chooses one."""
MOST_STOLEN_PORTS = 3
"""So often another port is tried after somebody else took ours."""
START_TIMEOUT_S = 240.0
"""The first start creates the database, which takes half a minute on a busy machine."""
POOLS: tuple[tuple[str, int | None], ...] = (("eagle3-io", None), ("eagle3-cpu", None), ("eagle3-gpu", 1))
"""Work pools, and how many runs one worker of a pool takes at a time: a GPU serves one."""
_HEALTH_TIMEOUT_S = 10.0


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
        check_server(configured)
        return configured.removesuffix("/api")
    home = (home or project_home()).resolve()
    server = running_server(home) or _start_server(home)
    os.environ.update(client_settings(server.home, server.url))
    password = os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
    if password:  # whoever gives the server a password means its workers to know it
        os.environ.setdefault("PREFECT_API_AUTH_STRING", password)
    return server.url


def running_server(home: Path) -> LocalServer | None:
    """Return the server recorded in `home` when it is alive and answers."""
    record = home / "server.json"
    if not record.is_file():
        return None
    values = json.loads(record.read_bytes())
    server = LocalServer(url=values["url"], pid=values["pid"], home=home.resolve() / "prefect")
    return server if _is_alive(server.pid) and _works_in(server.url, server.home) else None


def start_workers(home: Path) -> list[int]:
    """Start a worker for each pool, and the page that serves reports; returns the process ids.

    Workers that run already are left alone.
    """
    record = home / "workers.json"
    running: list[int] = json.loads(record.read_bytes())["pids"] if record.is_file() else []
    if running and all(_is_alive(pid) for pid in running):
        return running
    _stop(*running)
    port, root = _free_port(DEFAULT_REPORT_PORT), Path.cwd()
    os.environ["EAGLE3_REPORT_URL"], os.environ["EAGLE3_REPORT_ROOT"] = f"http://127.0.0.1:{port}", str(root)
    commands = [["-m", "deployments.report_server", "--port", str(port), "--root", str(root)]]
    for pool, limit in POOLS:
        command = ["-m", "prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", f"{pool}-local"]
        commands.append(command + (["--limit", str(limit)] if limit else []))
    pids: list[int] = []
    with (home / "worker.log").open("ab") as log:
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            pids.append(process.pid)
    commit_json(record, {"pids": pids})
    return pids


def stop_all(home: Path) -> list[str]:
    """Stop the workers and the server recorded in `home`; returns what was stopped."""
    stopped: list[str] = []
    for name in ("workers", "server"):
        record = home / f"{name}.json"
        if not record.is_file():
            continue
        values = json.loads(record.read_bytes())
        alive = [pid for pid in values.get("pids", [values.get("pid")]) if _is_alive(pid)]
        _stop(*alive)
        if alive:
            stopped.append(name)
        record.unlink()
    return stopped


def _start_server(home: Path) -> LocalServer:
    prefect_home = home / "prefect"
    prefect_home.mkdir(parents=True, exist_ok=True)
    record = home / "server.json"
    preferred = _port_of(record) if record.is_file() else DEFAULT_PORT
    for wanted in (preferred, *[ANY_PORT] * MOST_STOLEN_PORTS):
        port = _free_port(wanted)
        url = f"http://127.0.0.1:{port}"
        with (home / "server.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
                env={**os.environ, **server_settings(prefect_home, url)},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        if wait_for_server(process, url, prefect_home):
            commit_json(record, {"url": url, "pid": process.pid})
            return LocalServer(url=url, pid=process.pid, home=prefect_home)
        _stop(process.pid)
    raise ConfigurationError(
        f"other servers took every port on 127.0.0.1 that was free for the local Prefect server, "
        f"{MOST_STOLEN_PORTS + 1} times. Run again, or set PREFECT_API_URL to a server of your own."
    )


def wait_for_server(process: subprocess.Popen[bytes], url: str, prefect_home: Path) -> bool:
    """Wait until a server that was started answers; return False when another one answers in its place.

    Between finding a port free and binding it lie seconds, in which another start may take it. Its server answers just
    as well, but from another database, so the home tells whose it is.

    Raises:
        ConfigurationError: The server ended by itself, or does not answer in time.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None
        is_ours = _works_in(url, prefect_home)
        if is_ours is not None:
            return is_ours and not has_ended
        if has_ended and _is_free(int(url.rpartition(":")[2])):
            raise ConfigurationError(
                f"the local Prefect server ended with code {process.returncode}. See 'server.log' in "
                f"{prefect_home.parent.name!r}."
            )
        if has_ended:
            return False
        time.sleep(0.3)
    _stop(process.pid)
    raise ConfigurationError(
        f"the local Prefect server did not answer within {START_TIMEOUT_S:.0f} s. See 'server.log' in "
        f"{prefect_home.parent.name!r}, or set PREFECT_API_URL to a server of your own."
    )


def _works_in(url: str, prefect_home: Path) -> bool | None:
    """Tell whether the server at an address works in a home; None when none answers."""
    try:
        response = httpx.get(f"{url}/api/admin/settings", timeout=_HEALTH_TIMEOUT_S, auth=_auth())
        if response.is_server_error:
            return None
        return response.is_success and Path(response.json()["home"]) == prefect_home
    except httpx.HTTPError:
        return None
    except (ValueError, KeyError, TypeError):
        return False  # something else listens there


def check_server(api_url: str) -> str:
    """Return the version of a Prefect server after checking that this client can work with it.

    Raises:
        ConfigurationError: It cannot be reached, refuses the credentials, is no Prefect server, or has another version.
    """
    auth = _auth()
    try:
        response = httpx.get(f"{api_url.rstrip('/')}/admin/version", timeout=_HEALTH_TIMEOUT_S, auth=auth)
    except httpx.HTTPError as exc:
        raise ConfigurationError(
            f"the Prefect server named by PREFECT_API_URL ({api_url}) cannot be reached: {type(exc).__name__}. "
            "Start it, correct the address, or unset PREFECT_API_URL to use a local server."
        ) from exc
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        found = "is set but was refused" if auth else "is not set"
        raise ConfigurationError(
            f"the Prefect server named by PREFECT_API_URL ({api_url}) asks for credentials, and "
            f"PREFECT_API_AUTH_STRING {found}. Set it to the server's PREFECT_SERVER_API_AUTH_STRING (user:password)."
        )
    found_version = _version_in(response)
    if found_version is None:
        raise ConfigurationError(
            f"what PREFECT_API_URL names ({api_url}) is no Prefect API: it answers {response.status_code}. "
            "The address ends in /api."
        )
    if found_version != version("prefect"):
        raise ConfigurationError(
            f"the Prefect server named by PREFECT_API_URL ({api_url}) is version {found_version}, this client is "
            f"{version('prefect')}. Both must be the same: install that version on one of the two sides."
        )
    return found_version


def _version_in(response: httpx.Response) -> str | None:
    try:
        found: object = response.json() if response.is_success else None
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _auth() -> tuple[str, str] | None:
    credentials = os.environ.get("PREFECT_API_AUTH_STRING") or os.environ.get("PREFECT_SERVER_API_AUTH_STRING", "")
    user, _, password = credentials.partition(":")
    return (user, password) if credentials else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stop(*pids: int) -> None:
    """End processes and what they started: all are asked at once, and killed when they take longer than 20 s."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(_is_alive(pid) for pid in pids):
        for pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _port_of(record: Path) -> int:
    """Return the port of the last server: workers that outlived it look for it there."""
    return int(json.loads(record.read_bytes())["url"].rpartition(":")[2])


def _free_port(preferred: int) -> int:
    if preferred != ANY_PORT and _is_free(preferred):
        return preferred
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", ANY_PORT))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
