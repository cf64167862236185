"""Opening a finished stage again: to retry failures of chosen kinds, or to buy more after a token budget was raised.

Nothing that was paid for is touched: the journal says that failures are open again, and the manifest goes. The files of
shards that gain an answer are written anew.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping

from eagle3.artifacts import MANIFEST_NAME, RunDirectory, Stage, sync_directory
from eagle3.generation.history import replay
from eagle3.generation.journal import Journal
from eagle3.recipe import Recipe
from eagle3.records import FailureClass, JsonObject


def reopen(recipe: Recipe, run: RunDirectory, classes: Collection[FailureClass] = ()) -> Mapping[FailureClass, int]:
    """Make the completions of a run unfinished again; the caller holds the run's lock.

    Args:
        recipe: Names the datasets.
        run: Where the stage lies; it may be unfinished already.
        classes: Failures that the next `generate` tries again, each with a fresh number of attempts.

    Returns:
        How many failures are open again.
    """
    path = run.stage_path(Stage.COMPLETIONS)
    datasets = [dataset.name for dataset in recipe.prompts.datasets]
    history, _ = replay(path, datasets, recipe.generation.budget_usd)
    failures = [sample.failure for sample in history.samples.values() if sample.failure is not None]
    chosen = [failure for failure in failures if failure.failure in classes]
    if chosen:
        asyncio.run(_write(run, sorted({failure.dataset for failure in chosen}), classes))
    manifest = path / MANIFEST_NAME
    if manifest.is_file():
        manifest.unlink()
        sync_directory(path)
    return Counter(failure.failure for failure in chosen)


async def _write(run: RunDirectory, datasets: Collection[str], classes: Collection[FailureClass]) -> None:
    journal = Journal(run.stage_path(Stage.COMPLETIONS))
    try:
        for dataset in datasets:
            entry: JsonObject = {"kind": "reopened", "classes": sorted(kind.value for kind in classes)}
            await journal.append(dataset, entry)
    finally:
        await journal.aclose()
