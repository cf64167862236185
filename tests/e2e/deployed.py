"""A Prefect server with real process workers, driven as people do: `eagle3 up`, then the API."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import BlockDocumentCreate
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from deployments.server import _stop
from deployments.settings import client_settings
from eagle3.simulator.process import SimulatorProcess
from tests.e2e.command_line import PROJECT, RECIPE, CommandLine

KEY_BLOCK = "test-key"
PLANTED_KEY = "sk-or-v1-planted-block-key-that-must-never-be-shown-77e1"
SCENARIO = PROJECT / "deployments" / "scenarios" / "demo.yaml"
ANSWERS = PROJECT / "examples" / "answers" / "smollm2-135m-instruct.jsonl"
SERVICES = ("credits-watch", "janitor")

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
    notices: list[str] = field(default_factory=list)
    """Messages that the automations sent, as "subject: body"."""
    changes: list[str] = field(default_factory=list)
    """What the second registration said that it changed, after a notification block was made."""
    roots: list[Path] = field(default_factory=list)
    """Folders of the runs that were started."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

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

    def wait(self, run: UUID, *names: str, timeout_s: float = 400) -> FlowRun:
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

    def make_block(self, slug: str, name: str, values: dict[str, Any]) -> None:
        """Make a block of a type, unless it is there."""
        with self.client() as client:
            kind = client.read_block_type_by_slug(slug)
            schema = client.get_most_recent_block_schema_for_block_type(kind.id)
            assert schema is not None
            document = BlockDocumentCreate(name=name, data=values, block_schema_id=schema.id, block_type_id=kind.id)
            with suppress(ObjectAlreadyExists):
                client.create_block_document(document)

    def start_worker(self, pool: str, name: str, machine: Path | None = None) -> subprocess.Popen[bytes]:
        """Start one more worker; with `machine`, one with a home and a working directory of its own."""
        place = machine or self.line.home
        (place / "prefect").mkdir(parents=True, exist_ok=True)
        command = ["-m", "prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", name]
        entries = [entry.decode().partition("=") for entry in _environment(self.workers()["eagle3-io"])]
        served = {key: value for key, _, value in entries if key.startswith("EAGLE3_REPORT_")}
        worker = subprocess.Popen(
            [sys.executable, *command, "--limit", "1"],
            env={**self.line.environment, **client_settings(place / "prefect", self.url), **served},
            cwd=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.started.append(worker)
        return worker

    def workers(self) -> dict[str, int]:
        """Process ids of the workers by pool."""
        return {pool: pid for pid, command in _processes() for pool in _pools_in(command, self.line.home, pid)}

    def switch_services(self, *, on: bool) -> None:
        """Switch the schedules of watcher and janitor, so that a test decides itself when they run."""
        with self.client() as client:
            for name in SERVICES:
                found = client.read_deployment_by_name(f"{name}/{name}")
                for schedule in found.schedules:
                    client.update_deployment_schedule(found.id, schedule.id, active=on)

    def parent_of_flow(self, run: UUID) -> int | None:
        """Process id of the worker that started a flow run."""
        for pid in self.flow_processes(run):
            fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return int(fields[1])
        return None

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


def until(condition: Callable[[], bool], what: str, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.4)  # asking the server costs it as much as a task run
    raise AssertionError(f"{what} did not happen within {timeout_s:.0f} s")


def provider_of(look_alike: SimulatorProcess) -> str:
    """The provider section of a recipe that asks a look-alike."""
    return (
        f"{{kind: openrouter, base_url: '{look_alike.base_url}', api_key_env: EAGLE3_TEST_KEY, "
        "model: huggingfacetb/smollm2-135m-instruct}"
    )


def settings(look_alike: SimulatorProcess, *extra: str, samples: int = 60) -> list[str]:
    """Overrides of the demo recipe: real requests to a look-alike, `samples` prompts of each of three datasets."""
    return [
        f"generation.provider={provider_of(look_alike)}",
        f"prompts.shard_samples={max(1, samples * 2 // 3)}",
        f"corpus.validation_samples={max(3, samples // 7)}",
        "generation.stop_grace_s=5",
        "generation.in_flight=64",
        *(f"prompts.datasets.{index}.max_samples={samples}" for index in range(3)),
        *extra,
    ]


def summary(root: Path) -> dict[str, Any]:
    return json.loads((root / "latest" / "summary.json").read_bytes())


def assert_equal(root: Path, whole: Path, look_alike: SimulatorProcess) -> None:
    """An interrupted run equals an uninterrupted one, and no answer was paid for twice."""
    found, wanted = summary(root), summary(whole)
    assert found["samples"] == wanted["samples"]
    assert found["corpus_digest"] == wanted["corpus_digest"]
    assert Decimal(found["spent_usd"]) == Decimal(wanted["spent_usd"])
    assert look_alike.stats()["paid_more_than_once"] == 0


@pytest.fixture(scope="module")
def look_alike() -> Generator[SimulatorProcess]:
    with SimulatorProcess(SCENARIO, [ANSWERS], time_scale=0.3) as process:
        yield process


@contextmanager
def _mailbox() -> Generator[tuple[str, list[str]]]:
    """Where notifications arrive: an address, and what was sent there."""
    notices: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
            notices.append(f"{sent['subject']}: {sent['body']}")
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the standard library
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", notices
        server.shutdown()


def operate(eagle3: CommandLine) -> Generator[Deployed]:
    """Server, workers, a key block and a notification block; watcher and janitor run only when a test calls them."""
    done = eagle3("deploy")
    assert done.returncode == 0, done.stderr[-3000:]
    server: dict[str, Any] = json.loads((eagle3.home / "server.json").read_bytes())
    with _mailbox() as (address, notices):
        deployed = Deployed(eagle3, server["url"], notices)
        deployed.make_block("eagle3-api-key", KEY_BLOCK, {"value": PLANTED_KEY})
        message = {"subject": "{{subject}}", "body": "{{body}}"}
        webhook = {"name": "mailbox", "url": address, "json_data": message}
        deployed.make_block("custom-webhook", "eagle3-notify", webhook)
        done = eagle3("up")
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip() == server["url"]
        deployed.changes.extend(done.stderr.splitlines())
        deployed.switch_services(on=False)
        yield deployed
        _stop(*(worker.pid for worker in deployed.started))
        for worker in deployed.started:
            worker.wait(timeout=30)
