"""The Prefect UI in a real browser: fill the form, start, watch progress and spend, cancel, retry, resume.

Screenshots are test output; `EAGLE3_SCREENSHOTS` names a folder that keeps them.
"""

import os
import re
import shutil
from collections.abc import Generator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from eagle3.simulator.process import SimulatorProcess
from tests.e2e.deployed import ANSWERS, KEY_BLOCK, SCENARIO, Deployed, until
from tests.e2e.operating import (
    artifacts_of,
    change_recipe,
    log_lines_of,
    look_alike,  # noqa: F401 - a fixture
    write_recipe,
)

CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no browser: install Debian's 'chromium' package to test the Prefect UI"
    ),
]

WAIT_MS = 120_000
PATIENCE_MS = 10_000
"""People who see no effect of a click try again."""
HURRY_MS = 2_000
"""The same where nothing is asked of the server."""
SAMPLES = 120
EMPTY_GRAPH_BYTES = 5000
"""A picture of the graph is larger as soon as anything is drawn."""


class Browser:
    """The Prefect UI as a person sees it."""

    def __init__(self, page: Any, url: str, folder: Path) -> None:
        self.page = page
        self._url = f"{url}/v2"
        self._folder = folder

    def open(self, path: str) -> None:
        self.page.goto(f"{self._url}/{path}")

    def open_run(self, run: UUID, tab: str = "Logs") -> None:
        self.open(f"runs/flow-run/{run}?tab={tab}")
        self.page.get_by_role("tab", name=tab).wait_for()

    def show_state(self, run: UUID, state: str) -> None:
        self.open_run(run)
        self.page.get_by_text(state, exact=True).first.wait_for()
        graph = self.page.locator("canvas").first
        graph.wait_for()
        until(lambda: len(graph.screenshot()) > EMPTY_GRAPH_BYTES, "the graph is drawn", 60)

    def choose(self, action: str) -> Any:
        """Choose an action of the run's menu; returns the dialog that asks whether it is meant."""
        dialog = self.page.locator("[role=dialog], [role=alertdialog]")
        until(lambda: self._is_chosen(action, dialog), f"{action} is offered", 180)
        return dialog

    def _is_chosen(self, action: str, dialog: Any) -> bool:
        """Open the menu and choose; the menu closes by itself when the page renews what it shows."""
        item = self.page.get_by_role("menuitem", name=action, exact=True)
        if not item.is_visible():
            self.page.get_by_role("button", name="Open menu").first.click()
        if _appears(item, "visible", HURRY_MS):
            item.dispatch_event("click")
        return _appears(dialog, "visible", HURRY_MS)

    def confirm(self, dialog: Any, button: str) -> None:
        """Press a button of a dialog until the dialog goes.

        A server on SQLite may answer a click with 503 while runs write their states; people press again.
        """
        until(lambda: self._is_gone_after_press(dialog, button), f"the dialog goes after {button}", 180)

    def _is_gone_after_press(self, dialog: Any, button: str) -> bool:
        if dialog.count():
            dialog.get_by_role("button", name=button, exact=True).click()
        return _appears(dialog, "detached")

    def keep(self, name: str) -> None:
        self.page.wait_for_load_state("networkidle")
        self.page.screenshot(path=self._folder / f"{name}.png")


@pytest.fixture(scope="module")
def page() -> Generator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 860})
        page.set_default_timeout(WAIT_MS)
        yield page
        browser.close()


