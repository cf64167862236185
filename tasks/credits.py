"""Whether a run that waits for credits can go on: the account is asked, then one request of the run itself is tried.

The trial is the run's own next sample, bought through its journal and its budget, so a probe is never money spent on
nothing and never escapes the books.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from eagle3.artifacts import RunDirectory, Stage
from eagle3.errors import BudgetReachedError, CreditsExhaustedError, RunLockedError, StoppedError
from eagle3.generation import open_completions, open_session
from eagle3.progress import ProgressEvent
from eagle3.providers.opening import open_provider
from eagle3.recipe import OpenRouter, Recipe
from eagle3.target import prepare_target
from tasks.job import Job

_PROBE_NAME = ".probe"


class Credit(StrEnum):
    """What the account says about one waiting run."""

    AVAILABLE = "available"
    EMPTY = "empty"
    BUSY = "busy"
    """Somebody works in the run directory already."""
    ABSENT = "absent"
    """The run directory is not on this machine."""


def is_probed(run: RunDirectory) -> bool:
    """Tell whether the lock of a run is held for a trial request, which ends soon."""
    return (run.path / _PROBE_NAME).exists()


def find_credit(job: Job) -> Credit:
    """Say whether a waiting run can pay for its next request.

    Sends at most a few requests, one at a time, all of them samples the run still needs.

    Raises:
        Eagle3Error: The provider cannot be used for a reason other than money.
    """
    if not job.run.path.is_dir():
        return Credit.ABSENT
    if not isinstance(job.recipe.generation.provider, OpenRouter):
        return Credit.AVAILABLE  # nothing to ask; the run looks for itself
    if asyncio.run(_is_plainly_empty(job.recipe)):
        return Credit.EMPTY
    try:
        with job.run.locked(), _probing(job.run):
            return _try_one(job)
    except RunLockedError:
        return Credit.BUSY


async def _is_plainly_empty(recipe: Recipe) -> bool:
    """Ask the key endpoint, which costs nothing. It knows limits of the key, not the balance of the account."""
    async with open_provider(recipe) as provider:
        account = await provider.account()
    return account is not None and account.remaining_usd is not None and account.remaining_usd <= 0


def _try_one(job: Job) -> Credit:
    careful = Job(
        recipe_path=job.recipe_path,
        overrides=(*job.overrides, "generation.in_flight=1"),
        run_root=job.run_root,
        home=job.home,
    )
    if open_completions(careful.recipe, careful.run).manifest is not None:
        return Credit.AVAILABLE
    careful.run.sealed(Stage.PROMPTS)
    target = prepare_target(careful.recipe, Path(careful.home) / "models")
    seen: list[float] = []

    def stop_at_the_first_answer(event: ProgressEvent) -> None:
        if event.label:
            return
        seen.append(event.done)
        if event.done > seen[0]:
            session.stop()

    session = open_session(careful.recipe, careful.run, target, stop_at_the_first_answer)
    try:
        with session:
            session.generate_all()
    except CreditsExhaustedError:
        return Credit.EMPTY
    except (StoppedError, BudgetReachedError):
        return Credit.AVAILABLE
    return Credit.AVAILABLE


@contextmanager
def _probing(run: RunDirectory) -> Generator[None]:
    mark = run.path / _PROBE_NAME
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)
