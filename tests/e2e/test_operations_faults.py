"""What goes wrong while a deployment works, one fault after another, and what the server tells people about it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.register import _register_recipes
from deployments.settings import client_settings
from eagle3.simulator.process import SimulatorProcess
from tasks.request_slots import REQUESTS
from tests.e2e.command_line import PROJECT
from tests.e2e.deployed import (
    KEY_BLOCK,
    OPERATIONS_ONLY,
    Deployed,
    assert_equal,
    kill,
    look_alike,  # noqa: F401 - fixture
    settings,
    until,
)

# ruff: noqa: F811 - fixtures are imported
pytestmark = [pytest.mark.slow, OPERATIONS_ONLY]

SAMPLES = 20
FREED_WITHIN_S = 120.0


@pytest.fixture(autouse=True)
def fresh_account(look_alike: SimulatorProcess) -> None:
    look_alike.reset()
    look_alike.set_key_limit(None)


@pytest.fixture(scope="module")
def whole(deployed: Deployed, look_alike: SimulatorProcess) -> Path:
    """An uninterrupted run of the same settings: what every interrupted one must equal."""
    root = deployed.line.home / "whole"
    deployed.wait(deployed.pipeline(root, settings(look_alike, samples=SAMPLES), key_block=KEY_BLOCK), "Completed")
    return root


def slowly(look_alike: SimulatorProcess, in_flight: int) -> list[str]:
    return settings(look_alike, f"generation.in_flight={in_flight}", samples=SAMPLES)


def slots_in_use(deployed: Deployed) -> int:
    with deployed.client() as client:
        return client.read_global_concurrency_limit_by_name(REQUESTS).active_slots


def test_cancel_stops_new_requests_keeps_what_was_paid_and_can_be_continued(
    deployed: Deployed, whole: Path, look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    run = deployed.pipeline(tmp_path, slowly(look_alike, 2), key_block=KEY_BLOCK)
    until(lambda: look_alike.stats()["generations"] >= 8, "some requests are sent", 180)
    deployed.cancel(run)
    time.sleep(5)  # what is promised: no request later than this
    sent = look_alike.stats()["generations"]
    deployed.wait(run, "Cancelled", timeout_s=60)
    assert sent < 3 * SAMPLES
    assert look_alike.stats()["generations"] == sent
    until(lambda: not deployed.flow_processes(run), "the process of the cancelled run ends")

    again = deployed.pipeline(tmp_path, slowly(look_alike, 64), key_block=KEY_BLOCK)
    deployed.wait(again, "Completed")
    assert_equal(tmp_path, whole, look_alike)


def test_server_killed_then_flow_killed_and_continued(
    deployed: Deployed, whole: Path, look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    run = deployed.pipeline(tmp_path, slowly(look_alike, 2), key_block=KEY_BLOCK)
    until(lambda: look_alike.stats()["generations"] >= 8, "some requests are sent", 180)
    server = json.loads((deployed.line.home / "server.json").read_bytes())
    os.killpg(server["pid"], signal.SIGKILL)
    before = look_alike.stats()["generations"]
    until(lambda: look_alike.stats()["generations"] > before, "requests go on without a server")
    assert deployed.line("up").returncode == 0
    deployed.switch_services(on=False)
    assert json.loads((deployed.line.home / "server.json").read_bytes())["url"] == server["url"]
    until(lambda: deployed.read(run).state_name == "Completed", "the run completes", 180)
    assert_equal(tmp_path, whole, look_alike)


def test_a_killed_flow_is_reported_by_its_worker_and_continued_but_not_for_ever(
    deployed: Deployed, whole: Path, look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    run = deployed.pipeline(tmp_path, slowly(look_alike, 4), key_block=KEY_BLOCK)
    until(lambda: look_alike.stats()["generations"] >= 8, "some requests are sent", 180)
    kill(deployed.flow_processes(run))
    until(lambda: deployed.read(run).state_name == "Crashed", "the worker reports the death", 60)
    deployed.call("janitor", grace_s=1, max_attempts=1)
    assert deployed.read(run).state_name == "Crashed", "it died as often as it may"
    deployed.call("janitor", grace_s=1)
    until(lambda: deployed.read(run).state_name == "Completed", "the run completes", 180)
    assert_equal(tmp_path, whole, look_alike)
    deployed.call("janitor", grace_s=1)
    with deployed.client() as client:
        left = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])), limit=200)
    assert not [task.name for task in left if task.state_name == "Running"]


def test_worker_and_flow_killed_are_found_by_their_silence_and_hold_no_slot(
    deployed: Deployed, whole: Path, look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    run = deployed.pipeline(tmp_path, slowly(look_alike, 4), key_block=KEY_BLOCK)
    until(lambda: look_alike.stats()["generations"] >= 8, "some requests are sent", 180)
    assert slots_in_use(deployed) == 4
    kill([deployed.workers()["eagle3-cpu"], *deployed.flow_processes(run)])
    died = time.monotonic()
    until(lambda: slots_in_use(deployed) == 0, "its request slots are free", FREED_WITHIN_S)
    until(lambda: deployed.read(run).state_name == "Zombie", "the silence is noticed", 180)
    print(f"noticed {time.monotonic() - died:.0f} s after the death")
    found = deployed.read(run).state
    assert found is not None
    assert found.is_crashed()
    until(lambda: any("is Zombie" in notice for notice in deployed.notices), "somebody is told")
    assert deployed.line("up").returncode == 0
    deployed.switch_services(on=False)
    deployed.call("janitor", grace_s=1)
    until(lambda: deployed.read(run).state_name == "Completed", "the run completes", 240)
    assert_equal(tmp_path, whole, look_alike)


def test_people_are_told_of_a_spent_budget_and_a_failed_audit(
    deployed: Deployed, look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    spent = deployed.pipeline(tmp_path / "spent", slowly(look_alike, 8), key_block=KEY_BLOCK, budget_usd=0.0001)
    wrong = settings(
        look_alike,
        "audit.max_mismatch_share=0",
        "audit.max_drift_share=0",
        "prompts.datasets.2.sampling.temperature=2.0",
    )
    failed = deployed.pipeline(tmp_path / "failed", wrong, key_block=KEY_BLOCK)
    until(lambda: deployed.read(spent).state_name == "BudgetReached", "the budget is spent")
    until(lambda: deployed.read(failed).state_name == "AuditFailed", "the audit fails")
    for name in ("BudgetReached", "AuditFailed"):
        until(
            lambda name=name: any(f"is {name}" in notice for notice in deployed.notices), f"people are told of {name}"
        )


def test_reports_are_served_and_nothing_else_is(deployed: Deployed, whole: Path) -> None:
    with deployed.client() as client:
        links = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["report-tiny-cpu"])), limit=200
        )
    addresses = [str(link.data).partition("](")[2].rstrip(")") for link in links]
    address = next(found for found in addresses if f"/{whole.name}/" in found)
    assert address.startswith("http://127.0.0.1:")
    assert httpx.get(address).text.startswith("<!doctype html>")
    assert httpx.get(address.replace("report.html", "recipe.yaml")).status_code == 404


def test_prefect_deploy_alone_does_the_same(deployed: Deployed) -> None:
    deployed.switch_services(on=True)
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        env={**deployed.line.environment, **client_settings(deployed.line.home / "prefect", deployed.url)},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "nothing changed" in deployed.line("deploy").stdout
    deployed.switch_services(on=False)


def test_a_changed_recipe_shows_what_changed(deployed: Deployed) -> None:
    before = {"name": "shown", "generation": {"budget_usd": "1", "in_flight": 8}}
    after = {"name": "shown", "generation": {"budget_usd": "2", "in_flight": 8}}
    with temporary_settings({PREFECT_API_URL: f"{deployed.url}/api"}), get_client(sync_client=True) as client:
        said = [_register_recipes(client, {"shown": recipe}) for recipe in (before, before, after, after)]
    assert said == [["recipe shown: created"], [], ['recipe shown: generation.budget_usd: "1" -> "2"'], []]
