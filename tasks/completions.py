"""Tasks: buying the answers, one task run per shard of about 500 prompts, all over one shared session."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import wait
from prefect.states import Cancelled

from eagle3.artifacts import ShardRef, Stage
from eagle3.errors import PausedError
from eagle3.generation import (
    GenerationSession,
    prompt_shards,
    seal_completions,
    settle_sealed,
    stopped_by_signals,
)
from eagle3.monitoring import open_guarded_session
from tasks.job import Job, StageRef
from tasks.progress import TaskProgress
from tasks.request_slots import request_slots
from tasks.spend import publish_spend


@task(name="generate-shard", task_run_name="generate {shard.path}", retries=0, cache_policy=NO_CACHE)
def generate_shard(session: GenerationSession, shard: ShardRef) -> dict[str, Any] | State[Any]:
    """Buy the answers to one shard of prompts; requests retry inside, so the task never does.

    A shard that waits for money, or was stopped, is no failure: it is Unfinished, without red bars and stack traces.
    """
    try:
        return asdict(session.generate_shard(shard))
    except PausedError as exc:
        return Cancelled(name="Unfinished", message="The run says why it stopped; the rest comes later.", data=exc)


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
    sealed = settle_sealed(job.recipe, job.run, Path(target))
    if sealed is not None:
        return StageRef.of(sealed)
    with request_slots(job.recipe.generation.in_flight), TaskProgress(job) as progress:
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
