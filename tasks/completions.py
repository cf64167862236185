"""Tasks: buying the answers, one task run per shard of about 500 prompts, all over one shared session."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import wait

from eagle3.artifacts import ShardRef, Stage
from eagle3.generation import (
    GenerationSession,
    open_completions,
    prompt_shards,
    seal_completions,
    stopped_by_signals,
)
from eagle3.monitoring import open_guarded_session
from tasks.job import Job, StageRef
from tasks.progress import TaskProgress
from tasks.spend import publish_spend


@task(name="generate-shard", task_run_name="generate {shard.path}", retries=0, cache_policy=NO_CACHE)
def generate_shard(session: GenerationSession, shard: ShardRef) -> dict[str, Any]:
    """Buy the answers to one shard of prompts; requests retry inside, so the task never does."""
    return asdict(session.generate_shard(shard))


@task(name="seal-completions", task_run_name="seal completions", retries=0, cache_policy=NO_CACHE)
def seal_stage(session: GenerationSession) -> StageRef:
    """Seal the stage once every shard is there."""
    return StageRef.of(seal_completions(session))


@contextmanager
def spending_shown(job: Job, session: GenerationSession) -> Generator[None]:
    """Show the spend at the end, however it ends."""
    try:
        yield
    finally:
        publish_spend(job, session.stats())


def generate_completions(job: Job, target: str, upstream: StageRef) -> StageRef:
    """Buy every answer over one session; all shards are under way at once, so that the slots stay full to the end.

    Not a task itself: it hands shards to tasks. A sealed stage is returned as it is, without a request.

    Raises:
        PreflightError: A check before the first request failed.
        AuditFailedError: Answers bought so far show that more of them would be useless.
        PausedError: Money ended, or somebody stopped; everything received is kept.
    """
    del upstream  # read from disk
    sealed = open_completions(job.recipe, job.run).manifest
    if sealed is not None:
        return StageRef.of(sealed)
    with TaskProgress(job) as progress:
        guarded = open_guarded_session(job.recipe, job.run, Path(target), progress)
        with guarded as session, spending_shown(job, session), stopped_by_signals(session.stop):
            prompts = job.run.sealed(Stage.PROMPTS)
            futures = [generate_shard.submit(session, shard) for shard in prompt_shards(prompts)]
            wait(futures)
            for future in futures:
                outcome = future.result(raise_on_failure=False)
                if isinstance(outcome, Exception):
                    raise outcome
        return seal_stage(session)
