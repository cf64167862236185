"""What people deploy: prefect.yaml, the run form, the compose file, and the checks of a server before it is used."""

import re
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore

from deployments.automations import _comparable, _resolved
from deployments.register import changed_fields
from deployments.report_server import ReportHandler
from deployments.server import POOLS, check_server
from deployments.settings import client_settings, server_settings
from eagle3.artifacts import Stage
from eagle3.errors import BudgetReachedError, ConfigurationError, CredentialsError, CreditsExhaustedError
from eagle3.stages import ORDER
from flows.form import RedoName, StageName
from flows.pauses import _name_of
from flows.pipeline import STEPS, pipeline
from tasks.key_block import ApiKeyBlock
from tasks.spend import plan_line, spend_rows

PROJECT = Path(__file__).resolve().parents[2]
PREFECT_YAML: dict[str, Any] = yaml.safe_load((PROJECT / "prefect.yaml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((PROJECT / "docker" / "compose.yaml").read_text())


def test_every_deployment_is_there_in_a_pool_that_has_a_worker() -> None:
    found = {entry["name"]: entry["work_pool"]["name"] for entry in PREFECT_YAML["deployments"]}
    assert set(found) == {
        "pipeline", "prepare", "generate", "reconstruct-audit", "corpus", "extract", "extract-group", "train",
        "evaluate-export", "credits-watch", "janitor",
    }  # fmt: skip
    assert set(found.values()) == {name for name, _ in POOLS}


def test_services_run_on_a_schedule() -> None:
    scheduled = {entry["name"] for entry in PREFECT_YAML["deployments"] if entry.get("schedules")}
    assert scheduled == {"credits-watch", "janitor"}


def test_flow_output_never_goes_through_the_pipe_of_a_worker() -> None:
    assert all(entry["work_pool"]["job_variables"]["stream_output"] is False for entry in PREFECT_YAML["deployments"])


def test_the_form_offers_every_stage_and_redoes_none_that_was_paid_for() -> None:
    assert list(get_args(StageName)) == [stage.command for stage in ORDER] == [stage.command for stage in STEPS]
    paid = {Stage.PROMPTS.command, Stage.COMPLETIONS.command}
    assert set(get_args(RedoName)) == {"nothing", *get_args(StageName)} - paid


def test_every_field_of_the_form_is_explained_and_bounded() -> None:
    schema = pipeline.parameters.model_dump()
    fields = schema["properties"]
    assert all(field.get("description") for field in fields.values()), fields
    assert fields["until"]["enum"] == list(get_args(StageName))
    number = next(kind for kind in fields["budget_usd"]["anyOf"] if kind["type"] == "number")
    assert number["exclusiveMinimum"] == 0
    assert not any("api_key" in name for name in fields), "a plain parameter would be stored in clear"


def test_states_are_named_after_what_people_must_do() -> None:
    assert _name_of(CreditsExhaustedError("x")) == "AwaitingCredits"
    assert _name_of(BudgetReachedError("x")) == "BudgetReached"


def test_notifications_need_a_block_and_are_left_out_without_one() -> None:
    document = yaml.safe_load((PROJECT / "deployments" / "automations.yaml").read_text())
    kept = {entry["name"]: _resolved(entry, None) is not None for entry in document["automations"]}
    assert kept == {"eagle3 zombie": True, "eagle3 notify": False}


def test_an_automation_is_the_same_however_the_server_orders_its_events() -> None:
    document = yaml.safe_load((PROJECT / "deployments" / "automations.yaml").read_text())
    entry = next(entry for entry in document["automations"] if len(entry["trigger"]["expect"]) > 4)
    block: Any = SimpleNamespace(id="6e1b7e5e-6ad5-4a0c-9bb9-0d9b0b0c8d10")
    automation = AutomationCore.model_validate(_resolved(entry, block))
    compared = _comparable(automation)
    assert compared["trigger"]["expect"] == sorted(entry["trigger"]["expect"])
    trigger: Any = automation.trigger
    trigger.expect = set(list(trigger.expect)[1:])
    assert _comparable(automation) != compared


def test_what_changed_is_told_field_by_field() -> None:
    old, new = {"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": "x"}
    assert changed_fields(old, new) == ["a.c: 2 -> 3", 'd: null -> "x"']
    assert changed_fields(new, new) == []


REQUIRED = {
    "PREFECT_SERVER_UI_API_URL", "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", "PREFECT_SERVER_DATABASE_TIMEOUT",
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD", "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED",
    "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS", "PREFECT_SERVER_ENCRYPTION_KEY", "PREFECT_SERVER_ANALYTICS_ENABLED",
}  # fmt: skip


def test_both_server_kits_carry_the_required_settings(tmp_path: Path) -> None:
    assert set(server_settings(tmp_path, "http://x")) >= REQUIRED
    composed = COMPOSE["services"]["server"]["environment"]
    assert set(composed) >= REQUIRED | {"PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_DATABASE_CONNECTION_URL"}
    worker = COMPOSE["services"]["worker-io"]["environment"]
    for name in ("PREFECT_RESULTS_DEFAULT_SERIALIZER", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"):
        assert worker[name] == client_settings(tmp_path, "http://x")[name]


def test_the_encryption_key_stays_the_same_and_is_private(tmp_path: Path) -> None:
    first = server_settings(tmp_path, "http://x")["PREFECT_SERVER_ENCRYPTION_KEY"]
    assert server_settings(tmp_path, "http://x")["PREFECT_SERVER_ENCRYPTION_KEY"] == first
    assert (tmp_path / "encryption.key").stat().st_mode & 0o077 == 0


def test_compose_binds_loopback_only_and_serves_every_pool() -> None:
    services = COMPOSE["services"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    commands = " ".join(service.get("command", "") for service in services.values())
    assert all(f"--pool {name}" in commands for name, _ in POOLS)
    assert services["server"]["image"].startswith(f"prefecthq/prefect:{version('prefect')}-")
    named = {volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert {name for name in named if not name.startswith("$")} == set(COMPOSE["volumes"])
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)


def validate_compose(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_compose_keeps_the_schema_of_the_compose_specification() -> None:
    done = validate_compose(PROJECT / "docker" / "compose.yaml")
    assert done.returncode == 0, done.stdout


def test_the_schema_notices_a_wrong_key(tmp_path: Path) -> None:
    text = (PROJECT / "docker" / "compose.yaml").read_text()
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(text.replace("restart: unless-stopped", "restarts: unless-stopped", 1))
    done = validate_compose(wrong)
    assert done.returncode == 1
    assert "restarts" in done.stdout


def test_compose_names_every_variable_it_needs() -> None:
    text = (PROJECT / "docker" / "compose.yaml").read_text()
    needed = set(re.findall(r"\$\{(\w+):\?", text))
    plain = set(re.findall(r"\$\{(\w+)\}", text))
    assert plain <= needed, "a variable without default and without a message stops compose or is empty"
    assert needed == {"PREFECT_AUTH", "ENCRYPTION_KEY", "POSTGRES_PASSWORD"}


def test_images_are_built_from_the_constraints() -> None:
    lines = (PROJECT / "docker" / "worker.Dockerfile").read_text().splitlines()
    installs = [line for line in lines if "pip install" in line]
    assert installs
    assert all("-c constraints.txt" in line or "--no-deps -r" in line for line in installs)
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    assert all((PROJECT / name).exists() for name in copied)
    assert {"eagle3", "tasks", "flows", "deployments", "prefect.yaml", "constraints.txt"} <= copied


@contextmanager
def serving(status: int, body: bytes) -> Generator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the standard library
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


def test_a_server_of_this_version_is_taken() -> None:
    with serving(200, f'"{version("prefect")}"'.encode()) as url:
        assert check_server(url) == version("prefect")


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b'"2.20.1"', "is version 2.20.1, this client is"),
        (401, b"{}", "PREFECT_API_AUTH_STRING is not set"),
        (404, b"<html>", "is no Prefect API: it answers 404"),
        (200, b"<html>", "is no Prefect API: it answers 200"),
    ],
)
def test_a_server_that_cannot_be_used_is_named_with_what_to_do(
    status: int, body: bytes, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    with serving(status, body) as url, pytest.raises(ConfigurationError, match="PREFECT_API_URL") as error:
        check_server(url)
    assert expected in str(error.value)


def test_a_server_that_is_away_is_named() -> None:
    with pytest.raises(ConfigurationError, match="cannot be reached: ConnectError"):
        check_server("http://127.0.0.1:9/api")


def test_reports_are_served_and_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "report.html").write_text("<!doctype html>")
    (run / "prompts.jsonl").write_text("private")
    (tmp_path / "report.html").write_text("outside")
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *given: ReportHandler(*given, directory=str(tmp_path / "runs"))
    )
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert httpx.get(f"{url}/one/report.html").text == "<!doctype html>"
        for address in ("one/prompts.jsonl", "one/", "", "%2e%2e/report.html"):
            assert httpx.get(f"{url}/{address}").status_code == 404, address
        server.shutdown()


def test_a_key_block_needs_exactly_one_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE3_TEST_PLACE", "from-environment")
    (tmp_path / "key").write_text("from-file\n")
    assert ApiKeyBlock(environment_variable="EAGLE3_TEST_PLACE").read_key() == "from-environment"
    assert ApiKeyBlock(file=str(tmp_path / "key")).read_key() == "from-file"
    planted = ApiKeyBlock(value="sk-planted")  # pyright: ignore[reportArgumentType]
    assert planted.read_key() == "sk-planted"
    assert "sk-planted" not in repr(planted)
    for wrong in (ApiKeyBlock(), ApiKeyBlock(environment_variable="X", file="y"), ApiKeyBlock(file="missing")):
        with pytest.raises(CredentialsError):
            wrong.read_key()


def test_spend_tables_end_with_the_total_and_name_plan_and_budget() -> None:
    stats: dict[str, Any] = {
        "spent_usd": "0.03",
        "held_usd": "0",
        "budget_usd": "1",
        "samples": 3,
        "planned_usd": {"expected": "0.04", "worst": "0.5"},
        "by_provider": {"A": {"samples": 2, "cost_usd": "0.01"}, "B": {"samples": 1, "cost_usd": "0.02"}},
    }
    rows = spend_rows(stats, "by_provider", "provider")
    assert [row["provider"] for row in rows] == ["A", "B", "all"]
    assert sum(Decimal(row["USD"]) for row in rows[:-1]) == Decimal(rows[-1]["USD"])
    assert "planned $0.04 expected, $0.5 at worst" in plan_line(stats)