@pytest.fixture
def browser(page: Any, deployed: Deployed, tmp_path: Path) -> Browser:
    folder = Path(os.environ.get("EAGLE3_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return Browser(page, deployed.url, folder)


@pytest.fixture
def other_account() -> Generator[SimulatorProcess]:
    """An account of its own for the second run, so that neither sees what the other spends."""
    with SimulatorProcess(SCENARIO, [ANSWERS]) as process:
        yield process


def test_a_person_runs_it_from_the_ui(
    deployed: Deployed,
    look_alike: SimulatorProcess,  # noqa: F811
    other_account: SimulatorProcess,
    browser: Browser,
    tmp_path: Path,
) -> None:
    """Two runs side by side: one is watched, cancelled, retried and topped up, the other spends its budget."""
    watched = write_recipe(tmp_path / "watched.yaml", look_alike, SAMPLES, ["generation.in_flight=1"])
    frugal = write_recipe(tmp_path / "frugal.yaml", other_account, SAMPLES, ["generation.in_flight=16"])
    places = {"run_root": str(deployed.line.home / tmp_path.name), "home": str(deployed.line.home)}

    _fill_the_form(browser, deployed, recipe=str(watched), key_block=KEY_BLOCK, **places)
    browser.keep("run-form")
    run = _submit(browser, deployed, watched)
    other = deployed.start(
        "pipeline", recipe=str(frugal), until="generate", budget_usd=0.0002, key_block=KEY_BLOCK, **places
    )

    shown = "progress-watched-generation"
    until(lambda: shown in artifacts_of(deployed, run, "progress"), "the run shows its progress", 180)
    first = _progress_card(browser, run)
    until(lambda: _progress_card(browser, run) != first, "the progress card changes", 180)
    assert _spent_on(_progress_card(browser, run)) > 0
    browser.keep("progress")

    browser.open_run(run)
    browser.confirm(browser.choose("Cancel"), "Cancel Flow Run")
    until(lambda: deployed.read(run).state_name == "Cancelled", "the run is cancelled", 240)
    bought = look_alike.stats()
    assert bought["generations"] < SAMPLES
    browser.show_state(run, "Cancelled")
    browser.keep("cancelled")

    look_alike.set_key_limit(Decimal(bought["billed_usd"]) + Decimal("0.00005"))
    change_recipe(watched, "generation", in_flight=16)
    browser.open_run(run)
    browser.confirm(browser.choose("Retry"), "Retry")
    until(lambda: deployed.read(run).state_name == "AwaitingCredits", "the money ends", 240)
    look_alike.set_key_limit(None)
    browser.show_state(run, "AwaitingCredits")
    dialog = browser.choose("Resume")
    browser.keep("awaiting-credits")
    browser.confirm(dialog, "Resume")

    until(lambda: deployed.read(other).state_name == "BudgetReached", "the budget is spent", 240)
    assert Decimal(other_account.stats()["billed_usd"]) <= Decimal("0.0002")
    browser.show_state(other, "BudgetReached")
    dialog = browser.choose("Resume")
    dialog.get_by_label("New Budget Usd").fill("0.05")
    browser.keep("budget-reached")
    browser.confirm(dialog, "Resume")

    for one, account in ((run, look_alike), (other, other_account)):
        until(lambda one=one: deployed.read(one).state_name == "Completed", "the resumed run completes", 300)
        assert account.stats()["paid_more_than_once"] == 0
        assert len(log_lines_of(deployed, one)) < SAMPLES, "no line for every request"
    browser.show_state(run, "Completed")
    browser.keep("completed")
    _look_at_the_results(browser, run)


def _fill_the_form(browser: Browser, deployed: Deployed, **values: str) -> None:
    with deployed.client() as client:
        pipeline = client.read_deployment_by_name("pipeline/pipeline").id
    browser.open(f"deployments/deployment/{pipeline}/run")
    for name, value in values.items():
        browser.page.get_by_label(name).fill(value)
    browser.page.get_by_label("auto_resume").click()  # or the watcher may be faster than the person
    browser.page.get_by_label("until").click()
    browser.page.get_by_role("option", name="generate").click()


def _submit(browser: Browser, deployed: Deployed, recipe: Path) -> UUID:
    """Press Submit until the run is there."""

    def is_submitted() -> bool:
        browser.page.get_by_role("button", name="Submit").click()
        with suppress(AssertionError):
            until(lambda: _run_of(deployed, recipe) is not None, "the run is there", PATIENCE_MS / 1000)
        return _run_of(deployed, recipe) is not None

    until(is_submitted, "the form starts a run", 180)
    run = _run_of(deployed, recipe)
    assert run is not None
    return run


def _run_of(deployed: Deployed, recipe: Path) -> UUID | None:
    with deployed.client() as client:
        runs = client.read_flow_runs(limit=200)
    return next((run.id for run in runs if run.parameters.get("recipe") == str(recipe)), None)


def _appears(locator: Any, state: str, patience_ms: float = PATIENCE_MS) -> bool:
    """Tell whether something comes to a state within the time after which people would click again."""
    from playwright.sync_api import TimeoutError as NotYetError

    try:
        locator.wait_for(state=state, timeout=patience_ms)
    except NotYetError:
        return False
    return True


def _progress_card(browser: Browser, run: UUID) -> str:
    """Return what the card of the whole generation says."""
    browser.open_run(run, "Artifacts")
    card = browser.page.get_by_text(re.compile(rf"^\d+/{SAMPLES} · \$"))
    card.first.wait_for()
    card.first.scroll_into_view_if_needed()
    return card.first.inner_text()


def _spent_on(card: str) -> float:
    found = re.search(r"\$([0-9.]+) of \$", card)
    assert found is not None, card
    return float(found[1])


def _look_at_the_results(browser: Browser, run: UUID) -> None:
    """The spend table and the report, where a person finds them."""
    browser.open_run(run, "Artifacts")
    browser.page.get_by_role("link", name="spend-watched-providers").first.click()
    browser.page.get_by_text("planned $").first.wait_for()
    browser.keep("spend")
    browser.open_run(run, "Artifacts")
    browser.page.get_by_role("link", name="report-watched").first.click()
    address = browser.page.get_by_role("link", name="report of watched").first.get_attribute("href")
    assert address.startswith("http://127.0.0.1:"), "served, not a file"
    browser.page.goto(address)
    browser.page.get_by_role("heading", name="watched").first.wait_for()
    browser.keep("report")
