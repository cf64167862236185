"""The face of stage 2: buy every answer, seal the stage, stop cleanly on a signal."""

import contextlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

from eagle3.artifacts import RunDirectory, ShardRef, Stage, StageManifest
from eagle3.errors import RunRejectedError
from eagle3.generation.aftermath import settle_sealed
from eagle3.generation.selection import quantizations_of
from eagle3.generation.session import GenerationSession, open_session
from eagle3.generation.shards import (
    ENDPOINTS_NAME,
    FAILED_NAME,
    prompt_shards,
    read_prompts,
    write_failures,
    write_shard,
    written_shard,
)
from eagle3.generation.snapshots import known_endpoints
from eagle3.progress import Progress, no_progress
from eagle3.recipe import Recipe
from eagle3.tokens.probed import PROBES_NAME


def seal_completions(session: GenerationSession) -> StageManifest:
    """Seal the stage of a session whose shards are all written.

    Raises:
        RunRejectedError: More samples failed than the recipe allows; nothing is sealed, and running again retries those
            that may work.
    """
    stats = session.stats()
    failed, total = int(stats["failed"]), session.num_samples
    allowed = session.recipe.generation.max_failed_share
    failures = write_failures(session.stage, session.history)
    if failed > allowed * max(1, total):
        failed_samples = [sample.failure for sample in session.history.samples.values() if sample.failure is not None]
        kinds = Counter(failure.failure.value for failure in failed_samples)
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(kinds.items()))
        message = (
            f"{failed} of {total} samples failed ({reasons}), more than generation.max_failed_share {allowed:g} "
            f"allows. Reasons are in '{Stage.COMPLETIONS.value}/{FAILED_NAME}'. Run again to retry those that may "
            "work, or raise the share."
        )
        raise RunRejectedError(message)
    stage, shards = session.stage, list[ShardRef]()
    quantizations = quantizations_of(session.recipe, known_endpoints(stage.file(ENDPOINTS_NAME)))
    for prompt_shard in prompt_shards(session.run.sealed(Stage.PROMPTS)):
        shard = session.written.get(prompt_shard.path)
        if shard is None:
            prompts, _ = read_prompts(session.run, prompt_shard)
            shard = written_shard(stage, prompt_shard, prompts, session.history)
            if shard is None:
                shard = write_shard(stage, prompt_shard, prompts, session.history, quantizations)
        shards.append(shard)
    probes = stage.existing_shard(PROBES_NAME)
    return stage.seal([*shards, failures, *([probes] if probes is not None else [])], stats)


def generate(recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress) -> StageManifest:
    """Buy every answer of a run and seal the stage; reuse it when it is sealed. SIGINT and SIGTERM stop it cleanly.

    Raises:
        PausedError: Money ended, or somebody stopped; run again to continue.
        ProviderError: No request can work, or too many samples failed.
    """
    sealed = settle_sealed(recipe, run, target)
    if sealed is not None:
        return sealed
    with open_session(recipe, run, target, progress) as session, stopped_by_signals(session.stop):
        session.generate_all()
    return seal_completions(session)


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Generator[None, None, None]:
    """Call `stop` on SIGINT and SIGTERM instead of dying; a second SIGINT interrupts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier: dict[int, Any] = {}

    def stop_once(number: int, frame: FrameType | None) -> None:
        del frame
        stop()
        signal.signal(number, earlier[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        earlier[number] = signal.signal(number, stop_once)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
