"""Several hands on one run: two watchers, the Resume button in the middle, a second run of the same recipe."""

from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest

from eagle3.simulator.process import SimulatorProcess
from tests.e2e.deployed import KEY_BLOCK, OPERATIONS_ONLY, Deployed, until
from tests.e2e.operating import (
    change_recipe,
    log_lines_of,
    look_alike,  # noqa: F401 - a fixture
    write_recipe,
)

pytestmark = [pytest.mark.slow, OPERATIONS_ONLY]

SAMPLES = 60


@pytest.fixture(autouse=True)
def fresh_account(look_alike: SimulatorProcess) -> None:  # noqa: F811
    look_alike.reset()
    look_alike.set_key_limit(None)


def start(deployed: Deployed, recipe: Path, budget_usd: float | None = None) -> UUID:
    return deployed.start(
        "pipeline",
        recipe=str(recipe),
        until="generate",
        budget_usd=budget_usd,
        key_block=KEY_BLOCK,
        run_root=str(recipe.parent),
        home=str(deployed.line.home),
    )


def attempts(run_directory: Path) -> int:
    return len(list((run_directory / "attempts").iterdir()))


def test_two_watchers_and_the_resume_button_continue_a_run_once(
    deployed: Deployed,
    look_alike: SimulatorProcess,  # noqa: F811
    tmp_path: Path,
) -> None:
    recipe = write_recipe(tmp_path / "shared.yaml", look_alike, SAMPLES, ["generation.in_flight=16"])
    look_alike.set_key_limit(Decimal("0.00008"))
    run = start(deployed, recipe)
    deployed.wait(run, "AwaitingCredits")
    until(lambda: not deployed.flow_processes(run), "the process of the waiting run ends")
    directory = (tmp_path / "latest").resolve()

    look_alike.set_key_limit(None)
    watchers = [deployed.start("credits-watch") for _ in range(2)]
    until(lambda: (directory / ".probe").exists() or deployed.read(run).state_name != "AwaitingCredits", "a trial")
    answer = deployed.resume(run)
    assert answer in ("ACCEPT", "ABORT"), "either the button was first, or a watcher was"
    until(lambda: deployed.read(run).state_name == "Completed", "the run completes", 240)
    for watcher in watchers:
        deployed.wait(watcher, "Completed")

    with deployed.client() as client:
        names = [state.name for state in client.read_flow_run_states(run)]
    assert names.count("Resuming") == 1
    assert attempts(directory) == 2
    assert look_alike.stats()["paid_more_than_once"] == 0


def test_the_second_run_of_a_recipe_fails_at_once_and_says_who_works_there(
    deployed: Deployed,
    look_alike: SimulatorProcess,  # noqa: F811
    tmp_path: Path,
) -> None:
    recipe = write_recipe(tmp_path / "twice.yaml", look_alike, SAMPLES, ["generation.in_flight=1"])
    first = start(deployed, recipe)
    until(lambda: look_alike.stats()["generations"] >= 2, "the first run asks", 180)
    second = start(deployed, recipe)
    refused = deployed.wait(second, "Failed").state
    assert refused is not None
    said = str(refused.message)
    assert "RunLockedError" in said
    assert "in use by process" in said
    until(lambda: any("in use by process" in line for line in log_lines_of(deployed, second)), "the log says it too")

    deployed.cancel(first)
    deployed.wait(first, "Cancelled", timeout_s=60)
    assert attempts((tmp_path / "latest").resolve()) == 1, "the second run left no trace"


def test_a_spent_budget_waits_for_a_higher_one_whatever_the_account_holds(
    deployed: Deployed,
    look_alike: SimulatorProcess,  # noqa: F811
    tmp_path: Path,
) -> None:
    recipe = write_recipe(tmp_path / "frugal.yaml", look_alike, SAMPLES, ["generation.in_flight=16"])
    run = start(deployed, recipe, budget_usd=0.0001)
    waiting = deployed.wait(run, "BudgetReached").state
    assert waiting is not None
    assert waiting.is_paused()
    assert Decimal(look_alike.stats()["billed_usd"]) <= Decimal("0.0001")

    look_alike.topup(Decimal(5))
    deployed.call("credits-watch")
    assert deployed.read(run).state_name == "BudgetReached", "a top-up raises no budget"
    assert deployed.resume(run, {"new_budget_usd": -1}) == "REJECT"
    assert deployed.resume(run) == "REJECT", "the question must be answered"

    change_recipe(recipe, "generation", in_flight=8)
    assert deployed.resume(run, {"new_budget_usd": 0.05}) == "ACCEPT"
    until(lambda: deployed.read(run).state_name == "Completed", "the run completes", 240)
    assert attempts((tmp_path / "latest").resolve()) == 2
    assert look_alike.stats()["paid_more_than_once"] == 0
