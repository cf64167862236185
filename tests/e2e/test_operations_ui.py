"""The Prefect UI in a real browser: fill the form, start, watch spend and progress, cancel, resume.

Screenshots are test output; `EAGLE3_SCREENSHOTS` names a folder that keeps them.
"""

import os
import shutil
import time
from collections.abc import Generator
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml

from eagle3.recipe import load_recipe
from eagle3.simulator.process import SimulatorProcess
from tests.e2e.command_line import RECIPE
from tests.e2e.deployed import KEY_BLOCK, OPERATIONS_ONLY, Deployed, until
from tests.e2e.test_operations import deployed, look_alike, settings  # noqa: F401 - fixtures

pytestmark = [pytest.mark.slow, OPERATIONS_ONLY]

CHROMIUM = shutil.which("chromium")
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def page() -> Generator[Any]:
    if CHROMIUM is None:
        pytest.skip("no browser: install Debian's 'chromium' package to test the Prefect UI")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 900})
        page.set_default_timeout(WAIT_MS)
        yield page
        browser.close()


@pytest.fixture
def recipe(tmp_path: Path, look_alike: SimulatorProcess) -> Path:  # noqa: F811 - a fixture
    """A recipe as a person would have it: everything in the file, nothing in the form but its path."""
    wanted = load_recipe(RECIPE, settings(look_alike, "generation.in_flight=3"))
    values = wanted.model_dump(mode="json")
    for dataset in values["prompts"]["datasets"]:
        dataset["path"] = str(wanted.resolve(Path(dataset["path"])))
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def keep(page: Any, name: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("EAGLE3_SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"{name}.png")


def field(page: Any, name: str) -> Any:
    return page.locator(f"xpath=//label[starts-with(normalize-space(.), '{name}')]/following::textarea[1]")


def test_start_watch_cancel_and_resume(
    deployed: Deployed,  # noqa: F811
    look_alike: SimulatorProcess,  # noqa: F811
    page: Any,
    recipe: Path,
    tmp_path: Path,
) -> None:
    look_alike.reset()
    look_alike.set_key_limit(None)
    with deployed.client() as client:
        pipeline = client.read_deployment_by_name("pipeline/pipeline").id

    page.goto(f"{deployed.url}/deployments/deployment/{pipeline}/run")
    field(page, "recipe").fill(str(recipe))
    field(page, "key_block").fill(KEY_BLOCK)
    field(page, "run_root").fill(str(tmp_path / "runs"))
    field(page, "home").fill(str(deployed.line.home))
    keep(page, "run-form", tmp_path)
    page.get_by_role("button", name="Submit").click()
    until(lambda: _run_of(deployed, recipe) is not None, "the form starts a run", 60)
    run = _run_of(deployed, recipe)
    assert run is not None

    page.goto(f"{deployed.url}/runs/flow-run/{run}?tab=Artifacts")
    until(lambda: _progress(deployed, run) is not None, "the progress artifact is made", 180)
    first = _progress(deployed, run)
    until(lambda: _progress(deployed, run) != first, "the progress artifact changes in place", 60)
    page.reload()
    page.get_by_text("spent usd").first.wait_for()
    keep(page, "progress", tmp_path)

    page.get_by_role("button", name="Cancel").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").last.click()
    deployed.wait(run, "Cancelled", timeout_s=60)
    page.reload()
    page.get_by_text("Cancelled").first.wait_for()
    keep(page, "cancelled", tmp_path)

    look_alike.set_key_limit(Decimal(look_alike.stats()["billed_usd"]) + Decimal("0.0001"))
    waiting = deployed.start(
        "pipeline", recipe=str(recipe), until="corpus", key_block=KEY_BLOCK, run_root=str(tmp_path / "runs"),
        home=str(deployed.line.home), overrides=["generation.in_flight=64"],
    )  # fmt: skip
    deployed.wait(waiting, "AwaitingCredits")
    look_alike.set_key_limit(None)
    page.goto(f"{deployed.url}/runs/flow-run/{waiting}")
    page.get_by_text("AwaitingCredits").first.wait_for()
    keep(page, "awaiting-credits", tmp_path)
    page.get_by_role("button", name="Resume").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").last.click()
    until(lambda: deployed.read(waiting).state_name == "Completed", "the resumed run completes", 240)
    page.reload()
    page.get_by_text("Completed").first.wait_for()
    time.sleep(2)  # the graph is drawn late; the picture is for people
    keep(page, "completed", tmp_path)


def _run_of(deployed: Deployed, recipe: Path) -> UUID | None:  # noqa: F811
    with deployed.client() as client:
        runs = client.read_flow_runs(limit=200)
    return next((run.id for run in runs if run.parameters.get("recipe") == str(recipe)), None)


def _progress(deployed: Deployed, run: UUID) -> str | None:  # noqa: F811
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterType

    with deployed.client() as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[run]), type=ArtifactFilterType(any_=["progress"])
            )
        )
    shown = [str(artifact.description) for artifact in found if "generation" in str(artifact.description)]
    return shown[0] if shown else None
