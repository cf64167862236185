"""A Prefect server with real process workers, driven as people do: `eagle3 up`, then the API."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from tests.e2e.command_line import RECIPE, CommandLine

KEY_BLOCK = "test-key"

OPERATIONS_ONLY = pytest.mark.skipif(
    not os.environ.get("EAGLE3_TEST_OPERATIONS"),
    reason="real workers, kills and a browser take many minutes: set EAGLE3_TEST_OPERATIONS=1 (make test-operations)",
)
"""Tests that operate a whole deployment."""


@dataclass(frozen=True)
class Deployed:
    """The server of a command line's home, with workers and deployments."""

    line: CommandLine
    url: str
    roots: list[Path] = field(default_factory=list)
    """Folders of the runs that were started."""

    def client(self) -> SyncPrefectClient:
        with temporary_settings({PREFECT_API_URL: f"{self.url}/api"}):
            return get_client(sync_client=True)

    def start(self, deployment: str, **parameters: Any) -> UUID:
        with self.client() as client:
            found = client.read_deployment_by_name(f"{deployment}/{deployment}")
            return client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def pipeline(self, root: Path, overrides: Sequence[str], **parameters: Any) -> UUID:
        self.roots.append(root)
        values = {"recipe": str(RECIPE), "until": "corpus", "run_root": str(root), "home": str(self.line.home)}
        return self.start("pipeline", **values, overrides=list(overrides), **parameters)

    def read(self, run: UUID) -> FlowRun:
        with self.client() as client:
            return client.read_flow_run(run)

    def wait(self, run: UUID, *names: str, timeout_s: float = 240) -> FlowRun:
        """Poll until the run is in one of the named states; any other ending fails at once."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self.read(run)
            assert found.state is not None
            if found.state.name in names:
                return found
            if found.state.is_final() or found.state.is_paused():
                raise AssertionError(f"{found.name} is {found.state.name}: {found.state.message}")
            time.sleep(0.5)
        raise AssertionError(f"{found.name} is still {found.state}, expected {names}")

    def call(self, deployment: str, **parameters: Any) -> FlowRun:
        return self.wait(self.start(deployment, **parameters), "Completed")

    def cancel(self, run: UUID) -> None:
        with self.client() as client:
            client.set_flow_run_state(run, Cancelling())

    def resume(self, run: UUID, run_input: dict[str, Any] | None = None) -> str:
        with self.client() as client:
            return client.resume_flow_run(run, run_input=run_input).status.value

    def workers(self) -> dict[str, int]:
        """Process ids of the workers by pool."""
        return {pool: pid for pid, command in _processes() for pool in _pools_in(command, self.line.home, pid)}

    def flow_processes(self, run: UUID) -> list[int]:
        """Process ids that carry out a flow run."""
        wanted = f"PREFECT__FLOW_RUN_ID={run}".encode()
        return [pid for pid, _ in _processes() if wanted in _environment(pid)]


def _processes() -> list[tuple[int, list[str]]]:
    found: list[tuple[int, list[str]]] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")))
            except OSError:
                continue
    return found


def _environment(pid: int) -> list[bytes]:
    try:
        return (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _pools_in(command: list[str], home: Path, pid: int) -> list[str]:
    if "worker" not in command or f"EAGLE3_HOME={home}".encode() not in _environment(pid):
        return []
    return [command[command.index("--pool") + 1]] if "--pool" in command else []


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen within {timeout_s:.0f} s")
