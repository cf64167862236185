"""A real server, real process workers, real HTTP: trigger, run dry, top up, resume, cancel, kill, continue."""

import json
import os
import signal
import time
from collections.abc import Generator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.schemas.actions import BlockDocumentCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.exceptions import ObjectAlreadyExists

from eagle3.simulator.process import SimulatorProcess
from tests.e2e.command_line import PROJECT, CommandLine
from tests.e2e.deployed import KEY_BLOCK, OPERATIONS_ONLY, Deployed, kill, until

pytestmark = [pytest.mark.slow, OPERATIONS_ONLY]

PLANTED_KEY = "sk-or-v1-planted-block-key-that-must-never-be-shown-77e1"
SCENARIO = PROJECT / "deployments" / "scenarios" / "demo.yaml"
ANSWERS = PROJECT / "examples" / "answers" / "smollm2-135m-instruct.jsonl"
SAMPLES = 3 * 60


@pytest.fixture(scope="module")
def look_alike() -> Generator[SimulatorProcess]:
    with SimulatorProcess(SCENARIO, [ANSWERS], time_scale=0.3) as process:
        yield process


@pytest.fixture(autouse=True)
def fresh_account(look_alike: SimulatorProcess) -> None:
    look_alike.reset()
    look_alike.set_key_limit(None)


def settings(look_alike: SimulatorProcess, *extra: str) -> list[str]:
    provider = (
        f"{{kind: openrouter, base_url: '{look_alike.base_url}', api_key_env: EAGLE3_TEST_KEY, "
        "model: huggingfacetb/smollm2-135m-instruct}"
    )
    return [
        f"generation.provider={provider}",
        "prompts.shard_samples=40",
        "corpus.validation_samples=9",
        "generation.stop_grace_s=5",
        *(f"prompts.datasets.{index}.max_samples=60" for index in range(3)),
        *extra,
    ]


@pytest.fixture(scope="module")
def deployed(eagle3: CommandLine) -> Deployed:
    done = eagle3("up")
    assert done.returncode == 0, done.stderr[-3000:]
    deployed = Deployed(eagle3, done.stdout.strip())
    _make_key_block(deployed)
    return deployed


def _make_key_block(deployed: Deployed) -> None:
    with deployed.client() as client:
        kind = client.read_block_type_by_slug("eagle3-api-key")
        schema = client.get_most_recent_block_schema_for_block_type(kind.id)
        assert schema is not None
        document = BlockDocumentCreate(
            name=KEY_BLOCK, data={"value": PLANTED_KEY}, block_schema_id=schema.id, block_type_id=kind.id
        )
        with suppress(ObjectAlreadyExists):  # another module made it
            client.create_block_document(document)


@pytest.fixture(scope="module")
def whole(deployed: Deployed, look_alike: SimulatorProcess) -> dict[str, Any]:
    """An uninterrupted run of the same settings: what every interrupted one must equal."""
    root = deployed.line.home / "whole"
    run = deployed.pipeline(root, settings(look_alike), key_block=KEY_BLOCK)
    deployed.wait(run, "Completed")
    return summary(root)


def summary(root: Path) -> dict[str, Any]:
    return json.loads((root / "latest" / "summary.json").read_bytes())


def assert_equal(root: Path, whole: dict[str, Any], look_alike: SimulatorProcess) -> None:
    found = summary(root)
    assert found["samples"] == SAMPLES
    assert found["corpus_digest"] == whole["corpus_digest"]
    assert Decimal(found["spent_usd"]) == Decimal(whole["spent_usd"])
    assert look_alike.stats()["paid_more_than_once"] == 0


