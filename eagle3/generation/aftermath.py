"""A finished stage whose books hold money in doubt: compared with the provider's until nothing is held.

A lost request that nothing explained when the stage was sealed stays held, and the manifest says so: the bill lies
between `spent_usd` and `at_most_usd`. The provider's own figures are late by minutes, so a later start asks again.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

from eagle3.artifacts import OpenStage, RunDirectory, Stage, StageManifest
from eagle3.errors import ConfigurationError, ProviderError
from eagle3.generation.doubts import Doubts
from eagle3.generation.figures import book_figures
from eagle3.generation.history import replay
from eagle3.generation.journal import Journal
from eagle3.generation.requests import longest_run_s
from eagle3.generation.shards import STATE_NAME, num_prompts, open_completions
from eagle3.providers.base import ChatProvider
from eagle3.providers.opening import open_provider
from eagle3.recipe import Recipe


def settle_sealed(recipe: Recipe, run: RunDirectory, target: Path) -> StageManifest | None:
    """Return the manifest of a sealed stage, after asking what its requests in doubt cost; None when it is not sealed.

    Answers are not touched, and the stage's digest stays. Without a network or a key nothing changes. The caller holds
    the run's lock.

    Args:
        recipe: Sections prompts and generation.
        run: Where the stage lies.
        target: Prepared Hugging Face directory, for a look-alike that has to know the tokenizer.
    """
    stage = open_completions(recipe, run)
    manifest = stage.manifest
    if manifest is None or not Decimal(manifest.stats.get("held_usd", "0")):
        return manifest
    totals = num_prompts(recipe, run.sealed(Stage.PROMPTS))

    async def ask() -> StageManifest:
        async with open_provider(recipe, stage.file(STATE_NAME), target) as provider:
            return await ask_the_books(provider, recipe, stage, totals, now_s=time.time())

    try:
        with ThreadPoolExecutor(1, thread_name_prefix="generation-books") as thread:  # the caller's may have a loop
            return thread.submit(asyncio.run, ask()).result()
    except (ProviderError, ConfigurationError):
        return manifest  # it says what is held; the next start asks again


async def ask_the_books(
    provider: ChatProvider, recipe: Recipe, stage: OpenStage, totals: Mapping[str, int], *, now_s: float
) -> StageManifest:
    """Look lost requests up, compare with the account, and write what is known now into the manifest.

    Args:
        provider: Keeps the books.
        recipe: Says how long a request can run.
        stage: Sealed.
        totals: Samples by dataset.
        now_s: Unix time.
    """
    manifest = stage.manifest
    assert manifest is not None
    history, ledger = replay(stage.path, totals, recipe.generation.budget_usd)
    held_usd = ledger.held_usd
    journal = Journal(stage.path)
    try:
        doubts = Doubts(provider, journal, history, ledger)
        await doubts.look_all_up(history.doubtful)
        longest_answer = max(dataset.sampling.max_tokens for dataset in recipe.prompts.datasets)
        rested_s = now_s - history.last_time_s - longest_run_s(provider, recipe.generation, longest_answer)
        await doubts.reconcile(is_quiet=rested_s > 0, since_s=rested_s)
    finally:
        await journal.aclose()
    if ledger.held_usd == held_usd:
        return manifest
    return stage.seal(manifest.shards, {**manifest.stats, **book_figures(history, ledger, totals)})
