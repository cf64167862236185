"""A real server, real process workers, real HTTP: run dry, top up, die, continue; equal to a run in peace."""

from collections.abc import Generator
from decimal import Decimal
from pathlib import Path

import pytest

from eagle3.simulator.process import SimulatorProcess
from tests.e2e.deployed import (
    ANSWERS,
    KEY_BLOCK,
    PLANTED_KEY,
    SCENARIO,
    Deployed,
    assert_equal,
    kill,
    look_alike,  # noqa: F401 - fixture
    settings,
    until,
)

pytestmark = pytest.mark.slow

SAMPLES = 20


@pytest.fixture(scope="module")
def other_look_alike() -> Generator[SimulatorProcess]:
    """Serves the run that nothing stops, at the same time."""
    with SimulatorProcess(SCENARIO, [ANSWERS], time_scale=0.3) as process:
        yield process


def test_run_dry_topped_up_killed_and_continued(
    deployed: Deployed,
    look_alike: SimulatorProcess,  # noqa: F811
    other_look_alike: SimulatorProcess,
    tmp_path: Path,
) -> None:
    root, whole = tmp_path / "stopped", tmp_path / "whole"
    look_alike.set_key_limit(Decimal("0.0001"))
    run = deployed.pipeline(root, settings(look_alike, "generation.in_flight=4", samples=SAMPLES), key_block=KEY_BLOCK)
    other = deployed.pipeline(whole, settings(other_look_alike, samples=SAMPLES), key_block=KEY_BLOCK)

    waiting = deployed.wait(run, "AwaitingCredits")
    assert waiting.state is not None
    assert waiting.state.is_paused()
    until(lambda: not deployed.flow_processes(run), "the process of the waiting run ends")
    until(lambda: any("AwaitingCredits" in notice for notice in deployed.notices), "somebody is told")
    deployed.wait(other, "Completed")

    look_alike.set_key_limit(None)
    before = look_alike.stats()["generations"]
    watchers = [deployed.start("credits-watch") for _ in range(2)]
    until(lambda: look_alike.stats()["generations"] >= before + 15, "the same run sends requests again")
    kill([deployed.workers()["eagle3-cpu"], *deployed.flow_processes(run)])
    assert deployed.read(run).state_name == "Running", "nobody told the server"
    deployed.start_worker("eagle3-cpu", "another")
    deployed.call("janitor", grace_s=3)
    until(lambda: deployed.read(run).state_name == "Completed", "the run completes")
    for watcher in watchers:
        deployed.wait(watcher, "Completed")
    until(lambda: any("is Crashed" in notice for notice in deployed.notices), "somebody is told of the death")

    assert len(list((root / "latest" / "attempts").iterdir())) == 3
    assert_equal(root, whole, look_alike)
    _assert_key_is_nowhere(deployed)


def _assert_key_is_nowhere(deployed: Deployed) -> None:
    """After runs that paused and were killed: database, results, logs, run directories, messages, API."""
    places = [path for root in (deployed.line.home, *deployed.roots) for path in root.rglob("*") if path.is_file()]
    assert any(path.name == "prefect.db" for path in places)
    assert not [path.name for path in places if PLANTED_KEY.encode() in path.read_bytes()]
    assert not [notice for notice in deployed.notices if PLANTED_KEY in notice]
    with deployed.client() as client:
        block = client.read_block_document_by_name(KEY_BLOCK, "eagle3-api-key", include_secrets=False)
    assert PLANTED_KEY not in str(block.data)
    assert "*" in str(block.data["value"])


def test_registering_again_changes_only_what_is_new(deployed: Deployed) -> None:
    assert deployed.changes == ["automation eagle3 notify: created"]