def test_out_of_credits_waits_without_a_process_and_the_watcher_continues_the_same_run(
    deployed: Deployed, whole: dict[str, Any], look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    look_alike.set_key_limit(Decimal("0.0002"))
    run = deployed.pipeline(tmp_path, settings(look_alike), key_block=KEY_BLOCK)
    waiting = deployed.wait(run, "AwaitingCredits")
    assert waiting.state is not None
    assert waiting.state.is_paused()
    until(lambda: not deployed.flow_processes(run), "the process of the waiting run ends")

    deployed.call("credits-watch")
    assert deployed.read(run).state_name == "AwaitingCredits", "nothing was topped up"

    look_alike.set_key_limit(None)
    twice = [deployed.start("credits-watch") for _ in range(2)]
    until(lambda: deployed.read(run).state_name == "Completed", "the run completes", 180)
    for watcher in twice:
        deployed.wait(watcher, "Completed")
    assert len(list((tmp_path / "latest" / "attempts").iterdir())) == 2
    assert_equal(tmp_path, whole, look_alike)


def test_cancel_stops_new_requests_keeps_what_was_paid_and_can_be_continued(
    deployed: Deployed, whole: dict[str, Any], look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    run = deployed.pipeline(tmp_path, settings(look_alike, "generation.in_flight=4"), key_block=KEY_BLOCK)
    until(lambda: look_alike.stats()["generations"] >= 12, "a dozen requests are sent", 180)
    deployed.cancel(run)
    cancelled_at = time.monotonic()
    sent = _requests_until_quiet(look_alike, cancelled_at)
    deployed.wait(run, "Cancelled", timeout_s=60)
    assert sent < SAMPLES
    assert look_alike.stats()["generations"] == sent
    until(lambda: not deployed.flow_processes(run), "the process of the cancelled run ends")

    again = deployed.pipeline(tmp_path, settings(look_alike), key_block=KEY_BLOCK)
    deployed.wait(again, "Completed")
    assert_equal(tmp_path, whole, look_alike)


def _requests_until_quiet(look_alike: SimulatorProcess, since: float) -> int:
    """Return the requests seen 5 s after `since`; nothing may be sent later."""
    time.sleep(max(0.0, since + 5 - time.monotonic()))
    return look_alike.stats()["generations"]


def test_a_spent_budget_asks_for_another_when_resumed(
    deployed: Deployed, whole: dict[str, Any], look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    run = deployed.pipeline(tmp_path, settings(look_alike), key_block=KEY_BLOCK, budget_usd=0.0004)
    waiting = deployed.wait(run, "BudgetReached")
    assert waiting.state is not None
    assert waiting.state.is_paused()
    assert Decimal(look_alike.stats()["billed_usd"]) <= Decimal("0.0004")
    assert deployed.resume(run, {"new_budget_usd": -1}) == "REJECT"
    assert deployed.resume(run, {"new_budget_usd": 0.05}) == "ACCEPT"
    until(lambda: deployed.read(run).state_name == "Completed", "the run completes", 180)
    assert_equal(tmp_path, whole, look_alike)


def test_killed_flow_and_killed_worker_with_flow_are_found_and_continued(
    deployed: Deployed, whole: dict[str, Any], look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    run = deployed.pipeline(tmp_path, settings(look_alike, "generation.in_flight=8"), key_block=KEY_BLOCK)
    until(lambda: look_alike.stats()["generations"] >= 20, "requests are sent", 180)
    kill(deployed.flow_processes(run))
    deployed.wait(run, "Crashed", "Resuming", "Pending", "Running", timeout_s=60)
    until(lambda: deployed.read(run).state_name != "Running" or deployed.read(run).run_count > 1, "the death is seen")
    deployed.call("janitor", grace_s=3)

    before = look_alike.stats()["generations"]
    until(lambda: look_alike.stats()["generations"] >= before + 20, "requests are sent again", 180)
    kill([deployed.workers()["eagle3-cpu"], *deployed.flow_processes(run)])
    assert deployed.line("up").returncode == 0
    assert deployed.read(run).state_name == "Running", "nobody told the server"
    deployed.call("janitor", grace_s=3)
    until(lambda: deployed.read(run).state_name == "Completed", "the run completes", 240)

    assert_equal(tmp_path, whole, look_alike)
    deployed.call("janitor", grace_s=3)
    with deployed.client() as client:
        left = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])), limit=200)
    assert not [task.name for task in left if task.state_name == "Running"]


def test_the_server_restarts_while_a_run_works(
    deployed: Deployed, whole: dict[str, Any], look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    run = deployed.pipeline(tmp_path, settings(look_alike, "generation.in_flight=8"), key_block=KEY_BLOCK)
    until(lambda: look_alike.stats()["generations"] >= 20, "requests are sent", 180)
    server = json.loads((deployed.line.home / "server.json").read_bytes())
    os.killpg(server["pid"], signal.SIGKILL)
    assert deployed.line("up").returncode == 0
    assert json.loads((deployed.line.home / "server.json").read_bytes())["url"] == server["url"]
    until(lambda: deployed.read(run).state_name == "Completed", "the run completes", 240)
    assert_equal(tmp_path, whole, look_alike)


def test_the_planted_key_is_found_nowhere(deployed: Deployed, whole: dict[str, Any]) -> None:
    """After runs that paused, were cancelled and crashed: database, results, logs, run directories, API."""
    places = [path for root in (deployed.line.home, *deployed.roots) for path in root.rglob("*") if path.is_file()]
    assert any(path.name == "prefect.db" for path in places)
    assert not [path.name for path in places if PLANTED_KEY.encode() in path.read_bytes()]
    with deployed.client() as client:
        block = client.read_block_document_by_name(KEY_BLOCK, "eagle3-api-key", include_secrets=False)
    assert PLANTED_KEY not in str(block.data)
    assert "*" in str(block.data["value"])


def test_deploying_again_changes_nothing(deployed: Deployed) -> None:
    done = deployed.line("deploy")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "nothing changed" in done.stdout


def test_reports_are_served_and_nothing_else_is(
    deployed: Deployed, whole: dict[str, Any], look_alike: SimulatorProcess
) -> None:
    with deployed.client() as client:
        links = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["report-tiny-cpu"])), limit=200
        )
    addresses = [str(link.data).partition("](")[2].rstrip(")") for link in links]
    address = next(found for found in addresses if "/whole/" in found)
    assert address.startswith("http://127.0.0.1:")
    assert httpx.get(address).text.startswith("<!doctype html>")
    assert httpx.get(address.replace("report.html", "recipe.yaml")).status_code == 404
